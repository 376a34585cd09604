// The sum of what ranks have sent each other by copies, once all is there. ref.collectives: all_reduce.
// y = Σ_r x_r + residual (0 if null)
// mine [size] T: x of rank `rank`; others [kWorld − 1, size] T: those of the other ranks in their order; residual, y [size]
//   T; y may be mine or residual.
// A thread owns every (threads of the grid)-th piece of 16 bytes.
// T: bf16, fp16, float. kWorld: ranks, 2 to 8.
// float32; ranks in their order, then the residual; rounded to T once.
// The launcher: any grid; mine, residual, y begin at multiples of 16 bytes.
#include "vec.cuh"

template <typename T, int kWorld>
__global__ void __launch_bounds__(512)
    sum_parts(const T* mine, const T* others, const T* residual, T* y, index_t size, int rank) {
  dependency_wait();
  dependency_launch();
  const index_t step = static_cast<index_t>(gridDim.x) * blockDim.x * kWidth<T>;
  const bool is_whole = size % kWidth<T> == 0;  // so that every rank's numbers begin at a multiple of 16 bytes
  for (index_t begin = (static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth<T>; begin < size;
       begin += step) {
    const int count = static_cast<int>(min(size - begin, static_cast<index_t>(kWidth<T>)));
    float sum[kWidth<T>], share[kWidth<T>];
#pragma unroll
    for (int p = 0; p < kWorld; ++p) {
      const T* const from = p == rank ? mine : others + (p < rank ? p : p - 1) * size;
      load_row(from + begin, 0, count, p == rank || is_whole, share);
#pragma unroll
      for (int j = 0; j < kWidth<T>; ++j) sum[j] = p == 0 ? share[j] : sum[j] + share[j];
    }
    if (residual != nullptr) {
      load_row(residual + begin, 0, count, true, share);
#pragma unroll
      for (int j = 0; j < kWidth<T>; ++j) sum[j] += share[j];
    }
    store_row(y + begin, 0, count, true, sum);
  }
}
