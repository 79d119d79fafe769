"""The smaller scans over a block's tokens: the lag correlation, the current policy, token-level rejection."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from numba import njit

from trueup.policy.layout import ROUNDING, SAFETY_BOUND
from trueup.policy.tile_arithmetic import REDUCE


@njit(inline="always")
def _usable(value):
    """Whether the main scan would use this log-probability."""
    return -np.inf < value <= ROUNDING and value != -9999.0


#: Lags of the correlation scan: log π_t against log μ_{t + lag}.
LAGS = np.arange(-3, 4)
#: The scan looks at this many tokens of each sequence, which bounds its cost and ignores their order.
LAG_SCAN_TOKENS = 64


@njit(nogil=True, cache=True, error_model="numpy")
def lag_scan(offsets, rollout, train, mask, out):
    """Add to ``out[7, 6]``, a row a lag, the sums n, x, y, x², y², xy of x = log π_t and y = log μ_{t + lag}.

    Pairs lie within one sequence, both tokens count and both log-probabilities are finite.
    """
    xs, ys, usable = np.empty(LAG_SCAN_TOKENS), np.empty(LAG_SCAN_TOKENS), np.empty(LAG_SCAN_TOKENS)
    for s in range(offsets.shape[0] - 1):
        start = offsets[s]
        tokens = min(offsets[s + 1] - start, LAG_SCAN_TOKENS)
        for i in range(tokens):
            x, y = float(train[start + i]), float(rollout[start + i])
            counts = mask[start + i] and _usable(x) and _usable(y)
            xs[i] = x if counts else 0.0
            ys[i] = y if counts else 0.0
            usable[i] = 1.0 if counts else 0.0
        for k in range(7):
            lag = k - 3
            first, last = max(0, -lag), min(tokens, tokens - lag)
            if last > first:
                _add_pairs(
                    xs[first:last],
                    ys[first + lag : last + lag],
                    usable[first:last],
                    usable[first + lag : last + lag],
                    out[k],
                )


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
def _add_pairs(x, y, x_usable, y_usable, row):
    """Add the pairs in which both are usable; an unusable value is 0."""
    n = sx = sy = sxx = syy = sxy = 0.0
    for i in range(x.shape[0]):
        n += x_usable[i] * y_usable[i]
        sx += x[i] * y_usable[i]
        sy += y[i] * x_usable[i]
        sxx += x[i] * x[i] * y_usable[i]
        syy += y[i] * y[i] * x_usable[i]
        sxy += x[i] * y[i]
    row[0] += n
    row[1] += sx
    row[2] += sy
    row[3] += sxx
    row[4] += syy
    row[5] += sxy


class CurrentSum(IntEnum):
    """Columns of ``scan_current``: sums over tokens that have the current policy's log-probability too."""

    N = 0
    STALENESS = 1  # log π_θ − log π_old
    STALENESS_RATIO = 2  # r = π_θ / π_old, safe
    TOTAL = 3  # log π_θ − log μ
    TOTAL_RATIO_CURRENT = 4  # (π_θ / μ) · log π_θ, safe


@njit(nogil=True, cache=True, error_model="numpy")
def scan_current(offsets, rollout, train, current, mask, out):
    """Fill ``out[S, len(CurrentSum)]``: how the policy being optimised has moved from both others."""
    for s in range(offsets.shape[0] - 1):
        row = out[s]
        for i in range(offsets[s], offsets[s + 1]):
            r, t, c = float(rollout[i]), float(train[i]), float(current[i])
            if not (mask[i] and _usable(r) and _usable(t) and _usable(c)):
                continue
            total = c - r
            row[CurrentSum.N] += 1.0
            row[CurrentSum.STALENESS] += c - t
            row[CurrentSum.STALENESS_RATIO] += math.exp(min(max(c - t, -SAFETY_BOUND), SAFETY_BOUND))
            row[CurrentSum.TOTAL] += total
            row[CurrentSum.TOTAL_RATIO_CURRENT] += math.exp(min(max(total, -SAFETY_BOUND), SAFETY_BOUND)) * c


@njit(nogil=True, cache=True, error_model="numpy")
def token_rejection(offsets, rollout, train, mask, kinds, bounds, out, limits, masked):
    """Token-level rejection rules over a block.

    ``kinds[J]`` is 1, 2 or 3 for k1, k2, k3; ``bounds[J, 4]`` holds keep-low, keep-high, clip-low, clip-high.
    Fills ``out[S, J, 6]`` with the sums of the statistic, its clipped value and square, tokens above, below and
    outside; ``limits[S, J, 2]`` with its maximum and minimum; ``masked[S]`` with tokens that any rule rejects.
    """
    for s in range(offsets.shape[0] - 1):
        for i in range(offsets[s], offsets[s + 1]):
            r, t = float(rollout[i]), float(train[i])
            if not (mask[i] and _usable(r) and _usable(t)):
                continue
            ell = min(max(min(t, 0.0) - min(r, 0.0), -SAFETY_BOUND), SAFETY_BOUND)
            rejected = False
            for j in range(kinds.shape[0]):
                if kinds[j] == 1:
                    value = -ell
                elif kinds[j] == 2:
                    value = 0.5 * ell * ell
                else:
                    value = math.expm1(ell) - ell
                clipped = min(max(value, bounds[j, 2]), bounds[j, 3])
                row = out[s, j]
                row[0] += value
                row[1] += clipped
                row[2] += clipped * clipped
                above = value > bounds[j, 1]
                below = value < bounds[j, 0]
                row[3] += above
                row[4] += below
                row[5] += above or below
                rejected = rejected or above or below
                limits[s, j, 0] = max(limits[s, j, 0], value)
                limits[s, j, 1] = min(limits[s, j, 1], value)
            masked[s] += rejected
