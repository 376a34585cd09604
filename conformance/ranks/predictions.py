"""What to expect of two, four and eight H200 on PCIe, before anybody has run them: `dual_stream --predict`.

    compute   prefill: max(FLOPs / (700 TFLOP/s · share), bytes / 4.37 TB/s), decode: bytes / 4.37 TB/s + layers · extra
              of a rank's 1/n of the work (ref.roofline). Share and extra are what one GPU has shown (SHARES, EXTRAS).
    a sum     the quicker of one trip, latency + (n − 1) · S / rate, and of two, 2 · latency + 2 (n − 1)/n · S / rate
              of S bytes: a rank sends its array to all others, or slices, summed by their owners, then the sums
              (ref.collectives). Two ranks send the same in one trip as in two; with n a trip grows without limit, two
              trips towards 2 S. As int8 S is 34/64 of that, and the latency INT8_LATENCY.
    a step    two sums a layer, the gathering of logits (one trip, (n − 1)/n of them), and from a stage to the next
              the hidden states. A step goes through two stages one after the other, so TP4 × PP2 takes as long as TP4
              and has half the weights on a GPU; two steps in flight are not counted.
    dual      two halves of equal pieces, as ref.dual_stream draws them: each as quick as half the whole, under sums
              that take nothing of the GPU from it. Of decoding steps halves read all weights twice: none is predicted.

What may make them wrong: narrower products of eight ranks have a lower share than this; the rate is that of two GPUs at
once, while eight move eight times as much through the host's memory, and between its sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.bench.model_shapes import SHAPES
from engine.errors import ConfigError
from ref.collectives import all_reduce_bytes
from ref.dual_stream import dual, total_time
from ref.model.llama import LlamaConfig, read_llama
from ref.roofline import Hardware, decode_work, kv_bytes_per_token, limit_seconds, num_read_parameters, prefill_work

PROBED = Hardware("H200", 141e9, 4.37e12, 700e12, 0.0)  # what reading, and large products of cuBLAS, reach
RATES = (35e9, 50e9)  # bytes a second each way, both ways in use, two GPUs at once: kernels, copies
LATENCY, INT8_LATENCY = 4.5e-6, 9.4e-6  # seconds of a small sum of two ranks
INT8_BYTES = 34 / 64  # on the wire, of those of 16 bits: 32 numbers and a scale
CONTEXT = 1024  # tokens of each sequence that decodes
PREFILLS, DECODES, RANKS = (512, 2048, 8192), (1, 16, 64), (2, 4, 8)
BITS4 = (4 + 16 / 128 + 4 / 128) / 8  # bytes a weight: its bits, and of a group of 128 a scale and a zero
BF16, INT4 = "", "gptq-int4"
MODELS = (("llama-3.1-70b", BF16), ("qwen2-72b", INT4))

# As one H200 has it, engine/bench/results of 2026-11-30: Llama-3.1-8B in bf16, Qwen2-72B GPTQ-Int4
SHARES = {  # of 700 TFLOP/s, by tokens of a prompt
    BF16: {512: 0.90, 2048: 0.945, 8192: 0.92},
    INT4: {512: 0.86, 2048: 0.86, 8192: 0.85},
}
EXTRAS = {  # seconds a layer beyond reading, by sequences: (measured − limit) / layers
    BF16: {1: 24e-6, 8: 31e-6, 32: 41e-6, 64: 51e-6},
    INT4: {1: 33e-6, 16: 65e-6},
}
# Two H200 without P2P or dual streams, before copies (engine/bench/results, 2026-11-30): ms; µs of a sum by KiB
MEASURED = {("llama-3.1-70b", BF16, 2, 1): {"prefill 512": 97.3, "prefill 2048": 346.0, "decode 1": 18.9}}
MEASURED_SUMS = {16: 4.6, 256: 15.6, 1024: 60.7, 4096: 157.0, 16384: 534.0, 65536: 1957.0}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Milliseconds of a step over tp · pp ranks at a rate of the wire; None: not halved."""

    model: str
    quant: str
    tp: int
    pp: int
    work: str  # "prefill 512": tokens of one prompt; "decode 16": sequences
    gb_per_s: float
    plain: float
    dual: float | None
    int8: float
    dual_int8: float | None
    no_wire: float
    measured: float | None  # plain, where it is known

    @property
    def split(self) -> str:
        return f"TP{self.tp}" + (f" × PP{self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class Work:
    """A step of a model on one GPU of many."""

    config: LlamaConfig
    quant: str
    kind: str  # prefill or decode
    num_tokens: int

    def compute(self, tp: int) -> float:
        """Seconds that a rank's part takes."""
        config, n = self.config, self.num_tokens
        head = config.vocab_size * config.hidden_size
        linear = (num_read_parameters(config) - head) * (BITS4 if self.quant else 2)
        weights = linear + head * 2
        if self.kind == "decode":
            flops, _ = decode_work(config, n, CONTEXT)
            extra = config.n_layers * _nearest(EXTRAS[self.quant], n)
            read = weights + n * CONTEXT * kv_bytes_per_token(config)
            return limit_seconds(flops / tp, read / tp, PROBED) + extra
        flops, _ = prefill_work(config, n)
        reached = replace(PROBED, flops=PROBED.flops * _nearest(SHARES[self.quant], n))
        return limit_seconds(flops / tp, weights / tp, reached)

    def wire_outside(self, tp: int, pp: int, rate: float) -> float:
        """Seconds of what is no sum: logits, and hidden states between stages."""
        rows = self.num_tokens if self.kind == "decode" else 1
        logits = rows * self.config.vocab_size * 2 * (tp - 1) / tp
        hidden = self.num_tokens * self.config.hidden_size * 2
        return LATENCY + logits / rate + (pp - 1) * (LATENCY + hidden / rate)


def _nearest(known: dict[int, float], count: int) -> float:
    """Of the largest count that is known and not above this one, or the least."""
    return known[max((size for size in known if size <= count), default=min(known))]


def sum_seconds(num_elements: int, world_size: int, rate: float, is_int8: bool = False) -> float:
    """Of num_elements numbers of 16 bits over world_size ranks; as int8 where that is quicker."""
    by_trips = []
    for latency, share in ((LATENCY, 1.0), (INT8_LATENCY, INT8_BYTES))[: 1 + is_int8]:
        one = (world_size - 1) * num_elements * 2
        two = max(all_reduce_bytes(num_elements, world_size, 2))
        by_trips += [latency + one * share / rate, 2 * latency + two * share / rate]
    return min(by_trips)


def predict(
    models: Sequence[tuple[str, str]] = MODELS,
    ranks: Sequence[int] = RANKS,
    prefills: Sequence[int] = PREFILLS,
    decodes: Sequence[int] = DECODES,
) -> list[Prediction]:
    """Of each model, split, step and rate.

    Raises:
        ConfigError: a number of ranks among which the KV heads cannot be dealt out, or weights that are not known here.
    """
    found = []
    for model, quant in models:
        if quant not in SHARES:
            raise ConfigError(f"--quant {quant}: predictions are there for {INT4} and for 16 bits (none given)")
        config = read_llama(
            {**SHAPES[model], "architectures": ["LlamaForCausalLM"]}
        )  # as large; few biases are left out
        steps = [("prefill", n) for n in prefills] + [("decode", n) for n in decodes]
        for tp, pp in splits(ranks, config.n_kv_heads):
            works = [Work(config, quant, kind, n) for kind, n in steps]
            found += [_predicted(model, work, tp, pp, rate) for work in works for rate in RATES]
    return found


def splits(ranks: Sequence[int], n_kv_heads: int) -> list[tuple[int, int]]:
    """(TP, PP) of each number of ranks: all TP, and from eight on half of it in two stages too."""
    wrong = [n for n in ranks if n < 2 or n_kv_heads % n]
    if wrong:
        good = ", ".join(str(n) for n in range(2, n_kv_heads + 1) if n_kv_heads % n == 0)
        raise ConfigError(f"--ranks {wrong[0]}: is not among {good}, which share {n_kv_heads} KV heads evenly")
    return [split for n in ranks for split in ([(n, 1), (n // 2, 2)] if n >= 8 else [(n, 1)])]


def _predicted(model: str, work: Work, tp: int, pp: int, rate: float) -> Prediction:
    num_pieces = 2 * work.config.n_layers
    compute, other = work.compute(tp), work.wire_outside(tp, pp, rate)
    numbers = work.num_tokens * work.config.hidden_size
    plain, halved = [], []
    for is_int8 in (False, True):
        plain.append(compute + num_pieces * sum_seconds(numbers, tp, rate, is_int8) + other)
        wire = 2 * sum_seconds(numbers // 2, tp, rate, is_int8)
        halved.append(total_time(dual([compute / num_pieces] * num_pieces, [wire] * num_pieces)) + other)
    has_halves = work.kind == "prefill"
    return Prediction(
        model=model,
        quant=work.quant,
        tp=tp,
        pp=pp,
        work=f"{work.kind} {work.num_tokens}",
        gb_per_s=rate / 1e9,
        plain=plain[0] * 1e3,
        dual=halved[0] * 1e3 if has_halves else None,
        int8=plain[1] * 1e3,
        dual_int8=halved[1] * 1e3 if has_halves else None,
        no_wire=compute * 1e3,
        measured=MEASURED.get((model, work.quant, tp, pp), {}).get(f"{work.kind} {work.num_tokens}"),
    )


def report(found: Sequence[Prediction]) -> str:
    """Tables of milliseconds a step, one a model, and of sums between two ranks beside what was measured."""
    lines = [
        "PREDICTED, ms a step on H200 over PCIe 5 without P2P; no run of more than two GPUs has been seen.",
        "no wire: computing alone; dual: two halves, one's sums under the other's compute; both: that and int8.",
    ]
    for model, quant in dict.fromkeys((one.model, one.quant) for one in found):
        lines += [
            "",
            f"{model} {quant or 'bf16'}",
            *_table([one for one in found if (one.model, one.quant) == (model, quant)]),
        ]
    sizes = MEASURED_SUMS.items()
    lines += ["", "a sum of two ranks, µs", f"{'KiB':<22}" + "".join(f"{kib:>9,}" for kib, _ in sizes)]
    for rate in RATES:
        times = [sum_seconds(kib * 512, 2, rate) * 1e6 for kib, _ in sizes]
        lines.append(f"{f'predicted, {rate / 1e9:g} GB/s':<22}" + "".join(f"{us:>9.1f}" for us in times))
    lines.append(f"{'measured':<22}" + "".join(f"{us:>9.1f}" for _, us in sizes))
    return "\n".join(line.rstrip() for line in lines)


def _table(found: Sequence[Prediction]) -> list[str]:
    kinds = f"{'plain':>8}{'dual':>8}{'int8':>8}{'both':>8}"
    lines = [" " * 32 + "".join(f"  {f'at {rate / 1e9:g} GB/s each way':^32}" for rate in RATES)]
    lines.append(f"{'':<10}{'':<14}{'no wire':>8}  {kinds}  {kinds}  measured, plain beside it")
    for slow, fast in zip(found[::2], found[1::2], strict=True):
        times = "  ".join(
            "".join(
                f"{'-':>8}" if ms is None else f"{ms:>8.1f}" for ms in (one.plain, one.dual, one.int8, one.dual_int8)
            )
            for one in (slow, fast)
        )
        beside = ""
        if slow.measured is not None:
            beside = f"  {slow.measured:>8.1f}, " + ", ".join(
                f"{one.plain / slow.measured - 1:+.1%}" for one in (slow, fast)
            )
        lines.append(f"{slow.split:<10}{slow.work:<14}{slow.no_wire:>8.1f}  {times}{beside}")
    return lines
