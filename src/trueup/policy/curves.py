"""Curves of ℓ against position, probability, entropy, segment, version lag and repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trueup.gap import Curve
from trueup.policy import layout
from trueup.policy.sums import MismatchSums
from trueup.stats import bootstrap_totals, percentile_interval, quantile_groups

Array = npt.NDArray[np.float64]

#: A bin that fewer clusters than this reach gets no interval.
MIN_CLUSTERS = 5
DECILES = 10


@dataclass(frozen=True, slots=True)
class Axis:
    """Where an axis stands in the kernel's table, and how its bins become those of a curve."""

    name: str
    x: str
    start: int
    edges: Array
    deciles: bool = False
    needs: str | None = None


AXES = (
    Axis("position", "position in the response (tokens)", layout.POSITION_AT, layout.POSITION_BINS.edges),
    Axis("probability", "rollout probability, in deciles of tokens", layout.SURPRISAL_AT,
         layout.SURPRISAL_BINS.edges, deciles=True),
    Axis("entropy", "trainer entropy (nats), in deciles of tokens", layout.ENTROPY_AT, layout.SURPRISAL_BINS.edges,
         deciles=True, needs="entropies"),
    Axis("segment", "segment (turn)", layout.SEGMENT_AT, np.arange(layout.NUM_SEGMENTS + 1.0), needs="segments"),
    Axis("version_lag", "version lag (updates)", layout.LAG_AT, np.arange(layout.NUM_LAGS + 1.0),
         needs="versions"),
    Axis("repetition", "token seen before in its sequence", layout.REPETITION_AT, np.arange(3.0)),
)  # fmt: skip

#: How each curve's value follows from n, Σℓ, Σℓ² and Σ|ℓ| of a bin.
STATISTICS: dict[str, tuple[str, Callable[[Array, Array, Array, Array], Array]]] = {
    "mean_abs_log_ratio": ("mean |ℓ|", lambda n, ell, square, size: size / n),
    "mean_log_ratio": ("mean ℓ", lambda n, ell, square, size: ell / n),
    "std_log_ratio": (
        "standard deviation of ℓ",
        lambda n, ell, square, size: np.sqrt(np.maximum(square / n - (ell / n) ** 2, 0.0)),
    ),
}


def mismatch_curves(
    sums: MismatchSums, *, replicates: int, confidence: float, rng: np.random.Generator
) -> tuple[Curve, ...]:
    """Mean |ℓ|, mean ℓ and the standard deviation of ℓ along every axis that the trace's columns allow.

    Intervals: percentile bootstrap of clusters (of at most 128 random pools of them).
    """
    curves: list[Curve] = []
    for axis in AXES:
        if axis.needs is not None and axis.needs not in sums.columns:
            continue
        cells, left, right = _bins_of(axis, sums.curves.sums)
        if cells.shape[1] == 0:
            continue
        curves += _axis_curves(axis, cells, left, right, replicates=replicates, confidence=confidence, rng=rng)
    return tuple(curves)


def _bins_of(axis: Axis, table: Array) -> tuple[Array, Array, Array]:
    """The axis's part of the table ``[R, bins, 4]`` in the curve's bins, with their edges."""
    cells = table[:, axis.start : axis.start + len(axis.edges) - 1]
    left, right = axis.edges[:-1], axis.edges[1:]
    counts = cells[..., 0].sum(axis=0)
    if axis.deciles:
        run = quantile_groups(counts, DECILES)
        first = np.searchsorted(run, np.arange(run[-1] + 1))
        cells = np.add.reduceat(cells, first, axis=1)
        left, right = left[first], np.append(left[first[1:]], right[-1])
        counts = cells[..., 0].sum(axis=0)
    used = counts > 0
    cells, left, right = cells[:, used], left[used], right[used]
    if axis.name == "probability":
        # Bins of surprisal, most probable first, become bins of probability, least probable first.
        cells, left, right = cells[:, ::-1], np.exp(-right[::-1]), np.exp(-left[::-1])
    return cells, left, right


def _axis_curves(
    axis: Axis,
    cells: Array,
    left: Array,
    right: Array,
    *,
    replicates: int,
    confidence: float,
    rng: np.random.Generator,
) -> list[Curve]:
    totals = cells.sum(axis=0)
    reached = (cells[..., 0] > 0).sum(axis=0)
    resampled = np.zeros((0, *totals.shape))
    if len(cells) >= 2 and replicates > 0:
        resampled = np.concatenate(list(bootstrap_totals(cells, replicates=replicates, rng=rng)))
    curves = []
    for name, (label, statistic) in STATISTICS.items():
        low = high = np.full(len(left), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = statistic(*totals.T)
            if len(resampled):
                samples = statistic(*np.moveaxis(resampled, -1, 0))
                low, high = percentile_interval(samples, confidence=confidence)
        bounded = (reached >= MIN_CLUSTERS) & np.isfinite(low) & np.isfinite(high)
        curves.append(
            Curve(
                name=f"{name}_by_{axis.name}",
                x=axis.x,
                unit="nats",
                left=tuple(map(float, left)),
                right=tuple(map(float, right)),
                n=tuple(int(count) for count in totals[:, 0]),
                value=tuple(map(float, value)),
                low=tuple(float(x) if ok else None for x, ok in zip(low, bounded, strict=True)),
                high=tuple(float(x) if ok else None for x, ok in zip(high, bounded, strict=True)),
                method=f"bootstrap of {len(cells)} clusters, {confidence:.0%}, percentile",
                label=f"{label} by {axis.name.replace('_', ' ')}",
            )
        )
    return curves
