// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; the twin of linear_w4.cu for sm_90a and many tokens
// maths      z[m, n] = Σ_k x[m, k] · w[n, k] (+ bias[n]), w = (q − zero[g(k)]) · scale[g(k)] rounded to T; y = z, or with a
//            gate y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    as those of linear_w4.cu; x by a tensor map with boxes of 128 tokens by 64 columns, y by one with boxes of 256
//            tokens by 64 columns, or 32 with a gate; size is a multiple of 8; partials float32, as many as add_up writes,
//            and counters, zeros before and after
// a block    is one of two of a cluster: they have the same 256 tokens, of which each fetches half for both, and 128 rows of
//            the weight each. One warp starts the copies of x; two warpgroups have 64 rows each, whose weights go straight
//            into registers, three steps ahead and on into the next tile, become numbers of T there and are multiplied from
//            there; y leaves by way of shared memory while the next tile is begun. Clusters take tile after tile; what is
//            left for the last round is shared: by `splits` clusters a tile, along the columns, and the last to come adds up
//            what they have
// template   T bf16 or fp16; kActivation f, or kNone without a gate; kZeros whether there are zeros; kGroups of a step of 64
//            columns: 2 if groups are of 32, else 1; kStages of x in shared memory
// sums       float32 in the order of columns, those of each part of them first; each weight is rounded once (bfloat16: once
//            and by 2⁻¹⁷ of it), one rounding at the end, and with a gate one of each z before it; quotients in f to 2 ulp
// launcher   grid even, at most the number of SMs; block 384; shared memory (kStages · 32 + 66) KiB; group_shift: groups are
//            64 / kGroups · 2^group_shift long; splits 1, 2 or 4, at most a quarter of the steps, and there are clusters for
//            all parts of the last round
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

// Eight numbers (q − zero) · scale of a row pair in the order of an mma's a. scales: of rows group and group + 8, as zeros.
__device__ __forceinline__ void dequantize(unsigned word, unsigned scales, unsigned zeros, unsigned (&a)[4], fp16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned zero = zeros >> 8 * (i % 2) & 255u, scale = both(scales >> 16 * (i % 2) & 0xffffu);
    const unsigned bits = word >> i / 2 * 8;
    if (i % 2 == 0)
      asm("{\n.reg .b32 q;\nadd.rn.f16x2 q, %1, %2;\nmul.rn.f16x2 %0, q, %3;\n}"
          : "=r"(a[i])
          : "r"((bits & 0x000f000fu) | 0x64006400u), "r"(both(0xe400u + zero)), "r"(scale));
    else  // from 1024 + 16 · q
      asm("{\n.reg .b32 q;\nfma.rn.f16x2 q, %1, %2, %3;\nmul.rn.f16x2 %0, q, %4;\n}"
          : "=r"(a[i])
          : "r"((bits & 0x00f000f0u) | 0x64006400u), "r"(0x2c002c00u), "r"(both(0xd400u + (zero << 4))), "r"(scale));
  }
}
__device__ __forceinline__ void dequantize(unsigned word, unsigned scales, unsigned zeros, unsigned (&a)[4], bf16) {
  unsigned first[2], rest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = to_float(fp16{static_cast<unsigned short>(scales >> 16 * half)});
    const bf16 most = from_float<bf16>(scale);
    first[half] = both(most.bits), rest[half] = both(from_float<bf16>(scale - to_float(most)).bits);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned raw = (word >> 4 * i & 0x000f000fu) | 0x43004300u, offset = both(0xc300u + (zeros >> 8 * (i % 2) & 255u));
    asm("{\n.reg .b32 q, r;\nadd.rn.bf16x2 q, %1, %2;\nmul.rn.bf16x2 r, q, %4;\nfma.rn.bf16x2 %0, q, %3, r;\n}"
        : "=r"(a[i])
        : "r"(raw), "r"(offset), "r"(first[i % 2]), "r"(rest[i % 2]));
  }
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

template <typename T, Activation kActivation, bool kZeros, int kGroups, int kStages>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(3 * kThreads, 1)
    linear_w4_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                   const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
                   const unsigned char* __restrict__ zeros, const T* __restrict__ bias, float4* partials,
                   unsigned* counters, int num_tokens, int out_features, int in_features, int group_shift, int splits) {
  constexpr bool kGated = kActivation != kNone;
  constexpr int kRowBytes = kGated ? 64 : 128, kResultBytes = kTokens * kRowBytes;  // a warpgroup has of a token of y; of all
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kThreads, 0);
  const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32, group = lane / 4;

  unsigned char* const bytes = dynamic_shared<unsigned char>();
  unsigned char* const stages = bytes + (-shared_address(bytes) & 1023);
  unsigned char* const results = stages + kStages * kStageBytes;  // of a warpgroup [kTokens][kRowBytes]
  mbarrier* const full = reinterpret_cast<mbarrier*>(results + 2 * kResultBytes);
  mbarrier* const empty = full + kStages;
  volatile unsigned* const come = reinterpret_cast<unsigned*>(empty + kStages);  // clusters that have left their sums before
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 2 * kCluster);
    }
    fence_barriers_made();
  }
  cluster_barrier();
  const int rank = cluster_rank(), cluster = blockIdx.x / kCluster, num_clusters = gridDim.x / kCluster;
  const int num_steps = (in_features + 2 * kPackedStep - 1) / (2 * kPackedStep) * 2, num_quads = (out_features + 63) / 64;
  const int size = kGated ? out_features / 2 : out_features;
  const int token_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int pairs = (4 * num_quads + kCluster * kBlockTiles - 1) / (kCluster * kBlockTiles);  // of blocks along the rows
  const int num_tiles = token_tiles * pairs;
  const int whole = splits > 1 ? num_tiles / num_clusters * num_clusters : num_tiles;  // tiles that are not shared
  struct Tile {
    int first_token, first_row_tile, part;  // part: -1 of a tile that is not shared
    int first_step, end_step;
  };
  const auto find = [&](int number, Tile& tile) {
    tile.part = -1, tile.first_step = 0, tile.end_step = num_steps;
    if (number >= whole) {
      const int shared = number - whole;
      tile.part = shared % splits, number = whole + shared / splits;
      tile.first_step = num_steps / 2 * tile.part / splits * 2;
      tile.end_step = num_steps / 2 * (tile.part + 1) / splits * 2;
    }
    const TilePlace at = tile_at(number, token_tiles, pairs);
    tile.first_token = at.token_tile * kTokens, tile.first_row_tile = (at.row_tile * kCluster + rank) * kBlockTiles;
    return number < num_tiles;
  };

  if (warpgroup == 0) {
    give_back_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) {
      dependency_wait();
      int stage = 0, parity = 1;
      Tile tile;
      for (int number = cluster; find(number, tile); number += num_clusters)
        for (int step = tile.first_step; step < tile.end_step; ++step) {
          mbarrier_wait(empty + stage, parity);
          mbarrier_arrive_expect(full + stage, kStageBytes);
          copy_box_to_cluster<(1 << kCluster) - 1>(stages + stage * kStageBytes + rank * (kStageBytes / kCluster), x_map,
                                                   full + stage, step * kPackedStep,
                                                   tile.first_token + rank * (kTokens / kCluster));
          if (++stage == kStages) stage = 0, parity ^= 1;
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
  unsigned char* const my_results = results + me * kResultBytes;
  float sums[kTokens / 2];
  int stage = 0, parity = 0;
  const auto release = [&](int which) {
    if (thread < kCluster) mbarrier_arrive_at(empty + which, thread);
  };

  // What is loaded runs ahead of what is multiplied.
  int load_number = cluster, load_step = 0, load_end = 0, read_tile = 0;
  const uint4* from = nullptr;
  const auto load_from = [&](const Tile& tile) {
    load_step = tile.first_step, load_end = tile.end_step;
    read_tile = min(tile.first_row_tile + 4 * me + warp, 4 * num_quads - 1);
    from = reinterpret_cast<const uint4*>(weight) + static_cast<unsigned>(read_tile) * num_steps * 32u + lane;
  };
  uint4 words[2];
  unsigned scale_pair[2][kGroups], zero_pair[2][kGroups];
  const auto load = [&](int at) {
    words[at] = load16(from + load_step * 32);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const unsigned of = min(kGroups * load_step + g >> group_shift, last_group);
      const unsigned pair = ((of * num_quads + read_tile / 4) * 8 + group) * 4 + read_tile % 4;
      scale_pair[at][g] = reinterpret_cast<const unsigned*>(scales)[pair];
      zero_pair[at][g] = kZeros ? reinterpret_cast<const unsigned short*>(zeros)[pair] : 0x0808u;
    }
    if (++load_step == load_end) {
      Tile next;
      if (find(load_number + num_clusters, next)) {
        load_number += num_clusters;
        load_from(next);
      } else {
        --load_step;  // loaded again, and never used
      }
    }
  };
  unsigned a[2][4][4];
  const auto unpack_to = [&](int at) {
    const unsigned packed[4] = {words[at].x, words[at].y, words[at].z, words[at].w};
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = g * 4 / kGroups; j < (g + 1) * 4 / kGroups; ++j)
        dequantize(packed[j], scale_pair[at][g], zero_pair[at][g], a[at][j], T{});
  };
  Tile tile;
  // Of a shared tile: each cluster leaves the sums of its columns, and the last to come adds up all, in order. Whether it is
  // this one. Nobody waits, so it does not matter which blocks run at the same time.
  const auto add_up = [&](int shared) {
    constexpr int kEach = kTokens / 2 / 4;  // by 4
    const int of_me = (shared * kCluster + rank) * 2 + me;
    float4* const left = partials + static_cast<index_t>(of_me * splits) * (kEach * kThreads) + thread;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float* const own = sums + 4 * i;
      left[(tile.part * kEach + i) * kThreads] = make_float4(own[0], own[1], own[2], own[3]);
    }
    __threadfence();
    named_barrier(1 + me, kThreads);
    if (thread == 0) come[me] = atomicAdd(counters + of_me, 1u);
    named_barrier(1 + me, kThreads);
    if (come[me] != splits - 1) return false;
    __threadfence();
    if (thread == 0) counters[of_me] = 0;
#pragma unroll 1
    for (int part = 0; part < splits; ++part)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float4 more = __ldcg(left + (part * kEach + i) * kThreads);
        float* const sum = sums + 4 * i;
        sum[0] = (part > 0 ? sum[0] : 0.0f) + more.x, sum[1] = (part > 0 ? sum[1] : 0.0f) + more.y;
        sum[2] = (part > 0 ? sum[2] : 0.0f) + more.z, sum[3] = (part > 0 ? sum[3] : 0.0f) + more.w;
      }
    return true;
  };

  int number = cluster;
  bool more = find(number, tile);
  if (more) {
    load_from(tile);
    load(0);
    load(1);
    unpack_to(0);
    load(0);
  }
  for (; more; number += num_clusters, more = find(number, tile)) {
    int before = 0;
    for (int first = tile.first_step; first < tile.end_step; first += 2)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const bool begun = first > tile.first_step || odd > 0;
        mbarrier_wait(full + stage, parity);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wgmma_from_registers(sums, a[odd][j], advanced(b, stage * kStageBytes + 32 * j), begun || j > 0, T{});
        wgmma_commit();
        wgmma_wait<1>();  // the step before has ended: its numbers and its x are not needed any more
        if (begun) release(before);
        before = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
        unpack_to(1 - odd);
        load(1 - odd);
      }
    wgmma_wait<0>();
    settled(sums);
    release(before);

    if (tile.part >= 0 && !add_up((number - whole) / splits)) break;
    float biases[2] = {};
    const int row_tile = tile.first_row_tile + 4 * me + warp;
    const int row = (kGated ? 8 : 16) * row_tile + group;  // of y; the other is 8, or size, on
    if (bias != nullptr) {
      if (row < size) biases[0] = to_float(bias[row]);
      if (kGated ? row < size : row + 8 < size) biases[1] = to_float(bias[kGated ? size + row : row + 8]);
    }
    if (thread == 0) boxes_out_wait();
    named_barrier(1 + me, kThreads);  // the results of the tile before have been read
    // y by token: matrices of 8 outs by 8 tokens are stored the other way round, swizzled as the copy wants them.
#pragma unroll
    for (int i = 0; i < kTokens / 8; i += kGated ? 4 : 2) {
      unsigned values[4];
      int token, place;
      if constexpr (kGated) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float out[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float gate = to_float(from_float<T>(sums[4 * (i + j) + c] + biases[0]));
            out[c] = activation<kActivation, true>(gate) * to_float(from_float<T>(sums[4 * (i + j) + 2 + c] + biases[1]));
          }
          values[j] = pack2(out[0], out[1], T{});
        }
        token = 8 * i + lane, place = warp ^ token / 2 % 4;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          values[j] = pack2(sums[4 * i + 2 * j] + biases[j % 2], sums[4 * i + 2 * j + 1] + biases[j % 2], T{});
        token = 8 * i + lane / 16 * 8 + lane % 8, place = 2 * warp + lane / 8 % 2 ^ token % 8;
      }
      stmatrix_x4_trans(my_results + token * kRowBytes + place * 16, values);
    }
    fence_async_shared();
    named_barrier(1 + me, kThreads);
    if (thread == 0) {
      copy_box_out(y_map, my_results, (tile.first_row_tile + 4 * me) * (kGated ? 8 : 16), tile.first_token);
      boxes_out_end();
    }
  }
  if (thread == 0) boxes_out_wait();
  dependency_launch();
  cluster_barrier();
}
