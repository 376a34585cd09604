// All-reduce as int8 in two trips of packets with flags, for messages of middle size. ref.int8_all_reduce, ref.int8_feedback.
// y = H(dequantized sums of rotated groups) + residual (0 if null); without the rotation H is left out
// x, residual, y [size] T, contiguous, y may be either; carried [size] bf16 or null: include/carried.cuh; channel: include/channel.cuh.
// Groups of 32 numbers are dealt out to ranks in slices; a warp owns every so many-th bundle of 24 groups of each slice. It
//   sends the others' to their owners, sums its own, sends the sums to all, and takes theirs.
// T: bf16, fp16. kWorld: ranks, 2 to 8. kRotated: whether groups are rotated.
// float32, ranks in their order, with the roundings of ref.int8_all_reduce; then the residual; rounded to T once.
// The launcher: all blocks are on the GPU at once; whole warps; size is a multiple of 32, and there are groups for all
//   ranks; the bundles fit in a slot; x, y, residual begin at multiples of 16 bytes. All ranks launch alike.
#include "carried.cuh"
#include "channel.cuh"

constexpr int kThreads = 512;
constexpr int kPieces = 3;           // of 16 bytes that a lane has of a bundle
constexpr int kBundle = 24;          // groups: a lane has a quarter of three
constexpr int kBundlePackets = 72;   // two a lane for codes, and one of scales for each four lanes

struct Part {  // what a lane has of a bundle
  Codes<8> codes[kPieces];
};

__device__ __forceinline__ void send_part(char* slot, int bundle, const Part& part, unsigned number) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  char* const to = slot + static_cast<index_t>(bundle) * kBundlePackets * kPacketBytes;
  const Codes<8>(&c)[kPieces] = part.codes;
  store_flagged(to + lane * kPacketBytes, c[0].q[0], c[0].q[1], c[1].q[0], number);
  store_flagged(to + (32 + lane) * kPacketBytes, c[1].q[1], c[2].q[0], c[2].q[1], number);
  if (lane % 4 == 0)
    store_flagged(to + (64 + lane / 4) * kPacketBytes, c[0].scale | static_cast<unsigned>(c[1].scale) << 16, c[2].scale, 0,
                  number);
}

__device__ __forceinline__ Part receive_part(const Channel& channel, unsigned number, int peer, int bundle,
                                             Patience& patience) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const char* const from = channel.inbox + slot_of(channel, number, peer) +
                           static_cast<index_t>(bundle) * kBundlePackets * kPacketBytes;
  for (;;) {
    const uint4 low = load_flagged(from + lane * kPacketBytes), high = load_flagged(from + (32 + lane) * kPacketBytes);
    const uint4 scales = load_flagged(from + (64 + lane / 4) * kPacketBytes);
    const bool all = low.w == number && high.w == number && scales.w == number;
    if (all || !patience.lasts(channel, number, peer))
      return {{{{low.x, low.y}, static_cast<unsigned short>(scales.x)},
               {{low.z, high.x}, static_cast<unsigned short>(scales.x >> 16)},
               {{high.y, high.z}, static_cast<unsigned short>(scales.y)}}};
  }
}

template <typename T, int kWorld, bool kRotated>
__global__ void __launch_bounds__(kThreads)
    int8_all_reduce(const T* x, const T* residual, T* y, int size, bf16* carried_errors, int is_read,
                    const __grid_constant__ Channel channel) {
  static_assert(kWidth<T> == 8, "int8 stands for numbers of 16 bits");
  dependency_wait();
  dependency_launch();
  const Carried carried{carried_errors, is_read};
  const unsigned number = next_number(channel);
  const int rank = channel.rank, num_groups = size / kGroup, lane = static_cast<int>(threadIdx.x % 32);
  const int num_bundles = ((num_groups + kWorld - 1) / kWorld + kBundle - 1) / kBundle;  // of the longest slice
  const int begin = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int step = static_cast<int>(gridDim.x * blockDim.x / 32);
  Patience patience;

  // Of piece j of a lane: where its numbers begin, or past the end.
  const auto slice = [&](int owner) { return owner * (num_groups / kWorld) + min(owner, num_groups % kWorld); };
  const auto place = [&](int owner, int bundle, int j) {
    const int group = slice(owner) + bundle * kBundle + j * 8 + lane / 4;
    return group < slice(owner + 1) ? group * kGroup + lane % 4 * 8 : size;
  };
  const auto load = [&](int owner, int bundle, int j, float(&values)[8]) {
    const int i = place(owner, bundle, j);
    float errors[8];
    load_row(x, i, size, true, values);
    load_carried(carried, i, i < size, errors);
    if constexpr (kRotated) rotate(values);
#pragma unroll
    for (int n = 0; n < 8; ++n) values[n] += errors[n];
  };
  const auto encode = [&](int owner, int bundle, const float(&values)[kPieces][8]) {
    Part part;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = place(owner, bundle, j);
      part.codes[j] = quantize(values[j]);
      keep_carried(carried, i, i < size, values[j], part.codes[j]);
    }
    return part;
  };
  const auto finish = [&](int owner, int bundle, const Part& part) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      float values[8];
      dequantize(part.codes[j], values);
      if constexpr (kRotated) rotate(values);
      const int i = place(owner, bundle, j);
      if (i >= size) continue;
      if (residual != nullptr) {
        float other[8];
        load_row(residual, i, size, true, other);
#pragma unroll
        for (int n = 0; n < 8; ++n) values[n] += other[n];
      }
      store_row(y, i, size, true, values);
    }
  };

  const index_t own_slot = slot_of(channel, number, rank);
  for (int q = 1; q < kWorld; ++q) {
    const int owner = (rank + q) % kWorld;
    char* const to = channel.outboxes[channel.num_outboxes == 1 ? 0 : owner - (owner > rank)] + own_slot;
    for (int bundle = begin; bundle < num_bundles; bundle += step) {
      float values[kPieces][8];
#pragma unroll
      for (int j = 0; j < kPieces; ++j) load(owner, bundle, j, values[j]);
      send_part(to, owner * num_bundles + bundle, encode(owner, bundle, values), number);
    }
  }
  for (int bundle = begin; bundle < num_bundles; bundle += step) {
    float sums[kPieces][8];
    for (int p = 0; p < kWorld; ++p) {
      Part part;
      if (p != rank) part = receive_part(channel, number, p, rank * num_bundles + bundle, patience);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        float share[8];
        if (p == rank)
          load(rank, bundle, j, share);
        else
          dequantize(part.codes[j], share);
#pragma unroll
        for (int n = 0; n < 8; ++n) sums[j][n] = p == 0 ? share[n] : sums[j][n] + share[n];
      }
    }
    const Part part = encode(rank, bundle, sums);
    for (int i = 0; i < channel.num_outboxes; ++i)
      send_part(channel.outboxes[i] + own_slot, kWorld * num_bundles + bundle, part, number);
    finish(rank, bundle, part);
  }
  for (int q = 1; q < kWorld; ++q) {
    const int owner = (rank + q) % kWorld;
    for (int bundle = begin; bundle < num_bundles; bundle += step)
      finish(owner, bundle, receive_part(channel, number, owner, kWorld * num_bundles + bundle, patience));
  }
  count_block(channel);
}
