// How a kernel of any signature is named, described and called by a program that knows it only at run time.
#pragma once

#include <utility>

#include "cuda_host.h"
#include "../include/dtype.cuh"

namespace host {

enum Schedule { kInStep, kGreedy, kRandom };

struct Parameter {
  const char* type;  // of the value, or of what a pointer points to
  int is_pointer, is_const;
  int bytes;  // of the value or pointer
};

struct Kernel {
  const char* name;
  void (*invoke)(void** arguments);
  int num_parameters;
  const Parameter* parameters;
};

struct Variable {  // a __shared__ variable
  long long offset;  // from the address of host_kernels
  long long bytes;
};

struct Launch {  // plain C: conformance/host.py makes it
  int kernel;     // index in host_kernels
  dim3 grid, block;
  unsigned long long shared_bytes, seed;
  int schedule;
  unsigned first, stride;  // this library runs blocks first, first + stride, … of the schedule's order
  int num_variables;
  const Variable* variables;
  void** arguments;
};

template <typename T>
struct TypeName {
  static_assert(std::is_trivially_copyable_v<T>);
  static constexpr const char* value = "struct";
};
#define HOST_TYPE(T) \
  template <>        \
  struct TypeName<T> { static constexpr const char* value = #T; };
HOST_TYPE(void)
HOST_TYPE(bool)
HOST_TYPE(char)
HOST_TYPE(signed char)
HOST_TYPE(unsigned char)
HOST_TYPE(short)
HOST_TYPE(unsigned short)
HOST_TYPE(int)
HOST_TYPE(unsigned)
HOST_TYPE(long)
HOST_TYPE(unsigned long)
HOST_TYPE(long long)
HOST_TYPE(unsigned long long)
HOST_TYPE(float)
HOST_TYPE(double)
HOST_TYPE(bf16)
HOST_TYPE(fp16)
HOST_TYPE(e4m3)
#undef HOST_TYPE

template <typename T>
constexpr Parameter parameter_of() {
  using Target = std::remove_pointer_t<T>;
  return {TypeName<std::remove_cv_t<Target>>::value, std::is_pointer_v<T>,
          std::is_pointer_v<T> && std::is_const_v<Target>, sizeof(T)};
}

template <auto kFunction>
struct Caller;
template <typename... A, void (*kFunction)(A...)>
struct Caller<kFunction> {
  static constexpr Parameter parameters[sizeof...(A) + 1] = {parameter_of<A>()..., {}};
  template <size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    kFunction(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
  }
  static void invoke(void** arguments) { call(arguments, std::index_sequence_for<A...>{}); }
  static constexpr Kernel kernel(const char* name) { return {name, invoke, sizeof...(A), parameters}; }
};

}  // namespace host

#define HOST_KERNEL(...) host::Caller<&__VA_ARGS__>::kernel(#__VA_ARGS__)

extern "C" const host::Kernel host_kernels[];
extern "C" const int host_num_kernels;
// A line a parameter: index of the kernel, 1 for a pointer, 1 for one to const, bytes, type.
extern "C" __attribute__((visibility("default"))) const char* host_describe();
extern "C" __attribute__((visibility("default"))) const char* host_launch(const host::Launch* launch);
