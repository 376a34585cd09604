// op         linear, defined by ref/linear.py
// maths      y[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n])
// tensors    x [num_tokens, in_features] T, rows x_stride apart; weight [out_features, in_features] T; bias
//            [out_features] T or null; y [num_tokens, out_features] T. in_features is a multiple of 8, all rows at
//            multiples of 16 bytes
// a block    owns 16 · kRowTiles rows of the weight and all tokens; its warps share in_features step by step (32
//            numbers a step) and add up at the end in the order of warps. A thread reads 16 bytes of a row at a time,
//            straight into the registers that the tensor cores take: no shared memory on the way, each weight once
// template   T bf16 or fp16; kRowTiles 1, 2 or 4; kTokenTiles 1, 2 or 4 (8 tokens each); kUnroll steps in flight
// sums       float32, mma by mma in the order of steps within a warp, then warp by warp; one rounding at the end
// launcher   grid ⌈out_features / (16 · kRowTiles)⌉, block 32 · num_warps (at most 16), shared memory
//            num_warps · 16 · kRowTiles · 8 · kTokenTiles floats; num_tokens ≤ 8 · kTokenTiles
#include "ptx.cuh"
#include "vec.cuh"

constexpr int kStep = 32;  // numbers of a row that a warp takes at once: 4 threads, 16 bytes each

// A thread's 16 bytes hold in_features 8·pair … 8·pair + 7 of a step. Which of them the tensor cores call k = 2·pair
// is of no account as long as weight and x agree: the first four serve one mma of 16, the last four another.
template <typename T, int kRowTiles, int kTokenTiles, int kUnroll>
__global__ void linear_skinny(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                              T* __restrict__ y, int num_tokens, int out_features, int in_features, int x_stride) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4;
  const int first_row = blockIdx.x * kRows;
  float sums[kRowTiles][kTokenTiles][4] = {};
  uint4 w[kUnroll][kRowTiles][2], v[kUnroll][kTokenTiles];
  bool waits = true;

  for (int start = warp * kStep; start < in_features; start += num_warps * kStep * kUnroll) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = start + u * num_warps * kStep + 8 * pair;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + 16 * tile + 8 * half + group;
          w[u][tile][half] = row < out_features && k < in_features
                                 ? load16_stream(weight + static_cast<index_t>(row) * in_features + k)
                                 : make_uint4(0, 0, 0, 0);
        }
    }
    if (waits) dependency_wait();  // the weights are there whatever the kernel before does; x is not
    waits = false;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = start + u * num_warps * kStep + 8 * pair;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const int token = 8 * tile + group;
        v[u][tile] = token < num_tokens && k < in_features ? load16(x + static_cast<index_t>(token) * x_stride + k)
                                                           : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 low = w[u][tile][0], high = w[u][tile][1];
        const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const unsigned first_x[2] = {v[u][t].x, v[u][t].y}, second_x[2] = {v[u][t].z, v[u][t].w};
          mma_k16(sums[tile][t], first, first_x, T{});
          mma_k16(sums[tile][t], second, second_x, T{});
        }
      }
  }
  if (waits) dependency_wait();  // a warp without a step: y may still be read by the kernel before
  dependency_launch();

  float* const parts = dynamic_shared<float>();  // [num_warps][kRows][kTokens]
  float* const mine = parts + warp * kRows * kTokens;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mine[(16 * tile + group + 8 * (i / 2)) * kTokens + 8 * t + 2 * pair + i % 2] = sums[tile][t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kTokens; i += blockDim.x) {
    const int row = i % kRows, token = i / kRows;
    if (first_row + row >= out_features || token >= num_tokens) continue;
    float sum = 0.0f;
    for (int other = 0; other < num_warps; ++other) sum += parts[(other * kRows + row) * kTokens + token];
    if (bias != nullptr) sum += to_float(bias[first_row + row]);
    y[static_cast<index_t>(token) * out_features + first_row + row] = from_float<T>(sum);
  }
}
