// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; the twin of linear_w4.cu for sm_90a and many tokens
// maths      z[m, n] = Σ_k x[m, k] · w[n, k] (+ bias[n]), w = (q − zero[g(k)]) · scale[g(k)] rounded to T; y = z, or with a
//            gate y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    as those of linear_w4.cu; x by a tensor map with boxes of 128 tokens by 64 columns; size is a multiple of 8
// a block    is one of two of a cluster: they have the same 256 tokens, of which each fetches half for both, and 128 rows of
//            the weight each. One warp starts the copies of x; two warpgroups have 64 rows each, whose weights go straight
//            into registers, become numbers of T there and are multiplied from there. Blocks take tile after tile
// template   T bf16 or fp16; kActivation f, or kNone without a gate; kZeros whether there are zeros; kGroups of a step of 64
//            columns: 2 if groups are of 32, else 1; kStages of x in shared memory
// sums       float32 in the order of columns; each weight is rounded once (bfloat16: once and by 2⁻¹⁷ of it), one rounding
//            at the end, and with a gate one of each z before it
// launcher   grid at most the number of SMs, even; block 384; shared memory kStages · 32 KiB + 64 KiB + 2 KiB; group_shift:
//            groups are 64 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "grouped.cuh"
#include "ptx_sm90.cuh"
#include "tile_walk.cuh"
#include "vec.cuh"

constexpr int kThreads = 128;  // of a warpgroup
constexpr int kTokens = 256;
constexpr int kBlockTiles = 8;  // row tiles of 16 of a block
constexpr int kCluster = 2;
constexpr int kStageBytes = kTokens * kPackedStep * 2;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

__device__ __forceinline__ unsigned both(unsigned bits) { return bits | bits << 16; }

// Eight numbers (q − zero) · scale of a row pair in the order of an mma's a.
struct Scaling {
  unsigned offset[2], scale[2], rest[2];  // twice in a register each, of rows group and group + 8
};

__device__ __forceinline__ Scaling scaling_of(unsigned scales, unsigned zeros, fp16) {
  Scaling s;
  s.scale[0] = both(scales & 0xffffu), s.scale[1] = both(scales >> 16);
#pragma unroll
  for (int half = 0; half < 2; ++half) s.offset[half] = both(0xe400u + (zeros >> 8 * half & 255u));  // −(1024 + zero)
  s.rest[0] = s.rest[1] = 0;
  return s;
}
__device__ __forceinline__ Scaling scaling_of(unsigned scales, unsigned zeros, bf16) {
  Scaling s;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = to_float(fp16{static_cast<unsigned short>(scales >> 16 * half)});
    const bf16 first = from_float<bf16>(scale);
    s.scale[half] = both(first.bits);
    s.rest[half] = both(from_float<bf16>(scale - to_float(first)).bits);
    s.offset[half] = both(0xc300u + (zeros >> 8 * half & 255u));  // −(128 + zero)
  }
  return s;
}

__device__ __forceinline__ void dequantize(unsigned word, const Scaling& s, unsigned (&a)[4], fp16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned raw = (word >> 4 * i & 0x000f000fu) | 0x64006400u;
    asm("{\n.reg .b32 q;\nadd.rn.f16x2 q, %1, %2;\nmul.rn.f16x2 %0, q, %3;\n}"
        : "=r"(a[i])
        : "r"(raw), "r"(s.offset[i % 2]), "r"(s.scale[i % 2]));
  }
}
__device__ __forceinline__ void dequantize(unsigned word, const Scaling& s, unsigned (&a)[4], bf16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned raw = (word >> 4 * i & 0x000f000fu) | 0x43004300u;
    asm("{\n.reg .b32 q, r;\nadd.rn.bf16x2 q, %1, %2;\nmul.rn.bf16x2 r, q, %4;\nfma.rn.bf16x2 %0, q, %3, r;\n}"
        : "=r"(a[i])
        : "r"(raw), "r"(s.offset[i % 2]), "r"(s.scale[i % 2]), "r"(s.rest[i % 2]));
  }
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

template <typename T, Activation kActivation, bool kZeros, int kGroups, int kStages>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(3 * kThreads, 1)
    linear_w4_sm90(const __grid_constant__ TensorMap x_map, const unsigned* __restrict__ weight,
                   const fp16* __restrict__ scales, const unsigned char* __restrict__ zeros, const T* __restrict__ bias,
                   T* y, int num_tokens, int out_features, int in_features, int group_shift) {
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOutUnits = kGated ? 4 : 8;  // 16 bytes of y that a warpgroup has of a token
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
  const int num_steps = (in_features + 2 * kPackedStep - 1) / (2 * kPackedStep) * 2, num_quads = (out_features + 63) / 64;
  const int size = kGated ? out_features / 2 : out_features;
  const int token_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int pairs = (4 * num_quads + kCluster * kBlockTiles - 1) / (kCluster * kBlockTiles);  // of blocks along the rows
  const int num_tiles = token_tiles * pairs;
  struct Tile {
    int first_token, first_row_tile;
  };
  const auto find = [&](int number) {
    const TilePlace at = tile_at(number, token_tiles, pairs);
    return Tile{at.token_tile * kTokens, (at.row_tile * kCluster + rank) * kBlockTiles};
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
          copy_box_to_cluster<3>(stages + stage * kStageBytes + rank * (kStageBytes / 2), x_map, full + stage,
                                 step * kPackedStep, tile.first_token + rank * (kTokens / 2));
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
    cluster_barrier();
    return;
  }

  take_registers<kConsumerRegisters>();
  const int me = warpgroup - 1;
  const int last_group = (in_features - 1) / (kPackedStep / kGroups) >> group_shift;
  const unsigned long long b = tile_descriptor(stages, 16, 1024);
  unsigned char* const my_results = results + me * kTokens * 128;
  float sums[kTokens / 2];
  int stage = 0, parity = 0;
  const auto release = [&](int which) {
    if (thread < kCluster) mbarrier_arrive_at(empty + which, thread);
  };
  for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
    const Tile tile = find(number);
    const int row_tile = tile.first_row_tile + 4 * me + warp, read_tile = min(row_tile, 4 * num_quads - 1);
    const uint4* const from = reinterpret_cast<const uint4*>(weight) + static_cast<unsigned>(read_tile) * num_steps * 32u + lane;
    uint4 words[2];
    unsigned scale_pair[2][kGroups], zero_pair[2][kGroups];
    const auto load = [&](int step, int at) {
      step = min(step, num_steps - 1);
      words[at] = load16(from + step * 32);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const unsigned of = min(kGroups * step + g >> group_shift, last_group);
        const unsigned pair = ((of * num_quads + read_tile / 4) * 8 + group) * 4 + read_tile % 4;
        scale_pair[at][g] = reinterpret_cast<const unsigned*>(scales)[pair];
        zero_pair[at][g] = kZeros ? reinterpret_cast<const unsigned short*>(zeros)[pair] : 0x0808u;
      }
    };
    unsigned a[2][4][4];
    const auto unpack_to = [&](int at) {
      const unsigned packed[4] = {words[at].x, words[at].y, words[at].z, words[at].w};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const Scaling scaling = scaling_of(scale_pair[at][g], zero_pair[at][g], T{});
#pragma unroll
        for (int j = g * 4 / kGroups; j < (g + 1) * 4 / kGroups; ++j) dequantize(packed[j], scaling, a[at][j], T{});
      }
    };
    load(0, 0);
    load(1, 1);
    unpack_to(0);
    load(2, 0);
    int before = 0;
    for (int first = 0; first < num_steps; first += 2)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int step = first + odd;
        mbarrier_wait(full + stage, parity);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wgmma_from_registers(sums, a[odd][j], advanced(b, stage * kStageBytes + 32 * j), step > 0 || j > 0, T{});
        wgmma_commit();
        wgmma_wait<1>();  // the step before has ended: its numbers and its x are not needed any more
        if (step > 0) release(before);
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
        unpack_to(1 - odd);
        load(step + 3, 1 - odd);
      }
    wgmma_wait<0>();
    settled(sums);
    release(before);

    // y by token: matrices of 8 outs by 8 tokens are stored the other way round, and read 16 bytes at a time.
    named_barrier(1 + me, kThreads);  // the results of the tile before have been read
    float biases[2] = {};
    const int rows_of_tile = kGated ? 8 : 16, row = rows_of_tile * row_tile + group;  // of y; the other is 8, or size, on
    if (bias != nullptr) {
      if (row < size) biases[0] = to_float(bias[row]);
      if (kGated ? row < size : row + 8 < size) biases[1] = to_float(bias[kGated ? size + row : row + 8]);
    }
#pragma unroll
    for (int i = 0; i < kTokens / 8; i += kGated ? 4 : 2) {
      unsigned values[4];
      int token, unit;
      if constexpr (kGated) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float out[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float gate = to_float(from_float<T>(sums[4 * (i + j) + c] + biases[0]));
            out[c] = activation<kActivation>(gate) * to_float(from_float<T>(sums[4 * (i + j) + 2 + c] + biases[1]));
          }
          values[j] = pack2(out[0], out[1], T{});
        }
        token = 8 * i + lane, unit = warp;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          values[j] = pack2(sums[4 * i + 2 * j] + biases[j % 2], sums[4 * i + 2 * j + 1] + biases[j % 2], T{});
        token = 8 * i + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
      }
      stmatrix_x4_trans(my_results + token * 128 + (unit ^ token % 8) * 16, values);
    }
    named_barrier(1 + me, kThreads);
    const int first_out = (tile.first_row_tile + 4 * me) * (kGated ? 8 : 16);
    for (int i = thread; i < kTokens * kOutUnits; i += kThreads) {
      const int token = i / kOutUnits, unit = i % kOutUnits, out = first_out + 8 * unit;
      if (tile.first_token + token < num_tokens && out < size)
        store16(y + static_cast<index_t>(tile.first_token + token) * size + out,
                load16(my_results + token * 128 + (unit ^ token % 8) * 16));
    }
  }
  dependency_launch();
  cluster_barrier();
}
