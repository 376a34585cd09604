// The named functions of include/ptx.cuh on a CPU. Memory is read and written here, by the thread that asked, so that
// the sanitizers see it; what lanes exchange goes through a meeting.
#pragma once

#include "../include/dtype.cuh"

namespace host {

struct Matrices {
  unsigned rows[4];  // the row that the lane has read: 8 numbers of 16 bits
  unsigned d[4];
};
struct Mma {
  void* d;
  const unsigned *a, *b;
};
template <int kMatrices, bool kTrans>
void ldmatrix(unsigned mask, void* const* arguments);  // for 1, 2 and 4 matrices
void mma_bf16(unsigned mask, void* const* arguments);
void mma_fp16(unsigned mask, void* const* arguments);
void mma_s8(unsigned mask, void* const* arguments);
void mma_e4m3(unsigned mask, void* const* arguments);

template <int kMatrices, bool kTrans>
inline void load_matrices(unsigned (&d)[kMatrices], const void* row, const char* what, const char* file, int line) {
  Matrices argument;
  if (current->lane < 8 * kMatrices) {
    require_aligned(row, 16, "ldmatrix");
    memcpy(argument.rows, row, 16);
  }
  meet(ldmatrix<kMatrices, kTrans>, 0xffffffffu, &argument, what, file, line);
  for (int i = 0; i < kMatrices; ++i) d[i] = argument.d[i];
}

inline void write_copy(const Copy& copy) {
  if (copy.valid)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

}  // namespace host

template <typename T>
inline T* dynamic_shared() { return reinterpret_cast<T*>(host::block.shared); }

inline uint4 load16(const void* p) {
  host::require_aligned(p, 16, "load16");
  return *static_cast<const uint4*>(p);
}
inline void store16(void* p, uint4 x) {
  host::require_aligned(p, 16, "store16");
  *static_cast<uint4*>(p) = x;
}
inline uint4 load16_stream(const void* p) { return load16(p); }

// The target holds NaN until a wait of this thread covers the copy, and the source is read only then.
template <int kBytes = 16>
inline void cp_async(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
  host::require_aligned(shared, kBytes, "cp.async target");
  if (valid) host::require_aligned(global, kBytes, "cp.async source");
  host::CopyQueue& queue = *host::current->queue;
  if (queue.last - queue.first == host::kMaxCopies) host::fault("over %d cp.async under way", host::kMaxCopies);
  memset(shared, 0xff, kBytes);
  queue.copies[queue.last++ % host::kMaxCopies] = {shared, global, kBytes, valid};
}
inline void cp_async_commit() {
  host::CopyQueue& queue = *host::current->queue;
  if (queue.last_group - queue.first_group == host::kMaxGroups)
    host::fault("over %d groups of cp.async under way", host::kMaxGroups);
  queue.group_end[queue.last_group++ % host::kMaxGroups] = queue.last;
}
template <int kPending>
inline void cp_async_wait() {
  host::CopyQueue& queue = *host::current->queue;
  while (queue.last_group - queue.first_group > kPending) {
    const unsigned end = queue.group_end[queue.first_group++ % host::kMaxGroups];
    while (queue.first != end) host::write_copy(queue.copies[queue.first++ % host::kMaxCopies]);
  }
}

#define HOST_LDMATRIX(NAME, MATRICES, TRANS)                                                                  \
  inline void NAME(unsigned (&d)[MATRICES], const void* row, HOST_SITE_PARAMETERS) {                          \
    host::load_matrices<MATRICES, TRANS>(d, row, #NAME, file, line);                                        \
  }
HOST_LDMATRIX(ldmatrix_x1, 1, false)
HOST_LDMATRIX(ldmatrix_x2, 2, false)
HOST_LDMATRIX(ldmatrix_x4, 4, false)
HOST_LDMATRIX(ldmatrix_x2_trans, 2, true)
HOST_LDMATRIX(ldmatrix_x4_trans, 4, true)
#undef HOST_LDMATRIX

inline unsigned transposed(unsigned x, HOST_SITE_PARAMETERS) {
  const int row = host::current->lane / 4, column = host::current->lane % 4, shift = 16 * (row % 2);
  const unsigned low = __shfl_sync(0xffffffffu, x, 8 * column + row / 2, 32, file, line);
  const unsigned high = __shfl_sync(0xffffffffu, x, 8 * column + 4 + row / 2, 32, file, line);
  return (low >> shift & 0xffffu) | (high >> shift & 0xffffu) << 16;
}
template <typename T>
float fma_of_halves(unsigned a, unsigned b, unsigned c, int shift) {  // rounded to float before it is to T
  const auto half = [shift](unsigned x) { return to_float(T{static_cast<unsigned short>(x >> shift)}); };
  return std::fma(half(a), half(b), half(c));
}
inline unsigned fma2(unsigned a, unsigned b, unsigned c, bf16) {
  return pack_bf16(fma_of_halves<bf16>(a, b, c, 0), fma_of_halves<bf16>(a, b, c, 16));
}
inline unsigned fma2(unsigned a, unsigned b, unsigned c, fp16) {
  return pack_fp16(fma_of_halves<fp16>(a, b, c, 0), fma_of_halves<fp16>(a, b, c, 16));
}

#define HOST_MMA(NAME, D, FORMAT, MEETING)                                                                    \
  inline void NAME(D (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], FORMAT, HOST_SITE_PARAMETERS) { \
    host::Mma argument{d, a, b};                                                                              \
    host::meet(host::MEETING, 0xffffffffu, &argument, "mma", file, line);                                   \
  }
HOST_MMA(mma_k16, float, bf16, mma_bf16)
HOST_MMA(mma_k16, float, fp16, mma_fp16)
HOST_MMA(mma_k32, int, signed char, mma_s8)
HOST_MMA(mma_k32, float, e4m3, mma_e4m3)
#undef HOST_MMA

inline unsigned multiply_bf16(unsigned a, unsigned b) {
  const auto half = [](unsigned bits) { return to_float(bf16{static_cast<unsigned short>(bits)}); };
  return pack_bf16(half(a) * half(b), half(a >> 16) * half(b >> 16));
}

inline void named_barrier(int id, int num_threads, HOST_SITE_PARAMETERS) {
  host::barrier(id, static_cast<unsigned>(num_threads), 0, {"named_barrier", file, line});
}

// The words before the flag, as the flag says that they are there; other threads may run before it.
inline void store_flagged(void* p, unsigned a, unsigned b, unsigned c, unsigned flag) {
  host::require_aligned(p, 16, "store_flagged");
  auto* words = static_cast<unsigned*>(p);
  __atomic_store_n(words, a, __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, b, __ATOMIC_RELAXED);
  __atomic_store_n(words + 2, c, __ATOMIC_RELAXED);
  host::maybe_yield();
  __atomic_store_n(words + 3, flag, __ATOMIC_RELEASE);
}
inline uint4 load_flagged(const void* p) {
  host::require_aligned(p, 16, "load_flagged");
  const auto* words = static_cast<const unsigned*>(p);
  const unsigned flag = __atomic_load_n(words + 3, __ATOMIC_ACQUIRE);
  return make_uint4(__atomic_load_n(words, __ATOMIC_RELAXED), __atomic_load_n(words + 1, __ATOMIC_RELAXED),
                    __atomic_load_n(words + 2, __ATOMIC_RELAXED), flag);
}
inline unsigned load_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(unsigned* p, unsigned x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline unsigned long long load_acquire(const unsigned long long* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(unsigned long long* p, unsigned long long x) {
  host::maybe_yield();
  __atomic_store_n(p, x, __ATOMIC_RELEASE);
}
inline unsigned short load2_system(const void* p) { return *static_cast<const unsigned short*>(p); }
inline uint2 load8_system(const void* p) {
  host::require_aligned(p, 8, "load8_system");
  return *static_cast<const uint2*>(p);
}
inline uint4 load16_system(const void* p) { return load16(p); }
inline void wait_a_little() { host::wait_for_ranks(); }
inline unsigned long long nanoseconds() { return static_cast<unsigned long long>(clock64()); }

inline void dependency_wait() {}
inline void dependency_launch() {}
inline int anew(int x) { return x; }
