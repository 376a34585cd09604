// op         sampling, defined by ref/sampling.py (greedy, sample) and ref/philox.py (the uniforms)
// maths      the best id; or one id drawn by inversion, in the order of ids, from what top_k, top_p and min_p keep
// tensors    logits [num_rows, vocab_size] float32, rows row_stride apart; temperature, top_p, min_p [num_rows] double
//            (min_p rounded up to a float32); top_k, position, stream [num_rows] int64; seed [num_rows] uint64; reasons
//            [num_rows] int32 or null: what to say of a row whose best logit is not finite; sampled [2, num_rows] int32:
//            token ids, and 0 or the reason
// a block    greedy: a part of a row, all of its threads a warp's segment each; the last block of a row writes.
//            sample_rows: a whole row, read once for each pass; see ranked_row.cuh for how it is done without a sort
// template   none
// sums       integers (weights in fixed point), so every order of them gives the same bits
// launcher   greedy: grid (num_parts, num_rows), block whole warps; best and num_done [num_rows] are 0 before the first
//            launch and are left so. sample_rows: grid num_rows, block 2 to 32 whole warps; vocab_size < 2^20
#include "ptx.cuh"
#include "ranked_row.cuh"

constexpr double kGreedyTemperature = 1e-5;
constexpr int kSampled = 0, kNotFinite = 1;

__device__ __forceinline__ Row row_of(const float* logits, index_t row_stride, int number, int vocab_size) {
  const float* const row = logits + number * row_stride;
  return {row, vocab_size, is_aligned(row), 0, 0.0f, 0.0f};
}

__device__ __forceinline__ void write(int* sampled, int row, int num_rows, int id, unsigned best, const int* reasons) {
  sampled[row] = id;
  sampled[num_rows + row] = is_finite(best) ? kSampled : reasons == nullptr ? kNotFinite : reasons[row];
}

__global__ void __launch_bounds__(1024)
    greedy(const float* logits, index_t row_stride, int vocab_size, const int* reasons, u64* best, unsigned* num_done,
           int* sampled) {
  __shared__ u64 scratch[kMaxWarps];
  dependency_wait();
  const int number = blockIdx.y;
  const Row row = row_of(logits, row_stride, number, vocab_size);
  const Segment part = segment(0, vocab_size, blockIdx.x, gridDim.x);
  const u64 found = block_best(row, part.begin, part.end, scratch);
  dependency_launch();
  if (threadIdx.x != 0) return;
  atomicMax(&best[number], found);
  __threadfence();
  if (atomicAdd(&num_done[number], 1u) != gridDim.x - 1) return;
  __threadfence();
  num_done[number] = 0;
  const u64 winner = atomicExch(&best[number], 0ull);
  write(sampled, number, gridDim.y, static_cast<int>(~static_cast<unsigned>(winner)), winner >> 32, reasons);
}

// The upper 24 bits of the first word of Philox4x32-10 with the seed as key and (position, stream) as counter.
__device__ __forceinline__ unsigned random_bits(u64 seed, u64 position, u64 stream) {
  unsigned c0 = static_cast<unsigned>(position), c1 = static_cast<unsigned>(position >> 32);
  unsigned c2 = static_cast<unsigned>(stream), c3 = static_cast<unsigned>(stream >> 32);
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const unsigned high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0 >> 8;
}

__global__ void __launch_bounds__(1024)
    sample_rows(const float* logits, index_t row_stride, int vocab_size, const double* temperature,
                const long long* top_k, const double* top_p, const double* min_p, const u64* seed,
                const long long* position, const long long* stream, const int* reasons, int* sampled) {
  __shared__ u64 scratch[kMaxWarps];
  __shared__ RankShared shared;
  dependency_wait();
  const int number = blockIdx.x;
  Row row = row_of(logits, row_stride, number, vocab_size);
  const u64 found = block_best(row, 0, vocab_size, scratch);
  row.best = static_cast<unsigned>(found >> 32);
  int id = static_cast<int>(~static_cast<unsigned>(found));
  if (temperature[number] >= kGreedyTemperature && is_finite(row.best)) {
    row.best_logit = value_of(row.best);
    row.scale = kLog2E / static_cast<float>(temperature[number]);
    Cut cut{0, 0};
    if (top_k[number] > 0 && top_k[number] < vocab_size) {
      const Head head =
          find_head<false>(row, kMinusInfinityKey, 0, static_cast<unsigned>(top_k[number]), 0.0, shared);
      cut = {head.key, static_cast<unsigned>(head.missing)};
    }
    if (top_p[number] < 1.0) {
      const u64 more = cut.key ? cut.num_equal * fixed_point(row.weight(value_of(cut.key))) : 0;
      const Head head = find_head<true>(row, cut.key + 1, more, 0, top_p[number], shared);
      const u64 mass = fixed_point(row.weight(value_of(head.key)));
      cut = {head.key, static_cast<unsigned>((head.missing + mass - 1) / mass)};
    }
    const float min_weight = static_cast<float>(min_p[number]);
    const float weight = cut.key ? row.weight(value_of(cut.key)) : 0.0f;
    const u64 equal_mass = weight >= min_weight ? fixed_point(weight) : 0;
    const unsigned fraction = random_bits(seed[number], position[number], stream[number]);
    id = find_id<true>(row, cut, min_weight, equal_mass, fraction, 0, shared);
  }
  dependency_launch();
  if (threadIdx.x == 0) write(sampled, number, gridDim.x, id, row.best, reasons);
}
