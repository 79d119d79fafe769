"""The accumulators: chunking, row order, padding and the order of merging change nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.synthetic import random_trace

from trueup.errors import InputError
from trueup.evidence import MISSING, TokenTrace
from trueup.policy import MismatchSums, RolloutCorrection, kernel, mismatch, report_mismatch, scan_trace
from trueup.policy import sums as sums_module

EXACT = {"tallies", "counts"}


def assert_same(left: MismatchSums, right: MismatchSums) -> None:
    for field in ("maxima", "minima", "counts", "tallies", "histogram", "sequence_histogram", "by_id", "lags"):
        a, b = getattr(left, field), getattr(right, field)
        if field in EXACT:
            assert np.array_equal(a, b), field
        else:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=field)
    for field in ("table", "curves"):
        a, b = getattr(left, field), getattr(right, field)
        assert np.array_equal(a.keys, b.keys)
        assert a.pooled == b.pooled
        np.testing.assert_allclose(a.sums, b.sums, rtol=1e-9, atol=1e-9, err_msg=field)
    worst = [(kept.k3, str(kept.trace.sequence_id[kept.row])) for kept in left.worst]
    assert worst == [(kept.k3, str(kept.trace.sequence_id[kept.row])) for kept in right.worst]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.tuples(st.integers(1, 39), st.integers(1, 39)))
def test_merge_is_associative_and_symmetric(seed: int, cuts: tuple[int, int]) -> None:
    trace = random_trace(np.random.default_rng(seed))
    first, second = sorted(cuts)
    parts = [trace.block(0, first), trace.block(first, second), trace.block(second, len(trace))]
    a, b, c = (scan_trace(part) if len(part) else None for part in parts)
    if b is None:
        assert_same(a.merge(c), scan_trace(trace))
        assert_same(c.merge(a), scan_trace(trace))
        return
    whole = scan_trace(trace)
    assert_same(a.merge(b).merge(c), whole)
    assert_same(a.merge(b.merge(c)), whole)
    assert_same(c.merge(a).merge(b), whole)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), block_tokens=st.integers(1, 300), threads=st.integers(1, 3))
def test_blocks_and_threads_change_nothing(seed: int, block_tokens: int, threads: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    assert_same(scan_trace(trace, block_tokens=block_tokens, threads=threads), scan_trace(trace))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_row_order_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    shuffled = trace.take(rng.permutation(len(trace)))
    assert_same(scan_trace(shuffled), scan_trace(trace))
    one, other = mismatch(trace, replicates=50), mismatch(shuffled, replicates=50)
    assert [gap.name for gap in one.gaps] == [gap.name for gap in other.gaps]
    for gap, again in zip(one.gaps, other.gaps, strict=True):
        for value, expected in ((gap.value, again.value), (gap.low, again.low), (gap.high, again.high)):
            assert value == expected or value == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), left=st.integers(0, 5), right=st.integers(0, 5))
def test_padding_changes_nothing(seed: int, left: int, right: int) -> None:
    trace = random_trace(np.random.default_rng(seed), holes=False)
    width = int(trace.lengths.max()) + left + right
    grid = {
        name: np.zeros((len(trace), width), np.float32) for name in ("ids", "rollout", "train", "mask", "there")
    }
    for row, (start, stop) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        place = slice(left, left + int(stop - start))
        grid["ids"][row, place] = trace.token_ids[start:stop]
        grid["rollout"][row, place] = trace.rollout_logprobs[start:stop]
        grid["train"][row, place] = trace.train_logprobs[start:stop]
        grid["mask"][row, place] = trace.mask[start:stop]
        grid["there"][row, place] = 1
    again = TokenTrace.from_padded(
        grid["ids"].astype(np.int32), grid["rollout"], grid["train"], grid["mask"], attention_mask=grid["there"],
        group=trace.group,
    )  # fmt: skip
    bare = dataclasses.replace(trace, entropies=None, segments=None, versions=None)
    assert_same(scan_trace(again), scan_trace(bare))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_equal_sides_give_zero_and_one_exactly(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    report = mismatch(dataclasses.replace(trace, train_logprobs=trace.rollout_logprobs), replicates=20)
    zero = {
        "mean_abs_log_ratio", "max_abs_log_ratio", "mean_k1", "mean_k2", "mean_k3", "mean_abs_prob_diff",
        "max_abs_prob_diff", "extreme_fraction", "chi2_token", "js_divergence", "log_ratio_std", "mean_ratio_z",
        "length_times_k3", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_seq",
        "rollout_corr/log_ppl_diff", "rollout_corr/rollout_is_std", "rollout_corr/rollout_rs_masked_fraction",
        "nemo_rl/gen_kl_error", "nemo_rl/policy_kl_error", "nemo_rl/js_divergence_error", "mismatch_kl/all/max",
        "slime/tis_abs", "positive_fraction", "mean_k1_z",
    }  # fmt: skip
    one = {
        "mean_ratio", "ess_fraction", "sequence_ess_fraction", "exact_zero_fraction", "rollout_corr/ppl_ratio",
        "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_max", "rollout_corr/rollout_is_min",
        "rollout_corr/rollout_is_eff_sample_size", "nemo_rl/token_mult_prob_error", "slime/tis",
        "sampling/importance_sampling_ratio/mean", "rollout_correction/ess",
    }  # fmt: skip
    assert {name: report[name].value for name in zero} == dict.fromkeys(zero, 0.0)
    assert {name: report[name].value for name in one} == dict.fromkeys(one, 1.0)
    assert report["prob_pearson"].value == pytest.approx(1.0, abs=1e-12)


def test_many_clusters_are_pooled_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "MAX_CLUSTERS", 8)
    trace = dataclasses.replace(random_trace(np.random.default_rng(0)), group=np.arange(40))
    whole = scan_trace(trace)
    assert whole.table.pooled
    assert len(whole.table) <= 8
    parts = [scan_trace(trace.block(i, i + 4)) for i in range(0, 40, 4)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert_same(merged, whole)
    monkeypatch.undo()
    np.testing.assert_allclose(whole.table.total(), scan_trace(trace).table.total(), rtol=1e-12)


def sentinels() -> TokenTrace:
    ok = -1.0
    rollout = [ok, MISSING, math.nan, -math.inf, -9999.0, 0.0, ok, ok, -150.0, 0.0, 5e-4, ok]
    train = [ok, ok, ok, ok, ok, 0.0, MISSING, -math.inf, -150.0, -3.0, ok, ok]
    mask = [True] * 11 + [False]
    return TokenTrace(
        offsets=np.array([0, 12]),
        token_ids=np.arange(12, dtype=np.int32),
        rollout_logprobs=np.array(rollout, dtype=np.float32),
        train_logprobs=np.array(train, dtype=np.float32),
        mask=np.array(mask),
        sequence_id=np.array(["only"]),
    )


def test_every_sentinel_is_counted_and_nothing_else_is_dropped() -> None:
    report = mismatch(sentinels(), replicates=0)
    expected = {
        "tokens": 12, "masked_tokens": 1, "excluded_tokens": 6, "counted_tokens": 5,
        "rollout_missing": 1, "rollout_nan": 1, "rollout_minus_infinity": 1, "rollout_sentinel_9999": 1,
        "train_missing": 1, "train_nan": 0, "train_minus_infinity": 1, "train_sentinel_9999": 0,
        "rollout_exact_zero": 2, "train_exact_zero": 1, "rollout_placeholder_zero": 1,
        "rollout_clamped_above_zero": 1, "rollout_below_minus_100": 1, "train_below_minus_100": 1,
    }  # fmt: skip
    assert {name: report.counts[name] for name in expected} == expected
    # ℓ of the five that are left: 0, 0, 0, −3 (against 0.0) and −1 (against 5e-4 clamped to 0).
    assert report["mean_abs_log_ratio"].value == pytest.approx(4.0 / 5.0)
    assert report["mean_abs_log_ratio"].n == 5


@pytest.mark.parametrize("bad", [1.1e-3, 0.5, math.inf])
@pytest.mark.parametrize("side", ["rollout_logprobs", "train_logprobs"])
def test_a_log_probability_above_zero_names_its_row(bad: float, side: str) -> None:
    trace = random_trace(np.random.default_rng(1), holes=False)
    values = getattr(trace, side).copy()
    counted = np.flatnonzero(trace.mask & (np.arange(trace.num_tokens) >= trace.offsets[17]))
    values[counted[0]] = bad
    row = int(np.searchsorted(trace.offsets, counted[0], side="right")) - 1
    with pytest.raises(InputError, match="no log-probability") as raised:
        scan_trace(dataclasses.replace(trace, **{side: values}, source="a.parquet", first_row=100))
    assert (raised.value.file, raised.value.row, raised.value.field) == ("a.parquet", 100 + row, side)


def test_masked_rubbish_is_not_looked_at() -> None:
    trace = random_trace(np.random.default_rng(1))
    rollout = np.where(trace.mask, trace.rollout_logprobs, np.float32(7.0))
    assert_same(scan_trace(dataclasses.replace(trace, rollout_logprobs=rollout)), scan_trace(trace))


def test_what_cannot_be_measured_says_so() -> None:
    trace = random_trace(np.random.default_rng(1))
    with pytest.raises(InputError, match="no token can be compared"):
        mismatch(dataclasses.replace(trace, mask=np.zeros_like(trace.mask)))
    with pytest.raises(InputError, match="no sequences"):
        mismatch(trace.take([]))
    with pytest.raises(InputError, match="no sequences"):
        mismatch([])
    other = scan_trace(dataclasses.replace(trace, entropies=None))
    with pytest.raises(InputError, match="entropies"):
        scan_trace(trace).merge(other)
    with pytest.raises(InputError, match="different rollout-correction"):
        scan_trace(trace).merge(scan_trace(trace, correction=RolloutCorrection.parse(is_threshold="3")))


def test_curves_add_up_and_deciles_are_even() -> None:
    trace = random_trace(np.random.default_rng(5), sequences=400)
    report = mismatch(trace, replicates=50)
    counted = report.counts["counted_tokens"]
    ell = trace.train_logprobs.astype(np.float64) - trace.rollout_logprobs
    for axis in ("position", "probability", "entropy", "segment", "version_lag", "repetition"):
        curve = report.curve(f"mean_abs_log_ratio_by_{axis}")
        assert sum(curve.n) == counted, axis
        total = sum(n * value for n, value in zip(curve.n, curve.value, strict=True))
        assert total == pytest.approx(np.abs(ell[trace.mask]).sum(), rel=1e-6), axis
        assert all(left <= right for left, right in zip(curve.left, curve.right, strict=True))
        for low, value, high in zip(curve.low, curve.value, curve.high, strict=True):
            assert low is None or low <= value <= high
    deciles = report.curve("mean_log_ratio_by_probability")
    assert len(deciles.n) == 10
    assert max(deciles.n) < 2 * min(deciles.n)
    # Least probable first.
    assert deciles.left == tuple(sorted(deciles.left))
    first = report.curve("mean_log_ratio_by_position")
    starts = trace.offsets[:-1][trace.lengths > 0]
    starts = starts[trace.mask[starts]]
    assert (first.n[0], first.value[0]) == (len(starts), pytest.approx(ell[starts].mean(), rel=1e-6))
    assert sum(report.curve("log_ratio_histogram").n) == counted


def test_lag_and_repetition_and_segment_by_hand() -> None:
    trace = TokenTrace.from_lists(
        [[5, 5, 6, 7]], [[-1.0] * 4], [[-1.1, -1.2, -1.4, -1.8]],
        segments=[[0, 0, 1, 2]], versions=[[3, 3, 2, -1]], prompt_ids=[[7]],
    )  # fmt: skip
    report = mismatch(trace, replicates=0)
    # Token 5 is seen again at position 1, token 7 stands in the prompt.
    again = report.curve("mean_abs_log_ratio_by_repetition")
    assert again.n == (2, 2)
    assert again.value == pytest.approx(((0.1 + 0.4) / 2, (0.2 + 0.8) / 2), abs=1e-6)
    assert report.curve("mean_abs_log_ratio_by_segment").value == pytest.approx((0.15, 0.4, 0.8), abs=1e-6)
    # Lag is counted from the newest version of the sequence; −1 has none.
    lag = report.curve("mean_abs_log_ratio_by_version_lag")
    assert lag.left == (0.0, 1.0)
    assert lag.value == pytest.approx((0.15, 0.4), abs=1e-6)


def test_worst_sequences_carry_most_of_k3() -> None:
    trace = random_trace(np.random.default_rng(2), sequences=60, holes=False)
    ell = trace.train_logprobs.astype(np.float64) - trace.rollout_logprobs
    k3 = np.where(trace.mask, np.exp(ell) - 1 - ell, 0.0)
    by_sequence = np.add.reduceat(k3, trace.offsets[:-1])
    worst = scan_trace(trace, block_tokens=50).worst_trace()
    assert worst is not None
    assert worst.sequence_id.tolist() == np.argsort(-by_sequence)[:12].tolist()


def test_bootstrap_interval_covers_the_truth() -> None:
    # 300 traces of 30 prompts whose mean |ℓ| varies by prompt: the 95% interval should hold the true mean in
    # about 95 of 100; with 30 clusters the percentile bootstrap is known to fall a little short.
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(300):
        scale = np.repeat(rng.uniform(0.5, 1.5, 30), 40)
        ell = 0.1 * scale * rng.choice([-1.0, 1.0], 1200)
        trace = TokenTrace(
            offsets=np.arange(0, 1201, 20), token_ids=np.zeros(1200, np.int32),
            rollout_logprobs=np.full(1200, -2.0, np.float32), train_logprobs=(ell - 2.0).astype(np.float32),
            mask=np.ones(1200, np.bool_), sequence_id=np.arange(60), group=np.arange(60) // 2,
        )  # fmt: skip
        gap = report_mismatch(scan_trace(trace), replicates=200, seed=1)["mean_abs_log_ratio"]
        covered += gap.low <= 0.1 <= gap.high
    assert 0.90 <= covered / 300 <= 0.98


def test_histogram_keeps_signs_apart() -> None:
    trace = TokenTrace.from_lists([[1] * 4], [[-1.0] * 4], [[-1.0, -1.25, -1.25, -0.5]])
    curve = mismatch(trace, replicates=0).curve("log_ratio_histogram")
    # ℓ = −.25 twice, 0 once, .5 once; bins are a quarter of an octave, in increasing order.
    assert list(zip(curve.left, curve.right, curve.n, strict=True)) == [
        (-0.3125, -0.25, 2), (0.0, 0.0, 1), (0.5, 0.625, 1),
    ]  # fmt: skip


def test_read_only_and_absent_columns_do_not_compile_the_kernel_anew() -> None:
    trace = random_trace(np.random.default_rng(0))
    scan_trace(trace)
    compiled = len(kernel.scan.signatures)
    locked = trace.rollout_logprobs.copy()
    locked.flags.writeable = False
    scan_trace(dataclasses.replace(trace, rollout_logprobs=locked, entropies=None, versions=None))
    strided = np.repeat(trace.train_logprobs, 2)[::2]
    assert_same(scan_trace(dataclasses.replace(trace, train_logprobs=strided)), scan_trace(trace))
    assert len(kernel.scan.signatures) == compiled


def test_position_bins_of_a_long_sequence_against_counting() -> None:
    rng = np.random.default_rng(0)
    trace = random_trace(rng, sequences=3, longest=5000, holes=False)
    whole = dataclasses.replace(trace, mask=np.ones(trace.num_tokens, dtype=np.bool_), group=np.arange(3))
    ell = np.abs(whole.train_logprobs.astype(np.float64) - whole.rollout_logprobs)
    place = np.concatenate([np.arange(n) for n in whole.lengths])
    # The same positions, recorded: they take the other path.
    recorded = dataclasses.replace(whole, positions=place.astype(np.int32))
    for curve in (mismatch(t, replicates=0).curve("mean_abs_log_ratio_by_position") for t in (whole, recorded)):
        for left, right, n, value in zip(curve.left, curve.right, curve.n, curve.value, strict=True):
            inside = (place >= left) & (place < right)
            assert n == inside.sum()
            assert value == pytest.approx(ell[inside].mean(), rel=1e-9)
