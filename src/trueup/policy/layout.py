"""What the kernel fills: the columns of its sums, the bins of its tables, and the bounds it works with."""

from __future__ import annotations

from enum import IntEnum

from trueup.stats.logbins import LogBins

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
    POSITION = 45  # position in the response
    POSITION_SQ = 46
    ELL_ABS_POSITION = 47  # |ℓ| · position


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
