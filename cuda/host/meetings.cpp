// What lanes of a warp do together: shuffles, votes, matrices.
#include <cstring>

#include "ptx.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace host {

#if defined(__F16C__)
float fp16_to_float(unsigned short bits) { return _cvtsh_ss(bits); }
unsigned short float_to_fp16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
float fp16_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = exponent == 31  ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? ldexpf(static_cast<float>(fraction), -24)
                               : ldexpf(static_cast<float>(fraction + 1024), exponent - 25);
  return bits & 0x8000 ? -size : size;
}
unsigned short float_to_fp16(float x) {
  const unsigned short sign = __float_as_uint(x) >> 16 & 0x8000;
  const float size = fabsf(x);
  if (size != size) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  frexpf(size, &exponent);                                   // size < 2^exponent
  const int last = exponent < -13 ? -24 : exponent - 11;     // exponent of the last bit that is kept
  const int steps = static_cast<int>(nearbyintf(ldexpf(size, -last)));  // ties to even
  return static_cast<unsigned short>(sign | (last == -24 ? steps : ((last + 24) << 10) + steps));
}
#endif

float e4m3_to_float(unsigned char bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float size = (bits & 127) == 127 ? NAN
               : exponent == 0     ? ldexpf(static_cast<float>(fraction), -9)
                                   : ldexpf(static_cast<float>(fraction + 8), exponent - 10);
  return bits & 128 ? -size : size;
}

void nothing(unsigned, void* const*) {}

void shuffle(unsigned mask, void* const* arguments) {
  uint64_t values[32];
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) values[lane] = static_cast<Shuffle*>(arguments[lane])->value;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* argument = static_cast<Shuffle*>(arguments[lane]);
    const int source = argument->source & 31;
    if (!(mask >> source & 1)) fault("lane %u reads a shuffle from lane %d, which is not in mask 0x%08x", lane, source, mask);
    argument->value = values[source];
  }
}

void ballot(unsigned mask, void* const* arguments) {
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) result |= static_cast<Vote*>(arguments[lane])->value << lane;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) static_cast<Vote*>(arguments[lane])->result = result;
}

void match(unsigned mask, void* const* arguments) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* mine = static_cast<Vote*>(arguments[lane]);
    mine->result = 0;
    for (unsigned other = 0; other < 32; ++other)
      if (mask >> other & 1 && static_cast<Vote*>(arguments[other])->value == mine->value) mine->result |= 1u << other;
  }
}

template <int kMatrices, bool kTrans>
void ldmatrix(unsigned, void* const* arguments) {
  for (int m = 0; m < kMatrices; ++m) {
    unsigned short matrix[8][8];
    for (int row = 0; row < 8; ++row) memcpy(matrix[row], static_cast<Matrices*>(arguments[8 * m + row])->rows, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const unsigned low = kTrans ? matrix[j][i] : matrix[i][j], high = kTrans ? matrix[j + 1][i] : matrix[i][j + 1];
      static_cast<Matrices*>(arguments[lane])->d[m] = low | high << 16;
    }
  }
}
template void ldmatrix<1, false>(unsigned, void* const*);
template void ldmatrix<2, false>(unsigned, void* const*);
template void ldmatrix<4, false>(unsigned, void* const*);
template void ldmatrix<2, true>(unsigned, void* const*);
template void ldmatrix<4, true>(unsigned, void* const*);

namespace {

typedef float Row __attribute__((vector_size(32)));  // a row of b or d: 8 columns
typedef int IntRow __attribute__((vector_size(32)));

// a [16, kK] and b [kK, 8] from the registers of the warp, d += a · b back into them. The products of a dot product are
// added to 0 in the order of k, then to d.
template <int kK, typename T, typename R, typename Convert>
void multiply(void* const* arguments, Convert convert) {
  constexpr int kPerWord = kK / 8;  // numbers in a register
  using Word = std::conditional_t<kPerWord == 2, unsigned short, unsigned char>;
  T a[16][kK];
  R b[kK] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<Mma*>(arguments[lane]);
    const int group = lane / 4, first = lane % 4 * kPerWord;
    for (int i = 0; i < 4; ++i) {
      Word numbers[kPerWord];
      memcpy(numbers, &mma.a[i], 4);
      for (int j = 0; j < kPerWord; ++j) a[group + i % 2 * 8][first + i / 2 * (kK / 2) + j] = convert(numbers[j]);
    }
    for (int i = 0; i < 2; ++i) {
      Word numbers[kPerWord];
      memcpy(numbers, &mma.b[i], 4);
      for (int j = 0; j < kPerWord; ++j) b[first + i * (kK / 2) + j][group] = convert(numbers[j]);
    }
  }
  R sums[16] = {};
  for (int k = 0; k < kK; ++k)
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) sums[row] += a[row][k] * b[k];
  for (int lane = 0; lane < 32; ++lane) {
    T* d = static_cast<T*>(static_cast<Mma*>(arguments[lane])->d);
    for (int i = 0; i < 4; ++i) d[i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

}  // namespace

void mma_bf16(unsigned, void* const* arguments) {
  multiply<16, float, Row>(arguments, [](unsigned short x) { return __uint_as_float(static_cast<unsigned>(x) << 16); });
}
void mma_fp16(unsigned, void* const* arguments) {
  multiply<16, float, Row>(arguments, [](unsigned short x) { return fp16_to_float(x); });
}
void mma_s8(unsigned, void* const* arguments) {
  multiply<32, int, IntRow>(arguments, [](unsigned char x) { return static_cast<int>(static_cast<signed char>(x)); });
}
void mma_e4m3(unsigned, void* const* arguments) {
  multiply<32, float, Row>(arguments, [](unsigned char x) { return e4m3_to_float(x); });
}

}  // namespace host
