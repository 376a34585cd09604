// CUDA's short vectors, aligned as the GPU's loads of 8 and 16 bytes want them.
#pragma once

#define HOST_VECTOR(T, NAME, ALIGN2, ALIGN4)                         \
  struct alignas(ALIGN2) NAME##2 { T x, y; };                        \
  struct NAME##3 { T x, y, z; };                                     \
  struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                  \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTOR(signed char, char, 2, 4)
HOST_VECTOR(unsigned char, uchar, 2, 4)
HOST_VECTOR(short, short, 4, 8)
HOST_VECTOR(unsigned short, ushort, 4, 8)
HOST_VECTOR(int, int, 8, 16)
HOST_VECTOR(unsigned, uint, 8, 16)
HOST_VECTOR(float, float, 8, 16)
HOST_VECTOR(long long, longlong, 16, 16)
HOST_VECTOR(unsigned long long, ulonglong, 16, 16)
HOST_VECTOR(double, double, 16, 16)
#undef HOST_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
