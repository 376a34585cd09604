// op         linear with weights and activations of 8 bits, defined by int8_linear, fp8_linear and fp8_block_linear of
//            ref/quant, and gate_up_act of ref/activation.py in one; for sm_90a and many tokens
// maths      kOuter   z[m, n] = x_scale[m] · w_scale[n] · Σ_k x[m, k] · w[n, k] (+ bias[n])
//            kBlocks  z[m, n] = Σ_b x_scale[m, b] · w_scale[n / 128, b] · Σ_{k in b} x[m, k] · w[n, k] (+ bias[n])
//            y = z, or with a gate y[m, n] = f(z[m, n]) · z[m, size + n]
// tensors    x [num_tokens, in_features] and weight [out_features, in_features] of codes, by tensor maps with boxes of
//            64 · kSubtiles and of 64 rows by 128 columns; x_scale float32 [num_tokens], or [num_tokens, blocks of 128 columns];
//            w_scale float32, every w_scale_step-th, or [blocks of 128 rows, blocks]; bias T or null; y
//            [num_tokens, size] T. size is a multiple of 8, and of 64 with a gate in blocks
// a block    is one of two of a cluster: they have the same 128 · kSubtiles tokens, of which each fetches half for both, and
//            128 rows of the weight each (with a gate 64 gates and what they are multiplied by). One warp starts the copies;
//            two warpgroups have 64 · kSubtiles tokens each. Blocks take tile after tile
// template   T bf16 or fp16; Code signed char or e4m3; kScales; kActivation f, or kNone without a gate; kSubtiles 1 or 2;
//            kStages of 128 columns in shared memory
// sums       integers are exact. e4m3: a tensor core's of 128 columns, which are scaled (kBlocks) and added in float32, in the
//            order of columns. One rounding at the end, and with a gate one of each z before it; quotients in f to 2 ulp
// launcher   grid at most the number of SMs, even; block 384; shared memory kStages · (kSubtiles + 1) · 16 KiB + 34 KiB
#include "activation.cuh"
#include "coding.cuh"
#include "ptx_sm90.cuh"
#include "tile_walk.cuh"
#include "vec.cuh"

constexpr int kThreads = 128;  // of a warpgroup
constexpr int kCluster = 2;
constexpr int kStep = 128;  // columns of a step
constexpr int kRows = 64;   // tokens of a product
constexpr int kOuts = 128;  // rows of the weight in one
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

enum Scales { kOuter, kBlocks };

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

// Where the 16 bytes number `unit` of row `row` of a result lie: 64 columns after 64 columns, each swizzled.
__device__ __forceinline__ int place(int row, int unit) { return (unit / 8 * kRows + row) * 128 + (unit % 8 ^ row % 8) * 16; }

template <typename T, typename Code, Scales kScales, Activation kActivation, int kSubtiles, int kStages>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(3 * kThreads, 1)
    linear_w8_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                   const float* __restrict__ x_scale, const float* __restrict__ w_scale, const T* __restrict__ bias, T* y,
                   int num_tokens, int size, int in_features, int w_scale_step) {
  using Sum = typename Coded<Code>::Sum;
  constexpr bool kExact = static_cast<Sum>(0.5f) == 0, kGated = kActivation != kNone;
  static_assert(!kExact || kScales == kOuter, "integers have one scale a token and one a row");
  constexpr int kTokens = 2 * kRows * kSubtiles, kXBytes = kTokens * kStep, kStageBytes = kXBytes + kOuts * kStep;
  constexpr int kSize = kGated ? kOuts / 2 : kOuts;  // numbers of y of a token
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kThreads, 0);
  const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32;

  unsigned char* const bytes = dynamic_shared<unsigned char>();
  unsigned char* const stages = bytes + (-shared_address(bytes) & 1023);
  unsigned char* const results = stages + kStages * kStageBytes;  // of a warpgroup [kRows][kSize] T
  mbarrier* const full = reinterpret_cast<mbarrier*>(results + 2 * kRows * kOuts * 2);
  mbarrier* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 2 * kCluster);
    }
    fence_barriers_made();
  }
  cluster_barrier();
  const int rank = cluster_rank(), num_clusters = gridDim.x / kCluster;
  const int num_steps = (in_features + kStep - 1) / kStep;
  const int token_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int pairs = (size + kCluster * kSize - 1) / (kCluster * kSize);  // of blocks along the rows of the weight
  const int num_tiles = token_tiles * pairs;
  struct Tile {
    int first_token, first_out;
  };
  const auto find = [&](int number) {
    const TilePlace at = tile_at(number, token_tiles, pairs);
    return Tile{at.token_tile * kTokens, (at.row_tile * kCluster + rank) * kSize};
  };

  if (warpgroup == 0) {
    give_back_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) {
      int stage = 0, parity = 1;
      for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
        const Tile tile = find(number);
        for (int step = 0; step < num_steps; ++step) {
          mbarrier_wait(empty + stage, parity);  // in both blocks
          unsigned char* const to = stages + stage * kStageBytes;
          mbarrier_arrive_expect(full + stage, kStageBytes);
          copy_box(to + kXBytes, weight_map, full + stage, step * kStep, tile.first_out);
          copy_box(to + kXBytes + kOuts / 2 * kStep, weight_map, full + stage, step * kStep,
                   tile.first_out + (kGated ? size : kOuts / 2));
          if (number == blockIdx.x / kCluster && step == 0) dependency_wait();  // the weights are there before; x is not
          copy_box_to_cluster<3>(to + rank * (kXBytes / 2), x_map, full + stage, step * kStep,
                                 tile.first_token + rank * (kTokens / 2));
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
    cluster_barrier();  // nobody writes to this block any more
    return;
  }

  take_registers<kConsumerRegisters>();
  dependency_wait();  // for the scales of x
  const int me = warpgroup - 1;
  const unsigned long long a = tile_descriptor(stages + me * kSubtiles * kRows * kStep, 16, 1024);
  const unsigned long long b = tile_descriptor(stages + kXBytes, 16, 1024);
  unsigned char* const my_results = results + me * kRows * kOuts * 2;
  Sum products[kExact ? kSubtiles : 1][64];
  float sums[kExact ? 1 : kSubtiles][64];
  int stage = 0, parity = 0;
  const auto release = [&](int which) {
    if (thread < kCluster) mbarrier_arrive_at(empty + which, thread);
  };
  for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
    const Tile tile = find(number);
    const int first_row = tile.first_token + me * kSubtiles * kRows + 16 * warp + lane / 4;  // of this thread; + 8 the other
    if constexpr (kExact) {
      int before = 0;
      for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + stage, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kStep / 32; ++k)
#pragma unroll
          for (int sub = 0; sub < kSubtiles; ++sub)
            wgmma_k_major(products[sub], advanced(a, stage * kStageBytes + sub * kRows * kStep + 32 * k),
                          advanced(b, stage * kStageBytes + 32 * k), step > 0 || k > 0, Code{});
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(before);
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int sub = 0; sub < kSubtiles; ++sub) settled(products[sub]);
      release(before);
    } else {
      float of_x[kSubtiles][2], of_w[2];
      const auto load = [&](int step) {
        step = min(step, num_steps - 1);
#pragma unroll
        for (int sub = 0; sub < kSubtiles; ++sub)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            of_x[sub][half] = x_scale[min(first_row + sub * kRows + 8 * half, num_tokens - 1) * num_steps + step];
        of_w[0] = w_scale[min(tile.first_out, size - 1) / kOuts * num_steps + step];
        of_w[1] = kGated ? w_scale[(size + min(tile.first_out, size - 1)) / kOuts * num_steps + step] : of_w[0];
      };
      if (kScales == kBlocks) load(0);
#pragma unroll
      for (int sub = 0; sub < kSubtiles; ++sub)
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[sub][i] = 0.0f;
      for (int step = 0; step < num_steps; ++step) {
        mbarrier_wait(full + stage, parity);
        float scales[kSubtiles][2][2];  // of rows and of gates and what they multiply
        if constexpr (kScales == kBlocks) {
#pragma unroll
          for (int i = 0; i < 4 * kSubtiles; ++i)
            scales[i / 4][i / 2 % 2][i % 2] = of_x[i / 4][i / 2 % 2] * of_w[i % 2];
          load(step + 1);
        }
#pragma unroll
        for (int sub = 0; sub < kSubtiles; ++sub) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kStep / 32; ++k)
            wgmma_k_major(products[0], advanced(a, stage * kStageBytes + sub * kRows * kStep + 32 * k),
                          advanced(b, stage * kStageBytes + 32 * k), k > 0, Code{});
          wgmma_commit();
          wgmma_wait<0>();
          settled(products[0]);
          if (sub == kSubtiles - 1) release(stage);
#pragma unroll
          for (int i = 0; i < 64; ++i)
            sums[sub][i] += kScales == kBlocks ? products[0][i] * scales[sub][i / 2 % 2][i / 32] : products[0][i];
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }

#pragma unroll
    for (int sub = 0; sub < kSubtiles; ++sub) {
      float of_x[2] = {1.0f, 1.0f};
      if (kScales == kOuter) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          of_x[half] = x_scale[min(first_row + sub * kRows + 8 * half, num_tokens - 1)];
      }
      named_barrier(1 + me, kThreads);  // the results before have been read
      float z[2][8];
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // 32 columns; with a gate 16 gates and what they multiply
#pragma unroll
        for (int which = 0; which < 4; ++which) {  // 8 columns each
          const int column = kGated ? 16 * part + which % 2 * 8 + which / 2 * 64 : 32 * part + 8 * which;
          const int of_size = tile.first_out + column % 64 + (kGated ? 0 : column / 64 * 64) + lane % 4 * 2;
          const int out = min(of_size, size - 2) + (kGated && column >= 64 ? size : 0);
          float of_w[2] = {1.0f, 1.0f}, add[2] = {0.0f, 0.0f};
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (kScales == kOuter) of_w[c] = w_scale[(out + c) * w_scale_step];
            if (bias != nullptr) add[c] = to_float(bias[out + c]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float sum;
            if constexpr (kExact)
              sum = static_cast<float>(products[sub][column / 8 * 4 + i]);
            else
              sum = sums[sub][column / 8 * 4 + i];
            z[which / 2][which % 2 * 4 + i] = sum * of_x[i / 2] * of_w[i % 2] + add[i % 2];
          }
        }
        const int row = 16 * warp + lane % 16;
        if constexpr (kGated) {
          unsigned values[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float out[2];
#pragma unroll
            for (int c = 0; c < 2; ++c)
              out[c] = activation<kActivation, true>(to_float(from_float<T>(z[0][2 * i + c]))) *
                       to_float(from_float<T>(z[1][2 * i + c]));
            values[i] = pack2(out[0], out[1], T{});
          }
          stmatrix_x4(my_results + place(row, 2 * part + lane / 16), values);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            unsigned values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = pack2(z[half][2 * i], z[half][2 * i + 1], T{});
            stmatrix_x4(my_results + place(row, 4 * part + 2 * half + lane / 16), values);
          }
        }
      }
      named_barrier(1 + me, kThreads);
      for (int i = thread; i < kRows * kSize / 8; i += kThreads) {
        const int row = i / (kSize / 8), unit = i % (kSize / 8), out = tile.first_out + 8 * unit;
        const int token = tile.first_token + (me * kSubtiles + sub) * kRows + row;
        if (token < num_tokens && out < size)
          store16(y + static_cast<index_t>(token) * size + out, load16(my_results + place(row, unit)));
      }
    }
  }
  dependency_launch();
  cluster_barrier();
}
