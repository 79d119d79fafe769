"""``MismatchSums``: everything that the mismatch report needs, as sums that merge.

A trace of any size is a map-reduce: ``scan_trace`` turns blocks of sequences into ``MismatchSums``, ``merge`` adds
them up. The result does not depend on block size, on row order or on the order of merging (to rounding), and its
size does not depend on the number of tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trueup.errors import InputError
from trueup.evidence.trace import TokenTrace
from trueup.policy import kernel, layout, side_scans
from trueup.policy.layout import Seen, Sum, Tally
from trueup.policy.rollout_correction import RolloutCorrection, sequence_statistics
from trueup.policy.side_scans import CurrentSum
from trueup.stats.clusters import ClusterSums, dense_rows, mix
from trueup.stats.logbins import LogBins

Array = npt.NDArray[np.float64]
Item = TypeVar("Item")
Result = TypeVar("Result")

#: Tokens a block: large enough to hide the cost of a call, small enough to keep every core busy.
BLOCK_TOKENS = 1 << 19
#: Clusters kept apart for the gaps' intervals, and for the curves' (which need a table of bins each).
MAX_CLUSTERS, MAX_CURVE_CLUSTERS = 1 << 14, 128
#: Sequences kept whole for the report's reader.
WORST = 12
#: Token ids at or above this are counted but not told apart.
MAX_VOCABULARY = 1 << 20

SEQUENCE_BINS = LogBins(lowest=-24, highest=20, split=3)

#: Per-sequence columns derived from the kernel's sums; a mean over sequences divides by "seqs" or by "batch".
SEQUENCE_COLUMNS = (
    "seqs",  # sequences with a token that counts
    "batch",  # all sequences: frameworks that average over the batch let an empty one count as zero
    "seq_log_ppl_train",  # −mean log π
    "seq_ppl_train",
    "seq_log_ppl_rollout",
    "seq_ppl_rollout",
    "seq_diff",  # mean log μ − mean log π
    "seq_diff_abs",
    "seq_ppl_ratio",  # e^diff
    "seq_ratio",  # e^Σℓ, Σℓ clamped to ±20
    "seq_ratio_sq",
    "seq_geometric_sq",  # e^(2 · mean ℓ)
    "seq_abs",  # mean |ℓ|
    "seq_deviation",  # mean |e^ℓ − 1|
    "seq_rho",  # mean e^ℓ
    "seq_outside",  # share of ratios above the upper threshold
    "seq_mult_error",  # mean e^|ℓ|
    "seq_catastrophic",  # has a token with e^ℓ < 1e-4
    "seq_ratio_kept_3",  # e^Σℓ where it is at most 3, else 0 (not clamped)
)
SEQUENCE_EXTREMES = ("seq_diff", "seq_mult_error", "seq_ratio_kept_3")
TOKEN_COLUMNS = tuple(column.name.lower() for column in Sum)
CURRENT_COLUMNS = tuple(f"current_{column.name.lower()}" for column in CurrentSum)


def table_columns(correction: RolloutCorrection) -> tuple[str, ...]:
    """Names of the columns of ``MismatchSums.table``."""
    return TOKEN_COLUMNS + SEQUENCE_COLUMNS + CURRENT_COLUMNS + correction.columns


def extreme_names(correction: RolloutCorrection) -> tuple[str, ...]:
    """Names of ``MismatchSums.maxima`` and ``minima``."""
    return ("ell", "dp", "rank", "ell_abs", *SEQUENCE_EXTREMES, *correction.extremes)


@dataclass(frozen=True, slots=True)
class WorstSequence:
    """A sequence kept whole (row ``row`` of ``trace``), with how much it adds to the sum of k3."""

    k3: float
    key: int
    trace: TokenTrace
    row: int

    def rank(self) -> tuple[float, int, str, float]:
        """Sorts the worst first. Ties are broken by what the sequence is, so that merging stays symmetric."""
        start = int(self.trace.offsets[self.row])
        first = float(self.trace.rollout_logprobs[start])
        return -self.k3, self.key, str(self.trace.sequence_id[self.row]), first


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Mergeable statistics of a trace; see ``scan_trace``.

    ``table`` and ``curves`` are sums by cluster (prompt group); ``maxima``/``minima`` by ``extreme_names``;
    ``histogram``, ``by_id``, ``counts``, ``tallies`` as in ``trueup.policy.kernel``; ``lags[7, 6]`` as in
    ``lag_scan``; ``sequence_histogram[., 2]`` holds n and Σ of the sequences' Σ|ℓ|.
    """

    correction: RolloutCorrection
    columns: frozenset[str]
    table: ClusterSums
    curves: ClusterSums
    maxima: Array
    minima: Array
    counts: npt.NDArray[np.int64]
    tallies: npt.NDArray[np.int64]
    histogram: Array
    sequence_histogram: Array
    by_id: Array
    lags: Array
    worst: tuple[WorstSequence, ...]

    def merge(self, other: MismatchSums) -> MismatchSums:
        """The statistics of both together: associative, and symmetric to rounding.

        Raises ``InputError`` when the two were made with different corrections or observed different columns.
        """
        if self.correction != other.correction:
            raise InputError("the two parts were measured with different rollout-correction options")
        if self.columns != other.columns:
            odd = ", ".join(sorted(self.columns ^ other.columns))
            raise InputError(f"the two parts do not have the same columns: {odd} is in one of them only")
        return MismatchSums(
            correction=self.correction,
            columns=self.columns,
            table=self.table.merge(other.table),
            curves=self.curves.merge(other.curves),
            maxima=np.maximum(self.maxima, other.maxima),
            minima=np.minimum(self.minima, other.minima),
            counts=self.counts + other.counts,
            tallies=self.tallies + other.tallies,
            histogram=self.histogram + other.histogram,
            sequence_histogram=self.sequence_histogram + other.sequence_histogram,
            by_id=_add_padded(self.by_id, other.by_id),
            lags=self.lags + other.lags,
            worst=tuple(sorted([*self.worst, *other.worst], key=WorstSequence.rank)[:WORST]),
        )

    @property
    def cluster_unit(self) -> str:
        """What a cluster is, in words."""
        return "prompt groups" if "group" in self.columns else "sequences"

    def by_cluster(self, column: str) -> Array:
        """A column of ``table`` by name, one value a cluster."""
        return np.asarray(self.table.sums[:, table_columns(self.correction).index(column)])

    def totals(self) -> dict[str, float]:
        """Every column of ``table`` by name, summed over clusters."""
        return dict(zip(table_columns(self.correction), map(float, self.table.total()), strict=True))

    def worst_trace(self) -> TokenTrace | None:
        """The sequences that carry most of k3, worst first; ``None`` without any that differ."""
        if not self.worst:
            return None
        return TokenTrace.concatenate([kept.trace.take([kept.row]) for kept in self.worst])


def scan_trace(
    trace: TokenTrace,
    *,
    correction: RolloutCorrection | None = None,
    threads: int | None = None,
    block_tokens: int | None = None,
) -> MismatchSums:
    """Measure a trace in one pass, block by block on ``threads`` threads (default: one a core).

    Blocks are merged in order, so the result is the same for any number of threads. Raises ``InputError`` for a
    log-probability above zero by more than rounding, with its row, and for an empty trace.
    """
    correction = correction or RolloutCorrection()
    if len(trace) == 0:
        raise InputError("has no sequences", file=trace.source or None)
    keys = cluster_keys(trace)
    vocabulary = min(int(trace.token_ids.max(initial=0)) + 1, MAX_VOCABULARY)
    blocks = _block_bounds(trace.offsets, block_tokens or _even_block(trace.offsets))

    def scan(bounds: tuple[int, int]) -> MismatchSums:
        return _scan_block(trace, bounds, keys[bounds[0] : bounds[1]], correction, vocabulary)

    total: MismatchSums | None = None
    for part in _ordered_map(scan, blocks, threads or os.cpu_count() or 1):
        total = part if total is None else total.merge(part)
    assert total is not None
    # Copied once, here: the sums of a chunk must not keep the chunk alive.
    kept = trace.take([worst.row for worst in total.worst])
    return replace(
        total, worst=tuple(replace(worst, trace=kept, row=row) for row, worst in enumerate(total.worst))
    )


def scan_chunks(
    trace: TokenTrace | Iterable[TokenTrace], *, correction: RolloutCorrection | None = None
) -> MismatchSums:
    """Measure a trace, or the chunks of one as they come. Raises ``InputError`` as ``scan_trace`` does."""
    total: MismatchSums | None = None
    for chunk in [trace] if isinstance(trace, TokenTrace) else trace:
        part = scan_trace(chunk, correction=correction)
        total = part if total is None else total.merge(part)
    if total is None:
        raise InputError("has no sequences")
    return total


def cluster_keys(trace: TokenTrace) -> npt.NDArray[np.int64]:
    """The key of each sequence's cluster: its prompt group, else its own place in its own file."""
    if trace.group is not None:
        return trace.group
    seed = int.from_bytes(hashlib.blake2b(trace.source.encode(), digest_size=8).digest(), "little", signed=True)
    rows = np.arange(trace.first_row, trace.first_row + len(trace), dtype=np.int64)
    return mix(rows ^ np.int64(seed)).view(np.int64)


def _scan_block(
    trace: TokenTrace,
    bounds: tuple[int, int],
    keys: npt.NDArray[np.int64],
    correction: RolloutCorrection,
    vocabulary: int,
) -> MismatchSums:
    block = trace.block(*bounds)
    sequences = len(block)
    curve_keys, curve_row, curves_pooled = dense_rows(keys, capacity=MAX_CURVE_CLUSTERS)
    sums = np.zeros((sequences, len(Sum)))
    extremes = np.zeros((sequences, len(layout.Extreme)))
    counts = np.zeros((2, len(Seen)), dtype=np.int64)
    tallies = np.zeros(len(Tally), dtype=np.int64)
    impossible = np.full(2, -1, dtype=np.int64)
    curves = np.zeros((len(curve_keys), layout.BINS, 4))
    histogram = np.zeros((2, layout.RATIO_BINS.count))
    by_id = np.zeros(vocabulary)
    offsets, mask = _kernel_input(block.offsets, np.int64), _kernel_input(block.mask, np.bool_)
    rollout = _kernel_input(block.rollout_logprobs, np.float32)
    train = _kernel_input(block.train_logprobs, np.float32)
    prompts = block.prompt_ids
    kernel.scan(
        offsets,
        rollout,
        rollout.view(np.int32),
        train,
        train.view(np.int32),
        mask,
        _kernel_input(block.token_ids, np.int32),
        _kernel_input(block.positions, np.int32),
        _kernel_input(block.segments, np.int32),
        _kernel_input(block.entropies, np.float32),
        _kernel_input(block.versions, np.int32),
        _kernel_input(_train_versions(block), np.int32),
        _kernel_input(block.train_ranks, np.int32),
        _kernel_input(prompts.values if prompts is not None else None, np.int32),
        _kernel_input(prompts.offsets if prompts is not None else None, np.int64),
        curve_row,
        correction.is_upper,
        correction.low,
        correction.is_lower is not None,
        sums,
        extremes,
        counts,
        tallies,
        impossible,
        curves,
        histogram,
        by_id,
        np.zeros(vocabulary, dtype=np.int32),
    )
    _refuse_impossible(block, impossible)
    lags = np.zeros((len(side_scans.LAGS), 6))
    side_scans.lag_scan(offsets, rollout, train, mask, lags)
    current = np.zeros((sequences, len(CurrentSum)))
    if block.current_logprobs is not None:
        latest = _kernel_input(block.current_logprobs, np.float32)
        side_scans.scan_current(offsets, rollout, train, latest, mask, current)
    corrected = sequence_statistics(
        correction, sums, extremes, offsets=offsets, rollout=rollout, train=train, mask=mask
    )
    derived, derived_maxima, derived_minima = _derive(sums)
    rows = np.concatenate([sums, derived, current, corrected.columns], axis=1)
    total_abs = sums[:, Sum.ELL_ABS]
    bins = SEQUENCE_BINS.index(total_abs)
    sequence_histogram = np.stack(
        [np.bincount(bins, weights=weights, minlength=SEQUENCE_BINS.count) for weights in (None, total_abs)],
        axis=1,
    ).astype(np.float64)
    ell_max, ell_min = extremes[:, layout.Extreme.ELL_MAX], extremes[:, layout.Extreme.ELL_MIN]
    dp_max, rank_max = extremes[:, layout.Extreme.DP_MAX], extremes[:, layout.Extreme.RANK_MAX]
    ell_abs = np.maximum(np.abs(ell_max), np.abs(ell_min))
    # A sequence without a token that counts has no extremes: its −inf/inf must not become a |ℓ| of inf.
    ell_abs[sums[:, Sum.N] == 0] = -np.inf
    maxima = np.stack([ell_max, dp_max, rank_max, ell_abs], axis=1).max(axis=0)
    minima = np.stack([ell_min, dp_max, rank_max, extremes[:, layout.Extreme.ABS_MIN]], axis=1).min(axis=0)
    return MismatchSums(
        correction=correction,
        columns=frozenset(block.column_names),
        table=ClusterSums.from_rows(keys, rows, capacity=MAX_CLUSTERS),
        curves=ClusterSums(curve_keys, curves, MAX_CURVE_CLUSTERS, curves_pooled),
        maxima=np.concatenate([maxima, derived_maxima, corrected.maxima.max(axis=0)]),
        minima=np.concatenate([minima, derived_minima, corrected.minima.min(axis=0)]),
        counts=counts,
        tallies=tallies,
        histogram=histogram,
        sequence_histogram=sequence_histogram,
        by_id=by_id,
        lags=lags,
        worst=_worst_of_block(trace, bounds[0], sums, keys),
    )


def _derive(sums: Array) -> tuple[Array, Array, Array]:
    """``SEQUENCE_COLUMNS`` of each sequence, and maxima and minima of ``SEQUENCE_EXTREMES`` over sequences."""
    n = sums[:, Sum.N]
    valid = n > 0
    tokens = np.where(valid, n, 1.0)
    log_train, log_rollout = sums[:, Sum.TRAIN] / tokens, sums[:, Sum.ROLLOUT] / tokens
    diff = log_rollout - log_train
    total = sums[:, Sum.ELL]
    bound = layout.SAFETY_BOUND
    ratio = np.exp(np.clip(total, -bound, bound))
    raw_ratio = np.exp(np.minimum(total, 700.0))
    kept = np.where(raw_ratio <= 3.0, raw_ratio, 0.0)
    mult_error = sums[:, Sum.MULT_ERROR] / tokens
    columns = np.stack(
        [
            valid.astype(np.float64),
            np.ones_like(n),
            -log_train,
            np.exp(-log_train),
            -log_rollout,
            np.exp(-log_rollout),
            diff,
            np.abs(diff),
            np.exp(diff),
            ratio,
            ratio**2,
            np.exp(2.0 * np.clip(-diff, -bound, bound)),
            sums[:, Sum.ELL_ABS] / tokens,
            sums[:, Sum.RHO_DEVIATION] / tokens,
            sums[:, Sum.RHO] / tokens,
            sums[:, Sum.WEIGHT_HIGH] / tokens,
            mult_error,
            (sums[:, Sum.CATASTROPHIC] > 0).astype(np.float64),
            kept,
        ],
        axis=1,
    )
    # The ratios of an empty sequence are 1 by convention (Σ over nothing), and verl takes its extremes over all.
    highest = [diff.max(), np.where(valid, mult_error, -np.inf).max(), kept.max()]
    lowest = [diff.min(), np.where(valid, mult_error, np.inf).min(), kept.min()]
    return columns, np.array(highest), np.array(lowest)


def _refuse_impossible(block: TokenTrace, impossible: npt.NDArray[np.int64]) -> None:
    """Raise for the first log-probability that cannot be one."""
    token = int(impossible[0])
    if token < 0:
        return
    side, values = (
        ("rollout_logprobs", block.rollout_logprobs)
        if impossible[1] == 0
        else ("train_logprobs", block.train_logprobs)
    )
    sequence = int(np.searchsorted(block.offsets, token, side="right")) - 1
    position = token - int(block.offsets[sequence])
    raise InputError(
        f"{values[token]:.6g} at token {position} is no log-probability: it is above zero by more than rounding",
        file=block.source or None,
        row=block.first_row + sequence,
        field=side,
    )


def _train_versions(block: TokenTrace) -> npt.NDArray[np.int32]:
    """The version of the weights that scored each sequence; where unrecorded, the newest that sampled it."""
    if block.train_version is not None:
        return block.train_version
    newest = np.zeros(len(block), dtype=np.int32)
    if block.versions is not None and block.num_tokens:
        filled = block.lengths > 0
        newest[filled] = np.maximum.reduceat(block.versions, block.offsets[:-1][filled])
    return newest


def _worst_of_block(
    trace: TokenTrace, first: int, sums: Array, keys: npt.NDArray[np.int64]
) -> tuple[WorstSequence, ...]:
    k3 = sums[:, Sum.K3] + sums[:, Sum.K3_OVER]
    order = np.argsort(-k3, kind="stable")[:WORST]
    order = order[k3[order] > 0.0]
    return tuple(WorstSequence(float(k3[row]), int(keys[row]), trace, first + int(row)) for row in order)


def _even_block(offsets: npt.NDArray[np.int64]) -> int:
    """Tokens a block so that there are four blocks, or a multiple: two or four cores then share them evenly.

    It must not depend on how many cores there are, or the last bits of the sums would.
    """
    tokens = int(offsets[-1])
    if tokens <= BLOCK_TOKENS // 2:
        return BLOCK_TOKENS
    blocks = 4 * max(1, round(tokens / (4 * BLOCK_TOKENS)))
    # Blocks end where a sequence does: without room for one more, a sliver would be left over.
    return tokens // blocks + int(np.diff(offsets).max())


def _block_bounds(offsets: npt.NDArray[np.int64], block_tokens: int) -> list[tuple[int, int]]:
    """Runs of whole sequences of about ``block_tokens`` tokens."""
    sequences = len(offsets) - 1
    bounds, start = [], 0
    while start < sequences:
        stop = int(np.searchsorted(offsets, offsets[start] + block_tokens, side="right")) - 1
        stop = min(max(stop, start + 1), sequences)
        bounds.append((start, stop))
        start = stop
    return bounds


def _ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Results in order, from ``threads`` threads, with no more than two items a thread in flight."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _add_padded(left: Array, right: Array) -> Array:
    if len(left) < len(right):
        left, right = right, left
    total = left.copy()
    total[: len(right)] += right
    return total


def _kernel_input(column: npt.NDArray[Any] | None, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The column as the kernels take every input: contiguous, read-only, of one dtype; length 0 where absent.

    numba compiles anew for each combination of writable and read-only arguments, and a file's columns are either.
    """
    view = np.ascontiguousarray(np.zeros(0) if column is None else column, dtype=dtype).view()
    view.flags.writeable = False
    return view
