// op         sampling, defined by ref/sampling.py (apply_penalties, apply_logit_bias, apply_mask)
// maths      l → (l > 0 ? l / r : l · r) − penalty, then l + bias, then −∞ unless allowed, then −∞ where banned
// tensors    logits [num_rows, vocab_size] float32, rows row_stride apart, changed in place; rows, raw_index
//            [num_edited_rows]; bounds [num_edited_rows, 5]; token_ids, values [num_edits]; repetition_penalty
//            [num_edited_rows]: see engine/logit_edits.py; raw [num_kept, vocab_size], which gets the row as it was where
//            raw_index ≥ 0; reasons [num_rows], of which those of edited rows are written
// a block    a row, as a whole, kind after kind
// template   none
// sums       none; every step rounds once, as ref does
// launcher   grid num_edited_rows, block whole warps, shared memory a bit for each token
#include "ptx.cuh"
#include "ranked_row.cuh"

constexpr int kPenalty = 0, kBias = 1, kAllowed = 2, kBanned = 3, kBounds = 5;
constexpr int kNotFinite = 1, kNothingLeft = 2;

__global__ void __launch_bounds__(1024)
    edit_logits(float* logits, index_t row_stride, int vocab_size, const int* rows, const int* bounds,
                const int* token_ids, const float* values, const float* repetition_penalty, const int* raw_index,
                float* raw, int* reasons) {
  __shared__ u64 scratch[kMaxWarps];
  unsigned* const allowed = dynamic_shared<unsigned>();  // a bit for each token
  dependency_wait();
  const int thread = threadIdx.x, num_threads = blockDim.x, number = blockIdx.x;
  float* const row = logits + rows[number] * row_stride;
  const int* const bound = bounds + number * kBounds;
  const float minus_infinity = value_of(kMinusInfinityKey);
  if (raw_index[number] >= 0) {
    float* const copy = raw + static_cast<index_t>(raw_index[number]) * vocab_size;
    for (int i = thread; i < vocab_size; i += num_threads) copy[i] = row[i];
  }
  const Row read{row, vocab_size, is_aligned(row), 0, 0.0f, 0.0f};
  const unsigned best = static_cast<unsigned>(block_best(read, 0, vocab_size, scratch) >> 32);
  if (thread == 0) reasons[rows[number]] = is_finite(best) ? kNothingLeft : kNotFinite;
  if (!is_finite(best)) return;
  // all of the row has been read: block_best has a barrier behind its reads
  const float repetition = repetition_penalty[number];
  for (int i = bound[kPenalty] + thread; i < bound[kPenalty + 1]; i += num_threads) {
    const float old = row[token_ids[i]];
    row[token_ids[i]] = __fadd_rn(old > 0.0f ? old / repetition : __fmul_rn(old, repetition), -values[i]);
  }
  __syncthreads();
  for (int i = bound[kBias] + thread; i < bound[kBias + 1]; i += num_threads) row[token_ids[i]] += values[i];
  if (bound[kAllowed] < bound[kAllowed + 1]) {
    for (int i = thread; i < (vocab_size + 31) / 32; i += num_threads) allowed[i] = 0;
    __syncthreads();
    for (int i = bound[kAllowed] + thread; i < bound[kAllowed + 1]; i += num_threads)
      atomicOr(&allowed[token_ids[i] / 32], 1u << token_ids[i] % 32);
    __syncthreads();
    for (int i = thread; i < vocab_size; i += num_threads)
      if (!(allowed[i / 32] >> i % 32 & 1)) row[i] = minus_infinity;
  }
  __syncthreads();
  for (int i = bound[kBanned] + thread; i < bound[kBanned + 1]; i += num_threads) row[token_ids[i]] = minus_infinity;
  dependency_launch();
}
