// RMSNorm, alone and fused with the residual add. ref.rmsnorm: rmsnorm, add_rmsnorm.
// new_residual = x + residual;  y = new_residual / sqrt(mean(new_residual²) + eps) · weight   (residual = 0 if alone)
// x, residual [num_rows, size] T with a stride between rows; weight [size] T; y [num_rows, size] T, contiguous.
// A block owns a row, and a thread kRounds pieces of 16 bytes of it, which stay in registers between the passes.
// T: bf16, fp16, float. kRounds: 1 to 8.
// float32; the sum over a thread's pieces, then a tree over lanes and warps; new_residual is rounded to T before the
//   norm reads it, y once.
// The launcher: grid = num_rows, block = whole warps, at most 512 threads, threads · kRounds · kWidth<T> ≥ size.
#include "rmsnorm.cuh"

template <typename T, int kRounds>
__global__ void __launch_bounds__(512)
    rmsnorm(const T* x, const T* weight, T* y, int size, index_t x_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  load_rounds<T, kRounds>(weight, size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  norm_row<T, kRounds>(values, weights, size, eps);
  store_rounds<T, kRounds>(y + row * size, size, values);
}

// new_residual may be residual itself.
template <typename T, int kRounds>
__global__ void __launch_bounds__(512)
    add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* new_residual, int size, index_t x_stride,
                index_t residual_stride, index_t new_residual_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  load_rounds<T, kRounds>(weight, size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  add_residual<T, kRounds>(values, residual + row * residual_stride, new_residual + row * new_residual_stride, size);
  norm_row<T, kRounds>(values, weights, size, eps);
  store_rounds<T, kRounds>(y + row * size, size, values);
}
