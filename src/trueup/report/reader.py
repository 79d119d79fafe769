"""The worst sequences, token by token: each token as a chip that is coloured by its log-ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trueup.evidence.trace import MISSING, TokenTrace
from trueup.gap import GapReport, format_number
from trueup.report.inert import one_line, token_text

MOST_SEQUENCES = 12
MOST_TOKENS = 400
_PROMPT_CHARACTERS = 180
_STRIP_CELLS = 120
#: Fixed, so that two reports can be held side by side: |ℓ| in nats at which the colour deepens.
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chip:
    """One token. ``tone`` is "m1" … "m6" (trainer likes it more), "l1" … "l6" (less), "z" (alike) or "x" (not
    scored); ``facts`` has one "name: value" a line."""

    text: str
    tone: str
    facts: str
    breaks_line: bool


@dataclass(frozen=True, slots=True)
class Passage:
    """One sequence with the part of it that is shown. ``strip`` is the whole of it at a glance: the worst tone of
    each of at most 120 equal parts; ``window`` is the shown part in percent of its length.
    Without the tokens' texts (``has_text``) chips show ids."""

    title: str
    prompt: str
    response: str
    origin: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    chips: tuple[Chip, ...]
    before: int
    after: int
    strip: tuple[str, ...]
    window: tuple[float, float]
    has_text: bool


def passages(report: GapReport, worst: TokenTrace | None) -> list[Passage]:
    """The sequences of ``worst`` in their order, at most ``MOST_SEQUENCES``."""
    if worst is None:
        return []
    total = _total_abs_log_ratio(report)
    return [_passage(worst.block(index, index + 1), total) for index in range(min(len(worst), MOST_SEQUENCES))]


def tone_of(log_ratio: float) -> str:
    """The colour class of a log-ratio.

    >>> tone_of(0.005), tone_of(0.2), tone_of(-5.0), tone_of(math.inf)
    ('z', 'm3', 'l6', 'm6')
    """
    if math.isnan(log_ratio):
        return "x"
    depth = sum(abs(log_ratio) >= step for step in STEPS)
    return f"{'m' if log_ratio > 0 else 'l'}{depth}" if depth else "z"


def _passage(one: TokenTrace, total: float | None) -> Passage:
    train, rollout = one.train_logprobs.astype(np.float64), one.rollout_logprobs.astype(np.float64)
    scored = one.mask & np.isfinite(train) & np.isfinite(rollout)
    log_ratio = np.where(scored, np.subtract(train, rollout, where=scored, out=np.zeros_like(train)), np.nan)
    size = np.nan_to_num(np.abs(log_ratio))
    start, stop = _worst_window(size, MOST_TOKENS)
    tokens, counted, carried = one.num_tokens, int(scored.sum()), float(size.sum())
    facts = [("tokens", f"{tokens:,}" if counted == tokens else f"{tokens:,} ({counted:,} scored)")]
    if counted:
        facts.append(("mean |ℓ|", format_number(carried / counted)))
        facts.append(("largest |ℓ|", format_number(float(size.max()))))
    if total is not None and 0 < carried <= total * (1 + 1e-6):
        facts.append(("share of Σ|ℓ|", f"{carried / total:.1%}"))
    origin = [
        (label, _shown(column[0]))
        for label, column in (
            ("reward", one.reward),
            ("group", one.group),
            ("trained at version", one.train_version),
        )
        if column is not None
    ]
    named = one.token_texts is not None
    return Passage(
        title=_title(one.sequence_id[0]),
        prompt=_excerpt(one.prompt, _PROMPT_CHARACTERS),
        response="" if named else _excerpt(one.response, 2 * _PROMPT_CHARACTERS),
        origin=tuple(origin),
        facts=tuple(facts),
        chips=tuple(_chip(one, index, float(log_ratio[index])) for index in range(start, stop)),
        before=start,
        after=tokens - stop,
        strip=_strip(log_ratio),
        window=(100 * start / tokens, 100 * (stop - start) / tokens) if tokens else (0.0, 100.0),
        has_text=named,
    )


def _chip(one: TokenTrace, index: int, log_ratio: float) -> Chip:
    rollout, train = float(one.rollout_logprobs[index]), float(one.train_logprobs[index])
    text = one.token_texts[index] if one.token_texts is not None else None
    position = int(one.positions[index]) if one.positions is not None else index
    lines = [f"token id: {one.token_ids[index]}", f"position: {position}"]
    reason = _why_not_scored(one, index)
    if reason:
        lines.append(f"not scored: {reason}")
    lines.append(f"log μ (sampler): {format_number(rollout)}")
    lines.append(f"log π (trainer): {format_number(train)}")
    if not reason:
        lines.append(f"ℓ = log π − log μ: {log_ratio:+.4g}".replace("-", "−"))
        lines.append(f"p, sampler → trainer: {_probability(rollout)} → {_probability(train)}")
    for label, column in (("entropy (trainer)", one.entropies), ("entropy (sampler)", one.rollout_entropies)):
        if column is not None and math.isfinite(column[index]):
            lines.append(f"{label}: {format_number(float(column[index]))} nats")
    if one.train_ranks is not None:
        lines.append(f"rank in the trainer: {one.train_ranks[index]}")
    if one.versions is not None:
        lines.append(f"sampled by version: {one.versions[index]}")
    return Chip(
        text=token_text(text) if text is not None else str(one.token_ids[index]),
        tone="x" if reason else tone_of(log_ratio),
        facts="\n".join(lines),
        breaks_line=text is not None and "\n" in str(text),
    )


def _why_not_scored(one: TokenTrace, index: int) -> str:
    if not one.mask[index]:
        return "masked, does not count"
    for side, column in (("sampler", one.rollout_logprobs), ("trainer", one.train_logprobs)):
        value = column[index : index + 1]
        if value.view(np.uint32)[0] == MISSING.view(np.uint32):
            return f"{side} log-probability not recorded"
        if np.isnan(value[0]):
            return f"{side} log-probability is not a number"
        if np.isinf(value[0]):
            return f"{side} log-probability is {format_number(float(value[0]))}"
    return ""


def _worst_window(size: Floats, width: int) -> tuple[int, int]:
    """The ``width`` consecutive tokens that carry the most."""
    if len(size) <= width:
        return 0, len(size)
    sums = np.concatenate([[0.0], np.cumsum(size)])
    start = int(np.argmax(sums[width:] - sums[:-width]))
    return start, start + width


def _strip(log_ratio: Floats) -> tuple[str, ...]:
    tones = []
    for part in np.array_split(log_ratio, min(_STRIP_CELLS, len(log_ratio)) or 1):
        finite = part[np.isfinite(part)]
        tones.append(tone_of(float(finite[np.argmax(np.abs(finite))])) if len(finite) else "x")
    return tuple(tones)


def _total_abs_log_ratio(report: GapReport) -> float | None:
    """Σ|ℓ| of the whole trace, from its mean."""
    for gap in report.gaps:
        if gap.name == "mean_abs_log_ratio" and gap.source == "trueup" and math.isfinite(gap.value):
            return gap.value * gap.n
    return None


def _probability(logprob: float) -> str:
    return format_number(math.exp(min(logprob, 0.0)))


def _title(identifier: Any) -> str:
    """A name as it is; a bare number says what it numbers."""
    return one_line(identifier, limit=80) if isinstance(identifier, str) else f"sequence {identifier}"


def _excerpt(column: npt.NDArray[np.object_] | None, limit: int) -> str:
    return one_line(column[0], limit=limit) if column is not None and isinstance(column[0], str) else ""


def _shown(value: Any) -> str:
    return format_number(float(value)) if isinstance(value, np.floating) else f"{value}"
