// Groups of 32 numbers as codes to be copied to other ranks, and the sum of what all ranks have copied. ref.int8_feedback, without
//   owners.
// codes = q, scale of H x + carried; carried = what they leave out
// y = H(Σ_r dequantized codes of rank r) + residual (0 if null); without the rotation H is left out
// x, residual, y [size] T; carried [size] bf16 or null, read only if is_read; codes [size] int8, then [size / 32] bf16; mine:
//   codes of rank `rank`; others [kWorld − 1]: those of the other ranks in their order, each `stride` bytes after the one before.
// A thread has every (threads of the grid)-th piece of 8 numbers, four of which, of neighbouring lanes, are a group.
// T: bf16, fp16. kWorld: ranks, 2 to 8. kRotated: whether groups are rotated.
// float32; ranks in their order, then the residual; rounded to T once. What is carried is rounded to bf16.
// The launcher: whole warps; size is a multiple of 32; all arrays begin at multiples of 16 bytes, and stride is one.
#include "carried.cuh"

constexpr int kThreads = 256;

template <typename T, bool kRotated>
__global__ void __launch_bounds__(kThreads)
    quantize_codes(const T* x, bf16* carried_errors, int is_read, unsigned char* codes, index_t size) {
  static_assert(kWidth<T> == 8, "int8 stands for numbers of 16 bits");
  const Carried carried{carried_errors, is_read};
  dependency_wait();
  dependency_launch();
  const index_t step = static_cast<index_t>(gridDim.x) * kThreads * 8;
  for (index_t first = static_cast<index_t>(blockIdx.x) * kThreads * 8; first < size; first += step) {  // whole warps
    const index_t place = first + threadIdx.x * 8;
    const bool exists = place < size;
    float y[8], errors[8];
    load_row(x + place, 0, exists ? 8 : 0, true, y);
    load_carried(carried, place, exists, errors);
    if constexpr (kRotated) rotate(y);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] += errors[i];
    const Codes<8> found = quantize(y);
    keep_carried(carried, place, exists, y, found);
    if (!exists) continue;
    *reinterpret_cast<uint2*>(codes + place) = make_uint2(found.q[0], found.q[1]);
    if (threadIdx.x % 4 == 0) *reinterpret_cast<unsigned short*>(codes + size + place / 32 * 2) = found.scale;
  }
}

template <typename T, int kWorld, bool kRotated>
__global__ void __launch_bounds__(kThreads)
    sum_codes(const unsigned char* mine, const unsigned char* others, const T* residual, T* y, index_t size,
              index_t stride, int rank) {
  static_assert(kWidth<T> == 8, "int8 stands for numbers of 16 bits");
  dependency_wait();
  dependency_launch();
  const index_t step = static_cast<index_t>(gridDim.x) * kThreads * 8;
  for (index_t first = static_cast<index_t>(blockIdx.x) * kThreads * 8; first < size; first += step) {
    const index_t place = first + threadIdx.x * 8;
    const bool exists = place < size;
    float sum[8], share[8];
#pragma unroll
    for (int p = 0; p < kWorld; ++p) {
      const unsigned char* const from = p == rank ? mine : others + (p < rank ? p : p - 1) * stride;
      Codes<8> codes{};
      if (exists) {
        const uint2 q = *reinterpret_cast<const uint2*>(from + place);
        codes = {{q.x, q.y}, *reinterpret_cast<const unsigned short*>(from + size + place / 32 * 2)};
      }
      dequantize(codes, share);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = p == 0 ? share[i] : sum[i] + share[i];
    }
    if constexpr (kRotated) rotate(sum);
    if (!exists) continue;
    if (residual != nullptr) {
      load_row(residual + place, 0, 8, true, share);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += share[i];
    }
    store_row(y + place, 0, 8, true, sum);
  }
}
