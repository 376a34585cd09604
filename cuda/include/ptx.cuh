// The one place with inline PTX, behind named functions; host/ptx.h has them for a CPU under the same names.
//
// Fragments are those of the PTX manual. For mma m16n8k16 with group = lane / 4 and pair = lane % 4:
//   a[0..3]  rows group, group + 8, group, group + 8; columns 2·pair, +1 (a[0], a[1]) and 2·pair + 8, +9 (a[2], a[3])
//   b[0..1]  column group; rows 2·pair, +1 and 2·pair + 8, +9
//   d[0..3]  (group, 2·pair), (group, 2·pair + 1), (group + 8, 2·pair), (group + 8, 2·pair + 1)
// and for k = 32 with 8-bit numbers four of them (4·pair …) where there are two above.
#pragma once

#include "dtype.cuh"

#if !defined(__CUDACC__)
#include "../host/ptx.h"
#else

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// The block's dynamic shared memory, aligned to 128 bytes.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

// 16 bytes; the address must be a multiple of 16.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, uint4 x) { *static_cast<uint4*>(p) = x; }

// 16 bytes that the whole kernel only reads, and reads once: they pass by L1. L2 fetches the whole line, the rest of which
// a neighbour reads soon.
__device__ __forceinline__ uint4 load16_stream(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// Asynchronous copy of kBytes (4, 8 or 16) from global to shared memory; where not `valid`, zeros and no read.
template <int kBytes = 16>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid = true) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 8×8 matrices of 16-bit numbers from shared memory; lane 8·m + r gives the address of row r of matrix m.
__device__ __forceinline__ void ldmatrix_x1(unsigned (&d)[1], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(d[0])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(unsigned (&d)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&d)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}

// a · b + c for two numbers at once, each rounded once; the last argument names their format.
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c, bf16) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c, fp16) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

#if __CUDA_ARCH__ >= 890
// Four numbers of e4m3 as fp16, exact: the first two are those in the lower bits.
__device__ __forceinline__ void halves_of_e4m3(unsigned x, unsigned& first, unsigned& last) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(last)
      : "r"(x));
}
#endif

// An 8×8 matrix of 16-bit numbers with rows and columns changed; lane 4·r + c has numbers 2·c and 2·c + 1 of row r.
__device__ __forceinline__ unsigned transposed(unsigned x) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

// d += a · b for tiles of 16 × k and k × 8; the last argument only names the format of a and b.
#define MMA(SHAPE_AND_TYPES, ACCUMULATOR)                                                                  \
  asm volatile("mma.sync.aligned." SHAPE_AND_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "       \
               "{%0, %1, %2, %3};"                                                                         \
               : ACCUMULATOR(d[0]), ACCUMULATOR(d[1]), ACCUMULATOR(d[2]), ACCUMULATOR(d[3])                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
__device__ __forceinline__ void mma_k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) {
  MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "+f");
}
__device__ __forceinline__ void mma_k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], fp16) {
  MMA("m16n8k16.row.col.f32.f16.f16.f32", "+f");
}
__device__ __forceinline__ void mma_k32(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], signed char) {
  MMA("m16n8k32.row.col.s32.s8.s8.s32", "+r");
}
__device__ __forceinline__ void mma_k32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], e4m3) {
  MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32", "+f");  // sm_89 and later
}
#undef MMA

// Products of two numbers each, rounded to bf16; subnormal numbers are taken as they are.
__device__ __forceinline__ unsigned multiply_bf16(unsigned a, unsigned b) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));  // −0: the sign of a zero stays
  return y;
}

// Waits for num_threads threads of the block (a multiple of 32) at barrier number id, 1 to 15.
__device__ __forceinline__ void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- memory that other ranks read and write while kernels run

// 16 bytes that arrive as a whole: three words and a flag.
__device__ __forceinline__ void store_flagged(void* p, unsigned a, unsigned b, unsigned c, unsigned flag) {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 3)
  const unsigned long long low = static_cast<unsigned long long>(b) << 32 | a;
  const unsigned long long high = static_cast<unsigned long long>(flag) << 32 | c;
  asm volatile("{\n.reg .b128 x;\nmov.b128 x, {%1, %2};\nst.relaxed.sys.global.b128 [%0], x;\n}" ::"l"(p), "l"(low),
               "l"(high)
               : "memory");
#else  // so do vectors of 16 bytes, though no manual says it
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(flag)
               : "memory");
#endif
}
// The flag is the last word.
__device__ __forceinline__ uint4 load_flagged(const void* p) {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 3)
  unsigned long long low, high;
  asm volatile("{\n.reg .b128 x;\nld.relaxed.sys.global.b128 x, [%2];\nmov.b128 {%0, %1}, x;\n}"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32), static_cast<unsigned>(high),
                    static_cast<unsigned>(high >> 32));
#else
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
#endif
}
// A word after which nothing is read that was written before the store that it comes from.
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(unsigned* p, unsigned x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* p) {
  unsigned long long x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(unsigned long long* p, unsigned long long x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
// What another rank has written before a store that this block has acquired; past every cache that might be older.
__device__ __forceinline__ unsigned short load2_system(const void* p) {
  unsigned short x;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ uint2 load8_system(const void* p) {
  uint2 x;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ uint4 load16_system(const void* p) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
// Between two looks at what another rank has not written yet.
__device__ __forceinline__ void wait_a_little() { __nanosleep(40); }
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Programmatic dependent launch. dependency_wait: until the kernel before has ended and its writes can be read.
// dependency_launch: the kernel after may begin. Nothing before sm_90, where kernels of a stream never overlap.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// x, of which the compiler knows nothing: what depends on it is worked out again and not kept in registers.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

#endif
