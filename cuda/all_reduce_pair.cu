// All-reduce between two ranks, in chunks of any number, as numbers or as int8. ref.collectives: all_reduce;
//   ref.int8_all_reduce, ref.int8_feedback.
// y = x_0 + x_1 + residual (0 if null);  as int8: y = H(dequantized groups of both) + residual
// x, residual, y [size] T, contiguous, y may be residual; carried [size] bf16 or null: include/carried.cuh; exchange: include/exchange.cuh, of which shares use nothing.
// A block owns every gridDim.x-th chunk, of which a warp has a bundle: 16 bytes of each lane in four rounds, and as int8
//   the scales of 64 groups. It puts all of its own where the other rank reads it, one chunk ahead of what it takes:
//   two ranks that add up half each and send sums would move as many bytes, twice.
// T: bf16, fp16, float (not as int8). kWire: kPlain, kInt8, kRotated.
// float32; rounded to T once; as int8 the roundings of ref.int8_all_reduce.
// The launcher: all blocks are on the GPU at once; whole warps, whose bundles fit in a slot; eight stages or more; x, y,
//   residual begin at multiples of 16 bytes; as int8: size is a multiple of 32, and so is a row. Both ranks launch alike.
#include "carried.cuh"
#include "exchange.cuh"
#include "wire.cuh"

constexpr int kThreads = 512;
constexpr int kRounds = 4;
constexpr int kLaneBytes = 16;  // of a round

template <typename T, Wire kWire>
struct Bundle {
  static constexpr int kNumbers = kWire == kPlain ? kWidth<T> : 16;  // of a lane in a round
  static constexpr int kPieces = kNumbers / kWidth<T>;               // of 16 bytes
  static constexpr int kSize = 32 * kRounds * kNumbers;
  static constexpr int kCodeBytes = 32 * kRounds * kLaneBytes;
  static constexpr int kBytes = kCodeBytes + (kWire == kPlain ? 0 : 16 * 2 * kRounds);

  // Where the numbers of a piece of this lane begin, in the bundle that begins at `first`.
  __device__ static __forceinline__ int place(int first, int round, int piece) {
    return first + (round * 32 + static_cast<int>(threadIdx.x % 32)) * kNumbers + piece * kWidth<T>;
  }
};

// What a lane has of a bundle of an array, all read at once; zeros behind its end.
template <typename T, Wire kWire>
struct Pieces {
  using Of = Bundle<T, kWire>;
  uint4 raw[kRounds][Of::kPieces];

  __device__ __forceinline__ void load(const T* x, int first, int size) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
#pragma unroll
      for (int piece = 0; piece < Of::kPieces; ++piece) {
        const int i = Of::place(first, round, piece);
        if (i + kWidth<T> <= size) {
          raw[round][piece] = load16(x + i);
        } else {
          float values[kWidth<T>];
          load_row(x, i, size, true, values);
          raw[round][piece] = pack(values, T{});
        }
      }
  }
  __device__ __forceinline__ void numbers(int round, float (&values)[Of::kNumbers]) const {
#pragma unroll
    for (int piece = 0; piece < Of::kPieces; ++piece) {
      float part[kWidth<T>];
      unpack(raw[round][piece], part, T{});
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[piece * kWidth<T> + i] = part[i];
    }
  }
};

// What a lane has of a bundle, as it travels.
template <typename T, Wire kWire>
struct Share {
  using Of = Bundle<T, kWire>;
  uint4 words[kRounds];
  uint2 scales;  // of the rounds, 16 bits each

  __device__ __forceinline__ void encode(const Pieces<T, kWire>& pieces, const Carried& carried, int first, int size) {
    if constexpr (kWire == kPlain) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) words[round] = pieces.raw[round][0];
    } else {
      Pieces<bf16, kWire> owed{};
      if (carried.is_read) owed.load(carried.errors, first, size);
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        float values[16], errors[16];
        pieces.numbers(round, values);
        owed.numbers(round, errors);
        if constexpr (kWire == kRotated) rotate(values);
#pragma unroll
        for (int i = 0; i < 16; ++i) values[i] += errors[i];
        const Codes<16> codes = quantize(values);
        words[round] = make_uint4(codes.q[0], codes.q[1], codes.q[2], codes.q[3]);
        unsigned& two = round < 2 ? scales.x : scales.y;
        two = round % 2 == 0 ? codes.scale : two | static_cast<unsigned>(codes.scale) << 16;
        const int place = Of::place(first, round, 0);
        keep_carried(carried, place, place < size, values, codes);
      }
    }
  }
  __device__ __forceinline__ void numbers(int round, float (&values)[Of::kNumbers]) const {
    const uint4& q = words[round];
    if constexpr (kWire == kPlain) {
      unpack(q, values, T{});
    } else {
      const unsigned scale = (round < 2 ? scales.x : scales.y) >> 16 * (round % 2);
      dequantize(Codes<16>{{q.x, q.y, q.z, q.w}, static_cast<unsigned short>(scale)}, values);
    }
  }

  __device__ __forceinline__ void put(char* to) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) store16(to + (round * 32 + lane) * kLaneBytes, words[round]);
    if (kWire != kPlain && lane % 2 == 0) *reinterpret_cast<uint2*>(to + Of::kCodeBytes + lane / 2 * 8) = scales;
  }
  __device__ __forceinline__ void get(const char* from) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) words[round] = load16_system(from + (round * 32 + lane) * kLaneBytes);
    if constexpr (kWire != kPlain) scales = load8_system(from + Of::kCodeBytes + lane / 2 * 8);
  }
};

// y = mine + theirs of a bundle, + old where has_old.
template <typename T, Wire kWire>
__device__ __forceinline__ void add(const Share<T, kWire>& mine, const Share<T, kWire>& theirs,
                                    const Pieces<T, kWire>& old, bool has_old, T* y, int first, int size) {
  using Of = Bundle<T, kWire>;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float sum[Of::kNumbers], other[Of::kNumbers];
    mine.numbers(round, sum);
    theirs.numbers(round, other);
#pragma unroll
    for (int i = 0; i < Of::kNumbers; ++i) sum[i] += other[i];
    if constexpr (kWire == kRotated) rotate(sum);
    old.numbers(round, other);
#pragma unroll
    for (int piece = 0; piece < Of::kPieces; ++piece) {
      float part[kWidth<T>];
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const int n = piece * kWidth<T> + i;
        part[i] = has_old ? sum[n] + other[n] : sum[n];
      }
      store_row(y, Of::place(first, round, piece), size, true, part);
    }
  }
}

template <typename T, Wire kWire>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_pair(const T* x, const T* residual, T* y, int size, bf16* carried_errors, int is_read,
                    const __grid_constant__ Exchange exchange) {
  static_assert(kWire == kPlain || kWidth<T> == 8, "int8 stands for numbers of 16 bits");
  dependency_wait();
  dependency_launch();
  using Of = Bundle<T, kWire>;
  using Part = Share<T, kWire>;
  const Carried carried{carried_errors, is_read};
  const unsigned number = next_number(exchange);
  const int warp = static_cast<int>(threadIdx.x / 32), num_warps = static_cast<int>(blockDim.x / 32);
  const int num_bundles = (size + Of::kSize - 1) / Of::kSize, stride = static_cast<int>(gridDim.x) * num_warps;
  const int num_steps = (num_bundles + stride - 1) / stride;  // of all blocks alike: an empty chunk has its flag too
  const int peer = 1 - exchange.rank, half = exchange.num_stages / 2;
  Patience patience;

  const auto bundle = [&](int step) { return step * stride + static_cast<int>(blockIdx.x) * num_warps + warp; };
  // Who begins number n + 2 has seen a chunk of number n + 1, so the other has ended number n.
  const auto slot = [&](int step) { return slot_of(exchange, static_cast<int>(number & 1) * half + step % half); };
  const auto put = [&](int step) {
    Part part{};
    if (bundle(step) < num_bundles) {
      Pieces<T, kWire> pieces;
      pieces.load(x, bundle(step) * Of::kSize, size);
      part.encode(pieces, carried, bundle(step) * Of::kSize, size);
      part.put(exchange.gather_to[0] + slot(step) + warp * Of::kBytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) announce(exchange, exchange.gather_to[0], slot(step), number, step);
    return part;
  };

  Part mine = put(0);
  for (int step = 0; step < num_steps; ++step) {
    Part next{};
    if (step + 1 < num_steps) next = put(step + 1);
    const bool has_one = bundle(step) < num_bundles;
    Pieces<T, kWire> old{};
    if (has_one && residual != nullptr) old.load(residual, bundle(step) * Of::kSize, size);
    await<2>(exchange, exchange.gather_from, slot(step), number, step, patience);
    if (has_one) {
      Part theirs{};
      theirs.get(exchange.gather_from[peer] + slot(step) + warp * Of::kBytes);
      add(mine, theirs, old, residual != nullptr, y, bundle(step) * Of::kSize, size);
    }
    mine = next;
  }
  count_block(exchange);
}
