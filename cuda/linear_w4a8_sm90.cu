// op         linear with weights of 4 bits in groups and activations of 8 bits a token, defined by w4a8_linear of
//            ref/quant/w4a8.py, and gate_up_act of ref/activation.py in one; for sm_90a and many tokens
// maths      z[m, n] = x_scale[m] · Σ_g scale[n, g] · Σ_{k in g} x[m, k] · (q[n, k] − zero[n, g]) (+ bias[n]); y = z, or with
//            a gate y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    weight, scales and zeros as grouped.cuh has them; x [num_tokens, in_features] of codes, by a tensor map with
//            boxes of 64 · kSubtiles rows by 128 columns, the columns in pairs: of every 16 the numbers 0, 8, 1, 9 … 7, 15;
//            x_scale [num_tokens] float32; bias T or null; y [num_tokens, size] T. size is a multiple of 8
// a block    is one of two of a cluster: they have the same 128 · kSubtiles tokens, of which each fetches half for both, and
//            128 rows of the weight each. One warp starts the copies of x; two warpgroups have 64 rows each, whose weights go
//            straight into registers, lose their zero there and are multiplied from there. Blocks take tile after tile
// template   T bf16 or fp16; Code signed char or e4m3, of both sides; kActivation f, or kNone without a gate; kZeros whether
//            there are zeros; kGroups of a step of 128 columns: 4, 2 or 1; kSubtiles 1 or 2; kStages of x in shared memory
// sums       a group's, or those of 128 of its columns, are exact integers, or those of a tensor core; scaled and added in
//            float32 in the order of columns; one rounding at the end, and with a gate one of each z before it; quotients in
//            f to 2 ulp
// launcher   grid at most the number of SMs, even; block 384; shared memory kStages · kSubtiles · 16 KiB + 34 KiB;
//            group_shift: groups are 128 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "coding.cuh"
#include "grouped.cuh"
#include "ptx_sm90.cuh"
#include "tile_walk.cuh"
#include "vec.cuh"

constexpr int kThreads = 128;  // of a warpgroup
constexpr int kCluster = 2;
constexpr int kStep = 128;      // columns of a step
constexpr int kTokens = 128;    // of a product
constexpr int kBlockTiles = 8;  // row tiles of 16 of a block
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Codes of q − zero, over unit, for the q in the low halves of the four bytes of a word. zeros: one, four times.
template <bool kZeros>
__device__ __forceinline__ unsigned codes_of(unsigned word, unsigned zeros, signed char) {
  if (!kZeros) return (word << 4 & 0xf0f0f0f0u) ^ 0x80808080u;  // 16 · (q − 8)
  return ((word & 0x0f0f0f0fu | 0x80808080u) - zeros) ^ 0x80808080u;
}
// 128 + q − zero has the sign in bit 7; what is below 128 is turned over to 128 + |q − zero|. Codes 0 to 15 are the
// numbers 0 to 15 times 2⁻⁹.
template <bool kZeros>
__device__ __forceinline__ unsigned codes_of(unsigned word, unsigned zeros, e4m3) {
  const unsigned d = (word & 0x0f0f0f0fu | 0x80808080u) - zeros;
  unsigned positive;  // bytes of ones where q ≥ zero
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(positive) : "r"(d));
  return ((d ^ ~positive) + (~positive & 0x01010101u)) ^ (positive & 0x80808080u);
}
template <bool kZeros>
__device__ constexpr float unit(signed char) {
  return kZeros ? 1.0f : 0.0625f;
}
template <bool kZeros>
__device__ constexpr float unit(e4m3) {
  return 512.0f;
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

template <typename T, typename Code, Activation kActivation, bool kZeros, int kGroups, int kSubtiles, int kStages>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(3 * kThreads, 1)
    linear_w4a8_sm90(const __grid_constant__ TensorMap x_map, const float* __restrict__ x_scale,
                     const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
                     const unsigned char* __restrict__ zeros, const T* __restrict__ bias, T* y, int num_tokens,
                     int out_features, int in_features, int group_shift) {
  using Sum = typename Coded<Code>::Sum;
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOutUnits = kGated ? 4 : 8;  // 16 bytes of y that a warpgroup has of a token
  constexpr int kTileTokens = kTokens * kSubtiles, kStageBytes = kTileTokens * kStep;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kThreads, 0);
  const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32, group = lane / 4;

  unsigned char* const bytes = dynamic_shared<unsigned char>();
  unsigned char* const stages = bytes + (-shared_address(bytes) & 1023);
  unsigned char* const results = stages + kStages * kStageBytes;  // of a warpgroup [kTokens][128 bytes]
  mbarrier* const full = reinterpret_cast<mbarrier*>(results + 2 * kTokens * 128);
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
  const int num_steps = (in_features + kStep - 1) / kStep, num_quads = (out_features + 63) / 64;
  const int size = kGated ? out_features / 2 : out_features;
  const int token_tiles = (num_tokens + kTileTokens - 1) / kTileTokens;
  const int pairs = (4 * num_quads + kCluster * kBlockTiles - 1) / (kCluster * kBlockTiles);  // of blocks along the rows
  const int num_tiles = token_tiles * pairs;
  struct Tile {
    int first_token, first_row_tile;
  };
  const auto find = [&](int number) {
    const TilePlace at = tile_at(number, token_tiles, pairs);
    return Tile{at.token_tile * kTileTokens, (at.row_tile * kCluster + rank) * kBlockTiles};
  };

  if (warpgroup == 0) {
    give_back_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) {
      dependency_wait();
      int stage = 0, parity = 1;
      for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
        const Tile tile = find(number);
        for (int step = 0; step < num_steps; ++step) {
          mbarrier_wait(empty + stage, parity);
          mbarrier_arrive_expect(full + stage, kStageBytes);
          copy_box_to_cluster<3>(stages + stage * kStageBytes + rank * (kStageBytes / 2), x_map, full + stage, step * kStep,
                                 tile.first_token + rank * (kTileTokens / 2));
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
    cluster_barrier();
    return;
  }

  take_registers<kConsumerRegisters>();
  dependency_wait();  // for the scales of x
  const int me = warpgroup - 1;
  const int last_group = (in_features - 1) / (kStep / kGroups) >> group_shift;
  const unsigned long long b = tile_descriptor(stages, 16, 1024);
  unsigned char* const my_results = results + me * kTokens * 128;
  float sums[kSubtiles][64];
  Sum products[64];
  int stage = 0, parity = 0;
  const auto release = [&](int which) {
    if (thread < kCluster) mbarrier_arrive_at(empty + which, thread);
  };
  for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
    const Tile tile = find(number);
    const int row_tile = tile.first_row_tile + 4 * me + warp, read_tile = min(row_tile, 4 * num_quads - 1);
    const uint4* const from =
        reinterpret_cast<const uint4*>(weight) + static_cast<unsigned>(read_tile) * num_steps * 64u + lane;
    uint4 words[2];
    unsigned scale_pair[kGroups], zero_pair[kGroups];
    const auto load = [&](int step) {
      step = min(step, num_steps - 1);
      words[0] = load16(from + step * 64), words[1] = load16(from + step * 64 + 32);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const unsigned of = min(kGroups * step + g >> group_shift, last_group);
        const unsigned pair = ((of * num_quads + read_tile / 4) * 8 + group) * 4 + read_tile % 4;
        scale_pair[g] = reinterpret_cast<const unsigned*>(scales)[pair];
        zero_pair[g] = kZeros ? reinterpret_cast<const unsigned short*>(zeros)[pair] : 0x0808u;
      }
    };
#pragma unroll
    for (int sub = 0; sub < kSubtiles; ++sub)
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[sub][i] = 0.0f;
    load(0);
    for (int step = 0; step < num_steps; ++step) {
      unsigned a[4][4];
      float scale[kGroups][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned zero = zero_pair[j * kGroups / 4];
        const unsigned zeros_0 = (zero & 255u) * 0x01010101u, zeros_1 = (zero >> 8) * 0x01010101u;
        const unsigned low = j % 2 == 0 ? words[j / 2].x : words[j / 2].z, high = j % 2 == 0 ? words[j / 2].y : words[j / 2].w;
        a[j][0] = codes_of<kZeros>(low, zeros_0, Code{}), a[j][1] = codes_of<kZeros>(low >> 4, zeros_1, Code{});
        a[j][2] = codes_of<kZeros>(high, zeros_0, Code{}), a[j][3] = codes_of<kZeros>(high >> 4, zeros_1, Code{});
      }
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i)
        scale[i / 2][i % 2] =
            to_float(fp16{static_cast<unsigned short>(scale_pair[i / 2] >> 16 * (i % 2))}) * unit<kZeros>(Code{});
      load(step + 1);
      mbarrier_wait(full + stage, parity);
#pragma unroll
      for (int sub = 0; sub < kSubtiles; ++sub)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          wgmma_fence();
#pragma unroll
          for (int j = g * 4 / kGroups; j < (g + 1) * 4 / kGroups; ++j)
            wgmma_from_registers(products, a[j], advanced(b, stage * kStageBytes + sub * kTokens * kStep + 32 * j),
                                 j > g * 4 / kGroups, Code{});
          wgmma_commit();
          wgmma_wait<0>();
          settled(products);
          if (sub == kSubtiles - 1 && g == kGroups - 1) release(stage);
#pragma unroll
          for (int i = 0; i < 64; ++i) sums[sub][i] += static_cast<float>(products[i]) * scale[g][i / 2 % 2];
        }
      if (++stage == kStages) stage = 0, parity ^= 1;
    }

    // y by token: matrices of 8 outs by 8 tokens are stored the other way round, and read 16 bytes at a time.
    float biases[2] = {};
    const int row = (kGated ? 8 : 16) * row_tile + group;  // of y; the other is 8, or size, on
    if (bias != nullptr) {
      if (row < size) biases[0] = to_float(bias[row]);
      if (kGated ? row < size : row + 8 < size) biases[1] = to_float(bias[kGated ? size + row : row + 8]);
    }
#pragma unroll
    for (int sub = 0; sub < kSubtiles; ++sub) {
      const int first_token = tile.first_token + sub * kTokens;
      named_barrier(1 + me, kThreads);  // the results before have been read
#pragma unroll
      for (int i = 0; i < kTokens / 8; i += kGated ? 4 : 2) {
        unsigned values[4];
        float z[kGated ? 4 : 2][4];
#pragma unroll
        for (int j = 0; j < (kGated ? 4 : 2); ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float of_x = x_scale[min(first_token + 8 * (i + j) + lane % 4 * 2 + c, num_tokens - 1)];
            z[j][c] = sums[sub][4 * (i + j) + c] * of_x + biases[0];
            z[j][2 + c] = sums[sub][4 * (i + j) + 2 + c] * of_x + biases[1];
          }
        int token, unit;
        if constexpr (kGated) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float out[2];
#pragma unroll
            for (int c = 0; c < 2; ++c)
              out[c] = activation<kActivation, true>(to_float(from_float<T>(z[j][c]))) * to_float(from_float<T>(z[j][2 + c]));
            values[j] = pack2(out[0], out[1], T{});
          }
          token = 8 * i + lane, unit = warp;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) values[j] = pack2(z[j / 2][j % 2 * 2], z[j / 2][j % 2 * 2 + 1], T{});
          token = 8 * i + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
        }
        stmatrix_x4_trans(my_results + token * 128 + (unit ^ token % 8) * 16, values);
      }
      named_barrier(1 + me, kThreads);
      const int first_out = (tile.first_row_tile + 4 * me) * (kGated ? 8 : 16);
      for (int i = thread; i < kTokens * kOutUnits; i += kThreads) {
        const int token = i / kOutUnits, unit = i % kOutUnits, out = first_out + 8 * unit;
        if (first_token + token < num_tokens && out < size)
          store16(y + static_cast<index_t>(first_token + token) * size + out,
                  load16(my_results + token * 128 + (unit ^ token % 8) * 16));
      }
    }
  }
  dependency_launch();
  cluster_barrier();
}
