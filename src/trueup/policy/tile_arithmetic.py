"""The arithmetic on one tile of gathered tokens: branch-free loops that become vector instructions.

Arguments throughout: ``m`` tokens, ``r`` and ``t`` their log μ and log π, ``ell`` their ℓ, ``e`` = e^ℓ − 1 with ℓ
clamped to ±20, ``p`` = μ, all float64; ``out`` and ``ext`` are one sequence's rows of ``sums`` and ``extremes``.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from trueup.policy.layout import SAFETY_BOUND, Extreme, Sum

_LN2 = math.log(2.0)
#: Below this |ℓ| the series of log cosh is exact to rounding; above it a logarithm is taken.
SERIES_BELOW = 0.125
#: Exponents below this give a probability that no sum notices; it keeps the vector exponential in range.
_LOWEST_EXPONENT = -700.0

# exp(x) = 2^n · exp(f) with n = round(x / ln 2) and |f| <= ln 2 / 2; ln 2 in two parts keeps f exact.
_INVERSE_LN2 = 1.0 / _LN2
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
#: Adding this pushes a float64's fraction bits out, which rounds to an integer that then stands in the low bits.
_ROUND = 6755399441055744.0

REDUCE = {"reassoc", "contract", "nsz", "nnan"}


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
def exponentials(m, r, t, ell, e, p):
    """ℓ, e^ℓ − 1 (ℓ clamped to ±20) and μ of the gathered tokens."""
    for k in range(m):
        ell[k] = t[k] - r[k]
        e[k] = _expm1(min(max(ell[k], -SAFETY_BOUND), SAFETY_BOUND))
        p[k] = 1.0 + _expm1(max(r[k], _LOWEST_EXPONENT))


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
def reduce_logs(m, r, t, ell, repeated, out, ext, repetition):
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
def reduce_ratios(m, t, ell, e, upper, lower, zero_outside, out, ext):
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
        y = 0.25 * min(x * x, SERIES_BELOW * SERIES_BELOW)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
def reduce_probabilities(m, e, p, out, ext):
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
def correct_rare(m, t, ell, e, p, out, ext):
    """Put right what ``reduce_*`` clamped: the logarithm beyond the series, and everything beyond |ℓ| = 20."""
    for k in range(m):
        x = ell[k]
        size = abs(x)
        if size < SERIES_BELOW:
            continue
        y = 0.25 * SERIES_BELOW * SERIES_BELOW
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
