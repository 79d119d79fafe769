"""``mismatch``: how far trainer and sampler are apart on the tokens that were sampled."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

import trueup
from trueup.errors import InputError
from trueup.evidence.trace import TokenTrace
from trueup.gap import Curve, Gap, GapReport
from trueup.policy import layout
from trueup.policy.curves import mismatch_curves
from trueup.policy.frameworks import catalogue
from trueup.policy.layout import Seen, Tally
from trueup.policy.metrics import ExtremeMetric, Metric
from trueup.policy.rollout_correction import RolloutCorrection
from trueup.policy.side_scans import LAG_SCAN_TOKENS, LAGS
from trueup.policy.sums import MAX_VOCABULARY, MismatchSums, extreme_names, scan_chunks, table_columns
from trueup.stats import ClusterMean, bootstrap_totals, cluster_mean, percentile_interval, top_share

Array = npt.NDArray[np.float64]

#: Below this many clusters an interval is rough, and the report says so.
FEW_CLUSTERS = 20
#: Counts that are shares of all tokens, and reported as gaps.
GRIDS = {Seen.ON_BF16_GRID: "bf16", Seen.ON_FP16_GRID: "fp16"}
NO_INTERVAL = "exact extreme of the sample; no interval, since an extreme grows with the sample"


def mismatch(
    trace: TokenTrace | Iterable[TokenTrace],
    *,
    correction: RolloutCorrection | None = None,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> GapReport:
    """Every mismatch metric that the trace's columns allow, each with an interval, and the curves behind them.

    ``trace`` is a ``TokenTrace`` or an iterable of chunks of one. ``correction`` sets the thresholds of verl's
    weight and rejection metrics. Intervals are percentile bootstrap intervals, ``replicates`` resamples of prompt
    groups (of sequences, where the trace has no groups). Source: handbook, policy section 2.

    Raises ``InputError`` when no token counts, or for log-probabilities above zero by more than rounding.

    >>> trace = TokenTrace.from_lists([[1, 2]], [[-0.7, -1.2]], [[-0.7, -1.2]])
    >>> report = mismatch(trace)
    >>> report["mean_abs_log_ratio"].value, report["mean_ratio"].value
    (0.0, 1.0)
    """
    sums = scan_chunks(trace, correction=correction)
    return report_mismatch(sums, replicates=replicates, confidence=confidence, seed=seed)


def report_mismatch(
    sums: MismatchSums, *, replicates: int = 1000, confidence: float = 0.95, seed: int = 0
) -> GapReport:
    """The report of sums that ``scan_trace`` and ``merge`` made; arguments as in ``mismatch``."""
    counts = count_report(sums)
    if counts["counted_tokens"] == 0:
        reasons = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        raise InputError(f"no token can be compared ({reasons})")
    rng = np.random.default_rng(seed)
    metrics = catalogue(sums.correction, sums.columns)
    names = table_columns(sums.correction)
    totals = dict(zip(names, sums.table.total()[:, None], strict=True))
    formulas = [metric for metric in metrics if isinstance(metric, Metric)]
    low, high = _intervals(formulas, names, sums, replicates=replicates, confidence=confidence, rng=rng)
    unit = sums.cluster_unit
    method = f"bootstrap of {len(sums.table)} {unit}, {confidence:.0%}, percentile"
    extremes = _extremes(sums)

    gaps: list[Gap] = []
    row = 0
    for metric in metrics:
        n = int(totals[metric.count][0])
        if isinstance(metric, ExtremeMetric):
            gaps.append(_extreme_gap(metric, extremes, n))
            continue
        gaps.append(_metric_gap(metric, totals, n, low[row], high[row], method))
        row += 1
    own = sum(gap.source == "trueup" for gap in gaps)
    gaps[own:own] = [*_identity_gaps(sums, unit), *_concentration_gaps(sums), *_record_gaps(sums, counts)]

    return GapReport(
        gaps=tuple(gaps),
        curves=(
            _histogram_curve(sums.histogram),
            _lag_curve(sums.lags),
            *mismatch_curves(sums, replicates=replicates, confidence=confidence, rng=rng),
        ),
        counts=counts,
        warnings=_warnings(sums, unit),
        provenance={
            "trueup": trueup.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seed": seed,
            "replicates": replicates,
            "confidence": confidence,
            "cluster": unit,
            "clusters": len(sums.table),
            "columns": sorted(sums.columns),
            "rollout_correction": asdict(sums.correction),
        },
    )


def cluster_statistic(sums: MismatchSums, column: str, count: str = "n") -> ClusterMean:
    """The mean of a column over its unit with its cluster-robust standard error."""
    return cluster_mean(sums.by_cluster(column), sums.by_cluster(count))


def surprisal_gap(sums: MismatchSums) -> ClusterMean:
    """Mean surprisal minus mean entropy of the trainer, over tokens that have both, cluster-robust."""
    difference = sums.by_cluster("entropy_surprisal") - sums.by_cluster("entropy")
    return cluster_mean(difference, sums.by_cluster("entropy_n"))


def lag_correlations(lags: Array) -> Array:
    """Correlation of log π_t with log μ_{t + lag} for each of ``LAGS``; NaN where undefined."""
    n, x, y, xx, yy, xy = lags.T
    with np.errstate(invalid="ignore", divide="ignore"):
        covariance = xy - x * y / n
        spread = np.maximum(xx - x * x / n, 0.0) * np.maximum(yy - y * y / n, 0.0)
        return np.asarray(covariance / np.sqrt(spread))


def count_report(sums: MismatchSums) -> dict[str, int]:
    """What was met in the data: tokens that count, and every exclusion and oddity by name."""
    tallies = {entry.name.lower(): int(sums.tallies[entry]) for entry in Tally}
    sequences, batch = (int(sums.by_cluster(column).sum()) for column in ("seqs", "batch"))
    counts = {
        "sequences": batch,
        "empty_sequences": batch - sequences,
        "tokens": tallies["tokens"],
        "masked_tokens": tallies["masked"],
        "excluded_tokens": tallies["excluded"],
        "counted_tokens": tallies["tokens"] - tallies["masked"] - tallies["excluded"],
    }
    for side, label in enumerate(("rollout", "train")):
        counts |= {
            f"{label}_{entry.name.lower()}": int(sums.counts[side, entry]) for entry in Seen if entry not in GRIDS
        }
    counts["rollout_placeholder_zero"] = tallies["rollout_placeholder"]
    if "entropies" in sums.columns:
        counts["entropy_unusable"] = tallies["entropy_unusable"]
    return counts


def _intervals(
    metrics: list[Metric],
    names: tuple[str, ...],
    sums: MismatchSums,
    *,
    replicates: int,
    confidence: float,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Bounds of every metric, NaN where a resample leaves it undefined or there is one cluster only."""
    if len(sums.table) < 2 or replicates < 1:
        undefined = np.full(len(metrics), np.nan)
        return undefined, undefined
    samples = []
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for batch in bootstrap_totals(sums.table.sums, replicates=replicates, rng=rng):
            columns = dict(zip(names, batch.T, strict=True))
            samples.append(np.stack([metric.formula(columns) for metric in metrics], axis=1))
        return percentile_interval(np.concatenate(samples), confidence=confidence)


def _metric_gap(metric: Metric, totals: Mapping[str, Array], n: int, low: float, high: float, method: str) -> Gap:
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(metric.formula(totals)[0])
        train = float(metric.train(totals)[0]) if metric.train else None
        infer = float(metric.infer(totals)[0]) if metric.infer else None
    bounded = math.isfinite(low) and math.isfinite(high)
    return Gap(
        name=metric.name,
        value=value,
        low=low if bounded else None,
        high=high if bounded else None,
        n=n,
        unit=metric.unit,
        train=train,
        infer=infer,
        worse=metric.worse,
        method=method if bounded else f"no interval: undefined for some resamples ({method})",
        note=metric.note,
        label=metric.label,
        source=metric.source,
    )


def _extreme_gap(metric: ExtremeMetric, extremes: Mapping[str, tuple[float, float]], n: int) -> Gap:
    smallest, largest = extremes[metric.extreme]
    return Gap(
        name=metric.name,
        value=largest if metric.largest else smallest,
        low=None,
        high=None,
        n=n,
        unit=metric.unit,
        worse="higher" if metric.largest else "lower",
        method=NO_INTERVAL,
        note=metric.note,
        label=metric.label,
        source=metric.source,
    )


def _extremes(sums: MismatchSums) -> dict[str, tuple[float, float]]:
    """(minimum, maximum) by name, with those that follow from others."""
    extremes = {
        name: (float(smallest), float(largest))
        for name, smallest, largest in zip(extreme_names(sums.correction), sums.minima, sums.maxima, strict=True)
    }
    # k3 is convex in ℓ with its minimum at 0: its largest value is at the largest or the smallest ℓ.
    ends = np.array(extremes["ell"])
    with np.errstate(over="ignore"):
        extremes["k3"] = (math.nan, float(np.max(np.expm1(ends) - ends)))
    for name in ("is_seq", *(f"{rule.option}.seq" for rule in sums.correction.rejections)):
        ideal = 1.0 if name == "is_seq" else 0.0
        smallest, largest = extremes[name]
        extremes[f"{name}_deviation"] = (math.nan, max(abs(smallest - ideal), abs(largest - ideal)))
    return extremes


def _identity_gaps(sums: MismatchSums, unit: str) -> list[Gap]:
    """The two identities and the surprisal test as z-scores (handbook F1, F2, F3), cluster-robust."""
    ratio, ell = cluster_statistic(sums, "rho"), cluster_statistic(sums, "ell")
    totals = sums.totals()
    n = int(totals["n"])
    mean, variance = totals["rho"] / n, max(totals["rho_sq"] / n - (totals["rho"] / n) ** 2, 0.0)
    method = f"cluster-robust over {ratio.clusters} {unit}; a z-score is its own interval"
    gaps = [
        Gap(
            "mean_ratio_z", ratio.z(1.0), None, None, n, "standard errors", method=method,
            label="F1: mean ratio against 1", note=f"standard error {ratio.standard_error:.3g}",
        ),
        Gap(
            "mean_ratio_z_independent", ClusterMean(mean, math.sqrt(variance / n), n).z(1.0), None, None, n,
            "standard errors", method="tokens taken as independent; a z-score is its own interval",
            label="F1 as if tokens were independent", note=f"standard error {math.sqrt(variance / n):.3g}",
        ),
        Gap(
            "mean_k1_z", -ell.z(0.0), None, None, n, "standard errors", worse="lower", method=method,
            label="F2: mean k1 against 0 (must not be negative)",
        ),
    ]  # fmt: skip
    if "entropies" in sums.columns:
        surprisal = surprisal_gap(sums)
        gaps.append(
            Gap(
                "surprisal_gap_z", surprisal.z(0.0), None, None, int(totals["entropy_n"]), "standard errors",
                method=method, label="F3: surprisal against entropy",
            )
        )  # fmt: skip
    return gaps


def _concentration_gaps(sums: MismatchSums) -> list[Gap]:
    """Who carries Σ|ℓ|: the top tokens, sequences and token ids."""
    by_size = sums.histogram.sum(axis=0)
    # Within a bin |ℓ| counts as its middle: at most a sixteenth off.
    edges = layout.RATIO_BINS.edges
    middle = np.append(0.5 * (edges[:-2] + edges[1:-1]), edges[-2])
    middle[0] = 0.0
    total = sums.totals()["ell_abs"]
    ids = np.sort(sums.by_id)[::-1]
    shares = {
        "top_1pct_token_share": (
            top_share(by_size, by_size * middle, 0.01),
            "share of Σ|ℓ| on the worst 1% of tokens",
            "from log-spaced bins of |ℓ|, exact to a bin's width; no interval",
        ),
        "top_1pct_sequence_share": (
            top_share(sums.sequence_histogram[:, 0], sums.sequence_histogram[:, 1], 0.01),
            "share of Σ|ℓ| in the worst 1% of sequences",
            "from log-spaced bins of Σ|ℓ|, exact to a bin's width; no interval",
        ),
        "top_10_token_id_share": (
            float(ids[:10].sum() / total) if total > 0 else math.nan,
            "share of Σ|ℓ| on the ten worst token ids",
            f"exact for ids below {MAX_VOCABULARY:,}; no interval, since the ids are chosen after looking",
        ),
    }
    return [
        Gap(name, share, None, None, int(by_size.sum()), "fraction", worse="higher", method=method, label=label)
        for name, (share, label, method) in shares.items()
    ]


def _record_gaps(sums: MismatchSums, counts: dict[str, int]) -> list[Gap]:
    """How the values were recorded: shift against each other, and the precision they were stored in."""
    correlations = lag_correlations(sums.lags)
    zero = int(np.argmin(np.abs(LAGS)))
    method = f"first {LAG_SCAN_TOKENS} tokens of each sequence; no interval"
    gaps = [
        Gap(
            "log_prob_correlation", float(correlations[zero]), None, None, int(sums.lags[zero, 0]), "",
            worse="lower", method=method, label="correlation of log π and log μ, same token",
        ),
    ]  # fmt: skip
    if np.any(np.isfinite(correlations)):
        best = int(np.nanargmax(correlations))
        gaps.append(
            Gap(
                "best_lag", float(LAGS[best]), None, None, int(sums.lags[best, 0]), "tokens", method=method,
                label="shift of log μ that agrees best with log π", note=f"correlation {correlations[best]:.4f}",
            )
        )  # fmt: skip
    usable = max(counts["counted_tokens"], 1)
    for entry, grid in GRIDS.items():
        infer, train = (int(sums.counts[side, entry]) / usable for side in (0, 1))
        gaps.append(
            Gap(
                f"{grid}_grid_fraction", infer - train, None, None, usable, "fraction", train=train, infer=infer,
                method="exact count; no interval", label=f"values that {grid} represents exactly",
                note="near 1: stored or computed in that precision",
            )
        )  # fmt: skip
    return gaps


def _histogram_curve(histogram: Array) -> Curve:
    """Share of tokens by signed ℓ, from the most negative bin to the most positive."""
    # Two of the kernel's bins make one of the curve's: four an octave are enough for the eye.
    pairs = histogram[:, 1:].reshape(2, -1, 2).sum(axis=2)
    counts = np.concatenate([histogram[:, :1], pairs], axis=1)
    edges = np.concatenate([layout.RATIO_BINS.edges[:1], layout.RATIO_BINS.edges[1::2]])
    total = counts.sum()
    # Bin 0 holds |ℓ| below the smallest edge, in practice the exact zeros: shown as one bin of no width.
    negative = [(-edges[i + 1], -edges[i], counts[1, i]) for i in range(len(edges) - 2, 0, -1)]
    middle = [(0.0, 0.0, counts[0, 0] + counts[1, 0])]
    positive = [(edges[i], edges[i + 1], counts[0, i]) for i in range(1, len(edges) - 1)]
    bins = [entry for entry in (*negative, *middle, *positive) if entry[2] > 0]
    return Curve(
        name="log_ratio_histogram",
        x="ℓ = log π_train − log μ_rollout (nats)",
        unit="share of tokens",
        left=tuple(float(entry[0]) for entry in bins),
        right=tuple(float(entry[1]) for entry in bins),
        n=tuple(int(entry[2]) for entry in bins),
        value=tuple(float(entry[2] / total) for entry in bins),
        low=(None,) * len(bins),
        high=(None,) * len(bins),
        method="exact counts in log-spaced bins, four an octave of |ℓ|",
        label="distribution of the log-ratio",
    )


def _lag_curve(lags: Array) -> Curve:
    """Correlation of log π of a token with log μ of its neighbours: peaks at 0 unless one column is shifted."""
    none = (None,) * len(LAGS)
    return Curve(
        name="log_prob_correlation_by_lag",
        x="lag of log μ (tokens)",
        unit="correlation",
        left=tuple(float(lag) for lag in LAGS),
        right=tuple(float(lag + 1) for lag in LAGS),
        n=tuple(int(n) for n in lags[:, 0]),
        value=tuple(float(value) for value in lag_correlations(lags)),
        low=none,
        high=none,
        method=f"first {LAG_SCAN_TOKENS} tokens of each sequence; no interval",
        label="correlation of log π with log μ by lag",
    )


def _warnings(sums: MismatchSums, unit: str) -> tuple[str, ...]:
    warnings = []
    clusters = len(sums.table)
    if clusters < 2:
        warnings.append(f"There is one cluster only ({unit}): no interval can be given.")
    elif clusters < FEW_CLUSTERS:
        warnings.append(f"Intervals rest on {clusters} {unit} only: take them as rough.")
    if sums.table.pooled:
        warnings.append(f"There are more than {sums.table.capacity:,} {unit}: they are resampled in random pools.")
    if "group" not in sums.columns:
        warnings.append(
            "The trace has no prompt groups: sequences are taken as independent, and intervals may be too narrow."
        )
    return tuple(warnings)
