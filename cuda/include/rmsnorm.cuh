// RMSNorm of a row in a block's registers: x / sqrt(mean(x²) + eps) · weight, see ref/rmsnorm.py.
#pragma once

#include "reduce.cuh"
#include "row.cuh"

template <typename T, int kRounds>
__device__ __forceinline__ void norm_row(Row<T, kRounds>& x, const Row<T, kRounds>& weight, int size, float eps) {
  __shared__ float scratch[kMaxWarps];
  float sum = 0.0f;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum += x[round][i] * x[round][i];
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(size) + eps);
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) x[round][i] *= scale * weight[round][i];
}
