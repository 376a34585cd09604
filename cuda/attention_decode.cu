// op         attention_decode, defined by ref/attention.py
// maths      out[s, h] = Σ_t softmax_t(sm_scale · q[s, h] · k[t, h / n_rep]) · v[t, h / n_rep] over the sequence's tokens,
//            the last `window` of them if window > 0
// tensors    q, out [num_seqs, n_heads, head_dim] T, rows of q q_stride apart; k_cache, v_cache [num_blocks, block_size,
//            n_kv_heads, head_dim] T, or codes, and then k_scales, v_scales [num_blocks, block_size, n_kv_heads] float32
//            (else null); block_table [num_seqs, table_stride] int32, −1 = none; seq_lens [num_seqs] int32;
//            with splits partial [num_seqs, n_heads, num_splits, head_dim] float32, lse [.., num_splits] float32 and a
//            counter for each block of a split, 0 before and after
// a block    owns one sequence, one KV head, up to 16 of its query heads and one split of the tokens. Its warps take
//            chunks of 16 tokens (32 of codes) in turn, each with a ring of chunks of its own in shared memory, and add up at the end;
//            of the splits the block that comes last adds up all
// template   T bf16 or fp16; kHeadDim a multiple of 16 up to 256; kWarps; kStages chunks in a warp's ring; C what the
//            caches hold: T, or e4m3 or signed char (int8), whose codes are multiplied as the numbers they stand for
// sums       float32; a running maximum a warp, chunk by chunk; warps in order, splits in order; p is rounded to T as
//            the tensor cores take it; scales of codes are multiplied to the sums q · k, and to p before it is rounded
// launcher   grid (num_splits, n_kv_heads · ⌈n_rep / 16⌉, num_seqs), block 32 · kWarps, shared memory
//            kWarps · kStages · 64 · kHeadDim bytes (codes: 256 more a stage) and at least 64 · num_splits. Of what kernels that may still run write,
//            only q and a sequence's newest token are read: lengths, the table and older tokens were there before
#include "kv_codes.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "vec.cuh"

template <typename C>
constexpr int kChunk = kIsCode<C> ? 32 : 16;  // tokens that a warp takes at once
constexpr float kLog2e = 1.4426950408889634f;
#define kInfinity __uint_as_float(0x7f800000u)

// Where the 16 bytes number `unit` of row `row` lie in a tile: spread so that 8 rows of one column use all banks.
template <typename C, int kHeadDim>
__device__ __forceinline__ int place(int row, int unit) {
  if constexpr (kIsCode<C>) {
    constexpr int kUnits = kHeadDim / 16, kSame = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : kUnits % 2 == 0 ? 2 : 1;
    return row * kHeadDim + (unit ^ (row / (8 / kSame) & kSame - 1)) * 16;  // so many of 8 rows begin in one bank
  }
  const bool whole = unit < kHeadDim / 64 * 8;  // of eight units that can change places
  return row * kHeadDim + (whole ? unit ^ (row & 7) : unit) * 8;
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

// A row's queries at column 16 · step + 4 · pair and after it, as decode_codes orders the keys: numbers 0 and 2, then 1
// and 3.
__device__ __forceinline__ void load_for_codes(const unsigned* four, unsigned& even, unsigned& odd) {
  const unsigned first = four[0], second = four[1];
  even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
}

template <typename T, int kHeadDim, int kWarps, int kStages, typename C = T>
__global__ void __launch_bounds__(32 * kWarps)
    attention_decode(const T* q, const Stored<C>* k_cache, const Stored<C>* v_cache, const float* k_scales,
                     const float* v_scales, const int* __restrict__ block_table, const int* __restrict__ seq_lens, T* out, float* partial, float* lse, unsigned* counters,
                     int q_stride, int table_stride, int block_size, int n_heads, int n_kv_heads, int window,
                     float sm_scale) {
  constexpr bool kCoded = kIsCode<C>;
  constexpr int kSteps = kHeadDim / 16, kUnits = kHeadDim / 8, kTokens = kChunk<C>, kTile = kTokens * kHeadDim;
  constexpr int kColumns = kTokens / 8;  // of scores that tensor cores give at once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int n_rep = n_heads / n_kv_heads, groups = (n_rep + 15) / 16;
  const int kv_head = static_cast<int>(blockIdx.y) / groups, first_head = kv_head * n_rep + static_cast<int>(blockIdx.y) % groups * 16;
  const int num_heads = min(16, n_rep - static_cast<int>(blockIdx.y) % groups * 16);
  const int seq = blockIdx.z, num_splits = gridDim.x;
  Stored<C>* const ring = dynamic_shared<Stored<C>>() + warp * kStages * 2 * kTile;  // [kStages][k, v][kTokens][kHeadDim]
  float* const scales =  // [kStages][k, v][kTokens]
      reinterpret_cast<float*>(dynamic_shared<Stored<C>>() + kWarps * kStages * 2 * kTile) + warp * kStages * 2 * kTokens;

  const int seq_len = seq_lens[seq], first_token = window > 0 ? max(0, seq_len - window) : 0;
  const int first_chunk = first_token / kTokens, num_chunks = (seq_len + kTokens - 1) / kTokens - first_chunk;
  const int a_split = (num_chunks + num_splits - 1) / num_splits;
  const int begin = first_chunk + blockIdx.x * a_split, end = min(begin + a_split, first_chunk + num_chunks);
  const int newest = (seq_len - 1) / kTokens;  // has a token that the kernel before stores

  // Each lane knows the slot of one token of a chunk and brings 16 bytes of every second token.
  const auto slot_of = [&](int chunk) {
    const int token = chunk * kTokens + lane % kTokens;
    if (chunk >= end || token >= seq_len) return -1;
    return block_table[static_cast<index_t>(seq) * table_stride + token / block_size] * block_size + token % block_size;
  };
  const auto copy = [&](int slot, int stage) {
    Stored<C>* const k_tile = ring + stage * 2 * kTile;
    constexpr int kItems = kWidth<C>, kPieces = kHeadDim / kItems;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < kTokens * kPieces / 32; ++i) {
      const int row = (32 * i + lane) / kPieces, unit = (32 * i + lane) % kPieces;
      const int place_of_row = __shfl_sync(kAllLanes, slot, row);
      const index_t from = (static_cast<index_t>(max(place_of_row, 0)) * n_kv_heads + kv_head) * kHeadDim + kItems * unit;
      cp_async(k_tile + place<C, kHeadDim>(row, unit), k_cache + from, place_of_row >= 0);
      cp_async(k_tile + kTile + place<C, kHeadDim>(row, unit), v_cache + from, place_of_row >= 0);
    }
    if constexpr (kCoded) {
      float* const to = scales + stage * 2 * kTokens + lane;
      const index_t from = static_cast<index_t>(max(slot, 0)) * n_kv_heads + kv_head;
      cp_async<4>(to, k_scales + from, slot >= 0);
      cp_async<4>(to + kTokens, v_scales + from, slot >= 0);
    }
  };
  int slots[kStages - 1];
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) slots[stage] = slot_of(begin + warp + stage * kWarps);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (begin + warp + stage * kWarps != newest) copy(slots[stage], stage);
    cp_async_commit();
  }
  int next_slot = slot_of(begin + warp + (kStages - 1) * kWarps);  // known when its turn comes
  dependency_wait();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage)
    if (begin + warp + stage * kWarps == newest) {
      copy(slots[stage], stage);
      cp_async_commit();
      cp_async_wait<0>();  // it is the warp's last one
    }

  unsigned q_rows[kSteps][4];  // heads group and group + 8
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < (kCoded ? 2 : 4); ++i) {
      if constexpr (kCoded) {
        const int head = group + 8 * i;
        const T* const row = q + static_cast<index_t>(seq) * q_stride + (first_head + head) * kHeadDim;
        q_rows[step][i] = q_rows[step][i + 2] = 0u;
        if (head < num_heads)
          load_for_codes(reinterpret_cast<const unsigned*>(row + 16 * step + 4 * pair), q_rows[step][i],
                         q_rows[step][i + 2]);
        continue;
      }
      const int head = group + 8 * (i % 2), at = 16 * step + 2 * pair + 8 * (i / 2);
      const T* const row = q + static_cast<index_t>(seq) * q_stride + (first_head + head) * kHeadDim + at;
      q_rows[step][i] = head < num_heads ? *reinterpret_cast<const unsigned*>(row) : 0u;
    }

  float sums[kUnits][4] = {}, largest[2] = {-kInfinity, -kInfinity}, total[2] = {};
  const float scale = sm_scale * kLog2e;
  int stage = 0;
  for (int chunk = begin + warp; chunk < end; chunk += kWarps) {
    copy(next_slot, (stage + kStages - 1) % kStages);
    cp_async_commit();
    next_slot = slot_of(chunk + kStages * kWarps);
    cp_async_wait<kStages - 1>();
    __syncwarp();
    const Stored<C>* const k_tile = ring + stage * 2 * kTile;
    const Stored<C>* const v_tile = k_tile + kTile;
    const float* const k_scale = scales + stage * 2 * kTokens + 2 * pair;
    const float* const v_scale = k_scale + kTokens;
    stage = (stage + 1) % kStages;

    float scores[kColumns][4] = {};  // tokens 8·column + 2·pair, +1 of heads group and group + 8
    if constexpr (kCoded)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned keys[4];  // 16 elements of 8 tokens each
        ldmatrix_x4(keys, k_tile + place<C, kHeadDim>(lane, step));
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          unsigned decoded[2];
          decode_codes(keys[column], decoded[0], decoded[1], C{}, T{});
          mma_k16(scores[column], q_rows[step], decoded, T{});
        }
      }
    else
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned keys[4];  // both halves of 16 elements
      ldmatrix_x4(keys, k_tile + place<C, kHeadDim>(lane % 8 + 8 * (lane / 16), 2 * step + lane / 8 % 2));
      const unsigned first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
      mma_k16(scores[0], q_rows[step], first, T{});
      mma_k16(scores[1], q_rows[step], second, T{});
    }
    float growth[2], scale_of_key[kColumns][2];
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale_of_key[column][i] = kCoded ? usable_scale(k_scale[8 * column + i]) * (scale * kCodeUnit<T, C>) : scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // heads group + 8·half
      float top = largest[half];
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        const int token = chunk * kTokens + 8 * (i / 2) + 2 * pair + i % 2;
        score = token >= first_token && token < seq_len ? score * scale_of_key[i / 2][i % 2] : -kInfinity;
        top = fmaxf(top, score);
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float base = top == -kInfinity ? 0.0f : top;
      growth[half] = exp2f(largest[half] - base);
      largest[half] = top;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = exp2f(score - base);
        added += score;
      }
      added += __shfl_xor_sync(kAllLanes, added, 1);
      added += __shfl_xor_sync(kAllLanes, added, 2);
      total[half] = total[half] * growth[half] + added;
    }
    if constexpr (kCoded)
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[column][i] *= usable_scale(v_scale[8 * column + i % 2]) * kCodeUnit<T, C>;
    unsigned p[kColumns / 2][4];
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i)
      p[i / 4][i % 4] = pack2(scores[i / 2][2 * (i % 2)], scores[i / 2][2 * (i % 2) + 1], T{});
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += 2) {
      unsigned values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[unit][i] *= growth[i / 2], sums[unit + 1][i] *= growth[i / 2];
      if constexpr (kCoded) {  // elements 0, 2, … of 16, then 1, 3, …
        ldmatrix_x4_trans(values, v_tile + place<C, kHeadDim>(lane, unit / 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the tokens
          unsigned even[2], odd[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) decode_codes(values[2 * half + i], even[i], odd[i], C{}, T{});
          mma_k16(sums[unit], p[half], even, T{});
          mma_k16(sums[unit + 1], p[half], odd, T{});
        }
      } else {
        ldmatrix_x4_trans(values, v_tile + place<C, kHeadDim>(lane % 16, unit + lane / 16));
        const unsigned first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
        mma_k16(sums[unit], p[0], first, T{});
        mma_k16(sums[unit + 1], p[0], second, T{});
      }
    }
    __syncwarp();  // all lanes are done with this chunk before it is overwritten
  }
  cp_async_wait<0>();
  dependency_launch();  // earlier, what comes after would take the memory from this kernel

  // The warps' results meet in shared memory, [kWarps][16][kHeadDim], in place of the rings.
  __shared__ float tops[kWarps][16], totals[kWarps][16];
  __syncthreads();
  float* const all = dynamic_shared<float>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = group + 8 * half;
    if (pair == 0) tops[warp][head] = largest[half], totals[warp][head] = total[half];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = kCoded ? unit / 2 * 16 + 4 * pair + 2 * i + unit % 2 : 8 * unit + 2 * pair + i;
        all[(warp * 16 + head) * kHeadDim + at] = sums[unit][2 * half + i];
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * kHeadDim; i += 32 * kWarps) {
    const int head = i / kHeadDim, at = i % kHeadDim;
    float top = -kInfinity, sum = 0.0f, weight = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) top = fmaxf(top, tops[other][head]);
    const float base = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      const float share = exp2f(tops[other][head] - base);
      sum += share * all[(other * 16 + head) * kHeadDim + at];
      weight += share * totals[other][head];
    }
    const float result = weight > 0.0f ? sum / weight : 0.0f;
    const index_t row = static_cast<index_t>(seq) * n_heads + first_head + head;
    if (num_splits == 1) {
      out[row * kHeadDim + at] = from_float<T>(result);
    } else {
      partial[(row * num_splits + blockIdx.x) * kHeadDim + at] = result;
      if (at == 0) lse[row * num_splits + blockIdx.x] = weight > 0.0f ? top + log2f(weight) : -kInfinity;
    }
  }
  if (num_splits == 1) return;

  // out = Σ_split 2^(lse[split] − max) · partial[split] / Σ_split 2^(lse[split] − max), by the last block of a sequence.
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)  // the last one brings the counter back to 0
    is_last = atomicInc(counters + seq * gridDim.y + blockIdx.y, num_splits - 1) == static_cast<unsigned>(num_splits - 1);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const index_t first_row = static_cast<index_t>(seq) * n_heads + first_head;
  for (int i = threadIdx.x; i < num_heads * num_splits; i += 32 * kWarps) all[i] = __ldcg(lse + first_row * num_splits + i);
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * kHeadDim / 4; i += 32 * kWarps) {
    const int head = i / (kHeadDim / 4), at = i % (kHeadDim / 4) * 4;
    const float* const exponents = all + head * num_splits;
    const float4* const parts =
        reinterpret_cast<const float4*>(partial + (first_row + head) * num_splits * kHeadDim + at);
    float top = -kInfinity, weight = 0.0f;
    for (int split = 0; split < num_splits; ++split) top = fmaxf(top, exponents[split]);
    const float base = top == -kInfinity ? 0.0f : top;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int split = 0; split < num_splits; ++split) {
      const float share = exp2f(exponents[split] - base);
      const float4 part = __ldcg(parts + split * (kHeadDim / 4));
      sum.x += share * part.x, sum.y += share * part.y, sum.z += share * part.z, sum.w += share * part.w;
      weight += share;
    }
    const float scale = weight > 0.0f ? 1.0f / weight : 0.0f;
    unsigned* const target = reinterpret_cast<unsigned*>(out + (first_row + head) * kHeadDim + at);
    target[0] = pack2(sum.x * scale, sum.y * scale, T{}), target[1] = pack2(sum.z * scale, sum.w * scale, T{});
  }
}
