// What a kernel that was built for the CPU sees of the machine below it (runtime.cpp).
//
// A thread of a block is a fiber: a stack of its own, all on one thread of the operating system, switched by hand at
// the places where CUDA threads can wait for each other. So a block runs in an order that a schedule decides, the same
// order every time. One loaded library runs one block at a time and keeps its state in plain variables.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector_types.h"

namespace host {

struct Site {  // a place in a kernel's source
  const char* what;
  const char* file;
  int line;
};

struct Copy {  // one cp.async under way
  void* to;
  const void* from;
  int bytes;
  bool valid;
};

constexpr int kMaxCopies = 256;
constexpr int kMaxGroups = 64;

struct CopyQueue {  // rings; positions only grow
  unsigned first, last;              // copies under way are [first, last)
  unsigned first_group, last_group;  // committed groups under way
  unsigned group_end[kMaxGroups];
  Copy copies[kMaxCopies];
};

// Finishes a meeting of the lanes in `mask`: reads and writes what arguments[lane] points to.
using Meeting = void (*)(unsigned mask, void* const* arguments);

struct alignas(64) Thread {
  uint3 index;
  unsigned linear, lane, warp;
  unsigned mask;  // of the meeting
  int barrier;
  Meeting meeting;
  void* stack_pointer;
  Site site;  // where it waits
  CopyQueue* queue;
  char* stack;
  void* fake_stack;  // AddressSanitizer's
  void* tsan_fiber;  // ThreadSanitizer's
};

struct Block {
  uint3 index;
  dim3 size, grid;
  unsigned char* shared;  // dynamic shared memory
};

extern Thread* current;
extern Block block;
extern unsigned fence_word;  // what memory fences touch: ThreadSanitizer knows no bare fences

// All lanes in mask come here with the same meeting, mask and place; the last one to come runs it.
void meet(Meeting meeting, unsigned mask, void* argument, const char* what, const char* file, int line);
void nothing(unsigned mask, void* const* arguments);  // the meeting of __syncwarp; the only one that orders memory

// Waits at barrier `id` for num_threads threads (0 = all of the block); the sum of `votes` of those who came.
unsigned barrier(int id, unsigned num_threads, unsigned votes, Site site);

// Lets another thread run, for polls.
void yield();
// The same in a random schedule only: at atomics and fences, where the order of threads shows.
void maybe_yield();

// Between two looks at memory that another rank writes: gives other threads of the block a turn, and now and then the
// processor to other ranks, which are threads of the operating system with copies of the library of their own.
void wait_for_ranks();

// Ends the launch with an error that names kernel, block and thread.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline void require_aligned(const void* address, unsigned bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fault("%s: address %p is not a multiple of %u", what, address, bytes);
}

float fp16_to_float(unsigned short bits);
unsigned short float_to_fp16(float x);
float e4m3_to_float(unsigned char bits);

inline unsigned short float_to_bf16(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the NaN that the GPU gives
  return static_cast<unsigned short>((static_cast<uint64_t>(bits) + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace host
