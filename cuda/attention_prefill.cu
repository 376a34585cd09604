// op         attention_prefill, defined by ref/attention.py
// maths      out[i, h] = Σ_t softmax_t(sm_scale · q[i, h] · k[t, h / n_rep]) · v[t, h / n_rep] over the tokens of the
//            sequence that query i sees: itself and those before it, the last `window` of them if window > 0
// tensors    q [num_tokens, n_heads, head_dim] T, rows q_stride apart; out [num_tokens, n_heads, head_dim] T; k_cache,
//            v_cache [num_blocks, block_size, n_kv_heads, head_dim] T; block_table [num_seqs, table_stride] int32;
//            cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs] int32. The queries of a sequence are its last tokens
// a block    owns 16 · kTiles · kWarps queries of one sequence and one head; a warp 16 · kTiles of them. Keys and values
//            come in tiles of 64 tokens, the keys of the next tile under the second product of this one
// template   T bf16 or fp16; kHeadDim a multiple of 16 up to 256; kTiles 1 or 2; kWarps
// sums       float32; a running maximum a row, tile by tile; p is rounded to T as the tensor cores take it
// launcher   grid (n_heads, ⌈num_tokens / queries⌉ + num_seqs), block 32 · kWarps, shared memory
//            2 · kHeadDim · (queries + 128) bytes
#include "ptx.cuh"
#include "reduce.cuh"
#include "vec.cuh"

constexpr int kTokens = 64;  // of a tile
constexpr float kLog2e = 1.4426950408889634f;
#define kInfinity __uint_as_float(0x7f800000u)

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

// Where the 16 bytes number `unit` of row `row` lie in a tile: spread so that 8 rows of one column use all banks.
template <int kHeadDim>
__device__ __forceinline__ int place(int row, int unit) {
  const bool whole = unit < kHeadDim / 64 * 8;  // of eight units that can change places
  return row * kHeadDim + (whole ? unit ^ (row & 7) : unit) * 8;
}

template <typename T, int kHeadDim, int kTiles, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    attention_prefill(const T* __restrict__ q, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
                      const int* __restrict__ block_table, const int* __restrict__ cu_seqlens_q,
                      const int* __restrict__ seq_lens, T* __restrict__ out, int num_seqs, int q_stride,
                      int table_stride, int block_size, int n_heads, int n_kv_heads, int window, float sm_scale) {
  constexpr int kQueries = 16 * kTiles * kWarps, kThreads = 32 * kWarps;
  constexpr int kSteps = kHeadDim / 16, kUnits = kHeadDim / 8, kColumns = kTokens / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int head = blockIdx.x, kv_head = head / (n_heads / n_kv_heads);
  __shared__ int slots[2][kTokens];  // of the tokens of a tile; −1 = none
  T* const q_tile = dynamic_shared<T>();
  T* const k_tile = q_tile + kQueries * kHeadDim;
  T* const v_tile = k_tile + kTokens * kHeadDim;

  dependency_wait();
  int seq = 0, tile = blockIdx.y, first_row = 0, q_len = 0;
  for (; seq < num_seqs; ++seq) {  // which sequence has this tile
    first_row = cu_seqlens_q[seq];
    q_len = cu_seqlens_q[seq + 1] - first_row;
    const int tiles = (q_len + kQueries - 1) / kQueries;
    if (tile < tiles) {
      tile = tiles - 1 - tile;  // the longest work first
      break;
    }
    tile -= tiles;
  }
  if (seq == num_seqs) return;
  const int first_query = tile * kQueries, num_queries = min(kQueries, q_len - first_query);
  const int seq_len = seq_lens[seq], first_position = seq_len - q_len + first_query;
  const int end = first_position + num_queries;  // no query sees a token from here on
  const int begin = window > 0 ? max(0, first_position - window + 1) / kTokens * kTokens : 0;

  auto find_slots = [&](int token, int buffer) {
    if (threadIdx.x < kTokens) {
      const int at = token + threadIdx.x;
      slots[buffer][threadIdx.x] =
          at < end ? block_table[static_cast<index_t>(seq) * table_stride + at / block_size] * block_size +
                         at % block_size
                   : -1;
    }
  };
  auto load = [&](T* to, const T* cache, int buffer) {
#pragma unroll
    for (int i = threadIdx.x; i < kTokens * kUnits; i += kThreads) {
      const int row = i / kUnits, unit = i % kUnits, slot = slots[buffer][row];
      cp_async(to + place<kHeadDim>(row, unit),
               cache + (static_cast<index_t>(max(slot, 0)) * n_kv_heads + kv_head) * kHeadDim + 8 * unit, slot >= 0);
    }
    cp_async_commit();
  };

  find_slots(begin, 0);
  for (int i = threadIdx.x; i < kQueries * kUnits; i += kThreads) {
    const int row = i / kUnits, unit = i % kUnits;
    const bool valid = row < num_queries;
    const index_t from = static_cast<index_t>(first_row + first_query + (valid ? row : 0)) * q_stride;
    cp_async(q_tile + place<kHeadDim>(row, unit), q + from + head * kHeadDim + 8 * unit, valid);
  }
  __syncthreads();
  load(k_tile, k_cache, 0);

  float sums[kTiles][kUnits][4] = {}, largest[kTiles][2], total[kTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) largest[m][0] = largest[m][1] = -kInfinity;
  const float scale = sm_scale * kLog2e;
  const int my_row = warp * 16 * kTiles;

  int buffer = 0;
  for (int token = begin; token < end; token += kTokens, buffer ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // keys are there, and nobody reads the values of the tile before
    load(v_tile, v_cache, buffer);
    find_slots(token + kTokens, buffer ^ 1);

    float scores[kTiles][kColumns][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned rows[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        ldmatrix_x4(rows[m], q_tile + place<kHeadDim>(my_row + 16 * m + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int column = 0; column < kColumns; column += 2) {
        unsigned keys[4];
        ldmatrix_x4(keys,
                    k_tile + place<kHeadDim>(8 * column + lane % 8 + 8 * (lane / 16), 2 * step + lane / 8 % 2));
        const unsigned first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_k16(scores[m][column], rows[m], first, T{});
          mma_k16(scores[m][column + 1], rows[m], second, T{});
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // values and slots are there, and nobody reads the keys of this tile
    if (token + kTokens < end) load(k_tile, k_cache, buffer ^ 1);

    const bool masked = token + kTokens > first_position + 1 || window > 0;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (masked) {
          const int position = first_position + my_row + 16 * m + group + 8 * half;
          const int oldest = window > 0 ? position - window + 1 : 0;
#pragma unroll
          for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int at = token + 8 * column + 2 * pair + i;
              if (at > position || at < oldest) scores[m][column][2 * half + i] = -kInfinity;
            }
        }
        float top = largest[m][half];
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          top = fmaxf(top, fmaxf(scores[m][column][2 * half], scores[m][column][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        const float base = top == -kInfinity ? 0.0f : top * scale;
        const float growth = exp2f(largest[m][half] * scale - base);
        largest[m][half] = top;
        float added = 0.0f;
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][column][2 * half + i];
            score = exp2f(fmaf(score, scale, -base));
            added += score;
          }
        total[m][half] = total[m][half] * growth + added;  // of this lane's columns
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
          sums[m][unit][2 * half] *= growth, sums[m][unit][2 * half + 1] *= growth;
      }
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      unsigned p[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[m][i] = pack2(scores[m][2 * step + i / 2][2 * (i % 2)], scores[m][2 * step + i / 2][2 * (i % 2) + 1], T{});
#pragma unroll
      for (int unit = 0; unit < kUnits; unit += 2) {
        unsigned values[4];
        ldmatrix_x4_trans(values, v_tile + place<kHeadDim>(16 * step + lane % 16, unit + lane / 16));
        const unsigned first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_k16(sums[m][unit], p[m], first, T{});
          mma_k16(sums[m][unit + 1], p[m], second, T{});
        }
      }
    }
  }
  dependency_launch();

#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[m][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float share = sum > 0.0f ? 1.0f / sum : 0.0f;
      const int row = my_row + 16 * m + group + 8 * half;
      if (row >= num_queries) continue;
      T* const to = out + (static_cast<index_t>(first_row + first_query + row) * n_heads + head) * kHeadDim;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
        *reinterpret_cast<unsigned*>(to + 8 * unit + 2 * pair) =
            pack2(sums[m][unit][2 * half] * share, sums[m][unit][2 * half + 1] * share, T{});
    }
}
