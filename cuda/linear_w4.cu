// op         linear with weights of 4 bits in groups, defined by grouped_linear of ref/quant/groups.py, and gate_up_act of
//            ref/activation.py in one; for up to some tens of tokens
// maths      z[m, n] = Σ_k x[m, k] · (q[n, k] − zero[n, g(k)]) · scale[n, g(k)] (+ bias[n]); y = z, or with a gate
//            y[m, n] = f(z[m, gate n]) · z[m, up n]
// tensors    x [num_tokens, in_features] T, rows x_stride apart, at multiples of 16 bytes; weight, scales fp16 and zeros
//            uint8 packed as include/grouped.cuh says (zeros null: all are 8); bias [out_features] T or null;
//            y [num_tokens, size] Y. With a gate a tile of 16 packed rows is 8 gates and the 8 that they are multiplied
//            by, and size = out_features / 2
// a block    owns an equal share of all steps: y is cut into tiles of 16 · kRowTiles · kRowWarps rows, a tile into steps of
//            128 columns, and the steps of all tiles in a row are shared out. It goes through them in rounds of kStepWarps
//            steps, a warp a step of 16 · kRowTiles rows. All of a round comes through shared memory, kStages − 1 rounds
//            ahead: a lane copies the weights that it will itself take, the block the x that its warps share. Where a
//            tile is not one block's alone, the block that comes last adds up the parts
// template   T bf16 or fp16; Y the same or float; kActivation f, or kNone without a gate; kZeros whether there are zeros;
//            kGroups of a step: 4 if groups are of 32 columns, 2 if of 64, else 1; kRowTiles 2 or 4; kTokenTiles of 8
//            tokens; kRowWarps; kStepWarps; kStages ≥ 2; kBlocks that an SM is to hold
// sums       float32: a group's (or 128 columns') q · x and x by the tensor cores, with the zero's share taken off times
//            the scale; step by step of a warp, warp by warp, part by part; one rounding at the end, and with a gate one
//            of each z before it
// launcher   grid at most the number of steps, and the product of the two below 2^32; block 32 · kRowWarps · kStepWarps,
//            shared memory as Few.shared_bytes of engine/kernels/linear_w4.py says; partials [grid, 2, 8 · kTokenTiles,
//            rows of a tile] float32; counters [grid], 0 before and after; num_tokens ≤ 8 · kTokenTiles; group_shift:
//            groups are 128 / kGroups · 2^group_shift long
#include "activation.cuh"
#include "grouped.cuh"
#include "vec.cuh"

constexpr int kStep = 2 * kPackedStep;  // columns of a step
constexpr int kRowBytes = 2 * kStep;    // of a step of a token
constexpr int kPieces = kRowBytes / 16;
constexpr int kSumsAhead = 8;  // parts that are under way at once when they are added up

template <typename T, typename Y, Activation kActivation, bool kZeros, int kGroups, int kRowTiles, int kTokenTiles,
          int kRowWarps, int kStepWarps, int kStages, int kBlocks>
__global__ void __launch_bounds__(32 * kRowWarps * kStepWarps, kBlocks)
    linear_w4(const T* x, const unsigned* __restrict__ weight, const fp16* __restrict__ scales,
              const unsigned char* __restrict__ zeros, const T* __restrict__ bias, Y* y, float* partials,
              unsigned* counters, int num_tokens, int out_features, int in_features, int group_shift, index_t x_stride) {
  constexpr int kWarps = kRowWarps * kStepWarps, kThreads = 32 * kWarps;
  constexpr int kTokens = 8 * kTokenTiles, kRows = 16 * kRowTiles * kRowWarps;
  constexpr bool kGated = kActivation != kNone;
  constexpr int kOuts = kGated ? kRows / 2 : kRows;
  constexpr int kPitch = kRows + 4;
  constexpr int kWeightBytes = 1024 * kRowTiles, kPairBytes = 4 * kRowTiles;  // kPairBytes: scales of two rows of each tile
  constexpr int kWarpBytes = kWeightBytes + 8 * kGroups * (kPairBytes + (kZeros ? kPairBytes / 2 : 0));
  dependency_launch();  // what comes after may fetch its own weights; it waits for y by itself

  // By way of a shuffle, so that the compiler keeps them rather than work them out wherever they are used.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32), group = lane / 4, pair = lane % 4;
  const int row_warp = warp % kRowWarps, step_warp = warp / kRowWarps;
  const int num_steps = (in_features + kStep - 1) / kStep, num_quads = (out_features + 63) / 64;  // of row tiles
  const int num_tiles = (4 * num_quads + kRowTiles * kRowWarps - 1) / (kRowTiles * kRowWarps);
  const int size = kGated ? out_features / 2 : out_features;
  const int last_group = (in_features - 1) / (kStep / kGroups) >> group_shift;
  const unsigned all_steps = num_tiles * num_steps;
  const auto begin_of = [&](int block) { return static_cast<int>(block * all_steps / gridDim.x); };
  const auto block_of = [&](int step) { return static_cast<int>(((step + 1u) * gridDim.x - 1) / all_steps); };
  const int begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);

  const int x_bytes = num_tokens * kRowBytes;  // of a step
  unsigned char* const ring = dynamic_shared<unsigned char>() + warp * kStages * kWarpBytes;
  unsigned char* const x_ring = dynamic_shared<unsigned char>() + kWarps * kStages * kWarpBytes;
  float* const parts = reinterpret_cast<float*>(x_ring + kStages * kStepWarps * x_bytes);
  unsigned* const before = reinterpret_cast<unsigned*>(parts + kStepWarps * 8 * kPitch);

  // A round: steps of one tile that come one after the other.
  struct Round {
    int at, tile, step;  // its first step: of all, and in its tile
  };
  const auto width = [&](const Round& round) { return min(min(kStepWarps, num_steps - round.step), end - round.at); };
  const auto advance = [&](Round& round) {
    const int steps = width(round);
    round.at += steps, round.step += steps;
    if (round.step == num_steps) round.step = 0, ++round.tile;
  };
  const auto has_rows = [&](int tile) { return (tile * kRowWarps + row_warp) * kRowTiles < 4 * num_quads; };

  // What comes next of this warp's weights, and of the x that the warps of a step copy together: piece p of token m lies at
  // place p ^ (m % 8) of 8, so that what ldmatrix reads at once is in different banks.
  const Round start{begin, begin / num_steps, begin % num_steps};
  constexpr int kApart = kRowWarps * (32 / kPieces);  // tokens that a lane copies are so many apart
  const int piece = lane % kPieces, first_token = row_warp * (32 / kPieces) + lane / kPieces;
  const int x_place = step_warp * x_bytes + first_token * kRowBytes;
  const index_t tile_bytes = num_steps * static_cast<index_t>(kWeightBytes / kRowTiles);
  const index_t group_stride = num_quads * 64;  // of scales
  const auto weights_of = [&](const Round& round) {
    const index_t first = (round.tile * kRowWarps + row_warp) * kRowTiles;
    return reinterpret_cast<const unsigned char*>(weight) + first * tile_bytes +
           (round.step + step_warp) * (kWeightBytes / kRowTiles) + 16 * lane;
  };
  const auto scales_of = [&](int tile) {
    const int first = (tile * kRowWarps + row_warp) * kRowTiles;
    return (first / 4 * 8 + lane % 8) * 8 + first % 4 * 2;
  };
  const auto copy_weights = [&](const Round& round, const unsigned char* from, int scales_at, unsigned char* to) {
    if (step_warp >= width(round) || !has_rows(round.tile)) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i, from += tile_bytes)
#pragma unroll
      for (int half = 0; half < 2; ++half) cp_async(to + (2 * i + half) * 512 + 16 * lane, from + 512 * half);
    if (lane >= 8 * kGroups) return;
    const int of = min((kGroups * (round.step + step_warp) + lane / 8) >> group_shift, last_group);
    const index_t pairs = of * group_stride + scales_at;
    cp_async<kPairBytes>(to + kWeightBytes + lane * kPairBytes, scales + pairs);
    if constexpr (kZeros)
      cp_async<kPairBytes / 2>(to + kWeightBytes + 8 * kGroups * kPairBytes + lane * (kPairBytes / 2), zeros + pairs);
  };
  const auto copy_x = [&](const Round& round, const T* from, unsigned char* to) {
    if (step_warp >= width(round)) return;
    const bool valid = (round.step + step_warp) * kStep + 8 * piece < in_features;
#pragma unroll
    for (int i = 0; i < (kTokens + kApart - 1) / kApart; ++i, from += kApart * x_stride)
      if (first_token + i * kApart < num_tokens)
        cp_async(to + i * kApart * kRowBytes + ((piece ^ first_token % 8) ^ i * kApart % 8) * 16, from, valid);
  };

  Round next = start;
  const unsigned char* weights_next = weights_of(start);
  int scales_next = scales_of(start.tile);
  const T* const x_first = x + first_token * x_stride + step_warp * kStep + 8 * piece;
  // The weights are there whatever the kernel before does; x is not.
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    copy_weights(next, weights_of(next), scales_of(next.tile), ring + i * kWarpBytes);
    advance(next);
  }
  dependency_wait();
  next = start;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    copy_x(next, x_first + next.step * kStep, x_ring + x_place + i * kStepWarps * x_bytes);
    cp_async_commit();
    advance(next);
  }
  weights_next = weights_of(next), scales_next = scales_of(next.tile);
  const T* x_next = x_first + next.step * kStep;

  // Not a constant to the compiler, which would load it anew wherever it is used.
  const unsigned mask = 0x000f000fu | static_cast<unsigned>(num_tokens >> 31);
  int stage = 0;
  float sums[kRowTiles][kTokenTiles][4] = {};
  for (Round now = start; now.at < end;) {
    cp_async_wait<kStages - 2>();  // this round has come, for all, and the one before is used up
    if constexpr (kRowWarps == 1)
      __syncwarp();  // a warp shares nothing
    else
      __syncthreads();
    const int tile = now.tile, before_stage = stage == 0 ? kStages - 1 : stage - 1;
    const unsigned char* const from = ring + stage * kWarpBytes;
    const unsigned char* const x_from = x_ring + (stage * kStepWarps + step_warp) * x_bytes;
    const bool has_work = step_warp < width(now) && has_rows(tile);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    uint4 w[kRowTiles];
    unsigned b[kTokenTiles][4][2];  // by mma; tokens that are not there are read as the last one
    const auto load = [&](int half) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int token = min(8 * t + lane % 8, num_tokens - 1);
          unsigned both[4];
          ldmatrix_x4(both, x_from + token * kRowBytes + ((lane / 8 ^ token % 8) ^ (8 * half + 2 * j)) * 16);
          b[t][j][0] = both[0], b[t][j][1] = both[1], b[t][j + 1][0] = both[2], b[t][j + 1][1] = both[3];
        }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) w[i] = load16(from + ((2 * i + half) * 32 + lane) * 16);
    };
    if (has_work) load(0);
    copy_weights(next, weights_next, scales_next, ring + before_stage * kWarpBytes);
    copy_x(next, x_next, x_ring + x_place + before_stage * kStepWarps * x_bytes);
    cp_async_commit();
    const int tile_next = next.tile;
    advance(next);
    weights_next += kStepWarps * (kWeightBytes / kRowTiles), x_next += kStepWarps * kStep;
    if (next.tile != tile_next)
      weights_next = weights_of(next), scales_next = scales_of(next.tile), x_next = x_first;

    if (has_work) {
      constexpr int kMmas = 8 / kGroups;  // of a group
      float part[kRowTiles][kTokenTiles][4], sum_x[kTokenTiles][4];  // of a group; sum_x is the same in all rows
#pragma unroll(kGroups == 1 ? 2 : 1)
      for (int half = 0; half < 2; ++half) {
        if (half == 1) load(1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int g = (4 * half + j) / kMmas;
          if ((4 * half + j) % kMmas == 0) {
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                sum_x[t][c] = 0.0f;
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) part[i][t][c] = 0.0f;
              }
          }
          const unsigned ones[4] = {Nibbles<T>::kOnes, Nibbles<T>::kOnes, Nibbles<T>::kOnes, Nibbles<T>::kOnes};
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) mma_k16(sum_x[t], ones, b[t][j], T{});
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            const unsigned words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
            unsigned a[4];
            unpack_nibbles(words[j], mask, a, T{});
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) mma_k16(part[i][t], a, b[t][j], T{});
          }
          if ((4 * half + j + 1) % kMmas != 0) continue;
          const int of = 8 * g + group;
          const unsigned* const pairs = reinterpret_cast<const unsigned*>(from + kWeightBytes + of * kPairBytes);
          const unsigned short* const zero_pairs = reinterpret_cast<const unsigned short*>(
              from + kWeightBytes + 8 * kGroups * kPairBytes + of * (kPairBytes / 2));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            const unsigned both = pairs[i], both_zeros = kZeros ? zero_pairs[i] : 0x0808u;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float scale = to_float(fp16{static_cast<unsigned short>(both >> 16 * h)}) / Nibbles<T>::unit(h);
              const float zero = static_cast<float>(both_zeros >> 8 * h & 255u);
              const float off = -(Nibbles<T>::kOffset + zero) * Nibbles<T>::unit(h);
#pragma unroll
              for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                  sums[i][t][2 * h + c] += scale * (part[i][t][2 * h + c] + off * sum_x[t][c]);
            }
          }
        }
      }
    }
    advance(now);
    if (now.tile == tile && now.at < end) continue;

    // The warps' sums, 8 tokens at a time, and from there to y, or to where the last block of this tile finds them.
    const int first = tile * num_steps, first_block = block_of(first);
    const int others = block_of(first + num_steps - 1) - first_block;
    const bool is_second = begin_of(first_block) < first;  // the first block has a part of another tile before this
    const auto part_of = [&](int block) {
      return partials + (2 * block + (block == first_block && is_second)) * static_cast<index_t>(kTokens * kRows);
    };
    const int first_out = tile * kOuts;
    const auto finish = [&](int token, int out, auto sum_of) {
      if (first_out + out >= size || token >= num_tokens) return;
      const int row = kGated ? out / 8 * 16 + out % 8 : out;
      float z = sum_of(row);
      if (bias != nullptr) z += to_float(bias[first_out + out]);
      if constexpr (kGated) {
        float up = sum_of(row + 8);
        if (bias != nullptr) up += to_float(bias[size + first_out + out]);
        z = activation<kActivation>(to_float(from_float<T>(z))) * to_float(from_float<T>(up));
      }
      y[static_cast<index_t>(token) * size + first_out + out] = from_float<Y>(z);
    };
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      if (8 * t >= num_tokens) break;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          parts[(step_warp * 8 + 2 * pair + j % 2) * kPitch + 16 * (row_warp * kRowTiles + i) + group + j / 2 * 8] =
              sums[i][t][j];
      __syncthreads();
      const auto sum_of_warps = [&](int token, int row) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kStepWarps; ++other) sum += parts[(other * 8 + token) * kPitch + row];
        return sum;
      };
      const int tokens = min(8, num_tokens - 8 * t);
      if (others == 0) {
        for (int i = threadIdx.x; i < tokens * kOuts; i += kThreads)
          finish(8 * t + i / kOuts, i % kOuts, [&](int row) { return sum_of_warps(i / kOuts, row); });
      } else {
        for (int i = threadIdx.x; i < tokens * kRows; i += kThreads)
          part_of(blockIdx.x)[8 * t * kRows + i] = sum_of_warps(i / kRows, i % kRows);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][t][j] = 0.0f;
    if (others == 0) continue;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *before = atomicInc(counters + first_block, others);  // the last one brings it back to 0
    __syncthreads();
    if (static_cast<int>(*before) == others) {
      __threadfence();
      for (int i = threadIdx.x; i < num_tokens * kOuts; i += kThreads)
        finish(i / kOuts, i % kOuts, [&](int row) {
          const int at = i / kOuts * kRows + row;
          float sum = 0.0f;
          for (int other = 0; other <= others; other += kSumsAhead) {
            float some[kSumsAhead];
#pragma unroll
            for (int j = 0; j < kSumsAhead; ++j)
              some[j] = other + j <= others ? __ldcg(part_of(first_block + other + j) + at) : 0.0f;
#pragma unroll
            for (int j = 0; j < kSumsAhead; ++j) sum += some[j];
          }
          return sum;
        });
    }
    __syncthreads();  // before is read by all before it is written again
  }
}
