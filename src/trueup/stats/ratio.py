"""Means over tokens with a standard error that knows about clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ClusterMean:
    """A mean over units, its cluster-robust standard error, and the number of clusters behind it."""

    mean: float
    standard_error: float
    clusters: int

    def z(self, expected: float) -> float:
        """How many standard errors the mean lies from ``expected``; NaN when it has none.

        A mean that equals ``expected`` exactly is at 0 even where the standard error is 0.
        """
        if self.mean == expected:
            return 0.0
        if not self.standard_error > 0.0:
            return math.nan if math.isnan(self.standard_error) else math.copysign(math.inf, self.mean - expected)
        return (self.mean - expected) / self.standard_error


def cluster_mean(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> ClusterMean:
    """The mean of units grouped in clusters, from each cluster's sum and count of units, both float64[G].

    The ratio estimator Σ sums / Σ counts with the linearised (sandwich) standard error
    ``sqrt(G/(G − 1) · Σ (sum_g − mean · count_g)²) / Σ counts`` (Cochran 1977, section 6.4). NaN for one cluster.

    >>> cluster_mean(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    ClusterMean(mean=2.0, standard_error=1.0, clusters=2)
    """
    used = counts > 0
    sums, counts = sums[used], counts[used]
    clusters, total = len(sums), float(counts.sum())
    if clusters == 0:
        return ClusterMean(math.nan, math.nan, 0)
    mean = float(sums.sum()) / total
    if clusters == 1 or not math.isfinite(mean):
        return ClusterMean(mean, math.nan, clusters)
    residual = sums - mean * counts
    spread = clusters / (clusters - 1) * float(np.dot(residual, residual))
    return ClusterMean(mean, math.sqrt(spread) / total, clusters)
