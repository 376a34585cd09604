// PTX of sm_90a behind named functions: matrix multiply of a warpgroup, barriers in shared memory, copies of boxes of
// an array, clusters of blocks, registers by role.
//
// GPU-only: a fiber cannot stand in for units that read shared memory on their own while the threads go on. A kernel
// that includes this is named …_sm90 and has a portable twin, which is what a CPU runs.
//
// A warpgroup is 4 warps, the first of them a multiple of 4. Of a product's 64 rows its warp w has rows 16 · w to
// 16 · w + 15, in fragments like those of mma m16n8k16 (ptx.cuh): d[4 · j] to d[4 · j + 3] are of columns 8 · j on.
#pragma once

#include "ptx.cuh"

#if !defined(__CUDACC__)
#error "ptx_sm90.cuh is for GPUs only: build the portable twin of this kernel for a CPU"
#endif

// ---- barriers in shared memory: a phase ends when as many arrivals have come as the barrier was made for

using mbarrier = unsigned long long;

__device__ __forceinline__ void mbarrier_init(mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// One arrival, and `bytes` that copy_box must bring besides before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// An arrival at the same barrier of block number `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(mbarrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Until the phase of this parity has ended: the first phase has parity 0, and the one before it counts as ended.
__device__ __forceinline__ void mbarrier_wait(mbarrier* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// After mbarrier_init: other blocks of the cluster and copy_box will find the barriers made.
__device__ __forceinline__ void fence_barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- copies of boxes: one thread starts them, a barrier here says when they have come

// An array of up to five axes and the size of a box in it, as the driver encodes them (engine/kernels/tensor_map.py); a
// parameter of the kernel, declared `const __grid_constant__`.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// The box whose first number is at these coordinates, the last axis first, to shared memory: rows of 64 numbers,
// swizzled as tile_descriptor wants them if `to` is a multiple of 1024 bytes. What lies outside the array is zeros.
// kBlocks: for those of the cluster, a bit each; it comes to the same place in each, and counts at the same barrier.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, mbarrier* barrier, int i, int j, int k,
                                         int l) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(i), "r"(j), "r"(k), "r"(l)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, mbarrier* barrier, int i, int j) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(i), "r"(j)
      : "memory");
}
template <unsigned short kBlocks>
__device__ __forceinline__ void copy_box_to_cluster(void* to, const TensorMap& map, mbarrier* barrier, int i, int j) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(i), "r"(j), "h"(kBlocks)
      : "memory");
}

// Bytes that lie together, a multiple of 16 from and to multiples of 16, to this block.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, mbarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The other way: a box from shared memory, of which what lies outside the array is left out. What is written there must be
// fenced (fence_async_shared) before. The thread that has started copies ends them as a group, and waits until all that it
// has ended so have read shared memory.
__device__ __forceinline__ void copy_box_out(const TensorMap& map, const void* from, int i, int j) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(i), "r"(j)
               : "memory");
}
__device__ __forceinline__ void boxes_out_end() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void boxes_out_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// cp_async of 16 bytes of long rows that are read once: L2 fetches the 256 bytes around them.
__device__ __forceinline__ void cp_async_stream(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// ---- a cluster: blocks that run at the same time and reach each other's shared memory

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Until all threads of the cluster are here.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of block number `rank` of the cluster, from where p is in this one.
__device__ __forceinline__ float4 load16_of_block(const float* p, int rank) {
  unsigned address;
  float4 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// ---- memory as two kinds of units see it

// What this thread has written to shared memory, or has seen written, can be read by wgmma from here on.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The counterpart of ldmatrix_x4: lane 8·m + r gives the address of row r of matrix m.
__device__ __forceinline__ void stmatrix_x4(void* row, const unsigned (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(d[0]),
               "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}
// Each matrix turned over: row r is what was column r.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const unsigned (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

// Counts this warp at a barrier where others wait with named_barrier, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- registers a thread, of a whole warpgroup; the kernel needs a bound on them at its start

template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- matrix multiply of a warpgroup

// A tile in shared memory: rows of 128 bytes, whose 16-byte units are swizzled (unit ^ row % 8), from a multiple of 1024
// bytes on.
//   K-major: a row has numbers of one m or n. stride_bytes to the next 8 rows; leading_bytes has no meaning
//   MN-major: a row has numbers of one k. stride_bytes to the next 8 rows, leading_bytes to the next 64 columns
__device__ __forceinline__ unsigned long long tile_descriptor(const void* tile, int leading_bytes, int stride_bytes) {
  return static_cast<unsigned long long>((shared_address(tile) & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading_bytes >> 4) << 16 |
         static_cast<unsigned long long>(stride_bytes >> 4) << 32 | 1ull << 62;
}
// The descriptor of what lies `bytes` further on: 32 for the next 16 numbers of a row.
__device__ __forceinline__ unsigned long long advanced(unsigned long long descriptor, int bytes) {
  return descriptor + static_cast<unsigned long long>(bytes >> 4);
}

// Before the first product, and again when this thread has touched a register of the next one.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the newest groups are under way; then settled(d) of those that have ended.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading d, or moving it, before the wait.
template <int kCount>
__device__ __forceinline__ void settled(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void settled(int (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Products of 64 × 16 and 16 × n numbers, n = twice the size of d; the last argument only names the format of a and b.
//   wgmma_k_major   d = a · b, or d += a · b if `add`; a and b are K-major tiles
//   wgmma_mn_major  d += a · b; a in registers, in fragments as for mma m16n8k16; b an MN-major tile
//   wgmma_from_registers  d = a · b, or d += a · b if `add`; a in registers likewise; b a K-major tile
#define SUMS_8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
#define LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// COUNT sums; A to F: the numbers of the operands behind them
#define WGMMA(COUNT, N, FORMAT, NAME, A, B, C, D, E, F)                                                                   \
  __device__ __forceinline__ void wgmma_k_major(float (&d)[COUNT], unsigned long long a, unsigned long long b,         \
                                                bool add, FORMAT) {                                                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #C ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##COUNT "}, %" #A ", %" #B  \
                 ", add, 1, 1, 0, 0;\n}"                                                                               \
                 : SUMS_##COUNT(0)                                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add))                                                          \
                 : "memory");                                                                                          \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma_mn_major(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b,      \
                                                 FORMAT) {                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##COUNT "}, {%" #A ", %" #B \
                 ", %" #C ", %" #D "}, %" #E ", 1, 1, 1, 1;"                                                           \
                 : SUMS_##COUNT(0)                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                  \
                 : "memory");                                                                                          \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma_from_registers(float (&d)[COUNT], const unsigned (&a)[4],                      \
                                                       unsigned long long b, bool add, FORMAT) {                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #E ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" LIST_##COUNT "}, {%" #A ", %" #B \
                 ", %" #C ", %" #D "}, %" #F ", add, 1, 1, 0;\n}"                                                      \
                 : SUMS_##COUNT(0)                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(static_cast<int>(add)), "l"(b)                      \
                 : "memory");                                                                                          \
  }
WGMMA(8, 16, bf16, "bf16", 8, 9, 10, 11, 12, 13)
WGMMA(8, 16, fp16, "f16", 8, 9, 10, 11, 12, 13)
WGMMA(16, 32, bf16, "bf16", 16, 17, 18, 19, 20, 21)
WGMMA(16, 32, fp16, "f16", 16, 17, 18, 19, 20, 21)
WGMMA(32, 64, bf16, "bf16", 32, 33, 34, 35, 36, 37)
WGMMA(32, 64, fp16, "f16", 32, 33, 34, 35, 36, 37)
WGMMA(64, 128, bf16, "bf16", 64, 65, 66, 67, 68, 69)
WGMMA(64, 128, fp16, "f16", 64, 65, 66, 67, 68, 69)
WGMMA(128, 256, bf16, "bf16", 128, 129, 130, 131, 132, 133)
WGMMA(128, 256, fp16, "f16", 128, 129, 130, 131, 132, 133)
#undef WGMMA

// The same of 64 × 32 and 32 × 128 numbers of 8 bits, K-major (128 of them fill a row of a tile): signed char, whose sums
// are exact integers, or e4m3. Hopper adds products of e4m3 with about 14 bits: sums of more than 128 belong in registers.
#define INTS_8(i)                                                                                             \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
      "+r"(d[i + 7])
#define INTS_64(i)                                                                                         \
  INTS_8(i), INTS_8(i + 8), INTS_8(i + 16), INTS_8(i + 24), INTS_8(i + 32), INTS_8(i + 40), INTS_8(i + 48), \
      INTS_8(i + 56)
#define WGMMA_8(SUM, FORMAT, SUMS, NAMES, SIGNS)                                                                      \
  __device__ __forceinline__ void wgmma_k_major(SUM (&d)[64], unsigned long long a, unsigned long long b, bool add,   \
                                                FORMAT) {                                                             \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n128k32." NAMES " {" LIST_64 "}, %64, %65, add" SIGNS ";\n}"        \
                 : SUMS(0)                                                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add))                                                         \
                 : "memory");                                                                                         \
  }                                                                                                                   \
  __device__ __forceinline__ void wgmma_from_registers(SUM (&d)[64], const unsigned (&a)[4], unsigned long long b,    \
                                                       bool add, FORMAT) {                                            \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %68, 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n128k32." NAMES " {" LIST_64 "}, {%64, %65, %66, %67}, %69, add"    \
                 SIGNS ";\n}"                                                                                         \
                 : SUMS(0)                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(static_cast<int>(add)), "l"(b)                     \
                 : "memory");                                                                                         \
  }
WGMMA_8(float, e4m3, SUMS_64, "f32.e4m3.e4m3", ", 1, 1")
WGMMA_8(int, signed char, INTS_64, "s32.s8.s8", "")
#undef WGMMA_8
#undef INTS_8
#undef INTS_64
#undef SUMS_8
#undef SUMS_16
#undef SUMS_32
#undef SUMS_64
#undef SUMS_128
#undef LIST_8
#undef LIST_16
#undef LIST_32
#undef LIST_64
#undef LIST_128
