// c = a · bᵀ with tensor cores, for tests of the shim: cp.async in two stages, ldmatrix, mma.
// a [num_rows, depth] T, b [num_columns, depth] T, c [num_rows, num_columns] float; depth a multiple of 32.
// A block of 128 threads owns 64 × 64 of c, a warp 32 × 32.
#include "vec.cuh"

constexpr int kTile = 64, kDepth = 32, kRow = kDepth + 8;

template <typename T>
__global__ void __launch_bounds__(128) gemm(const T* a, const T* b, float* c, int num_rows, int num_columns, int depth) {
  __shared__ __align__(16) T a_tile[2][kTile][kRow];
  __shared__ __align__(16) T b_tile[2][kTile][kRow];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_row = blockIdx.y * kTile, first_column = blockIdx.x * kTile;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sums[2][4][4] = {};
  auto load = [&](int stage, int k) {
    for (int i = thread; i < kTile * kDepth / 8; i += 128) {
      const int row = i / (kDepth / 8), column = i % (kDepth / 8) * 8;
      const bool has_row = first_row + row < num_rows, has_column = first_column + row < num_columns;
      cp_async(&a_tile[stage][row][column], a + (has_row ? index_t(first_row + row) * depth + k + column : 0), has_row);
      cp_async(&b_tile[stage][row][column], b + (has_column ? index_t(first_column + row) * depth + k + column : 0),
               has_column);
    }
    cp_async_commit();
  };
  load(0, 0);
  const int num_steps = depth / kDepth;
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % 2;
    if (step + 1 < num_steps) {
      load(1 - stage, (step + 1) * kDepth);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    for (int k = 0; k < kDepth; k += 16) {
      unsigned a_fragment[2][4], b_fragment[4][2];
      for (int i = 0; i < 2; ++i)
        ldmatrix_x4(a_fragment[i], &a_tile[stage][warp_row + i * 16 + lane % 16][k + lane / 16 * 8]);
      for (int j = 0; j < 4; ++j)
        ldmatrix_x2(b_fragment[j], &b_tile[stage][warp_column + j * 8 + lane % 8][k + lane / 8 % 2 * 8]);
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) mma_k16(sums[i][j], a_fragment[i], b_fragment[j], T{});
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j)
      for (int k = 0; k < 4; ++k) {
        const int row = first_row + warp_row + i * 16 + lane / 4 + k / 2 * 8;
        const int column = first_column + warp_column + j * 8 + lane % 4 * 2 + k % 2;
        if (row < num_rows && column < num_columns) c[index_t(row) * num_columns + column] = sums[i][j][k];
      }
}
