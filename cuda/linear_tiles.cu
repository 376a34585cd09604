// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one; for some tens of tokens:
//            cuda/linear.cu is for fewer
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n]); y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
//            with size = out_features / 2
// tensors    x [num_tokens, in_features] T, rows x_stride apart; weight [out_features, in_features] T; bias
//            [out_features] T or null; y [num_tokens, out_features or size] Y. in_features and x_stride are multiples of
//            8, x and weight at multiples of 16 bytes. With several splits: partials [num_splits, num_blocks of a split,
//            numbers of a tile] float32, and a counter for each block of a split, 0 before and after
// a block    owns kRows rows of the weight (half of them gates, if there are any), kTokens tokens and one of num_splits
//            parts of in_features, which it takes in steps of 64: kStages of them are on the way through shared memory,
//            whose rows of 128 bytes are swizzled
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; a warp has 16 · kTokenTiles
//            tokens and 16 · kRowTiles rows, and a block kTokenWarps times kRowWarps of them; kStages 3 or more
// sums       float32, in the order of in_features within a split, then split by split by the block that comes last; one
//            rounding at the end, and with a gate one of each z before it
// launcher   grid (⌈num_tokens / kTokens⌉, ⌈out_features / kRows⌉, num_splits), block 32 · kTokenWarps · kRowWarps, shared
//            memory kStages · (kTokens + kRows) · 128 bytes; no split is empty; prefetch: how many more steps are brought
//            to L2 while the kernel before runs
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
                 unsigned* counters, int num_tokens, int out_features, int in_features, index_t x_stride,
                 int prefetch) {
  constexpr int kThreads = 32 * kTokenWarps * kRowWarps;
  constexpr int kTokens = 16 * kTokenTiles * kTokenWarps, kRows = 16 * kRowTiles * kRowWarps;
  constexpr int kStageBytes = (kTokens + kRows) * kRowBytes;  // the rows of the weight, then the tokens
  constexpr int kLineRows = kThreads / kStepPieces;           // rows that the block copies at once
  static_assert(kRows % kLineRows == 0 && kTokens % kLineRows == 0, "every thread copies as much as every other");
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOuts = kGated ? kRows / 2 : kRows;  // columns of y
  const int size = kGated ? out_features / 2 : out_features;
  const int first_token = blockIdx.x * kTokens, first_row = blockIdx.y * kOuts;
  // Row i of the block in the weight: with a gate 8 of them, then the 8 that they are multiplied by. Behind the last
  // one there is none.
  const auto out_of = [&](int i) { return first_row + (kGated ? i / 16 * 8 + i % 8 : i); };
  const auto row_of = [&](int i) -> index_t { return out_of(i) + (kGated ? i / 8 % 2 * size : 0); };
  const int num_steps = (in_features + kStep - 1) / kStep;
  const int begin = static_cast<int>(static_cast<index_t>(num_steps) * blockIdx.z / gridDim.z);
  const int end = static_cast<int>(static_cast<index_t>(num_steps) * (blockIdx.z + 1) / gridDim.z);
  unsigned char* const shared = dynamic_shared<unsigned char>();

  const int line = threadIdx.x / kStepPieces, piece = threadIdx.x % kStepPieces;  // of what this thread copies
  const auto copy_weight = [&](int step) {
    unsigned char* const stage = shared + step % kStages * kStageBytes;
    const int k = step * kStep + 8 * piece;
#pragma unroll
    for (int i = 0; i < kRows / kLineRows; ++i) {
      const int row = line + i * kLineRows;
      const bool valid = out_of(row) < size && k < in_features;
      cp_async(stage + place(row, piece), weight + (valid ? row_of(row) * in_features + k : 0), valid);
    }
  };
  const auto copy_x = [&](int step) {
    unsigned char* const stage = shared + step % kStages * kStageBytes + kRows * kRowBytes;
    const int k = step * kStep + 8 * piece;
#pragma unroll
    for (int i = 0; i < kTokens / kLineRows; ++i) {
      const int token = line + i * kLineRows;
      const bool valid = first_token + token < num_tokens && k < in_features;
      cp_async(stage + place(token, piece), x + (valid ? (first_token + token) * x_stride + k : 0), valid);
    }
  };

  // The weights are there whatever the kernel before does; x is not.
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage)
    if (begin + stage < end) copy_weight(begin + stage);
  for (int i = threadIdx.x; i < 4 * kRows * min(prefetch, end - begin - kStages + 1); i += kThreads) {
    const int row = i / 4 % kRows, k = (begin + kStages - 1 + i / (4 * kRows)) * kStep + i % 4 * 16;
    if (out_of(row) < size) prefetch_l2(weight + row_of(row) * in_features + min(k, in_features - 8));
  }
  dependency_wait();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage)
    if (begin + stage < end) copy_x(begin + stage);
  cp_async_commit();
  cp_async_wait<0>();

  float sums[kTokenTiles][kRowTiles][2][4] = {};  // 16 tokens by twice 8 rows
  const int warp_token = warp % kTokenWarps * 16 * kTokenTiles, warp_row = warp / kTokenWarps * 16 * kRowTiles;
  const int x_row = warp_token + lane % 16, x_piece = lane / 16;
  const int w_row = warp_row + lane % 8 + lane / 16 * 8, w_piece = lane / 8 % 2;
  for (int step = begin; step < end; ++step) {
    cp_async_wait<kStages - 2>();  // this step has come
    __syncthreads();               // for all threads, and the one before is used up
    const int next = step + kStages - 1;
    if (next < end) {
      copy_weight(next);
      copy_x(next);
    }
    cp_async_commit();
    const unsigned char* const stage = shared + step % kStages * kStageBytes;
#pragma unroll
    for (int k = 0; k < kStepPieces; k += 2) {
      unsigned a[kTokenTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile)
        ldmatrix_x4(a[tile], stage + kRows * kRowBytes + place(x_row + 16 * tile, k + x_piece));
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
        unsigned b[4];
        ldmatrix_x4(b, stage + place(w_row + 16 * rows, k + w_piece));
        const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          mma_k16(sums[tile][rows][0], a[tile], low, T{});
          mma_k16(sums[tile][rows][1], a[tile], high, T{});
        }
      }
    }
  }

  if (gridDim.z > 1) {
    const int num_blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
    constexpr int kParts = kTokenTiles * kRowTiles * 2;  // float4s of a thread
    float4* const first =
        reinterpret_cast<float4*>(partials) + static_cast<index_t>(block) * kParts * kThreads + threadIdx.x;
    const index_t split = static_cast<index_t>(num_blocks) * kParts * kThreads;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
      first[blockIdx.z * split + part * kThreads] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    unsigned* const before = reinterpret_cast<unsigned*>(shared);  // how many splits have come before this one
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *before = atomicInc(counters + block, gridDim.z - 1);  // the last one brings it back to 0
    __syncthreads();
    if (*before < gridDim.z - 1) return;
    __threadfence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
      sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    }
    for (int other = 0; other < static_cast<int>(gridDim.z); ++other)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float(&sum)[4] = sums[part / (2 * kRowTiles)][part / 2 % kRowTiles][part % 2];
        const float4 theirs = __ldcg(first + other * split + part * kThreads);
        sum[0] += theirs.x, sum[1] += theirs.y, sum[2] += theirs.z, sum[3] += theirs.w;
      }
  }

  // Through shared memory, so that y is written 16 bytes at a time. A row there is 16 bytes longer: 8 tokens of a
  // column are in different banks.
  constexpr int kPitch = kOuts + kWidth<Y>, kPieces = kOuts / kWidth<Y>;
  static_assert(kTokens * kPitch * sizeof(Y) <= kStages * kStageBytes, "the tile of y fits where the stages were");
  Y* const tile_of_y = reinterpret_cast<Y*>(shared);  // [kTokens][kPitch]
  __syncthreads();
  const int group = lane / 4, pair = lane % 4;
#pragma unroll
  for (int rows = 0; rows < 2 * kRowTiles; rows += kGated ? 2 : 1) {
    const int row = warp_row + 8 * rows + 2 * pair, out = kGated ? warp_row / 2 + 4 * rows + 2 * pair : row;
    float biases[2][2] = {};  // of gates, or of all; of what they are multiplied by
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (bias != nullptr && first_row + out + i < size) {
        biases[0][i] = to_float(bias[row_of(row + i)]);
        if constexpr (kGated) biases[1][i] = to_float(bias[row_of(row + 8 + i)]);
      }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float z = sums[tile][rows / 2][rows % 2][i] + biases[0][i % 2];
        if constexpr (kGated) {
          const float up = to_float(from_float<T>(sums[tile][rows / 2][1][i] + biases[1][i % 2]));
          z = activation<kActivation>(to_float(from_float<T>(z))) * up;
        }
        tile_of_y[(warp_token + 16 * tile + group + i / 2 * 8) * kPitch + out + i % 2] = from_float<Y>(z);
      }
  }
  __syncthreads();
  const bool aligned = size % kWidth<Y> == 0 && is_aligned(y);
  for (int i = threadIdx.x; i < kTokens * kPieces; i += kThreads) {
    const int token = i / kPieces, out = i % kPieces * kWidth<Y>;
    if (first_token + token >= num_tokens || first_row + out >= size) continue;
    Y* const target = y + static_cast<index_t>(first_token + token) * size + first_row + out;
    const Y* const source = tile_of_y + token * kPitch + out;
    if (aligned) {
      store16(target, load16(source));
    } else {
#pragma unroll
      for (int j = 0; j < kWidth<Y>; ++j)
        if (first_row + out + j < size) target[j] = source[j];
    }
  }
}
