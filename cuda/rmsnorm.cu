// RMSNorm, alone and fused with the residual add. ref.rmsnorm: rmsnorm, add_rmsnorm.
// new_residual = x + residual;  y = new_residual / sqrt(mean(new_residual²) + eps) · weight   (residual = 0 if alone)
// x, residual [num_rows, hidden_size] T with a stride between rows; weight [hidden_size] T; y [num_rows, hidden_size] T.
// A block owns a row, and a thread kRounds pieces of 16 bytes of it, which stay in registers between the passes.
// T: bf16, fp16, float. kRounds: 1 to 8.
// float32; the sum over a thread's pieces, then a tree over lanes and warps; new_residual is rounded to T before the
//   norm reads it, y once. The launcher: grid = num_rows, block = whole warps, threads · kRounds · kWidth<T> ≥ hidden_size.
#include "reduce.cuh"
#include "vec.cuh"

// The piece of the row that a thread owns in a round begins here.
template <typename T>
__device__ __forceinline__ int piece(int round) {
  return (round * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
}

// Norms the row in x and writes it; `weight` is already there.
template <typename T, int kRounds>
__device__ __forceinline__ void norm_row(const float (&x)[kRounds][kWidth<T>], const float (&weight)[kRounds][kWidth<T>],
                                         T* y, int hidden_size, float eps) {
  __shared__ float scratch[kMaxWarps];
  float sum = 0.0f;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum += x[round][i] * x[round][i];
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(hidden_size) + eps);
  const bool aligned = is_aligned(y);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float normed[kWidth<T>];
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) normed[i] = x[round][i] * scale * weight[round][i];
    store_row(y, piece<T>(round), hidden_size, aligned, normed);
  }
}

template <typename T, int kRounds>
__device__ __forceinline__ void load_rounds(const T* row, int hidden_size, float (&x)[kRounds][kWidth<T>]) {
  const bool aligned = is_aligned(row);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) load_row(row, piece<T>(round), hidden_size, aligned, x[round]);
}

template <typename T, int kRounds>
__global__ void __launch_bounds__(1024)
    rmsnorm(const T* x, const T* weight, T* y, int hidden_size, index_t x_stride, float eps) {
  float values[kRounds][kWidth<T>], weights[kRounds][kWidth<T>];
  load_rounds<T, kRounds>(weight, hidden_size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, hidden_size, values);
  dependency_launch();
  norm_row<T, kRounds>(values, weights, y + row * hidden_size, hidden_size, eps);
}

// new_residual may be residual itself: a thread writes only what it alone has read.
template <typename T, int kRounds>
__global__ void __launch_bounds__(1024)
    add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* new_residual, int hidden_size,
                index_t x_stride, index_t residual_stride, index_t new_residual_stride, float eps) {
  float values[kRounds][kWidth<T>], weights[kRounds][kWidth<T>], residuals[kRounds][kWidth<T>];
  load_rounds<T, kRounds>(weight, hidden_size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, hidden_size, values);
  load_rounds<T, kRounds>(residual + row * residual_stride, hidden_size, residuals);
  dependency_launch();
  T* out = new_residual + row * new_residual_stride;
  const bool aligned = is_aligned(out);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i)
      values[round][i] = to_float(from_float<T>(values[round][i] + residuals[round][i]));
    store_row(out, piece<T>(round), hidden_size, aligned, values[round]);
  }
  norm_row<T, kRounds>(values, weights, y + row * hidden_size, hidden_size, eps);
}
