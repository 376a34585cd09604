// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; for up to some tens of tokens
// maths      z[m, n] = Σ_k x[m, k] · (q[n, k] − zero[n, g(k)]) · scale[n, g(k)] (+ bias[n]); y = z, or with a gate
//            y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    x [num_tokens, in_features] T, rows x_stride apart, at multiples of 16 bytes; weight, scales fp16 and zeros
//            uint8 packed as include/grouped.cuh says (zeros null: all are 8); bias [out_features] T or null; y [num_tokens, size] Y. With a gate a tile of 16 packed rows is 8 gates and the 8 that
//            they are multiplied by, and size = out_features / 2
// a block    owns an equal share of all steps: y is cut into tiles of 16 · kRowTiles rows, a tile into steps of 128 columns,
//            and the steps of all tiles in a row are shared out; its warps take them in turn and add up at the end of a
//            tile. A warp's weights go straight into registers, a step ahead; its x goes through shared memory, kStages − 1
//            steps ahead. Where a tile is not one block's alone, the block that comes last adds up the parts
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kZeros whether there are zeros;
//            kGroups of a step: 4 if groups are of 32 columns, 2 if of 64, else 1; kRowTiles; kTokenTiles of 8 tokens;
//            kWarps; kStages ≥ 2
// sums       float32: a group's (or 128 columns') q · x and zero · x by the tensor cores, their difference times the scale;
//            step by step of a warp, warp by warp, part by part; one rounding at the end, and with a gate one of each z
//            before it
// launcher   grid at most the number of steps, block 32 · kWarps, shared memory as Few.shared_bytes of
//            engine/kernels/linear_w4.py says; partials [grid, 2, 8 · kTokenTiles, 16 · kRowTiles] float32; counters [grid],
//            0 before and after; num_tokens ≤ 8 · kTokenTiles; group_shift: groups are 128 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "grouped.cuh"
#include "vec.cuh"

constexpr int kStep = 2 * kPackedStep;  // columns of a step
constexpr int kRowBytes = 2 * kStep;    // of a step of a token
constexpr int kPieces = kRowBytes / 16;

template <int kCount>  // 2 or 4 numbers beside each other, at a multiple of as many bytes as they take
__device__ __forceinline__ void load_words(const unsigned* from, unsigned (&to)[kCount]) {
  static_assert(kCount == 2 || kCount == 4, "");
  if constexpr (kCount == 4) {
    const uint4 all = load16(from);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  } else {
    to[0] = from[0], to[1] = from[1];
  }
}
template <int kCount>
__device__ __forceinline__ void load_words(const unsigned short* from, unsigned (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = reinterpret_cast<const unsigned*>(from)[i];
}

template <typename T, typename Y, Activation kActivation, bool kZeros, int kGroups, int kRowTiles, int kTokenTiles,
          int kWarps, int kStages>
__global__ void __launch_bounds__(32 * kWarps, kRowTiles * kTokenTiles <= 4 ? 16 / kWarps : 1)
    linear_w4(const T* x, const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
              const unsigned char* __restrict__ zeros, const T* __restrict__ bias, Y* y, float* partials,
              unsigned* counters, int num_tokens, int out_features, int in_features, int group_shift, index_t x_stride) {
  constexpr int kTokens = 8 * kTokenTiles, kRows = 16 * kRowTiles, kThreads = 32 * kWarps;
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOuts = kGated ? kRows / 2 : kRows;
  constexpr int kPitch = kRows + 4;
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int num_steps = (in_features + kStep - 1) / kStep, num_quads = (out_features + 63) / 64;  // of row tiles
  const int size = kGated ? out_features / 2 : out_features;
  const int last_group = (in_features - 1) / (kStep / kGroups) >> group_shift;
  const index_t all_steps = static_cast<index_t>(num_quads * (4 / kRowTiles)) * num_steps;
  const auto begin_of = [&](int block) { return static_cast<int>(block * all_steps / gridDim.x); };
  const auto block_of = [&](int step) { return static_cast<int>(((step + 1ll) * gridDim.x - 1) / all_steps); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);

  const int stage_bytes = num_tokens * kRowBytes;
  unsigned char* const stages = dynamic_shared<unsigned char>() + warp * kStages * stage_bytes;
  float* const parts = reinterpret_cast<float*>(dynamic_shared<unsigned char>() + kWarps * kStages * stage_bytes);
  unsigned* const before = reinterpret_cast<unsigned*>(parts + kWarps * 8 * kPitch);

  // What this warp loads next: step `next` of all, which is step `step_at` of tile `tile_at`.
  int next = begin + warp, tile_at = next / num_steps, step_at = next % num_steps;
  const unsigned tile_stride = num_steps * 64u;  // 16 bytes each, of which there are fewer than 2^32
  const auto advance = [&] {
    next += kWarps, step_at += kWarps;
    if (step_at < num_steps) return;
    tile_at += step_at / num_steps, step_at %= num_steps;
  };
  const auto first_address = [&] { return tile_at * kRowTiles * tile_stride + step_at * 64u; };
  const uint4* const weights = reinterpret_cast<const uint4*>(weight);
  uint4 w[kRowTiles][2];
  unsigned scale_pairs[kGroups][kRowTiles], zero_pairs[kGroups][kZeros ? kRowTiles / 2 : 1];
  const auto load_scales = [&] {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const unsigned of = min(kGroups * step_at + g >> group_shift, last_group);
      const unsigned from = ((of * num_quads + tile_at * kRowTiles / 4) * 8 + group) * 4 + tile_at * kRowTiles % 4;
      load_words(reinterpret_cast<const unsigned*>(scales) + from, scale_pairs[g]);
      if constexpr (kZeros) load_words(reinterpret_cast<const unsigned short*>(zeros) + from, zero_pairs[g]);
    }
  };

  // Piece p of token m lies at place p ^ (m % 8) of 8: what ldmatrix reads at once is in different banks.
  const auto copy_x = [&](int step, int stage) {
    unsigned char* const to = stages + stage * stage_bytes;
    for (int i = lane; i < num_tokens * kPieces; i += 32) {
      const int token = i / kPieces, piece = i % kPieces, k = step * kStep + 8 * piece;
      const bool valid = k < in_features;
      cp_async(to + token * kRowBytes + (piece ^ token % 8) * 16, valid ? x + token * x_stride + k : x, valid);
    }
  };

  // The weights are there whatever the kernel before does; x is not.
  if (next < end) {
    const unsigned first = first_address() + lane;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) w[i][half] = load16_stream(weights + (first + i * tile_stride + 32 * half));
    load_scales();
  }
  advance();
  dependency_wait();
  int next_x = begin + warp, step_x = next_x % num_steps;
  const auto advance_x = [&] {
    next_x += kWarps, step_x += kWarps;
    while (step_x >= num_steps) step_x -= num_steps;
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (next_x < end) copy_x(step_x, i);
    cp_async_commit();
    advance_x();
  }

  // Not a constant to the compiler, which would load it anew wherever it is used.
  const unsigned mask = 0x000f000fu | static_cast<unsigned>(num_tokens >> 31);
  int stage = 0, at = begin + warp;
  float sums[kRowTiles][kTokenTiles][4] = {};
  for (int tile = begin / num_steps; begin < end && tile <= (end - 1) / num_steps; ++tile) {
    const int tile_end = min(end, (tile + 1) * num_steps);
    for (; at < tile_end; at += kWarps) {
      cp_async_wait<kStages - 2>();  // this step has come
      __syncwarp();                  // for all lanes, and the one before is used up
      if (next_x < end) copy_x(step_x, stage == 0 ? kStages - 1 : stage - 1);
      cp_async_commit();
      advance_x();
      const unsigned char* const from = stages + stage * stage_bytes;
      stage = stage + 1 == kStages ? 0 : stage + 1;

      unsigned b[kTokenTiles][8][2];  // by mma; tokens that are not there are read as the last one
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const int token = min(8 * t + lane % 8, num_tokens - 1), piece = 2 * j + lane / 8;
          unsigned both[4];
          ldmatrix_x4(both, from + token * kRowBytes + (piece ^ token % 8) * 16);
          b[t][j][0] = both[0], b[t][j][1] = both[1], b[t][j + 1][0] = both[2], b[t][j + 1][1] = both[3];
        }
      const unsigned first = first_address() + lane;
      constexpr int kMmas = 8 / kGroups;  // of a group
      float sum_x[kGroups][kTokenTiles][4];  // of a group, the same in all rows
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const unsigned ones[4] = {Nibbles<T>::kOnes, Nibbles<T>::kOnes, Nibbles<T>::kOnes, Nibbles<T>::kOnes};
          sum_x[g][t][0] = sum_x[g][t][1] = sum_x[g][t][2] = sum_x[g][t][3] = 0.0f;
#pragma unroll
          for (int j = g * kMmas; j < (g + 1) * kMmas; ++j) mma_k16(sum_x[g][t], ones, b[t][j], T{});
        }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        float part[kTokenTiles][4], low = 0.0f, high = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned words[4] = {w[i][half].x, w[i][half].y, w[i][half].z, w[i][half].w};
          unsigned a[4][4];
#pragma unroll
          for (int j = 0; j < 4; ++j) unpack_nibbles(words[j], mask, a[j], T{});
          if (next < end) w[i][half] = load16_stream(weights + (first + i * tile_stride + 32 * half));
#pragma unroll
          for (int j = 4 * half; j < 4 * half + 4; ++j) {
            const int g = j / kMmas;
            if (j % kMmas == 0) {
              low = to_float(fp16{static_cast<unsigned short>(scale_pairs[g][i])}) / Nibbles<T>::unit(0);
              high = to_float(fp16{static_cast<unsigned short>(scale_pairs[g][i] >> 16)}) / Nibbles<T>::unit(1);
              const unsigned pair_of = kZeros ? zero_pairs[g][kZeros ? i / 2 : 0] >> i % 2 * 16 : 0x0808u;
#pragma unroll
              for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                  const float zero = static_cast<float>(pair_of >> 8 * (c / 2) & 255u);
                  part[t][c] = -(Nibbles<T>::kOffset + zero) * Nibbles<T>::unit(c / 2) * sum_x[g][t][c % 2];
                }
            }
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) mma_k16(part[t], a[j % 4], b[t][j], T{});
            if ((j + 1) % kMmas != 0) continue;
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
              sums[i][t][0] += low * part[t][0], sums[i][t][1] += low * part[t][1];
              sums[i][t][2] += high * part[t][2], sums[i][t][3] += high * part[t][3];
            }
          }
        }
      }
      if (next < end) load_scales();
      advance();
    }

    // The warps' sums, 8 tokens at a time, and from there to y, or to where the last block of this tile finds them.
    const int first = tile * num_steps, first_block = block_of(first);
    const int others = block_of(first + num_steps - 1) - first_block;
    const bool is_second = begin_of(first_block) < first;  // the first block has a part of another tile before this
    const auto part_of = [&](int block) {
      return partials + (2 * block + (block == first_block && is_second)) * static_cast<index_t>(kTokens * kRows);
    };
    const int first_out = tile * kOuts;
    const auto finish = [&](int token, int out, auto sum_of) {
      if (first_out + out >= size || token >= num_tokens) return;
      const int row = kGated ? out / 8 * 16 + out % 8 : out;
      float z = sum_of(row);
      if (bias != nullptr) z += to_float(bias[first_out + out]);
      if constexpr (kGated) {
        float up = sum_of(row + 8);
        if (bias != nullptr) up += to_float(bias[size + first_out + out]);
        z = activation<kActivation>(to_float(from_float<T>(z))) * to_float(from_float<T>(up));
      }
      y[static_cast<index_t>(token) * size + first_out + out] = from_float<Y>(z);
    };
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          parts[(warp * 8 + 2 * pair + j % 2) * kPitch + 16 * i + group + j / 2 * 8] = sums[i][t][j];
          sums[i][t][j] = 0.0f;
        }
      __syncthreads();
      const auto sum_of_warps = [&](int token, int row) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum += parts[(other * 8 + token) * kPitch + row];
        return sum;
      };
      if (others == 0) {
        for (int i = threadIdx.x; i < 8 * kOuts; i += kThreads)
          finish(8 * t + i / kOuts, i % kOuts, [&](int row) { return sum_of_warps(i / kOuts, row); });
      } else {
        for (int i = threadIdx.x; i < 8 * kRows; i += kThreads)
          part_of(blockIdx.x)[8 * t * kRows + i] = sum_of_warps(i / kRows, i % kRows);
      }
      __syncthreads();
    }
    if (others == 0) continue;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *before = atomicInc(counters + first_block, others);  // the last one brings it back to 0
    __syncthreads();
    if (static_cast<int>(*before) == others) {
      __threadfence();
      for (int i = threadIdx.x; i < min(kTokens, num_tokens) * kOuts; i += kThreads)
        finish(i / kOuts, i % kOuts, [&](int row) {
          float sum = 0.0f;
          for (int other = 0; other <= others; ++other)
            sum += __ldcg(part_of(first_block + other) + i / kOuts * kRows + row);
          return sum;
        });
    }
    __syncthreads();  // before is read by all before it is written again
  }
}
