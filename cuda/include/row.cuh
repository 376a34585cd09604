// A row that a block holds in registers: thread t owns, in each of kRounds rounds, one piece of kWidth<T> numbers.
#pragma once

#include "vec.cuh"

template <typename T, int kRounds>
using Row = float[kRounds][kWidth<T>];

// Where this thread's piece of a round begins.
template <typename T>
__device__ __forceinline__ int piece(int round) {
  return (round * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
}

// x is 0 behind the end of the row, and everywhere if there is none (null).
template <typename T, int kRounds>
__device__ __forceinline__ void load_rounds(const T* row, int size, Row<T, kRounds>& x) {
  const bool aligned = is_aligned(row);
  if (row == nullptr) size = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) load_row(row, piece<T>(round), size, aligned, x[round]);
}

template <typename T, int kRounds>
__device__ __forceinline__ void store_rounds(T* row, int size, const Row<T, kRounds>& x) {
  const bool aligned = is_aligned(row);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) store_row(row, piece<T>(round), size, aligned, x[round]);
}

// x += residual, rounded to T as the next layer will read it, and stored to new_residual, which may be residual itself:
// a thread writes only what it alone has read.
template <typename T, int kRounds>
__device__ __forceinline__ void add_residual(Row<T, kRounds>& x, const T* residual, T* new_residual, int size) {
  Row<T, kRounds> other;
  load_rounds<T, kRounds>(residual, size, other);
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) x[round][i] = to_float(from_float<T>(x[round][i] + other[round][i]));
  store_rounds<T, kRounds>(new_residual, size, x);
}
