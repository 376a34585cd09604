// Activation functions: those of ACTIVATIONS in ref/activation.py, in float32.
#pragma once

#include "dtype.cuh"

enum Activation { kSilu, kGelu, kGeluTanh, kRelu, kNone };  // kGelu by erfc; kNone: a kernel that can do without

// kQuick: a quotient may be 2 ulp off, which 16 bits hardly show; the exact one takes long for large divisors.
template <Activation kActivation, bool kQuick = false>
__device__ __forceinline__ float activation(float x) {
  const auto quotient = [](float a, float b) { return kQuick ? __fdividef(a, b) : a / b; };
  if constexpr (kActivation == kSilu) return quotient(x, 1.0f + expf(-x));
  if constexpr (kActivation == kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  if constexpr (kActivation == kGeluTanh) {  // (1 + tanh(z)) / 2 = 1 / (1 + exp(−2z)), which cancels nowhere
    const float z = 0.79788456f * (x + 0.044715f * x * x * x);
    return quotient(x, 1.0f + expf(-2.0f * z));
  }
  if constexpr (kActivation == kRelu) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  return x;
}
