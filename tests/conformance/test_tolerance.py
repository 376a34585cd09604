"""The one place of tolerances."""

import pytest

from conformance import tolerance
from conformance.suite import cases
from conformance.tolerance import RULE, Tolerance


@pytest.mark.parametrize("reason", ["", " ", "because", "too strict, raised it"])
@pytest.mark.parametrize("numbers", [(3.0, 8.0), (2.0, 9.0), (0.0, 0.0)])
def test_an_override_needs_a_reason_in_words(numbers: tuple[float, float], reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason in words"):
        Tolerance(*numbers, reason)


def test_the_rule_needs_none() -> None:
    assert Tolerance() == RULE
    assert Tolerance(3.0, 8.0, "five words are a reason").factor == 3.0


def test_cases_use_tolerances_of_the_one_file() -> None:
    """None is made in a case file, and every one that is not the rule says why."""
    known = [value for value in vars(tolerance).values() if isinstance(value, Tolerance)]
    for case in cases("cpu") + cases("golden"):
        assert any(case.tolerance is one for one in known), case.name
    assert all(one.reason for one in known if one is not RULE)


def test_limit() -> None:
    assert RULE.limit(1e-3, "float32") == 2e-3 + 8 * 2.0**-24
    assert RULE.limit(0.0, "bfloat16") == 2.0**-8 + 8 * 2.0**-24
    assert RULE.limit(1e-3, "float16") == 2e-3 + 2.0**-11 + 8 * 2.0**-24
    assert tolerance.EXACT.limit(1e-3, "bfloat16") == 0.0
    assert tolerance.EXACT.limit(1e-3, "float32") == 0.0
