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
constexpr int kWords = 3;             // of 4 bytes: the data of a packet
constexpr int kLooksAtOnce = 32;      // before a look at the clock
constexpr unsigned long long kAlarmEvery = 1'000'000;  // nanoseconds; a look at it goes over the host's link
constexpr unsigned long long kTellEvery = 50'000'000;  // nanoseconds, who is waited for
constexpr int kAlarmWords = 4;        // of a rank's report: 1 + the peer, channel, number, milliseconds

struct Channel {  // engine/kernels/channel.py makes it
  char* outboxes[kMaxRanks];
  const char* inbox;
  unsigned* state;  // [4]: kTurn of each collective, in 8 bytes; 1 when a report was made
  unsigned* alarm;  // [4 + 8 · ranks], of all ranks: not 0 when all are to stop; then the report of each that gave up,
                    // then whom each was last waiting for
  index_t capacity;             // packets of a slot
  unsigned long long patience;  // nanoseconds
  int num_outboxes, rank, world_size, id;
};

constexpr unsigned long long kTurn = 1 << 16;   // what all blocks of a collective count
constexpr unsigned long long kLastNumber = 0xfffffffe;  // then 1: 0 is what fresh memory holds, and odd follows even

// The number of this collective. One and the same for all blocks, whatever the grid, so a captured graph counts on: the
// count is at the next turn only when all blocks have counted themselves.
template <typename C>
__device__ __forceinline__ unsigned next_number(const C& channel) {
  const auto* const count = reinterpret_cast<const volatile unsigned long long*>(channel.state);
  return static_cast<unsigned>(*count / kTurn % kLastNumber) + 1;
}

// At the end of each block, when all of its threads have the number.
template <typename C>
__device__ __forceinline__ void count_block(const C& channel) {
  __syncthreads();
  if (threadIdx.x == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(channel.state),
              blockIdx.x == 0 ? kTurn - (gridDim.x - 1) : 1ull);
}

// Where the packets of a rank lie in an outbox or inbox, in bytes.
__device__ __forceinline__ index_t slot_of(const Channel& channel, unsigned number, int rank) {
  return ((number & 1) * static_cast<index_t>(channel.world_size) + rank) * channel.capacity * kPacketBytes;
}

struct Words {
  unsigned word[kWords];
};

__device__ __forceinline__ void send_packet(const Channel& channel, unsigned number, int place, const Words& words) {
  const index_t at = slot_of(channel, number, channel.rank) + static_cast<index_t>(place) * kPacketBytes;
  for (int i = 0; i < channel.num_outboxes; ++i)
    store_flagged(channel.outboxes[i] + at, words.word[0], words.word[1], words.word[2], number);
}

// How long this thread has waited, and whether it goes on. The alarm is looked at seldom: when all that wait look at it,
// that holds up what they wait for, so that others wait as long for them, and so on for ever.
struct Patience {
  unsigned looks = 0;
  unsigned long long since = 0, asked = 0;

  // After a look in vain at what a peer sends: false when waiting is over.
  template <typename C>
  __device__ __forceinline__ bool lasts(const C& channel, unsigned number, int peer) {
    if (++looks % kLooksAtOnce != 0) return true;
    wait_a_little();
    const unsigned long long now = nanoseconds();
    if (since == 0) since = asked = now;
    if (now - asked < kAlarmEvery) return true;
    const bool tells = (now - since) / kTellEvery != (asked - since) / kTellEvery;
    asked = now;
    if (load_acquire(channel.alarm) != 0) return false;
    if (now - since < channel.patience) {
      if (tells) tell(channel, 1 + channel.world_size, number, peer);
      return true;
    }
    if (atomicExch(channel.state + 2, 1u) == 0) {
      tell(channel, 1, number, peer);
      store_release(channel.alarm, 1u);
    }
    return false;
  }

  // Whom this rank waits for, in its row of those that begin there.
  template <typename C>
  __device__ __forceinline__ void tell(const C& channel, int first_row, unsigned number, int peer) const {
    unsigned* const row = channel.alarm + kAlarmWords * (first_row + channel.rank);
    row[1] = static_cast<unsigned>(channel.id), row[2] = number;
    row[3] = static_cast<unsigned>((asked - since) / 1'000'000);
    store_release(row, 1u + static_cast<unsigned>(peer));
  }
};

// The packets place, place + step, … below `end` of all other ranks; words[u][q] is of the q-th of the others.
template <int kWorld, int kCount>
__device__ __forceinline__ void receive_packets(const Channel& channel, unsigned number, int place, int step, int end,
                                                Words (&words)[kCount][kWorld - 1], Patience& patience) {
  unsigned arrived = 0;  // a bit a rank
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int q = 0; q < kWorld - 1; ++q) {
      if (arrived >> q & 1) continue;
      const int peer = q + (q >= channel.rank);
      const char* const slot = channel.inbox + slot_of(channel, number, peer);
      uint4 packets[kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u)
        if (place + u * step < end)
          packets[u] = load_flagged(slot + static_cast<index_t>(place + u * step) * kPacketBytes);
      bool all = true;
#pragma unroll
      for (int u = 0; u < kCount; ++u)
        if (place + u * step < end) {
          all &= packets[u].w == number;
          words[u][q] = {{packets[u].x, packets[u].y, packets[u].z}};
        }
      if (all)
        arrived |= 1u << q;
      else
        missing = peer;
    }
    if (missing < 0 || !patience.lasts(channel, number, missing)) return;
  }
}
