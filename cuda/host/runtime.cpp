// The machine below a kernel on a CPU: runs the blocks of a grid, and the threads of a block in an order that the
// schedule decides.
//
//   in_step   the lowest lane that can go on; after each meeting of a warp it is the next warp's turn
//   greedy    one warp runs ahead as far as it can, the highest lane first, blocks from the last to the first
//   random    a seeded choice of block, warp and lane, with runs of random length
//
// Reported: a thread that waits for one that has exited or waits elsewhere, lanes of a warp that meet at different
// places, a mask without the lane itself, misaligned vectors, indices past an array's end, overflow of a signed int,
// a write past the end of dynamic shared memory.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>

#include "fiber.h"
#include "launch.h"

namespace host {

Thread* current;
Block block;
unsigned fence_word;

namespace {

constexpr unsigned kMaxThreads = 1024;
#if defined(HOST_ASAN)
constexpr size_t kGuardBytes = 0;  // behind dynamic shared memory; AddressSanitizer has its own
#else
constexpr size_t kGuardBytes = 256;
#endif

struct alignas(64) Warp {
  unsigned ready, meeting, at_barrier, exited, exists;  // a bit a lane
  unsigned group, mask;  // lanes that wait in the meeting that was looked at last, and what it is
  int line;
  Meeting kind;
  void* arguments[32];
  unsigned num_meetings;
  char order[2];  // addresses for ThreadSanitizer: what happens before a meeting, by its parity
};
struct Barrier {
  Thread* first;  // of those who wait
  unsigned arrived, expected, votes, result, phase;
  char order[2];
};

Thread threads[kMaxThreads];
CopyQueue queues[kMaxThreads];
char* stacks;
Warp warps[kMaxThreads / 32];
Barrier barriers[16];
unsigned ready_warps;  // a bit a warp
unsigned num_threads, num_exited;
const Launch* launch;
const Kernel* kernel;
thread_local std::string description;  // ranks of a test may load the same library at once
void* main_stack_pointer;
char launch_order, end_order;
char message[4096];
bool failed, dirty;
std::mutex one_launch_at_a_time;
uint64_t random_state;
unsigned stickiness;

uint64_t next_random() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545f4914f6cdd1dull;
}

#if defined(HOST_ASAN)
const void* main_stack;
size_t main_stack_bytes;
void* main_fake_stack;
#endif
#if defined(HOST_TSAN)
void* main_tsan_fiber;
#endif

void to_main(bool for_ever) {
#if defined(HOST_ASAN)
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &current->fake_stack, main_stack, main_stack_bytes);
#endif
#if defined(HOST_TSAN)
  __tsan_switch_to_fiber(main_tsan_fiber, 1);
#endif
  Thread* self = current;
  switch_stack(&self->stack_pointer, main_stack_pointer);
#if defined(HOST_ASAN)
  __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
  static_cast<void>(for_ever);
}

// Before another thread runs, whose stack lies below.
void check_stack() {
  if (!is_marked(current->stack)) fault("needs more than %zu bytes of stack", kStackBytes);
}

void run(Thread* next) {
  Thread* self = current;
  if (next == self) return;
  check_stack();
  current = next;
#if defined(HOST_ASAN)
  __sanitizer_start_switch_fiber(&self->fake_stack, next->stack, kStackBytes);
#endif
#if defined(HOST_TSAN)
  __tsan_switch_to_fiber(next->tsan_fiber, 1);
#endif
  switch_stack(&self->stack_pointer, next->stack_pointer);
#if defined(HOST_ASAN)
  __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
}

unsigned lowest(unsigned bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }
unsigned highest(unsigned bits) { return 31u - static_cast<unsigned>(__builtin_clz(bits)); }
unsigned any_of(unsigned bits) {  // the first from a random place on
  const unsigned from = static_cast<unsigned>(next_random() >> 59);
  const unsigned later = bits >> from << from;
  return lowest(later ? later : bits);
}

void set_ready(unsigned warp, unsigned lanes) {
  warps[warp].ready |= lanes;
  ready_warps |= 1u << warp;
}
void set_waiting(Thread* thread) {
  Warp& warp = warps[thread->warp];
  warp.ready &= ~(1u << thread->lane);
  if (!warp.ready) ready_warps &= ~(1u << thread->warp);
}

bool is_ready(const Thread& thread) { return warps[thread.warp].ready >> thread.lane & 1; }

// The threads that do not run, a line for each group of neighbours that waits at the same place.
void describe_waiting(char* to, size_t size) {
  char before[400] = "", now[400];
  size_t used = 0;
  for (unsigned i = 0, first = 0; i <= num_threads && used + 1 < size; ++i) {
    const Thread& thread = threads[i];
    const unsigned bit = 1u << thread.lane;
    if (i == num_threads)
      now[0] = 0;
    else if (warps[thread.warp].exited & bit)
      snprintf(now, sizeof now, "have exited");
    else if (warps[thread.warp].meeting & bit)
      snprintf(now, sizeof now, "wait at %s, mask 0x%08x, %s:%d", thread.site.what, thread.mask, thread.site.file,
               thread.site.line);
    else
      snprintf(now, sizeof now, "wait at %s, %s:%d", thread.site.what, thread.site.file, thread.site.line);
    if (i && strcmp(before, now)) {
      const int wrote = snprintf(to + used, size - used, "\n  threads %u to %u %s", first, i - 1, before);
      if (wrote > 0) used += static_cast<size_t>(wrote);
      first = i;
    }
    strcpy(before, now);
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void nobody_can_run() {
  bool at_barrier = false, in_meeting = false;
  for (const Warp& warp : warps) {
    at_barrier |= warp.at_barrier != 0;
    in_meeting |= warp.meeting != 0;
  }
  char waiting[2500] = "";
  describe_waiting(waiting, sizeof waiting);
  fault("%s%s",
        num_exited && at_barrier   ? "threads wait at a barrier that others have passed by and exited"
        : num_exited && in_meeting ? "lanes wait for lanes of their mask that have exited"
                                   : "deadlock: every thread waits",
        waiting);
}

[[noreturn, gnu::cold, gnu::noinline]] void wrong_mask() {
  const auto& [what, file, line] = current->site;
  const Warp& warp = warps[current->warp];
  if (!(current->mask >> current->lane & 1))
    fault("%s at %s:%d: lane %u is not in its own mask 0x%08x", what, file, line, current->lane, current->mask);
  fault("%s at %s:%d: mask 0x%08x names lanes 0x%08x, which %s", what, file, line, current->mask,
        current->mask & (warp.exited | ~warp.exists), current->mask & warp.exited ? "have exited" : "do not exist");
}

// The lanes that wait where this thread has come to. One that waits for it elsewhere would wait for ever.
[[gnu::noinline]] unsigned waiting_with(const Thread* self) {
  unsigned found = 0;
  for (unsigned lanes = warps[self->warp].meeting & self->mask; lanes; lanes &= lanes - 1) {
    const Thread& other = threads[self->warp * 32 + lowest(lanes)];
    if (other.meeting == self->meeting && other.mask == self->mask && other.site.line == self->site.line)
      found |= lanes & -lanes;
    else if (other.mask >> self->lane & 1)
      fault("lanes of one warp meet at different places: lane %u at %s, mask 0x%08x, %s:%d; lane %u at %s, mask "
            "0x%08x, %s:%d", self->lane, self->site.what, self->mask, self->site.file, self->site.line, other.lane,
            other.site.what, other.mask, other.site.file, other.site.line);
  }
  return found;
}

// Gives the processor away: the current thread has been marked ready or waiting. `turn`: it is another warp's turn.
void reschedule(bool turn) {
  if (!ready_warps) nobody_can_run();
  unsigned warp = current->warp;
  const bool stays = warps[warp].ready != 0;
  switch (launch->schedule) {
    case kInStep:
      if (turn || !stays) {
        const unsigned later = ready_warps & ~((2u << warp) - 1);
        warp = lowest(later ? later : ready_warps);
      }
      return run(&threads[32 * warp + lowest(warps[warp].ready)]);
    case kGreedy:
      if (!stays) warp = lowest(ready_warps);
      return run(&threads[32 * warp + highest(warps[warp].ready)]);
    default:
      if (!stays || next_random() % stickiness == 0) warp = any_of(ready_warps);
      return run(&threads[32 * warp + any_of(warps[warp].ready)]);
  }
}

void thread_main() {
#if defined(HOST_ASAN)
  if (!main_stack)
    __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);  // the first comes from main
  else
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  for (;;) {
    __tsan_acquire(&launch_order);
    kernel->invoke(launch->arguments);
    check_stack();
    __tsan_release(&end_order);
    Thread* self = current;
    warps[self->warp].exited |= 1u << self->lane;
    set_waiting(self);
    if (++num_exited == num_threads)
      to_main(false);
    else
      reschedule(false);
  }
}

bool prepare_threads() {
  if (!stacks && !(stacks = new_stacks(kMaxThreads))) return false;
  for (Thread& thread : threads)
    if (dirty) thread.stack_pointer = nullptr;  // a fault has left it anywhere
  num_threads = launch->block.x * launch->block.y * launch->block.z;
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    thread.linear = i, thread.warp = i / 32, thread.lane = i % 32;
    thread.index = {i % launch->block.x, i / launch->block.x % launch->block.y,
                    i / (launch->block.x * launch->block.y)};
    if (thread.stack_pointer) continue;  // parked at its end by the launch before
    thread.queue = &queues[i];
    thread.stack = stacks + i * kStackBytes;
    mark_end(thread.stack);
    thread.stack_pointer = new_context(thread.stack, stack_size(i), thread_main);
#if defined(HOST_TSAN)
    if (!thread.tsan_fiber) thread.tsan_fiber = __tsan_create_fiber(1);
#endif
  }
  return true;
}

void poison_shared() {
  memset(block.shared, 0xff, launch->shared_bytes + kGuardBytes);
  for (int i = 0; i < launch->num_variables; ++i)
    memset(const_cast<char*>(reinterpret_cast<const char*>(&host_kernels)) + launch->variables[i].offset, 0xff,
           static_cast<size_t>(launch->variables[i].bytes));
}

void check_guard() {
  const unsigned char* guard = block.shared + launch->shared_bytes;
  for (size_t i = 0; i < kGuardBytes && !failed; ++i)
    if (guard[i] != 0xff) {
      failed = true;
      snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u): byte %zu was written of %zu bytes of dynamic shared memory",
               kernel->name, block.index.x, block.index.y, block.index.z, launch->shared_bytes + i,
               static_cast<size_t>(launch->shared_bytes));
    }
}

void run_block() {
  poison_shared();
  num_exited = 0;
  ready_warps = 0;
  memset(barriers, 0, sizeof barriers);
  memset(static_cast<void*>(warps), 0, sizeof warps);
  for (unsigned warp = 0; warp * 32 < num_threads; ++warp) {
    const unsigned lanes = num_threads - warp * 32;
    const unsigned exists = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
    warps[warp].exists = exists;
    set_ready(warp, exists);
  }
  for (unsigned i = 0; i < num_threads; ++i) {
    CopyQueue& queue = queues[i];
    if (queue.last || queue.last_group) queue.first = queue.last = queue.first_group = queue.last_group = 0;
  }
  if (launch->schedule == kRandom) stickiness = 1u << next_random() % 10;
  const unsigned warp = launch->schedule == kRandom ? any_of(ready_warps) : 0;
  current = &threads[32 * warp + (launch->schedule == kGreedy ? highest(warps[warp].ready) : 0)];
  __tsan_release(&launch_order);
#if defined(HOST_ASAN)
  __sanitizer_start_switch_fiber(&main_fake_stack, current->stack, kStackBytes);
#endif
#if defined(HOST_TSAN)
  __tsan_switch_to_fiber(current->tsan_fiber, 1);
#endif
  switch_stack(&main_stack_pointer, current->stack_pointer);
#if defined(HOST_ASAN)
  __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr);
#endif
  __tsan_acquire(&end_order);
  check_guard();
}

}  // namespace

void fault(const char* format, ...) {
  const uint3 b = block.index, t = current->index;
  int used = snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ",
                      kernel->name, b.x, b.y, b.z, t.x, t.y, t.z);
  va_list values;
  va_start(values, format);
  vsnprintf(message + used, sizeof message - static_cast<size_t>(used), format, values);
  va_end(values);
  failed = dirty = true;
  to_main(true);
  abort();
}

void meet(Meeting meeting, unsigned mask, void* argument, const char* what, const char* file, int line) {
  Thread* self = current;
  Warp& warp = warps[self->warp];
  const unsigned bit = 1u << self->lane;
  self->meeting = meeting, self->mask = mask, self->site = {what, file, line};
  if (!(mask & bit) || mask & (warp.exited | ~warp.exists)) wrong_mask();
  unsigned others = warp.group;
  if (warp.kind != meeting || warp.mask != mask || warp.line != line || (!others && warp.meeting & mask)) {
    others = waiting_with(self);
    warp.kind = meeting, warp.mask = mask, warp.line = line;
  }
  warp.arguments[self->lane] = argument;
  char* order = &warp.order[warp.num_meetings & 1];
  if (meeting == nothing) __tsan_release(order);
  if ((others | bit) == mask) {
    meeting(mask, warp.arguments);
    ++warp.num_meetings;
    warp.meeting &= ~mask;
    warp.group = 0;
    set_ready(self->warp, others);
    reschedule(true);
  } else {
    warp.meeting |= bit;
    warp.group = others | bit;
    set_waiting(self);
    reschedule(false);
  }
  if (meeting == nothing) __tsan_acquire(order);
}

unsigned barrier(int id, unsigned expected, unsigned votes, Site site) {
  Thread* self = current;
  Barrier& barrier = barriers[id & 15];
  self->site = site, self->mask = 0, self->barrier = id;
  if (id < 0 || id > 15) fault("%s at %s:%d: barriers are 0 to 15, found %d", site.what, site.file, site.line, id);
  if (expected == 0) expected = num_threads;
  if (expected % 32 && expected != num_threads)
    fault("%s at %s:%d: %u threads are not whole warps", site.what, site.file, site.line, expected);
  if (barrier.arrived && barrier.expected != expected)
    fault("%s at %s:%d: expects %u threads where others expect %u", site.what, site.file, site.line, expected,
          barrier.expected);
  if (!barrier.arrived) barrier.first = self;
  if (id == 0 && barrier.first->site.line != site.line)
    fault("threads of one block wait at different barriers: thread %u at %s, %s:%d; thread %u at %s, %s:%d",
          self->linear, site.what, site.file, site.line, barrier.first->linear, barrier.first->site.what,
          barrier.first->site.file, barrier.first->site.line);
  const unsigned phase = barrier.phase & 1;
  barrier.expected = expected;
  barrier.votes += votes;
  __tsan_release(&barrier.order[phase]);
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    barrier.result = barrier.votes;
    barrier.votes = 0;
    ++barrier.phase;
    for (unsigned w = 0; w * 32 < num_threads; ++w) {
      unsigned lanes = 0;
      for (unsigned waiting = warps[w].at_barrier; waiting; waiting &= waiting - 1)
        if (threads[w * 32 + lowest(waiting)].barrier == id) lanes |= waiting & -waiting;
      warps[w].at_barrier &= ~lanes;
      if (lanes) set_ready(w, lanes);
    }
    reschedule(true);
  } else {
    warps[self->warp].at_barrier |= 1u << self->lane;
    set_waiting(self);
    reschedule(false);
  }
  __tsan_acquire(&barrier.order[phase]);
  return barrier.result;
}

void yield() {  // to the next thread that can run, by number: whoever is waited for gets its turn
  unsigned next = current->linear;
  do
    next = (next + 1) % num_threads;
  while (!is_ready(threads[next]));
  run(&threads[next]);
}
void wait_for_ranks() {
  static unsigned looks;
  if (++looks % num_threads == 0) {
    const timespec moment{0, 20000};
    nanosleep(&moment, nullptr);
  }
  yield();
}
void maybe_yield() {
  if (launch->schedule == kRandom) reschedule(false);
}

}  // namespace host

extern "C" const char* host_describe() {
  using host::description;
  description.clear();
  for (int i = 0; i < host_num_kernels; ++i)
    for (int j = 0; j < host_kernels[i].num_parameters; ++j) {
      const host::Parameter& parameter = host_kernels[i].parameters[j];
      for (int number : {i, parameter.is_pointer, parameter.is_const, parameter.bytes})
        description += std::to_string(number) + " ";
      description += std::string(parameter.type) + "\n";
    }
  return description.c_str();
}

extern "C" const char* host_launch(const host::Launch* launch) {
  using namespace host;
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  host::launch = launch;
  kernel = &host_kernels[launch->kernel];
  failed = false;
  block.size = launch->block;
  block.grid = launch->grid;
  void* memory = nullptr;
  random_state = launch->seed * 0x9e3779b97f4a7c15ull + 0x853c49e6748fea9bull;
  if (!main_stack_pointer) main_stack_pointer = main_context();
#if defined(HOST_TSAN)
  main_tsan_fiber = __tsan_get_current_fiber();
#endif
  if (!prepare_threads() || posix_memalign(&memory, 1024, launch->shared_bytes + kGuardBytes))
    return "no memory for the threads of a block";
  dirty = false;
  block.shared = static_cast<unsigned char*>(memory);
  const uint64_t num_blocks = uint64_t{launch->grid.x} * launch->grid.y * launch->grid.z;
  uint64_t start = 0, step = 1;  // a walk over all blocks: from the last to the first, or from any in strides
  if (launch->schedule == kGreedy) start = step = num_blocks - 1;
  if (launch->schedule == kRandom) {
    start = next_random() % num_blocks;
    step = next_random() % 2 ? 1 : num_blocks - 1;
  }
  for (uint64_t i = launch->first; i < num_blocks && !failed; i += launch->stride) {
    const uint64_t number = num_blocks == 1 ? 0 : (start + i * step) % num_blocks;
    block.index = {static_cast<unsigned>(number % launch->grid.x),
                   static_cast<unsigned>(number / launch->grid.x % launch->grid.y),
                   static_cast<unsigned>(number / launch->grid.x / launch->grid.y)};
    run_block();
  }
  free(memory);
  return failed ? message : nullptr;
}
