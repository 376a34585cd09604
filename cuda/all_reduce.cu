// All-reduce in one trip, for small messages: alone, with the residual add, or with that and RMSNorm. ref.collectives:
//   all_reduce; ref.rmsnorm: add_rmsnorm.
// y = Σ_r x_r + residual (0 if null);  with the norm: new_residual = that, y = its RMSNorm
// x, y, residual [size] or [num_rows, size] T, contiguous; new_residual likewise, may be residual; weight [size] T;
//   channel: include/channel.cuh.
// A thread owns shares of three pieces of 16 bytes, with the norm a block rows. It sends all that it owns to every rank,
//   as packets with a flag each, and then takes the others' packets as they come.
// T: bf16, fp16, float. kWorld: ranks, 2 to 8. kRounds: 1 to 2.
// float32; ranks in their order, then the residual; rounded to T once, and y of the norm once more.
// The launcher: all blocks are on the GPU at once; the shares fit in a slot; x, y, residual begin at multiples of 16
//   bytes; whole warps; the norm: whole pieces a row, threads · kRounds · kWidth<T> ≥ size. All ranks launch alike.
#include "channel.cuh"
#include "rmsnorm.cuh"

constexpr int kThreads = 512;

// A share of [first, end) pieces of x, which has `size` numbers; zeros where there are none.
template <typename T>
__device__ __forceinline__ void send(const Channel& channel, unsigned number, const T* x, int size, int first, int end,
                                     int share, int place) {
  Share mine;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int piece = first + piece_of(share, j);
    float values[kWidth<T>];
    load_row(x, piece * kWidth<T>, piece < end ? size : 0, true, values);
    set_piece(mine, j, pack(values, T{}));
  }
  send_share(channel, number, place, mine);
}

template <typename T>
__device__ __forceinline__ void add(float (&sum)[kWidth<T>], const float (&other)[kWidth<T>], bool is_first) {
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) sum[i] = is_first ? other[i] : sum[i] + other[i];
}

// y = Σ_r x_r + residual of the same share, when all have come.
template <typename T, int kWorld>
__device__ __forceinline__ void receive(const Channel& channel, unsigned number, const T* x, const T* residual, T* y,
                                        int size, int first, int end, int share, int place, Patience& patience) {
  constexpr int kAtOnce = kWorld == 2 ? 1 : 2;
  const int rank = channel.rank;
  float sums[kPieces][kWidth<T>];
  const auto add_mine = [&](int j, bool is_first) {
    float mine[kWidth<T>];
    const int piece = first + piece_of(share, j);
    load_row(x, piece * kWidth<T>, piece < end ? size : 0, true, mine);
    add<T>(sums[j], mine, is_first);
  };
#pragma unroll 1
  for (int q = 0; q < kWorld - 1; q += kAtOnce) {  // the q-th of the others; the own share comes before the rank-th
    Share shares[kAtOnce];
    // the last turn begins earlier, if it must: what it takes again it does not add again
    const int from = min(q, kWorld - 1 - kAtOnce);
    receive_shares<kAtOnce>(channel, number, place, from, shares, patience);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (from + a < q) continue;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        float other[kWidth<T>];
        unpack(get_piece(shares[a], j), other, T{});
        if (from + a == rank) add_mine(j, rank == 0);
        add<T>(sums[j], other, from + a == 0 && rank != 0);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (rank == kWorld - 1) add_mine(j, false);
    const int piece = first + piece_of(share, j), i = piece * kWidth<T>;
    if (piece >= end) break;
    if (residual != nullptr) {
      float other[kWidth<T>];
      load_row(residual, i, size, true, other);
      add<T>(sums[j], other, false);
    }
    store_row(y, i, size, true, sums[j]);
  }
}

// Shares of so many pieces.
__device__ __forceinline__ int num_shares(int num_pieces) {
  return (num_pieces + 32 * kPieces - 1) / (32 * kPieces) * 32;
}

template <typename T, int kWorld>
__global__ void __launch_bounds__(kThreads)
    all_reduce(const T* x, const T* residual, T* y, int size, Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int num_pieces = (size + kWidth<T> - 1) / kWidth<T>, end = num_shares(num_pieces);
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const int begin = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  Patience patience;
  for (int i = begin; i < end; i += step) send(channel, number, x, size, 0, num_pieces, i, i);
  for (int i = begin; i < end; i += step)
    receive<T, kWorld>(channel, number, x, residual, y, size, 0, num_pieces, i, i, patience);
}

template <typename T, int kWorld, int kRounds>
__global__ void __launch_bounds__(kThreads)
    all_reduce_add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* new_residual, int num_rows,
                           int size, float eps, Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int row_pieces = size / kWidth<T>, row_shares = num_shares(row_pieces), total = num_rows * size;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x)
    for (int i = thread; i < row_shares; i += threads)
      send(channel, number, x, total, row * row_pieces, (row + 1) * row_pieces, i, row * row_shares + i);
  Patience patience;
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int i = thread; i < row_shares; i += threads)
      receive<T, kWorld>(channel, number, x, residual, new_residual, total, row * row_pieces, (row + 1) * row_pieces, i,
                         row * row_shares + i, patience);
    __syncthreads();  // the row is read as others have written it, and the sum of the row before has been read
    Row<T, kRounds> values, weights;
    load_rounds<T, kRounds>(new_residual + row * size, size, values);
    load_rounds<T, kRounds>(weight, size, weights);
    norm_row<T, kRounds>(values, weights, size, eps);
    store_rounds<T, kRounds>(y + row * size, size, values);
  }
}
