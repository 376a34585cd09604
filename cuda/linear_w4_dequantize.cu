// op         weights of 4 bits in groups as floating point, defined by grouped_dequantize of ref/quant/groups.py
// maths      y[n, k] = (q[n, k] − zero[n, g(k)]) · scale[n, g(k)]
// tensors    weight, scales fp16 and zeros uint8 packed as include/grouped.cuh says (zeros null: all are 8);
//            y [out_features, in_features] T, in_features a multiple of 8
// a block    owns 64 rows and 128 columns; a warp one tile of 16 rows; a thread 8 neighbouring columns of two rows at a time,
//            from the words of four lanes, so that four threads write 64 bytes that lie together
// template   T bf16 or fp16; kGated: a tile of 16 packed rows is 8 gates and the 8 that they are multiplied by; in y
//            all gates come first; kZeros whether there are zeros
// sums       none; one rounding of the product, which is exact in float32
// launcher   grid (columns / 128, row tiles / 4), rounded up; block 128
#include "grouped.cuh"
#include "vec.cuh"

template <typename T, bool kGated, bool kZeros>
__global__ void __launch_bounds__(128)
    linear_w4_dequantize(const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
                         const unsigned char* __restrict__ zeros, T* y, int out_features, int in_features,
                         int group_size) {
  constexpr int kSteps = 2;
  dependency_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
  const int tile = 4 * blockIdx.y + warp, num_steps = kSteps * gridDim.x;
  unsigned words[kSteps][2][4];  // of two columns of 16, of four lanes
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const index_t step = static_cast<index_t>(tile) * num_steps + kSteps * blockIdx.x + i;
        words[i][t][p] = weight[((step * 8 + group) * 4 + p) * 4 + 2 * t + place / 2];
      }
  dependency_wait();  // y may be read until the kernel before has ended
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int column = kPackedStep * (kSteps * blockIdx.x + i) + 32 * t + 8 * place;
      if (column >= in_features) continue;
      const index_t first = (static_cast<index_t>(column / group_size) * gridDim.y + blockIdx.y) * 64 + 8 * group + 2 * warp;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int out = kGated ? 8 * tile + group : 16 * tile + 8 * half + group;
        if (out >= (kGated ? out_features / 2 : out_features)) continue;
        const int zero = kZeros ? zeros[first + half] : 8;
        const float scale = to_float(scales[first + half]);
        float numbers[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int q = static_cast<int>(words[i][t][n / 2] >> (4 * half + 8 * (place % 2) + 16 * (n % 2)) & 15u);
          numbers[n] = static_cast<float>(q - zero) * scale;
        }
        store16(y + (kGated && half == 1 ? out + out_features / 2 : out) * static_cast<index_t>(in_features) + column,
                pack(numbers, T{}));
      }
    }
}
