"""verl's rollout-correction options, as far as its metrics depend on them: weights (IS) and rejection (RS).

verl logs statistics of the weights and masks that its configured options would apply. This module reproduces those
numbers from per-sequence sums; applying corrections to a loss is another module's work.
Source: verl, ``trainer/ppo/rollout_corr_helper.py`` (handbook, policy sections 1A, 1B and 2A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from trueup.errors import InputError
from trueup.policy.layout import SAFETY_BOUND, Extreme, Sum
from trueup.policy.side_scans import token_rejection

Array = npt.NDArray[np.float64]
Level = Literal["token", "sequence"]
Option = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip

#: Per-sequence columns of the weights, whichever their level.
WEIGHT_COLUMNS = (
    "is_weight", "is_weight_sq", "is_high", "is_low", "is_outside",
    "is_seq", "is_seq_sq", "is_seq_high", "is_seq_low",
)  # fmt: skip
#: Per-sequence columns of one rejection option.
OPTION_COLUMNS = (
    "stat", "clipped", "clipped_sq", "high", "low", "masked", "seq_masked",
    "seq", "seq_sq", "seq_high", "seq_low",
)  # fmt: skip
COMBINED_COLUMNS = ("rs_masked", "rs_seq_masked")


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rejection option: keep where ``lower <= statistic <= upper``.

    k1 bounds are ratios of **rollout to train** (the inverse of ρ) and are compared in log space; the bounds of k2
    and k3 are on the statistic itself, from above only.
    """

    option: Option
    upper: float
    lower: float = 0.0

    @property
    def level(self) -> Level:
        """Whether single tokens or whole sequences are rejected."""
        return "token" if self.option.startswith("token") else "sequence"

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) on the statistic; the lower one is −inf for k2 and k3."""
        if self.option.endswith("k1"):
            return math.log(self.lower), math.log(self.upper)
        return -math.inf, self.upper

    @property
    def clip(self) -> tuple[float, float]:
        """What verl clips the statistic to before its standard deviation."""
        low, high = self.bounds
        return (low, high) if self.option.endswith("k1") else (0.0, high)


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """The options whose metrics are reproduced; the defaults are token TIS at 2 with a geometric window of 1e-3.

    ``is_lower`` given means IcePop: weights outside ``[is_lower, is_upper]`` are zero instead of truncated.

    >>> RolloutCorrection.parse(is_level="token", is_threshold="0.5_5", rs="token_k3", rs_threshold="0.1")
    RolloutCorrection(is_level='token', is_upper=5.0, is_lower=0.5, rejections=(Rejection(option='token_k3',
    upper=0.1, lower=0.0),))
    """

    is_level: Level = "token"
    is_upper: float = 2.0
    is_lower: float | None = None
    rejections: tuple[Rejection, ...] = (Rejection("seq_mean_k1", upper=1.001, lower=0.999),)

    @property
    def low(self) -> float:
        """The lower threshold that verl's fractions use: 1 / upper where none is set."""
        return 1.0 / self.is_upper if self.is_lower is None else self.is_lower

    @classmethod
    def parse(
        cls,
        *,
        is_level: str = "token",
        is_threshold: str = "2.0",
        rs: str = "seq_mean_k1",
        rs_threshold: str = "0.999_1.001",
    ) -> RolloutCorrection:
        """Read verl's own spelling: "2.0" or "0.5_5.0"; rejection options and thresholds separated by commas.

        A single k1 bound ``u`` means ``[1/u, u]``. Raises ``InputError`` for what verl would refuse.
        """
        if is_level not in get_args(Level):
            raise InputError(f"is '{is_level}', not one of: token, sequence", field="rollout-is")
        lower, upper = _bounds(is_threshold, field="rollout-is-threshold")
        options = [option.strip() for option in rs.split(",") if option.strip()]
        thresholds = [threshold.strip() for threshold in rs_threshold.split(",") if threshold.strip()]
        if len(thresholds) not in (1, len(options)) and options:
            raise InputError(
                f"has {len(thresholds)} thresholds for {len(options)} options", field="rollout-rs-threshold"
            )
        if len(thresholds) == 1:
            thresholds *= len(options)
        rejections = []
        for option, threshold in zip(options, thresholds, strict=False):
            if option not in get_args(Option):
                known = ", ".join(get_args(Option))
                raise InputError(f"is '{option}', not one of: {known}", field="rollout-rs")
            low, high = _bounds(threshold, field="rollout-rs-threshold")
            if option.endswith("k1"):
                low = 1.0 / high if low is None else low
            elif low is not None:
                raise InputError(f"'{threshold}' has two bounds; {option} takes one", field="rollout-rs-threshold")
            rejections.append(Rejection(cast(Option, option), high, 0.0 if low is None else low))
        return cls(cast(Level, is_level), upper, lower, tuple(rejections))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what ``sequence_columns`` returns."""
        options = tuple(f"{r.option}.{column}" for r in self.rejections for column in OPTION_COLUMNS)
        return WEIGHT_COLUMNS + options + COMBINED_COLUMNS

    @property
    def extremes(self) -> tuple[str, ...]:
        """Names of the per-sequence values of which the report needs the maximum and the minimum."""
        return ("is_weight", "is_seq", *(f"{r.option}.{x}" for r in self.rejections for x in ("stat", "seq")))


def _bounds(text: str, *, field: str) -> tuple[float | None, float]:
    """ "a_b" → (a, b), "b" → (None, b); both positive and in order."""
    try:
        parts = [float(part) for part in text.split("_")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 2 or not all(0.0 < part < math.inf for part in parts) or parts != sorted(parts):
        raise InputError(f"'{text}' is neither a positive bound nor LOWER_UPPER", field=field)
    return (parts[0] if len(parts) == 2 else None), parts[-1]


@dataclass(frozen=True, slots=True)
class SequenceStatistics:
    """``columns[S, len(correction.columns)]`` to be summed; maxima and minima by ``correction.extremes``."""

    columns: Array
    maxima: Array
    minima: Array


def sequence_statistics(
    correction: RolloutCorrection,
    sums: Array,
    extremes: Array,
    *,
    offsets: npt.NDArray[np.int64],
    rollout: npt.NDArray[np.float32],
    train: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_],
) -> SequenceStatistics:
    """Weights and rejections of a block, from the kernel's ``sums`` and ``extremes``.

    Token-level rejection options need a second look at the block's tokens; all others follow from the sums.
    """
    n = sums[:, Sum.N]
    valid = n > 0
    columns: dict[str, Array] = _weight_columns(correction, sums)
    maxima: dict[str, Array] = {}
    minima: dict[str, Array] = {}
    if correction.is_level == "token":
        maxima["is_weight"], minima["is_weight"] = extremes[:, Extreme.WEIGHT_MAX], extremes[:, Extreme.WEIGHT_MIN]
    else:
        maxima["is_weight"] = np.exp(np.minimum(sums[:, Sum.ELL], SAFETY_BOUND))
        minima["is_weight"] = np.exp(sums[:, Sum.ELL])
    maxima["is_seq"] = minima["is_seq"] = columns["is_seq"]

    rejected = np.zeros(len(n), dtype=np.bool_)
    for rule in correction.rejections:
        if rule.level == "token":
            continue
        value = np.where(valid, _sequence_value(rule.option, sums, extremes), 0.0)
        low, high = rule.bounds
        clipped = np.clip(value, *rule.clip)
        above, below = valid & (value > high), valid & (value < low)
        out = above | below
        rejected |= out
        columns |= {
            f"{rule.option}.stat": value * n,
            f"{rule.option}.clipped": clipped * n,
            f"{rule.option}.clipped_sq": clipped**2 * n,
            f"{rule.option}.high": above * n,
            f"{rule.option}.low": below * n,
            f"{rule.option}.masked": out * n,
            f"{rule.option}.seq_masked": out.astype(np.float64),
            f"{rule.option}.seq": value,
            f"{rule.option}.seq_sq": value**2,
            f"{rule.option}.seq_high": above.astype(np.float64),
            f"{rule.option}.seq_low": below.astype(np.float64),
        }
        for kind in ("stat", "seq"):
            maxima[f"{rule.option}.{kind}"] = np.where(valid, value, -np.inf)
            minima[f"{rule.option}.{kind}"] = np.where(valid, value, np.inf)

    token_rules = [rule for rule in correction.rejections if rule.level == "token"]
    kinds = np.array([int(rule.option[-1]) for rule in token_rules], dtype=np.int64)
    bounds = np.array([rule.bounds + rule.clip for rule in token_rules], dtype=np.float64).reshape(-1, 4)
    by_rule = np.zeros((len(n), len(token_rules), 6))
    limits = np.full((len(n), len(token_rules), 2), (-np.inf, np.inf))
    masked = np.zeros(len(n))
    if token_rules:
        token_rejection(offsets, rollout, train, mask, kinds, bounds, by_rule, limits, masked)
    for j, rule in enumerate(token_rules):
        stat, clipped, clipped_sq, high_n, low_n, out_n = by_rule[:, j].T
        value = np.divide(stat, n, out=np.zeros_like(stat), where=valid)
        low, high = rule.bounds
        columns |= {
            f"{rule.option}.stat": stat,
            f"{rule.option}.clipped": clipped,
            f"{rule.option}.clipped_sq": clipped_sq,
            f"{rule.option}.high": high_n,
            f"{rule.option}.low": low_n,
            f"{rule.option}.masked": out_n,
            f"{rule.option}.seq_masked": (out_n > 0).astype(np.float64),
            f"{rule.option}.seq": value,
            f"{rule.option}.seq_sq": value**2,
            f"{rule.option}.seq_high": (valid & (value > high)).astype(np.float64),
            f"{rule.option}.seq_low": (valid & (value < low)).astype(np.float64),
        }
        maxima[f"{rule.option}.stat"], minima[f"{rule.option}.stat"] = limits[:, j, 0], limits[:, j, 1]
        maxima[f"{rule.option}.seq"] = np.where(valid, value, -np.inf)
        minima[f"{rule.option}.seq"] = np.where(valid, value, np.inf)

    combined = np.where(rejected, n, masked)
    columns["rs_masked"] = combined
    columns["rs_seq_masked"] = (combined > 0).astype(np.float64)
    return SequenceStatistics(
        np.stack([columns[name] for name in correction.columns], axis=1),
        np.stack([maxima[name] for name in correction.extremes], axis=1),
        np.stack([minima[name] for name in correction.extremes], axis=1),
    )


def _weight_columns(correction: RolloutCorrection, sums: Array) -> dict[str, Array]:
    """The applied weights, token-weighted and as one mean a sequence (0 for an empty one, as in verl)."""
    n = sums[:, Sum.N]
    valid = n > 0
    if correction.is_level == "token":
        weight, weight_sq = sums[:, Sum.WEIGHT], sums[:, Sum.WEIGHT_SQ]
        high, low = sums[:, Sum.WEIGHT_HIGH], sums[:, Sum.WEIGHT_LOW]
        raw, outside = sums[:, Sum.RHO], high + low
    else:
        log_ratio = sums[:, Sum.ELL]
        ratio = np.exp(np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))
        inside = (ratio >= correction.low) & (ratio <= correction.is_upper)
        truncated = np.minimum(ratio, correction.is_upper)
        applied = truncated if correction.is_lower is None else np.where(inside, ratio, 0.0)
        weight, weight_sq, raw, outside = applied * n, applied**2 * n, ratio * n, ~inside * n
        high = (log_ratio > math.log(correction.is_upper)).astype(np.float64)
        low = (log_ratio < math.log(correction.low)).astype(np.float64)
    mean = np.divide(weight, n, out=np.zeros_like(weight), where=valid)
    raw_mean = np.divide(raw, n, out=np.zeros_like(weight), where=valid)
    return {
        "is_weight": weight,
        "is_weight_sq": weight_sq,
        "is_high": high,
        "is_low": low,
        "is_outside": outside,
        "is_seq": mean,
        "is_seq_sq": mean**2,
        "is_seq_high": (raw_mean > correction.is_upper).astype(np.float64),
        "is_seq_low": (raw_mean < correction.low).astype(np.float64),
    }


def _sequence_value(option: Option, sums: Array, extremes: Array) -> Array:
    """The statistic of a sequence-level option; like verl, of ℓ clamped to ±20."""
    kind = option[-2:]
    if option.startswith("seq_max"):
        # k2 and k3 are convex in ℓ with their minimum at 0: the largest is at the largest or the smallest ℓ.
        ends = np.clip(extremes[:, [Extreme.ELL_MAX, Extreme.ELL_MIN]], -SAFETY_BOUND, SAFETY_BOUND)
        values = 0.5 * ends**2 if kind == "k2" else np.expm1(ends) - ends
        return np.asarray(values.max(axis=1))
    total = {
        "k1": -(sums[:, Sum.ELL] - sums[:, Sum.ELL_OVER]),
        "k2": 0.5 * (sums[:, Sum.ELL_SQ] - sums[:, Sum.ELL_SQ_OVER]),
        "k3": sums[:, Sum.K3],
    }[kind]
    if option.startswith("seq_sum"):
        return total
    return total / np.maximum(sums[:, Sum.N], 1.0)
