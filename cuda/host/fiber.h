// Switching from one stack to another, and what the sanitizers must be told about it.
#pragma once

#include <sys/mman.h>

#include <cstring>

#include "runtime.h"

#if !defined(__x86_64__) || defined(HOST_UCONTEXT)
#define HOST_UCONTEXT 1
#include <ucontext.h>
#endif

#if defined(HOST_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
#endif
#if defined(HOST_TSAN)
extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#else
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif

namespace host {

// An odd number of pages: the tops of 1024 stacks a power of two apart
// would share a few entries of the TLB.
#if defined(HOST_ASAN) || defined(HOST_TSAN)
constexpr size_t kStackBytes = 65 << 12;
#else
constexpr size_t kStackBytes = 9 << 12;
#endif

#if defined(HOST_UCONTEXT)

inline void switch_stack(void** from, void* to) {
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}
inline void* new_context(char* stack, size_t size, void (*function)()) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = size;
  makecontext(context, function, 0);
  return context;
}
inline void* main_context() { return new ucontext_t; }

#else

// Saves what the ABI lets a function rely on, changes stacks and returns on the other one.
extern "C" void host_switch_stack(void** from, void* to);
asm(R"(
.text
.hidden host_switch_stack
.globl host_switch_stack
.type host_switch_stack, @function
host_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch_stack, . - host_switch_stack
)");
inline void switch_stack(void** from, void* to) { host_switch_stack(from, to); }
inline void* new_context(char* stack, size_t size, void (*function)()) {
  void** top = reinterpret_cast<void**>(stack + size);
  *--top = nullptr;  // where function would return to: it never does; also aligns the stack as after a call
  *--top = reinterpret_cast<void*>(function);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
inline void* main_context() { return nullptr; }

#endif

// Stacks for `count` threads, side by side; pages that are never touched cost nothing.
// One mapping, with room for a stack below the first. A page between each two that nobody may touch would make two
// mappings of every stack, and a process that loads some forty libraries may have no more: so marks are looked at.
inline char* new_stacks(size_t count) {
  char* memory = static_cast<char*>(mmap(nullptr, (count + 1) * kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return memory == MAP_FAILED ? nullptr : memory + kStackBytes;
}

constexpr uint64_t kMark = 0xa5a5a5a5a5a5a5a5;

// The last bytes of a stack, which are written over only where a stack is too small.
inline void mark_end(char* stack) { memcpy(stack, &kMark, sizeof kMark); }
inline bool is_marked(const char* stack) { return memcmp(stack, &kMark, sizeof kMark) == 0; }

// Stacks that all ended at the same place of a page would share a few lines of the L1 cache.
inline size_t stack_size(unsigned thread) { return kStackBytes - thread % 61 * 64; }

}  // namespace host
