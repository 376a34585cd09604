// op         sampling, defined by ref/sampling.py (token_logprobs)
// maths      Σ exp(l − best), and the k best of a row
// tensors    logits [num_rows, vocab_size] float32, rows row_stride apart; raw [num_kept, vocab_size]; rows, token_ids
//            [num_wanted]: row ~i is row i of raw; found [num_wanted, 4 + 2 · num_top] 32-bit words: the sum in fixed
//            point (low and high word), the logit of the token, the best logit, the best ids in any order, their logits
// a block    a row, as a whole
// template   none
// sums       integers (weights in fixed point), so every order of them gives the same bits
// launcher   grid num_wanted, block 2 to 32 whole warps; num_top ≤ vocab_size; the best logit of each row is finite
#include "ptx.cuh"
#include "ranked_row.cuh"

__global__ void __launch_bounds__(1024)
    token_logprobs(const float* logits, index_t row_stride, const float* raw, int vocab_size, const int* rows,
                   const int* token_ids, int num_top, unsigned* found) {
  __shared__ u64 scratch[kMaxWarps];
  __shared__ RankShared shared;
  dependency_wait();
  const int number = blockIdx.x, source = rows[number];
  const float* const values =
      source >= 0 ? logits + source * row_stride : raw + static_cast<index_t>(~source) * vocab_size;
  Row row{values, vocab_size, is_aligned(values), 0, 0.0f, kLog2E};
  unsigned* const out = found + static_cast<index_t>(number) * (4 + 2 * num_top);
  row.best = static_cast<unsigned>(block_best(row, 0, vocab_size, scratch) >> 32);
  row.best_logit = value_of(row.best);

  const u64 total = total_mass(row, shared);
  if (threadIdx.x == 0) {
    out[0] = static_cast<unsigned>(total);
    out[1] = static_cast<unsigned>(total >> 32);
    out[2] = __float_as_uint(values[token_ids[number]]);
    out[3] = __float_as_uint(row.best_logit);
  }
  if (num_top == 0) return;
  Cut cut{0, 0};
  int last_equal = vocab_size;
  if (num_top < vocab_size) {
    const Head head = find_head<false>(row, kMinusInfinityKey, 0, num_top, 0.0, shared);
    cut = {head.key, static_cast<unsigned>(head.missing)};
    last_equal = find_id<false>(row, cut, 0.0f, 1, 0, cut.num_equal - 1, shared);
  }
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  const Segment mine = warp_segment(0, vocab_size);
  for_each(row, mine.begin, mine.end, [&](unsigned key, float logit, int id) {
    if (key > cut.key || (key == cut.key && key && id <= last_equal)) {
      const unsigned place = atomicAdd(&shared.num_candidates, 1u);
      out[4 + place] = id;
      out[4 + num_top + place] = __float_as_uint(logit);
    }
  });
  dependency_launch();
}
