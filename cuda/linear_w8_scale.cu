// op         sums of products of codes as numbers, defined by int8_scale of ref/quant/int8.py
// maths      y[m, n] = sums[m, n] · x_scale[m] · w_scale[n] (+ bias[n])
// tensors    sums [num_tokens, size] int or float, contiguous; x_scale float32 [num_tokens]; w_scale float32, every
//            w_scale_step-th; bias B or null; y [num_tokens, size] T, contiguous
// a block    owns 1024 columns of a token, a thread 8 of them
// template   T bf16, fp16 or float; B bf16, fp16 or float; Sum int or float
// sums       none; float32, one rounding at the end
// launcher   grid (num_tokens, ⌈size / 1024⌉), block 128
#include "vec.cuh"

template <typename T, typename B, typename Sum>
__global__ void __launch_bounds__(128)
    linear_w8_scale(const Sum* __restrict__ sums, const float* __restrict__ x_scale, const float* __restrict__ w_scale,
                    const B* __restrict__ bias, T* y, int size, int w_scale_step) {
  dependency_launch();
  dependency_wait();
  const index_t first = static_cast<index_t>(blockIdx.x) * size;
  const float of_x = x_scale[blockIdx.x];
  for (int i = 0; i < 8; i += kWidth<T>) {
    const int column = (blockIdx.y * 128 + threadIdx.x) * 8 + i;
    float out[kWidth<T>];
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j) {
      const int n = column + j;
      out[j] = n < size ? static_cast<float>(sums[first + n]) * of_x * w_scale[n * w_scale_step] : 0.0f;
      if (n < size && bias != nullptr) out[j] += to_float(bias[n]);
    }
    store_row(y + first, column, size, size % kWidth<T> == 0, out);
  }
}
