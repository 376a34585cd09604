// op         weights of 4 bits in groups as floating point, defined by grouped_dequantize of ref/quant/groups.py
// maths      y[n, k] = (q[n, k] − zero[n, g(k)]) · scale[n, g(k)]
// tensors    weight, scales fp16 and zeros uint8 packed as include/grouped.cuh says (zeros null: all are 8);
//            y [out_features, in_features] T
// a block    owns 64 rows and 64 columns; a warp one tile of 16 rows; a lane's words hold two rows' neighbouring columns
// template   T bf16, fp16 or float; kGated: a tile of 16 packed rows is 8 gates and the 8 that they are multiplied by; in y
//            all gates come first; kZeros whether there are zeros
// sums       none; one rounding of the product, which is exact in float32
// launcher   grid (steps of 64 columns, row tiles / 4), block 128
#include "grouped.cuh"

template <typename T, bool kGated, bool kZeros>
__global__ void __launch_bounds__(128)
    linear_w4_dequantize(const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
                  const unsigned char* __restrict__ zeros, T* y, int out_features, int in_features, int group_size) {
  dependency_launch();
  dependency_wait();  // y may be read until the kernel before has ended
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int tile = 4 * blockIdx.y + warp, step = blockIdx.x;
  const uint4 packed = load16(weight + ((static_cast<index_t>(tile) * gridDim.x + step) * 32 + lane) * 4);
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int out = kGated ? 8 * tile + group : 16 * tile + 8 * half + group;
      if (out >= (kGated ? out_features / 2 : out_features)) continue;
      T* const row = y + (kGated && half == 1 ? out + out_features / 2 : out) * static_cast<index_t>(in_features);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = kPackedStep * step + 16 * j + i / 2 * 8 + 2 * pair + i % 2;
        if (column >= in_features) continue;
        const index_t of = ((static_cast<index_t>(column / group_size) * gridDim.y + blockIdx.y) * 8 + group) * 8 +
                           2 * (tile % 4) + half;
        const int zero = kZeros ? zeros[of] : 8;
        const int q = static_cast<int>(words[j] >> (4 * (half + 2 * (i / 2)) + 16 * (i % 2)) & 15u);
        row[column] = from_float<T>(static_cast<float>(q - zero) * to_float(scales[of]));
      }
    }
}
