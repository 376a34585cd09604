"""How far a candidate may be from the truth: the only place where that is said.

The rule. All errors are taken against ref run in float64, elementwise as conformance.compare defines them:

    error of the candidate  ≤  2 × error of ref run in the storage type  +  floor of the type

where the error of an output is the root mean square over its elements. The middle term knows how hard the inputs are:
cancellation in a long sum or a steep softmax hurts ref in the storage type as much as any other program. The factor 2
is for another order of the sums: a dot product of 64 in one run of additions errs up to 1.6 times as much as one in
eight partial sums (measured).

The largest error of any one element is held to WORST_FACTOR times the same bound, made from the largest error of ref.
A root mean square over many elements is a steady number, the largest of them is luck: over a dozen seeds of every case
two programs of the same quality differ in it by up to 3.9, and 2 × 4 = 8 is twice that.

The floor is FLOOR_ROUNDINGS units of roundoff of the type that is computed in, float32 or wider. It matters where ref
is exact, or nearly, by luck: a softmax over one key, a sum of one product. There a candidate may still round where ref
does not: a scale that is folded into an operand (1), a reciprocal and a product in place of a division (2), a stored
partial result (1), the storing of the answer (1); 8 leaves room for three more. Faults of logic (a wrong mask, head,
slot, scale) stand at 1e-3 and above, a thousand times the floor of float32; the mutants of
tests/conformance/test_the_tests.py are the proof. With 16-bit storage STORED_ROUNDINGS units of roundoff of that type
are added: an op rounds to it once, at its end, and may do so where ref happens to be exact.

A sum on tensor cores, whose running sum is cut off and not rounded: a step of 16 products loses half a unit in the last
place of it at the mean, and all to one side. After j of n steps the sum of products of random signs is normal with
√(j / n) of the row's root mean square, so its size is √(2 / π) · 2/3 = 0.53 of that at the mean; n / 2 · 0.53 roundings
are 68 for 4096 products and 78 for 4688, the longest sum of a case. A gate's product has the error of two sums, √2 · 78
= 110.

Formats, whose goldens have layers of 160 and 13 tokens. Activations of 8 bits: one that lies so near the middle of two
codes that rounding moves it to the other moves y by ‖step · a column of w‖ where ‖y‖ is rms(x) · √160 such columns, and
that of one token in 13: step / rms(x) / √(160 · 13). The largest of 160 normal numbers is about 3 times their root mean
square and has a code of 127, or of 448, where codes are 32 apart: the step is 3 / 127, or 3 / 14, and what it moves
5.2e-4, or 4.7e-3. FORMAT_INT8 lets two activations move, FORMAT_FP8 one of the largest.

Activations in floating point: a model of two layers is about 20 operations one after the other, each a sum of 160 whose
roundings add up to 0.41 · √160 = 5 units, or less: √20 · 6 units are 1.6e-6. The smallest fault, one code of 4 bits off
by one (0.4 of the weights' root mean square) in a matrix of 160 × 160, is 0.4 / 160 = 2.5e-3 of its output.
FORMAT_FLOAT is 60 times the one and a 25th of the other.

Subnormals: NVRTC as CuPy calls it flushes them to zero, NumPy does not. compare divides by at least SMALLEST_NORMAL,
so that a flushed value is off by at most 1 there; ref answers with such values only where whole rows of its output
are subnormal, and no case has such rows.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 2.0
WORST_FACTOR = 4.0
FLOOR_ROUNDINGS = 8.0
STORED_ROUNDINGS = 1.0
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16
MIN_REASON_WORDS = 5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The rule, or an override of it with its reason.

    Raises:
        ValueError: other numbers than those of the rule without a reason in words.
    """

    factor: float = FACTOR
    floor_roundings: float = FLOOR_ROUNDINGS
    reason: str = ""  # why it is not the rule
    stored_roundings: float = STORED_ROUNDINGS
    norm: float | None = None  # in place of the rule: the largest ‖candidate − truth‖ / ‖truth‖ over a whole output

    def __post_init__(self) -> None:
        rule = (FACTOR, FLOOR_ROUNDINGS, STORED_ROUNDINGS, None)
        is_rule = (self.factor, self.floor_roundings, self.stored_roundings, self.norm) == rule
        if not is_rule and len(self.reason.split()) < MIN_REASON_WORDS:
            raise ValueError(f"a tolerance that is not the rule needs a reason in words, found {self.reason!r}")

    def limit(self, yardstick_error: float, storage: str) -> float:
        """The largest error that passes, given that of ref run in the storage type."""
        computed = "float64" if storage == "float64" else "float32"
        floor = self.floor_roundings * UNIT_ROUNDOFF[computed]
        if storage not in ("float64", "float32"):
            floor += self.stored_roundings * UNIT_ROUNDOFF[storage]
        return self.factor * yardstick_error + floor


RULE = Tolerance()
EXACT = Tolerance(
    0.0,
    0.0,
    "the operation only moves values and computes nothing, so every bit must arrive",
    stored_roundings=0.0,
)
MEAN_ROUNDED = Tolerance(
    floor_roundings=4000.0,
    reason="a rounding of the mean moves all of a row alike, in a row whose mean is a thousand times its spread by a "
    "thousand roundings: ref's luck with that one number, which differs by a factor of 15 between seeds, says nothing; "
    "4 of them are three for another order of the sum and one for the division",
)
TENSOR_CORE_SUM = Tolerance(
    floor_roundings=128.0,
    reason="a tensor core cuts its running sum off instead of rounding it, at each of 256 steps of 16 that a sum of "
    "4096 products takes; half a unit in the last place each time is 128 roundings at most, all to one side",
)
DECODED_SUM = Tolerance(
    floor_roundings=128.0,
    reason="sums of int8 products are exact in ref and on tensor cores, so the yardstick is near 0; a target that "
    "decodes the weight cuts its running sum off at each of 293 steps, and a gate's product has the error of two: 110",
)
GOLDEN = Tolerance(
    4.0,
    FLOOR_ROUNDINGS,
    "the stored run takes the angles of rope in float32 where ref takes them in float64, and it is one fixed run on "
    "one machine: 4 leaves room for the yardstick, which moves by about half with the machine's order of sums",
)
FORMAT_FLOAT = Tolerance(
    norm=1e-4,
    reason="two programs decode the same stored weights: 1.6e-6 of roundings, or 2.5e-3 if one code is off by one",
)
FORMAT_INT8 = Tolerance(
    norm=1e-3,
    reason="two activations may be on the other side of an int8 step, by rounding of what comes before: 5.2e-4 each",
)
FORMAT_FP8 = Tolerance(
    norm=5e-3,
    reason="an activation may be on the other side of an fp8 code, by the rounding of what comes before: 4.7e-3",
)
