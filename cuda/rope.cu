// Rotary embedding fused with the KV write, and with the norm of each head. ref.rope: rope_kv_write,
// qk_norm_rope_kv_write.
// A pair (a, b) of a head becomes (a · cos − b · sin, b · cos + a · sin); with the norm the head is first divided by
//   sqrt(mean(head²) + eps) and multiplied by its weight. Rotated k and v go to the token's slot of the caches.
// q [num_tokens, n_heads, head_dim] T; k, v [num_tokens, n_kv_heads, head_dim] T, with strides between tokens and
//   heads; cos_sin [num_tokens, rotary_dim] float: cosines, then sines; slot_mapping [num_tokens] int32, negative =
//   store nothing; caches [num_blocks · block_size, n_kv_heads, head_dim] T; q_out [num_tokens, n_heads, head_dim] T,
//   contiguous, or q itself. q_weight, k_weight [head_dim] T, or one row a head with a stride between them.
// A block owns a token and a few of its heads of q, then k, then v; kLanes neighbouring lanes own a head, and a lane
//   two pieces of 16 bytes of it, which hold both numbers of every pair they touch.
// T: bf16, fp16, float. kInterleaved: pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2). kLanes: 1 to 32, a power
//   of two, at least num_lanes() of the sizes. C: what the caches hold, T or codes (e4m3, signed char), and then a scale
//   for each head of a token in k_scales and v_scales [num_blocks · block_size, n_kv_heads] float (else null).
// float32; the sum of squares over a lane's pieces, then a tree over the lanes; one rounding, at the end; codes are made
//   of what it gives: scale = max |x| / 448 or / 127, code = x / scale, rounded.
// The launcher: grid = (num_tokens, ⌈(n_heads + 2 · n_kv_heads) · kLanes / threads⌉), block = whole warps.
#include "kv_codes.cuh"
#include "reduce.cuh"
#include "vec.cuh"

struct Strides {  // in elements
  index_t token, head;
};

// The two pieces of a head that a lane owns: [low, low_end) and [high, high_end), each at most kWidth<T> long. Rotating
// pieces come first; half-split they lie rotary_dim / 2 apart, else next to each other.
struct Pieces {
  int low, low_end, high, high_end;
  bool rotates;
};

template <typename T, bool kInterleaved>
__device__ __forceinline__ Pieces pieces_of(int lane, int head_dim, int rotary_dim) {
  constexpr int kStep = kWidth<T>;
  const int half = rotary_dim / 2;
  const int num_rotating = (half + kStep - 1) / kStep;  // lanes; either way they cover kStep pairs each
  if (lane < num_rotating && !kInterleaved) {
    const int i = lane * kStep, end = min(i + kStep, half);
    return {i, end, half + i, half + end, true};
  }
  const bool rotates = lane < num_rotating;
  const int i = rotates ? 2 * kStep * lane : rotary_dim + 2 * kStep * (lane - num_rotating);
  const int limit = rotates ? rotary_dim : head_dim;
  return {i, min(i + kStep, limit), i + kStep, min(i + 2 * kStep, limit), rotates};
}

template <typename T>
__device__ __forceinline__ void load_piece(const T* head, int begin, int end, float (&x)[kWidth<T>]) {
  load_row(head, begin, end, is_aligned(head + begin), x);
}
template <typename T>
__device__ __forceinline__ void store_piece(T* head, int begin, int end, const float (&x)[kWidth<T>]) {
  store_row(head, begin, end, is_aligned(head + begin), x);
}

template <typename T, bool kInterleaved>
__device__ __forceinline__ void rotate(const Pieces& pieces, const float* cos_sin, int rotary_dim,
                                       float (&low)[kWidth<T>], float (&high)[kWidth<T>]) {
  const int half = rotary_dim / 2;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    // pair i of the lane: element i of both pieces, or two neighbours in one of them
    constexpr int kPairs = kWidth<T> / 2;
    const int number = kInterleaved ? pieces.low / 2 + i : pieces.low + i;
    if (number >= half) continue;
    float& a = kInterleaved ? (i < kPairs ? low[2 * i % kWidth<T>] : high[2 * i % kWidth<T>]) : low[i];
    float& b = kInterleaved ? (i < kPairs ? low[2 * i % kWidth<T> + 1] : high[2 * i % kWidth<T> + 1]) : high[i];
    const float cos = cos_sin[number], sin = cos_sin[half + number];
    const float first = a * cos - b * sin, second = b * cos + a * sin;
    a = first, b = second;
  }
}

// What a group of lanes does with its head. The whole warp comes here, also lanes that have no head (!has_head). The head
// goes to `to`, or as codes to `codes` and `scale`; both may be null.
template <typename T, bool kInterleaved, int kLanes, bool kNorm, typename C>
__device__ __forceinline__ void head_of_token(const T* from, T* to, Stored<C>* codes, float* scale, const T* weight,
                                              const float* cos_sin, int head_dim, int rotary_dim, bool has_head,
                                              bool is_value, float eps) {
  const Pieces pieces = pieces_of<T, kInterleaved>(static_cast<int>(threadIdx.x) % kLanes, head_dim, rotary_dim);
  float low[kWidth<T>] = {}, high[kWidth<T>] = {};
  if (has_head) {
    load_piece(from, pieces.low, pieces.low_end, low);
    load_piece(from, pieces.high, pieces.high_end, high);
  }
  if constexpr (kNorm) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) squares += low[i] * low[i] + high[i] * high[i];
    squares = warp_sum<kLanes>(squares);
    if (has_head && !is_value) {
      const float scale = rsqrtf(squares / static_cast<float>(head_dim) + eps);
      float low_weight[kWidth<T>], high_weight[kWidth<T>];
      load_piece(weight, pieces.low, pieces.low_end, low_weight);
      load_piece(weight, pieces.high, pieces.high_end, high_weight);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) low[i] *= scale * low_weight[i], high[i] *= scale * high_weight[i];
    }
  }
  if constexpr (kIsCode<C>) {
    if (has_head && pieces.rotates && !is_value) rotate<T, kInterleaved>(pieces, cos_sin, rotary_dim, low, high);
    float rounded_low[kWidth<T>], rounded_high[kWidth<T>];
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      rounded_low[i] = to_float(from_float<T>(low[i]));
      rounded_high[i] = to_float(from_float<T>(high[i]));
    }
    const float found = scale_of<C, kLanes>(rounded_low, rounded_high);
    if (has_head && codes != nullptr) {
      store_codes<C>(codes, pieces.low, pieces.low_end, rounded_low, found);
      store_codes<C>(codes, pieces.high, pieces.high_end, rounded_high, found);
      if (threadIdx.x % kLanes == 0) *scale = found;
    }
    if (!has_head || to == nullptr) return;
  } else {
    if (!has_head || to == nullptr) return;
    if (pieces.rotates && !is_value) rotate<T, kInterleaved>(pieces, cos_sin, rotary_dim, low, high);
  }
  store_piece(to, pieces.low, pieces.low_end, low);
  store_piece(to, pieces.high, pieces.high_end, high);
}

template <typename T, bool kInterleaved, int kLanes, bool kNorm, typename C>
__device__ __forceinline__ void token(const T* q, const T* k, const T* v, const T* q_weight, const T* k_weight,
                                      const float* cos_sin, const int* slot_mapping, Stored<C>* k_cache,
                                      Stored<C>* v_cache, float* k_scales, float* v_scales, T* q_out, int n_heads,
                                      int n_kv_heads, int head_dim, int rotary_dim, Strides q_strides,
                                      Strides k_strides, Strides v_strides, Strides q_out_strides,
                                      index_t q_weight_stride, index_t k_weight_stride, float eps) {
  dependency_launch();
  dependency_wait();
  const index_t t = blockIdx.x;
  int head = static_cast<int>((blockIdx.y * blockDim.x + threadIdx.x) / kLanes);
  const bool is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads;
  const bool has_head = head < n_heads + 2 * n_kv_heads;
  const T* from = q + t * q_strides.token + head * q_strides.head;
  T* to = q_out + t * q_out_strides.token + head * q_out_strides.head;
  Stored<C>* codes = nullptr;
  float* scale = nullptr;
  const T* weight = q_weight + head * q_weight_stride;
  if (!is_query) {
    head -= is_value ? n_heads + n_kv_heads : n_heads;
    from = is_value ? v + t * v_strides.token + head * v_strides.head : k + t * k_strides.token + head * k_strides.head;
    weight = k_weight + head * k_weight_stride;
    const index_t slot = slot_mapping[t];
    const index_t place = slot * n_kv_heads + head;
    if constexpr (kIsCode<C>) {
      to = nullptr;
      if (slot >= 0) {
        codes = (is_value ? v_cache : k_cache) + place * head_dim;
        scale = (is_value ? v_scales : k_scales) + place;
      }
    } else {
      to = slot < 0 ? nullptr : (is_value ? v_cache : k_cache) + place * head_dim;
    }
  }
  head_of_token<T, kInterleaved, kLanes, kNorm, C>(from, to, codes, scale, weight, cos_sin + t * rotary_dim, head_dim,
                                                   rotary_dim, has_head, is_value, eps);
}

template <typename T, bool kInterleaved, int kLanes, typename C = T>
__global__ void __launch_bounds__(1024)
    rope_kv_write(const T* q, const T* k, const T* v, const float* cos_sin, const int* slot_mapping,
                  Stored<C>* k_cache, Stored<C>* v_cache, float* k_scales, float* v_scales, T* q_out, int n_heads,
                  int n_kv_heads, int head_dim, int rotary_dim, index_t q_token_stride, index_t q_head_stride,
                  index_t k_token_stride, index_t k_head_stride, index_t v_token_stride, index_t v_head_stride,
                  index_t q_out_token_stride, index_t q_out_head_stride) {
  token<T, kInterleaved, kLanes, false, C>(q, k, v, nullptr, nullptr, cos_sin, slot_mapping, k_cache, v_cache,
                                           k_scales, v_scales, q_out, n_heads, n_kv_heads, head_dim, rotary_dim,
                                           {q_token_stride, q_head_stride}, {k_token_stride, k_head_stride},
                                           {v_token_stride, v_head_stride}, {q_out_token_stride, q_out_head_stride}, 0,
                                           0, 0.0f);
}

template <typename T, bool kInterleaved, int kLanes, typename C = T>
__global__ void __launch_bounds__(1024)
    qk_norm_rope_kv_write(const T* q, const T* k, const T* v, const T* q_weight, const T* k_weight,
                          const float* cos_sin, const int* slot_mapping, Stored<C>* k_cache, Stored<C>* v_cache,
                          float* k_scales, float* v_scales, T* q_out, int n_heads, int n_kv_heads, int head_dim,
                          int rotary_dim, index_t q_token_stride, index_t q_head_stride, index_t k_token_stride,
                          index_t k_head_stride, index_t v_token_stride, index_t v_head_stride,
                          index_t q_out_token_stride, index_t q_out_head_stride, index_t q_weight_stride,
                          index_t k_weight_stride, float eps) {
  token<T, kInterleaved, kLanes, true, C>(q, k, v, q_weight, k_weight, cos_sin, slot_mapping, k_cache, v_cache,
                                          k_scales, v_scales, q_out, n_heads, n_kv_heads, head_dim, rotary_dim,
                                          {q_token_stride, q_head_stride}, {k_token_stride, k_head_stride},
                                          {v_token_stride, v_head_stride}, {q_out_token_stride, q_out_head_stride},
                                          q_weight_stride, k_weight_stride, eps);
}
