// op         linear with weights of 8 bits, defined by int8_linear, fp8_linear and fp8_block_linear of ref/quant, and
//            gate_up_act of ref/activation.py in one; for few tokens
// maths      z[m, n] = Σ_k xq[m, k] · weight[n, k] · x_scale[m] · w_scale[n] (+ bias[n]), or in blocks of kGroup² with
//            x_scale[m, k / kGroup] · w_scale[n / kGroup, k / kGroup] inside the sum; y = z, or with a gate
//            y[m, n] = f(z[m, n]) · z[m, size + n] with size = out_features / 2
// tensors    x [num_tokens, in_features], rows x_stride apart: codes of F, or T, which is quantized here as quantize.cu does
//            it, or multiplied as it is; x_scale float32 [num_tokens] or [num_tokens, ⌈in_features / kGroup⌉], but if x is T the one scale of all,
//            or null; weight [out_features, in_features] codes of F; w_scale float32 [1], [out_features] or
//            [⌈out_features / kGroup⌉, ⌈in_features / kGroup⌉]; bias [out_features] T or null; y [num_tokens, out_features
//            or size] Y. in_features and x_stride are multiples of 16 bytes; x and weight at multiples of 16 bytes
// a block    owns an equal share of all steps: y is cut into tiles of 16 · kRowTiles rows of the weight (half of them gates,
//            if there are any), a tile into steps of 128 in_features, and the steps of all tiles in a row are shared out,
//            or if not split the tiles; its warps take them in turn and add up at the end of a tile. kStages − 1 steps of a
//            warp are on the way through shared memory, each weight once; x goes with them, or all of it before. Where a
//            tile is not one block's alone, the one that comes last adds up the parts
// template   F signed char (int8), e4m3, or Decoded: e4m3 that is decoded in registers, with x as it is; X the type of x;
//            T bf16 or fp16; Y the same or float; kActivation f, or
//            kNone without a gate; kBlocks whether scales are of blocks; kRowTiles; kTokenTiles of 8 tokens; kWarps; kStages
// sums       int8: int32, exact. e4m3: 128 products by the tensor cores, such sums in float32 step by step of a warp, then
//            warp by warp, part by part. Then the scales in float32 and one rounding, with a gate one of each z before it
// launcher   block 32 · kWarps, shared memory as Few.shared_bytes of engine/kernels/linear_w8.py says; partials [grid, 2,
//            8 · kTokenTiles, 16 · kRowTiles] int32 or float32; counters [grid], 0 before and after; num_tokens ≤ 8 ·
//            kTokenTiles; kStages ≥ 2; a block has `share` steps, or tiles, and the first `rest` blocks one more;
//            w_scale_step 0 if one scale is for all, else 1; with a gate and blocks size is a multiple of kGroup; fewer than 2^31
//            steps of all
#include "activation.cuh"
#include "coding.cuh"
#include "maximum.cuh"
#include "vec.cuh"

struct Decoded {};  // as F: codes of e4m3 that are decoded and multiplied by x as it is, where there are no FP8 tensor cores
template <>
struct Coded<Decoded> : Coded<e4m3> {};
template <typename F>
constexpr bool is_decoded = false;
template <>
constexpr bool is_decoded<Decoded> = true;

// Four codes of e4m3 as numbers of T in two registers, times 1 / kUnit.
template <typename T>
struct Decoder;
template <>
struct Decoder<fp16> {  // four bits of exponent where there are five
  static constexpr float kUnit = 256.0f;
  __device__ __forceinline__ static unsigned two(unsigned high_bytes) {
    return (high_bytes & 0x80008000u) | (high_bytes & 0x7f007f00u) >> 1;
  }
};
template <>
struct Decoder<bf16> {  // and where there are eight: times 2⁻¹²⁰, which is too little to be left to the products
  static constexpr float kUnit = 1.0f;
  __device__ __forceinline__ static unsigned two(unsigned high_bytes) {
    return multiply_bf16((high_bytes & 0x80008000u) | (high_bytes & 0x7f007f00u) >> 4, 0x7b807b80u);
  }
};
template <typename T>
__device__ __forceinline__ void decode4(unsigned codes, unsigned (&to)[2]) {
  to[0] = Decoder<T>::two(__byte_perm(codes, 0u, 0x1404)), to[1] = Decoder<T>::two(__byte_perm(codes, 0u, 0x3424));
}

constexpr int kStep = kGroup;  // columns of a step
constexpr int kPieces = 8;     // of 16 bytes, of a row in a step

// Piece p of row r lies at place p ^ (4 · (r % 2)) of its 128 bytes: the 8 pieces of two rows that lanes read at once are in
// different banks.
__device__ __forceinline__ int place(int row, int piece) { return row * kStep + (piece ^ (row % 2 * 4)) * 16; }

// The same for a token's 256 bytes.
__device__ __forceinline__ int wide_place(int row, int piece) { return row * 2 * kStep + (piece ^ row % 2) * 16; }

// Codes of all tokens [num_tokens][⌈in_features / kStep⌉ steps][kStep], the pieces of a step where place puts them, and their
// scales [num_tokens], or [num_tokens][steps] in groups. fixed: the scale of all, or null.
template <typename F, bool kGroups, int kThreads, typename T>
__device__ __forceinline__ void quantize_tokens(const T* x, index_t x_stride, const float* fixed, int num_tokens,
                                                int in_features, unsigned char* codes, float* scales) {
  constexpr int kKept = 7;  // pieces of eight numbers that a thread loads at once: 14336 of eight warps
  __shared__ unsigned largest[2][kThreads / 32];
  const int num_steps = (in_features + kStep - 1) / kStep, num_eights = num_steps * (kStep / 8);
  const int num_rounds = (num_eights + kKept * kThreads - 1) / (kKept * kThreads);
  for (int token = 0; token < num_tokens; ++token) {
    uint4 kept[kKept];
    unsigned of_token = 0;  // the largest magnitude
    const auto load = [&](int round) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int eight = (round * kKept + i) * kThreads + threadIdx.x;
        kept[i] = 8 * eight < in_features ? load16(x + token * x_stride + 8 * eight) : make_uint4(0, 0, 0, 0);
      }
    };
    const auto largest_of = [&](int i, float(&numbers)[8]) {
      unpack(kept[i], numbers, T{});
      unsigned found = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) found = max(found, magnitude(numbers[j]));
      return found;
    };
    for (int round = kGroups ? num_rounds - 1 : 0; round < num_rounds; ++round) {
      load(round);
      if (kGroups) break;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        float numbers[8];
        of_token = max(of_token, largest_of(i, numbers));
      }
    }
    float scale = fixed == nullptr ? 0.0f : *fixed;
    if (!kGroups && fixed == nullptr) {
      of_token = warp_max(of_token);
      if (threadIdx.x % 32 == 0) largest[token % 2][threadIdx.x / 32] = of_token;
      __syncthreads();
#pragma unroll
      for (int warp = 0; warp < kThreads / 32; ++warp) of_token = max(of_token, largest[token % 2][warp]);
      scale = scale_of<F>(of_token);
    }
    if (!kGroups && threadIdx.x == 0) scales[token] = scale;
    for (int round = num_rounds - 1; round >= 0; --round) {  // the last one is still here
      if (round < num_rounds - 1) load(round);
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int eight = (round * kKept + i) * kThreads + threadIdx.x, step = eight / 16;
        if ((round * kKept + i) * kThreads >= num_eights) break;  // for all lanes
        float numbers[8];
        const unsigned found = largest_of(i, numbers);
        if constexpr (kGroups) {
          scale = scale_of<F>(warp_max<16>(found));
          if (eight % 16 == 0 && eight < num_eights) scales[token * num_steps + step] = scale;
        }
        if (eight >= num_eights) continue;
        *reinterpret_cast<uint2*>(codes + (token * (num_steps - 1) + step) * kStep + place(token, eight % 16 / 2) +
                                  eight % 2 * 8) =
            make_uint2(code4(numbers, scale, F{}), code4(numbers + 4, scale, F{}));
      }
    }
  }
  __syncthreads();
}

template <typename F, typename X, typename T, typename Y, Activation kActivation, bool kBlocks, int kRowTiles,
          int kTokenTiles, int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, kRowTiles * kTokenTiles <= 2 ? 16 / kWarps : 1)
    linear_w8(const X* x, const float* x_scale, const typename Coded<F>::Bits* __restrict__ weight,
              const float* __restrict__ w_scale, const T* __restrict__ bias, Y* y, typename Coded<F>::Sum* partials,
              unsigned* counters, int num_tokens, int out_features, int in_features, int w_scale_step, bool split, int share,
              int rest, index_t x_stride) {
  using Sum = typename Coded<F>::Sum;
  constexpr bool kExact = static_cast<Sum>(0.5f) == 0;  // int8
  constexpr int kTokens = 8 * kTokenTiles, kRows = 16 * kRowTiles, kThreads = 32 * kWarps;
  constexpr bool kGated = kActivation != kNone, kDecoded = is_decoded<F>;
  constexpr bool kOwn = sizeof(X) == 2 && !kDecoded;  // x is quantized here
  constexpr int kXBytes = kStep * (kDecoded ? 2 : 1), kXPieces = kXBytes / 16;  // of a token in a step
  constexpr int kOuts = kGated ? kRows / 2 : kRows;
  constexpr int kFinished = kThreads / kOuts;  // tokens at once: a thread finishes one column of a tile
  constexpr int kPitch = kRows + 4;
  static_assert(!kBlocks || kGroup % kOuts == 0, "a tile lies within a block");
  constexpr int kRowScales = kGated ? 2 : 1;  // of blocks: of all rows of a tile, or of its gates and of the others
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int num_steps = (in_features + kStep - 1) / kStep;
  const int size = kGated ? out_features / 2 : out_features;
  const int unit = split ? 1 : num_steps;
  const auto begin_of = [&](int block) { return (block * share + min(block, rest)) * unit; };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
  const int first_tile = split ? begin / num_steps : blockIdx.x * share + min(static_cast<int>(blockIdx.x), rest);

  const int copied_tokens = kOwn ? 0 : num_tokens;
  const int stage_bytes = kRows * kStep + copied_tokens * kXBytes;
  unsigned char* const stages = dynamic_shared<unsigned char>() + warp * kStages * stage_bytes;
  Sum* const parts = reinterpret_cast<Sum*>(dynamic_shared<unsigned char>() + kWarps * kStages * stage_bytes);
  unsigned* const before = reinterpret_cast<unsigned*>(parts + 2 * kWarps * num_tokens * kPitch);
  unsigned char* const whole = reinterpret_cast<unsigned char*>(before + 4);  // [num_tokens][num_steps][kStep], if kOwn
  float* const x_scales = reinterpret_cast<float*>(whole + (kOwn ? num_tokens * num_steps * kStep : 0));  // as x_scale

  // What this warp copies next: step `next` of all, which is step `step_at` of tile `tile_at`.
  int next = begin + warp, tile_at = first_tile, step_at = next - first_tile * num_steps;
  while (step_at >= num_steps) step_at -= num_steps, ++tile_at;
  const auto advance = [&] {
    next += kWarps, step_at += kWarps;
    while (step_at >= num_steps) step_at -= num_steps, ++tile_at;
  };
  const auto copy_weight = [&](int stage) {
    if (next >= end) return;
    unsigned char* const to = stages + stage * stage_bytes;
    const int row = lane / kPieces, piece = lane % kPieces, k = step_at * kStep + 16 * piece;
    const int first_row = tile_at * kOuts + row;
    const typename Coded<F>::Bits* const from = weight + static_cast<index_t>(first_row) * in_features + k;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const int more = kGated ? i / 16 * 8 + i % 8 : i;  // rows beyond the first; what is not there is 0
      const bool valid = k < in_features && first_row + more < size;
      const int offset = more + (kGated && i % 16 >= 8 ? size : 0);
      cp_async(to + place(i + row, piece), valid ? from + static_cast<index_t>(offset) * in_features : weight, valid);
    }
  };
  const auto copy_x = [&](int at, int step, int stage) {
    if (kOwn || at >= end) return;
    unsigned char* const to = stages + stage * stage_bytes + kRows * kStep;
    for (int i = lane; i < num_tokens * kXPieces; i += 32) {
      const int token = i / kXPieces, piece = i % kXPieces, k = step * kStep + kStep / kXPieces * piece;
      const bool valid = k < in_features;
      unsigned char* const room = to + (kDecoded ? wide_place(token, piece) : place(token, piece));
      cp_async(room, x + (valid ? token * x_stride + k : 0), valid);
    }
  };

  // The weights are there whatever the kernel before does; x is not.
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    copy_weight(i);
    if constexpr (kOwn) cp_async_commit();
    advance();
  }
  int at = begin + warp, step = at - first_tile * num_steps;  // what this warp multiplies next
  while (step >= num_steps) step -= num_steps;
  dependency_wait();
  if constexpr (kOwn) {
    quantize_tokens<F, kBlocks, kThreads>(x, x_stride, x_scale, num_tokens, in_features, whole, x_scales);
  } else {
    int step_of_x = step;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      copy_x(at + i * kWarps, step_of_x, i);
      cp_async_commit();
      step_of_x += kWarps;
      while (step_of_x >= num_steps) step_of_x -= num_steps;
    }
    if constexpr (!kDecoded) {
      const int num_scales = kBlocks ? num_tokens * num_steps : num_tokens;
      for (int i = threadIdx.x; i < num_scales; i += kThreads) x_scales[i] = x_scale[i];
      __syncthreads();
    }
  }

  int stage = 0, buffer = 0;
  Sum sums[kRowTiles][kTokenTiles][4] = {};
  for (int tile = first_tile, first = first_tile * num_steps; first < end; ++tile, first += num_steps) {
    // Row i of the tile in the weight: with a gate 8 of them, then the 8 that they are multiplied by. This thread will
    // finish one column of y.
    const int out = threadIdx.x % kOuts, column = tile * kOuts + out;
    const int first_token = threadIdx.x / kOuts < kFinished ? threadIdx.x / kOuts : num_tokens;
    const int in_tile = kGated ? out / 8 * 16 + out % 8 : out;
    float row_scales[2] = {1.0f, 1.0f}, biases[2] = {};
#pragma unroll
    for (int i = 0; i < (kGated ? 2 : 1); ++i)
      if (column < size) {
        if constexpr (!kBlocks) row_scales[i] = w_scale[(column + i * size) * w_scale_step];
        if (bias != nullptr) biases[i] = to_float(bias[column + i * size]);
      }

    // Lane i has the scales of the blocks that this warp's i-th step meets, or of those 32 steps later, and so on.
    float block_scales[kRowScales];
    int lane_step = 0;

    const int tile_end = min(end, first + num_steps);
    for (; at < tile_end; at += kWarps) {
      cp_async_wait<kStages - 2>();  // this step has come
      __syncwarp();                  // for all lanes, and the one before is used up
      const int free = stage == 0 ? kStages - 1 : stage - 1;
      copy_weight(free);
      copy_x(next, step_at, free);
      cp_async_commit();
      advance();
      const unsigned char* const from = stages + stage * stage_bytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;

      float of_rows[kRowScales];  // of blocks
      if constexpr (kBlocks) {
        if (lane_step % 32 == 0)
#pragma unroll
          for (int rows = 0; rows < kRowScales; ++rows) {
            const int block = (tile * kOuts + rows * size) / kGroup, of = step + lane * kWarps;
            block_scales[rows] = of < num_steps ? w_scale[block * num_steps + of] : 0.0f;
          }
#pragma unroll
        for (int rows = 0; rows < kRowScales; ++rows)
          of_rows[rows] = __shfl_sync(kAllLanes, block_scales[rows], lane_step % 32);
        ++lane_step;
      }

      uint4 b[kTokenTiles][kXPieces / 4];  // tokens that are not there are read as the last one
      float scale_of[kTokenTiles][kRowScales][2];  // of blocks: that of two tokens times that of rows
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const int token = min(8 * t + group, num_tokens - 1);
        const unsigned char* const row = kOwn ? whole + (token * (num_steps - 1) + step) * kStep : from + kRows * kStep;
#pragma unroll
        for (int i = 0; i < kXPieces / 4; ++i)
          b[t][i] = load16(row + (kDecoded ? wide_place(token, i / 2 * 8 + 2 * pair + i % 2) : place(token, pair + 4 * i)));
        if constexpr (kBlocks)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int of = min(8 * t + 2 * pair + i, num_tokens - 1);
            const float one = kDecoded ? 1.0f : x_scales[of * num_steps + step];
#pragma unroll
            for (int rows = 0; rows < kRowScales; ++rows) scale_of[t][rows][i] = one * of_rows[rows];
          }
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint4 low[2], high[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          low[half] = load16(from + place(16 * i + group, pair + 4 * half));
          high[half] = load16(from + place(16 * i + 8 + group, pair + 4 * half));
        }
        // A thread's 16 bytes are columns 16·pair … of 64. Which of them the tensor cores call k = 4·pair is of no account
        // as long as weight and x agree: the first half serves one mma of 32, the last another. Decoded, each quarter
        // serves one of 16.
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          Sum part[4] = {};
          Sum(&to)[4] = kExact ? sums[i][t] : part;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if constexpr (kDecoded) {
              const unsigned lows[4] = {low[half].x, low[half].y, low[half].z, low[half].w};
              const unsigned highs[4] = {high[half].x, high[half].y, high[half].z, high[half].w};
              const uint4 x0 = b[t][2 * half], x1 = b[t][2 * half + 1];
              const unsigned xs[4][2] = {{x0.x, x0.y}, {x0.z, x0.w}, {x1.x, x1.y}, {x1.z, x1.w}};
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                unsigned of_low[2], of_high[2];
                decode4<T>(lows[j], of_low), decode4<T>(highs[j], of_high);
                const unsigned a[4] = {of_low[0], of_high[0], of_low[1], of_high[1]};
                mma_k16(part, a, xs[j], T{});
              }
            } else {
              const unsigned first_w[4] = {low[half].x, high[half].x, low[half].y, high[half].y};
              const unsigned second_w[4] = {low[half].z, high[half].z, low[half].w, high[half].w};
              const unsigned first_x[2] = {b[t][half].x, b[t][half].y}, second_x[2] = {b[t][half].z, b[t][half].w};
              mma_k32(to, first_w, first_x, F{});
              mma_k32(to, second_w, second_x, F{});
            }
          }
          if constexpr (!kExact)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if constexpr (kBlocks)
                sums[i][t][j] += part[j] * scale_of[t][kGated ? j / 2 : 0][j % 2];
              else
                sums[i][t][j] += part[j];
            }
        }
      }
      step += kWarps;
      while (step >= num_steps) step -= num_steps;
    }

    // The warps' sums, and from there to y, or to where the last block of this tile finds them. The other buffer is free
    // for the next tile when all have come to its barrier.
    const auto finish = [&](int token, auto sum_of) {
      if (column >= size) return;
      const float token_scale = kDecoded ? Decoder<T>::kUnit : kBlocks ? 1.0f : x_scales[token];
      const auto number_of = [&](int i) {
        return static_cast<float>(sum_of(in_tile + 8 * i)) * token_scale * row_scales[i] + biases[i];
      };
      float z = number_of(0);
      if constexpr (kGated) z = activation<kActivation>(to_float(from_float<T>(z))) * to_float(from_float<T>(number_of(1)));
      y[static_cast<index_t>(token) * size + column] = from_float<Y>(z);
    };
    Sum* const here = parts + buffer * kWarps * num_tokens * kPitch;
    buffer ^= 1;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = 8 * t + 2 * pair + j % 2;
          if (token < num_tokens) here[(warp * num_tokens + token) * kPitch + 16 * i + group + j / 2 * 8] = sums[i][t][j];
          sums[i][t][j] = 0;
        }
    __syncthreads();
    const auto sum_of_warps = [&](int token, int row) {
      Sum sum = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) sum += here[(other * num_tokens + token) * kPitch + row];
      return sum;
    };
    int first_block = blockIdx.x, others = 0;
    if (split) {
      const auto block_of = [&](int at_step) {
        const int long_end = rest * (share + 1);
        return at_step < long_end ? at_step / (share + 1) : rest + (at_step - long_end) / share;
      };
      first_block = block_of(first), others = block_of(first + num_steps - 1) - first_block;
    }
    if (others == 0) {
      for (int token = first_token; token < num_tokens; token += kFinished)
        finish(token, [&](int row) { return sum_of_warps(token, row); });
      continue;
    }
    const bool is_second = begin_of(first_block) < first;  // the first block has a part of another tile before this
    const auto part_of = [&](int block) {
      return partials + (2 * block + (block == first_block && is_second)) * static_cast<index_t>(kTokens * kRows);
    };
    for (int i = threadIdx.x; i < num_tokens * kRows; i += kThreads)
      part_of(blockIdx.x)[i] = sum_of_warps(i / kRows, i % kRows);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *before = atomicInc(counters + first_block, others);  // the last one brings it back to 0
    __syncthreads();
    if (static_cast<int>(*before) == others) {
      __threadfence();
      for (int token = first_token; token < num_tokens; token += kFinished)
        finish(token, [&](int row) {
          Sum sum = 0;
          for (int other = 0; other <= others; ++other)
            sum += __ldcg(part_of(first_block + other) + token * kRows + row);
          return sum;
        });
    }
    __syncthreads();  // before is read by all before it is written again
  }
}
