// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one; for few tokens:
//            linear_tiles_sm90.cu is for more
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k] (+ bias[n]); y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
//            with size = out_features / 2
// tensors    x [num_tokens, in_features] T, rows x_stride apart; weight [out_features, in_features] T; bias
//            [out_features] T or null; y [num_tokens, out_features or size] Y. in_features and x_stride are multiples of
//            8, x and weight at multiples of 16 bytes
// a block    owns 16 · kRowTiles rows of the weight (half of them gates, if there are any) and all tokens; its warps share
//            in_features step by step (32 numbers a step) and add up at the end in the order of warps. A thread reads 16
//            bytes of a row at a time, straight into the registers that the tensor cores take: no shared memory on the
//            way, each weight once
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kRowTiles 1, 2 or 4; kTokenTiles
//            1, 2 or 4 (8 tokens each); kAhead steps of a warp on the way; kWarps of a block
// sums       float32, mma by mma in the order of steps within a warp, then warp by warp; one rounding at the end, and with
//            a gate one of each z before it
// launcher   grid ⌈out_features / (16 · kRowTiles)⌉, block 32 · kWarps, shared memory kWarps · 8 · kTokenTiles ·
//            (16 · kRowTiles + 4) floats; num_tokens ≤ 8 · kTokenTiles
#include "activation.cuh"
#include "vec.cuh"

constexpr int kStep = 32;  // numbers of a row that a warp takes at once: 4 threads, 16 bytes each

// A thread's 16 bytes hold in_features 8·pair … 8·pair + 7 of a step. Which of them the tensor cores call k = 2·pair
// is of no account as long as weight and x agree: the first four serve one mma of 16, the last four another.
template <typename T, typename Y, Activation kActivation, int kRowTiles, int kTokenTiles, int kAhead, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    linear_skinny(const T* x, const T* __restrict__ weight, const T* __restrict__ bias, Y* y, int num_tokens,
                  int out_features, int in_features, index_t x_stride) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOuts = kGated ? kRows / 2 : kRows;  // columns of y
  const int size = kGated ? out_features / 2 : out_features, first_row = blockIdx.x * kOuts;
  // Row i of the block in the weight: with a gate 8 of them, then the 8 that they are multiplied by. Rows and tokens
  // that are not there are read as the last ones; what comes of them is not stored.
  const auto row_of = [&](int i) -> index_t {
    return kGated ? min(first_row + i / 16 * 8 + i % 8, size - 1) + i / 8 % 2 * size : min(first_row + i, size - 1);
  };
  const int num_steps = ((in_features + kStep - 1) / kStep + kWarps - 1 - warp) / kWarps;  // of this warp

  const T *rows[kRowTiles][2], *tokens[kTokenTiles];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      rows[tile][half] = weight + row_of(16 * tile + 8 * half + group) * in_features;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile)
    tokens[tile] = x + min(8 * tile + group, num_tokens - 1) * x_stride;

  uint4 w[kAhead][kRowTiles][2], v[kAhead][kTokenTiles];
  const auto load_weight = [&](int step, uint4(&to)[kRowTiles][2]) {
    const int k = min((step * kWarps + warp) * kStep + 8 * pair, in_features - 8);  // behind the end x is 0
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) to[tile][half] = load16_stream(rows[tile][half] + k);
  };
  const auto load_x = [&](int step, uint4(&to)[kTokenTiles]) {
    const int k = (step * kWarps + warp) * kStep + 8 * pair;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
      to[tile] = k < in_features ? load16(tokens[tile] + k) : make_uint4(0, 0, 0, 0);
  };

  // The weights are there whatever the kernel before does; x is not.
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (u < num_steps) load_weight(u, w[u]);
  dependency_wait();
#pragma unroll
  for (int u = 0; u < kAhead; ++u)
    if (u < num_steps) load_x(u, v[u]);

  float sums[kRowTiles][kTokenTiles][4] = {};
  for (int first = 0; first < num_steps; first += kAhead)
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= num_steps) break;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 low = w[u][tile][0], high = w[u][tile][1];
        const unsigned first_w[4] = {low.x, high.x, low.y, high.y}, second_w[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          const unsigned first_x[2] = {v[u][t].x, v[u][t].y}, second_x[2] = {v[u][t].z, v[u][t].w};
          mma_k16(sums[tile][t], first_w, first_x, T{});
          mma_k16(sums[tile][t], second_w, second_x, T{});
        }
      }
      if (first + u + kAhead >= num_steps) continue;
      load_weight(first + u + kAhead, w[u]);
      load_x(first + u + kAhead, v[u]);
    }

  // Each warp's sums as [kTokens][kRows]; 4 more a token, so that the threads of a warp write to different banks.
  constexpr int kPitch = kRows + 4;
  float* const parts = dynamic_shared<float>();
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[(warp * kTokens + 8 * t + 2 * pair + i % 2) * kPitch + 16 * tile + group + i / 2 * 8] = sums[tile][t][i];
  __syncthreads();
  const auto sum_of = [&](int token, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += parts[(other * kTokens + token) * kPitch + row];
    return bias == nullptr ? sum : sum + to_float(bias[row_of(row)]);
  };
  for (int i = threadIdx.x; i < kOuts * kTokens; i += 32 * kWarps) {
    const int out = i % kOuts, token = i / kOuts;
    if (first_row + out >= size || token >= num_tokens) continue;
    float z = sum_of(token, kGated ? out / 8 * 16 + out % 8 : out);
    if constexpr (kGated) {
      const float up = to_float(from_float<T>(sum_of(token, out / 8 * 16 + out % 8 + 8)));
      z = activation<kActivation>(to_float(from_float<T>(z))) * up;
    }
    y[static_cast<index_t>(token) * size + first_row + out] = from_float<Y>(z);
  }
}
