// The largest number over a warp and over a block.
#pragma once

#include "reduce.cuh"

// Over each group of kLanes neighbouring lanes (a power of two); every lane of the group gets it.
template <int kLanes = 32>
__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Over the block, as block_sum.
__device__ __forceinline__ unsigned block_max(unsigned x, unsigned (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  x = warp_max(x);
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(lane < num_warps ? scratch[lane] : 0u);
}
