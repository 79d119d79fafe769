"""The first verdict: is the recorded law the law that was sampled?

Two identities split honest noise from everything else before any cause is looked for. If each token was drawn
from the distribution whose probability was recorded as μ, then whatever the trainer's arithmetic does, mean ρ = 1
(F1) and mean k1 >= 0 (F2). Two changes of law pass both, so where the trainer's entropy is recorded, its surprisal
on the sampled tokens must equal its entropy (F3). Book-keeping is looked at first: a shifted or empty column fails
everything, and for a reason of its own. Which of the many causes it is, is not guessed at here.

A heavy tail makes mean ρ treacherous: the rare tokens that would bring it back to 1 may not be in the sample. F1
therefore speaks only when a bounded companion does too, in which the tokens below half stand in for the mass above
two: under noise that treats both sides alike, the mass of ρ above 2 under the sampler is the share of tokens below
1/2 under it. Faults of law move both.

Source: handbook, policy sections 0.1, 4.1 and 6; the bounded companion is our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from trueup.diagnosis import Cause, Clue, Diagnosis
from trueup.evidence.trace import TokenTrace
from trueup.policy.mismatch import cluster_statistic, count_report, lag_correlations, surprisal_gap
from trueup.policy.side_scans import LAGS
from trueup.policy.sums import MismatchSums, scan_chunks
from trueup.stats import ClusterMean

HONEST_NOISE = "honest numerical noise"
LAW_DIFFERS = "sampling law differs from what was recorded"
BOOK_KEEPING = "book-keeping error"
CANNOT_TELL = "cannot tell"

#: A test speaks when chance alone would make it do so once in a thousand honest traces.
ALPHA = 1e-3
#: Smaller departures of mean ρ from 1 (fraction) and of k1 below 0 (nats) than these are rounding in the record.
RATIO_FLOOR, K1_FLOOR = 1e-4, 1e-5
#: Below these a test of a mean is not worth having.
MIN_TOKENS, MIN_CLUSTERS = 200, 8
#: Below this effective sample size mean ρ hangs on tokens that were never sampled (handbook section 6).
MIN_ESS = 0.3
#: Mean log-probabilities must be known to this much (standard error of mean ρ) for a pass to mean something.
MAX_STANDARD_ERROR = 0.05
#: Share of tokens without a usable log-probability, or with a placeholder, that is no accident any more.
BAD_RECORD_SHARE = 0.01
#: A shifted column agrees with its neighbour: correlation there, and how far above that of the same token.
SHIFT_CORRELATION, SHIFT_MARGIN, UNRELATED_CORRELATION = 0.5, 0.2, 0.3
#: Above this k3, rounding alone is an unlikely source (handbook section 1F: 1e-5 to 1e-3 for dense models).
LARGE_K3 = 1e-2

_CONFIRM = {
    HONEST_NOISE: "Score the same sequences again in another precision or batch size: the gap must move with the "
    "arithmetic and with nothing else.",
    LAW_DIFFERS: "Sample again at temperature 1 without top-p, top-k, min-p and penalties, and record the "
    "log-probabilities after all processing: the failed tests must pass.",
    BOOK_KEEPING: "Print one sequence's token ids with both log-probabilities side by side, and check length, "
    "alignment and mask against what the engine returned.",
    CANNOT_TELL: "Record what is listed below and run this again.",
}
_REMEDY = {
    HONEST_NOISE: "None is needed for correctness; higher precision on either side, or batch-invariant kernels, "
    "make it smaller, and truncated importance weights bound its effect.",
    LAW_DIFFERS: "Make the recorded column the law that was sampled (processed log-probabilities, the same "
    "temperature and support in the trainer) before correcting anything with importance weights.",
    BOOK_KEEPING: "Fix the column; no correction can help a ratio between different tokens.",
    CANNOT_TELL: "",
}
_EXPLANATION = {
    HONEST_NOISE: "The tokens were drawn from the distribution whose probabilities were recorded; the trainer "
    "assigns slightly different ones. Rounding, quantisation, other kernels, expert routing and stale weights all "
    "look like this; which of them it is, this verdict does not say.",
    LAW_DIFFERS: "The recorded probabilities are not those that the tokens were drawn with, or the trainer scores "
    "another law than was sampled: temperature, truncation, penalties or a wrong entry on one of the sides.",
    BOOK_KEEPING: "The two columns do not describe the same tokens: a shift, placeholders under the mask, or "
    "values that were never recorded.",
    CANNOT_TELL: "The trace does not hold what it takes to decide.",
}


@dataclass(frozen=True, slots=True)
class _Finding:
    """A clue, and whether its test failed (the honest explanation is in trouble)."""

    clue: Clue
    failed: bool


def diagnose(evidence: TokenTrace | MismatchSums | Iterable[TokenTrace]) -> Diagnosis:
    """The first verdict on a trace (or on chunks of one, or on its sums), with the evidence for and against.

    One of: honest numerical noise; sampling law differs from what was recorded; book-keeping error; cannot tell.
    No probabilities are given: no calibrated model stands behind this verdict yet.
    """
    sums = evidence if isinstance(evidence, MismatchSums) else scan_chunks(evidence)
    counts = count_report(sums)
    record = _record_findings(sums, counts)
    law = _law_findings(sums) if counts["counted_tokens"] else []
    limits = _limits(sums, counts)
    bad_record = [finding.clue for finding in record if finding.failed]
    bad_law = [finding.clue for finding in law if finding.failed]
    good_record = [finding.clue for finding in record if not finding.failed]
    good_law = [finding.clue for finding in law if not finding.failed]

    causes = {
        BOOK_KEEPING: _cause(BOOK_KEEPING, bad_record, good_record),
        LAW_DIFFERS: _cause(LAW_DIFFERS, bad_law, good_law),
        HONEST_NOISE: _cause(HONEST_NOISE, good_law + good_record, bad_law + bad_record),
        CANNOT_TELL: _cause(CANNOT_TELL, limits, []),
    }
    if bad_record:
        verdict, because = BOOK_KEEPING, bad_record[0].statement
    elif bad_law:
        verdict, because = LAW_DIFFERS, bad_law[0].statement
    elif limits:
        verdict, because = CANNOT_TELL, limits[0].statement
    else:
        verdict, because = HONEST_NOISE, _noise_sentence(sums)
    order = [verdict, *(name for name in causes if name != verdict and causes[name].evidence_for)]
    order += [name for name in causes if name not in order]
    return Diagnosis(verdict, because, tuple(causes[name] for name in order), _record_next(sums, counts))


def _cause(name: str, for_: list[Clue], against: list[Clue]) -> Cause:
    identifier = name.replace(" ", "-")
    return Cause(
        identifier, name, _EXPLANATION[name], tuple(for_), tuple(against), None, _CONFIRM[name], _REMEDY[name]
    )


def _record_findings(sums: MismatchSums, counts: dict[str, int]) -> list[_Finding]:
    """F16 and F10: what the columns hold, and whether they are aligned."""
    findings = []
    counted, excluded = counts["counted_tokens"], counts["excluded_tokens"]
    share = excluded / max(counted + excluded, 1)
    kinds = ", ".join(
        f"{counts[f'{side}_{kind}']:,} {side} {label}"
        for side in ("rollout", "train")
        for kind, label in (
            ("missing", "missing"), ("nan", "NaN"), ("minus_infinity", "−inf"), ("sentinel_9999", "−9999"),
        )
        if counts[f"{side}_{kind}"]
    )  # fmt: skip
    statement = (
        f"{share:.2%} of the tokens under the mask have no usable log-probability ({kinds})."
        if kinds
        else "Every token under the mask has two usable log-probabilities."
    )
    findings.append(_Finding(Clue("F16", statement, share, BAD_RECORD_SHARE), share > BAD_RECORD_SHARE))
    placeholders = counts["rollout_placeholder_zero"]
    share = placeholders / max(counted, 1)
    statement = (
        f"{placeholders:,} tokens ({share:.2%}) were recorded with log-probability exactly 0.0 where the trainer "
        "is far from certain: a placeholder looks like this."
        if placeholders
        else "No token was recorded as certain (log-probability exactly 0.0) that the trainer finds uncertain."
    )
    findings.append(_Finding(Clue("F16", statement, share, BAD_RECORD_SHARE), share > BAD_RECORD_SHARE))
    correlations = lag_correlations(sums.lags)
    same = float(correlations[np.flatnonzero(LAGS == 0)[0]])
    if sums.lags[:, 0].max(initial=0) >= MIN_TOKENS and math.isfinite(same):
        best = int(np.nanargmax(correlations))
        lag, agreement = int(LAGS[best]), float(correlations[best])
        shifted = lag != 0 and agreement > SHIFT_CORRELATION and agreement - same > SHIFT_MARGIN
        unrelated = not shifted and same < UNRELATED_CORRELATION
        if shifted:
            statement = (
                f"log π of a token agrees with log μ {abs(lag)} token{'s' if abs(lag) > 1 else ''} "
                f"{'later' if lag > 0 else 'earlier'} (correlation {agreement:.3f}), not with its own "
                f"({same:.3f}): one column is shifted."
            )
        elif unrelated:
            statement = (
                f"The two sides' log-probabilities of the same token hardly agree (correlation {same:.3f}) and no "
                "shift up to three tokens mends it: the columns may belong to different sequences."
            )
        else:
            statement = f"log π and log μ of the same token agree best without a shift (correlation {same:.4f})."
        findings.append(
            _Finding(Clue("F10", statement, same, UNRELATED_CORRELATION), shifted or unrelated),
        )
    return findings


def _law_findings(sums: MismatchSums) -> list[_Finding]:
    """F1, F2 and F3, as far as the trace has what they need."""
    findings = []
    ratio, ell = cluster_statistic(sums, "rho"), cluster_statistic(sums, "ell")
    bounded = cluster_statistic(sums, "rho_bounded")
    totals = sums.totals()
    ess = _effective_sample(totals)
    if ess >= MIN_ESS:
        p = ratio.p_value(1.0)
        tail = p < ALPHA and bounded.p_value(0.0) >= ALPHA
        failed = p < ALPHA and not tail and abs(ratio.mean - 1.0) > RATIO_FLOOR
        findings.append(
            _Finding(
                Clue(
                    "F1",
                    f"Mean ratio ρ is {ratio.mean:.5f}, {_distance(ratio, 1.0)} from the 1 that it must be "
                    f"if the recorded law was sampled ({_chance(p)})."
                    + (
                        " Its bounded companion is balanced: a heavy tail explains the difference." if tail else ""
                    ),
                    ratio.mean,
                    1.0,
                ),
                failed,
            )
        )
    k1 = replace(ell, mean=-ell.mean)
    p = k1.p_value(0.0) / 2 if k1.mean < 0 else 1.0
    findings.append(
        _Finding(
            Clue(
                "F2",
                f"Mean k1 is {k1.mean:.3g} nats ({_distance(k1, 0.0)} from 0); it estimates a divergence, which "
                "cannot be negative if the recorded law was sampled.",
                k1.mean,
                0.0,
            ),
            p < ALPHA and k1.mean < -K1_FLOOR,
        )
    )
    if "entropies" in sums.columns and totals["entropy_n"] > 0:
        gap = surprisal_gap(sums)
        # The trainer's entropy may differ from the sampler's by about the divergence between the two.
        allowed = 2.0 * max((totals["k3"] + totals["k3_over"]) / totals["n"], 0.0)
        excess = replace(gap, mean=math.copysign(max(abs(gap.mean) - allowed, 0.0), gap.mean))
        p = excess.p_value(0.0)
        failed = p < ALPHA and excess.mean != 0.0
        direction = "sharper" if gap.mean < 0 else "flatter"
        findings.append(
            _Finding(
                Clue(
                    "F3",
                    f"Surprisal minus entropy of the trainer is {gap.mean:+.4f} nats ({_distance(gap, 0.0)} from "
                    + (f"0): the sampler was {direction} than the law that is trained." if failed else "0)."),
                    gap.mean,
                    0.0,
                ),
                failed,
            )
        )
    return findings


def _limits(sums: MismatchSums, counts: dict[str, int]) -> list[Clue]:
    """Why a passed test would prove nothing here."""
    limits = []
    counted, clusters = counts["counted_tokens"], len(sums.table)
    if counted < MIN_TOKENS:
        limits.append(Clue("", f"Only {counted:,} tokens can be compared.", counted, MIN_TOKENS))
    if clusters < MIN_CLUSTERS:
        limits.append(
            Clue("", f"The tokens come from only {clusters} {sums.cluster_unit}.", clusters, MIN_CLUSTERS)
        )
    if counted == 0:
        return limits
    totals = sums.totals()
    zeros = totals["zero"] / totals["n"]
    if zeros > 0.999:
        limits.append(
            Clue(
                "F21",
                f"The two columns are equal on {zeros:.1%} of the tokens: either the engines agree bit for "
                "bit, or one column is a copy of the other.",
                float(zeros),
                0.999,
            )
        )
    ess = _effective_sample(totals)
    ratio = cluster_statistic(sums, "rho")
    if ess < MIN_ESS:
        limits.append(
            Clue(
                "F1",
                f"The ratios' effective sample size is {ess:.3f} of n: their mean hangs on tokens that were not "
                "sampled, and says nothing.",
                ess,
                MIN_ESS,
            )
        )
    elif not ratio.standard_error <= MAX_STANDARD_ERROR and zeros <= 0.999:
        limits.append(
            Clue(
                "F1",
                f"Mean ρ is known to ±{ratio.standard_error:.2g} only, too little for a pass to mean something.",
                ratio.standard_error,
                MAX_STANDARD_ERROR,
            )
        )
    return limits


def _record_next(sums: MismatchSums, counts: dict[str, int]) -> tuple[str, ...]:
    wanted = []
    if "entropies" not in sums.columns:
        wanted.append(
            "entropies: the trainer's entropy at each token. A temperature that is missing only in the trainer, "
            "and truncation recorded raw, pass the other two tests."
        )
    if "group" not in sums.columns:
        wanted.append("group: which sequences share a prompt, so that intervals are honest.")
    if "versions" not in sums.columns:
        wanted.append("versions: the weights that sampled each token, to tell staleness from arithmetic.")
    if counts["counted_tokens"] < MIN_TOKENS or len(sums.table) < MIN_CLUSTERS:
        wanted.append(f"more data: at least {MIN_TOKENS:,} tokens from {MIN_CLUSTERS} prompt groups.")
    return tuple(wanted)


def _noise_sentence(sums: MismatchSums) -> str:
    totals = sums.totals()
    k3 = (totals["k3"] + totals["k3_over"]) / totals["n"]
    size = f"mean |ℓ| {totals['ell_abs'] / totals['n']:.3g}, k3 {k3:.3g} nats a token"
    if k3 > LARGE_K3:
        return (
            f"The tokens were drawn from the recorded law, but the gap ({size}) is large for rounding alone: look "
            "at quantisation, stale weights and expert routing."
        )
    return f"The tokens were drawn from the recorded law, and the trainer's differs from it by little ({size})."


def _effective_sample(totals: dict[str, float]) -> float:
    """Effective sample size of the ratios as a share of n."""
    return totals["rho"] ** 2 / (totals["n"] * totals["rho_sq"])


def _chance(p: float) -> str:
    return f"p = {p:.2g}" if p >= 1e-9 else "p < 1e-9"


def _distance(estimate: ClusterMean, expected: float) -> str:
    z = estimate.z(expected)
    return "no standard error" if math.isnan(z) else f"{abs(z):.1f} standard errors"
