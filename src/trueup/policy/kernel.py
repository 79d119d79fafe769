"""The one pass over the tokens: numba loops that turn a block of a trace into sums.

Nothing here allocates per token. ``scan`` fills, for one block of sequences (columns: ``trueup.policy.layout``):

* ``sums[S, len(Sum)]``: per-sequence sums of per-token quantities, float64;
* ``extremes[S, len(Extreme)]``: per-sequence maxima and minima;
* ``counts[2, len(Seen)]``: what was met in the recorded values of either side, and ``tallies[len(Tally)]``;
* ``curves[R, BINS, 4]``: n, Σℓ, Σℓ², Σ|ℓ| in bins of position, surprisal, entropy, …, one row a cluster;
* ``histogram[2, .]``: tokens in log-spaced bins of |ℓ|, for ℓ >= 0 and for ℓ < 0;
* ``by_id[V]``: Σ|ℓ| by token id.

ℓ = train − rollout throughout, in nats, computed in float64 from the recorded float32 values.

A sequence is taken in tiles of a few hundred tokens. ``_gather_*`` picks the tokens that count into small arrays
that stay in cache; on those the arithmetic (``exponentials``, ``reduce_*``) is plain loops that the compiler
turns into vector instructions, which is where the speed comes from; ``correct_rare`` puts right the few tokens
that the branch-free arithmetic clamps; ``_scatter`` fills tables, one token at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from trueup.policy.layout import (
    ENTROPY_AT,
    LAG_AT,
    NUM_LAGS,
    NUM_SEGMENTS,
    PLACEHOLDER_BELOW,
    POSITION_AT,
    POSITION_BINS,
    RATIO_BINS,
    REPETITION_AT,
    ROUNDING,
    SEGMENT_AT,
    SURPRISAL_AT,
    SURPRISAL_BINS,
    Extreme,
    Seen,
    Sum,
    Tally,
)
from trueup.policy.tile_arithmetic import (
    REDUCE,
    SERIES_BELOW,
    correct_rare,
    exponentials,
    reduce_logs,
    reduce_probabilities,
    reduce_ratios,
)
from trueup.stats.logbins import log_bin

# numba freezes module-level integers into the compiled code; attributes of a dataclass it cannot read.
_RATIO_SHIFT, _RATIO_BASE, _RATIO_COUNT = RATIO_BINS.shift, RATIO_BINS.base, RATIO_BINS.count
_SURP_SHIFT, _SURP_BASE, _SURP_COUNT = SURPRISAL_BINS.shift, SURPRISAL_BINS.base, SURPRISAL_BINS.count
_POS_SHIFT, _POS_BASE, _POS_COUNT = POSITION_BINS.shift, POSITION_BINS.base, POSITION_BINS.count
# The first whole position of each bin.
_POS_EDGES = np.ceil(POSITION_BINS.edges)

_MISSING_BITS = np.int32(0x7FC00001)
_TILE = 512


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
def _gather_all(first, rollout, train, mask, counts, tallies, r, t, where):
    """Take the whole tile if every token counts and both its log-probabilities are ordinary; returns whether.

    Exact zeros are ordinary: a model that is certain gives them by the thousand.
    """
    unusual = False
    rollout_zeros = train_zeros = placeholders = 0
    for k in range(rollout.shape[0]):
        x, y = rollout[k], train[k]
        unusual |= not ((x >= -100.0) & (x <= 0.0) & (y >= -100.0) & (y <= 0.0) & mask[k])
        rollout_zeros += x == 0.0
        train_zeros += y == 0.0
        placeholders += (x == 0.0) & (y < PLACEHOLDER_BELOW)
        r[k], t[k] = x, y
        where[k] = first + k
    if unusual:
        return False
    counts[0, Seen.EXACT_ZERO] += rollout_zeros
    counts[1, Seen.EXACT_ZERO] += train_zeros
    tallies[Tally.ROLLOUT_PLACEHOLDER] += placeholders
    return True


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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
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


@njit(nogil=True, cache=True, error_model="numpy", fastmath=REDUCE)
def _sum_positions(m, place, ell, out):
    """Add the sums of the tokens' positions."""
    sum_position = position_sq = ell_abs_position = 0.0
    for k in range(m):
        sum_position += place[k]
        position_sq += place[k] * place[k]
        ell_abs_position += place[k] * abs(ell[k])
    out[Sum.POSITION] += sum_position
    out[Sum.POSITION_SQ] += position_sq
    out[Sum.ELL_ABS_POSITION] += ell_abs_position


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter_positions(m, start, ell, where, positions, place, row, out):
    """Add the tokens to the bins of their positions, run by run: neighbours mostly share one."""
    if positions.shape[0] > 0:
        for k in range(m):
            place[k] = max(positions[where[k]], 0)
    else:
        for k in range(m):
            place[k] = where[k] - start
    _sum_positions(m, place, ell, out)
    # Consecutive positions share a bin up to its edge; others are looked at one by one.
    consecutive = place[m - 1] - place[0] == m - 1 and positions.shape[0] == 0
    begin = 0
    while begin < m:
        bin_ = log_bin(np.float32(place[begin]).view(np.int32), _POS_SHIFT, _POS_BASE, _POS_COUNT)
        end = min(m, begin + int(min(_POS_EDGES[bin_ + 1] - place[begin], m))) if consecutive else begin + 1
        _add_run(begin, end, ell, row[POSITION_AT + bin_])
        begin = end


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
    where, place, repeated = np.empty(_TILE, np.int64), np.empty(_TILE), np.empty(_TILE)
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
            m = last - first
            if not _gather_all(
                first, rollout[first:last], train[first:last], mask[first:last], counts, tallies, r, t, where
            ):
                m = _gather_some(
                    first, last, rollout, rollout_bits, train, train_bits, mask, counts, tallies, impossible,
                    r, t, where, repeated,
                )  # fmt: skip
            if m == 0:
                continue
            _count_grids(m, r, counts[0])
            _count_grids(m, t, counts[1])
            exponentials(m, r, t, ell, e, p)
            if out[Sum.N] == 0.0:
                out[Sum.FIRST_ABS] = abs(ell[0])
            out[Sum.LAST_ABS] = abs(ell[m - 1])
            repetition = row[REPETITION_AT : REPETITION_AT + 2]
            largest = reduce_logs(m, r, t, ell, repeated, out, ext, repetition)
            reduce_ratios(m, t, ell, e, upper, lower, zero_outside, out, ext)
            reduce_probabilities(m, e, p, out, ext)
            if largest >= SERIES_BELOW:
                correct_rare(m, t, ell, e, p, out, ext)
            _scatter(m, r, ell, where, token_ids, row, histogram, by_id)
            _scatter_positions(m, start, ell, where, positions, place, row, out)
            if optional:
                _scatter_optional(
                    m, t, ell, where, entropies, segments, versions, train_now, ranks, row, out, ext, tallies
                )
