// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one; for some tens of
//            tokens: linear.cu is for fewer
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n]); y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
//            with size = out_features / 2
// tensors    x [num_tokens, in_features] T, rows x_stride apart; weight [out_features, in_features] T; bias
//            [out_features] T or null; y [num_tokens, out_features or size] Y. in_features and x_stride are multiples of
//            8, x and weight at multiples of 16 bytes
// a block    owns kRows rows of the weight (half of them gates, if there are any), kTokens tokens and one of kSplits parts
//            of in_features, which it takes in steps of 64: kStages − 2 of them are on the way through shared memory, two
//            are with the tensor cores. A warpgroup has 64 rows and all tokens. The splits of a tile are a cluster, of
//            which each block adds up the sums of some tokens
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kTokens 32, 64, 128 or 256; kGroups
//            warpgroups; kStages 4 or more; kSplits 1, 2 or 4
// sums       float32, in the order of in_features within a split, then split by split; one rounding at the end, and with a
//            gate one of each z before it
// launcher   grid (⌈num_tokens / kTokens⌉, ⌈out_features / kRows⌉, kSplits), block 128 · kGroups, shared memory
//            kStages · (kTokens + kRows) · 128 + 1024 bytes
#include "activation.cuh"
#include "ptx_sm90.cuh"
#include "vec.cuh"

constexpr int kStep = 64;       // numbers of a row in a step: 128 bytes
constexpr int kStepPieces = 8;  // of 16 bytes in them
constexpr int kRowBytes = 128;
constexpr int kGroupRows = 64;  // rows of a warpgroup

// Piece p of row r of a tile lies at place p ^ (r % 8) of the row, where wgmma looks for it.
__device__ __forceinline__ int place(int row, int piece) { return row * kRowBytes + ((piece ^ (row % 8)) * 16); }

template <typename T, typename Y, Activation kActivation, int kTokens, int kGroups, int kStages, int kSplits>
__global__ void __cluster_dims__(1, 1, kSplits) __launch_bounds__(128 * kGroups)
    linear_tiles_sm90(const T* x, const T* __restrict__ weight, const T* __restrict__ bias, Y* y, int num_tokens,
                      int out_features, int in_features, index_t x_stride) {
  constexpr int kThreads = 128 * kGroups, kRows = kGroupRows * kGroups;
  constexpr int kStageBytes = (kTokens + kRows) * kRowBytes;  // the rows of the weight, then the tokens
  constexpr int kLineRows = kThreads / kStepPieces;           // rows that the block copies at once
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
  const int split = blockIdx.z, begin = num_steps * split / kSplits, end = num_steps * (split + 1) / kSplits;
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
      cp_async_stream(stage + place(row, piece), weight + (valid ? row_of(row) * in_features + k : 0), valid);
    }
  };
  const auto copy_x = [&](int step) {
    unsigned char* const stage = shared + step % kStages * kStageBytes + kRows * kRowBytes;
    const int k = step * kStep + 8 * piece;
#pragma unroll
    for (int i = 0; i * kLineRows < kTokens; ++i) {
      const int token = line + i * kLineRows;
      if (kTokens % kLineRows > 0 && token >= kTokens) break;
      const bool valid = first_token + token < num_tokens && k < in_features;
      cp_async(stage + place(token, piece), x + (valid ? (first_token + token) * x_stride + k : 0), valid);
    }
  };

  // The weights are there whatever the kernel before does; x is not.
#pragma unroll
  for (int stage = 0; stage < kStages - 2; ++stage)
    if (begin + stage < end) copy_weight(begin + stage);
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

  // The splits' sums as [kTokens][kPitch], where the stages were; a row is 16 bytes longer than it need be, so that the
  // threads of a warp write to different banks.
  constexpr int kPitch = kRows + 4, kPieces = kOuts / kWidth<Y>;
  static_assert(kTokens * kPitch * 4 <= kStages * kStageBytes, "the sums fit where the stages were");
  float* const tile = reinterpret_cast<float*>(shared);
  __syncthreads();
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4, row = threadIdx.x / 32 * 16 + group;
#pragma unroll
  for (int part = 0; part < kTokens / 8; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[(8 * part + 2 * pair + i % 2) * kPitch + row + i / 2 * 8] = sums[4 * part + i];
  if constexpr (kSplits > 1)
    cluster_barrier();
  else
    __syncthreads();
  const bool aligned = size % kWidth<Y> == 0 && is_aligned(y);
  for (int i = threadIdx.x; i < kTokens / kSplits * kPieces; i += kThreads) {
    const int token = i / kPieces * kSplits + split, out = i % kPieces * kWidth<Y>;
    if (first_token + token >= num_tokens || first_row + out >= size) continue;
    const int first = kGated ? out / 8 * 16 + out % 8 : out;  // of the rows of z, or of the gates
    const auto sum_of = [&](int first, float(&z)[kWidth<Y>]) {
#pragma unroll
      for (int j = 0; j < kWidth<Y>; j += 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < kSplits; ++other) {
          const float* const from = tile + token * kPitch + first + j;
          const float4 part = kSplits > 1 ? load16_of_block(from, other) : *reinterpret_cast<const float4*>(from);
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        z[j] = sum.x, z[j + 1] = sum.y, z[j + 2] = sum.z, z[j + 3] = sum.w;
      }
#pragma unroll
      for (int j = 0; j < kWidth<Y>; ++j)
        if (bias != nullptr && first_row + out + j < size) z[j] += to_float(bias[row_of(first + j)]);
    };
    float z[kWidth<Y>];
    sum_of(first, z);
    if constexpr (kGated) {
      float up[kWidth<Y>];
      sum_of(first + 8, up);
#pragma unroll
      for (int j = 0; j < kWidth<Y>; ++j)
        z[j] = activation<kActivation>(to_float(from_float<T>(z[j]))) * to_float(from_float<T>(up[j]));
    }
    store_row(y + static_cast<index_t>(first_token + token) * size, first_row + out, size, aligned, z);
  }
  if constexpr (kSplits > 1) cluster_barrier();  // nobody leaves while others read its sums
}
