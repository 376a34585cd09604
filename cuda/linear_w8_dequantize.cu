// op         codes of 8 bits as floating point: int8_dequantize, fp8_dequantize and fp8_block_dequantize of ref/quant
// maths      y[r, c] = codes[r, c] · scale[r / scale_rows, c / scale_columns], or codes[r, c] alone
// tensors    codes [num_rows, size] int8 or e4m3, contiguous; scale float32 [⌈num_rows / scale_rows⌉, ⌈size / scale_columns⌉]
//            or null; y [num_rows, size] T, contiguous
// a block    owns 1024 columns of a row, a thread 8 of them
// template   T bf16 or fp16; Code signed char or e4m3
// sums       none; one rounding of the product, none of the code alone
// launcher   grid (num_rows, ⌈size / 1024⌉), block 128; scale_columns is a multiple of 8
#include "coding.cuh"
#include "vec.cuh"

__device__ __forceinline__ float number(unsigned bits, signed char) { return static_cast<signed char>(bits); }
__device__ __forceinline__ float number(unsigned bits, e4m3) { return to_float(e4m3{static_cast<unsigned char>(bits)}); }

template <typename T, typename Code>
__global__ void __launch_bounds__(128)
    linear_w8_dequantize(const typename Coded<Code>::Bits* __restrict__ codes, const float* __restrict__ scale, T* y,
                         int size, int scale_rows, int scale_columns) {
  dependency_launch();
  dependency_wait();  // codes may be of the kernel before, and y may be read until it has ended
  const int row = blockIdx.x, column = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (column >= size) return;
  const index_t first = static_cast<index_t>(row) * size;
  const bool aligned = size % 8 == 0;
  unsigned words[2] = {};
  if (aligned) {
    const uint2 both = *reinterpret_cast<const uint2*>(codes + first + column);
    words[0] = both.x, words[1] = both.y;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < size) words[i / 4] |= (codes[first + column + i] & 255u) << 8 * (i % 4);
  }
  const int per_row = (size + scale_columns - 1) / scale_columns;
  const float of = scale == nullptr ? 1.0f : scale[row / scale_rows * per_row + column / scale_columns];
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = number(words[i / 4] >> 8 * (i % 4) & 255u, Code{}) * of;
  store_row(y + first, column, size, aligned, x);
}
