"""What the tests of evidence share: a trace with every column, and equality to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueup.evidence import MISSING, Ragged, TokenTrace


def _same(left: Any, right: Any) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == np.float32:
        return bool(np.array_equal(left.view(np.uint32), right.view(np.uint32)))
    return bool(np.array_equal(left, right))


@pytest.fixture(scope="session")
def assert_same() -> Callable[[TokenTrace, TokenTrace], None]:
    """Fails unless both traces have the same columns with the same bits (NaNs included)."""

    def check(left: TokenTrace, right: TokenTrace) -> None:
        assert left.column_names == right.column_names
        assert left.offsets.tolist() == right.offsets.tolist()
        for name in left.column_names:
            one, two = getattr(left, name), getattr(right, name)
            if isinstance(one, Ragged):
                assert one.offsets.tolist() == two.offsets.tolist(), name
                one, two = one.values, two.values
            assert _same(one, two), (name, one, two)

    return check


@pytest.fixture(scope="session")
def full_trace() -> TokenTrace:
    """Three sequences of 3, 0 and 2 tokens with every column of ``TokenTrace``, and every kind of odd number."""

    def floats(*values: float) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    def ints(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    def texts(*values: str | None) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    return TokenTrace(
        offsets=np.array([0, 3, 3, 5]),
        token_ids=ints(5, 0, 2**31 - 1, 7, 8),
        rollout_logprobs=floats(-1.1, 0.0, -9999.0, -np.inf, np.nan),
        train_logprobs=floats(-0.1, MISSING, -0.0, np.inf, 1e-45),
        mask=np.array([True, False, True, False, True]),
        sequence_id=np.array([10, -3, 2**62]),
        current_logprobs=floats(-1, -2, -3, -4, -5),
        ref_logprobs=floats(-1, -2, -3, -4, MISSING),
        prox_logprobs=floats(-6, -7, -8, -9, -10),
        advantages=floats(0.5, 0.5, 0.5, -1, -1),
        positions=ints(0, 1, 2, 0, 1),
        segments=ints(0, 1, 2, 0, -1),
        entropies=floats(1, 2, 3, 4, MISSING),
        rollout_entropies=floats(1, 2, 3, 4, 0.25),
        versions=ints(-1, 3, 4, 4, 4),
        train_ranks=ints(0, 1, 49151, 0, 2),
        routed_experts=np.arange(5 * 2 * 3, dtype=np.int16).reshape(5, 2, 3),
        kept_ids=Ragged(ints(5, 6, 0, 9, 8, 7), np.array([0, 2, 3, 3, 4, 6])),
        token_texts=texts("a", "", "🙂", None, '"\n'),
        group=np.array([1, 1, -(2**63)]),
        reward=floats(1, MISSING, -0.5),
        advantage=floats(0.25, 0, np.nan),
        train_version=ints(4, 4, 5),
        prompt=texts("1 + 1?", None, "¿qué?"),
        response=texts("two", "", "dos"),
        prompt_ids=Ragged(ints(1, 2, 3, 4), np.array([0, 2, 2, 4])),
    )
