// Columns in another order, as weights want them whose groups are not of neighbours (act-order). ref/quant/groups.py:
//   g_idx of GroupedInt.
// y[t, k] = x[t, order[k]]
// x [num_tokens, columns] T with a stride between rows; order [width] int32, 0 to columns − 1; y [num_tokens, width] T.
// A block owns a piece of a row of y, and a thread 16 bytes of it.
// T: bf16, fp16.
// A copy: nothing is computed or rounded.
// The launcher: grid = (⌈width / (8 · threads)⌉, num_tokens), any block; width a multiple of 8.
#include "vec.cuh"

template <typename T>
__global__ void __launch_bounds__(1024)
    gather_columns(const T* x, const int* __restrict__ order, T* y, int width, index_t x_stride) {
  dependency_launch();
  const int k = 8 * (static_cast<int>(blockIdx.x * blockDim.x) + static_cast<int>(threadIdx.x));
  if (k >= width) return;
  const uint4 low = load16(order + k), high = load16(order + k + 4);
  const unsigned from[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  dependency_wait();  // the order has been there since the weights were loaded
  const T* const row = x + static_cast<index_t>(blockIdx.y) * x_stride;
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned even = row[from[2 * i]].bits, odd = row[from[2 * i + 1]].bits;
    pairs[i] = even | odd << 16;
  }
  store16(y + static_cast<index_t>(blockIdx.y) * width + k, {pairs[0], pairs[1], pairs[2], pairs[3]});
}
