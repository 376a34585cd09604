// Kernels that do what no kernel may, each in its own way; a block of 64 threads.
#include "reduce.cuh"
#include "vec.cuh"

__global__ void exits_before_barrier() {
  if (threadIdx.x == 37) return;
  __syncthreads();
}
__global__ void two_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void not_in_mask(int* y) { y[threadIdx.x] = __shfl_sync(0xffffu, static_cast<int>(threadIdx.x), 0); }
__global__ void reads_outside_mask(int* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xffffu, static_cast<int>(threadIdx.x), 20);
}
__global__ void lane_has_exited(float* y) {
  if (threadIdx.x == 5) return;
  y[threadIdx.x] = warp_sum(1.0f);
}
__global__ void meets_elsewhere(int* y) {
  const int x = threadIdx.x;
  if (x < 16)
    y[x] = __shfl_sync(kAllLanes, x, 0);
  else
    y[x] = __shfl_sync(kAllLanes, x, 1);
}
__global__ void deadlocks() {
  if (threadIdx.x % 32 < 16)
    __syncwarp();
  else
    __syncthreads();
}
__global__ void lane_does_not_exist() { __syncwarp(); }
__global__ void misaligned(const float* x, float* y) { store16(y, load16(x + 1)); }
__global__ void misaligned_vector(const float* x, float4* y) { *y = *reinterpret_cast<const float4*>(x + 1); }
__global__ void misaligned_copy(const float* x) {
  __shared__ __align__(16) float shared[8];
  cp_async(shared + 1, x);
}
__global__ void index_past_end(float* y) {
  __shared__ float shared[64];
  shared[threadIdx.x + 1] = 1.0f;
  y[threadIdx.x] = shared[threadIdx.x];
}
__global__ void sum_overflows(int* y) { y[threadIdx.x] = y[threadIdx.x] + 2147483647; }
__global__ void product_overflows(int* y) { y[threadIdx.x] = 65536 * (static_cast<int>(threadIdx.x) + y[0]) * 32768; }
__global__ void divides_by_zero(int* y) { y[threadIdx.x] = 1 / (y[threadIdx.x] - 1); }
__global__ void writes_past_dynamic() { dynamic_shared<float>()[threadIdx.x + 1] = 1.0f; }
__global__ void half_a_warp_at_barrier() { named_barrier(1, 48); }
__global__ void other_count_at_barrier() { named_barrier(1, threadIdx.x < 32 ? 64 : 32); }

// For the sanitizers.
__global__ void reads_past_global(const float* x, float* y, int n) {
  if (static_cast<int>(threadIdx.x) <= n) y[threadIdx.x] = x[threadIdx.x];
}
__global__ void reads_past_dynamic(float* y) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = 1.0f;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x + 1];
}
__global__ void races(float* y) {
  __shared__ float shared[64];
  shared[threadIdx.x] = 1.0f;
  y[threadIdx.x] = shared[63 - threadIdx.x];
}
__global__ void races_in_warp(float* y) {
  __shared__ float shared[64];
  shared[threadIdx.x] = 1.0f;
  warp_sum(1.0f);  // a shuffle orders no memory
  y[threadIdx.x] = shared[threadIdx.x ^ 1];
}
__global__ void does_not_race(float* y) {
  __shared__ float shared[64];
  for (int i = 0; i < 3; ++i) {
    shared[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = shared[63 - threadIdx.x];
    __syncthreads();
    shared[threadIdx.x] = 2.0f;
    __syncwarp();
    y[threadIdx.x] += shared[threadIdx.x ^ 1];
    __syncwarp();
  }
}

__global__ void overflows_stack(int* y) {
  volatile unsigned char large[40000];  // below its end lies the stack of another thread
  for (int i = 0; i < 40000; ++i) large[i] = static_cast<unsigned char>(i);
  y[threadIdx.x] = large[y[0]];
}
