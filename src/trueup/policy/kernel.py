"""The one pass over the tokens: numba loops that turn a block of a trace into sums.

Nothing here allocates per token. ``scan`` fills, for one block of sequences:

* ``sums[S, len(Sum)]``: per-sequence sums of per-token quantities, float64;
* ``extremes[S, len(Extreme)]``: per-sequence maxima and minima;
* ``counts[2, len(Seen)]``: what was met in the recorded values of either side, and ``tallies[len(Tally)]``;
* ``curves[R, BINS, 4]``: n, Σℓ, Σℓ², Σ|ℓ| in bins of position, surprisal, entropy, …, one row a cluster;
* ``histogram[2, .]``: tokens in log-spaced bins of |ℓ|, for ℓ >= 0 and for ℓ < 0;
* ``by_id[V]``: Σ|ℓ| by token id.

ℓ = train − rollout throughout, in nats, computed in float64 from the recorded float32 values.

A sequence is taken in tiles of a few hundred tokens. ``_gather_*`` picks the tokens that count into small arrays
that stay in cache; on those the arithmetic (``_exponentials``, ``_reduce_*``) is plain loops that the compiler
turns into vector instructions, which is where the speed comes from; ``_correct_rare`` puts right the few tokens
that the branch-free arithmetic clamps; ``_scatter`` fills tables, one token at a time.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from numba import njit

from trueup.stats.logbins import LogBins, log_bin

#: verl clamps log-ratios to this before exponentiating them.
SAFETY_BOUND = 20.0
#: Log-probabilities above zero by no more than this are rounding, and clamped.
ROUNDING = 1e-3
#: A rollout log-probability of exactly 0.0 where the trainer is below this is a placeholder, not a certainty.
PLACEHOLDER_BELOW = -0.1

RATIO_BINS = LogBins(lowest=-24, highest=7, split=3)
SURPRISAL_BINS = LogBins(lowest=-10, highest=6, split=3)
POSITION_BINS = LogBins(lowest=0, highest=20, split=2)
NUM_SEGMENTS = 64
NUM_LAGS = 34

# Where each axis of ``curves`` starts.
POSITION_AT = 0
SURPRISAL_AT = POSITION_AT + POSITION_BINS.count
ENTROPY_AT = SURPRISAL_AT + SURPRISAL_BINS.count
SEGMENT_AT = ENTROPY_AT + SURPRISAL_BINS.count
LAG_AT = SEGMENT_AT + NUM_SEGMENTS
REPETITION_AT = LAG_AT + NUM_LAGS
BINS = REPETITION_AT + 2

# numba freezes module-level integers into the compiled code; attributes of a dataclass it cannot read.
_RATIO_SHIFT, _RATIO_BASE, _RATIO_COUNT = RATIO_BINS.shift, RATIO_BINS.base, RATIO_BINS.count
_SURP_SHIFT, _SURP_BASE, _SURP_COUNT = SURPRISAL_BINS.shift, SURPRISAL_BINS.base, SURPRISAL_BINS.count
_POS_SHIFT, _POS_BASE, _POS_COUNT = POSITION_BINS.shift, POSITION_BINS.base, POSITION_BINS.count


class Sum(IntEnum):
    """Columns of ``sums``: per-sequence sums over the tokens that count. "safe" = ℓ clamped to ±20."""

    N = 0
    TRAIN = 1  # log π
    ROLLOUT = 2  # log μ
    ROLLOUT_SQ = 3
    ELL = 4
    ELL_ABS = 5
    ELL_SQ = 6
    ELL_CUBE = 7
    ELL_FOURTH = 8
    ELL_ROLLOUT = 9  # ℓ · log μ
    RHO = 10  # e^ℓ, safe
    RHO_SQ = 11  # safe
    RHO_DEVIATION = 12  # |e^ℓ − 1|, safe
    RHO_TRAIN = 13  # e^ℓ · log π, safe
    K3 = 14  # e^ℓ − 1 − ℓ, safe
    K3_OVER = 15  # what clamping took from K3
    ELL_OVER = 16  # what clamping takes from ELL
    ELL_SQ_OVER = 17
    REVERSE_K3 = 18  # e^−ℓ − 1 + ℓ
    MULT_ERROR = 19  # e^|ℓ|
    JS = 20  # log cosh(ℓ/2)
    DP_ABS = 21  # |π − μ|
    DP_SQ = 22
    P_TRAIN = 23
    P_ROLLOUT = 24
    P_TRAIN_SQ = 25
    P_ROLLOUT_SQ = 26
    P_CROSS = 27
    POSITIVE = 28  # ℓ > 0
    ZERO = 29  # ℓ = 0 exactly
    EXTREME = 30  # |ℓ| > ln 2
    WEIGHT = 31  # the applied token weight
    WEIGHT_SQ = 32
    WEIGHT_HIGH = 33  # raw ratio above the upper threshold
    WEIGHT_LOW = 34  # raw ratio below the lower one
    ENTROPY_N = 35  # tokens that have the trainer's entropy
    ENTROPY = 36
    ENTROPY_SURPRISAL = 37  # −log π of those tokens
    FIRST_ABS = 38  # |ℓ| of the first token that counts
    LAST_ABS = 39
    CLIPPED = 40  # ratio clipped into [lower, upper]
    CLIPPED_SQ = 41
    K3_OVER_10 = 42  # what ms-swift's cap of 10 takes from K3
    CATASTROPHIC = 43  # e^ℓ < 1e-4
    RHO_BOUNDED = 44  # e^ℓ − 1 where |ℓ| <= ln 2; beyond, e^ℓ for ℓ < 0 and −1 for ℓ > 0


class Extreme(IntEnum):
    """Columns of ``extremes``."""

    ELL_MAX = 0
    ELL_MIN = 1
    WEIGHT_MAX = 2
    WEIGHT_MIN = 3
    DP_MAX = 4
    RANK_MAX = 5
    ABS_MIN = 6


class Seen(IntEnum):
    """Columns of ``counts``: recorded values of one side (row 0 rollout, row 1 train) under the mask."""

    MISSING = 0
    NAN = 1
    MINUS_INFINITY = 2
    SENTINEL_9999 = 3
    CLAMPED_ABOVE_ZERO = 4
    EXACT_ZERO = 5
    BELOW_MINUS_100 = 6
    ON_BF16_GRID = 7
    ON_FP16_GRID = 8


class Tally(IntEnum):
    """Entries of ``tallies``."""

    TOKENS = 0
    MASKED = 1
    EXCLUDED = 2
    ROLLOUT_PLACEHOLDER = 3
    ENTROPY_UNUSABLE = 4


_MISSING_BITS = np.int32(0x7FC00001)
_LN2 = math.log(2.0)
_TILE = 512
#: Below this |ℓ| the series of log cosh is exact to rounding; above it a logarithm is taken.
_SERIES_BELOW = 0.125
#: Exponents below this give a probability that no sum notices; it keeps the vector exponential in range.
_LOWEST_EXPONENT = -700.0

# exp(x) = 2^n · exp(f) with n = round(x / ln 2) and |f| <= ln 2 / 2; ln 2 in two parts keeps f exact.
_INVERSE_LN2 = 1.0 / _LN2
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
#: Adding this pushes a float64's fraction bits out, which rounds to an integer that then stands in the low bits.
_ROUND = 6755399441055744.0

_REDUCE = {"reassoc", "contract", "nsz", "nnan"}


@njit(inline="always")
def _expm1(x):
    """e^x − 1 for |x| <= 700, to about an ulp, without a branch or a call, so that loops over it vectorise."""
    shifted = x * _INVERSE_LN2 + _ROUND
    n = shifted - _ROUND
    f = (x - n * _LN2_HIGH) - n * _LN2_LOW
    # Taylor series of (e^f − 1 − f) / f² up to f^13: the remainder is below 1e-17 on |f| <= 0.347.
    series = 1.0 / 6227020800.0
    series = series * f + 1.0 / 479001600.0
    series = series * f + 1.0 / 39916800.0
    series = series * f + 1.0 / 3628800.0
    series = series * f + 1.0 / 362880.0
    series = series * f + 1.0 / 40320.0
    series = series * f + 1.0 / 5040.0
    series = series * f + 1.0 / 720.0
    series = series * f + 1.0 / 120.0
    series = series * f + 1.0 / 24.0
    series = series * f + 1.0 / 6.0
    series = series * f + 0.5
    bits = (np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)
    power = np.int64(bits).view(np.float64)
    return power * (f + f * f * series) + (power - 1.0)


@njit(inline="always")
def _order_key(x):
    """An integer that orders as the float does: maxima of integers become vector instructions, of floats not."""
    bits = np.float64(x).view(np.int64)
    return bits ^ ((bits >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF))


@njit(inline="always")
def _from_order_key(key):
    """The float that ``_order_key`` was taken of."""
    bits = key ^ ((key >> np.int64(63)) & np.int64(0x7FFFFFFFFFFFFFFF))
    return np.int64(bits).view(np.float64)


# No reassociation here: it would fold the rounding trick away.
@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _exponentials(m, r, t, ell, e, p):
    """ℓ, e^ℓ − 1 (ℓ clamped to ±20) and μ of the gathered tokens."""
    for k in range(m):
        ell[k] = t[k] - r[k]
        e[k] = _expm1(min(max(ell[k], -SAFETY_BOUND), SAFETY_BOUND))
        p[k] = 1.0 + _expm1(max(r[k], _LOWEST_EXPONENT))


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_REDUCE)
def _reduce_logs(m, r, t, ell, repeated, out, ext, repetition):
    """Sums of log-probabilities and powers of ℓ; all are exact for any ℓ."""
    sum_train = sum_rollout = rollout_sq = 0.0
    ell_sum = ell_abs = ell_sq = ell_cube = ell_fourth = ell_rollout = 0.0
    positive = zero = extreme = 0.0
    again_n = again = again_sq = again_abs = 0.0
    ell_max, ell_min, abs_min = _order_key(-np.inf), _order_key(np.inf), _order_key(np.inf)
    for k in range(m):
        x, y = ell[k], r[k]
        size = abs(x)
        square = x * x
        sum_train += t[k]
        sum_rollout += y
        rollout_sq += y * y
        ell_sum += x
        ell_abs += size
        ell_sq += square
        ell_cube += square * x
        ell_fourth += square * square
        ell_rollout += x * y
        positive += 1.0 if x > 0.0 else 0.0
        zero += 1.0 if x == 0.0 else 0.0
        extreme += 1.0 if size > _LN2 else 0.0
        key = _order_key(x)
        ell_max, ell_min, abs_min = max(ell_max, key), min(ell_min, key), min(abs_min, _order_key(size))
        flag = repeated[k]
        again_n += flag
        again += flag * x
        again_sq += flag * square
        again_abs += flag * size
    out[Sum.N] += m
    out[Sum.TRAIN] += sum_train
    out[Sum.ROLLOUT] += sum_rollout
    out[Sum.ROLLOUT_SQ] += rollout_sq
    out[Sum.ELL] += ell_sum
    out[Sum.ELL_ABS] += ell_abs
    out[Sum.ELL_SQ] += ell_sq
    out[Sum.ELL_CUBE] += ell_cube
    out[Sum.ELL_FOURTH] += ell_fourth
    out[Sum.ELL_ROLLOUT] += ell_rollout
    out[Sum.POSITIVE] += positive
    out[Sum.ZERO] += zero
    out[Sum.EXTREME] += extreme
    highest, lowest = _from_order_key(ell_max), _from_order_key(ell_min)
    ext[Extreme.ELL_MAX] = max(ext[Extreme.ELL_MAX], highest)
    ext[Extreme.ELL_MIN] = min(ext[Extreme.ELL_MIN], lowest)
    ext[Extreme.ABS_MIN] = min(ext[Extreme.ABS_MIN], _from_order_key(abs_min))
    repetition[0, 0] += m - again_n
    repetition[0, 1] += ell_sum - again
    repetition[0, 2] += ell_sq - again_sq
    repetition[0, 3] += ell_abs - again_abs
    repetition[1, 0] += again_n
    repetition[1, 1] += again
    repetition[1, 2] += again_sq
    repetition[1, 3] += again_abs
    return max(highest, -lowest)


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_REDUCE)
def _reduce_ratios(m, t, ell, e, upper, lower, zero_outside, out, ext):
    """Sums of functions of the ratio, ℓ clamped to ±20."""
    above_value = 0.0 if zero_outside else upper
    rho_sum = rho_sq = rho_deviation = rho_train = rho_bounded = 0.0
    k3_sum = k3_over_10 = reverse_k3 = mult_error = js = 0.0
    weight_sum = weight_sq = weight_high = weight_low = clipped_sum = clipped_sq = catastrophic = 0.0
    weight_max, weight_min = _order_key(-np.inf), _order_key(np.inf)
    for k in range(m):
        x, excess = min(max(ell[k], -SAFETY_BOUND), SAFETY_BOUND), e[k]
        rho = 1.0 + excess
        inverse = 1.0 / rho
        k3 = excess - x
        rho_sum += rho
        rho_sq += rho * rho
        rho_deviation += abs(excess)
        rho_train += rho * t[k]
        rho_bounded += excess if abs(x) <= _LN2 else (rho if x < 0.0 else -1.0)
        k3_sum += k3
        k3_over_10 += max(k3 - 10.0, 0.0)
        # −excess/ρ is e^−ℓ − 1 without cancellation.
        reverse_k3 += x - excess * inverse
        mult_error += max(rho, inverse)
        y = 0.25 * min(x * x, _SERIES_BELOW * _SERIES_BELOW)
        js += y * (0.5 - y * (1.0 / 12.0 - y * (1.0 / 45.0 - y * (17.0 / 2520.0))))
        clipped = min(max(rho, lower), upper)
        clipped_sum += clipped
        clipped_sq += clipped * clipped
        catastrophic += 1.0 if rho < 1e-4 else 0.0
        high, low = rho > upper, rho < lower
        weight_high += 1.0 if high else 0.0
        weight_low += 1.0 if low else 0.0
        weight = above_value if high else (0.0 if low and zero_outside else rho)
        weight_sum += weight
        weight_sq += weight * weight
        key = _order_key(weight)
        weight_max, weight_min = max(weight_max, key), min(weight_min, key)
    out[Sum.RHO] += rho_sum
    out[Sum.RHO_SQ] += rho_sq
    out[Sum.RHO_DEVIATION] += rho_deviation
    out[Sum.RHO_TRAIN] += rho_train
    out[Sum.RHO_BOUNDED] += rho_bounded
    out[Sum.K3] += k3_sum
    out[Sum.K3_OVER_10] += k3_over_10
    out[Sum.REVERSE_K3] += reverse_k3
    out[Sum.MULT_ERROR] += mult_error
    out[Sum.JS] += js
    out[Sum.CLIPPED] += clipped_sum
    out[Sum.CLIPPED_SQ] += clipped_sq
    out[Sum.CATASTROPHIC] += catastrophic
    out[Sum.WEIGHT] += weight_sum
    out[Sum.WEIGHT_SQ] += weight_sq
    out[Sum.WEIGHT_HIGH] += weight_high
    out[Sum.WEIGHT_LOW] += weight_low
    ext[Extreme.WEIGHT_MAX] = max(ext[Extreme.WEIGHT_MAX], _from_order_key(weight_max))
    ext[Extreme.WEIGHT_MIN] = min(ext[Extreme.WEIGHT_MIN], _from_order_key(weight_min))


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_REDUCE)
def _reduce_probabilities(m, e, p, out, ext):
    """Sums of the two sides' probabilities, π = μ · e^ℓ."""
    dp_abs = dp_sq = p_train_sum = p_rollout_sum = p_train_sq = p_rollout_sq = p_cross = 0.0
    dp_max = _order_key(-np.inf)
    for k in range(m):
        p_rollout = p[k]
        dp = p_rollout * e[k]
        p_train = p_rollout + dp
        dp_abs += abs(dp)
        dp_sq += dp * dp
        dp_max = max(dp_max, _order_key(abs(dp)))
        p_train_sum += p_train
        p_rollout_sum += p_rollout
        p_train_sq += p_train * p_train
        p_rollout_sq += p_rollout * p_rollout
        p_cross += p_train * p_rollout
    out[Sum.DP_ABS] += dp_abs
    out[Sum.DP_SQ] += dp_sq
    out[Sum.P_TRAIN] += p_train_sum
    out[Sum.P_ROLLOUT] += p_rollout_sum
    out[Sum.P_TRAIN_SQ] += p_train_sq
    out[Sum.P_ROLLOUT_SQ] += p_rollout_sq
    out[Sum.P_CROSS] += p_cross
    ext[Extreme.DP_MAX] = max(ext[Extreme.DP_MAX], _from_order_key(dp_max))


@njit(nogil=True, cache=True, error_model="numpy")
def _correct_rare(m, t, ell, e, p, out, ext):
    """Put right what ``_reduce_*`` clamped: the logarithm beyond the series, and everything beyond |ℓ| = 20."""
    for k in range(m):
        x = ell[k]
        size = abs(x)
        if size < _SERIES_BELOW:
            continue
        y = 0.25 * _SERIES_BELOW * _SERIES_BELOW
        series = y * (0.5 - y * (1.0 / 12.0 - y * (1.0 / 45.0 - y * (17.0 / 2520.0))))
        out[Sum.JS] += 0.5 * size + math.log1p(math.exp(-size)) - _LN2 - series
        if size <= SAFETY_BOUND:
            continue
        safe = SAFETY_BOUND if x > 0.0 else -SAFETY_BOUND
        rho = 1.0 + e[k]
        out[Sum.ELL_OVER] += x - safe
        out[Sum.ELL_SQ_OVER] += x * x - safe * safe
        out[Sum.K3_OVER] += (math.exp(x) - 1.0 - x) - (e[k] - safe)
        out[Sum.REVERSE_K3] += (math.exp(-x) - 1.0 + x) - (safe - e[k] / rho)
        out[Sum.MULT_ERROR] += math.exp(size) - max(rho, 1.0 / rho)
        # π was taken as μ · e^±20; it is e^t.
        wrong, right = p[k] * rho, math.exp(t[k])
        out[Sum.P_TRAIN] += right - wrong
        out[Sum.P_TRAIN_SQ] += right * right - wrong * wrong
        out[Sum.P_CROSS] += (right - wrong) * p[k]
        out[Sum.DP_ABS] += abs(right - p[k]) - abs(wrong - p[k])
        out[Sum.DP_SQ] += (right - p[k]) ** 2 - (wrong - p[k]) ** 2
        ext[Extreme.DP_MAX] = max(ext[Extreme.DP_MAX], abs(right - p[k]))


@njit(nogil=True, cache=True, error_model="numpy")
def _look(value, bits, seen):
    """Count what an unusual recorded value is; returns (usable, possible, value)."""
    if value == 0.0:
        seen[Seen.EXACT_ZERO] += 1
        return True, True, value
    if -np.inf < value < 0.0:
        if value == -9999.0:
            seen[Seen.SENTINEL_9999] += 1
            return False, True, value
        seen[Seen.BELOW_MINUS_100] += value < -100.0
        return True, True, value
    if 0.0 < value <= ROUNDING:
        seen[Seen.CLAMPED_ABOVE_ZERO] += 1
        return True, True, np.float32(0.0)
    if bits == _MISSING_BITS:
        seen[Seen.MISSING] += 1
        return False, True, value
    if value != value:
        seen[Seen.NAN] += 1
        return False, True, value
    if value < 0.0:
        seen[Seen.MINUS_INFINITY] += 1
        return False, True, value
    return False, False, value


# These take slices of a tile and count from 0: numba then knows that no index is negative, and vectorises.
@njit(nogil=True, cache=True, error_model="numpy")
def _mark_repeats(token_ids, last_seen, stamp, seen):
    """``seen[k]`` = 1 where the token stood before in its prompt or sequence, masked or not; else 0."""
    vocabulary = last_seen.shape[0]
    for k in range(token_ids.shape[0]):
        token = token_ids[k]
        known = 0 <= token < vocabulary
        seen[k] = 1.0 if known and last_seen[token] == stamp else 0.0
        if known:
            last_seen[token] = stamp


@njit(nogil=True, cache=True, error_model="numpy")
def _all_usual(rollout, train, mask):
    """Whether every token counts and both its log-probabilities are ordinary."""
    unusual = False
    for k in range(rollout.shape[0]):
        x, y = rollout[k], train[k]
        unusual |= not ((x >= -100.0) & (x < 0.0) & (y >= -100.0) & (y < 0.0) & mask[k])
    return not unusual


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_all(first, rollout, train, r, t, where):
    """Take a tile in which ``_all_usual`` holds."""
    for k in range(rollout.shape[0]):
        r[k], t[k] = rollout[k], train[k]
        where[k] = first + k
    return rollout.shape[0]


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_some(
    first, last, rollout, rollout_bits, train, train_bits, mask, counts, tallies, impossible,
    r, t, where, repeated,
):  # fmt: skip
    """Pick the tokens that count and can be used, and count the rest; returns how many were picked.

    ``repeated`` holds a flag for every token of the tile on entry, for every picked one on return.
    """
    m = 0
    for i in range(first, last):
        if not mask[i]:
            tallies[Tally.MASKED] += 1
            continue
        x, y = rollout[i], train[i]
        if not (-100.0 <= x < 0.0 and -100.0 <= y < 0.0):
            rollout_usable, rollout_possible, x = _look(x, rollout_bits[i], counts[0])
            train_usable, train_possible, y = _look(y, train_bits[i], counts[1])
            if not (rollout_possible and train_possible):
                if impossible[0] < 0:
                    impossible[0] = i
                    impossible[1] = 0 if not rollout_possible else 1
                continue
            if not (rollout_usable and train_usable):
                tallies[Tally.EXCLUDED] += 1
                continue
            if rollout[i] == 0.0 and y < PLACEHOLDER_BELOW:
                tallies[Tally.ROLLOUT_PLACEHOLDER] += 1
        r[m], t[m] = x, y
        where[m] = i
        repeated[m] = repeated[i - first]
        m += 1
    return m


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_REDUCE)
def _count_grids(m, values, seen):
    """Count values on the bfloat16 grid (7 mantissa bits) and the float16 grid (10): zeros stand below them."""
    on_bf16 = on_fp16 = 0
    for k in range(m):
        bits = np.float32(values[k]).view(np.int32)
        on_bf16 += (bits & np.int32(0xFFFF)) == 0
        on_fp16 += (bits & np.int32(0x1FFF)) == 0
    seen[Seen.ON_BF16_GRID] += on_bf16
    seen[Seen.ON_FP16_GRID] += on_fp16


@njit(inline="always")
def _add(cell, ell, square, size):
    cell[0] += 1.0
    cell[1] += ell
    cell[2] += square
    cell[3] += size


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter(m, r, ell, where, token_ids, row, histogram, by_id):
    """Add the tokens to the tables that every trace fills."""
    vocabulary = by_id.shape[0]
    for k in range(m):
        x = ell[k]
        size = abs(x)
        bits = np.float32(x).view(np.int32)
        bin_ = log_bin(bits & np.int32(0x7FFFFFFF), _RATIO_SHIFT, _RATIO_BASE, _RATIO_COUNT)
        # The sign of ℓ is a coin toss: read off its bit, since a branch would be mispredicted every other token.
        histogram[np.uint64(np.uint32(bits) >> np.uint32(31)), np.uint64(bin_)] += 1.0
        token = token_ids[where[k]]
        if 0 <= token < vocabulary:
            by_id[token] += size
        bin_ = log_bin(np.float32(-r[k]).view(np.int32), _SURP_SHIFT, _SURP_BASE, _SURP_COUNT)
        _add(row[np.uint64(SURPRISAL_AT + bin_)], x, x * x, size)


@njit(nogil=True, cache=True, error_model="numpy", fastmath=_REDUCE)
def _add_run(begin, end, ell, cell):
    """Add a run of tokens that share a bin."""
    total = square = size = 0.0
    for k in range(begin, end):
        total += ell[k]
        square += ell[k] * ell[k]
        size += abs(ell[k])
    cell[0] += end - begin
    cell[1] += total
    cell[2] += square
    cell[3] += size


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter_positions(m, start, ell, where, positions, row):
    """Add the tokens to the bins of their positions, run by run: neighbours mostly share one."""
    has_positions = positions.shape[0] > 0
    begin, current = 0, -1
    for k in range(m):
        position = max(positions[where[k]], 0) if has_positions else where[k] - start
        bin_ = log_bin(np.float32(position).view(np.int32), _POS_SHIFT, _POS_BASE, _POS_COUNT)
        if bin_ != current:
            if k > begin:
                _add_run(begin, k, ell, row[POSITION_AT + current])
            begin, current = k, bin_
    _add_run(begin, m, ell, row[POSITION_AT + current])


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter_optional(
    m, t, ell, where, entropies, segments, versions, train_version, ranks, row, out, ext, tallies
):
    """Add the tokens to what the optional columns feed."""
    for k in range(m):
        i, x = where[k], ell[k]
        size, square = abs(x), x * x
        if ranks.shape[0] > 0:
            ext[Extreme.RANK_MAX] = max(ext[Extreme.RANK_MAX], float(ranks[i]))
        if entropies.shape[0] > 0:
            entropy = entropies[i]
            # An entropy is finite and not negative; rounding may take it a hair below zero.
            if -ROUNDING <= entropy < np.inf:
                entropy = max(entropy, np.float32(0.0))
                out[Sum.ENTROPY_N] += 1.0
                out[Sum.ENTROPY] += entropy
                out[Sum.ENTROPY_SURPRISAL] -= t[k]
                bin_ = log_bin(np.float32(entropy).view(np.int32), _SURP_SHIFT, _SURP_BASE, _SURP_COUNT)
                _add(row[ENTROPY_AT + bin_], x, square, size)
            else:
                tallies[Tally.ENTROPY_UNUSABLE] += 1
        if segments.shape[0] > 0:
            _add(row[SEGMENT_AT + min(max(segments[i], 0), NUM_SEGMENTS - 1)], x, square, size)
        if versions.shape[0] > 0 and versions[i] >= 0:
            _add(row[LAG_AT + min(max(train_version - versions[i], 0), NUM_LAGS - 1)], x, square, size)


@njit(nogil=True, cache=True, error_model="numpy")
def scan(
    offsets, rollout, rollout_bits, train, train_bits, mask, token_ids,
    positions, segments, entropies, versions, train_version, ranks, prompt_ids, prompt_offsets,
    curve_row, upper, lower, zero_outside,
    sums, extremes, counts, tallies, impossible, curves, histogram, by_id, last_seen,
):  # fmt: skip
    """Fill the outputs described above for one block; an absent optional column is an array of length 0.

    ``upper``/``lower`` are the importance-weight thresholds; with ``zero_outside`` weights beyond either are zero
    (IcePop), otherwise they are truncated at ``upper``. ``impossible[2]``, −1 on entry, receives the first token
    whose log-probability cannot be one, and its side. ``last_seen[V]`` is scratch, zeros on entry.
    """
    optional = entropies.shape[0] + segments.shape[0] + versions.shape[0] + ranks.shape[0] > 0
    r, t = np.empty(_TILE), np.empty(_TILE)
    ell, e, p = np.empty(_TILE), np.empty(_TILE), np.empty(_TILE)
    where, repeated = np.empty(_TILE, np.int64), np.empty(_TILE)
    for s in range(offsets.shape[0] - 1):
        start, stop = offsets[s], offsets[s + 1]
        out, ext, row = sums[s], extremes[s], curves[curve_row[s]]
        ext[Extreme.ELL_MAX] = ext[Extreme.WEIGHT_MAX] = ext[Extreme.DP_MAX] = -np.inf
        ext[Extreme.ELL_MIN] = ext[Extreme.WEIGHT_MIN] = ext[Extreme.ABS_MIN] = np.inf
        ext[Extreme.RANK_MAX] = -1.0
        tallies[Tally.TOKENS] += stop - start
        stamp = s + 1
        if prompt_offsets.shape[0] > 0:
            for j in range(prompt_offsets[s], prompt_offsets[s + 1]):
                if 0 <= prompt_ids[j] < last_seen.shape[0]:
                    last_seen[prompt_ids[j]] = stamp
        train_now = train_version[s] if train_version.shape[0] > 0 else 0
        for first in range(start, stop, _TILE):
            last = min(first + _TILE, stop)
            _mark_repeats(token_ids[first:last], last_seen, stamp, repeated)
            if _all_usual(rollout[first:last], train[first:last], mask[first:last]):
                m = _gather_all(first, rollout[first:last], train[first:last], r, t, where)
            else:
                m = _gather_some(
                    first, last, rollout, rollout_bits, train, train_bits, mask, counts, tallies, impossible,
                    r, t, where, repeated,
                )  # fmt: skip
            if m == 0:
                continue
            _count_grids(m, r, counts[0])
            _count_grids(m, t, counts[1])
            _exponentials(m, r, t, ell, e, p)
            if out[Sum.N] == 0.0:
                out[Sum.FIRST_ABS] = abs(ell[0])
            out[Sum.LAST_ABS] = abs(ell[m - 1])
            repetition = row[REPETITION_AT : REPETITION_AT + 2]
            largest = _reduce_logs(m, r, t, ell, repeated, out, ext, repetition)
            _reduce_ratios(m, t, ell, e, upper, lower, zero_outside, out, ext)
            _reduce_probabilities(m, e, p, out, ext)
            if largest >= _SERIES_BELOW:
                _correct_rare(m, t, ell, e, p, out, ext)
            _scatter(m, r, ell, where, token_ids, row, histogram, by_id)
            _scatter_positions(m, start, ell, where, positions, row)
            if optional:
                _scatter_optional(
                    m, t, ell, where, entropies, segments, versions, train_now, ranks, row, out, ext, tallies
                )
