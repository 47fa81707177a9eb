"""Numbers and tables as the quality page writes them."""

import math
from collections.abc import Iterable, Sequence

from dasc_jax.evals.quality.cells import EXACT, ArmKey
from dasc_jax.evals.stats import Difference, Estimate

NONE = "–"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned left, the others right."""
    marks = [":--"] * left + ["--:"] * (len(header) - left)
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NONE
    # -0.0001 rounds to a zero that has no sign.
    value = round(value, digits) + 0.0
    return f"{value:+.{digits}f}" if sign and value else f"{value:.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 3, sign: bool = False) -> str:
    """Brackets around both ends."""
    return f"[{number(low, digits, sign)}, {number(high, digits, sign)}]"


def mean(estimate: Estimate) -> str:
    """A mean with its interval."""
    return f"{number(estimate.mean, 3)} {interval(estimate.low, estimate.high)}"


def difference(paired: Difference | None) -> str:
    """A paired difference with its interval."""
    if paired is None:
        return NONE
    ends = interval(paired.low, paired.high, sign=True)
    return f"{number(paired.mean, 3, True)} {ends}"


def probability(value: float | None) -> str:
    """A p-value; one that is as small as 10,000 resamples can show is written as below."""
    if value is None:
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def arm(key: ArmKey) -> str:
    """An arm as tables call it: dense, nr 16, wr 64 int8, int8."""
    if key == EXACT or key.policy == "cold":
        return key.policy
    if key.quantization and not key.w_max:
        return key.quantization
    words = [key.policy, str(key.w_max), key.quantization]
    return " ".join(word for word in words if word)


def listed(words: Sequence[str]) -> str:
    """Words with commas and a last "and"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
