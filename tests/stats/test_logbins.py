"""Log-spaced bins, decile cuts and top shares, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.stats import LogBins, quantile_groups, top_share

BINS = LogBins(lowest=-10, highest=6, split=3)


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1))
def test_index_is_the_bin_between_its_edges(values: list[float]) -> None:
    index = BINS.index(values)
    clipped = np.minimum(np.asarray(values, dtype=np.float32), np.float32(2.0**6))
    expected = np.minimum(np.searchsorted(BINS.edges, clipped, side="right") - 1, BINS.count - 1)
    assert index.tolist() == expected.tolist()


def test_bins_are_even_within_an_octave() -> None:
    edges = BINS.edges
    assert len(edges) == BINS.count + 1
    octave = edges[(edges >= 1.0) & (edges <= 2.0)]
    assert octave.tolist() == [1 + i / 8 for i in range(9)]
    assert np.all(np.diff(edges) > 0)


def test_quantile_groups_cut_evenly() -> None:
    counts = np.random.default_rng(0).integers(0, 20, 200).astype(float)
    run = quantile_groups(counts, 10)
    assert np.all(np.diff(run) >= 0)
    sizes = np.bincount(run, weights=counts)
    assert len(sizes) == 10
    # A cut can be off by at most half a bin on either side.
    assert np.all(np.abs(sizes - counts.sum() / 10) <= 20)
    assert quantile_groups(np.zeros(4), 10).tolist() == [0, 0, 0, 0]


def test_top_share_against_sorting() -> None:
    values = np.random.default_rng(1).lognormal(0, 1.5, 20_000)
    index = BINS.index(values)
    counts = np.bincount(index, minlength=BINS.count).astype(float)
    sums = np.bincount(index, weights=values, minlength=BINS.count)
    exact = np.sort(values)[-200:].sum() / values.sum()
    assert top_share(counts, sums, 0.01) == pytest.approx(exact, rel=0.01)
    assert top_share(counts, sums, 1.0) == pytest.approx(1.0)
    assert np.isnan(top_share(counts, np.zeros_like(sums), 0.01))
