// All-reduce in one trip, for small messages: alone, with the residual add, or with that and RMSNorm. ref.collectives:
//   all_reduce; ref.rmsnorm: add_rmsnorm.
// y = Σ_r x_r + residual (0 if null);  with the norm: new_residual = that, y = its RMSNorm
// x, y, residual [size] or [num_rows, size] T, contiguous; new_residual likewise, may be residual; weight [size] T;
//   channel: include/channel.cuh.
// A thread owns packets of 12 bytes, with the norm a block rows. It sends all that it owns to every rank, with a flag in
//   each packet, and then takes the others' packets as they come.
// T: bf16, fp16, float. kWorld: ranks, 2 to 8. kRounds: 1 to 2.
// float32; ranks in their order, then the residual; rounded to T once, and y of the norm once more.
// The launcher: all blocks are on the GPU at once; the packets fit in a slot; x, y, residual begin at multiples of 16
//   bytes; whole warps; the norm: whole pieces a row, threads · kRounds · kWidth<T> ≥ size. All ranks launch alike.
#include "channel.cuh"
#include "rmsnorm.cuh"

constexpr int kThreads = 512;
template <int kWorld>
constexpr int kThreadsOf = kWorld > 4 ? 256 : kThreads;  // what comes from all ranks is in registers

template <typename T>
constexpr int kNumbers = 4 * kWords / sizeof(T);  // of a packet

__device__ __forceinline__ void unpack(const Words& words, float (&x)[3], float) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = __uint_as_float(words.word[i]);
}
template <typename T>  // bf16 or fp16
__device__ __forceinline__ void unpack(const Words& words, float (&x)[6], T) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    x[2 * i] = to_float(T{static_cast<unsigned short>(words.word[i])});
    x[2 * i + 1] = to_float(T{static_cast<unsigned short>(words.word[i] >> 16)});
  }
}
__device__ __forceinline__ Words pack_words(const float (&x)[3], float) {
  return {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2])}};
}
__device__ __forceinline__ Words pack_words(const float (&x)[6], bf16) {
  return {{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5])}};
}
__device__ __forceinline__ Words pack_words(const float (&x)[6], fp16) {
  return {{pack_fp16(x[0], x[1]), pack_fp16(x[2], x[3]), pack_fp16(x[4], x[5])}};
}

// Packet i of an array of `size` numbers, zeros behind its end.
template <typename T>
__device__ __forceinline__ void load_packet(const T* x, int i, int size, float (&values)[kNumbers<T>]) {
  const int first = i * kNumbers<T>;
  if (first + kNumbers<T> <= size) {
    const auto* const words = reinterpret_cast<const unsigned*>(x) + i * kWords;
    unpack(Words{{words[0], words[1], words[2]}}, values, T{});
    return;
  }
#pragma unroll
  for (int j = 0; j < kNumbers<T>; ++j) values[j] = first + j < size ? to_float(x[first + j]) : 0.0f;
}
template <typename T>
__device__ __forceinline__ void store_packet(T* x, int i, int size, const float (&values)[kNumbers<T>]) {
  const int first = i * kNumbers<T>;
  if (first + kNumbers<T> <= size) {
    const Words words = pack_words(values, T{});
    auto* const to = reinterpret_cast<unsigned*>(x) + i * kWords;
    to[0] = words.word[0], to[1] = words.word[1], to[2] = words.word[2];
    return;
  }
#pragma unroll
  for (int j = 0; j < kNumbers<T>; ++j)
    if (first + j < size) x[first + j] = from_float<T>(values[j]);
}

// Packets begin, begin + step, … of x, which has `size` numbers, to `place` and on.
template <typename T>
__device__ __forceinline__ void send(const Channel& channel, unsigned number, const T* x, int size, int place, int begin,
                                     int step) {
  for (int i = begin; i * kNumbers<T> < size; i += step) {
    float mine[kNumbers<T>];
    load_packet(x, i, size, mine);
    send_packet(channel, number, place + i, pack_words(mine, T{}));
  }
}

// y = Σ_r x_r + residual of the same packets, as they come.
template <typename T, int kWorld>
__device__ __forceinline__ void receive(const Channel& channel, unsigned number, const T* x, const T* residual, T* y,
                                        int size, int place, int begin, int step, Patience& patience) {
  constexpr int kCount = kWorld == 2 ? 4 : kWorld <= 4 ? 2 : 1;  // awaited at once
  const int num_packets = (size + kNumbers<T> - 1) / kNumbers<T>;
  for (int first = begin; first < num_packets; first += kCount * step) {
    Words words[kCount][kWorld - 1];
    receive_packets<kWorld, kCount>(channel, number, place + first, step, place + num_packets, words, patience);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int i = first + u * step;
      if (i >= num_packets) break;
      float mine[kNumbers<T>], sum[kNumbers<T>], other[kNumbers<T>];
      load_packet(x, i, size, mine);
#pragma unroll
      for (int p = 0; p < kWorld; ++p) {  // of the others, rank p is the p-th where it is before this one, else the one before
        const Words later = words[u][p > 0 ? p - 1 : 0], sooner = words[u][p < kWorld - 1 ? p : kWorld - 2];
        unpack(channel.rank < p ? later : sooner, other, T{});
#pragma unroll
        for (int j = 0; j < kNumbers<T>; ++j) {
          const float share = channel.rank == p ? mine[j] : other[j];
          sum[j] = p == 0 ? share : sum[j] + share;
        }
      }
      if (residual != nullptr) {
        load_packet(residual, i, size, other);
#pragma unroll
        for (int j = 0; j < kNumbers<T>; ++j) sum[j] += other[j];
      }
      store_packet(y, i, size, sum);
    }
  }
}

template <typename T, int kWorld>
__global__ void __launch_bounds__(kThreadsOf<kWorld>, 1)
    all_reduce(const T* x, const T* residual, T* y, int size, const __grid_constant__ Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  const int begin = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  Patience patience;
  send(channel, number, x, size, 0, begin, step);
  receive<T, kWorld>(channel, number, x, residual, y, size, 0, begin, step, patience);
  count_block(channel);
}

template <typename T, int kWorld, int kRounds>
__global__ void __launch_bounds__(kThreads)
    all_reduce_add_rmsnorm(const T* x, const T* residual, const T* weight, T* y, T* new_residual, int num_rows,
                           int size, float eps, const __grid_constant__ Channel channel) {
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int row_packets = (size + kNumbers<T> - 1) / kNumbers<T>;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x)
    send(channel, number, x + row * size, size, row * row_packets, thread, threads);
  Patience patience;
  for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
    receive<T, kWorld>(channel, number, x + row * size, residual + row * size, new_residual + row * size, size,
                       row * row_packets, thread, threads, patience);
    __syncthreads();  // the row is read as others have written it, and the sum of the row before has been read
    Row<T, kRounds> values, weights;
    load_rounds<T, kRounds>(new_residual + row * size, size, values);
    load_rounds<T, kRounds>(weight, size, weights);
    norm_row<T, kRounds>(values, weights, size, eps);
    store_rounds<T, kRounds>(y + row * size, size, values);
  }
  count_block(channel);
}
