// Parts of rows of several ranks side by side, on the ranks that take them. ref.collectives: all_gather.
// y[i, s · part_size + j] = x_s[i, j]  of ranks s < num_senders, as far as y has columns
// x [num_rows, part_size] T, contiguous, of each sender; y [num_rows, width] T, contiguous, or null where nobody takes it.
// A block owns every gridDim.x-th chunk of the pieces of a part, 16 bytes of a row or less at its end. It puts a chunk
//   where all can read it, one ahead of what it takes.
// T: bf16, fp16, float. kWorld: ranks, 2 to 8.
// Exact.
// The launcher: all blocks are on the GPU at once; whole warps; a chunk of pieces fits in a slot; four stages or more.
//   All ranks launch alike.
#include "exchange.cuh"

constexpr int kThreads = 512;
constexpr int kLastFlags = 2;  // chunks of nothing at the end: who has seen them knows that all is taken

template <typename T, int kWorld>
__global__ void __launch_bounds__(kThreads)
    all_gather(const T* x, T* y, int num_rows, int part_size, int width, int num_senders, int chunk,
               const __grid_constant__ Exchange exchange) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(exchange);
  const int row_pieces = (part_size + kWidth<T> - 1) / kWidth<T>, num_pieces = num_rows * row_pieces;
  const int stride = static_cast<int>(gridDim.x) * chunk, num_steps = (num_pieces + stride - 1) / stride + kLastFlags;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int rank = exchange.rank;
  Patience patience;

  // f(place in the slot, row, column of x) of this thread's pieces of a chunk.
  const auto for_pieces = [&](int step, auto f) {
    const int begin = step * stride + static_cast<int>(blockIdx.x) * chunk, end = min(begin + chunk, num_pieces);
    for (int i = begin + thread; i < end; i += threads)
      f((i - begin) * 16, i / row_pieces, i % row_pieces * kWidth<T>);
  };
  const auto store = [&](int sender, int row, int column, const float(&values)[kWidth<T>]) {
    T* const to = y + static_cast<index_t>(row) * width + sender * part_size;
    store_row(to, column, min(part_size, width - sender * part_size), is_aligned(to + column), values);
  };
  const auto put = [&](int step) {
    if (rank < num_senders)
      for_pieces(step, [&](int place, int row, int column) {
        float values[kWidth<T>];
        const T* const from = x + static_cast<index_t>(row) * part_size;
        load_row(from, column, part_size, is_aligned(from + column), values);
        for (int i = 0; i < exchange.num_outboxes; ++i)
          store16(exchange.gather_to[i] + slot_of(exchange, step) + place, pack(values, T{}));
        if (y != nullptr) store(rank, row, column, values);
      });
    __syncthreads();
    if (thread < exchange.num_outboxes) announce(exchange, exchange.gather_to[thread], slot_of(exchange, step), number, step);
  };

  put(0);
  for (int step = 0; step < num_steps; ++step) {
    if (step + 1 < num_steps) put(step + 1);
    await<kWorld>(exchange, exchange.gather_from, slot_of(exchange, step), number, step, patience);
    if (y == nullptr) continue;
    for (int sender = 0; sender < num_senders; ++sender)
      if (sender != rank)
        for_pieces(step, [&](int place, int row, int column) {
          float values[kWidth<T>];
          unpack(load16_system(exchange.gather_from[sender] + slot_of(exchange, step) + place), values, T{});
          store(sender, row, column, values);
        });
  }
  count_block(exchange);
}
