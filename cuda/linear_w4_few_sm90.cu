// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; a twin of linear_w4.cu for sm_90a, where tensor cores hold up few tokens but the fewest
// maths      z[m, n] = Σ_g scale[g, n] · Σ_{k of g} x[m, k] · (q[n, k] − zero[g, n]) (+ bias[n]); y = z, or with a gate
//            y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    as those of linear_w4.cu; x by a tensor map with boxes of kTokens tokens by 64 columns
// a block    owns an equal share of all steps: y is cut into tiles of 64 · kRowGroups rows, a tile into steps of 128
//            columns, and the steps of all tiles in a row are shared out. It goes through them in rounds, in which each of
//            kStepGroups warpgroups of 64 rows has kDepth steps. A warp a warpgroup brings its weights, up to kStages rounds
//            ahead; their integers become numbers of T in registers and are multiplied from there. Where a tile is not one
//            block's alone, the block that comes last adds up the parts
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kZeros whether there are zeros;
//            kGroups of a step: 4 if groups are of 32 columns, 2 if of 64, else 1; kTokens 16 or 32; kRowGroups; kStepGroups;
//            kDepth up to 7, 14 or 28 by the groups; kStages; kBlocks that an SM is to hold
// sums       float32: of a group, of at most 128 columns, products of integers; they times the scale; step by step of a
//            warpgroup, warpgroup by warpgroup, part by part; one rounding of z, and with a gate one more of y
// launcher   grid at most the number of steps, and the product of the two below 2^32; block 160 · kRowGroups · kStepGroups,
//            shared memory as Wgmma.shared_bytes of engine/kernels/linear_w4.py says; partials [grid, 2, kTokens,
//            64 · kRowGroups] float32; counters [grid], 0 before and after; num_tokens ≤ kTokens; group_shift: groups are
//            128 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "grouped_sm90.cuh"
#include "ptx_sm90.cuh"
#include "vec.cuh"

constexpr int kStep = 2 * kPackedStep;
constexpr int kTileBytes = kStep * 16 / 2;         // of 16 rows in a step
constexpr int kScaleBytes = 128, kZeroBytes = 64;  // of a group of 64 rows

template <typename T, typename Y, Activation kActivation, bool kZeros, int kGroups, int kTokens, int kRowGroups,
          int kStepGroups, int kDepth, int kStages, int kBlocks>
__global__ void __launch_bounds__(160 * kRowGroups * kStepGroups, kBlocks)
    linear_w4_few_sm90(const __grid_constant__ TensorMap x_map, const unsigned* __restrict__ weight,
                       const fp16* __restrict__ scales, const unsigned char* __restrict__ zeros,
                       const T* __restrict__ bias, Y* y, float* partials, unsigned* counters, int num_tokens,
                       int out_features, int in_features, int group_shift) {
  constexpr bool kGated = kActivation != kNone;
  constexpr int kWarpgroups = kRowGroups * kStepGroups, kConsumers = 128 * kWarpgroups, kFinishers = 128 * kRowGroups;
  constexpr int kSums = kTokens / 2;                                 // of a thread
  constexpr int kBoxBytes = kTokens * 128, kXBytes = 2 * kBoxBytes;  // of a step
  constexpr int kRound = kStepGroups * kDepth;                       // steps
  constexpr int kRoundTile = kRound * kTileBytes;                    // of 16 rows
  constexpr int kWeightBytes = 4 * kRowGroups * kRoundTile;          // of a round
  constexpr int kGroupBytes = kRowGroups * (kScaleBytes + (kZeros ? kZeroBytes : 0));
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int num_steps = (in_features + kStep - 1) / kStep, num_quads = (out_features + 63) / 64;
  const int num_tiles = (num_quads + kRowGroups - 1) / kRowGroups;
  const unsigned all_steps = num_tiles * num_steps;
  const auto begin_of = [&](int block) { return static_cast<int>(block * all_steps / gridDim.x); };
  const auto block_of = [&](int step) { return static_cast<int>(((step + 1u) * gridDim.x - 1) / all_steps); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);

  unsigned char* const bytes = dynamic_shared<unsigned char>();
  unsigned char* const x_stages = bytes + (-shared_address(bytes) & 1023);
  unsigned char* const weight_stages = x_stages + kStages * kRound * kXBytes;
  unsigned char* const group_stages = weight_stages + kStages * kWeightBytes;  // [steps][kGroups]: scales, then zeros
  float4* const handed = reinterpret_cast<float4*>(group_stages + kStages * kRound * kGroups * kGroupBytes);
  mbarrier* const full = reinterpret_cast<mbarrier*>(handed + (kStepGroups - 1) * kFinishers * kSums / 4);
  mbarrier* const empty = full + kStages;
  unsigned* const before = reinterpret_cast<unsigned*>(empty + kStages);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(full + i, kWarpgroups), mbarrier_init(empty + i, 4 * kWarpgroups);
    fence_barriers_made();
  }
  __syncthreads();

  // A round: steps of one tile that come one after the other.
  struct Round {
    int at, tile, step;  // its first step: of all, and in its tile
  };
  const auto width = [&](const Round& round) { return min(min(kRound, num_steps - round.step), end - round.at); };
  const auto advance = [&](Round& round) {
    const int steps = width(round);
    round.at += steps, round.step += steps;
    if (round.step == num_steps) round.step = 0, ++round.tile;
  };
  Round now{begin, begin / num_steps, begin % num_steps};

  if (warp >= 4 * kWarpgroups) {  // brings what one warpgroup takes
    const int me = warp - 4 * kWarpgroups, row_group = me % kRowGroups, step_group = me / kRowGroups;
    const int last_group = (in_features - 1) / (kStep / kGroups) >> group_shift;
    const auto bring_weights = [&](const Round& round, int stage) {
      const int quad = round.tile * kRowGroups + row_group, first = step_group * kDepth, item = lane - 4;
      const int steps = max(0, min(kDepth, width(round) - first)), rows = quad < num_quads ? steps : 0;
      if (lane == 0)
        mbarrier_arrive_expect(full + stage,
                               rows * (4 * kTileBytes + kGroups * (kScaleBytes + (kZeros ? kZeroBytes : 0))) +
                                   (row_group == 0 ? steps * kXBytes : 0));
      __syncwarp();
      if (rows == 0) return;
      if (lane < 4) {
        copy_bytes(weight_stages + stage * kWeightBytes + ((4 * row_group + lane) * kRound + first) * kTileBytes,
                   reinterpret_cast<const unsigned char*>(weight) +
                       (static_cast<index_t>(4 * quad + lane) * num_steps + round.step + first) * kTileBytes,
                   rows * kTileBytes, full + stage);
      } else if (item < rows * kGroups) {
        unsigned char* const to = group_stages + ((stage * kRound + first) * kGroups + item) * kGroupBytes;
        const int group = min((kGroups * (round.step + first) + item) >> group_shift, last_group);
        const index_t of = static_cast<index_t>(group) * num_quads + quad;
        copy_bytes(to + row_group * kScaleBytes, scales + of * (kScaleBytes / 2), kScaleBytes, full + stage);
        if constexpr (kZeros)
          copy_bytes(to + kRowGroups * kScaleBytes + row_group * kZeroBytes, zeros + of * kZeroBytes, kZeroBytes,
                     full + stage);
      }
    };
    static_assert(4 + kDepth * kGroups <= 32, "a lane an item");
    const auto bring_x = [&](const Round& round, int stage) {
      const int first = step_group * kDepth;
      if (row_group == 0 && lane < 2 * min(kDepth, width(round) - first))
        copy_box(x_stages + (2 * (stage * kRound + first) + lane) * kBoxBytes, x_map, full + stage,
                 (round.step + first) * kStep + lane * kPackedStep, 0);
    };
    Round next = now;
    for (int i = 0; i < kStages && next.at < end; ++i) {
      bring_weights(next, i);
      advance(next);
    }
    dependency_wait();
    next = now;
    for (int i = 0; i < kStages && next.at < end; ++i) {
      bring_x(next, i);
      advance(next);
    }
    int stage = 0;
    for (unsigned parity = 0; next.at < end; advance(next)) {
      mbarrier_wait(empty + stage, parity);
      bring_weights(next, stage);
      bring_x(next, stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    return;
  }

  const int warpgroup = warp / 4, row_group = warpgroup % kRowGroups, step_group = warpgroup / kRowGroups;
  const int row_tile = 4 * row_group + warp % 4, group = lane / 4, pair = lane % 4;  // row_tile: of 16, in the tile
  const unsigned long long b = tile_descriptor(x_stages + step_group * kDepth * kXBytes, 16, 1024);
  const Masks masks{__shfl_sync(~0u, 0x000f000fu << lane, 0), __shfl_sync(~0u, 0x00f000f0u << lane, 0)};
  const int my_first = step_group * kDepth, my_pair = 4 * group + warp % 4;
  const unsigned char* const my_words = weight_stages + row_tile * kRoundTile + my_first * kTileBytes + lane * 16;
  const unsigned char* const my_groups = group_stages + my_first * kGroups * kGroupBytes;
  const unsigned char* const my_scales = my_groups + row_group * kScaleBytes + my_pair * 4;
  const unsigned char* const my_zeros = my_groups + kRowGroups * kScaleBytes + row_group * kZeroBytes + my_pair * 2;
  float sums[kSums], part[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  int stage = 0;
  unsigned parity = 0;
  while (now.at < end) {
    const int tile = now.tile;
    mbarrier_wait(full + stage, parity);
    const int steps = tile * kRowGroups + row_group < num_quads ? min(kDepth, width(now) - step_group * kDepth) : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int place = stage * kRound + step;
      const unsigned long long here = b + static_cast<unsigned>(place) * (kXBytes / 16u);
      uint4 packed[2];
      unsigned scale_pair[kGroups], zero_pair[kGroups], a[2][4][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        packed[half] = load16(my_words + stage * kWeightBytes + step * kTileBytes + half * (kTileBytes / 2));
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int at = (place * kGroups + g) * kGroupBytes;
        scale_pair[g] = *reinterpret_cast<const unsigned*>(my_scales + at);
        zero_pair[g] = kZeros ? *reinterpret_cast<const unsigned short*>(my_zeros + at) : 0x0808u;
      }
      const auto add = [&](int g) {
        wgmma_wait<0>();
        settled(part);
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = to_float(fp16{static_cast<unsigned short>(scale_pair[g] >> 16 * h)});
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = fmaf(part[i], scale[i / 2 % 2], sums[i]);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned words[4] = {packed[half].x, packed[half].y, packed[half].z, packed[half].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) integers(words[j], zero_pair[(4 * half + j) * kGroups / 8], masks, a[half][j], T{});
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          constexpr int kProducts = 8 / kGroups;  // of a group
          const int product = 4 * half + j;
          wgmma_from_registers(part, a[half][j], advanced(here, half * kBoxBytes + 32 * j), product % kProducts > 0, T{});
          if (product % 4 == 3 || product % kProducts == kProducts - 1) wgmma_commit();
          if (product % kProducts == kProducts - 1) {
            add(product / kProducts);
            if (product < 7) wgmma_fence();
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + stage);
    if (++stage == kStages) stage = 0, parity ^= 1;
    advance(now);
    if (now.tile == tile && now.at < end) continue;

    // The sums of the warpgroups that have the same rows, and from there to y, or to where the last block of this tile
    // finds them.
    const int thread = row_group * 128 + threadIdx.x % 128;  // of those that finish
    if constexpr (kStepGroups > 1) {
      float4* const mine = handed + thread;
      if (step_group > 0)
#pragma unroll
        for (int i = 0; i < kSums / 4; ++i)
          mine[((step_group - 1) * (kSums / 4) + i) * kFinishers] =
              make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      named_barrier(1, kConsumers);
      if (step_group == 0)
#pragma unroll
        for (int other = 0; other < kStepGroups - 1; ++other)
#pragma unroll
          for (int i = 0; i < kSums / 4; ++i) {
            const float4 more = mine[(other * (kSums / 4) + i) * kFinishers];
            sums[4 * i] += more.x, sums[4 * i + 1] += more.y, sums[4 * i + 2] += more.z, sums[4 * i + 3] += more.w;
          }
      named_barrier(1, kConsumers);
    }
    if (step_group == 0) {
      const int first = tile * num_steps, first_block = block_of(first);
      const int others = block_of(first + num_steps - 1) - first_block;
      bool last = true;
      if (others > 0) {
        const bool is_second = begin_of(first_block) < first;  // the first block has a part of another tile before this
        const auto part_of = [&](int block) {
          return reinterpret_cast<float4*>(partials) +
                 (2 * block + (block == first_block && is_second)) * static_cast<index_t>(kFinishers * kSums / 4) + thread;
        };
        float4* const mine = part_of(blockIdx.x);
#pragma unroll
        for (int i = 0; i < kSums / 4; ++i)
          __stcg(mine + i * kFinishers, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
        __threadfence();
        named_barrier(2, kFinishers);
        if (threadIdx.x == 0) *before = atomicInc(counters + first_block, others);  // the last one brings it back to 0
        named_barrier(2, kFinishers);
        last = static_cast<int>(*before) == others;
        named_barrier(2, kFinishers);  // it is read by all before it is written again
        if (last) {
          __threadfence();
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll 2
          for (int other = 0; other <= others; ++other) {
            const float4* const from = part_of(first_block + other);
#pragma unroll
            for (int i = 0; i < kSums / 4; ++i) {
              const float4 more = __ldcg(from + i * kFinishers);
              sums[4 * i] += more.x, sums[4 * i + 1] += more.y, sums[4 * i + 2] += more.z, sums[4 * i + 3] += more.w;
            }
          }
        }
      }
      const int size = kGated ? out_features / 2 : out_features;
      const int out = (kGated ? 8 : 16) * (4 * tile * kRowGroups + row_tile) + group;  // the other is 8, or size, on
      if (last && out < size) {
        const int other_row = kGated ? size + out : out + 8;
        const bool has_other = kGated || out + 8 < size;
        const float biases[2] = {bias != nullptr ? to_float(bias[out]) : 0.0f,
                                 bias != nullptr && has_other ? to_float(bias[other_row]) : 0.0f};
#pragma unroll
        for (int i = 0; i < kSums; i += 4)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int token = 2 * i + 2 * pair + c;
            if (token >= num_tokens) continue;
            Y* const to = y + static_cast<index_t>(token) * size + out;
            const float low = sums[i + c] + biases[0], high = sums[i + 2 + c] + biases[1];
            if constexpr (kGated) {
              *to = from_float<Y>(activation<kActivation>(to_float(from_float<T>(low))) * to_float(from_float<T>(high)));
            } else {
              *to = from_float<Y>(low);
              if (has_other) to[8] = from_float<Y>(high);
            }
          }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  }
}
