// All-reduce over islands, whose GPUs reach each other's memory, and of those of other islands none. ref.collectives:
//   all_reduce.
// y = Σ_r x_r + residual (0 if null)
// x, residual, y [size] T, contiguous, y may be either; exchange: include/exchange.cuh, of make_islands: areas of the
//   own island lie in memory of its GPUs, those of the same place in other islands in a window of the host.
// Pieces of 16 bytes are dealt out to the places of an island in slices; a block owns every gridDim.x-th chunk of each.
//   Chunk by chunk it sends the others' pieces to their owners in its island; an owner adds its island's to the sum of
//   the islands before, and hands it to its like in the next; the last hands the whole sum back to all of its likes, and
//   each hands it round in its island.
// T: bf16, fp16, float. kIsland: ranks of an island, 2 to 4; there are two islands or more.
// float32, from island to island too; ranks in their order, rounded to T; then the residual, rounded to T.
// The launcher: all blocks are on the GPU at once; whole warps; a chunk of pieces fits in a slot as float32; three stages
//   or more; x, y, residual begin at multiples of 16 bytes. All ranks launch alike.
#include "exchange.cuh"

constexpr int kThreads = 512;

template <typename T, int kIsland>
struct Work {
  static constexpr int kParts = kWidth<T> / 4;  // of 16 bytes, which a piece takes as float32

  const Exchange& exchange;
  const T *x, *residual;
  T* y;
  int size, num_pieces, chunk;
  unsigned number;
  int place, before, after, last;  // in its island; its like in the island before, < 0 in the first; in the next; the last
  Patience patience;

  // First piece of the slice of a place: ref.collectives.split_sizes.
  __device__ __forceinline__ int slice(int owner) const {
    return owner * (num_pieces / kIsland) + min(owner, num_pieces % kIsland);
  }
  __device__ __forceinline__ int member(int owner) const { return exchange.rank - place + owner; }
  __device__ __forceinline__ index_t slot(int step) const { return slot_of(exchange, step); }

  // f(piece of the chunk, its numbers' place in x)
  template <typename Function>
  __device__ __forceinline__ void for_pieces(int owner, int step, Function f) const {
    const int end = slice(owner + 1);
    const int begin = slice(owner) + (step * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * chunk;
    for (int piece = static_cast<int>(threadIdx.x); piece < min(chunk, end - begin); piece += static_cast<int>(blockDim.x))
      f(piece, (begin + piece) * kWidth<T>);
  }
  __device__ __forceinline__ void load(const T* from, int at, float (&values)[kWidth<T>]) const {
    load_row(from, at, size, true, values);
  }

  // The other members of the island, one a thread.
  __device__ __forceinline__ int member_of_thread() const {
    const int thread = static_cast<int>(threadIdx.x);
    return thread < kIsland && thread != place ? member(thread) : -1;
  }

  __device__ __forceinline__ void scatter(int step) const {
    for (int q = 1; q < kIsland; ++q) {
      const int owner = (place + q) % kIsland;
      char* const to = exchange.scatter_to[member(owner)] + slot(step);
      for_pieces(owner, step, [&](int piece, int at) {
        float values[kWidth<T>];
        load(x, at, values);
        store16(to + piece * 16, pack(values, T{}));
      });
    }
    __syncthreads();
    const int peer = member_of_thread();
    if (peer >= 0) announce(exchange, exchange.scatter_to[peer], slot(step), number, step);
  }

  // The sum of the islands before and this one.
  __device__ __forceinline__ void reduce(int step) const {
    for_pieces(place, step, [&](int piece, int at) {
      float sum[kWidth<T>];
      if (before >= 0) {
        const char* const from = exchange.scatter_from[before] + slot(step);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float values[4];
          unpack(load16_system(from + (part * chunk + piece) * 16), values, 0.0f);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[part * 4 + i] = values[i];
        }
      }
#pragma unroll
      for (int p = 0; p < kIsland; ++p) {
        float share[kWidth<T>];
        if (p == place)
          load(x, at, share);
        else
          unpack(load16_system(exchange.scatter_from[member(p)] + slot(step) + piece * 16), share, T{});
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) sum[i] = p == 0 && before < 0 ? share[i] : sum[i] + share[i];
      }
      if (exchange.rank == last)
        give(step, piece, at, pack(sum, T{}));
      else
        hand_on(step, piece, sum);
    });
    __syncthreads();
    if (exchange.rank == last)
      announce_sums(step);
    else if (threadIdx.x == 0)
      announce(exchange, exchange.scatter_to[after], slot(step), number, step);
  }
  __device__ __forceinline__ void hand_on(int step, int piece, const float (&sum)[kWidth<T>]) const {
    char* const to = exchange.scatter_to[after] + slot(step);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = sum[part * 4 + i];
      store16(to + (part * chunk + piece) * 16, pack(values, 0.0f));
    }
  }

  // What the last island has rounded goes round in this one.
  __device__ __forceinline__ void pass_on(int step) const {
    const char* const from = exchange.gather_from[last] + slot(step);
    for_pieces(place, step, [&](int piece, int at) { give(step, piece, at, load16_system(from + piece * 16)); });
    __syncthreads();
    announce_sums(step);
  }
  __device__ __forceinline__ void give(int step, int piece, int at, const uint4& sum) const {
    for (int i = 0; i < exchange.num_outboxes; ++i) store16(exchange.gather_to[i] + slot(step) + piece * 16, sum);
    finish(sum, at);
  }
  __device__ __forceinline__ void announce_sums(int step) const {
    const int outbox = static_cast<int>(threadIdx.x);
    if (outbox < exchange.num_outboxes) announce(exchange, exchange.gather_to[outbox], slot(step), number, step);
  }

  __device__ __forceinline__ void collect(int step) const {
    for (int q = 1; q < kIsland; ++q) {
      const int owner = (place + q) % kIsland;
      const char* const from = exchange.gather_from[member(owner)] + slot(step);
      for_pieces(owner, step, [&](int piece, int at) { finish(load16_system(from + piece * 16), at); });
    }
  }

  // The end of a number's way.
  __device__ __forceinline__ void finish(const uint4& sum, int at) const {
    float values[kWidth<T>];
    unpack(sum, values, T{});
    if (residual != nullptr) {
      float other[kWidth<T>];
      load(residual, at, other);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] += other[i];
    }
    store_row(y, at, size, true, values);
  }

  __device__ __forceinline__ void await_shares(int step) {
    const int peer = static_cast<int>(threadIdx.x) == kIsland ? before : member_of_thread();
    await(exchange, exchange.scatter_from, peer, slot(step), number, step, patience);
  }
  __device__ __forceinline__ void await_sum(int step) {
    await(exchange, exchange.gather_from, threadIdx.x == 0 ? last : -1, slot(step), number, step, patience);
  }
  __device__ __forceinline__ void await_sums(int step) {
    await(exchange, exchange.gather_from, member_of_thread(), slot(step), number, step, patience);
  }
};

template <typename T, int kIsland>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_islands(const T* x, const T* residual, T* y, int size, int chunk,
                       const __grid_constant__ Exchange exchange) {
  dependency_wait();
  dependency_launch();
  const int num_pieces = (size + kWidth<T> - 1) / kWidth<T>;
  const int rank = exchange.rank, place = rank % kIsland, last = exchange.world_size - kIsland + place;
  Work<T, kIsland> work{exchange, x, residual, y, size, num_pieces, chunk, next_number(exchange),
                        place, rank - kIsland, rank + kIsland, last, {}};
  const int longest = (num_pieces + kIsland - 1) / kIsland, stride = static_cast<int>(gridDim.x) * chunk;
  const int num_steps = (longest + stride - 1) / stride;  // of all blocks alike: an empty chunk has its flags too
  // A sum is on its way over all islands and back meanwhile. Whoever scatters a chunk has collected that which had its
  // slots before, so all islands have passed that on, and read what they were handed.
  const int behind = exchange.num_stages - 2;
  for (int step = 0; step < min(exchange.num_stages, num_steps); ++step) work.scatter(step);
  for (int step = 0; step < num_steps + behind + 1; ++step) {
    if (step < num_steps) {
      work.await_shares(step);
      work.reduce(step);
    }
    const int passed = step - behind, collected = passed - 1, scattered = collected + exchange.num_stages;
    if (passed >= 0 && passed < num_steps && rank != last) {
      work.await_sum(passed);
      work.pass_on(passed);
    }
    if (collected < 0) continue;
    work.await_sums(collected);
    work.collect(collected);
    if (scattered < num_steps) work.scatter(scattered);
  }
  count_block(exchange);
}
