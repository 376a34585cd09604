// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one; for some tens of tokens:
//            cuda/linear.cu is for fewer
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n]); y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
//            with size = out_features / 2
// tensors    x [num_tokens, in_features] T, rows x_stride apart; weight [out_features, in_features] T; bias
//            [out_features] T or null; y [num_tokens, out_features or size] Y. in_features and x_stride are multiples of
//            8, x and weight at multiples of 16 bytes. partials [num_blocks, 2, kTokens · kRows] float32; counters
//            [num_blocks], 0 before and after
// a block    owns an equal share of all steps: y is cut into tiles of kTokens tokens by kRows rows of the weight (half of
//            them gates, if there are any), a tile into steps of 64 in_features, and the steps of all tiles in a row are
//            shared out. Where a tile is not one block's alone, the one that comes last adds up the parts. kStages steps
//            are on the way through shared memory, whose rows of 128 bytes are swizzled
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; a warp has 16 · kTokenTiles
//            tokens and 16 · kRowTiles rows, and a block kTokenWarps times kRowWarps of them; kStages 3 or more
// sums       float32, in the order of in_features within a block's part, then part by part; one rounding at the end, and
//            with a gate one of each z before it
// launcher   grid num_blocks, at most the number of steps; block 32 · kTokenWarps · kRowWarps, shared memory kStages ·
//            (kTokens + kRows) · 128 + kTokens · (kRows · sizeof(Y) + 16) + 16 bytes
#include "activation.cuh"
#include "vec.cuh"

constexpr int kStep = 64;       // numbers of a row in a step: 128 bytes
constexpr int kStepPieces = 8;  // of 16 bytes in them
constexpr int kRowBytes = 128;

// Piece p of row r of a tile lies at place p ^ (r % 8) of the row: the 8 rows that ldmatrix reads at once, and the 8
// pieces of a row that are written at once, are in different banks.
__device__ __forceinline__ int place(int row, int piece) { return row * kRowBytes + ((piece ^ (row % 8)) * 16); }

template <typename T, typename Y, Activation kActivation, int kTokenTiles, int kRowTiles, int kTokenWarps, int kRowWarps,
          int kStages>
__global__ void __launch_bounds__(32 * kTokenWarps * kRowWarps)
    linear_tiles(const T* x, const T* __restrict__ weight, const T* __restrict__ bias, Y* y, float* partials,
                 unsigned* counters, int num_tokens, int out_features, int in_features, index_t x_stride) {
  constexpr int kThreads = 32 * kTokenWarps * kRowWarps;
  constexpr int kTokens = 16 * kTokenTiles * kTokenWarps, kRows = 16 * kRowTiles * kRowWarps;
  constexpr int kStageBytes = (kTokens + kRows) * kRowBytes;  // the rows of the weight, then the tokens
  constexpr int kLineRows = kThreads / kStepPieces;           // rows that the block copies at once
  static_assert(kRows % kLineRows == 0 && kTokens % kLineRows == 0, "every thread copies as much as every other");
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOuts = kGated ? kRows / 2 : kRows;  // columns of y
  constexpr int kPitch = kOuts + kWidth<Y>, kPieces = kOuts / kWidth<Y>;
  constexpr int kParts = kTokenTiles * kRowTiles * 2;  // float4s of a thread
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int size = kGated ? out_features / 2 : out_features;
  // Row i of a tile in the weight: with a gate 8 of them, then the 8 that they are multiplied by.
  const auto out_of = [&](int i) { return kGated ? i / 16 * 8 + i % 8 : i; };
  const auto row_of = [&](int first_out, int i) -> index_t {
    return first_out + out_of(i) + (kGated ? i / 8 % 2 * size : 0);
  };
  unsigned char* const shared = dynamic_shared<unsigned char>();
  Y* const tile_of_y = reinterpret_cast<Y*>(shared + kStages * kStageBytes);  // [kTokens][kPitch]
  unsigned* const before = reinterpret_cast<unsigned*>(tile_of_y + kTokens * kPitch);

  const int num_steps = (in_features + kStep - 1) / kStep;  // of a tile
  const int num_token_tiles = (num_tokens + kTokens - 1) / kTokens;
  const index_t all_steps = static_cast<index_t>((size + kOuts - 1) / kOuts) * num_token_tiles * num_steps;
  const auto begin_of = [&](int block) { return static_cast<int>(block * all_steps / gridDim.x); };
  const auto block_of = [&](int step) { return static_cast<int>(((step + 1ll) * gridDim.x - 1) / all_steps); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);

  const int line = threadIdx.x / kStepPieces, piece = threadIdx.x % kStepPieces;  // of what this thread copies
  const auto copy_weight = [&](int at, int tile, int step) {
    unsigned char* const stage = shared + at % kStages * kStageBytes;
    const int first_out = tile / num_token_tiles * kOuts, k = step * kStep + 8 * piece;
#pragma unroll
    for (int i = 0; i < kRows / kLineRows; ++i) {
      const int row = line + i * kLineRows;
      const bool valid = first_out + out_of(row) < size && k < in_features;
      cp_async(stage + place(row, piece), weight + (valid ? row_of(first_out, row) * in_features + k : 0), valid);
    }
  };
  const auto copy_x = [&](int at, int tile, int step) {
    unsigned char* const stage = shared + at % kStages * kStageBytes + kRows * kRowBytes;
    const int first_token = tile % num_token_tiles * kTokens, k = step * kStep + 8 * piece;
#pragma unroll
    for (int i = 0; i < kTokens / kLineRows; ++i) {
      const int token = line + i * kLineRows;
      const bool valid = first_token + token < num_tokens && k < in_features;
      cp_async(stage + place(token, piece), x + (valid ? (first_token + token) * x_stride + k : 0), valid);
    }
  };

  // The weights are there whatever the kernel before does; x is not.
  int tile = begin / num_steps, step = begin % num_steps;  // where the block is
  int next_tile = tile, next_step = step;                  // what it copies next
  const auto advance = [&] {
    if (++next_step == num_steps) next_step = 0, ++next_tile;
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copy_weight(begin + i, next_tile, next_step);
    advance();
  }
  dependency_wait();
  next_tile = tile, next_step = step;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copy_x(begin + i, next_tile, next_step);
    advance();
  }
  cp_async_commit();
  cp_async_wait<0>();

  float sums[kTokenTiles][kRowTiles][2][4] = {};  // 16 tokens by twice 8 rows
  const int warp_token = warp % kTokenWarps * 16 * kTokenTiles, warp_row = warp / kTokenWarps * 16 * kRowTiles;
  const int x_row = warp_token + lane % 16, x_piece = lane / 16;
  const int w_row = warp_row + lane % 8 + lane / 16 * 8, w_piece = lane / 8 % 2;
  for (int at = begin; at < end; ++at) {
    cp_async_wait<kStages - 2>();  // this step has come
    __syncthreads();               // for all threads, and the one before is used up
    const unsigned char* const stage = shared + at % kStages * kStageBytes;
#pragma unroll
    for (int k = 0; k < kStepPieces; k += 2) {
      unsigned a[kTokenTiles][4];
#pragma unroll
      for (int tokens = 0; tokens < kTokenTiles; ++tokens)
        ldmatrix_x4(a[tokens], stage + kRows * kRowBytes + place(x_row + 16 * tokens, k + x_piece));
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
        unsigned b[4];
        ldmatrix_x4(b, stage + place(w_row + 16 * rows, k + w_piece));
        const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int tokens = 0; tokens < kTokenTiles; ++tokens) {
          mma_k16(sums[tokens][rows][0], a[tokens], low, T{});
          mma_k16(sums[tokens][rows][1], a[tokens], high, T{});
        }
      }
      if (k > 0) continue;  // the copies are started while the tensor cores have their first work
      const int next = at + kStages - 1;
      if (next < end) {
        copy_weight(next, next_tile, next_step);
        copy_x(next, next_tile, next_step);
      }
      cp_async_commit();
      advance();
    }
    if (++step < num_steps && at + 1 < end) continue;

    // This block's part of the tile is done.
    bool complete = true;
    if (at + 1 - begin < num_steps || step < num_steps) {
      const int first = tile * num_steps, first_block = block_of(first);
      const int others = block_of(first + num_steps - 1) - first_block;
      const bool is_second = begin_of(first_block) < first;  // the first block has a part of another tile before this
      const auto part_of = [&](int block) {
        return reinterpret_cast<float4*>(partials) +
               (2 * block + (block == first_block && is_second)) * static_cast<index_t>(kParts * kThreads) + threadIdx.x;
      };
      if (others > 0) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
          part_of(blockIdx.x)[part * kThreads] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *before = atomicInc(counters + first_block, others);  // the last one brings it back to 0
        __syncthreads();
        complete = static_cast<int>(*before) == others;
        if (complete) {
          __threadfence();
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
          }
          for (int other = 0; other <= others; ++other)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
              const float4 theirs = __ldcg(part_of(first_block + other) + part * kThreads);
              sum[0] += theirs.x, sum[1] += theirs.y, sum[2] += theirs.z, sum[3] += theirs.w;
            }
        }
      }
    }

    if (complete) {
      // Through shared memory, so that y is written 16 bytes at a time. A row there is 16 bytes longer: 8 tokens of a
      // column are in different banks.
      const int first_token = tile % num_token_tiles * kTokens, first_out = tile / num_token_tiles * kOuts;
#pragma unroll
      for (int rows = 0; rows < 2 * kRowTiles; rows += kGated ? 2 : 1) {
        const int row = warp_row + 8 * rows + 2 * pair, out = kGated ? warp_row / 2 + 4 * rows + 2 * pair : row;
        float biases[2][2] = {};  // of gates, or of all; of what they are multiplied by
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (bias != nullptr && first_out + out + i < size) {
            biases[0][i] = to_float(bias[row_of(first_out, row + i)]);
            if constexpr (kGated) biases[1][i] = to_float(bias[row_of(first_out, row + 8 + i)]);
          }
#pragma unroll
        for (int tokens = 0; tokens < kTokenTiles; ++tokens)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float z = sums[tokens][rows / 2][rows % 2][i] + biases[0][i % 2];
            if constexpr (kGated) {
              const float up = to_float(from_float<T>(sums[tokens][rows / 2][1][i] + biases[1][i % 2]));
              z = activation<kActivation>(to_float(from_float<T>(z))) * up;
            }
            tile_of_y[(warp_token + 16 * tokens + group + i / 2 * 8) * kPitch + out + i % 2] = from_float<Y>(z);
          }
      }
      __syncthreads();
      const bool aligned = size % kWidth<Y> == 0 && is_aligned(y);
      for (int i = threadIdx.x; i < kTokens * kPieces; i += kThreads) {
        const int token = i / kPieces, out = i % kPieces * kWidth<Y>;
        if (first_token + token >= num_tokens || first_out + out >= size) continue;
        Y* const target = y + static_cast<index_t>(first_token + token) * size + first_out + out;
        const Y* const source = tile_of_y + token * kPitch + out;
        if (aligned) {
          store16(target, load16(source));
        } else {
#pragma unroll
          for (int j = 0; j < kWidth<Y>; ++j)
            if (first_out + out + j < size) target[j] = source[j];
        }
      }
    }
    ++tile, step = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
      sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    }
  }
}
