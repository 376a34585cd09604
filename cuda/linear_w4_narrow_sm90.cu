// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; a twin of linear_w4.cu for sm_90a: tiles of half the tokens of linear_w4_sm90.cu
// maths      z[m, n] = Σ_g scale[g, n] · Σ_{k of g} x[m, k] · (q[n, k] − zero[g, n]) (+ bias[n]); y = z, or with a gate
//            y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    as those of linear_w4.cu; x by a tensor map with boxes of 64 tokens by 64 columns; size is a multiple of 8
// a block    is one of two of a cluster: they have the same 128 tokens, of which each fetches half for both, and 128 rows of
//            the weight each. A warp starts the copies; two warpgroups have 64 rows each, whose integers become numbers of
//            T in registers and are multiplied from there; three warps write y, while the next tile's products go on
// template   T bf16 or fp16; kActivation f, or kNone without a gate; kZeros whether there are zeros; kGroups of a step of
//            128 columns: 4 if groups are of 32, 2 of 64, else 1; kStages of the copies
// sums       float32: of a group, of at most 128 columns, products of integers; they times the scale; in the order of
//            columns. One rounding of z, and with a gate one more of y
// launcher   grid at most the number of SMs, even; block 384; shared memory kStages · (40960 + 384 · kGroups) + 34048;
//            group_shift: groups are 128 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "grouped.cuh"
#include "ptx_sm90.cuh"
#include "tile_walk.cuh"
#include "vec.cuh"

constexpr int kThreads = 128;  // of a warpgroup
constexpr int kCluster = 2;
constexpr int kTokens = 128;
constexpr int kQuads = 2;  // of a block: one a warpgroup, of 64 rows
constexpr int kStep = 2 * kPackedStep;
constexpr int kBoxBytes = kTokens * kPackedStep * 2, kXBytes = 2 * kBoxBytes;
constexpr int kTileBytes = kStep * 16 / 2, kWeightBytes = 4 * kQuads * kTileBytes;  // of 16 rows, of a block
constexpr int kScaleBytes = 128, kZeroBytes = 64;                                   // of a quad
constexpr int kWriters = 3;  // warps
constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;  // with two of the latter 3 · 168, what a block begins with

__device__ __forceinline__ unsigned both(unsigned bits) { return bits | bits << 16; }

// The eight numbers q − zero of a row pair in the order of an mma's a, exactly.
__device__ __forceinline__ void integers(unsigned word, unsigned zeros, unsigned (&a)[4], fp16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned zero = zeros >> 8 * (i % 2) & 255u, bits = word >> i / 2 * 8;
    if (i % 2 == 0)
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(a[i]) : "r"((bits & 0x000f000fu) | 0x64006400u), "r"(both(0xe400u + zero)));
    else  // 1024 + 16 · q
      asm("fma.rn.f16x2 %0, %1, %2, %3;"
          : "=r"(a[i])
          : "r"((bits & 0x00f000f0u) | 0x64006400u), "r"(0x2c002c00u), "r"(both(0xd400u + (zero << 4))));
  }
}
__device__ __forceinline__ void integers(unsigned word, unsigned zeros, unsigned (&a)[4], bf16) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("add.rn.bf16x2 %0, %1, %2;"
        : "=r"(a[i])
        : "r"((word >> 4 * i & 0x000f000fu) | 0x43004300u), "r"(both(0xc300u + (zeros >> 8 * (i % 2) & 255u))));
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

template <typename T, Activation kActivation, bool kZeros, int kGroups, int kStages>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(3 * kThreads, 1)
    linear_w4_narrow_sm90(const __grid_constant__ TensorMap x_map, const unsigned* __restrict__ weight,
                   const fp16* __restrict__ scales, const unsigned char* __restrict__ zeros, const T* __restrict__ bias,
                   T* y, int num_tokens, int out_features, int in_features, int group_shift) {
  constexpr bool kGated = kActivation != kNone;
  constexpr int kGroupBytes = kQuads * (kScaleBytes + kZeroBytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kThreads, 0);
  const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32;

  unsigned char* const bytes = dynamic_shared<unsigned char>();
  unsigned char* const x_stages = bytes + (-shared_address(bytes) & 1023);
  unsigned char* const results = x_stages + kStages * kXBytes;  // of a warpgroup [kTokens][64 rows] T
  unsigned char* const weight_stages = results + 2 * kTokens * 128;
  unsigned char* const group_stages = weight_stages + kStages * kWeightBytes;  // scales [kGroups][kQuads], then zeros
  mbarrier* const full = reinterpret_cast<mbarrier*>(group_stages + kStages * kGroups * kGroupBytes);
  mbarrier *const empty = full + kStages, *const made = empty + kStages, *const written = made + 2;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 2 * kCluster);
    }
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(made + half, kThreads / 32);
      mbarrier_init(written + half, kWriters);
    }
    fence_barriers_made();
  }
  cluster_barrier();
  const int rank = cluster_rank(), num_clusters = gridDim.x / kCluster;
  const int num_steps = (in_features + kStep - 1) / kStep, num_quads = (out_features + 63) / 64;
  const int size = kGated ? out_features / 2 : out_features;
  const int token_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int pairs = (num_quads + kCluster * kQuads - 1) / (kCluster * kQuads);  // of blocks along the rows
  const int num_tiles = token_tiles * pairs;
  struct Tile {
    int first_token, first_quad;
  };
  const auto find = [&](int number) {
    const TilePlace at = tile_at(number, token_tiles, pairs);
    return Tile{at.token_tile * kTokens, (at.row_tile * kCluster + rank) * kQuads};
  };

  if (warpgroup == 0) {
    give_back_registers<kProducerRegisters>();
    if (warp == 0) {
      const int last_group = (in_features - 1) / (kStep / kGroups) >> group_shift;
      int stage = 0, parity = 1;
      bool waited = false;
      for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters) {
        const Tile tile = find(number);
        for (int step = 0; step < num_steps; ++step) {
          mbarrier_wait(empty + stage, parity);
          if (lane == 0)
            mbarrier_arrive_expect(full + stage, kXBytes + kWeightBytes +
                                                     kGroups * kQuads * (kScaleBytes + (kZeros ? kZeroBytes : 0)));
          __syncwarp();
          const int item = lane - 4 * kQuads;  // a group of a quad
          const int group = min(kGroups * step + item / kQuads >> group_shift, last_group);
          const int quad = min(tile.first_quad + (lane < 4 * kQuads ? lane / 4 : item % kQuads), num_quads - 1);
          unsigned char* const groups = group_stages + stage * kGroups * kGroupBytes;
          if (lane < 4 * kQuads) {
            copy_bytes(weight_stages + stage * kWeightBytes + lane * kTileBytes,
                       reinterpret_cast<const unsigned char*>(weight) +
                           (static_cast<index_t>(4 * quad + lane % 4) * num_steps + step) * kTileBytes,
                       kTileBytes, full + stage);
          } else if (item < kGroups * kQuads) {
            const index_t of = static_cast<index_t>(group) * num_quads + quad;
            copy_bytes(groups + item * kScaleBytes, scales + of * (kScaleBytes / 2), kScaleBytes, full + stage);
            if (kZeros)
              copy_bytes(groups + kGroups * kQuads * kScaleBytes + item * kZeroBytes, zeros + of * kZeroBytes, kZeroBytes,
                         full + stage);
          } else if (lane >= 30) {
            if (!waited) dependency_wait();
            waited = true;
            copy_box_to_cluster<3>(
                x_stages + stage * kXBytes + (lane - 30) * kBoxBytes + rank * (kBoxBytes / kCluster), x_map, full + stage,
                step * kStep + (lane - 30) * kPackedStep, tile.first_token + rank * (kTokens / kCluster));
          }
          __syncwarp();
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else {
      int parity = 0;
      for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters, parity ^= 1) {
        const Tile tile = find(number);
        for (int half = 0; half < 2; ++half) {
          constexpr int kUnits = kGated ? 4 : 8;  // 16 bytes of y that a warpgroup has of a token
          const unsigned char* const z = results + half * kTokens * 128;
          const int first_out = (tile.first_quad + half) * 8 * kUnits;
          mbarrier_wait(made + half, parity);
          for (int i = thread - 32; i < kTokens * kUnits; i += 32 * kWriters) {
            const int token = i / kUnits, unit = i % kUnits, out = first_out + 8 * unit;
            if (tile.first_token + token >= num_tokens || out >= size) continue;
            const auto at = [&](int number) { return z + token * 128 + (number ^ token % 8) * 16; };
            T* const to = y + static_cast<index_t>(tile.first_token + token) * size + out;
            if constexpr (kGated) {
              float gates[8], ups[8];
              unpack(load16(reinterpret_cast<const T*>(at(2 * unit))), gates, T{});
              unpack(load16(reinterpret_cast<const T*>(at(2 * unit + 1))), ups, T{});
#pragma unroll
              for (int j = 0; j < 8; ++j) gates[j] = activation<kActivation>(gates[j]) * ups[j];
              store16(to, pack(gates, T{}));
            } else {
              store16(to, load16(at(unit)));
            }
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(written + half);
        }
      }
    }
    __syncwarp();
    cluster_barrier();  // nobody writes to this block any more
    return;
  }

  take_registers<kConsumerRegisters>();
  const int me = warpgroup - 1, group = lane / 4, my_pair = group * 4 + warp;
  const unsigned long long b = tile_descriptor(x_stages, 16, 1024);
  unsigned char* const my_results = results + me * kTokens * 128;
  const unsigned char* const my_words = weight_stages + (4 * me + warp) * kTileBytes + lane * 16;
  float sums[kTokens / 2], part[kTokens / 2];
  unsigned a[2][4][4], words[4], scale_pair[kGroups], zero_pair[kGroups];
  int stage = 0, parity = 0, written_parity = 1;
  const auto release = [&](int which) {
    if (thread < kCluster) mbarrier_arrive_at(empty + which, thread);
  };
  const auto load = [&](int half) {
    const uint4 packed = load16(my_words + stage * kWeightBytes + half * (kTileBytes / 2));
    words[0] = packed.x, words[1] = packed.y, words[2] = packed.z, words[3] = packed.w;
  };
  const auto unpack_to = [&](int half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) integers(words[j], kZeros ? zero_pair[(4 * half + j) * kGroups / 8] : 0x0808u, a[half][j], T{});
  };
  const auto begin = [&]() {  // a stage, when it has come
    mbarrier_wait(full + stage, parity);
    load(0);
    const unsigned char* const groups = group_stages + stage * kGroups * kGroupBytes;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      scale_pair[g] = reinterpret_cast<const unsigned*>(groups + (g * kQuads + me) * kScaleBytes)[my_pair];
      if (kZeros)
        zero_pair[g] = reinterpret_cast<const unsigned short*>(groups + kGroups * kQuads * kScaleBytes +
                                                               (g * kQuads + me) * kZeroBytes)[my_pair];
    }
    unpack_to(0);
  };
  for (int number = blockIdx.x / kCluster; number < num_tiles; number += num_clusters, written_parity ^= 1) {
    const Tile tile = find(number);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0.0f;
    begin();
    for (int step = 0; step < num_steps; ++step) {
      const int now = stage;
      unsigned scale_now[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) scale_now[g] = scale_pair[g];
      const auto add = [&](int g) {
        wgmma_wait<0>();
        settled(part);
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = to_float(fp16{static_cast<unsigned short>(scale_now[g] >> 16 * h)});
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[i] = fmaf(part[i], scale[i / 2 % 2], sums[i]);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1) {
          load(1);
          unpack_to(1);
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          constexpr int kProducts = 8 / kGroups;  // of a group
          const int product = 4 * half + j;
          wgmma_from_registers(part, a[half][j], advanced(b, now * kXBytes + half * kBoxBytes + 32 * j),
                               product % kProducts > 0, T{});
          if (product % 4 == 3 || product % kProducts == kProducts - 1) wgmma_commit();
          if (product % kProducts == kProducts - 1 && product < 7) {
            add(product / kProducts);
            wgmma_fence();
          }
        }
      }
      wgmma_wait<1>();
      if (++stage == kStages) stage = 0, parity ^= 1;
      if (step + 1 < num_steps) begin();
      add(kGroups - 1);
      release(now);
    }

    mbarrier_wait(written + me, written_parity);
    float biases[2] = {};
    const int row_tile = 4 * (tile.first_quad + me) + warp;
    const int row = (kGated ? 8 : 16) * row_tile + group;  // of y; the other is 8, or size, on
    if (bias != nullptr) {
      if (row < size) biases[0] = to_float(bias[row]);
      if (kGated ? row < size : row + 8 < size) biases[1] = to_float(bias[kGated ? size + row : row + 8]);
    }
    // z by token: matrices of 8 outs by 8 tokens are stored the other way round
#pragma unroll
    for (int i = 0; i < kTokens / 8; i += 2) {
      unsigned values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        values[j] = pack2(sums[4 * i + 2 * j] + biases[j % 2], sums[4 * i + 2 * j + 1] + biases[j % 2], T{});
      const int token = 8 * i + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
      stmatrix_x4_trans(my_results + token * 128 + (unit ^ token % 8) * 16, values);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(made + me);
  }
  dependency_launch();
  cluster_barrier();
}
