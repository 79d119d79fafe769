"""Bootstrap of any function of cluster sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.float64]

#: Replicates drawn at a time, so that the weights stay small however many clusters there are.
_BATCH = 128


def bootstrap_totals(sums: Sums, *, replicates: int, rng: np.random.Generator) -> Iterator[Sums]:
    """Yield totals of resampled clusters, in batches ``[b, K]`` that add up to ``replicates`` rows.

    ``sums[G, K]`` are per-cluster sums. Each replicate draws G clusters with replacement (multinomial weights), so
    clusters are the unit whatever the number of tokens in them (Efron and Tibshirani 1993, chapter 8).
    """
    clusters = len(sums)
    flat = sums.reshape(clusters, -1)
    shares = np.full(clusters, 1.0 / clusters)
    for start in range(0, replicates, _BATCH):
        size = min(_BATCH, replicates - start)
        weights = rng.multinomial(clusters, shares, size=size).astype(np.float64)
        # A cluster with an infinite sum (an impossible token) that is not drawn would give 0 · inf.
        with np.errstate(invalid="ignore"):
            totals = weights @ flat
        yield totals.reshape(size, *sums.shape[1:])


def percentile_interval(
    replicates: Sums, *, confidence: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Equal-tailed percentile interval along the first axis; NaN where a replicate is undefined."""
    tail = 50.0 * (1.0 - confidence)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(replicates, [tail, 100.0 - tail], axis=0)
    return low, high
