"""Log-spaced bins read off a float's own bits: exact counts, mergeable by addition, quantiles to a bin's width.

A float32's leading bits are its exponent and the top of its mantissa, so ``bits >> shift`` numbers bins that are
log-spaced between powers of two and evenly spaced inside one. Unlike a randomised sketch the counts do not depend
on the order of the data, and finding the bin costs a shift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class LogBins:
    """Bins over ``[0, inf)``: bin 0 is ``[0, 2**lowest)``, then ``2**split`` bins an octave up to ``2**highest``.

    Values at or above ``2**highest`` fall into the last bin.

    >>> LogBins(lowest=0, highest=2, split=1).edges.tolist()
    [0.0, 1.0, 1.5, 2.0, 3.0, inf]
    """

    lowest: int
    highest: int
    split: int

    @property
    def shift(self) -> int:
        """How far a float32's bits are shifted to give its bin."""
        return _MANTISSA_BITS - self.split

    @property
    def base(self) -> int:
        """The shifted bits of ``2**lowest``, minus the one bin below it."""
        return ((self.lowest + _EXPONENT_BIAS) << self.split) - 1

    @property
    def count(self) -> int:
        """Number of bins."""
        return ((self.highest - self.lowest) << self.split) + 1

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Bin ``i`` covers ``[edges[i], edges[i + 1])``, float64[count + 1]."""
        bits = (np.arange(1, self.count, dtype=np.int32) + np.int32(self.base)) << np.int32(self.shift)
        inner = bits.view(np.float32).astype(np.float64)
        return np.concatenate([[0.0], inner, [np.inf]])

    def index(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The bin of each non-negative value, int64 of the same shape."""
        bits = np.asarray(values, dtype=np.float32).view(np.int32)
        index: npt.NDArray[np.int64] = np.clip((bits >> self.shift) - self.base, 0, self.count - 1).astype(
            np.int64
        )
        return index


@njit(inline="always")
def log_bin(bits, shift, base, count):
    """The bin of the non-negative float32 with these bits; see ``LogBins`` for the three constants."""
    return min(max((bits >> shift) - base, 0), count - 1)


def quantile_groups(counts: npt.NDArray[np.float64], groups: int) -> npt.NDArray[np.int64]:
    """Cut consecutive bins into at most ``groups`` runs of about equal count; returns the run of each bin.

    The cuts fall on bin edges, so a bin that holds more than its share makes a run of its own.

    >>> quantile_groups(np.array([1.0, 1.0, 1.0, 1.0]), 2).tolist()
    [0, 0, 1, 1]
    >>> quantile_groups(np.array([9.0, 1.0, 0.0, 0.0]), 2).tolist()
    [0, 1, 1, 1]
    """
    total = counts.sum()
    if total == 0:
        return np.zeros(len(counts), dtype=np.int64)
    before = np.concatenate([[0.0], np.cumsum(counts)[:-1]])
    # A bin goes where its middle falls, so that one straddling a cut joins the run that holds most of it.
    middle = (before + 0.5 * counts) / total
    run = np.minimum((middle * groups).astype(np.int64), groups - 1)
    _, dense = np.unique(run, return_inverse=True)
    return dense.astype(np.int64)


def top_share(counts: npt.NDArray[np.float64], sums: npt.NDArray[np.float64], fraction: float) -> float:
    """The share of ``sums`` that the largest ``fraction`` of the counted values carry; NaN without any.

    ``counts`` and ``sums`` are per bin, bins in increasing order. Within the bin that the cut falls into, values
    count as equal, so the error is bounded by one bin's width.

    >>> top_share(np.array([99.0, 1.0]), np.array([1.0, 3.0]), 0.01)
    0.75
    """
    total = sums.sum()
    if total <= 0:
        return float("nan")
    wanted = fraction * counts.sum()
    above = np.cumsum(counts[::-1])
    mean = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)[::-1]
    taken = np.clip(wanted - np.concatenate([[0.0], above[:-1]]), 0.0, counts[::-1])
    return float((taken * mean).sum() / total)
