// All-reduce in two trips and many pieces, for large messages, as numbers or as int8. ref.collectives: all_reduce;
//   ref.int8_all_reduce, ref.int8_feedback.
// y = Σ_r x_r + residual (0 if null);  as int8: y = H(dequantized sums of rotated groups) + residual
// x, residual, y [size] T, contiguous, y may be either; carried [size] bf16 or null: include/carried.cuh; exchange: include/exchange.cuh.
// Units (16 bytes, or a group of 32 numbers) are dealt out to ranks in slices; a block owns every gridDim.x-th chunk of
//   each slice. Chunk by chunk it sends the others' units to their owners, sums its own and sends the sums to all.
// T: bf16, fp16, float (not as int8). kWorld: ranks, 2 to 8. kWire: kPlain, kInt8, kRotated.
// float32; ranks in their order, then the residual, rounded to T once; as int8 the roundings of ref.int8_all_reduce.
// The launcher: all blocks are on the GPU at once; whole warps; a chunk of units, a multiple of 8, fits in a slot; x, y,
//   residual begin at multiples of 16 bytes; as int8: size is a multiple of 32, and so is a row. All ranks launch alike.
#include "carried.cuh"
#include "exchange.cuh"
#include "wire.cuh"

constexpr int kThreads = 512;

template <typename T, int kWorld, Wire kWire>
struct Work {
  static constexpr int kUnit = kWire == kPlain ? 1 : kGroup / kWidth<T>;  // pieces of 16 bytes
  static_assert(kWire == kPlain || kWidth<T> == 8, "int8 stands for numbers of 16 bits");

  const Exchange& exchange;
  const T *x, *residual;
  T* y;
  int size, num_units, chunk;
  Carried carried;
  unsigned number;
  Patience patience;

  // First unit of a rank's slice: ref.collectives.split_sizes.
  __device__ __forceinline__ int slice(int rank) const {
    return rank * (num_units / kWorld) + min(rank, num_units % kWorld);
  }
  __device__ __forceinline__ int first(int owner, int step) const {
    return min(slice(owner) + (step * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * chunk,
               slice(owner + 1));
  }
  __device__ __forceinline__ int count(int owner, int step) const {
    return min(chunk, slice(owner + 1) - first(owner, step));
  }
  __device__ __forceinline__ index_t slot(int step) const { return slot_of(exchange, step); }

  // f(piece of the chunk, whether there is one, its numbers' place in x), for whole warps.
  template <typename Function>
  __device__ __forceinline__ void for_pieces(int owner, int step, Function f) const {
    const int begin = first(owner, step) * kUnit, num = count(owner, step) * kUnit;
    for (int base = 0; base < num; base += static_cast<int>(blockDim.x)) {
      const int piece = base + static_cast<int>(threadIdx.x);
      f(piece, piece < num, (begin + piece) * kWidth<T>);
    }
  }

  __device__ __forceinline__ void load(const T* from, int place, bool exists, float (&values)[kWidth<T>]) const {
    load_row(from, place, exists ? size : 0, true, values);
  }

  // What this rank brings of x, with what it has left out before.
  __device__ __forceinline__ void bring(int place, bool exists, float (&values)[kWidth<T>]) const {
    load(x, place, exists, values);
    if constexpr (kWire != kPlain) {
      float errors[kWidth<T>];
      load_carried(carried, place, exists, errors);
      if constexpr (kWire == kRotated) rotate(values);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] += errors[i];
    }
  }
  __device__ __forceinline__ Codes<kWidth<T>> encode(int place, bool exists, const float (&values)[kWidth<T>]) const {
    if constexpr (kWire == kPlain) {
      return {};
    } else {
      const Codes<kWidth<T>> codes = quantize(values);
      keep_carried(carried, place, exists, values, codes);
      return codes;
    }
  }
  __device__ __forceinline__ void put(char* to, int piece, const Codes<kWidth<T>>& codes, const float (&values)[kWidth<T>]) const {
    if constexpr (kWire == kPlain) {
      store16(to + piece * 16, pack(values, T{}));
    } else {
      *reinterpret_cast<uint2*>(to + piece * 8) = make_uint2(codes.q[0], codes.q[1]);
      if (piece % kUnit == 0)
        *reinterpret_cast<unsigned short*>(to + chunk * kGroup + piece / kUnit * 2) = codes.scale;
    }
  }
  __device__ __forceinline__ void get(const char* from, int piece, bool exists, float (&values)[kWidth<T>]) const {
    if (!exists) {  // many lanes that read one place of another rank's memory take their turns
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] = 0.0f;
    } else if constexpr (kWire == kPlain) {
      unpack(load16_system(from + piece * 16), values, T{});
    } else {
      const uint2 q = load8_system(from + piece * 8);
      dequantize(Codes<kWidth<T>>{{q.x, q.y}, load2_system(from + chunk * kGroup + piece / kUnit * 2)}, values);
    }
  }

  // The end of a number's way: values are a sum, as it travelled.
  __device__ __forceinline__ void finish(float (&values)[kWidth<T>], int place, bool exists) const {
    if constexpr (kWire == kRotated) rotate(values);
    if (!exists) return;
    if (residual != nullptr) {
      float other[kWidth<T>];
      load(residual, place, true, other);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] += other[i];
    }
    store_row(y, place, size, true, values);
  }

  __device__ __forceinline__ void scatter(int step) const {
    for (int q = 1; q < kWorld; ++q) {
      const int owner = (exchange.rank + q) % kWorld;
      char* const to = exchange.scatter_to[owner] + slot(step);
      for_pieces(owner, step, [&](int piece, bool exists, int place) {
        float values[kWidth<T>];
        bring(place, exists, values);
        const Codes<kWidth<T>> codes = encode(place, exists, values);
        if (exists) put(to, piece, codes, values);
      });
    }
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < kWorld && peer != exchange.rank) announce(exchange, exchange.scatter_to[peer], slot(step), number, step);
  }

  __device__ __forceinline__ void reduce(int step) {
    await<kWorld>(exchange, exchange.scatter_from, slot(step), number, step, patience);
    for_pieces(exchange.rank, step, [&](int piece, bool exists, int place) {
      float mine[kWidth<T>], sum[kWidth<T>];
      bring(place, exists, mine);
#pragma unroll
      for (int p = 0; p < kWorld; ++p) {
        float share[kWidth<T>];
        if (p != exchange.rank) get(exchange.scatter_from[p] + slot(step), piece, exists, share);
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) {
          if (p == exchange.rank) share[i] = mine[i];
          sum[i] = p == 0 ? share[i] : sum[i] + share[i];
        }
      }
      const Codes<kWidth<T>> codes = encode(place, exists, sum);
      if constexpr (kWire == kPlain)
#pragma unroll
        for (int i = 0; i < kWidth<T>; ++i) sum[i] = to_float(from_float<T>(sum[i]));
      if (exists)
        for (int i = 0; i < exchange.num_outboxes; ++i) put(exchange.gather_to[i] + slot(step), piece, codes, sum);
      if constexpr (kWire != kPlain) dequantize(codes, sum);
      finish(sum, place, exists);
    });
    __syncthreads();
    const int outbox = static_cast<int>(threadIdx.x);
    if (outbox < exchange.num_outboxes) announce(exchange, exchange.gather_to[outbox], slot(step), number, step);
  }

  __device__ __forceinline__ void collect(int step) {
    await<kWorld>(exchange, exchange.gather_from, slot(step), number, step, patience);
    for (int q = 1; q < kWorld; ++q) {
      const int owner = (exchange.rank + q) % kWorld;
      const char* const from = exchange.gather_from[owner] + slot(step);
      for_pieces(owner, step, [&](int piece, bool exists, int place) {
        float sum[kWidth<T>];
        get(from, piece, exists, sum);
        finish(sum, place, exists);
      });
    }
  }
};

template <typename T, int kWorld, Wire kWire>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_pieces(const T* x, const T* residual, T* y, int size, int chunk, bf16* carried_errors, int is_read,
                      const __grid_constant__ Exchange exchange) {
  dependency_wait();
  dependency_launch();
  using Here = Work<T, kWorld, kWire>;
  const int unit = Here::kUnit * kWidth<T>, num_units = (size + unit - 1) / unit;
  Here work{exchange, x, residual, y, size, num_units, chunk, {carried_errors, is_read}, next_number(exchange), {}};
  const int longest = (num_units + kWorld - 1) / kWorld, stride = static_cast<int>(gridDim.x) * chunk;
  const int num_steps = (longest + stride - 1) / stride;  // of all blocks alike: an empty chunk has its flags too
  for (int step = 0; step < min(exchange.num_stages, num_steps); ++step) work.scatter(step);
  for (int step = 0; step <= num_steps; ++step) {
    if (step < num_steps) work.reduce(step);
    if (step == 0) continue;
    work.collect(step - 1);
    if (step - 1 + exchange.num_stages < num_steps) work.scatter(step - 1 + exchange.num_stages);
  }
  count_block(exchange);
}
