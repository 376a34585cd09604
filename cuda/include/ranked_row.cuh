// A row of logits as a ranking, without sorting it: highest value first, lowest id first among equals.
//
// key        the float32 of a logit as an unsigned number in the same order: +0 and −0 are one key, NaN is the highest
// weight     exp((l − best) / temperature) as an integer, 2^44 being 1. Sums of integers are exact, so they are the
//            same in whatever order threads add them, and a sum over ids and a sum over ranks agree. Rounding moves a
//            token by at most 2^-45, and 2^18 of them by 2^-27 of the total
// a cut      what is kept: all above a key, and so many of those at it, lowest ids first
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

using u64 = unsigned long long;

constexpr unsigned kInfinityKey = 0xff800000u, kMinusInfinityKey = 0x007fffffu;
constexpr int kPiece = 128;         // numbers that a warp reads at once: 16 bytes a lane
constexpr int kThresholds = 7;      // keys that one pass over a row measures
constexpr int kFewThresholds = 3;   // the lowest of them
constexpr int kRoundsByValue = 2;   // of a search: later ones go by key, and end whatever the numbers are
constexpr float kFarthest = 32.0f;  // below the best in units: e^-32 < 2^-45 is a weight of 0
constexpr int kCandidates = 8192;   // so few left to choose from are kept in shared memory
constexpr float kLog2E = 1.44269504f;

// NaN is not looked for: block_best does that.
__device__ __forceinline__ unsigned key_of(float x) {
  const int bits = __float_as_int(x);
  const unsigned key = bits ^ (bits >> 31 | 0x80000000);
  return key == 0x7fffffffu ? 0x80000000u : key;
}
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ bool is_finite(unsigned key) { return key > kMinusInfinityKey && key < kInfinityKey; }

struct Row {
  const float* logits;  // [size]
  int size;
  bool aligned;  // to 16 bytes
  unsigned best;  // key
  float best_logit;
  float scale;  // log2(e) / temperature

  __device__ __forceinline__ float weight(float logit) const { return exp2f((logit - best_logit) * scale); }
};

// weight · 2^44, rounded to the nearest; weight in [0, 1]. Two steps of 22 bits: adding 2^23 to a float32 leaves its
// whole part in the lowest bits. A conversion to 64 bits would be the slowest instruction of all on most GPUs.
__device__ __forceinline__ u64 fixed_point(float weight) {
  const float high = __fmaf_rn(weight, 0x1p22f, 0x1p23f);
  const float rest = __fmaf_rn(weight, 0x1p22f, 0x1p23f - high);
  const float low = __fmaf_rn(rest, 0x1p22f, 0x1.8p23f);
  return static_cast<u64>(static_cast<long long>(__float_as_int(high) - 0x4b000000) * (1 << 22) +
                          (__float_as_int(low) - 0x4b400000));
}

struct Measure {  // of a set of tokens
  u64 mass;
  unsigned count;
};
struct Cut {
  unsigned key;
  unsigned num_equal;  // kept of those at key
};

struct RankShared {
  unsigned thresholds[kThresholds];  // ascending keys
  Measure found[kThresholds];        // what is at or above each
  Measure parts[kMaxWarps][kThresholds];
  Measure above;  // what is at or above the key where reading stops; here, as are others, since registers are few
  u64 wanted;     // of a search
  unsigned lowest, highest;  // keys
  unsigned num_candidates;
  unsigned candidates[kCandidates];  // keys
};

// f(x, id, count) for the ids [begin, end) of a row, in ascending order for a lane: the 4 neighbours from id on, of
// which `count` exist. Called by whole warps: all lanes do the same number of calls. kUnroll: pieces in flight.
template <int kUnroll, typename Function>
__device__ __forceinline__ void for_each_four(const Row& row, int begin, int end, Function f) {
  const int first = 4 * (threadIdx.x % 32);
  int start = begin;
  if (row.aligned)
    for (; start + kUnroll * kPiece <= end; start += kUnroll * kPiece) {
      uint4 raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) raw[u] = load16(row.logits + start + u * kPiece + first);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float x[4];
        unpack(raw[u], x, float{});
        f(x, start + u * kPiece + first, 4);
      }
    }
  for (; start < end; start += kPiece) {
    float x[4];
    load_row<float>(row.logits, start + first, end, row.aligned, x);
    f(x, start + first, min(max(end - start - first, 0), 4));
  }
}

// f(key, logit, id) for one after the other; where there is none, with key 0, which no number has.
template <int kUnroll = 4, typename Function>
__device__ __forceinline__ void for_each(const Row& row, int begin, int end, Function f) {
  for_each_four<kUnroll>(row, begin, end, [&](const float(&x)[4], int id, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(i < count ? key_of(x[i]) : 0u, x[i], id + i);
  });
}

struct Segment {  // of ids
  int begin, end;
};
// The part of [begin, end) that is number `part` of `num_parts`, made of whole pieces.
__device__ __forceinline__ Segment segment(int begin, int end, int part, int num_parts) {
  const int size = (end - begin + num_parts * kPiece - 1) / (num_parts * kPiece) * kPiece;
  return {min(begin + part * size, end), min(begin + (part + 1) * size, end)};
}
__device__ __forceinline__ Segment warp_segment(int begin, int end) {
  return segment(begin, end, threadIdx.x / 32, blockDim.x / 32);
}

template <typename T>
__device__ __forceinline__ T warp_total(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// The best of ids [begin, end) as (key, ~id): the largest number is the best key and, among equals, the lowest id.
__device__ __forceinline__ u64 block_best(const Row& row, int begin, int end, u64 (&scratch)[kMaxWarps]) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  unsigned best = 0;
  int four = 0;  // where it is, or in the 3 behind
  bool has_nan = false;
  const Segment mine = warp_segment(begin, end);
  for_each_four<4>(row, mine.begin, mine.end, [&](const float(&x)[4], int id, int count) {
    unsigned keys[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[i] = i < count ? key_of(x[i]) : 0u;
      has_nan |= x[i] != x[i];
    }
    const unsigned key = max(max(keys[0], keys[1]), max(keys[2], keys[3]));
    if (key > best) best = key, four = id;
  });
  int best_id = four;
  while (best != 0 && key_of(row.logits[best_id]) != best) ++best_id;
  if (has_nan) {
    best = 0xffffffffu, best_id = end;
    for_each<1>(row, mine.begin, mine.end, [&](unsigned key, float logit, int id) {
      if (logit != logit) best_id = min(best_id, id);
    });
  }
  u64 found = best ? static_cast<u64>(best) << 32 | ~static_cast<unsigned>(best_id) : 0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) found = max(found, __shfl_xor_sync(kAllLanes, found, offset));
  if (lane == 0) scratch[threadIdx.x / 32] = found;
  __syncthreads();
  found = lane < num_warps ? scratch[lane] : 0;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) found = max(found, __shfl_xor_sync(kAllLanes, found, offset));
  return found;
}

// The mass of all tokens.
__device__ __forceinline__ u64 total_mass(const Row& row, RankShared& shared) {
  const Segment mine = warp_segment(0, row.size);
  u64 mass = 0;
  for_each(row, mine.begin, mine.end, [&](unsigned key, float logit, int) {
    if (key > kMinusInfinityKey) mass += fixed_point(row.weight(logit));
  });
  mass = warp_total(mass);
  if (threadIdx.x % 32 == 0) shared.parts[threadIdx.x / 32][0] = {mass, 0};
  __syncthreads();
  mass = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) mass += shared.parts[w][0].mass;
  __syncthreads();
  return mass;
}

// What is at or above each of shared.thresholds, into shared.found; shared.above is what is at or above `end`, the key
// where reading stops. num_candidates ≥ 0: all keys between are in shared memory.
template <bool kMass>
__device__ __forceinline__ void measure(const Row& row, unsigned end, int num_candidates, RankShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  __syncthreads();  // behind the writes of the thresholds
  unsigned thresholds[kThresholds], count[kThresholds];
  u64 mass[kThresholds];
#pragma unroll
  for (int j = 0; j < kThresholds; ++j) thresholds[j] = shared.thresholds[j], mass[j] = 0, count[j] = 0;
  const auto add = [&](unsigned key, float logit, int) {
    if (key < thresholds[0] || key >= end) return;
    const u64 more = kMass ? fixed_point(row.weight(logit)) : 0;
#pragma unroll
    for (int j = 0; j < kFewThresholds; ++j)
      if (key >= thresholds[j]) mass[j] += more, count[j] += 1;
    if (key < thresholds[kFewThresholds]) return;  // so is nearly all of a row, and then a warp is done
#pragma unroll
    for (int j = kFewThresholds; j < kThresholds; ++j)
      if (key >= thresholds[j]) mass[j] += more, count[j] += 1;
  };
  if (num_candidates >= 0) {
    for (int i = threadIdx.x; i < num_candidates; i += blockDim.x)
      add(shared.candidates[i], value_of(shared.candidates[i]), 0);
  } else {
    const Segment mine = warp_segment(0, row.size);
    for_each<2>(row, mine.begin, mine.end, add);
  }
#pragma unroll
  for (int j = 0; j < kThresholds; ++j) {
    mass[j] = warp_total(mass[j]);
    count[j] = warp_total(count[j]);
    if (lane == 0) shared.parts[warp][j] = {mass[j], count[j]};
  }
  __syncthreads();
  for (int j = warp; j < kThresholds; j += num_warps) {
    const Measure part = lane < num_warps ? shared.parts[lane][j] : Measure{0, 0};
    const u64 all = warp_total(part.mass);
    const unsigned number = warp_total(part.count);
    if (lane == 0) shared.found[j] = {all + shared.above.mass, number + shared.above.count};
  }
  __syncthreads();
}

// Puts the keys of [begin, end), at most kCandidates, into shared memory, in any order.
__device__ __forceinline__ int collect(const Row& row, unsigned begin, unsigned end, RankShared& shared) {
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  const Segment mine = warp_segment(0, row.size);
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  for_each(row, mine.begin, mine.end, [&](unsigned key, float, int) {
    const bool chosen = key >= begin && key < end;
    const unsigned votes = __ballot_sync(kAllLanes, chosen);
    if (votes == 0) return;
    unsigned place = 0;
    if (threadIdx.x % 32 == 0) place = atomicAdd(&shared.num_candidates, static_cast<unsigned>(__popc(votes)));
    place = __shfl_sync(kAllLanes, place, 0) + __popc(votes & lower_lanes);
    if (chosen) shared.candidates[place] = key;
  });
  __syncthreads();
  return shared.num_candidates;
}

// The lowest and highest of the keys in [begin, end), into shared.
__device__ __forceinline__ void find_extremes(const Row& row, unsigned begin, unsigned end, RankShared& shared) {
  if (threadIdx.x == 0) shared.lowest = ~0u, shared.highest = 0;
  __syncthreads();
  unsigned lowest = ~0u, highest = 0;
  const Segment mine = warp_segment(0, row.size);
  for_each(row, mine.begin, mine.end, [&](unsigned key, float, int) {
    if (key >= begin && key < end) lowest = min(lowest, key), highest = max(highest, key);
  });
  lowest = __reduce_min_sync(kAllLanes, lowest), highest = __reduce_max_sync(kAllLanes, highest);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.lowest, lowest), atomicMax(&shared.highest, highest);
  __syncthreads();
}

// The next thresholds within (low, high): in even steps of the value, as logits spread, or of the key. One thread.
__device__ __forceinline__ void place_thresholds(const Row& row, unsigned low, unsigned high, bool by_value, float unit,
                                                 RankShared& shared) {
  const unsigned span = high - low;
  const float last = value_of(high - 1);
  const float first = fminf(fmaxf(value_of(low), row.best_logit - kFarthest * unit), last);
  for (int j = 0; j < kThresholds; ++j) {
    const float value = first + (last - first) * (0.125f * (j + 1));
    shared.thresholds[j] = by_value ? min(max(key_of(value), low), high)
                                    : low + (span >> 3) * (j + 1) + ((span & 7) * (j + 1) >> 3);
  }
}

// The shortest head of the ranking of the keys from `lowest` on, and of `more` behind them, that holds what is wanted:
// kMass: `share` of all mass; otherwise num_wanted tokens. key: that of the last token of the head, or lowest − 1 if it
// is one of `more`; missing: how much of what is wanted is not above that key, at least 1.
struct Head {
  unsigned key;
  u64 missing;
};
template <bool kMass>
__device__ __forceinline__ Head find_head(const Row& row, unsigned lowest, u64 more, unsigned num_wanted, double share,
                                          RankShared& shared) {
  const float below[kThresholds] = {0.0f, 20.0f, 14.0f, 10.0f, 7.0f, 4.0f, 2.0f};  // the best: where tokens often are
  const float unit = kMass ? kLog2E / row.scale : 2.0f;
  unsigned low = lowest, high = row.best + 1;  // the key is in [low, high)
  int num_candidates = -1;
  __syncthreads();  // behind the reads of another search
  if (threadIdx.x == 0) {
    shared.above = {0, 0};
    for (int j = 0; j < kThresholds; ++j)
      shared.thresholds[j] = j == 0 ? lowest : min(max(key_of(row.best_logit - below[j] * unit), lowest), row.best);
  }
  measure<kMass>(row, high, num_candidates, shared);
  if (kMass) {
    const u64 total = shared.found[0].mass + more;
    const u64 wanted = min(max(static_cast<u64>(ceil(share * static_cast<double>(total))), 1ull), total);
    if (shared.found[0].mass < wanted) return {lowest - 1, wanted - shared.found[0].mass};
    if (threadIdx.x == 0) shared.wanted = wanted;
    __syncthreads();
  }
  unsigned num_from_low = 0;
  for (int round = 0;; ++round) {
    const u64 wanted = kMass ? shared.wanted : num_wanted;
    Measure above = shared.above;  // what is at or above high
    for (int j = 0; j < kThresholds; ++j) {
      const Measure found = shared.found[j];
      if ((kMass ? found.mass : found.count) < wanted) {
        high = shared.thresholds[j], above = found;
        break;
      }
      low = shared.thresholds[j], num_from_low = found.count;
    }
    if (num_candidates < 0 && num_from_low - above.count <= kCandidates && high - low > 1)
      num_candidates = collect(row, low, high, shared);
    if (num_candidates < 0 && round >= kRoundsByValue) {  // many equals: between the thresholds there may be no others
      find_extremes(row, low, high, shared);
      low = shared.lowest, high = shared.highest + 1;
    }
    if (high - low <= 1) return {low, wanted - (kMass ? above.mass : above.count)};
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.above = above;
      place_thresholds(row, low, high, round < kRoundsByValue && high - low > 1u << 23, unit, shared);
    }
    measure<kMass>(row, high, num_candidates, shared);
  }
}

// Which id of the kept ones is it at which a running sum in the order of ids passes a number? Tokens above the cut count
// by their mass (if kMass, and if at least min_weight; 0 otherwise), those kept at it by equal_mass. The number is
// `target`, or if kMass the share fraction / 2^24 of the whole. The block has at least 2 warps: each round splits a range
// among them.
template <bool kMass>
__device__ __forceinline__ int find_id(const Row& row, Cut cut, float min_weight, u64 equal_mass, unsigned fraction,
                                       u64 target, RankShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  Measure before{0, 0};  // ids before `begin`: mass above the cut, number at it
  Measure mine{0, 0};
  const auto add = [&](unsigned key, float logit, int) {
    if (key == cut.key) mine.count += 1;
    if (!kMass || key <= cut.key) return;
    const float weight = row.weight(logit);
    if (weight >= min_weight) mine.mass += fixed_point(weight);
  };
  const auto sum = [&](Measure x) { return x.mass + equal_mass * min(x.count, cut.num_equal); };
  int begin = 0, end = row.size;
  bool knows_target = !kMass;
  while (end - begin > kPiece || !knows_target) {
    mine = {0, 0};
    const Segment part = warp_segment(begin, end);
    for_each(row, part.begin, part.end, add);
    const u64 mass = warp_total(mine.mass);
    const unsigned count = warp_total(mine.count);
    if (lane == 0) shared.parts[warp][0] = {mass, count};
    __syncthreads();
    if (!knows_target) {
      Measure all{0, 0};
      for (int w = 0; w < num_warps; ++w) all.mass += shared.parts[w][0].mass, all.count += shared.parts[w][0].count;
      const u64 total = sum(all);
      target = (total >> 24) * fraction + ((total & 0xffffff) * fraction >> 24);
      knows_target = true;
    }
    const Segment whole{begin, end};
    end = begin;  // if nothing passes, which no sums of one row can bring about, the search ends here
    for (int w = 0; w < num_warps; ++w) {
      const Measure next{before.mass + shared.parts[w][0].mass, before.count + shared.parts[w][0].count};
      if (sum(next) > target) {
        const Segment chosen = segment(whole.begin, whole.end, w, num_warps);
        begin = chosen.begin, end = chosen.end;
        break;
      }
      before = next;
    }
    __syncthreads();
  }
  mine = {0, 0};
  Measure steps[4];  // a lane's own ids, up to each of them
  float x[4];
  load_row<float>(row.logits, begin + 4 * lane, end, row.aligned, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int id = begin + 4 * lane + i;
    add(id < end ? key_of(x[i]) : 0u, x[i], id);
    steps[i] = mine;
  }
  Measure upto = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const u64 mass = __shfl_up_sync(kAllLanes, upto.mass, offset);
    const unsigned count = __shfl_up_sync(kAllLanes, upto.count, offset);
    if (lane >= offset) upto.mass += mass, upto.count += count;
  }
  upto.mass += before.mass - mine.mass, upto.count += before.count - mine.count;
  int place = 4;
#pragma unroll
  for (int i = 3; i >= 0; --i)
    if (sum({upto.mass + steps[i].mass, upto.count + steps[i].count}) > target) place = i;
  const int first = __ffs(__ballot_sync(kAllLanes, place < 4)) - 1;
  return begin + 4 * first + __shfl_sync(kAllLanes, place, first);
}
