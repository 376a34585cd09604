// op         attention_decode, defined by ref/attention.py
// maths      out[s, h] = Σ_t softmax_t(sm_scale · q[s, h] · k[t, h / n_rep]) · v[t, h / n_rep] over the sequence's tokens,
//            the last `window` of them if window > 0
// tensors    q, out [num_seqs, n_heads, head_dim] T, rows of q q_stride apart; k_cache, v_cache [num_blocks, block_size,
//            n_kv_heads, head_dim] T, or codes, and then k_scales, v_scales [num_blocks, block_size, n_kv_heads] float32
//            (else null); block_table [num_seqs, table_stride] int32, −1 = none; seq_lens [num_seqs] int32;
//            with splits partial [num_seqs, n_heads, num_splits, head_dim] float32, lse [.., num_splits] float32 and a
//            counter for each block of a split, 0 before and after
// a block    owns one sequence, one KV head, up to 16 (codes: 8 · kHeadTiles) of its query heads and one split of the tokens. Its warps take
//            chunks of 16 tokens (32 of codes) in turn, each with a ring of chunks of its own in shared memory, and add up at the end;
//            of the splits the block that comes last adds up all
// template   T bf16 or fp16; kHeadDim a multiple of 16 up to 256; kWarps; kStages chunks in a warp's ring; C what the
//            caches hold: T, or e4m3 or signed char (int8), whose codes are multiplied as the numbers they stand for;
//            kHeadTiles of 8 query heads, of codes: there tokens, and elements of values, are the rows of products
// sums       float32; a running maximum a warp, chunk by chunk; warps in order, splits in order; p is rounded to T as
//            the tensor cores take it; over codes they multiply numbers of fp16 whatever T is: codes as they are, q over
//            a power of 2 for each head, and p times the scale of v over the largest scale of v so far
// launcher   grid (num_splits, n_kv_heads · ⌈n_rep / heads of a block⌉, num_seqs), block 32 · kWarps, shared memory
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

// What a warp has added up over codes, and how it adds a chunk. Tokens are the rows of the products that give scores, and
// elements those of the ones that give sums, so that no row is empty where few heads share a KV head.
template <int kHeadDim, int kHeadTiles>
struct CodedSums {
  static constexpr int kSteps = kHeadDim / 16;
  float sums[kSteps][kHeadTiles][4] = {};  // elements 16·step + 2·group, +1 of heads 8·tile + 2·pair, +1
  float largest[kHeadTiles][2], total[kHeadTiles][2] = {};  // of these heads; totals of this lane's tokens
  float q_unit[kHeadTiles][2];                              // what their queries are over
  float v_unit = 0.0f, to_weights = 0.0f;                   // the largest scale of a value so far; 2^15 over it

  __device__ __forceinline__ CodedSums() {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) largest[tile][0] = largest[tile][1] = -kInfinity;
  }

  // From two T a word, neighbours, to fp16 in the order of decoded keys, over a power of 2 that makes them less than 2.
  template <typename T>
  __device__ __forceinline__ void prepare(unsigned (&q_rows)[kSteps][4]) {
    const int pair = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      unsigned most = 0u;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 2 * tile; i < 2 * tile + 2; ++i)
          most = max(most, max(q_rows[step][i] & 0x7fffu, q_rows[step][i] >> 16 & 0x7fffu));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const float unit = unit_of<T>(most), inverse = 1.0f / unit;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float numbers[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned word = q_rows[step][2 * tile + i / 2];
          numbers[i] = to_float(T{static_cast<unsigned short>(i % 2 ? word >> 16 : word)}) * inverse;
        }
        q_rows[step][2 * tile] = pack_fp16(numbers[0], numbers[2]);
        q_rows[step][2 * tile + 1] = pack_fp16(numbers[1], numbers[3]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) q_unit[tile][i] = __shfl_sync(kAllLanes, unit, 4 * (2 * pair + i));
    }
  }

  // k_tile, v_tile [32][kHeadDim] and scales [k, v][32] from token `from` on; q_rows: as the kernel loads them; tokens
  // before `first` or from `end` on do not count; scale: of scores, to powers of 2.
  template <typename C>
  __device__ __forceinline__ void add(const Stored<C>* k_tile, const Stored<C>* v_tile, const float* scales,
                                      const unsigned (&q_rows)[kSteps][4], int from, int first, int end, float scale) {
    const int lane = threadIdx.x % 32, group = lane / 4;
    float scores[2][kHeadTiles][4] = {};  // tokens 16·i + group (of 0 and 1), + 8 (of 2 and 3)
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned keys[4];  // 16 elements of 8 tokens each
      ldmatrix_x4(keys, k_tile + place<C, kHeadDim>(lane, step));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned rows[4];
        decode_quickly(keys[2 * i], rows[0], rows[2], C{});
        decode_quickly(keys[2 * i + 1], rows[1], rows[3], C{});
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const unsigned queries[2] = {q_rows[step][2 * tile], q_rows[step][2 * tile + 1]};
          mma_k16(scores[i][tile], rows, queries, fp16{});
        }
      }
    }
    // A weight is at most 2^15, and what is less than 2^-29 of that loses digits.
    const unsigned most = __reduce_max_sync(kAllLanes, max(__float_as_uint(v_unit), __float_as_uint(scales[32 + lane])));
    float kept = 1.0f;
    if (most != __float_as_uint(v_unit)) {  // of all lanes or none
      kept = v_unit / __uint_as_float(most);
      v_unit = __uint_as_float(most);
      to_weights = v_unit < 1e-30f ? 0.0f : 32768.0f / v_unit;
    }
    float k_scale[2][2], v_scale[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k_scale[i / 2][i % 2] = usable_scale(scales[8 * i + group]) * (scale * kQuickUnit<C>);
      v_scale[i / 2][i % 2] = usable_scale(scales[32 + 8 * i + group]) * to_weights;
    }
    float growth[kHeadTiles][2];
    unsigned p[2][kHeadTiles][2];
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        float top = largest[tile][head];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[i / 2][tile][2 * (i % 2) + head];
          const int token = from + 8 * i + group;
          score = token >= first && token < end ? score * q_unit[tile][head] * k_scale[i / 2][i % 2] : -kInfinity;
          top = fmaxf(top, score);
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, lanes));
        const float base = top == -kInfinity ? 0.0f : top;
        growth[tile][head] = exp2f(largest[tile][head] - base);
        largest[tile][head] = top;
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[i / 2][tile][2 * (i % 2) + head];
          score = exp2f(score - base);
          added += score;
          score *= v_scale[i / 2][i % 2];
        }
        total[tile][head] = total[tile][head] * growth[tile][head] + added;
        growth[tile][head] *= kept;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[i / 2][tile][i % 2] =
            transposed(pack_fp16(scores[i / 2][tile][2 * (i % 2)], scores[i / 2][tile][2 * (i % 2) + 1]));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned values[4];
      ldmatrix_x4_trans(values, v_tile + place<C, kHeadDim>(lane, step));
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[step][tile][i] *= growth[tile][i % 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned rows[4];
        decode_quickly(values[2 * i], rows[0], rows[1], C{});
        decode_quickly(values[2 * i + 1], rows[2], rows[3], C{});
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) mma_k16(sums[step][tile], rows, p[i][tile], fp16{});
      }
    }
  }

  // To all [heads][kHeadDim], tops and totals [heads] of this warp.
  template <typename C>
  __device__ __forceinline__ void store(float* all, float* tops, float* totals) {
    const float unit = v_unit / 32768.0f * kQuickUnit<C>;
    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 8 * tile + 2 * pair + i;
        float sum = total[tile][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
        const bool spoiled = sum != sum;  // as its sums are; what follows takes a total of NaN for none
        if (group == 0) tops[head] = spoiled ? 0.0f : largest[tile][i], totals[head] = spoiled ? 1.0f : sum;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          *reinterpret_cast<float2*>(all + head * kHeadDim + 16 * step + 2 * group) =
              make_float2(sums[step][tile][i] * unit, sums[step][tile][2 + i] * unit);
      }
  }
};

// Instances that would be given fewer registers than they need: of sm_80, of sm_120, of sm_86.
template <int kHeadDim, int kWarps, int kStages, typename C>
constexpr bool kWantsAll = kIsCode<C> ? (kHeadDim == 96 && kStages == 2) || (kHeadDim == 256 && kWarps == 2) : kHeadDim == 96;

template <typename T, int kHeadDim, int kWarps, int kStages, typename C = T, int kHeadTiles = 2>
__global__ void __launch_bounds__(32 * kWarps, kWantsAll<kHeadDim, kWarps, kStages, C>)
    attention_decode(const T* q, const Stored<C>* k_cache, const Stored<C>* v_cache, const float* k_scales,
                     const float* v_scales, const int* __restrict__ block_table, const int* __restrict__ seq_lens, T* out, float* partial, float* lse, unsigned* counters,
                     int q_stride, int table_stride, int block_size, int n_heads, int n_kv_heads, int window,
                     float sm_scale) {
  constexpr bool kCoded = kIsCode<C>;
  constexpr int kSteps = kHeadDim / 16, kUnits = kHeadDim / 8, kTokens = kChunk<C>, kTile = kTokens * kHeadDim;
  constexpr int kHeads = 8 * kHeadTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int n_rep = n_heads / n_kv_heads, groups = (n_rep + kHeads - 1) / kHeads;
  const int kv_head = static_cast<int>(blockIdx.y) / groups, first_of_group = static_cast<int>(blockIdx.y) % groups * kHeads;
  const int first_head = kv_head * n_rep + first_of_group, num_heads = min(kHeads, n_rep - first_of_group);
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

  unsigned q_rows[kSteps][4];  // heads group and group + 8; of codes, two of head group of a tile, and two of the next
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = group + 8 * (kCoded ? i / 2 : i % 2);
      const int at = 16 * step + (kCoded ? 4 * pair + 2 * (i % 2) : 2 * pair + 8 * (i / 2));
      const T* const row = q + static_cast<index_t>(seq) * q_stride + (first_head + head) * kHeadDim + at;
      q_rows[step][i] = head < num_heads ? *reinterpret_cast<const unsigned*>(row) : 0u;
    }

  float sums[kUnits][4] = {}, largest[2] = {-kInfinity, -kInfinity}, total[2] = {};
  CodedSums<kHeadDim, kHeadTiles> coded;
  if constexpr (kCoded) coded.template prepare<T>(q_rows);
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
    const float* const scales_of_chunk = scales + stage * 2 * kTokens;
    stage = (stage + 1) % kStages;

    if constexpr (kCoded) {
      coded.template add<C>(k_tile, v_tile, scales_of_chunk, q_rows, chunk * kTokens, first_token, seq_len, scale);
    } else {
      float scores[2][4] = {};  // tokens 8·half + 2·pair, +1 of heads group and group + 8
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned keys[4];  // both halves of 16 elements
        ldmatrix_x4(keys, k_tile + place<C, kHeadDim>(lane % 8 + 8 * (lane / 16), 2 * step + lane / 8 % 2));
        const unsigned first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
        mma_k16(scores[0], q_rows[step], first, T{});
        mma_k16(scores[1], q_rows[step], second, T{});
      }
      float growth[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // heads group + 8·half
        float top = largest[half];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[i / 2][2 * half + i % 2];
          const int token = chunk * kTokens + 8 * (i / 2) + 2 * pair + i % 2;
          score = token >= first_token && token < seq_len ? score * scale : -kInfinity;
          top = fmaxf(top, score);
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        const float base = top == -kInfinity ? 0.0f : top;
        growth[half] = exp2f(largest[half] - base);
        largest[half] = top;
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[i / 2][2 * half + i % 2];
          score = exp2f(score - base);
          added += score;
        }
        added += __shfl_xor_sync(kAllLanes, added, 1);
        added += __shfl_xor_sync(kAllLanes, added, 2);
        total[half] = total[half] * growth[half] + added;
      }
      const unsigned p[4] = {pack2(scores[0][0], scores[0][1], T{}), pack2(scores[0][2], scores[0][3], T{}),
                             pack2(scores[1][0], scores[1][1], T{}), pack2(scores[1][2], scores[1][3], T{})};
#pragma unroll
      for (int unit = 0; unit < kUnits; unit += 2) {
        unsigned values[4];
        ldmatrix_x4_trans(values, v_tile + place<C, kHeadDim>(lane % 16, unit + lane / 16));
        const unsigned first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[unit][i] *= growth[i / 2], sums[unit + 1][i] *= growth[i / 2];
        mma_k16(sums[unit], p, first, T{});
        mma_k16(sums[unit + 1], p, second, T{});
      }
    }
    __syncwarp();  // all lanes are done with this chunk before it is overwritten
  }
  cp_async_wait<0>();
  dependency_launch();  // earlier, what comes after would take the memory from this kernel

  // The warps' results meet in shared memory, [kWarps][kHeads][kHeadDim], in place of the rings.
  __shared__ float tops[kWarps][kHeads], totals[kWarps][kHeads];
  __syncthreads();
  float* const all = dynamic_shared<float>();
  if constexpr (kCoded) {
    coded.template store<C>(all + warp * kHeads * kHeadDim, tops[warp], totals[warp]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = group + 8 * half;
      if (pair == 0) tops[warp][head] = largest[half], totals[warp][head] = total[half];
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          all[(warp * kHeads + head) * kHeadDim + 8 * unit + 2 * pair + i] = sums[unit][2 * half + i];
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
      sum += share * all[(other * kHeads + head) * kHeadDim + at];
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
