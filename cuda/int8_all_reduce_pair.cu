// All-reduce between two ranks as int8 in packets with flags, for small messages. ref.int8_all_reduce, ref.int8_feedback.
// y = H(dequantized rotated groups of both ranks) + residual (0 if null); without the rotation H is left out
// x, residual, y [size] T, contiguous, y may be either; carried [size] bf16 or null: include/carried.cuh; channel: include/channel.cuh.
// A warp owns every so many-th bundle of 32 groups, of which a lane has half a group in two rounds. It sends a bundle, and
//   the next one before it takes the other rank's.
// T: bf16, fp16. kRotated: whether groups are rotated.
// float32, with the roundings of ref.int8_all_reduce; then the residual; rounded to T once.
// The launcher: all blocks are on the GPU at once; whole warps; size is a multiple of 32; the bundles fit in a slot; x, y,
//   residual begin at multiples of 16 bytes. Both ranks launch alike.
#include "carried.cuh"
#include "channel.cuh"

constexpr int kThreads = 512;
constexpr int kRounds = 2;
constexpr int kNumbers = 16;                       // of a lane in a round
constexpr int kSize = 32 * kRounds * kNumbers;     // of a bundle
constexpr int kPackets = 3;                        // of a lane: the codes, and the scale of one of its groups

struct Share {  // what a lane has of a bundle
  Codes<kNumbers> codes[kRounds];
};

// Of a bundle that begins at `first`; numbers behind the end are zeros, and none of them is in a group with others.
template <typename T, bool kRotated>
__device__ __forceinline__ Share encode(const T* x, const Carried& carried, int first, int size) {
  Share share;
  float values[kRounds][kNumbers], errors[kRounds][kNumbers], part[8];
  const auto place = [&](int round) { return first + (round * 32 + static_cast<int>(threadIdx.x % 32)) * kNumbers; };
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {  // all that is read before anything is written
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_row(x, place(round) + half * 8, size, true, part);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[round][half * 8 + i] = part[i];
    }
    load_carried(carried, place(round), place(round) < size, errors[round]);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if constexpr (kRotated) rotate(values[round]);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) values[round][i] += errors[round][i];
    share.codes[round] = quantize(values[round]);
    keep_carried(carried, place(round), place(round) < size, values[round], share.codes[round]);
  }
  return share;
}

__device__ __forceinline__ index_t packet_of(int bundle, int packet) {
  return (static_cast<index_t>(bundle) * kPackets + packet) * 32 * kPacketBytes + threadIdx.x % 32 * kPacketBytes;
}

// The first lane of a group has the scale of its first round, the second that of the second.
__device__ __forceinline__ void send(char* slot, int bundle, const Share& share, unsigned number) {
  const unsigned(&a)[4] = share.codes[0].q;
  const unsigned(&b)[4] = share.codes[1].q;
  store_flagged(slot + packet_of(bundle, 0), a[0], a[1], a[2], number);
  store_flagged(slot + packet_of(bundle, 1), a[3], b[0], b[1], number);
  const unsigned short scale = threadIdx.x % 2 == 0 ? share.codes[0].scale : share.codes[1].scale;
  store_flagged(slot + packet_of(bundle, 2), b[2], b[3], scale, number);
}

__device__ __forceinline__ Share receive(const Channel& channel, const char* slot, int bundle, unsigned number,
                                         Patience& patience) {
  uint4 packets[kPackets];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < kPackets; ++i) packets[i] = load_flagged(slot + packet_of(bundle, i));
#pragma unroll
    for (int i = 0; i < kPackets; ++i) all &= packets[i].w == number;
  } while (!all && patience.lasts(channel, number, 1 - channel.rank));
  __syncwarp();
  const unsigned scale = packets[2].z, other = __shfl_xor_sync(kAllLanes, scale, 1);
  const bool is_first = threadIdx.x % 2 == 0;
  return {{{{packets[0].x, packets[0].y, packets[0].z, packets[1].x}, static_cast<unsigned short>(is_first ? scale : other)},
           {{packets[1].y, packets[1].z, packets[2].x, packets[2].y}, static_cast<unsigned short>(is_first ? other : scale)}}};
}

template <typename T, bool kRotated>
__device__ __forceinline__ void add(const Share& mine, const Share& theirs, const T* residual, T* y, int first, int size) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float sum[kNumbers], other[kNumbers];
    dequantize(mine.codes[round], sum);
    dequantize(theirs.codes[round], other);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) sum[i] += other[i];
    if constexpr (kRotated) rotate(sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first + (round * 32 + static_cast<int>(threadIdx.x % 32)) * kNumbers + half * 8;
      float part[8], old[8];
      if (residual != nullptr) load_row(residual, at, size, true, old);
#pragma unroll
      for (int i = 0; i < 8; ++i) part[i] = residual != nullptr ? sum[half * 8 + i] + old[i] : sum[half * 8 + i];
      store_row(y, at, size, true, part);
    }
  }
}

template <typename T, bool kRotated>
__global__ void __launch_bounds__(kThreads, 1)
    int8_all_reduce_pair(const T* x, const T* residual, T* y, int size, bf16* carried_errors, int is_read,
                         const __grid_constant__ Channel channel) {
  static_assert(kWidth<T> == 8, "int8 stands for numbers of 16 bits");
  dependency_wait();
  dependency_launch();
  const unsigned number = next_number(channel);
  const int num_bundles = (size + kSize - 1) / kSize;
  const int begin = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int step = static_cast<int>(gridDim.x * blockDim.x / 32);
  char* const to = channel.outboxes[0] + slot_of(channel, number, channel.rank);
  const char* const from = channel.inbox + slot_of(channel, number, 1 - channel.rank);
  Patience patience;

  const auto put = [&](int bundle) {
    const Share share = encode<T, kRotated>(x, {carried_errors, is_read}, bundle * kSize, size);
    send(to, bundle, share, number);
    return share;
  };
  Share mine{}, next{};
  if (begin < num_bundles) mine = put(begin);
  for (int bundle = begin; bundle < num_bundles; bundle += step) {
    if (bundle + step < num_bundles) next = put(bundle + step);
    const Share theirs = receive(channel, from, bundle, number, patience);
    add<T, kRotated>(mine, theirs, residual, y, bundle * kSize, size);
    mine = next;
  }
  count_block(channel);
}
