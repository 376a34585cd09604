// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one; the twin of linear_tiles.cu for
//            sm_90a
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n]); y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
//            with size = out_features / 2
// tensors    as those of linear_tiles.cu, but for partials [num_splits, num_blocks of a split, numbers of a tile] and a
//            counter for each block of a split
// a block    owns kRows rows of the weight (half of them gates, if there are any), kTokens tokens and one of num_splits
//            parts of in_features, which it takes in steps of 64: kStages − 2 of them are on the way through shared
//            memory, two are with the tensor cores. A warpgroup has 64 rows and all tokens
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kTokens 64, 128 or 256; kGroups
//            warpgroups; kStages 4 or more
// sums       float32, in the order of in_features within a split, then split by split by the block that comes last; one
//            rounding at the end, and with a gate one of each z before it
// launcher   grid (⌈num_tokens / kTokens⌉, ⌈out_features / kRows⌉, num_splits), block 128 · kGroups, shared memory
//            kStages · (kTokens + kRows) · 128 + 1024 bytes; no split is empty
#include "activation.cuh"
#include "ptx_sm90.cuh"
#include "vec.cuh"

constexpr int kStep = 64;       // numbers of a row in a step: 128 bytes
constexpr int kStepPieces = 8;  // of 16 bytes in them
constexpr int kRowBytes = 128;
constexpr int kGroupRows = 64;  // rows of a warpgroup

// Piece p of row r of a tile lies at place p ^ (r % 8) of the row, where wgmma looks for it.
__device__ __forceinline__ int place(int row, int piece) { return row * kRowBytes + ((piece ^ (row % 8)) * 16); }

template <typename T, typename Y, Activation kActivation, int kTokens, int kGroups, int kStages>
__global__ void __launch_bounds__(128 * kGroups)
    linear_tiles_sm90(const T* x, const T* __restrict__ weight, const T* __restrict__ bias, Y* y, float* partials,
                      unsigned* counters, int num_tokens, int out_features, int in_features, index_t x_stride,
                      int prefetch) {
  constexpr int kThreads = 128 * kGroups, kRows = kGroupRows * kGroups;
  constexpr int kStageBytes = (kTokens + kRows) * kRowBytes;  // the rows of the weight, then the tokens
  constexpr int kLineRows = kThreads / kStepPieces;           // rows that the block copies at once
  static_assert(kTokens % kLineRows == 0, "every thread copies as much as every other");
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

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
  unsigned char* shared = dynamic_shared<unsigned char>();
  shared += -shared_address(shared) & 1023;

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
  for (int stage = 0; stage < kStages - 2; ++stage)
    if (begin + stage < end) copy_weight(begin + stage);
  const int known = (begin + kStages - 2) * kStep, more = min(prefetch, min(in_features, end * kStep) - known);
  if (threadIdx.x < kRows && more > 0 && out_of(threadIdx.x) < size)
    prefetch_l2(weight + row_of(threadIdx.x) * in_features + known, more * static_cast<int>(sizeof(T)));
  dependency_wait();
#pragma unroll
  for (int stage = 0; stage < kStages - 2; ++stage)
    if (begin + stage < end) copy_x(begin + stage);
  cp_async_commit();
  cp_async_wait<0>();

  float sums[kTokens / 2] = {};  // of 8 tokens after 8 tokens, as mma m16n8k16 has them
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so that the compiler knows: one a warp
  for (int step = begin; step < end; ++step) {
    cp_async_wait<kStages - 3>();  // this step has come
    fence_async_shared();
    __syncthreads();  // for all threads, and the products of the step before the last have ended for all
    const unsigned char* const stage = shared + step % kStages * kStageBytes;
    const unsigned long long a = tile_descriptor(stage + warpgroup * kGroupRows * kRowBytes, 16, 8 * kRowBytes);
    const unsigned long long b = tile_descriptor(stage + kRows * kRowBytes, 16, 8 * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) wgmma_k_major(sums, advanced(a, 32 * k), advanced(b, 32 * k), true, T{});
    wgmma_commit();
    const int next = step + kStages - 2;
    if (next < end) {
      copy_weight(next);
      copy_x(next);
    }
    cp_async_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  settled(sums);

  if (gridDim.z > 1) {
    const int num_blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
    constexpr int kParts = kTokens / 8;  // float4s of a thread
    float4* const first =
        reinterpret_cast<float4*>(partials) + static_cast<index_t>(block) * kParts * kThreads + threadIdx.x;
    const index_t split = static_cast<index_t>(num_blocks) * kParts * kThreads;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      first[blockIdx.z * split + part * kThreads] =
          make_float4(sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]);
    unsigned* const before = reinterpret_cast<unsigned*>(shared);  // how many splits have come before this one
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *before = atomicInc(counters + block, gridDim.z - 1);  // the last one brings it back to 0
    __syncthreads();
    if (*before < gridDim.z - 1) return;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    for (int other = 0; other < static_cast<int>(gridDim.z); ++other)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4 theirs = __ldcg(first + other * split + part * kThreads);
        sums[4 * part] += theirs.x, sums[4 * part + 1] += theirs.y;
        sums[4 * part + 2] += theirs.z, sums[4 * part + 3] += theirs.w;
      }
  }

  // Through shared memory, so that y is written 16 bytes at a time. A row there is 16 bytes longer: the tokens that a
  // warp writes at once are in different banks.
  constexpr int kPitch = kOuts + kWidth<Y>, kPieces = kOuts / kWidth<Y>;
  static_assert(kTokens * kPitch * sizeof(Y) <= kStages * kStageBytes, "the tile of y fits where the stages were");
  Y* const tile_of_y = reinterpret_cast<Y*>(shared);  // [kTokens][kPitch]
  __syncthreads();
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, row = threadIdx.x / 32 * 16 + group;
  float biases[2] = {};  // of the two rows of this thread
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (bias != nullptr && out_of(row + 8 * half) < size) biases[half] = to_float(bias[row_of(row + 8 * half)]);
#pragma unroll
  for (int part = 0; part < kTokens / 8; ++part)
#pragma unroll
    for (int i = 0; i < (kGated ? 2 : 4); ++i) {
      float z = sums[4 * part + i] + biases[i / 2];
      if constexpr (kGated) {
        const float up = to_float(from_float<T>(sums[4 * part + 2 + i] + biases[1]));
        z = activation<kActivation>(to_float(from_float<T>(z))) * up;
      }
      const int out = kGated ? row / 16 * 8 + group : row + i / 2 * 8;
      tile_of_y[(8 * part + 2 * pair + i % 2) * kPitch + out] = from_float<Y>(z);
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
