// Weights of 4 bits in groups as files have them → the order in which kernels read them. engine/packed4.py: pack4, of what
//   gptq_unpack, awq_unpack and ct_unpack of ref/quant make of a file.
// A layer is up to three modules a, b, c of rows_a, rows_b, rows_c rows, multiples of 8, one after the other; gated: a the
//   gates and b what they are multiplied by, 8 rows of each in turn.
// words int32   kGptq [in / 8, rows], kAwq [in, rows / 8], kRows [rows, in / 8]
// zeros int32   kGptq, kAwq [groups, rows / 8], kRows [rows / 8, groups]; null: none. scales S [groups, rows], kRows [rows,
//   groups]. order [in] int32: which column is at each place; null: its own. row_order [rows_a] int32, of a gated layer.
// weight, out_scales, out_zeros: see include/grouped.cuh; all of it is written, 0 beyond the rows and columns.
// repack4: a block owns 64 rows and 64 columns, a warp a tile of 16 rows, a lane its 16 bytes.
// repack4_groups: a thread owns the scale and the zero of a row and group.
// Integers are moved; zeros have zero_offset added, modulo 16; scales are rounded to fp16, once.
// The launcher: repack4 grid (steps of 64 columns, row tiles / 4), block 128; repack4_groups grid (row tiles / 4, groups),
//   block 64.
#include "ptx.cuh"

enum Layout { kGptq, kAwq, kRows };

// The place of a row of the packed weight in a module.
struct Place {
  int part;  // −1: there is none
  int row, num_rows;
};

template <bool kGated>
__device__ __forceinline__ Place find_row(int row, int rows_a, int rows_b, int rows_c, const int* row_order) {
  if (kGated) {
    const int of_half = row / 16 * 8 + row % 8;
    if (of_half >= rows_a) return {-1, 0, 0};
    return {row / 8 % 2, row_order == nullptr ? of_half : row_order[of_half], rows_a};
  }
  if (row < rows_a) return {0, row, rows_a};
  if (row < rows_a + rows_b) return {1, row - rows_a, rows_b};
  if (row < rows_a + rows_b + rows_c) return {2, row - rows_a - rows_b, rows_c};
  return {-1, 0, 0};
}

// By how many bits the number of a row is shifted in a word of neighbours along out.
template <int kLayout>
__device__ __forceinline__ int row_shift(int row) {
  const int i = row % 8;
  return 4 * (kLayout == kAwq ? i / 2 + i % 2 * 4 : i);
}

// The number of a row and a column.
template <int kLayout>
__device__ __forceinline__ unsigned number(const int* words, Place at, int column, int in_features) {
  if (kLayout == kAwq)
    return static_cast<unsigned>(words[static_cast<index_t>(column) * (at.num_rows / 8) + at.row / 8]) >>
               row_shift<kAwq>(at.row) & 15u;
  const index_t place = kLayout == kGptq ? static_cast<index_t>(column / 8) * at.num_rows + at.row
                                         : static_cast<index_t>(at.row) * (in_features / 8) + column / 8;
  return static_cast<unsigned>(words[place]) >> 4 * (column % 8) & 15u;
}

// The numbers of a row and two neighbouring columns, the first of them even, at bits 0 and 16.
template <int kLayout>
__device__ __forceinline__ unsigned two_numbers(const int* words, Place at, int column, const int* order, int in_features) {
  if (order != nullptr)
    return number<kLayout>(words, at, order[column], in_features) |
           number<kLayout>(words, at, order[column + 1], in_features) << 16;
  if (kLayout == kAwq)
    return number<kLayout>(words, at, column, in_features) | number<kLayout>(words, at, column + 1, in_features) << 16;
  const index_t place = kLayout == kGptq ? static_cast<index_t>(column / 8) * at.num_rows + at.row
                                         : static_cast<index_t>(at.row) * (in_features / 8) + column / 8;
  const unsigned both = static_cast<unsigned>(words[place]) >> 4 * (column % 8);
  return (both & 0x0fu) | (both & 0xf0u) << 12;
}

template <int kLayout, bool kGated>
__global__ void __launch_bounds__(128)
    repack4(const int* __restrict__ a, const int* __restrict__ b, const int* __restrict__ c, int rows_a, int rows_b,
            int rows_c, const int* __restrict__ order, const int* __restrict__ row_order, unsigned* weight, int in_features) {
  const int lane = threadIdx.x % 32, tile = 4 * blockIdx.y + threadIdx.x / 32, group = lane / 4, pair = lane % 4;
  const int first = 64 * blockIdx.x + 2 * pair;
  unsigned packed[4] = {0u, 0u, 0u, 0u};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place at = find_row<kGated>(16 * tile + 8 * half + group, rows_a, rows_b, rows_c, row_order);
    if (at.part < 0) continue;
    const int* const words = at.part == 0 ? a : at.part == 1 ? b : c;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int column = first + 16 * j + 8 * k;
        if (column >= in_features) continue;  // all eight neighbours are there, or none
        packed[j] |= two_numbers<kLayout>(words, at, column, order, in_features) << 4 * (half + 2 * k);
      }
  }
  store16(weight + ((static_cast<index_t>(tile) * gridDim.x + blockIdx.x) * 32 + lane) * 4,
          {packed[0], packed[1], packed[2], packed[3]});
}

template <int kLayout, bool kGated, typename S>
__global__ void __launch_bounds__(64)
    repack4_groups(const S* __restrict__ scales_a, const S* __restrict__ scales_b, const S* __restrict__ scales_c,
                   const int* __restrict__ zeros_a, const int* __restrict__ zeros_b, const int* __restrict__ zeros_c,
                   int rows_a, int rows_b, int rows_c, const int* __restrict__ row_order, fp16* out_scales,
                   unsigned char* out_zeros, int zero_offset) {
  const int group = blockIdx.y, num_groups = gridDim.y, i = threadIdx.x;  // row i / 8 of its tile, tile i / 2 % 4, half i % 2
  const int row = 64 * blockIdx.x + i / 2 % 4 * 16 + i % 2 * 8 + i / 8;
  const Place at = find_row<kGated>(row, rows_a, rows_b, rows_c, row_order);
  const index_t to = (static_cast<index_t>(group) * gridDim.x + blockIdx.x) * 64 + i;
  float scale = 0.0f;
  int zero = 0;
  if (at.part >= 0) {
    const S* const scales = at.part == 0 ? scales_a : at.part == 1 ? scales_b : scales_c;
    scale = to_float(scales[kLayout == kRows ? static_cast<index_t>(at.row) * num_groups + group
                                             : static_cast<index_t>(group) * at.num_rows + at.row]);
    if (out_zeros != nullptr) {
      const int* const zeros = at.part == 0 ? zeros_a : at.part == 1 ? zeros_b : zeros_c;
      const index_t word = kLayout == kRows ? static_cast<index_t>(at.row / 8) * num_groups + group
                                            : static_cast<index_t>(group) * (at.num_rows / 8) + at.row / 8;
      zero = (zeros[word] >> row_shift<kLayout>(at.row)) + zero_offset & 15;
    }
  }
  out_scales[to] = from_float<fp16>(scale);
  if (out_zeros != nullptr) out_zeros[to] = static_cast<unsigned char>(zero);
}
