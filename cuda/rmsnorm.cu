// RMSNorm, alone and fused with the residual add, also in an order. ref.rmsnorm: rmsnorm, add_rmsnorm and theirs.
// new_residual = x + residual;  y = new_residual / sqrt(mean(new_residual²) + eps) · weight   (residual = 0 if alone);
//   the ordered ones: y[k] = that at order[k]
// x, residual [num_rows, size] T with a stride between rows; weight [size] T; order [size] unsigned short, below size;
//   y [num_rows, size] T, contiguous.
// A block owns a row, and a thread kRounds pieces of 16 bytes of it, which stay in registers between the passes.
// T: bf16, fp16, float. kRounds: 1 to 8. The ordered ones: not of float.
// float32; the sum over a thread's pieces, then a tree over lanes and warps; new_residual is rounded to T before the
//   norm reads it, y once.
// The launcher: grid = num_rows, block = whole warps, at most 512 threads, threads · kRounds · kWidth<T> ≥ size; of the
//   ordered ones size a multiple of 8, and shared memory for a row.
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

// Where a thread's numbers of y come from: 8 places of 16 bits for each piece.
template <int kRounds>
using Places = uint4[kRounds];

template <typename T, int kRounds>
__device__ __forceinline__ void load_places(const unsigned short* order, int size, Places<kRounds>& places) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
    if (piece<T>(round) < size) places[round] = load16(order + piece<T>(round));
}

// y[k] = x[order[k]], by way of shared memory.
template <typename T, int kRounds>
__device__ __forceinline__ void store_in_order(T* y, int size, const Row<T, kRounds>& x, const Places<kRounds>& places) {
  static_assert(kWidth<T> == 8, "a piece has as many numbers as places");
  T* const row = dynamic_shared<T>();
  store_rounds<T, kRounds>(row, size, x);
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (piece<T>(round) >= size) continue;
    const unsigned from[4] = {places[round].x, places[round].y, places[round].z, places[round].w};
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned even = row[from[i] & 0xffffu].bits, odd = row[from[i] >> 16].bits;
      pairs[i] = even | odd << 16;
    }
    store16(y + piece<T>(round), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
}

template <typename T, int kRounds>
__global__ void __launch_bounds__(512)
    rmsnorm_ordered(const T* x, const T* weight, const unsigned short* order, T* y, int size, index_t x_stride,
                    float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  Places<kRounds> places;
  load_rounds<T, kRounds>(weight, size, weights);
  load_places<T, kRounds>(order, size, places);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  norm_row<T, kRounds>(values, weights, size, eps);
  store_in_order<T, kRounds>(y + row * size, size, values, places);
}

template <typename T, int kRounds>
__global__ void __launch_bounds__(512)
    add_rmsnorm_ordered(const T* x, const T* residual, const T* weight, const unsigned short* order, T* y,
                        T* new_residual, int size, index_t x_stride, index_t residual_stride,
                        index_t new_residual_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  Places<kRounds> places;
  load_rounds<T, kRounds>(weight, size, weights);
  load_places<T, kRounds>(order, size, places);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  add_residual<T, kRounds>(values, residual + row * residual_stride, new_residual + row * new_residual_stride, size);
  norm_row<T, kRounds>(values, weights, size, eps);
  store_in_order<T, kRounds>(y + row * size, size, values, places);
}
