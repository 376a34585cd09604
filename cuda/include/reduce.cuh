// Sums over a warp and over a block, in one fixed order: the same bits in every run.
#pragma once

#include "dtype.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxWarps = 32;

// Sum over each group of kLanes neighbouring lanes (a power of two); every lane of the group gets it.
template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// Sum over the block, whose size is a multiple of 32; every thread gets it. `scratch` is shared memory that nothing
// else uses: a second sum in the same kernel needs a scratch of its own.
__device__ __forceinline__ float block_sum(float x, float (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  x = warp_sum(x);
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(lane < num_warps ? scratch[lane] : 0.0f);
}
