// Log-n scaling of queries (Qwen 1). ref.attention: logn_query.
// y[t] = q[t] · s,  s = log(p + 1) / log(length) where position p = positions[t] ≥ length, else 1
// q [num_tokens, size] T with a stride between rows, size = n_heads · head_dim; positions [num_tokens] int32;
//   y [num_tokens, size] T, contiguous.
// A block owns a piece of a row, and a thread 16 bytes of it.
// T: bf16, fp16, float.
// float32; s by logf and one product with 1 / log(length), which the launcher gives rounded once; y is rounded once.
// The launcher: grid = (num_tokens, ⌈size / (threads · kWidth<T>)⌉), any block.
#include "vec.cuh"

template <typename T>
__global__ void __launch_bounds__(1024) logn_query(const T* q, const int* positions, T* y, int size, index_t q_stride,
                                                   int length, float inverse_log) {
  dependency_launch();
  dependency_wait();
  const index_t token = blockIdx.x;
  const int i = (static_cast<int>(blockIdx.y * blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
  if (i >= size) return;
  const int position = positions[token];
  const float scale = position < length ? 1.0f : logf(static_cast<float>(position) + 1.0f) * inverse_log;
  const T* from = q + token * q_stride;
  T* to = y + token * size;
  float x[kWidth<T>];
  load_row<T>(from, i, size, is_aligned(from), x);
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) x[j] *= scale;
  store_row<T>(to, i, size, is_aligned(to), x);
}
