// op         attention_prefill, defined by ref/attention.py
// maths      out[i, h] = Σ_t softmax_t(sm_scale · q[i, h] · k[t, h / n_rep]) · v[t, h / n_rep] over the tokens of the
//            sequence that query i sees: itself and those before it, the last `window` of them if window > 0
// tensors    q [num_tokens, n_heads, head_dim] T, rows q_stride apart; out [num_tokens, n_heads, head_dim] T; k_cache,
//            v_cache [num_blocks, block_size, n_kv_heads, head_dim] T, or codes, and then k_scales, v_scales [num_blocks,
//            block_size, n_kv_heads] float32 (else null); block_table [num_seqs, table_stride] int32;
//            cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs] int32. The queries of a sequence are its last tokens
// a block    owns 16 · kTiles · kWarps queries of one sequence and one head; a warp 16 · kTiles of them. Keys and values
//            come in tiles of 64 tokens (32 if head_dim > 128). With one stage the keys of the next tile come under the
//            second product of this one; with two stages keys and values of the next tile come under all of this one.
//            Codes of the next tile too; then each thread decodes those that it has copied into the one tile of T
// template   T bf16 or fp16; kHeadDim a multiple of 16 up to 256; kTiles 1 or 2; kWarps 4 or 8; kStages 1 or 2 (codes: 1);
//            C what the caches hold: T, or e4m3 or signed char (int8)
// sums       float32; a running maximum a row, tile by tile, which may lag by a factor of kSlack: weights then pass 1,
//            which no format minds, and the sums are seldom rescaled; p is rounded to T as the tensor cores take it; over
//            codes they multiply numbers of fp16 whatever T is: codes as they are, q over a power of 2 for each row, and
//            p times the scale of v over the largest scale of v so far
// launcher   grid (n_heads, ⌈num_tokens / queries⌉ + num_seqs), block 32 · kWarps, shared memory
//            2 · kHeadDim · (queries + 2 · kStages · tokens of a tile) bytes; codes: 2 · kHeadDim + 16 a token more
#include "kv_codes.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "vec.cuh"

constexpr float kLog2e = 1.4426950408889634f;
template <typename C>
constexpr float kSlack = kIsCode<C> ? 4.0f : 8.0f;  // log2 of what a weight may be
#define kInfinity __uint_as_float(0x7f800000u)

template <int kHeadDim>
constexpr int kTokens = kHeadDim > 128 ? 32 : 64;  // of a tile

constexpr int power_of_two_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

// Where the 16 bytes number `unit` of row `row` lie in a tile: spread so that 8 rows of one column use all banks.
template <int kHeadDim>
__device__ __forceinline__ int place(int row, int unit) {
  const bool whole = unit < kHeadDim / 64 * 8;  // of eight units that can change places
  return row * kHeadDim + (whole ? unit ^ (row & 7) : unit) * 8;
}

// tile + place(row, 2 · step + half), with the work that all steps share in front.
template <int kHeadDim, typename T>
__device__ __forceinline__ const T* at_step(const T* tile, int row, int half, int step) {
  const bool whole = step < kHeadDim / 64 * 4;
  return tile + row * kHeadDim + (whole ? (half ^ (row & 7)) * 8 ^ step * 16 : half * 8 + step * 16);
}

// 16 codes as numbers in their order, in two pieces of 16 bytes.
template <typename C>
__device__ __forceinline__ void decode16(const uint4& codes, uint4 (&numbers)[2]) {
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
  unsigned pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    decode_in_order(words[i], pairs[2 * i], pairs[2 * i + 1], C{});
  numbers[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  numbers[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

template <bool kCoded, typename T>
struct MultipliedAs {
  using type = T;
};
template <typename T>
struct MultipliedAs<true, T> {
  using type = fp16;
};

// A row of q in place, from T to fp16 over the unit that it gives; of a whole warp.
template <typename T, int kHeadDim>
__device__ __forceinline__ float prepare_row(T* tile, int row) {
  constexpr int kWords = (kHeadDim / 2 + 31) / 32;
  const int lane = threadIdx.x % 32;
  unsigned most = 0u, words[kWords];
  auto word_at = [&](int i) {  // 8 numbers a unit, two a word
    const int number = 32 * i + lane;
    return reinterpret_cast<unsigned*>(tile + place<kHeadDim>(row, number / 4)) + number % 4;
  };
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = 32 * i + lane < kHeadDim / 2 ? *word_at(i) : 0u;
    most = max(most, max(words[i] & 0x7fffu, words[i] >> 16 & 0x7fffu));
  }
  const float unit = unit_of<T>(__reduce_max_sync(kAllLanes, most)), inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    if (32 * i + lane < kHeadDim / 2)
      *word_at(i) = pack_fp16(to_float(T{static_cast<unsigned short>(words[i])}) * inverse,
                              to_float(T{static_cast<unsigned short>(words[i] >> 16)}) * inverse);
  return unit;
}

template <typename T, int kHeadDim, int kTiles, int kWarps, int kStages, typename C = T>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 ? 2 : 1)
    attention_prefill(const T* __restrict__ q, const Stored<C>* __restrict__ k_cache,
                      const Stored<C>* __restrict__ v_cache, const float* __restrict__ k_scales,
                      const float* __restrict__ v_scales, const int* __restrict__ block_table,
                      const int* __restrict__ cu_seqlens_q, const int* __restrict__ seq_lens, T* __restrict__ out,
                      int num_seqs, int q_stride, int table_stride, int block_size, int n_heads, int n_kv_heads,
                      int window, float sm_scale) {
  constexpr bool kCoded = kIsCode<C>;
  using M = typename MultipliedAs<kCoded, T>::type;
  constexpr int kQueries = 16 * kTiles * kWarps, kThreads = 32 * kWarps, kTile = kTokens<kHeadDim>;
  constexpr int kSteps = kHeadDim / 16, kUnits = kHeadDim / 8, kColumns = kTile / 8;
  constexpr int kLanes = power_of_two_from(kUnits), kPass = kThreads / kLanes, kPasses = kTile / kPass;
  static_assert(kCoded || (kPass % 8 == 0 && kPasses % 4 == 0), "a thread copies rows that are swizzled alike");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const int head = blockIdx.x, kv_head = head / (n_heads / n_kv_heads);
  __shared__ __align__(16) int slots[2][kTile];  // of the tokens of a tile, those of a copying thread side by side
  T* const q_tile = dynamic_shared<T>();
  T* const k_tiles = q_tile + kQueries * kHeadDim;
  T* const v_tiles = k_tiles + kStages * kTile * kHeadDim;
  Stored<C>* const codes = reinterpret_cast<Stored<C>*>(v_tiles + kStages * kTile * kHeadDim);  // [k, v][kTile][kHeadDim]
  float* const scales = reinterpret_cast<float*>(codes + 2 * kTile * kHeadDim);  // [this tile, next][k, v][kTile]

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
  const int first_position = seq_lens[seq] - q_len + first_query;
  const int end = first_position + num_queries;  // no query sees a token from here on
  const int first_seen = window > 0 ? max(0, first_position - window + 1) : 0;  // or before this one
  const int begin = first_seen / kTile * kTile;
  __shared__ struct {
    int seq, oldest, newest;  // tokens that some query sees
    int seen_by_all;          // from this one on, but for the causal mask
    int row_of_0;             // of q, had all tokens of the sequence a query
  } of_block;                 // read when needed, as registers are scarce
  if (threadIdx.x == 0)
    of_block = {seq, first_seen, end - 1, window > 0 ? end - window : 0, first_row + first_query - first_position};
  __syncthreads();

  // A token that no query sees is read from the slot of one that is seen: its numbers are this sequence's own.
  auto find_slot = [&](int token) {
    const unsigned at = min(max(token + static_cast<int>(threadIdx.x), of_block.oldest), of_block.newest);
    const unsigned size = block_size;
    const int* const blocks = block_table + static_cast<index_t>(of_block.seq) * table_stride;
    return threadIdx.x < kTile ? blocks[at / size] * block_size + static_cast<int>(at % size) : 0;
  };
  auto keep_slot = [&](int slot, int buffer) {
    if (threadIdx.x < kTile) slots[buffer][threadIdx.x % kPass * kPasses + threadIdx.x / kPass] = slot;
  };

  const int copy_row = threadIdx.x / kLanes, copy_unit = threadIdx.x % kLanes;
  const int token_bytes = n_kv_heads * kHeadDim * static_cast<int>(sizeof(T));
  const int copy_at = kv_head * kHeadDim + 8 * copy_unit;
  // Codes of a tile and their scales: thread t brings every kThreads-th 16 bytes of both, and scale t of all.
  constexpr int kPieces = kHeadDim / 16, kCopies = (kTile * kPieces + kThreads - 1) / kThreads;
  static_assert(2 * kTile <= kThreads, "a thread brings a scale at most");
  auto has_copy = [&](int at) { return kTile * kPieces % kThreads == 0 || at < kTile * kPieces; };
  auto slot_of_row = [&](int row, int buffer) { return slots[buffer][row % kPass * kPasses + row / kPass]; };
  auto load_codes = [&](int buffer) {
    const int thread = anew(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = i * kThreads + thread, row = at / kPieces, unit = at % kPieces;
      if (!has_copy(at)) continue;
      const index_t from = (static_cast<index_t>(slot_of_row(row, buffer)) * n_kv_heads + kv_head) * kHeadDim + 16 * unit;
      cp_async(codes + 16 * at, k_cache + from);
      cp_async(codes + kTile * kHeadDim + 16 * at, v_cache + from);
    }
    if (thread < 2 * kTile) {
      const index_t slot = slot_of_row(thread % kTile, buffer);
      cp_async<4>(scales + 2 * kTile + thread, (thread < kTile ? k_scales : v_scales) + slot * n_kv_heads + kv_head);
    }
    cp_async_commit();
  };
  auto decode_tiles = [&] {
    const int thread = anew(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2 * kCopies; ++i) {
      const int at = i % kCopies * kThreads + thread, row = at / kPieces, unit = at % kPieces;
      if (!has_copy(at)) continue;
      T* const tile = i < kCopies ? k_tiles : v_tiles;
      uint4 numbers[2] = {};
      if constexpr (kCoded) decode16<C>(load16(codes + i / kCopies * kTile * kHeadDim + 16 * at), numbers);
      store16(tile + place<kHeadDim>(row, 2 * unit), numbers[0]);
      store16(tile + place<kHeadDim>(row, 2 * unit + 1), numbers[1]);
    }
    if (thread < 2 * kTile) scales[thread] = usable_scale(scales[2 * kTile + thread]);
  };
  auto load = [&](T* tile, const Stored<C>* cache, int buffer) {
    const char* const from = reinterpret_cast<const char*>(cache + anew(copy_at));
    T* const to = tile + place<kHeadDim>(copy_row, copy_unit);
    if (kLanes == kUnits || copy_unit < kUnits)
#pragma unroll
      for (int first = 0; first < kPasses; first += 4) {
        const uint4 four = load16(&slots[buffer][copy_row * kPasses + first]);
        const int at[4] = {static_cast<int>(four.x), static_cast<int>(four.y), static_cast<int>(four.z),
                           static_cast<int>(four.w)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          cp_async(to + (first + i) * kPass * kHeadDim, from + static_cast<index_t>(at[i]) * token_bytes);
      }
    cp_async_commit();
  };

  keep_slot(find_slot(begin), 0);
  if (kStages == 2 || kCoded) keep_slot(find_slot(begin + kTile), 1);
  if (kLanes == kUnits || copy_unit < kUnits)
    for (int row = copy_row; row < kQueries; row += kPass) {
      const bool valid = row < num_queries;
      const index_t from = static_cast<index_t>(first_row + first_query + (valid ? row : 0)) * q_stride;
      cp_async(q_tile + place<kHeadDim>(row, copy_unit), q + from + head * kHeadDim + 8 * copy_unit, valid);
    }
  __syncthreads();
  if constexpr (kCoded) {
    cp_async_commit();
    load_codes(0);
  } else {
    load(k_tiles, k_cache, 0);
    if (kStages == 2) load(v_tiles, v_cache, 0);
  }

  float sums[kTiles][kUnits][4] = {}, base[kTiles][2], total[kTiles][2] = {};  // base: log2 of what weights are over
#pragma unroll
  for (int m = 0; m < kTiles; ++m) base[m][0] = base[m][1] = -kInfinity;
  const float scale = sm_scale * kLog2e;
  float row_scale[kTiles][2];  // over codes
  float v_unit = 0.0f;  // the largest scale of a value so far
  auto scale_of = [&](int m, int half) { return kCoded ? row_scale[m][half] : scale; };
  const int my_row = warp * 16 * kTiles, my_position = first_position + my_row;

  if constexpr (kCoded) {
    cp_async_wait<1>();
    __syncthreads();  // the queries are there
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll 1
        for (int row = 0; row < 8; ++row) {
          const float unit = prepare_row<T, kHeadDim>(q_tile, my_row + 16 * m + 8 * half + row);
          if (row == group) row_scale[m][half] = scale * unit * kQuickUnit<C>;
        }
  }

  int buffer = 0;
  for (int token = begin; token <= of_block.newest; token += kTile, buffer ^= 1) {
    const T *k_tile = k_tiles, *v_tile = v_tiles;
    int next_slot = 0;
    cp_async_wait<0>();
    __syncthreads();  // keys are there (two stages: values too), and nobody reads the tile before
    if constexpr (kCoded) {
      next_slot = find_slot(token + 2 * kTile);
      decode_tiles();
      __syncthreads();
      if (token + kTile <= of_block.newest) load_codes(buffer ^ 1);
    } else if constexpr (kStages == 1) {
      load(v_tiles, v_cache, buffer);
      next_slot = find_slot(token + kTile);
    } else {
      k_tile += buffer * kTile * kHeadDim;
      v_tile += buffer * kTile * kHeadDim;
      next_slot = find_slot(token + 2 * kTile);
      if (token + kTile <= of_block.newest) {
        load(k_tiles + (buffer ^ 1) * kTile * kHeadDim, k_cache, buffer ^ 1);
        load(v_tiles + (buffer ^ 1) * kTile * kHeadDim, v_cache, buffer ^ 1);
      }
    }

    const bool seen = token < my_position + 16 * kTiles;  // by some query of this warp
    float scores[kTiles][kColumns][4] = {};
    if (seen) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned rows[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
          ldmatrix_x4(rows[m], at_step<kHeadDim>(q_tile, my_row + 16 * m + lane % 16, lane / 16, step));
#pragma unroll
        for (int column = 0; column < kColumns; column += 2) {
          unsigned keys[4];
          ldmatrix_x4(keys, at_step<kHeadDim>(k_tile, lane % 8 + 8 * (lane / 16), lane / 8 % 2, step) +
                                8 * column * kHeadDim);
          const unsigned first[2] = {keys[0], keys[1]}, second[2] = {keys[2], keys[3]};
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            mma_k16(scores[m][column], rows[m], first, M{});
            mma_k16(scores[m][column + 1], rows[m], second, M{});
          }
        }
      }
      if constexpr (kCoded) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[m][column][i] *= scales[8 * column + 2 * pair + i % 2];
      }
      if (token + kTile > my_position + 1 || token < of_block.seen_by_all) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int position = my_position + 16 * m + group + 8 * half;
            const int newest = position - token, first_seen = window > 0 ? newest - window + 1 : 0;
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int at = 8 * column + 2 * pair + i;
                if (at > newest || at < first_seen) scores[m][column][2 * half + i] = -kInfinity;
              }
          }
      }
      float growth[kTiles][2], kept = 1.0f;  // of sums
      bool grows = false;
      if constexpr (kCoded) {
        unsigned most = __float_as_uint(v_unit);
#pragma unroll
        for (int i = lane; i < kTile; i += 32) most = max(most, __float_as_uint(scales[kTile + i]));
        most = __reduce_max_sync(kAllLanes, most);
        if (most != __float_as_uint(v_unit)) {  // of all lanes or none
          kept = v_unit / __uint_as_float(most);
          v_unit = __uint_as_float(most);
          grows = true;
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float top = -kInfinity;
#pragma unroll
          for (int column = 0; column < kColumns; ++column)
            top = fmaxf(top, fmaxf(scores[m][column][2 * half], scores[m][column][2 * half + 1]));
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2)) * scale_of(m, half);
          const float before = base[m][half];
          const bool lags = top > before + kSlack<C>;
          if (lags) base[m][half] = top;
          growth[m][half] = lags ? exp2f(before - top) : 1.0f;
          grows |= lags;
        }
      if (__any_sync(kAllLanes, grows)) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            total[m][half] *= growth[m][half];
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
              sums[m][unit][2 * half] *= growth[m][half] * kept, sums[m][unit][2 * half + 1] *= growth[m][half] * kept;
          }
      }
    }
    if constexpr (kStages == 1 && !kCoded) {
      keep_slot(next_slot, buffer ^ 1);
      cp_async_wait<0>();
      __syncthreads();  // values and slots are there, and nobody reads the keys of this tile
      if (token + kTile <= of_block.newest) load(k_tiles, k_cache, buffer ^ 1);
    } else {
      keep_slot(next_slot, buffer);
    }
    if (!seen) continue;

    const float to_weights = v_unit < 1e-30f ? 0.0f : 2048.0f / v_unit;
    float shift[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) shift[m][half] = base[m][half] == -kInfinity ? 0.0f : base[m][half];
    auto weigh = [&](int column) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[m][column][i];
          score = exp2f(fmaf(score, scale_of(m, i / 2), -shift[m][i / 2]));
          total[m][i / 2] += score;  // of this lane's columns
          if constexpr (kCoded) score *= scales[kTile + 8 * column + 2 * pair + i % 2] * to_weights;
        }
    };
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      unsigned p[kTiles][4];
      weigh(2 * step), weigh(2 * step + 1);  // between the products of the step before, which need no issue slots
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[m][i] = pack2(scores[m][2 * step + i / 2][2 * (i % 2)], scores[m][2 * step + i / 2][2 * (i % 2) + 1], M{});
#pragma unroll
      for (int unit = 0; unit < kUnits; unit += 2) {
        unsigned values[4];
        ldmatrix_x4_trans(values, at_step<kHeadDim>(v_tile, lane % 16, lane / 16, unit / 2) + 16 * step * kHeadDim);
        const unsigned first[2] = {values[0], values[1]}, second[2] = {values[2], values[3]};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_k16(sums[m][unit], p[m], first, M{});
          mma_k16(sums[m][unit + 1], p[m], second, M{});
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
      float share = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
      if constexpr (kCoded) share *= v_unit / 2048.0f * kQuickUnit<C>;
      const int position = my_position + 16 * m + group + 8 * half;
      if (position > of_block.newest) continue;
      T* const to = out + (static_cast<index_t>(of_block.row_of_0 + position) * n_heads + head) * kHeadDim;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
        *reinterpret_cast<unsigned*>(to + 8 * unit + 2 * pair) =
            pack2(sums[m][unit][2 * half] * share, sums[m][unit][2 * half + 1] * share, T{});
    }
}
