// LayerNorm, alone and fused with the residual add. ref.layernorm: layernorm, add_layernorm.
// new_residual = x + residual;  y = (new_residual − mean) / sqrt(var + eps) · weight + bias   (residual = 0 if alone)
// x, residual [num_rows, size] T with a stride between rows; weight, bias [num_weights, size] T, bias may be null; row
//   r has weight r % num_weights, so that heads can have weights of their own; y [num_rows, size] T, contiguous.
// A block owns a row, and a thread kRounds pieces of 16 bytes of it, which stay in registers between the passes.
// T: bf16, fp16, float. kRounds: 1 to 8.
// float32; var is the mean of (x − mean)²; sums over a thread's pieces, then a tree over lanes and warps; new_residual
//   is rounded to T before the norm reads it, y once.
// The launcher: grid = num_rows, block = whole warps, at most 512 threads, threads · kRounds · kWidth<T> ≥ size.
#include "reduce.cuh"
#include "row.cuh"

template <typename T, int kRounds>
__device__ __forceinline__ void norm_row(Row<T, kRounds>& x, const Row<T, kRounds>& weight, const Row<T, kRounds>& bias,
                                         T* y, int size, float eps) {
  __shared__ float sum_scratch[kMaxWarps];
  __shared__ float square_scratch[kMaxWarps];
  float sum = 0.0f;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum += x[round][i];
  const float mean = block_sum(sum, sum_scratch) / static_cast<float>(size);
  float squares = 0.0f;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      x[round][i] -= mean;
      if (piece<T>(round) + i < size) squares += x[round][i] * x[round][i];
    }
  const float scale = rsqrtf(block_sum(squares, square_scratch) / static_cast<float>(size) + eps);
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) x[round][i] = x[round][i] * scale * weight[round][i] + bias[round][i];
  store_rounds<T, kRounds>(y, size, x);
}

template <typename T, int kRounds>
__global__ void __launch_bounds__(512) layernorm(const T* x, const T* weight, const T* bias, T* y, int num_weights,
                                                  int size, index_t x_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights, biases;
  const index_t first_weight = static_cast<index_t>(blockIdx.x % static_cast<unsigned>(num_weights)) * size;
  load_rounds<T, kRounds>(weight + first_weight, size, weights);
  load_rounds<T, kRounds>(bias ? bias + first_weight : nullptr, size, biases);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  norm_row<T, kRounds>(values, weights, biases, y + row * size, size, eps);
}

// new_residual may be residual itself.
template <typename T, int kRounds>
__global__ void __launch_bounds__(512)
    add_layernorm(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* new_residual, int size,
                  index_t x_stride, index_t residual_stride, index_t new_residual_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights, biases;
  load_rounds<T, kRounds>(weight, size, weights);
  load_rounds<T, kRounds>(bias, size, biases);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  add_residual<T, kRounds>(values, residual + row * residual_stride, new_residual + row * new_residual_stride, size);
  norm_row<T, kRounds>(values, weights, biases, y + row * size, size, eps);
}
