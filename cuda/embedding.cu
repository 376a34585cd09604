// Token ids to vectors, alone or with a learned vector for the position. ref.embedding: embedding, position_embedding.
// y[t] = table[token_ids[t]]  ( + position_table[positions[t]] )
// token_ids, positions [num_tokens] int32; table [vocab_size, hidden_size] T with a stride between rows; position_table
//   [num_positions, hidden_size] T, likewise; y [num_tokens, hidden_size] T.
// A block owns a piece of a row of y, and a thread 16 bytes of it.
// T: bf16, fp16, float.
// The table may be some rows of a larger one, from id `first` on: of other ids `outside` is the row, 0 for a rank of many.
// A copy: nothing is computed or rounded; with positions a sum in float32 that is rounded once. Of a table that is whole
//   `outside` is NaN, which the check of the logits finds; so is the row of a position outside its table.
// The launcher: grid = (num_tokens, ⌈hidden_size / (threads · kWidth<T>)⌉), any block.
#include "vec.cuh"

template <typename T>
__global__ void __launch_bounds__(1024)
    embedding(const int* token_ids, const T* table, T* y, int vocab_size, int hidden_size, index_t table_stride,
              int first, float outside) {
  dependency_launch();
  dependency_wait();
  const int id = token_ids[blockIdx.x] - first;
  const int i = (static_cast<int>(blockIdx.y * blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
  const T* from = table + static_cast<index_t>(id) * table_stride;
  T* to = y + static_cast<index_t>(blockIdx.x) * hidden_size;
  const bool is_known = id >= 0 && id < vocab_size;
  if (is_known && is_aligned(from) && is_aligned(to) && i + kWidth<T> <= hidden_size) {
    store16(to + i, load16_stream(from + i));
  } else {
    for (int j = i; j < hidden_size && j < i + kWidth<T>; ++j)
      to[j] = is_known ? from[j] : from_float<T>(outside);
  }
}

template <typename T>
__global__ void __launch_bounds__(1024)
    position_embedding(const int* token_ids, const int* positions, const T* table, const T* position_table, T* y,
                       int vocab_size, int num_positions, int hidden_size, index_t table_stride,
                       index_t position_stride, int first, float outside) {
  dependency_launch();
  dependency_wait();
  const int token = token_ids[blockIdx.x] - first, position = positions[blockIdx.x];
  const int i = (static_cast<int>(blockIdx.y * blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
  if (i >= hidden_size) return;
  T* to = y + static_cast<index_t>(blockIdx.x) * hidden_size;
  float sum[kWidth<T>], place[kWidth<T>];
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) {
    sum[j] = outside;
    place[j] = __uint_as_float(0x7fc00000u);
  }
  if (token >= 0 && token < vocab_size) {
    const T* word = table + static_cast<index_t>(token) * table_stride;
    load_row<T>(word, i, hidden_size, is_aligned(word), sum);
  }
  if (position >= 0 && position < num_positions) {
    const T* learned = position_table + static_cast<index_t>(position) * position_stride;
    load_row<T>(learned, i, hidden_size, is_aligned(learned), place);
  }
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) sum[j] += place[j];
  store_row<T>(to, i, hidden_size, is_aligned(to), sum);
}
