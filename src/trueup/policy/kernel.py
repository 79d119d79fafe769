"""The one pass over the tokens: numba loops that turn a block of a trace into sums.

Nothing here allocates per token. ``scan`` fills, for one block of sequences:

* ``sums[S, len(Sum)]``: per-sequence sums of per-token quantities, float64;
* ``extremes[S, len(Extreme)]``: per-sequence maxima and minima;
* ``counts[2, len(Seen)]``: what was met in the recorded values of either side, and ``tallies[len(Tally)]``;
* ``curves[R, BINS, 4]``: n, Σℓ, Σℓ², Σ|ℓ| in bins of position, surprisal, entropy, …, one row a cluster;
* ``histogram[2, ., 2]``: n and Σ|ℓ| in log-spaced bins of |ℓ|, for ℓ < 0 and ℓ >= 0;
* ``by_id[V, 2]``: n and Σ|ℓ| by token id.

ℓ = train − rollout throughout, in nats, computed in float64 from the recorded float32 values.
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
SURPRISAL_BINS = LogBins(lowest=-14, highest=6, split=2)
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
    # Not counts: the first log-probability that cannot be one (−1 = none), and its side (0 rollout, 1 train).
    BAD_TOKEN = 5
    BAD_SIDE = 6


_MISSING_BITS = np.int32(0x7FC00001)
_LN2 = math.log(2.0)


@njit(inline="always")
def _look(value, bits, seen):
    """Count what one recorded value is; returns (usable, possible, value)."""
    if (bits & np.int32(0x7F800000)) == np.int32(0x7F800000):
        if bits == _MISSING_BITS:
            seen[Seen.MISSING] += 1
        elif value != value:
            seen[Seen.NAN] += 1
        elif value < 0.0:
            seen[Seen.MINUS_INFINITY] += 1
        else:
            return False, False, value
        return False, True, value
    if value > 0.0:
        if value > ROUNDING:
            return False, False, value
        seen[Seen.CLAMPED_ABOVE_ZERO] += 1
        value = 0.0
    elif value == 0.0:
        seen[Seen.EXACT_ZERO] += 1
    elif value == -9999.0:
        seen[Seen.SENTINEL_9999] += 1
        return False, True, value
    elif value < -100.0:
        seen[Seen.BELOW_MINUS_100] += 1
    # bfloat16 keeps 7 mantissa bits, float16 keeps 10: a value on the grid has zeros below them.
    if (bits & np.int32(0xFFFF)) == 0:
        seen[Seen.ON_BF16_GRID] += 1
    if (bits & np.int32(0x1FFF)) == 0:
        seen[Seen.ON_FP16_GRID] += 1
    return True, True, value


@njit(nogil=True, cache=True, error_model="numpy")
def scan(
    offsets,
    rollout,
    rollout_bits,
    train,
    train_bits,
    mask,
    token_ids,
    positions,
    segments,
    entropies,
    versions,
    train_version,
    ranks,
    prompt_ids,
    prompt_offsets,
    curve_row,
    upper,
    lower,
    zero_outside,
    sums,
    extremes,
    counts,
    tallies,
    curves,
    histogram,
    by_id,
    last_seen,
):
    """Fill the outputs described above for one block; an absent optional column is an array of length 0.

    ``upper``/``lower`` are the importance-weight thresholds; with ``zero_outside`` weights beyond either are zero
    (IcePop), otherwise they are truncated at ``upper``. ``last_seen[V]`` is scratch, zeros on entry.
    """
    vocabulary = by_id.shape[0]
    for s in range(offsets.shape[0] - 1):
        start, stop = offsets[s], offsets[s + 1]
        row = curves[curve_row[s]]
        stamp = s + 1
        if prompt_offsets.shape[0] > 0:
            for j in range(prompt_offsets[s], prompt_offsets[s + 1]):
                if 0 <= prompt_ids[j] < vocabulary:
                    last_seen[prompt_ids[j]] = stamp

        n = 0
        sum_train = sum_rollout = rollout_sq = 0.0
        ell_sum = ell_abs = ell_sq = ell_cube = ell_fourth = ell_rollout = 0.0
        rho_sum = rho_sq = rho_deviation = rho_train = 0.0
        k3_sum = k3_over = ell_over = ell_sq_over = reverse_k3 = mult_error = js = 0.0
        dp_abs = dp_sq = p_train_sum = p_rollout_sum = p_train_sq = p_rollout_sq = p_cross = 0.0
        positive = zero = extreme = 0
        weight_sum = weight_sq = 0.0
        weight_high = weight_low = 0
        clipped_sum = clipped_sq = k3_over_10 = 0.0
        catastrophic = 0
        entropy_n = 0
        entropy_sum = entropy_surprisal = 0.0
        first_abs = last_abs = 0.0
        ell_max = weight_max = dp_max = -np.inf
        ell_min = weight_min = abs_min = np.inf
        rank_max = -1.0
        masked = excluded = 0

        for i in range(start, stop):
            token = token_ids[i]
            known = 0 <= token < vocabulary
            repeated = known and last_seen[token] == stamp
            if known:
                last_seen[token] = stamp
            if not mask[i]:
                masked += 1
                continue

            rollout_usable, rollout_possible, r = _look(rollout[i], rollout_bits[i], counts[0])
            train_usable, train_possible, t = _look(train[i], train_bits[i], counts[1])
            if not (rollout_possible and train_possible):
                if tallies[Tally.BAD_TOKEN] < 0:
                    tallies[Tally.BAD_TOKEN] = i
                    tallies[Tally.BAD_SIDE] = 0 if not rollout_possible else 1
                continue
            if not (rollout_usable and train_usable):
                excluded += 1
                continue
            r, t = float(r), float(t)
            if r == 0.0 and t < PLACEHOLDER_BELOW:
                tallies[Tally.ROLLOUT_PLACEHOLDER] += 1

            ell = t - r
            size = abs(ell)
            p_rollout = math.exp(r)
            if size <= SAFETY_BOUND:
                e = math.expm1(ell)
                rho = 1.0 + e
                k3 = e - ell
                p_train = p_rollout * rho
                inverse = 1.0 / rho
                # −e/ρ = e^−ℓ − 1 without cancellation.
                reverse = ell - e * inverse
                safe = ell
            else:
                safe = SAFETY_BOUND if ell > 0.0 else -SAFETY_BOUND
                rho = math.exp(safe)
                k3 = rho - 1.0 - safe
                e = rho - 1.0
                p_train = math.exp(t)
                inverse = math.exp(-ell)
                reverse = inverse - 1.0 + ell
                k3_over += (math.exp(ell) - 1.0 - ell) - k3
                ell_over += ell - safe
                ell_sq_over += ell * ell - safe * safe

            if n == 0:
                first_abs = size
            last_abs = size
            n += 1
            sum_train += t
            sum_rollout += r
            rollout_sq += r * r
            square = ell * ell
            ell_sum += ell
            ell_abs += size
            ell_sq += square
            ell_cube += square * ell
            ell_fourth += square * square
            ell_rollout += ell * r
            rho_sum += rho
            rho_sq += rho * rho
            rho_deviation += abs(e)
            rho_train += rho * t
            k3_sum += k3
            reverse_k3 += reverse
            mult_error += max(math.exp(ell) if size > SAFETY_BOUND else rho, inverse)
            # log((1 + ρ)/2) − ℓ/2 = log cosh(ℓ/2); its series avoids a logarithm for nearly every token.
            if size < 0.125:
                y = 0.25 * square
                js += y * (0.5 - y * (1.0 / 12.0 - y * (1.0 / 45.0 - y * (17.0 / 2520.0))))
            else:
                js += 0.5 * size + math.log1p(math.exp(-size)) - _LN2
            dp = p_train - p_rollout
            dp_size = abs(dp)
            dp_abs += dp_size
            dp_sq += dp * dp
            dp_max = max(dp_max, dp_size)
            p_train_sum += p_train
            p_rollout_sum += p_rollout
            p_train_sq += p_train * p_train
            p_rollout_sq += p_rollout * p_rollout
            p_cross += p_train * p_rollout
            # The sign of ℓ is a coin toss: a branch on it would be mispredicted every other token.
            positive += ell > 0.0
            zero += ell == 0.0
            extreme += size > _LN2
            ell_max = max(ell_max, ell)
            ell_min = min(ell_min, ell)
            abs_min = min(abs_min, size)

            clipped = min(max(rho, lower), upper)
            clipped_sum += clipped
            clipped_sq += clipped * clipped
            if k3 > 10.0:
                k3_over_10 += k3 - 10.0
            if rho < 1e-4:
                catastrophic += 1
            weight = rho
            if rho > upper:
                weight_high += 1
                weight = 0.0 if zero_outside else upper
            elif rho < lower:
                weight_low += 1
                if zero_outside:
                    weight = 0.0
            weight_sum += weight
            weight_sq += weight * weight
            weight_max = max(weight_max, weight)
            weight_min = min(weight_min, weight)

            if ranks.shape[0] > 0:
                rank_max = max(rank_max, float(ranks[i]))

            # Curves and histogram.
            bits = np.float32(size).view(np.int32)
            k = log_bin(bits, _RATIO_SHIFT, _RATIO_BASE, _RATIO_COUNT)
            side = np.int64(ell >= 0.0)
            histogram[side, k, 0] += 1.0
            histogram[side, k, 1] += size
            if known:
                by_id[token, 0] += 1.0
                by_id[token, 1] += size

            position = positions[i] if positions.shape[0] > 0 else i - start
            k = log_bin(np.float32(max(position, 0)).view(np.int32), _POS_SHIFT, _POS_BASE, _POS_COUNT)
            _add(row[POSITION_AT + k], ell, square, size)
            k = log_bin(np.float32(-r).view(np.int32), _SURP_SHIFT, _SURP_BASE, _SURP_COUNT)
            _add(row[SURPRISAL_AT + k], ell, square, size)
            _add(row[REPETITION_AT + np.int64(repeated)], ell, square, size)
            if entropies.shape[0] > 0:
                entropy = entropies[i]
                # An entropy is finite and not negative; rounding may take it a hair below zero.
                if -ROUNDING <= entropy < np.inf:
                    entropy = max(entropy, np.float32(0.0))
                    entropy_n += 1
                    entropy_sum += entropy
                    entropy_surprisal -= t
                    k = log_bin(np.float32(entropy).view(np.int32), _SURP_SHIFT, _SURP_BASE, _SURP_COUNT)
                    _add(row[ENTROPY_AT + k], ell, square, size)
                else:
                    tallies[Tally.ENTROPY_UNUSABLE] += 1
            if segments.shape[0] > 0:
                k = min(max(segments[i], 0), NUM_SEGMENTS - 1)
                _add(row[SEGMENT_AT + k], ell, square, size)
            if versions.shape[0] > 0 and versions[i] >= 0:
                k = min(max(train_version[s] - versions[i], 0), NUM_LAGS - 1)
                _add(row[LAG_AT + k], ell, square, size)

        out = sums[s]
        out[Sum.N] = n
        out[Sum.TRAIN] = sum_train
        out[Sum.ROLLOUT] = sum_rollout
        out[Sum.ROLLOUT_SQ] = rollout_sq
        out[Sum.ELL] = ell_sum
        out[Sum.ELL_ABS] = ell_abs
        out[Sum.ELL_SQ] = ell_sq
        out[Sum.ELL_CUBE] = ell_cube
        out[Sum.ELL_FOURTH] = ell_fourth
        out[Sum.ELL_ROLLOUT] = ell_rollout
        out[Sum.RHO] = rho_sum
        out[Sum.RHO_SQ] = rho_sq
        out[Sum.RHO_DEVIATION] = rho_deviation
        out[Sum.RHO_TRAIN] = rho_train
        out[Sum.K3] = k3_sum
        out[Sum.K3_OVER] = k3_over
        out[Sum.ELL_OVER] = ell_over
        out[Sum.ELL_SQ_OVER] = ell_sq_over
        out[Sum.REVERSE_K3] = reverse_k3
        out[Sum.MULT_ERROR] = mult_error
        out[Sum.JS] = js
        out[Sum.DP_ABS] = dp_abs
        out[Sum.DP_SQ] = dp_sq
        out[Sum.P_TRAIN] = p_train_sum
        out[Sum.P_ROLLOUT] = p_rollout_sum
        out[Sum.P_TRAIN_SQ] = p_train_sq
        out[Sum.P_ROLLOUT_SQ] = p_rollout_sq
        out[Sum.P_CROSS] = p_cross
        out[Sum.POSITIVE] = positive
        out[Sum.ZERO] = zero
        out[Sum.EXTREME] = extreme
        out[Sum.WEIGHT] = weight_sum
        out[Sum.WEIGHT_SQ] = weight_sq
        out[Sum.WEIGHT_HIGH] = weight_high
        out[Sum.WEIGHT_LOW] = weight_low
        out[Sum.ENTROPY_N] = entropy_n
        out[Sum.ENTROPY] = entropy_sum
        out[Sum.ENTROPY_SURPRISAL] = entropy_surprisal
        out[Sum.FIRST_ABS] = first_abs
        out[Sum.LAST_ABS] = last_abs
        out[Sum.CLIPPED] = clipped_sum
        out[Sum.CLIPPED_SQ] = clipped_sq
        out[Sum.K3_OVER_10] = k3_over_10
        out[Sum.CATASTROPHIC] = catastrophic
        extremes[s, Extreme.ELL_MAX] = ell_max
        extremes[s, Extreme.ELL_MIN] = ell_min
        extremes[s, Extreme.WEIGHT_MAX] = weight_max
        extremes[s, Extreme.WEIGHT_MIN] = weight_min
        extremes[s, Extreme.DP_MAX] = dp_max
        extremes[s, Extreme.RANK_MAX] = rank_max
        extremes[s, Extreme.ABS_MIN] = abs_min
        tallies[Tally.TOKENS] += stop - start
        tallies[Tally.MASKED] += masked
        tallies[Tally.EXCLUDED] += excluded


@njit(inline="always")
def _add(cell, ell, square, size):
    cell[0] += 1.0
    cell[1] += ell
    cell[2] += square
    cell[3] += size
