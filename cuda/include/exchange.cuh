// A rank's end of an exchange: memory through which messages of any size go in chunks, each with a flag behind it that
// says the collective and the chunk.
#pragma once

#include "channel.cuh"

constexpr int kFlagBytes = 128;  // behind a slot's data

// Areas of [num_lanes, num_stages, slot_bytes + kFlagBytes]: a slot is used again num_stages chunks later, by when all
// have read it: who scatters chunk i + num_stages has collected chunk i, so its owner has summed it; who sends the sum of
// i + num_stages has had everybody's share of that, who all have collected chunk i.
struct Exchange {  // engine/kernels/channel.py makes it
  char* scatter_to[kMaxRanks];          // for this owner
  const char* scatter_from[kMaxRanks];  // of this rank, for this one
  char* gather_to[kMaxRanks];           // for all, num_outboxes
  const char* gather_from[kMaxRanks];   // of this owner
  unsigned *state, *alarm;              // as in Channel
  unsigned long long patience;
  int slot_bytes, num_stages, num_outboxes, rank, world_size, id;
};

// Where a slot of this block lies in an area.
__device__ __forceinline__ index_t slot_of(const Exchange& exchange, int stage) {
  return (static_cast<index_t>(blockIdx.x) * exchange.num_stages + stage % exchange.num_stages) *
         (exchange.slot_bytes + kFlagBytes);
}

__device__ __forceinline__ unsigned long long flag_of(unsigned number, int step) {
  return static_cast<unsigned long long>(number) << 32 | static_cast<unsigned>(step + 1);
}

// All threads of a block, each with a rank that it waits for, or below 0 none: until those have announced their chunk, or a later
// one, in this slot of their areas, or patience is over.
__device__ __forceinline__ void await(const Exchange& exchange, const char* const (&areas)[kMaxRanks], int peer,
                                      index_t slot, unsigned number, int step, Patience& patience) {
  if (peer >= 0) {
    const auto* const flag = reinterpret_cast<const unsigned long long*>(areas[peer] + slot + exchange.slot_bytes);
    while (static_cast<long long>(load_acquire(flag) - flag_of(number, step)) < 0 &&
           patience.lasts(exchange, number, peer)) {
    }
  }
  __syncthreads();
}

// The same for every other rank.
template <int kWorld>
__device__ __forceinline__ void await(const Exchange& exchange, const char* const (&areas)[kMaxRanks], index_t slot,
                                      unsigned number, int step, Patience& patience) {
  const int peer = static_cast<int>(threadIdx.x);
  await(exchange, areas, peer < kWorld && peer != exchange.rank ? peer : -1, slot, number, step, patience);
}

// One thread, behind a barrier: what the block has written can be read, and what it has read can be written over.
__device__ __forceinline__ void announce(const Exchange& exchange, char* area, index_t slot, unsigned number, int step) {
  store_release(reinterpret_cast<unsigned long long*>(area + slot + exchange.slot_bytes), flag_of(number, step));
}
