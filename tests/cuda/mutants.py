"""Faults to plant in copies of the kernels; test_mutants.py plants them and asks that a case fails."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A copy of cuda/ in which one piece of text of one file, found exactly once, is replaced by another."""

    stem: str  # whose cases must find it
    fault: str  # what is wrong, in words
    file: str  # in cuda/
    old: str
    new: str
    storage: str = "bfloat16"  # of the cases; float32 for what 16 bits are too coarse to show

    def __str__(self) -> str:
        return f"{self.stem}-{self.fault.replace(' ', '-')}"


def mutants(stem: str, file: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(stem, fault, file, old, new) for fault, old, new in faults]


NORMED = "  norm_row<T, kRounds>(values, weights, size, eps);\n  "
ADDED = (  # between a row of x and what is stored of it
    "  add_residual<T, kRounds>(values, residual + row * residual_stride, new_residual + row * new_residual_stride, "
    "size);\n" + NORMED
)
MUTANTS = (
    *mutants(
        "rmsnorm",
        "include/rmsnorm.cuh",
        ("mean over all threads", "static_cast<float>(size) + eps", "static_cast<float>(blockDim.x * 8) + eps"),
        ("eps forgotten", "/ static_cast<float>(size) + eps", "/ static_cast<float>(size)"),
        ("eps outside the root", "static_cast<float>(size) + eps);", "static_cast<float>(size)) + eps;"),
        ("weight forgotten", "*= scale * weight[round][i]", "*= scale"),
        ("sum of x not of squares", "sum += x[round][i] * x[round][i]", "sum += x[round][i]"),
        (
            "shared memory is one float short",
            "float scratch[kMaxWarps];\n  float sum",
            "float scratch[kMaxWarps];\n  scratch[threadIdx.x] = 0.0f;\n  float sum",
        ),
    ),
    *mutants(
        "rmsnorm",
        "rmsnorm.cu",
        (
            "row offset wraps",
            "y + row * size, size, values);\n}\n\n// new",
            "y + static_cast<signed char>(row * size), size, values);\n}\n\n// new",
        ),
        (
            "row of the neighbour",
            f"x + row * x_stride, size, values);\n{NORMED}store_rounds",
            f"x + (row ^ 1) * x_stride, size, values);\n{NORMED}store_rounds",
        ),
        (
            "stride of x is its size",
            f"x + row * x_stride, size, values);\n{ADDED}store_rounds",
            f"x + row * size, size, values);\n{ADDED}store_rounds",
        ),
        ("numbers taken before all are there", "  __syncthreads();\n", ""),
        ("places of the first round", "{places[round].x, ", "{places[0].x, "),
        ("places of a neighbouring piece", "load16(order + piece<T>(round))", "load16(order + (piece<T>(round) ^ 8))"),
        ("halves of a word in one place", "row[from[i] >> 16].bits", "row[from[i] & 0xffffu].bits"),
        ("pairs swapped", "even | odd << 16", "odd | even << 16"),
        ("pieces behind the row", "if (piece<T>(round) >= size) continue;", ""),
        (
            "row of the first in all",
            "store_in_order<T, kRounds>(y + row * size, size, values, places);\n}\n\n",
            "store_in_order<T, kRounds>(y, size, values, places);\n}\n\n",
        ),
    ),
    *mutants(
        "rmsnorm",
        "include/row.cuh",
        (
            "last round lost",
            "for (int round = 0; round < kRounds; ++round) load_row",
            "for (int round = 0; round < (kRounds > 1 ? kRounds - 1 : 1); ++round) load_row",
        ),
        ("residual subtracted", "x[round][i] + other[round][i]", "x[round][i] - other[round][i]"),
        ("rounds overlap", "(round * static_cast<int>(blockDim.x) + ", "(round * static_cast<int>(blockDim.x - 1) + "),
        ("sum not stored", "  store_rounds<T, kRounds>(new_residual, size, x);\n", ""),
    ),
    *mutants(
        "rmsnorm",
        "include/reduce.cuh",
        ("barrier missing", "  __syncthreads();\n", ""),
        ("barrier in a branch", "  __syncthreads();\n", "  if (lane == 0) __syncthreads();\n"),
        ("first offset lost", "offset = kLanes / 2;", "offset = kLanes / 4;"),
        (
            "half of the lanes shuffle",
            "x += __shfl_xor_sync(kAllLanes, x, offset)",
            "x += __shfl_xor_sync(0xffffu, x, offset)",
        ),
        ("a warp too many is read", "lane < num_warps ?", "lane <= num_warps ?"),
        ("a warp too few is read", "lane < num_warps ?", "lane < num_warps - 1 ?"),
        ("every lane writes its own place", "if (lane == 0) scratch[threadIdx.x / 32]", "scratch[threadIdx.x]"),
    ),
    *mutants(
        "rmsnorm",
        "include/vec.cuh",
        ("tail read without a guard", "row[i + j]) : 0.0f", "row[i + j]) : to_float(row[i + j])"),
        ("tail written without a guard", "if (i + j < n) row[i + j] =", "row[i + j] ="),
        (
            "vector taken where it does not fit",
            "  if (aligned && i + kWidth<T> <= n) {\n    unpack",
            "  if (aligned && i < n) {\n    unpack",
        ),
        (
            "vector stored where it does not fit",
            "  if (aligned && i + kWidth<T> <= n) {\n    store16",
            "  if (aligned && i < n) {\n    store16",
        ),
        (
            "alignment not looked at",
            "  if (aligned && i + kWidth<T> <= n) {\n    unpack",
            "  if (i + kWidth<T> <= n) {\n    unpack",
        ),
        ("halves of a word swapped", "pack_bf16(x[2], x[3])", "pack_bf16(x[3], x[2])"),
    ),
    *mutants(
        "layernorm",
        "layernorm.cu",
        ("zeros behind the row count", "if (piece<T>(round) + i < size) squares", "squares"),
        ("scratch used twice", "block_sum(squares, square_scratch)", "block_sum(squares, sum_scratch)"),
        ("mean kept", "x[round][i] -= mean;", ""),
        ("bias of another head", "bias + first_weight", "bias"),
        ("weight of another head", "load_rounds<T, kRounds>(weight + first_weight", "load_rounds<T, kRounds>(weight"),
        ("bias scaled by the weight", "* scale * weight[round][i] + bias[round][i]", "* scale + bias[round][i]"),
    ),
    *mutants(
        "layernorm",
        "include/row.cuh",
        (
            "norm reads the sum unrounded",
            "to_float(from_float<T>(x[round][i] + other[round][i]))",
            "x[round][i] + other[round][i]",
        ),
    ),
    *mutants(
        "activation",
        "activation.cu",
        ("halves swapped", "activation<kActivation>(gates[j]) * ups[j]", "activation<kActivation>(ups[j]) * gates[j]"),
        ("up begins one late", "gate + size;", "gate + size - 1;"),
        ("up read as gates are", "is_aligned(up), ups", "is_aligned(gate), ups"),
        (
            "second block of a row lost",
            "(static_cast<int>(blockIdx.y * blockDim.x)",
            "(static_cast<int>(0 * blockDim.x)",
        ),
    ),
    Mutant(
        "activation",
        "gelu by tanh in place of erfc",
        "include/activation.cuh",
        "return 0.5f * x * erfcf(-0.70710678f * x);",
        "return x / (1.0f + expf(-1.59576912f * (x + 0.044715f * x * x * x)));",
        "float32",
    ),
    Mutant(
        "activation", "silu a little too steep", "include/activation.cuh", "expf(-x)", "expf(-1.0001f * x)", "float32"
    ),
    *mutants(
        "embedding",
        "embedding.cu",
        ("last row is unknown", "id < vocab_size", "id < vocab_size - 1"),
        ("one row too many", "id < vocab_size", "id <= vocab_size"),
        ("negative ids wrap", "id >= 0 && ", ""),
        (
            "offset of 32 bits",
            "static_cast<index_t>(id) * table_stride",
            "static_cast<int>(id * static_cast<int>(table_stride))",
        ),
        ("tail lost", "j < hidden_size && j < i + kWidth<T>", "j < hidden_size - 1 && j < i + kWidth<T>"),
        ("last position is unknown", "position < num_positions", "position < num_positions - 1"),
        (
            "position of the row in place of its own",
            "static_cast<index_t>(position)",
            "static_cast<index_t>(blockIdx.x)",
        ),
        ("position is not added", "sum[j] += place[j]", "sum[j] += 0.0f"),
        ("a part begins with id 0", "token_ids[blockIdx.x] - first;", "token_ids[blockIdx.x];"),
        ("ids of other ranks are 1", "from_float<T>(outside)", "from_float<T>(outside + 1.0f)"),
        ("a number beside the position of ids of other ranks", "sum[j] = outside;", "sum[j] = outside + 1.0f;"),
    ),
    *mutants(
        "attention_logn",
        "attention_logn.cu",
        ("one position late", "position < length ?", "position <= length ?"),
        ("grows before the length", "position < length ?", "position < length / 2 ?"),
        ("keys before the query", "static_cast<float>(position) + 1.0f", "static_cast<float>(position)"),
        ("first token's position", "positions[token]", "positions[0]"),
        ("rows side by side", "q + token * q_stride", "q + token * size"),
        ("tail lost", "if (i >= size) return;", "if (i + kWidth<T> > size) return;"),
    ),
    *mutants(
        "kv_cache",
        "kv_cache_copy.cu",
        ("values from keys", "(blockIdx.z == 0 ? k_from : v_from)", "k_from"),
        ("values over keys", "(blockIdx.z == 0 ? k_to : v_to)", "k_to"),
        ("last block of the source is not there", "src >= num_from", "src >= num_from - 1"),
        ("last block of the target is not there", "dst >= num_to", "dst >= num_to - 1"),
        ("first block is not there", "if (src < 0", "if (src < 1"),
        (
            "last piece lost",
            "for (int n = 0; n < kPieces; ++n)\n      if (first + n * step < size) store16",
            "for (int n = 0; n < kPieces - 1; ++n)\n      if (first + n * step < size) store16",
        ),
        ("tail lost", "j < size && j < first", "j < size - 1 && j < first"),
        (
            "blocks of threads overlap",
            "static_cast<int>(blockIdx.x) * kPieces * step",
            "static_cast<int>(blockIdx.x) * step",
        ),
    ),
    *mutants(
        "rope",
        "rope.cu",
        (
            "turned the other way",
            "a * cos - b * sin, second = b * cos + a * sin",
            "a * cos + b * sin, second = b * cos - a * sin",
        ),
        ("sine of the neighbour", "sin = cos_sin[half + number]", "sin = cos_sin[half + (number ^ 1)]"),
        ("rotates the values too", "if (pieces.rotates && !is_value) rotate", "if (pieces.rotates) rotate"),
        ("norms the values too", "if (has_head && !is_value)", "if (has_head)"),
        (
            "heads of k swapped with v",
            "nullptr : (is_value ? v_cache : k_cache) +",
            "nullptr : (is_value ? k_cache : v_cache) +",
        ),
        ("padding is stored", "to = slot < 0 ? nullptr : (", "to = slot < -1 ? nullptr : ("),
        ("slot counts blocks", "place = slot * n_kv_heads + head;", "place = slot * n_kv_heads + head / 2;"),
        (
            "pieces of the rest overlap",
            "rotary_dim + 2 * kStep * (lane - num_rotating)",
            "rotary_dim + kStep * (lane - num_rotating)",
        ),
        (
            "mean over the rotating part",
            "squares / static_cast<float>(head_dim)",
            "squares / static_cast<float>(rotary_dim)",
        ),
        (
            "lanes without a head leave early",
            "  float low[kWidth<T>] = {}, high[kWidth<T>] = {};\n  if (has_head) {",
            "  float low[kWidth<T>] = {}, high[kWidth<T>] = {};\n  if (!has_head) return;\n  {",
        ),
        ("place of 32 bits", "const index_t place = slot", "const int place = static_cast<int>(slot)"),
        ("sum over all heads of the warp", "warp_sum<kLanes>(squares)", "warp_sum<32>(squares)"),
        ("last pair turned", "if (number >= half) continue;", "if (number >= half - 1) continue;"),
        (
            "weight of the first head",
            "const T* weight = q_weight + head * q_weight_stride;",
            "const T* weight = q_weight;",
        ),
        ("token of the neighbour", "cos_sin + t * rotary_dim", "cos_sin + (t ^ 1) * rotary_dim"),
    ),
)

GEMM = (  # in tests/cuda/kernels/gemm.cu, a kernel with stages, for what those above do not have
    ("a wait too weak", "cp_async_wait<1>", "cp_async_wait<2>"),
    ("the last wait too weak", "cp_async_wait<0>", "cp_async_wait<1>"),
    ("barrier after the wait missing", "    }\n    __syncthreads();\n    for", "    }\n    for"),
    ("barrier before the next copies missing", "    }\n    __syncthreads();\n  }\n", "    }\n  }\n"),
    ("copies not committed", "    cp_async_commit();\n  };", "  };"),
    ("stage not switched", "const int stage = step % 2;", "const int stage = 0;"),
    ("next tile over this one", "load(1 - stage,", "load(stage,"),
    ("fragment of the neighbour", "lane / 8 % 2 * 8", "lane / 16 % 2 * 8"),
    ("rows without a guard", "num_rows, has_column", "num_rows + 1, has_column"),
    ("output without a guard", "row < num_rows && column < num_columns", "row < num_rows + 1 && column < num_columns"),
    ("last step lost", "step < num_steps; ++step", "step < num_steps - 1; ++step"),
    ("half of the depth", "k < kDepth; k += 16", "k < kDepth; k += 32"),
    (
        "halves of a fragment swapped",
        "+ k / 2 * 8;\n        const int column",
        "+ k % 2 * 8;\n        const int column",
    ),
)
