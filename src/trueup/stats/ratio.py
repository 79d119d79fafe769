"""Means over tokens with a standard error that knows about clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr  # the same as scipy.stats.t.cdf, without its second of import time


@dataclass(frozen=True, slots=True)
class ClusterMean:
    """A mean over units, its cluster-robust standard error, and how far that error can be trusted.

    ``degrees_of_freedom`` are those of the standard error: one less than there are clusters when clusters are
    alike, fewer when a few of them make most of its variance (heavy tails).
    """

    mean: float
    standard_error: float
    clusters: int
    degrees_of_freedom: float = math.inf

    def z(self, expected: float) -> float:
        """How many standard errors the mean lies from ``expected``; NaN when it has none.

        A mean that equals ``expected`` exactly is at 0 even where the standard error is 0.
        """
        if self.mean == expected:
            return 0.0
        if not self.standard_error > 0.0:
            return math.nan if math.isnan(self.standard_error) else math.copysign(math.inf, self.mean - expected)
        return (self.mean - expected) / self.standard_error

    def p_value(self, expected: float) -> float:
        """Two-sided, of ``mean = expected``, from Student's t; 1 where there is no standard error."""
        z = self.z(expected)
        if math.isnan(z):
            return 1.0
        return float(2.0 * stdtr(max(self.degrees_of_freedom, 1.0), -abs(z)))


def cluster_mean(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> ClusterMean:
    """The mean of units grouped in clusters, from each cluster's sum and count of units, both float64[G].

    The ratio estimator Σ sums / Σ counts with the linearised (sandwich) standard error
    ``sqrt(G/(G − 1) · Σ r_g²) / Σ counts``, r_g = sum_g − mean · count_g (Cochran 1977, section 6.4); NaN for one
    cluster. Its degrees of freedom match the variance of Σ r_g² (Satterthwaite 1946), with the fourth moment taken
    from the data: G − 1 at most.

    >>> mean = cluster_mean(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    >>> mean.mean, mean.standard_error, mean.degrees_of_freedom
    (2.0, 1.0, 1.0)
    """
    used = counts > 0
    sums, counts = sums[used], counts[used]
    clusters, total = len(sums), float(counts.sum())
    if clusters == 0:
        return ClusterMean(math.nan, math.nan, 0)
    mean = float(sums.sum()) / total
    if clusters == 1 or not math.isfinite(mean):
        return ClusterMean(mean, math.nan, clusters)
    squares = (sums - mean * counts) ** 2
    spread = float(squares.sum())
    error = math.sqrt(clusters / (clusters - 1) * spread) / total
    uneven = float(np.dot(squares, squares)) - spread**2 / clusters
    freedom = min(2.0 * spread**2 / uneven, clusters - 1.0) if uneven > 0.0 else clusters - 1.0
    return ClusterMean(mean, error, clusters, freedom)
