// One small kernel for each thing that the shim stands in for; a block of 64 threads unless its name says more.
#include "reduce.cuh"
#include "vec.cuh"

__global__ void shuffles(const int* x, int* y) {  // y [8, 64]
  const int t = threadIdx.x, value = x[t];
  y[t] = __shfl_sync(kAllLanes, value, 3);
  y[64 + t] = __shfl_xor_sync(kAllLanes, value, 5);
  y[128 + t] = __shfl_up_sync(kAllLanes, value, 2, 8);
  y[192 + t] = __shfl_down_sync(kAllLanes, value, 2, 8);
  y[256 + t] = __shfl_sync(kAllLanes, value, t + 1, 16);
  if (t % 32 < 12) y[320 + t] = __shfl_sync(0xfffu, value, 11 - t % 32);
  const double wide = __shfl_down_sync(kAllLanes, value * 1e10, 1);
  y[384 + t] = static_cast<int>(wide / 1e10 + 0.5);
  y[448 + t] = static_cast<int>(warp_sum<8>(static_cast<float>(value)));
}

__global__ void votes(const int* x, unsigned* y) {  // y [8, 64]
  const int t = threadIdx.x, value = x[t];
  y[t] = __ballot_sync(kAllLanes, value > 0);
  y[64 + t] = __any_sync(kAllLanes, value == 7);
  y[128 + t] = __all_sync(kAllLanes, value < 7);
  y[192 + t] = __match_any_sync(kAllLanes, value & 3);
  y[256 + t] = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value) & 15u);
  y[320 + t] = __reduce_max_sync(kAllLanes, static_cast<unsigned>(value) & 15u);
  y[384 + t] = __syncthreads_count(value > 0);
  y[448 + t] = 2 * __syncthreads_or(value == 7) + __syncthreads_and(value < 7);
}

__global__ void atomics(const int* x, int* y, float* sum, unsigned* order) {
  const int value = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&y[0], value);
  atomicMax(&y[1], value);
  atomicMin(&y[2], value);
  atomicOr(&y[3], 1 << (value & 15));
  atomicCAS(&y[4], 0, 1);
  atomicAdd(sum, static_cast<float>(value));
  __threadfence();
  __shared__ unsigned number;  // of the block: the last one to come knows that the others have ended
  __syncthreads();
  if (threadIdx.x == 0) number = atomicAdd(order, 1u);
  __syncthreads();
  if (number == gridDim.x - 1 && threadIdx.x == 0) y[5] = atomicAdd(&y[0], 0);
}

__global__ void native_shared(const float* x, float* y) {
  extern __shared__ __align__(16) float whole[];
  float* again = dynamic_shared<float>();
  whole[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = again[blockDim.x - 1 - threadIdx.x];
}

// Shared memory as it is found, static and dynamic, as bits; the second block must not see the first one's.
__global__ void found_in_shared(unsigned* y) {
  __shared__ unsigned fixed[64];
  unsigned* dynamic = dynamic_shared<unsigned>();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[2 * i] = fixed[threadIdx.x], y[2 * i + 1] = dynamic[threadIdx.x];
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 0;
}

// Two groups of two warps, each with a barrier of its own.
__global__ void named_barriers_128(const int* x, int* y) {
  __shared__ int half[2][64];
  const int t = threadIdx.x, group = t / 64;
  half[group][t % 64] = x[t];
  named_barrier(1 + group, 64);
  y[t] = half[group][63 - t % 64];
}

// y [24, 32]: what each lane gets of the 32 rows of 8 numbers in x.
__global__ void ldmatrices_32(const unsigned short* x, unsigned* y) {
  __shared__ __align__(16) unsigned short rows[32][8];
  const int lane = threadIdx.x;
  store16(rows[lane], load16(x + lane * 8));
  __syncwarp();
  unsigned one[1], two[2], four[4], two_trans[2], four_trans[4];
  ldmatrix_x1(one, rows[lane]);
  ldmatrix_x2(two, rows[lane]);
  ldmatrix_x4(four, rows[lane]);
  ldmatrix_x2_trans(two_trans, rows[lane]);
  ldmatrix_x4_trans(four_trans, rows[lane]);
  y[lane] = one[0];
  for (int i = 0; i < 2; ++i) y[(1 + i) * 32 + lane] = two[i], y[(3 + i) * 32 + lane] = two_trans[i];
  for (int i = 0; i < 4; ++i) y[(5 + i) * 32 + lane] = four[i], y[(9 + i) * 32 + lane] = four_trans[i];
}

// d [16, 8] += a [16, kK] · b [8, kK]ᵀ, the fragments read straight from memory.
template <typename T, typename D, int kK>
__global__ void mma_32(const T* a, const T* b, D* d) {
  constexpr int kPerWord = 4 / sizeof(T);
  const int group = threadIdx.x / 4, pair = threadIdx.x % 4;
  auto word = [](const T* p) { return *reinterpret_cast<const unsigned*>(p); };
  unsigned a_fragment[4], b_fragment[2];
  for (int i = 0; i < 4; ++i) a_fragment[i] = word(a + (group + i % 2 * 8) * kK + pair * kPerWord + i / 2 * (kK / 2));
  for (int i = 0; i < 2; ++i) b_fragment[i] = word(b + group * kK + pair * kPerWord + i * (kK / 2));
  D sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[(group + i / 2 * 8) * 8 + pair * 2 + i % 2];
  if constexpr (kK == 16)
    mma_k16(sums, a_fragment, b_fragment, T{});
  else
    mma_k32(sums, a_fragment, b_fragment, T{});
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair * 2 + i % 2] = sums[i];
}

// Copies under way are NaN until the wait that covers them. y [5, 32]
__global__ void copies_32(const float* x, float* y) {
  __shared__ __align__(16) float first[32];
  __shared__ __align__(16) float second[32];
  const int lane = threadIdx.x;
  first[lane] = second[lane] = 1.0f;
  cp_async<4>(&first[lane], x + lane);
  cp_async_commit();
  cp_async<4>(&second[lane], x + 32 + lane, lane % 2 == 0);
  cp_async_commit();
  y[lane] = first[lane];
  cp_async_wait<1>();
  y[32 + lane] = first[lane];
  y[64 + lane] = second[lane];
  cp_async_wait<0>();
  y[96 + lane] = second[lane];
  __syncwarp();
  y[128 + lane] = second[31 - lane];
}

template <typename T>
__global__ void roundings(const float* x, T* y, float* back, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    y[i] = from_float<T>(x[i]);
    back[i] = to_float(y[i]);
  }
}

__global__ void codes(const float* x, unsigned short* pairs, int n) {
  for (int i = threadIdx.x; i < n / 2; i += blockDim.x) pairs[i] = pack_e4m3(x[2 * i], x[2 * i + 1]);
}

__global__ void products_bf16(const unsigned* a, const unsigned* b, unsigned* y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = multiply_bf16(a[i], b[i]);
}

// A warp waits for another by polling; only a schedule that lets others run can end.
__global__ void polls(int* flag) {
  if (threadIdx.x == 0)
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);
  if (threadIdx.x == 40) atomicExch(flag, 1);
}
