// CUDA C++ as g++ can read it: qualifiers, built-in variables and functions of a portable kernel.
//
// GPU-only, because a fiber cannot show what they are for or because no kernel needs them on a CPU:
//   wgmma, TMA (cp.async.bulk), mbarrier, clusters   asynchronous units with queues of their own; _sm90 variants only
//   textures, surfaces                                no kernel of the tree reads through them
//   __activemask                                      its answer depends on how the hardware happens to diverge
//   cooperative grid barriers                         blocks run one after another here
#pragma once

#include <ctime>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __shared__ static  // the launcher finds these variables and fills them with NaN before each block
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::host::current->index)
#define blockIdx (::host::block.index)
#define blockDim (::host::block.size)
#define gridDim (::host::block.grid)
constexpr int warpSize = 32;

// The caller's place, as default arguments of functions that may wait.
#define HOST_SITE_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- waiting for each other

inline void __syncthreads(HOST_SITE_PARAMETERS) { host::barrier(0, 0, 0, {"__syncthreads", file, line}); }
inline int __syncthreads_count(int vote, HOST_SITE_PARAMETERS) {
  return static_cast<int>(host::barrier(0, 0, vote != 0, {"__syncthreads_count", file, line}));
}
inline int __syncthreads_or(int vote, HOST_SITE_PARAMETERS) {
  return host::barrier(0, 0, vote != 0, {"__syncthreads_or", file, line}) != 0;
}
inline int __syncthreads_and(int vote, HOST_SITE_PARAMETERS) {
  return host::barrier(0, 0, vote == 0, {"__syncthreads_and", file, line}) == 0;
}

namespace host {

struct Shuffle {
  uint64_t value;
  int source;  // lane
};
struct Vote {
  unsigned value, result;
};
void shuffle(unsigned mask, void* const* arguments);
void ballot(unsigned mask, void* const* arguments);
void match(unsigned mask, void* const* arguments);

template <typename T>
inline T shuffled(unsigned mask, T value, int source, const char* what, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves 4 or 8 bytes");
  Shuffle argument{0, source};
  memcpy(&argument.value, &value, sizeof(T));
  meet(shuffle, mask, &argument, what, file, line);
  memcpy(&value, &argument.value, sizeof(T));
  return value;
}
inline int lane() { return static_cast<int>(current->lane); }

template <typename T, typename Function>
inline T reduced(unsigned mask, T value, Function function, const char* what, const char* file, int line) {
  T result = value;
  for (int from = 0, count = 0; from < 32; ++from) {
    if (!(mask >> from & 1)) continue;
    T other = shuffled(mask, value, from, what, file, line);
    result = count++ ? function(result, other) : other;
  }
  return result;
}

}  // namespace host

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, HOST_SITE_PARAMETERS) {
  int base = host::lane() & ~(width - 1);
  return host::shuffled(mask, value, base + (source & (width - 1)), "__shfl_sync", file, line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, HOST_SITE_PARAMETERS) {
  int lane = host::lane(), source = lane ^ lanes;
  int end = (lane & ~(width - 1)) + width;
  return host::shuffled(mask, value, source < end ? source : lane, "__shfl_xor_sync", file, line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_SITE_PARAMETERS) {
  int lane = host::lane(), source = lane + static_cast<int>(delta);
  int end = (lane & ~(width - 1)) + width;
  return host::shuffled(mask, value, source < end ? source : lane, "__shfl_down_sync", file, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_SITE_PARAMETERS) {
  int lane = host::lane(), source = lane - static_cast<int>(delta);
  int begin = lane & ~(width - 1);
  return host::shuffled(mask, value, source >= begin ? source : lane, "__shfl_up_sync", file, line);
}
[[gnu::error("GPU-only: the answer depends on how the hardware happens to diverge")]] unsigned __activemask();
inline void __syncwarp(unsigned mask = 0xffffffffu, HOST_SITE_PARAMETERS) {
  host::meet(host::nothing, mask, nullptr, "__syncwarp", file, line);
}
inline unsigned __ballot_sync(unsigned mask, int vote, HOST_SITE_PARAMETERS) {
  host::Vote argument{vote != 0, 0};
  host::meet(host::ballot, mask, &argument, "__ballot_sync", file, line);
  return argument.result;
}
inline int __any_sync(unsigned mask, int vote, HOST_SITE_PARAMETERS) {
  return __ballot_sync(mask, vote, file, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, HOST_SITE_PARAMETERS) {
  return __ballot_sync(mask, vote, file, line) == mask;
}
inline unsigned __match_any_sync(unsigned mask, unsigned value, HOST_SITE_PARAMETERS) {
  host::Vote argument{value, 0};
  host::meet(host::match, mask, &argument, "__match_any_sync", file, line);
  return argument.result;
}
#define HOST_REDUCE(NAME, EXPRESSION)                                                                         \
  template <typename T>                                                                                       \
  inline T NAME(unsigned mask, T value, HOST_SITE_PARAMETERS) {                                               \
    return host::reduced(mask, value, [](T a, T b) -> T { return EXPRESSION; }, #NAME, file, line);         \
  }
HOST_REDUCE(__reduce_add_sync, a + b)
HOST_REDUCE(__reduce_max_sync, a > b ? a : b)
HOST_REDUCE(__reduce_min_sync, a < b ? a : b)
HOST_REDUCE(__reduce_and_sync, a & b)
HOST_REDUCE(__reduce_or_sync, a | b)
HOST_REDUCE(__reduce_xor_sync, a ^ b)
#undef HOST_REDUCE

// ---- memory

inline void __threadfence() {
  host::maybe_yield();
  __atomic_fetch_add(&host::fence_word, 0u, __ATOMIC_ACQ_REL);
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { host::yield(); }

template <typename T>
inline T __ldg(const T* p) { return *p; }
template <typename T>
inline T __ldcg(const T* p) { return *p; }
template <typename T>
inline T __ldcs(const T* p) { return *p; }
template <typename T>
inline void __stcs(T* p, T x) { *p = x; }
template <typename T>
inline void __stcg(T* p, T x) { *p = x; }

namespace host {

// Replaces *p by change(*p) in one step and gives what was there.
template <typename T, typename Function>
inline T atomically(T* p, Function change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics have 4 or 8 bytes");
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  maybe_yield();
  Bits* bits = reinterpret_cast<Bits*>(p);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
  T value, changed;
  do {
    memcpy(&value, &before, sizeof(T));
    changed = change(value);
    memcpy(&after, &changed, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return value;
}
template <typename T>
using Same = std::common_type_t<T>;  // a parameter that takes no part in deduction

}  // namespace host

#define HOST_ATOMIC(NAME, EXPRESSION)                                                                         \
  template <typename T>                                                                                       \
  inline T NAME(T* p, host::Same<T> x) {                                                                      \
    return host::atomically(p, [x](T old) -> T { return EXPRESSION; });                                       \
  }
HOST_ATOMIC(atomicAdd, old + x)
HOST_ATOMIC(atomicSub, old - x)
HOST_ATOMIC(atomicMax, old > x ? old : x)
HOST_ATOMIC(atomicMin, old < x ? old : x)
HOST_ATOMIC(atomicAnd, old & x)
HOST_ATOMIC(atomicOr, old | x)
HOST_ATOMIC(atomicXor, old ^ x)
HOST_ATOMIC(atomicExch, (static_cast<void>(old), x))
HOST_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
#undef HOST_ATOMIC
template <typename T>
inline T atomicCAS(T* p, host::Same<T> expected, host::Same<T> x) {
  return host::atomically(p, [=](T old) -> T { return old == expected ? x : old; });
}

// ---- arithmetic

inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }

#define HOST_MIN_MAX(T)                                                                                       \
  inline T min(T a, T b) { return b < a ? b : a; }                                                            \
  inline T max(T a, T b) { return a < b ? b : a; }
HOST_MIN_MAX(int)
HOST_MIN_MAX(unsigned)
HOST_MIN_MAX(long)
HOST_MIN_MAX(long long)
HOST_MIN_MAX(unsigned long)
HOST_MIN_MAX(unsigned long long)
#undef HOST_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }  // of a number and NaN, the number
inline float max(float a, float b) { return fmaxf(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? fminf(x, 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7)) & 255;
    if (selector >> 4 * i & 8) byte = byte & 128 ? 255 : 0;  // the sign of the byte
    result |= byte << 8 * i;
  }
  return result;
}
inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
