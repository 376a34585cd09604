// op         linear, defined by ref/linear.py, and gate_up_act of ref/activation.py in one, of many tokens
//            (for fewer: linear_tiles_sm90.cu)
// maths      z[m, n] = Σ_k x[m, k] · weight[n, k]; y[m, n] = f(z[m, n]) · z[m, size + n]
// tensors    x [num_tokens, in_features] T by x_map in boxes of 128 rows and 64 numbers, weight [2 · size, in_features] T
//            by weight_map in the same; y [num_tokens, size] T. size is a multiple of 8
// a block    is one of a pair that goes through tiles of 256 tokens and 128 numbers of y each: it has 128 of the tokens,
//            and fetches half of the rows of the weight for both, gates the one and what they are multiplied by the other.
//            Warpgroup 0: a thread copies, steps of 64 in kStages buffers; three warps make y of z. Warpgroups 1 and 2
//            have 64 tokens each and leave z in shared memory, so that the next tile's products begin at once
// template   T bf16 or fp16; kActivation f; kStages
// sums       float32, in the order of in_features; one rounding of each z, and one at the end; quotients in f to 2 ulp
// launcher   grid: as many blocks as SMs, an even number; block 384; shared memory kStages · 49152 + 66816 bytes
#include "activation.cuh"
#include "ptx_sm90.cuh"
#include "tile_walk.cuh"
#include "vec.cuh"

constexpr int kGroup = 128;   // threads of a warpgroup
constexpr int kPair = 2;      // blocks
constexpr int kTokens = 128;  // of a block
constexpr int kOuts = 128;    // numbers of y of a token, in a tile
constexpr int kStep = 64;     // numbers of a row in a step: 128 bytes
constexpr int kRows = 64;     // tokens of a warpgroup
constexpr int kGateWarps = 3;

__device__ __forceinline__ unsigned pack2(float low, float high, bf16) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack2(float low, float high, fp16) { return pack_fp16(low, high); }

// Where the 16 bytes number `unit` of row `row` of z lie, in elements: 64 columns after 64 columns, each swizzled.
__device__ __forceinline__ int place(int row, int unit) {
  return (unit / 8 * kRows + row) * 64 + (unit % 8 ^ row % 8) * 8;
}

template <typename T, Activation kActivation, int kStages>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(3 * kGroup, 1)
    linear_gated_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, T* y,
                      int num_tokens, int size, int in_features) {
  constexpr int kXBytes = kTokens * kStep * 2, kHalfBytes = kOuts * kStep * 2, kStageBytes = kXBytes + 2 * kHalfBytes;
  constexpr int kZ = kRows * 2 * kOuts;  // numbers of a warpgroup's z
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);  // so that the compiler knows: one a warp
  const int thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;

  unsigned char* const shared = dynamic_shared<unsigned char>();
  unsigned char* const stages = shared + (-shared_address(shared) & 1023);
  T* const z = reinterpret_cast<T*>(stages + kStages * kStageBytes);
  mbarrier* const full = reinterpret_cast<mbarrier*>(z + 2 * kZ);
  mbarrier *const empty = full + kStages, *const z_full = empty + kStages, *const z_empty = z_full + 2;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 2 * kPair);
    }
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(z_full + half, kGroup / 32);
      mbarrier_init(z_empty + half, kGateWarps);
    }
    fence_barriers_made();
  }
  cluster_barrier();  // the barriers are there, also the other block's

  const int rank = cluster_rank(), pair = blockIdx.x / kPair, num_pairs = gridDim.x / kPair;
  const int num_steps = (in_features + kStep - 1) / kStep;
  const int token_tiles = (num_tokens + kPair * kTokens - 1) / (kPair * kTokens);
  const int out_tiles = (size + kOuts - 1) / kOuts, num_tiles = token_tiles * out_tiles;
  struct Tile {
    int first_token, first_out;  // of this block
  };
  auto find = [&](int number) {  // band after band; in a band, all tokens of some numbers of y, then of the next
    const TilePlace at = tile_at(number, token_tiles, out_tiles);
    return Tile{(at.token_tile * kPair + rank) * kTokens, at.row_tile * kOuts};
  };

  if (warpgroup == 0) {
    give_back_registers<88>();
    if (threadIdx.x == 0) {
      int stage = 0, parity = 1;
      for (int number = pair; number < num_tiles; number += num_pairs) {
        const Tile tile = find(number);
        for (int step = 0; step < num_steps; ++step) {
          mbarrier_wait(empty + stage, parity);  // in both blocks
          unsigned char* const to = stages + stage * kStageBytes;
          mbarrier_arrive_expect(full + stage, kStageBytes);
          copy_box_to_cluster<3>(to + kXBytes + rank * kHalfBytes, weight_map, full + stage, step * kStep,
                                 tile.first_out + rank * size);
          if (number == pair && step == 0) dependency_wait();  // the weights are there before; x is not
          copy_box(to, x_map, full + stage, step * kStep, tile.first_token);
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    } else if (warp > 0) {
      int parity = 0;
      for (int number = pair; number < num_tiles; number += num_pairs, parity ^= 1) {
        const Tile tile = find(number);
        for (int half = 0; half < 2; ++half) {
          mbarrier_wait(z_full + half, parity);
#pragma unroll 2
          for (int i = thread - 32; i < kRows * kOuts / 8; i += 32 * kGateWarps) {
            const int row = i / (kOuts / 8), unit = i % (kOuts / 8);
            const T* const gate = z + half * kZ + place(row, unit);
            float gates[8], ups[8];
            unpack(load16(gate), gates, T{});
            unpack(load16(gate + kRows * kOuts), ups, T{});
#pragma unroll
            for (int j = 0; j < 8; ++j) gates[j] = activation<kActivation, true>(gates[j]) * ups[j];
            const int token = tile.first_token + kRows * half + row, out = tile.first_out + 8 * unit;
            if (token < num_tokens && out < size)
              store16(y + static_cast<index_t>(token) * size + out, pack(gates, T{}));
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(z_empty + half);
        }
      }
    }
    __syncwarp();
    cluster_barrier();  // nobody writes to this block any more
    return;
  }

  take_registers<208>();
  const int me = warpgroup - 1;
  const unsigned long long a = tile_descriptor(stages + me * kRows * kStep * 2, 16, 1024);
  const unsigned long long b = tile_descriptor(stages + kXBytes, 16, 1024);
  T* const my_z = z + me * kZ;
  float sums[kOuts];  // of 8 columns after 8 columns, as mma m16n8k16 has them
  int stage = 0, parity = 0, z_parity = 1;
  auto release = [&](int which) {
    if (thread < kPair) mbarrier_arrive_at(empty + which, thread);
  };
  for (int number = pair; number < num_tiles; number += num_pairs, z_parity ^= 1) {
    int before = 0;
    for (int step = 0; step < num_steps; ++step) {
      mbarrier_wait(full + stage, parity);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k)
        wgmma_k_major(sums, advanced(a, stage * kStageBytes + 32 * k), advanced(b, stage * kStageBytes + 32 * k),
                      step > 0 || k > 0, T{});
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    settled(sums);
    release(before);

    mbarrier_wait(z_empty + me, z_parity);
#pragma unroll
    for (int i = 0; i < kOuts / 8; ++i) {
      unsigned values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = pack2(sums[8 * i + 2 * j], sums[8 * i + 2 * j + 1], T{});
      stmatrix_x4(my_z + place(16 * warp + lane % 16, 2 * i + lane / 16), values);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(z_full + me);
  }
  dependency_launch();
  cluster_barrier();
}
