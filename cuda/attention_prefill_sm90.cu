// op         attention_prefill, defined by ref/attention.py; the twin of attention_prefill.cu for sm_90a
// maths      out[i, h] = Σ_t softmax_t(sm_scale · q[i, h] · k[t, h / n_rep]) · v[t, h / n_rep] over the tokens of the
//            sequence that query i sees: itself and those before it, the last `window` of them if window > 0
// tensors    q [num_tokens, n_heads, head_dim] T, rows q_stride apart; out [num_tokens, n_heads, head_dim] T; k_cache,
//            v_cache [num_blocks, block_size, n_kv_heads, head_dim] T; block_table [num_seqs, table_stride] int32;
//            cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs] int32. The queries of a sequence are its last tokens.
//            k_map, v_map: the caches in boxes of 16 tokens and 64 numbers of one head
// a block    goes through items of 128 queries of one sequence and head. Warpgroup 0 copies: two warps keys, two warps
//            values, tiles of kTile tokens into kStages buffers, in boxes if they lie within blocks and all tokens have
//            been written, otherwise in rows. Warpgroups 1 and 2 have 64 queries each and take turns: while one has its
//            products on the tensor cores, the other works on its softmax
// template   T bf16 or fp16; kHeadDim 64, 128 or 256; kTile 64 or 128; kStages
// sums       float32; a running maximum a row, tile by tile, which may lag (see attention_prefill.cu); p is rounded to T
// launcher   grid: as many blocks as SMs, at most n_heads · (⌈num_tokens / 128⌉ + num_seqs); block 384; shared memory
//            2 · kHeadDim · (128 + 2 · kStages · kTile) + 2048 bytes
#include "ptx_sm90.cuh"
#include "reduce.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8.0f;  // log2 of what a weight may be
constexpr int kGroup = 128;     // threads of a warpgroup
constexpr int kRows = 64;       // queries of a warpgroup
constexpr int kQueries = 128;
constexpr int kBox = 16;  // tokens of a box
#define kInfinity __uint_as_float(0x7f800000u)

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// Where the 16 bytes number `unit` of row `row` lie in a tile of kCount rows, in elements: 64 columns after 64 columns,
// each swizzled for wgmma.
template <int kCount>
__device__ __forceinline__ int place(int row, int unit) {
  return (unit / 8 * kCount + row) * 64 + (unit % 8 ^ row % 8) * 8;
}

// Tile of queries number `item`: head after head, tile after tile, those of a sequence from its end on, the longest work
// first.
struct Work {
  int seq, head, first_row, num_queries;
  int first_position, end, oldest;  // of the first query; of the first token behind all, and of the first that is seen

  __device__ __forceinline__ bool find(int item, const int* cu_seqlens_q, const int* seq_lens, int num_seqs,
                                       int n_heads, int window) {
    int tile = item / n_heads;
    head = item % n_heads;
    for (seq = 0; seq < num_seqs; ++seq) {
      first_row = cu_seqlens_q[seq];
      const int q_len = cu_seqlens_q[seq + 1] - first_row, prefix = seq_lens[seq] - q_len;
      const int tiles = prefix < 0 ? 0 : (q_len + kQueries - 1) / kQueries;  // rows without a sequence: padding
      if (tile < tiles) {
        const int first_query = (tiles - 1 - tile) * kQueries;
        first_row += first_query;
        num_queries = min(kQueries, q_len - first_query);
        first_position = prefix + first_query;
        end = first_position + num_queries;
        oldest = window > 0 ? max(0, first_position - window + 1) : 0;
        return true;
      }
      tile -= tiles;
    }
    return false;
  }
};

template <typename T, int kHeadDim, int kTile, int kStages>
__global__ void __launch_bounds__(3 * kGroup, 1)
    attention_prefill_sm90(const T* __restrict__ q, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
                           const int* __restrict__ block_table, const int* __restrict__ cu_seqlens_q,
                           const int* __restrict__ seq_lens, T* __restrict__ out, int num_seqs, int q_stride,
                           int table_stride, int block_size, int n_heads, int n_kv_heads, int window, float sm_scale,
                           const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  constexpr int kUnits = kHeadDim / 8, kColumns = kTile / 8;
  constexpr int kTileSize = kTile * kHeadDim;
  constexpr int kRegisters = kHeadDim > 128 ? 224 : 216;  // of a thread that multiplies; the three have 504
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kGroup, 0);  // so that the compiler knows: one a warp
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;

  unsigned char* const shared = dynamic_shared<unsigned char>();
  T* const q_tiles = reinterpret_cast<T*>(shared + (-shared_address(shared) & 1023));
  T* const k_tiles = q_tiles + kQueries * kHeadDim;
  T* const v_tiles = k_tiles + kStages * kTileSize;
  mbarrier* const k_full = reinterpret_cast<mbarrier*>(v_tiles + kStages * kTileSize);
  mbarrier *const v_full = k_full + kStages, *const k_empty = v_full + kStages, *const v_empty = k_empty + kStages;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(k_full + stage, 2);
      mbarrier_init(v_full + stage, 2);
      mbarrier_init(k_empty + stage, 2 * kGroup / 32);
      mbarrier_init(v_empty + stage, 2 * kGroup / 32);
    }
    fence_barriers_made();
  }
  dependency_wait();
  __syncthreads();  // the barriers are there
  // This block's items: every gridDim.x-th, there and back, so that no block has the longest of each round.
  const int num_blocks = gridDim.x, block = blockIdx.x;
  auto item = [&](int round) { return round * num_blocks + (round % 2 ? num_blocks - 1 - block : block); };

  if (warpgroup == 0) {
    give_back_registers<504 - 2 * kRegisters>();
    constexpr int kWarpRows = kTile / 2, kPass = 32 / kUnits, kHeld = (kWarpRows + 31) / 32;
    constexpr int kColumnBoxes = kHeadDim / 64;
    const bool values = warp >= 2;
    const int half = warp % 2 * kWarpRows, unit = lane % kUnits, row = lane / kUnits;
    const int at = place<kTile>(row, unit);
    const int token_bytes = n_kv_heads * kHeadDim * static_cast<int>(sizeof(T));
    T* const tiles = values ? v_tiles : k_tiles;
    mbarrier *const full = values ? v_full : k_full, *const empty = values ? v_empty : k_empty;
    const TensorMap& map = values ? v_map : k_map;
    const int box_row = half + lane / kColumnBoxes * kBox, box_column = lane % kColumnBoxes * 64;  // of this lane's box
    const bool has_box = lane < kWarpRows / kBox * kColumnBoxes;
    int stage = 0, parity = 1;
    Work work;
    for (int round = 0; work.find(item(round), cu_seqlens_q, seq_lens, num_seqs, n_heads, window); ++round) {
      const int* const blocks = block_table + static_cast<index_t>(work.seq) * table_stride;
      const int kv_head = work.head / (n_heads / n_kv_heads), written = seq_lens[work.seq];
      const char* const from =
          reinterpret_cast<const char*>((values ? v_cache : k_cache) + kv_head * kHeadDim + 8 * unit);
      auto in_boxes = [&](int token) {
        return block_size % kBox == 0 && token >= work.oldest && token + kTile <= written;
      };
      // A token that no query sees is read from the slot of one that is seen: its numbers are this sequence's own.
      auto find_slot = [&](int token) {
        const unsigned position = min(max(token, work.oldest), work.end - 1), size = block_size;
        return blocks[position / size] * block_size + static_cast<int>(position % size);
      };
      int slots[kHeld];  // of this lane's box; or of this warp's rows lane, lane + 32, …
      auto find_slots = [&](int token) {
        if (in_boxes(token)) {
          slots[0] = find_slot(token + (has_box ? box_row : 0));
        } else {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) slots[i] = find_slot(token + half + lane + 32 * i);
        }
      };
      int token = work.oldest / kTile * kTile;
      find_slots(token);
      for (; token < work.end; token += kTile) {
        T* const tile = tiles + stage * kTileSize;
        mbarrier_wait(empty + stage, parity);
        if (in_boxes(token)) {
          if (lane == 0) mbarrier_arrive_expect(full + stage, kTileSize / 2 * static_cast<int>(sizeof(T)));
          __syncwarp();
          if (has_box) {
            const unsigned slot = slots[0], size = block_size;
            copy_box(tile + box_column * kTile + box_row * 64, map, full + stage, box_column, kv_head,
                     static_cast<int>(slot % size), static_cast<int>(slot / size));
          }
          find_slots(token + kTile);
        } else {
#pragma unroll
          for (int i = 0; i < kHeld; ++i)
#pragma unroll 4
            for (int first = 0; first < min(32, kWarpRows); first += kPass) {
              const int slot = __shfl_sync(kAllLanes, slots[i], first + row);
              cp_async(tile + half * 64 + (at ^ first % 8 * 8) + (32 * i + first) * 64,
                       from + static_cast<index_t>(slot) * token_bytes);
            }
          find_slots(token + kTile);
          cp_async_commit();
          cp_async_wait<0>();
          fence_async_shared();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(full + stage);
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  take_registers<kRegisters>();
  const int me = warpgroup - 1, group = lane / 4, pair = lane % 4;
  const int my_first = kRows * me, my_row = my_first + 16 * warp + group;  // and my_row + 8
  T* const q_tile = q_tiles + my_first * kHeadDim;
  auto load_queries = [&](const Work& work) {
#pragma unroll
    for (int i = 0; i < kRows * kUnits / kGroup; ++i) {
      const int number = i * kGroup + thread, row = number / kUnits, unit = number % kUnits;
      const bool valid = my_first + row < work.num_queries;
      const index_t from = static_cast<index_t>(work.first_row + (valid ? my_first + row : 0)) * q_stride;
      cp_async(q_tile + place<kRows>(row, unit), q + from + work.head * kHeadDim + 8 * unit, valid);
    }
    cp_async_commit();
  };
  auto find = [&](Work& work, int round) {
    return work.find(item(round), cu_seqlens_q, seq_lens, num_seqs, n_heads, window);
  };

  float sums[kHeadDim / 2], scores[kTile / 2], base[2], total[2];
  unsigned p[kTile / 16][4];
  const float scale = sm_scale * kLog2e;
  const unsigned long long q_descriptor = tile_descriptor(q_tile, 16, 1024);
  const unsigned long long k_descriptor = tile_descriptor(k_tiles, 16, 1024);
  const unsigned long long v_descriptor = tile_descriptor(v_tiles, kTile * 128, 1024);

  Work work;
  bool more = find(work, 0);
  if (more) load_queries(work);
  if (me == 1) named_barrier_arrive(1, 2 * kGroup);  // the other warpgroup begins
  int begin = 0, num_tiles = 0;

  auto multiply_keys = [&](int stage) {
    const unsigned long long keys = advanced(k_descriptor, stage * kTileSize * 2);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step)
      wgmma_k_major(scores, advanced(q_descriptor, step / 4 * kRows * 128 + step % 4 * 32),
                    advanced(keys, step / 4 * kTile * 128 + step % 4 * 32), step > 0, T{});
    wgmma_commit();
  };
  auto multiply_values = [&](int stage) {
    const unsigned long long values = advanced(v_descriptor, stage * kTileSize * 2);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
      wgmma_mn_major(sums, p[step], advanced(values, step * 2048), T{});
    wgmma_commit();
  };
  auto release = [&](mbarrier* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  auto is_masked = [&](int number) {  // is there a token that some query of this warpgroup does not see
    const int token = begin + number * kTile;
    return token + kTile > work.first_position + my_first + 1 ||
           (window > 0 && token < work.first_position + my_first + kRows - window);
  };
  // Scores become weights; what the sums so far must be multiplied by.
  auto weigh = [&](int number, float (&growth)[2], bool& grows, auto masked) {
    const int token = begin + number * kTile;
    grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (decltype(masked)::value) {
        const int newest = work.first_position + my_row + 8 * half - token, first = window > 0 ? newest - window + 1 : 0;
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 8 * column + 2 * pair + i;
            if (at > newest || at < first) scores[4 * column + 2 * half + i] = -kInfinity;
          }
      }
      float top = -kInfinity;
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
        top = fmaxf(top, fmaxf(scores[4 * column + 2 * half], scores[4 * column + 2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2)) * scale;
      const float before = base[half];
      const bool lags = top > before + kSlack;
      if (lags) base[half] = top;
      growth[half] = lags ? exp2f(before - top) : 1.0f;
      grows |= lags;
      const float shift = base[half] == -kInfinity ? 0.0f : base[half];
      float added = 0.0f;
#pragma unroll
      for (int column = 0; column < kColumns; ++column)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[4 * column + 2 * half + i];
          score = exp2f(fmaf(score, scale, -shift));
          added += score;
        }
      total[half] = total[half] * growth[half] + added;  // of this lane's columns
    }
  };
  auto finish = [&](const float (&growth)[2], bool grows) {
    if (__any_sync(kAllLanes, grows)) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) sums[i] *= growth[i / 2 % 2];
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[step][i] = pack2(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1], T{});
  };

  int k_stage = 0, k_parity = 0, v_stage = 0, v_parity = 0;
  auto next_keys = [&] {
    if (++k_stage == kStages) k_stage = 0, k_parity ^= 1;
  };
  auto next_values = [&] {
    if (++v_stage == kStages) v_stage = 0, v_parity ^= 1;
  };

  auto body = [&](int number, auto masked) {
    float growth[2];
    bool grows;
    mbarrier_wait(k_full + k_stage, k_parity);
    named_barrier(1 + me, 2 * kGroup);  // until the other warpgroup's products are under way
    wgmma_fence();
    multiply_keys(k_stage);
    mbarrier_wait(v_full + v_stage, v_parity);
    multiply_values(v_stage);
    named_barrier_arrive(2 - me, 2 * kGroup);
    wgmma_wait<1>();
    settled(scores);
    release(k_empty + k_stage);
    weigh(number, growth, grows, masked);
    settled(scores);  // before the wait
    wgmma_wait<0>();
    settled(sums);
    release(v_empty + v_stage);
    finish(growth, grows);
    next_keys();
    next_values();
  };
  for (int round = 0; more;) {
    begin = work.oldest / kTile * kTile;
    num_tiles = (work.end - begin + kTile - 1) / kTile;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) base[half] = -kInfinity, total[half] = 0.0f;
    cp_async_wait<0>();
    fence_async_shared();
    named_barrier(3 + me, kGroup);  // the queries are there

    mbarrier_wait(k_full + k_stage, k_parity);
    named_barrier(1 + me, 2 * kGroup);
    wgmma_fence();
    multiply_keys(k_stage);
    named_barrier_arrive(2 - me, 2 * kGroup);
    wgmma_wait<0>();
    settled(scores);
    release(k_empty + k_stage);
    next_keys();
    {
      float growth[2];
      bool grows;
      weigh(0, growth, grows, Constant<true>{});
      finish(growth, false);
    }
    for (int number = 1; number < num_tiles;) {
      for (; number < num_tiles && !is_masked(number); ++number) body(number, Constant<false>{});
      for (; number < num_tiles && is_masked(number); ++number) body(number, Constant<true>{});
    }
    mbarrier_wait(v_full + v_stage, v_parity);
    wgmma_fence();
    multiply_values(v_stage);
    const Work done = work;
    more = find(work, ++round);
    named_barrier(3 + me, kGroup);  // nobody reads the queries
    if (more) load_queries(work);
    wgmma_wait<0>();
    settled(sums);
    release(v_empty + v_stage);
    next_values();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float share = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
      const int row = my_row + 8 * half;
      if (row >= done.num_queries) continue;
      T* const to = out + (static_cast<index_t>(done.first_row + row) * n_heads + done.head) * kHeadDim;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit)
        *reinterpret_cast<unsigned*>(to + 8 * unit + 2 * pair) =
            pack2(sums[4 * unit + 2 * half] * share, sums[4 * unit + 2 * half + 1] * share, T{});
    }
  }
  if (me == 0) named_barrier(1, 2 * kGroup);  // takes the other's last turn, which nobody needs
  dependency_launch();
}
