"""Cluster sums, the bootstrap and the cluster-robust mean, against formulas and plain resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from trueup.stats import ClusterSums, bootstrap_totals, cluster_mean, percentile_interval


def test_cluster_sums_merge_by_key() -> None:
    left = ClusterSums.from_rows(np.array([3, 1, 3]), np.array([[1.0], [2.0], [4.0]]), capacity=10)
    right = ClusterSums.from_rows(np.array([2, 3]), np.array([[10.0], [20.0]]), capacity=10)
    both = left.merge(right)
    assert both.keys.tolist() == [1, 2, 3]
    assert both.sums.ravel().tolist() == [2.0, 10.0, 25.0]
    assert not both.pooled


def test_pooling_keeps_totals_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(-(2**62), 2**62, 100), rng.random((100, 3))
    whole = ClusterSums.from_rows(keys, rows, capacity=16)
    assert whole.pooled
    assert len(whole) <= 16
    parts = [ClusterSums.from_rows(keys[i : i + 10], rows[i : i + 10], capacity=16) for i in range(0, 100, 10)]
    forward, backward = parts[0], parts[-1]
    for part in parts[1:]:
        forward = forward.merge(part)
    for part in parts[-2::-1]:
        backward = backward.merge(part)
    for merged in (forward, backward):
        assert np.array_equal(merged.keys, whole.keys)
        np.testing.assert_allclose(merged.sums, whole.sums)
    np.testing.assert_allclose(whole.total(), rows.sum(axis=0))


def test_bootstrap_matches_the_textbook_standard_error() -> None:
    rng = np.random.default_rng(0)
    sums = np.stack([rng.normal(5, 2, 400), np.ones(400)], axis=1)
    totals = np.concatenate(list(bootstrap_totals(sums, replicates=4000, rng=rng)))
    assert totals.shape == (4000, 2)
    # Every resample draws as many clusters as there are.
    assert np.all(totals[:, 1] == 400)
    means = totals[:, 0] / 400
    expected = sums[:, 0].std() / math.sqrt(400)
    assert means.std() == pytest.approx(expected, rel=0.05)
    low, high = percentile_interval(means, confidence=0.95)
    assert (low, high) == pytest.approx(
        (sums[:, 0].mean() - 1.96 * expected, sums[:, 0].mean() + 1.96 * expected), abs=0.1 * expected
    )


def test_bootstrap_is_deterministic_by_seed_and_keeps_shape() -> None:
    sums = np.random.default_rng(0).random((30, 4, 2))
    first, again = (
        np.concatenate(list(bootstrap_totals(sums, replicates=200, rng=np.random.default_rng(7))))
        for _ in range(2)
    )
    assert first.shape == (200, 4, 2)
    assert np.array_equal(first, again)


def test_cluster_mean_of_single_units_is_the_plain_mean() -> None:
    values = np.random.default_rng(0).normal(1.0, 3.0, 500)
    result = cluster_mean(values, np.ones(500))
    assert result.mean == pytest.approx(values.mean())
    assert result.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(500))
    # For normal values the degrees of freedom are about G.
    assert 400 < result.degrees_of_freedom <= 499
    expected = scipy_stats.ttest_1samp(values, 0.5).pvalue
    assert result.p_value(0.5) == pytest.approx(expected, rel=0.2)


def test_cluster_mean_sees_that_copies_are_not_evidence() -> None:
    values = np.random.default_rng(0).normal(size=50)
    once = cluster_mean(values, np.ones(50))
    ten_times = cluster_mean(values * 10, np.full(50, 10.0))
    assert ten_times.mean == pytest.approx(once.mean)
    assert ten_times.standard_error == pytest.approx(once.standard_error)


def test_heavy_tails_cost_degrees_of_freedom() -> None:
    values = np.zeros(1000)
    values[:5] = 100.0
    result = cluster_mean(values, np.ones(1000))
    # Five clusters make the variance: the standard error is worth about ten degrees of freedom, not 999.
    assert result.degrees_of_freedom < 15


def test_edges() -> None:
    assert math.isnan(cluster_mean(np.array([]), np.array([])).mean)
    one = cluster_mean(np.array([3.0]), np.array([2.0]))
    assert (one.mean, one.clusters) == (1.5, 1)
    assert math.isnan(one.standard_error)
    assert math.isnan(one.z(0.0))
    assert one.p_value(0.0) == 1.0
    constant = cluster_mean(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    assert constant.z(2.0) == 0.0
    assert constant.z(1.0) == math.inf
