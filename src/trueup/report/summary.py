"""What both renderers agree on: which numbers come first, what they are called, how a verdict is coloured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trueup.diagnosis import Diagnosis
from trueup.gap import Gap, GapReport, format_interval, format_number

Outcome = Literal["good", "warn", "bad", "open"]

#: Verdict → how it is coloured, and the words that say the same without colour.
_OUTCOMES: dict[str, tuple[Outcome, str]] = {
    "honest numerical noise": ("good", "Expected: the two sides agree up to arithmetic"),
    "sampling law differs from what was recorded": ("warn", "Correct before you trust importance weights"),
    "book-keeping error": ("bad", "Mend the data path first"),
    "cannot tell": ("open", "More evidence is needed"),
}

#: Headline quantities in reading order: name → (words for a hurried reader, value where both sides agree).
_HEADLINES: dict[str, tuple[str, float]] = {
    "mean_abs_log_ratio": ("Mean size of the log-ratio", 0.0),
    "max_abs_log_ratio": ("Largest log-ratio of any token", 0.0),
    "mean_ratio": ("Mean probability ratio, trainer / sampler", 1.0),
    "mean_k1": ("KL from sampler to trainer, k1 estimate", 0.0),
    "mean_k3": ("KL from sampler to trainer, k3 estimate", 0.0),
    "surprisal_gap": ("Trainer's surprisal beyond its own entropy", 0.0),
    "ess_fraction": ("Effective sample size, share of tokens", 1.0),
    "extreme_fraction": ("Tokens whose ratio leaves ½ … 2", 0.0),
    "mean_abs_prob_diff": ("Mean difference in probability", 0.0),
    "prob_pearson": ("Correlation of the two probabilities", 1.0),
}
HEADLINE_COUNT = 8

_COUNTS: dict[str, str] = {
    "tokens": "Tokens",
    "counted_tokens": "Tokens that count",
    "sequences": "Sequences",
    "masked_tokens": "Masked tokens, not counted",
    "excluded_tokens": "Tokens left out: a log-probability cannot be used",
    "empty_sequences": "Sequences without a token that counts",
    "rollout_placeholder_zero": "Recorded as certain (0.0), uncertain for the trainer",
    "entropy_unusable": "Entropy missing or negative",
}
_SIDES = {"rollout": "Sampler's", "train": "Trainer's"}
#: Counts of either side, named ``rollout_…`` and ``train_…``.
_SIDE_COUNTS = {
    "missing": "log-probability not recorded",
    "nan": "log-probability is not a number",
    "minus_infinity": "log-probability is −∞",
    "sentinel_9999": "log-probability is the placeholder −9999",
    "exact_zero": "log-probability exactly 0, kept",
    "clamped_above_zero": "log-probability above 0 by rounding, clamped",
    "below_minus_100": "log-probability below −100, kept",
}
#: What there is, as against what was left out or is odd.
SIZES = ("sequences", "tokens", "counted_tokens")


@dataclass(frozen=True, slots=True)
class Headline:
    """One of the few numbers that matter: ``ideal`` is its value where both sides agree (``None`` if unknown)."""

    gap: Gap
    label: str
    ideal: float | None


def outcome_of(diagnosis: Diagnosis) -> tuple[Outcome, str]:
    """The colour and the words of a verdict; one that this version does not know is left open, without words."""
    return _OUTCOMES.get(diagnosis.verdict, ("open", ""))


def headlines(report: GapReport) -> list[Headline]:
    """The numbers that matter, at most ``HEADLINE_COUNT``; the first ones of a report that has none of them."""
    own = {gap.name: gap for gap in report.gaps if gap.source == "trueup"}
    found = [
        Headline(own[name], own[name].label or words, ideal)
        for name, (words, ideal) in _HEADLINES.items()
        if name in own
    ]
    found = found or [Headline(gap, gap.label or gap.name, None) for gap in report.gaps]
    return found[:HEADLINE_COUNT]


def by_source(report: GapReport) -> dict[str, list[Gap]]:
    """The gaps of each source, trueup's own first, otherwise in the report's order."""
    groups: dict[str, list[Gap]] = {"trueup": []}
    for gap in report.gaps:
        groups.setdefault(gap.source, []).append(gap)
    return {source: gaps for source, gaps in groups.items() if gaps}


def has_interval(gap: Gap) -> bool:
    """Whether both bounds exist and are numbers."""
    return gap.low is not None and gap.high is not None and not math.isnan(gap.low) and not math.isnan(gap.high)


def value_text(gap: Gap) -> str:
    """The value for people, with as many digits as its interval, or its distance from 1, calls for.

    >>> value_text(Gap("mean_ratio", 1.000372, 1.000211, 1.000533, 9, ""))
    '1.00037'
    >>> value_text(Gap("prob_pearson", 0.9999834, None, None, 9, ""))
    '0.999983'
    """
    return _text(gap.value, _decimals(gap))


def interval_text(gap: Gap) -> str:
    """The interval for people, empty where there is none."""
    if gap.low is None or gap.high is None or not has_interval(gap):
        return ""
    decimals = _decimals(gap)
    return (
        format_interval(gap) if decimals is None else f"{_text(gap.low, decimals)} … {_text(gap.high, decimals)}"
    )


def _decimals(gap: Gap) -> int | None:
    """Digits after the point where four significant ones would hide what matters; otherwise ``None``."""
    if not math.isfinite(gap.value) or gap.value == 0:
        return None
    distance = abs(gap.value - 1)
    if gap.low is not None and gap.high is not None and math.isfinite(gap.high - gap.low):
        distance = gap.high - gap.low
    if not 0 < distance < 2e-3 * abs(gap.value):
        return None
    return min(9, max(0, math.ceil(-math.log10(distance) - 1e-6) + 1))


def _text(value: float, decimals: int | None) -> str:
    if decimals is None or not math.isfinite(value):
        return format_number(value)
    return f"{value:.{decimals}f}".replace("-", "−")


def reading(headline: Headline) -> str:
    """What the interval says about the ideal, for the quantities where that is a test; otherwise empty."""
    gap, ideal = headline.gap, headline.ideal
    if ideal is None or gap.low is None or gap.high is None or not has_interval(gap):
        return ""
    # Only where one side of the ideal is impossible; whether the others hold is the verdict's business, which
    # tests them with more care than an interval at the edge does.
    if gap.name == "mean_k1" and gap.high < 0:
        return "below 0, which no KL divergence is"
    return ""


def count_label(name: str) -> str:
    """Plain words for a count.

    >>> count_label("train_nan"), count_label("something_new")
    ("Trainer's log-probability is not a number", 'Something new')
    """
    side, _, kind = name.partition("_")
    if side in _SIDES and kind in _SIDE_COUNTS:
        return f"{_SIDES[side]} {_SIDE_COUNTS[kind]}"
    return _COUNTS.get(name, name.replace("_", " ").capitalize())


def exclusions(report: GapReport) -> tuple[list[tuple[str, int]], list[str]]:
    """What was left out or is odd, as (words, count); and the words for what was looked for and not found."""
    odd = {name: count for name, count in report.counts.items() if name not in SIZES}
    return [(count_label(n), c) for n, c in odd.items() if c], [count_label(n) for n, c in odd.items() if not c]
