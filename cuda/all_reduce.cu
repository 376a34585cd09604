// All-reduce in one trip, for small messages: alone, with the residual add, or with that and RMSNorm. ref.collectives:
//   all_reduce; ref.rmsnorm: add_rmsnorm.
// y = Σ_r x_r + residual (0 if null);  with the norm: new_residual = that, y = its RMSNorm
// x, y, residual [size] or [num_rows, size] T, contiguous; new_residual likewise, may be residual; weight [size] T;
//   channel: include/channel.cuh.
// A thread owns pieces of 16 bytes, with the norm a block rows. It sends all that it owns to every rank, as words with a
//   flag each, and then takes the others' words as they come.
// T: bf16, fp16, float. kWorld: ranks, 2 to 8. kRounds: 1 to 2.
// float32; ranks in their order, then the residual; rounded to T once, and y of the norm once more.
// The launcher: all blocks are on the GPU at once; the pieces fit in a slot; x, y, residual begin at multiples of 16
//   bytes; whole warps; the norm: whole pieces a row, threads · kRounds · kWidth<T> ≥ size. All ranks launch alike.
#include "channel.cuh"
#include "rmsnorm.cuh"

constexpr int kThreads = 512;

// Sends pieces begin, begin + step, … below end of x, which has `size` numbers.
template <typename T>
__device__ __forceinline__ void send(const Channel& channel, unsigned number, const T* x, int size, int begin, int step,
                                     int end) {
  for (int i = begin; i < end; i += step) {
    float mine[kWidth<T>];
    load_row(x, i * kWidth<T>, size, true, mine);
    send_piece(channel, number, i, pack(mine, T{}));
  }
}

// y = Σ_r x_r + residual of the same pieces, as they come.
template <typename T, int kWorld>
__device__ __forceinline__ void receive(const Channel& channel, unsigned number, const T* x, const T* residual, T* y,
                                        int size, int begin, int step, int end, Patience& patience) {
  constexpr int kPieces = kWorld == 2 ? 4 : kWorld <= 4 ? 2 : 1;  // awaited at once
  for (int first = begin; first < end; first += kPieces * step) {
    uint4 words[kPieces][kWorld - 1];
    receive_pieces<kWorld, kPieces>(channel, number, first, step, end, words, patience);
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      if (first + u * step >= end) break;
      const int i = (first + u * step) * kWidth<T>;
      float sum[kWidth<T>];
      load_row(x, i, size, true, sum);
      add_in_order<T, kWorld>(channel, words[u], sum);
      if (residual != nullptr) {
        float other[kWidth<T>];
        load_row(residual, i, size, true, other);
#pragma unroll
        for (int j = 0; j < kWidth<T>; ++j) sum[j] += other[j];
      }
      store_row(y, i, size, true, sum);
    }
  }
}

template <typename T, int kWorld>
__global__ void __launch_bounds__(kThreads)
    all_reduce(const T* x, const T* residual, T* y, int size, Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int num_pieces = (size + kWidth<T> - 1) / kWidth<T>;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const int begin = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  Patience patience;
  send(channel, number, x, size, begin, step, num_pieces);
  receive<T, kWorld>(channel, number, x, residual, y, size, begin, step, num_pieces, patience);
}

template <typename T, int kWorld, int kRounds>
__global__ void __launch_bounds__(kThreads)
    all_reduce_add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* new_residual, int num_rows,
                           int size, float eps, Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int row_pieces = size / kWidth<T>, total = num_rows * size;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x)
    send(channel, number, x, total, row * row_pieces + thread, threads, (row + 1) * row_pieces);
  Patience patience;
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
    receive<T, kWorld>(channel, number, x, residual, new_residual, total, row * row_pieces + thread, threads,
                       (row + 1) * row_pieces, patience);
    Row<T, kRounds> values, weights;  // a thread reads what it has written
    load_rounds<T, kRounds>(new_residual + row * size, size, values);
    load_rounds<T, kRounds>(weight, size, weights);
    norm_row<T, kRounds>(values, weights, size, eps);
    store_rounds<T, kRounds>(y + row * size, size, values);
    __syncthreads();  // the next row's sum goes through the same shared memory
  }
}
