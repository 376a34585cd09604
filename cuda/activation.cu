// Activation functions, plain and gated. ref.activation: the functions of ACTIVATIONS, gate_up_act.
// act: y = f(x);  gate_up_act: y = f(gate) · up, gate being the first half of a row of gate_up, up the second.
// x [num_rows, size] T or gate_up [num_rows, 2 · size] T, with a stride between rows; y [num_rows, size] T.
// A block owns a piece of a row, and a thread 16 bytes of y.
// T: bf16, fp16, float. kActivation: kSilu, kGelu (by erfc), kGeluTanh, kRelu.
// float32; no sum; y is rounded once, nothing before it.
// The launcher: grid = (num_rows, ⌈size / (threads · kWidth<T>)⌉), any block.
#include "activation.cuh"
#include "vec.cuh"

template <typename T>
__device__ __forceinline__ int piece() {
  return (static_cast<int>(blockIdx.y * blockDim.x) + static_cast<int>(threadIdx.x)) * kWidth<T>;
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(1024) act(const T* x, T* y, int size, index_t x_stride) {
  dependency_launch();
  dependency_wait();
  const index_t row = blockIdx.x;
  const int i = piece<T>();
  float values[kWidth<T>];
  load_row(x + row * x_stride, i, size, is_aligned(x + row * x_stride), values);
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) values[j] = activation<kActivation>(values[j]);
  store_row(y + row * size, i, size, is_aligned(y + row * size), values);
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(1024) gate_up_act(const T* gate_up, T* y, int size, index_t gate_up_stride) {
  dependency_launch();
  dependency_wait();
  const index_t row = blockIdx.x;
  const int i = piece<T>();
  const T* gate = gate_up + row * gate_up_stride;
  const T* up = gate + size;
  float gates[kWidth<T>], ups[kWidth<T>];
  load_row(gate, i, size, is_aligned(gate), gates);
  load_row(up, i, size, is_aligned(up), ups);
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) gates[j] = activation<kActivation>(gates[j]) * ups[j];
  store_row(y + row * size, i, size, is_aligned(y + row * size), gates);
}
