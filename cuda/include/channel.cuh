// A rank's end of a channel: memory through which all ranks exchange what they add up, and which number it is at.
//
// A channel belongs to one stream of each rank; its collectives are numbered. Rank r puts its words into the slot r of
// every outbox, which are the inboxes of the others, or one window of the host that is everybody's inbox. There are two
// sets of slots, for even and odd numbers: who begins number n + 2 has seen a word of number n + 1 of everybody, so all
// have ended number n.
//
// The blocks of a kernel that waits are all on the GPU at once, and none waits for another of its own grid. Waiting ends
// too when the alarm is given or patience has run out; then the alarm is given, and says who waited for whom.
#pragma once

#include "vec.cuh"

constexpr int kMaxRanks = 8;
constexpr int kPacketBytes = 16;      // of which 12 are data
constexpr int kPieces = 3;            // of 16 bytes that a lane sends and receives in
constexpr int kPackets = 4;           // of 12
constexpr int kLooksAtOnce = 32;      // before a look at the clock and the alarm
constexpr int kAlarmWords = 4;        // of a rank's report: 1 + the peer, channel, number, 0

struct Channel {  // engine/kernels/channel.py makes it
  char* outboxes[kMaxRanks];
  const char* inbox;
  unsigned* state;  // number of the last collective; blocks of this one that have begun; 1 when a report was made
  unsigned* alarm;  // [4 + 4 · ranks], of all ranks: not 0 when all are to stop; from 4 on their reports
  index_t capacity;             // packets of a slot
  unsigned long long patience;  // nanoseconds
  int num_outboxes, rank, world_size, id;
};

// The number of this collective, for every thread of a block. The last block to come counts it, when all others have
// read it; so it is one number for all blocks, whatever the grid, and a captured graph counts on. 0 is what fresh
// memory holds, and numbers alternate between even and odd.
template <typename C>
__device__ __forceinline__ unsigned next_number(const C& channel) {
  __shared__ unsigned number;
  if (threadIdx.x == 0) {
    const unsigned last = *static_cast<volatile unsigned*>(channel.state);
    number = last == 0xffffffffu ? 2 : last + 1;
    __threadfence();
    if (atomicAdd(channel.state + 1, 1u) == gridDim.x - 1) {
      channel.state[1] = 0;
      channel.state[0] = number;
    }
  }
  __syncthreads();
  return number;
}

// Where the packets of a rank lie in an outbox or inbox, in bytes.
__device__ __forceinline__ index_t slot_of(const Channel& channel, unsigned number, int rank) {
  return ((number & 1) * static_cast<index_t>(channel.world_size) + rank) * channel.capacity * kPacketBytes;
}

// A share is what one lane sends at once: of 96 pieces in a row each 32nd, so that a warp reads and stores 512 bytes in
// a row. Piece j of share i, and where its packet k lies in a slot, in bytes.
__device__ __forceinline__ int piece_of(int share, int j) { return share / 32 * (32 * kPieces) + j * 32 + share % 32; }
__device__ __forceinline__ int packet_of(int share, int k) {
  return (share / 32 * (32 * kPackets) + k * 32 + share % 32) * kPacketBytes;
}

struct Share {
  unsigned words[4 * kPieces];
};

__device__ __forceinline__ void set_piece(Share& share, int j, uint4 piece) {
  share.words[4 * j] = piece.x, share.words[4 * j + 1] = piece.y;
  share.words[4 * j + 2] = piece.z, share.words[4 * j + 3] = piece.w;
}
__device__ __forceinline__ uint4 get_piece(const Share& share, int j) {
  return make_uint4(share.words[4 * j], share.words[4 * j + 1], share.words[4 * j + 2], share.words[4 * j + 3]);
}

__device__ __forceinline__ void send_share(const Channel& channel, unsigned number, int place, const Share& share) {
  const index_t slot = slot_of(channel, number, channel.rank);
  for (int i = 0; i < channel.num_outboxes; ++i)
#pragma unroll
    for (int k = 0; k < kPackets; ++k)
      store_flagged(channel.outboxes[i] + slot + packet_of(place, k), share.words[3 * k], share.words[3 * k + 1],
                    share.words[3 * k + 2], number);
}

// How long this thread has waited, and whether it goes on.
struct Patience {
  unsigned looks = 0;
  unsigned long long since = 0;

  // After a look in vain at what a peer sends: false when waiting is over.
  template <typename C>
  __device__ __forceinline__ bool lasts(const C& channel, unsigned number, int peer) {
    if (++looks % kLooksAtOnce != 0) return true;
    wait_a_little();
    if (load_acquire(channel.alarm) != 0) return false;
    const unsigned long long now = nanoseconds();
    if (since == 0) since = now;
    if (now - since < channel.patience) return true;
    if (atomicExch(channel.state + 2, 1u) == 0) {
      unsigned* const report = channel.alarm + kAlarmWords * (1 + channel.rank);
      report[1] = static_cast<unsigned>(channel.id), report[2] = number;
      store_release(report, 1u + static_cast<unsigned>(peer));
      store_release(channel.alarm, 1u);
    }
    return false;
  }
};

// The shares at `place` of kCount other ranks, from the first-th of the others on.
template <int kCount>
__device__ __forceinline__ void receive_shares(const Channel& channel, unsigned number, int place, int first,
                                               Share (&shares)[kCount], Patience& patience) {
  bool arrived[kCount];
#pragma unroll
  for (int q = 0; q < kCount; ++q) arrived[q] = false;
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      if (arrived[q]) continue;
      const int peer = first + q + (first + q >= channel.rank);
      const char* const slot = channel.inbox + slot_of(channel, number, peer);
      uint4 packets[kPackets];
#pragma unroll
      for (int k = 0; k < kPackets; ++k) packets[k] = load_flagged(slot + packet_of(place, k));
      bool all = true;
#pragma unroll
      for (int k = 0; k < kPackets; ++k) {
        all &= packets[k].w == number;
        shares[q].words[3 * k] = packets[k].x, shares[q].words[3 * k + 1] = packets[k].y;
        shares[q].words[3 * k + 2] = packets[k].z;
      }
      arrived[q] = all;
      if (!all) missing = peer;
    }
    if (missing < 0 || !patience.lasts(channel, number, missing)) return;
  }
}
