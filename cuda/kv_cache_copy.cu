// Whole blocks of the KV cache to other places. ref.kv_cache: kv_cache_copy, kv_cache_swap.
// k_to[dst_blocks[i]] = k_from[src_blocks[i]], and v_to from v_from, for each i
// k_from, v_from [num_from, size] T, k_to, v_to [num_to, size] T, contiguous, size = block_size · n_kv_heads · head_dim;
//   either may be a cache of this GPU or lie in pinned memory of the host; src_blocks, dst_blocks [num_copies] int32.
// A block of threads owns a piece of a block of keys (blockIdx.z = 0) or values (1), and a thread kPieces · 16 bytes.
// T: bf16, fp16, float; unsigned char for codes.
// A copy: nothing is computed or rounded. Where either block is not there nothing is read or written.
// The launcher: grid = (⌈size / (threads · kPieces · kWidth<T>)⌉, num_copies, 2), any block; no block is both source
//   and target.
#include "vec.cuh"

constexpr int kPieces = 4;  // loads that a thread has under way at once

template <typename T>
__global__ void __launch_bounds__(256)
    kv_cache_copy(const T* k_from, const T* v_from, T* k_to, T* v_to, const int* src_blocks, const int* dst_blocks,
                  int num_from, int num_to, int size) {
  dependency_wait();  // and no dependency_launch: attention_decode reads keys before it waits, when this has ended
  const int src = src_blocks[blockIdx.y], dst = dst_blocks[blockIdx.y];
  if (src < 0 || src >= num_from || dst < 0 || dst >= num_to) return;
  const T* from = (blockIdx.z == 0 ? k_from : v_from) + static_cast<index_t>(src) * size;
  T* to = (blockIdx.z == 0 ? k_to : v_to) + static_cast<index_t>(dst) * size;
  const int step = static_cast<int>(blockDim.x) * kWidth<T>;
  const int first = static_cast<int>(blockIdx.x) * kPieces * step + static_cast<int>(threadIdx.x) * kWidth<T>;
  if (is_aligned(from) && is_aligned(to) && size % kWidth<T> == 0) {
    uint4 piece[kPieces];
#pragma unroll
    for (int n = 0; n < kPieces; ++n)
      if (first + n * step < size) piece[n] = load16(from + first + n * step);
#pragma unroll
    for (int n = 0; n < kPieces; ++n)
      if (first + n * step < size) store16(to + first + n * step, piece[n]);
  } else {
    for (int n = 0; n < kPieces; ++n)
      for (int j = first + n * step; j < size && j < first + n * step + kWidth<T>; ++j) to[j] = from[j];
  }
}
