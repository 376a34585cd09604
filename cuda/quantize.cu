// op         activations in 8 bits: quantize_activations, norm_quant and add_norm_quant of ref/quant/fused.py
// maths      scale = max |z| / kMax over a row, or over each kGroup neighbours in it; codes = round(z / scale); z = x, or
//            rmsnorm(x), or rmsnorm(new_residual) with new_residual = x + residual
// tensors    x, residual, new_residual [num_rows, size] T with a stride between rows; weight [size] T; codes [num_rows, size]
//            int8 or e4m3, contiguous; scales float32 [num_rows], or [num_rows, ⌈size / kGroup⌉]; fixed [1] float32, which
//            is the scale of every row then, or null
// a block    owns a row, and a thread kRounds pieces of 16 bytes of it, which stay in registers between the passes
// template   F signed char (int8) or e4m3; kGroups whether there are groups; T bf16 or fp16; kRounds 1 to 8; kPairs: the
//            codes of every 16 columns in the order 0, 8, 1, 9 … 7, 15, as linear_w4a8_sm90 reads them; size is a multiple of 16
// sums       float32, as in cuda/rmsnorm.cu; new_residual is rounded to T before it is normed, the norm before it is
//            quantized; a quotient is rounded to float32, then to the code
// launcher   grid = num_rows, block = whole warps, at most 512 threads, threads · kRounds · 8 ≥ size; no fixed with groups
#include "coding.cuh"
#include "maximum.cuh"
#include "rmsnorm.cuh"

// Bytes 0 and 1 of low and high by turns.
__device__ __forceinline__ unsigned interleaved(unsigned low, unsigned high) {
  return (low & 255u) | (high & 255u) << 8 | (low & 0xff00u) << 8 | (high & 0xff00u) << 16;
}

// Of a thread's eight codes and those of its neighbour, which has the other half of 16 columns, the eight that it stores.
__device__ __forceinline__ uint2 paired(uint2 codes) {
  const bool odd = threadIdx.x % 2 == 1;
  const unsigned other = __shfl_xor_sync(kAllLanes, odd ? codes.x : codes.y, 1);
  const unsigned low = odd ? other : codes.x, high = odd ? codes.y : other;
  return make_uint2(interleaved(low, high), interleaved(low >> 16, high >> 16));
}

template <typename T, int kRounds>
__device__ __forceinline__ void round_row(Row<T, kRounds>& x) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) x[round][i] = to_float(from_float<T>(x[round][i]));
}

template <typename F, bool kGroups, bool kPairs, typename T, int kRounds>
__device__ __forceinline__ void quantize_row(const Row<T, kRounds>& x, typename Coded<F>::Bits* codes, float* scales,
                                             const float* fixed, int size) {
  __shared__ unsigned scratch[kMaxWarps];
  static_assert(kWidth<T> == 8, "codes of a piece are 8 bytes");
  unsigned largest[kRounds] = {}, of_row = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) largest[round] = max(largest[round], magnitude(x[round][i]));
  if constexpr (!kGroups) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) of_row = max(of_row, largest[round]);
    if (fixed == nullptr) of_row = block_max(of_row, scratch);
  }
  const bool aligned = size % 8 == 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int first = piece<T>(round);
    float scale = 0.0f;
    if constexpr (kGroups) {
      scale = scale_of<F>(warp_max<kGroup / kWidth<T>>(largest[round]));
      if (first % kGroup == 0 && first < size) scales[first / kGroup] = scale;
    } else {
      scale = fixed == nullptr ? scale_of<F>(of_row) : *fixed;
      if (first == 0) *scales = scale;
    }
    uint2 both = make_uint2(code4(x[round], scale, F{}), code4(x[round] + 4, scale, F{}));
    if (kPairs) both = paired(both);
    if (aligned && first < size) {
      *reinterpret_cast<uint2*>(codes + first) = both;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i < size)
        codes[first + i] = static_cast<typename Coded<F>::Bits>((i < 4 ? both.x : both.y) >> 8 * (i % 4) & 255u);
  }
}

template <typename F, bool kGroups, typename T, int kRounds, bool kPairs>
__global__ void __launch_bounds__(512)
    quantize(const T* x, typename Coded<F>::Bits* codes, float* scales, const float* fixed, int size, index_t x_stride) {
  dependency_launch();
  dependency_wait();
  const index_t row = blockIdx.x;
  Row<T, kRounds> values;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  const int num_scales = kGroups ? (size + kGroup - 1) / kGroup : 1;
  quantize_row<F, kGroups, kPairs, T, kRounds>(values, codes + row * size, scales + row * num_scales, fixed, size);
}

template <typename F, bool kGroups, typename T, int kRounds>
__global__ void __launch_bounds__(512)
    rmsnorm_quantize(const T* x, const T* weight, typename Coded<F>::Bits* codes, float* scales, const float* fixed,
                     int size, index_t x_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  load_rounds<T, kRounds>(weight, size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  norm_row<T, kRounds>(values, weights, size, eps);
  round_row<T, kRounds>(values);
  const int num_scales = kGroups ? (size + kGroup - 1) / kGroup : 1;
  quantize_row<F, kGroups, false, T, kRounds>(values, codes + row * size, scales + row * num_scales, fixed, size);
}

// new_residual may be residual itself.
template <typename F, bool kGroups, typename T, int kRounds>
__global__ void __launch_bounds__(512)
    add_rmsnorm_quantize(const T* x, const T* residual, const T* weight, typename Coded<F>::Bits* codes, float* scales,
                         const float* fixed, T* new_residual, int size, index_t x_stride, index_t residual_stride,
                         index_t new_residual_stride, float eps) {
  dependency_launch();
  Row<T, kRounds> values, weights;
  load_rounds<T, kRounds>(weight, size, weights);
  dependency_wait();
  const index_t row = blockIdx.x;
  load_rounds<T, kRounds>(x + row * x_stride, size, values);
  add_residual<T, kRounds>(values, residual + row * residual_stride, new_residual + row * new_residual_stride, size);
  norm_row<T, kRounds>(values, weights, size, eps);
  round_row<T, kRounds>(values);
  const int num_scales = kGroups ? (size + kGroup - 1) / kGroup : 1;
  quantize_row<F, kGroups, false, T, kRounds>(values, codes + row * size, scales + row * num_scales, fixed, size);
}
