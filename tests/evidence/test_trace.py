from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueup.errors import InputError
from trueup.evidence import MISSING, Ragged, TokenTrace
from trueup.evidence.trace import is_missing

logprobs = st.floats(-50, 0, width=32)


@st.composite
def traces(draw: st.DrawFn, *, min_size: int = 1) -> TokenTrace:
    """Traces in which every per-token number tells which token it belongs to."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=min_size, max_size=6))
    tokens = [[100 * row + t for t in range(length)] for row, length in enumerate(lengths)]
    scores = [[-float(token) for token in sequence] for sequence in tokens]
    kept = np.array([draw(st.integers(0, 2)) for _ in range(sum(lengths))], dtype=np.int64)
    return TokenTrace.from_lists(
        tokens,
        scores,
        scores,
        mask=[[token % 2 == 0 for token in sequence] for sequence in tokens],
        group=list(range(len(tokens))),
        prompt=[f"prompt {row}" for row in range(len(tokens))],
        prompt_ids=[[row] * row for row in range(len(tokens))],
        kept_ids=Ragged(np.arange(kept.sum(), dtype=np.int32), np.concatenate([[0], np.cumsum(kept)])),
    )


# The convention.


def test_missing_is_a_nan_that_no_computation_gives() -> None:
    assert np.isnan(MISSING)
    computed = np.array([np.nan, np.inf - np.inf, np.float32(np.nan), 0.0], dtype=np.float32)
    assert not is_missing(computed).any()
    assert is_missing(np.array([0.0, MISSING], dtype=np.float32)).tolist() == [False, True]


def test_missing_survives_slicing_and_concatenation() -> None:
    trace = TokenTrace.from_lists([[1, 2], [3]], [[-1.0, None], [None]], [[-1.0, float("nan")], [0.0]])
    assert is_missing(trace.rollout_logprobs).tolist() == [False, True, True]
    assert is_missing(trace.train_logprobs).tolist() == [False, False, False]
    again = TokenTrace.concatenate([trace.take([1]), trace.block(0, 1)])
    assert is_missing(again.rollout_logprobs).tolist() == [True, False, True]


def test_next_token_arrays_are_shifted_by_one() -> None:
    # logprobs[0] scores token 5, logprobs[1] scores token 6: the prompt's first token 4 has none.
    trace = TokenTrace.from_padded(
        [[4, 5, 6]],
        [[-0.5, -0.25]],
        [[-0.75, -0.125]],
        [[1, 1, 1]],
        convention="next-token",
        entropies=[[1.5, 2.5]],
        advantages=[[7.0, 8.0, 9.0]],
    )
    assert trace.token_ids.tolist() == [4, 5, 6]
    assert trace.rollout_logprobs.tolist()[1:] == [-0.5, -0.25]
    assert trace.train_logprobs.tolist()[1:] == [-0.75, -0.125]
    assert trace.entropies is not None
    assert trace.entropies.tolist()[1:] == [1.5, 2.5]
    assert is_missing(np.array([trace.rollout_logprobs[0], trace.entropies[0]])).all()
    # An advantage belongs to a token and not to a score: it does not move.
    assert trace.advantages is not None
    assert trace.advantages.tolist() == [7.0, 8.0, 9.0]


def test_next_token_and_own_token_agree_where_the_prompt_is_masked() -> None:
    mask = [[0, 1, 1]]
    own = TokenTrace.from_padded([[4, 5, 6]], [[0, -0.5, -0.25]], [[0, -1, -2]], mask)
    shifted = TokenTrace.from_padded([[4, 5, 6]], [[-0.5, -0.25]], [[-1, -2]], mask, convention="next-token")
    assert own.token_ids.tolist() == shifted.token_ids.tolist() == [5, 6]
    assert own.rollout_logprobs.tolist() == shifted.rollout_logprobs.tolist() == [-0.5, -0.25]
    assert own.train_logprobs.tolist() == shifted.train_logprobs.tolist() == [-1, -2]


def test_tool_output_in_the_middle_is_kept_and_masked() -> None:
    trace = TokenTrace.from_padded([[9, 1, 2, 3, 0]], [[0, -1, 0, -3, 0]], [[0, -1, -2, -3, 0]], [[0, 1, 0, 1, 0]])
    assert trace.token_ids.tolist() == [1, 2, 3]
    assert trace.mask.tolist() == [True, False, True]


def test_attention_mask_keeps_masked_tokens_at_the_ends() -> None:
    rows = [[9, 1, 2, 0]], [[0, -1, 0, 0]], [[0, -1, -2, 0]], [[0, 1, 0, 0]]
    trace = TokenTrace.from_padded(*rows, attention_mask=[[1, 1, 1, 0]])
    assert trace.token_ids.tolist() == [9, 1, 2]
    assert trace.mask.tolist() == [False, True, False]


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    left=st.integers(0, 4),
    right=st.integers(0, 4),
    pad=st.sampled_from([0, -1, 151643]),
)
def test_the_side_and_the_amount_of_padding_do_not_matter(
    lengths: list[int], left: int, right: int, pad: int
) -> None:
    lists = [[10 * row + t for t in range(length)] for row, length in enumerate(lengths)]
    expected = TokenTrace.from_lists(lists, lists, [[-x for x in tokens] for tokens in lists])
    for left_padded in (True, False):
        width = max(lengths)
        start = [left + (width - n if left_padded else 0) for n in lengths]
        tokens = np.full((len(lists), left + width + right), pad)
        mask = np.zeros_like(tokens)
        for row, (begin, values) in enumerate(zip(start, lists, strict=True)):
            tokens[row, begin : begin + len(values)] = values
            mask[row, begin : begin + len(values)] = 1
        trace = TokenTrace.from_padded(tokens, tokens * 1.0, tokens * -1.0, mask)
        assert trace.offsets.tolist() == expected.offsets.tolist()
        assert trace.token_ids.tolist() == expected.token_ids.tolist()
        assert trace.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist()
        assert trace.train_logprobs.tolist() == expected.train_logprobs.tolist()
        assert trace.mask.all()


def test_bfloat16_tensors_are_widened_without_loss() -> None:
    torch = pytest.importorskip("torch")
    # In binary 0.1 is 1.1001100|1100… × 2^-4; 8 significant bits round up to 1.1001101 × 2^-4 = 205 / 2048.
    scores = torch.tensor([[-0.1, -2.5]], dtype=torch.bfloat16, requires_grad=True)
    trace = TokenTrace.from_padded(
        torch.tensor([[1, 2]]),
        scores,
        scores.to(torch.float16),
        torch.tensor([[True, True]]),
        attention_mask=torch.ones(1, 2),
        reward=torch.tensor([1.0], dtype=torch.bfloat16),
        group=torch.tensor([3]),
        sequence_id=torch.tensor([8]),
    )
    assert trace.rollout_logprobs.tolist() == [-205 / 2048, -2.5]
    assert trace.rollout_logprobs.dtype == trace.train_logprobs.dtype == np.float32
    assert trace.reward is not None
    assert (trace.reward.tolist(), trace.sequence_id.tolist()) == ([1.0], [8])


def test_routed_experts_come_from_their_padded_tensor() -> None:
    experts = np.arange(2 * 3 * 2 * 1).reshape(2, 3, 2, 1)
    trace = TokenTrace.from_padded(
        [[0, 1, 2], [3, 4, 0]], np.zeros((2, 3)), np.zeros((2, 3)), [[0, 1, 1], [1, 0, 0]], routed_experts=experts
    )
    assert trace.routed_experts is not None
    assert trace.routed_experts.dtype == np.int16
    assert trace.routed_experts.tolist() == [[[2], [3]], [[4], [5]], [[6], [7]]]


# Taking apart and putting together.


@given(trace=traces(), data=st.data())
def test_take_follows_the_rows(trace: TokenTrace, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(trace) - 1), max_size=8))
    taken = trace.take(rows)
    assert len(taken) == len(rows)
    assert taken.sequence_id.tolist() == rows
    assert taken.lengths.tolist() == trace.lengths[rows].tolist()
    expected = [100 * row + t for row in rows for t in range(trace.lengths[row])]
    assert taken.token_ids.tolist() == expected
    assert taken.rollout_logprobs.tolist() == [-float(token) for token in expected]
    assert taken.mask.tolist() == [token % 2 == 0 for token in expected]
    assert taken.prompt_ids is not None
    assert taken.prompt_ids.values.tolist() == [row for row in rows for _ in range(row)]
    assert taken.prompt is not None
    assert taken.prompt.tolist() == [f"prompt {row}" for row in rows]


@given(trace=traces(), data=st.data())
def test_block_equals_take_and_copies_no_token(trace: TokenTrace, data: st.DataObject, assert_same: Any) -> None:
    start = data.draw(st.integers(0, len(trace)))
    stop = data.draw(st.integers(start, len(trace)))
    block = trace.block(start, stop)
    assert_same(block, trace.take(range(start, stop)))
    assert block.first_row == start
    if block.num_tokens:
        assert np.shares_memory(block.train_logprobs, trace.train_logprobs)


@given(trace=traces(), data=st.data())
def test_concatenating_blocks_gives_the_trace_back(
    trace: TokenTrace, data: st.DataObject, assert_same: Any
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(trace)), max_size=4)))
    bounds = [0, *cuts, len(trace)]
    blocks = [trace.block(start, stop) for start, stop in pairwise(bounds)]
    assert_same(TokenTrace.concatenate(blocks), trace)


def test_full_trace_survives_being_taken_apart(full_trace: TokenTrace, assert_same: Any) -> None:
    parts = [full_trace.block(0, 1), full_trace.block(1, 2), full_trace.take([2])]
    assert_same(TokenTrace.concatenate(parts), full_trace)


def test_concatenate_keeps_the_shared_columns() -> None:
    plain = TokenTrace.from_lists([[1]], [[-1]], [[-1]])
    rich = TokenTrace.from_lists([[2]], [[-1]], [[-1]], reward=[1.0], group=[4])
    joined = TokenTrace.concatenate([rich, plain])
    assert joined.reward is None
    assert joined.token_ids.tolist() == [2, 1]


@given(hnp.arrays(np.int64, st.integers(0, 6), elements=st.integers(0, 4)), st.data())
def test_ragged_take(lengths: np.ndarray, data: st.DataObject) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ragged = Ragged(np.arange(offsets[-1]), offsets)
    items = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6)) if len(lengths) else []
    taken = ragged.take(np.array(items, dtype=np.int64))
    lists = [list(range(offsets[item], offsets[item + 1])) for item in items]
    assert [
        taken.values[a:b].tolist() for a, b in zip(taken.offsets[:-1], taken.offsets[1:], strict=True)
    ] == lists


# Errors, each one sentence with its place.


def _error(build: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        build()
    assert "\n" not in str(caught.value)
    return caught.value


def test_unequal_lists_name_row_and_field() -> None:
    error = _error(lambda: TokenTrace.from_lists([[1], [1, 2]], [[-1], [-1, -2]], [[-1], [-1]]))
    assert (error.row, error.field, error.problem) == (1, "train_logprobs", "has 1 values for 2 tokens")


def test_too_few_lists() -> None:
    error = _error(lambda: TokenTrace.from_lists([[1], [2]], [[-1], [-1]], [[-1]]))
    assert (error.field, error.problem) == ("train_logprobs", "has 1 lists for 2 sequences")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"offsets": np.array([0, 2], dtype=np.int32)}, "offsets"),
        ({"offsets": np.array([1, 2])}, "offsets"),
        ({"offsets": np.array([0, 3, 2])}, "offsets"),
        ({"mask": np.array([True])}, "mask"),
        ({"mask": np.array([1, 1])}, "mask"),
        ({"train_logprobs": np.array([-1.0, -2.0])}, "train_logprobs"),
        ({"reward": np.array([1.0, 2.0], dtype=np.float32)}, "reward"),
        ({"sequence_id": np.array([1, 2])}, "sequence_id"),
        ({"prompt_ids": Ragged(np.array([1]), np.array([0, 1, 1]))}, "prompt_ids"),
    ],
)
def test_columns_of_wrong_length_or_dtype(change: dict[str, Any], field: str) -> None:
    trace = TokenTrace.from_lists([[1, 2]], [[-1, -2]], [[-1, -2]])
    error = _error(lambda: dataclasses.replace(trace, **change))
    assert error.field == field


def test_padded_shapes_must_agree() -> None:
    two, three = np.zeros((1, 2)), np.zeros((1, 3))
    assert _error(lambda: TokenTrace.from_padded(two, two, three, two)).field == "train_logprobs"
    assert _error(lambda: TokenTrace.from_padded(two, two, two, three)).field == "response_mask"
    error = _error(lambda: TokenTrace.from_padded(two, two, two, two, convention="next-token"))
    assert error.field == "rollout_logprobs"
    assert "one fewer" in error.problem
    error = _error(lambda: TokenTrace.from_padded(two, [1.0], two, two, convention="next-token"))
    assert error.field == "rollout_logprobs"


def test_attention_mask_may_not_contradict_the_response_mask() -> None:
    two = np.zeros((2, 2))
    error = _error(
        lambda: TokenTrace.from_padded(two, two, two, [[0, 0], [1, 1]], attention_mask=[[1, 1], [1, 0]])
    )
    assert (error.row, error.field) == (1, "attention_mask")


def test_truth_values_are_not_rows() -> None:
    trace = TokenTrace.from_lists([[1], [2]], [[-1], [-1]], [[-1], [-1]])
    assert _error(lambda: trace.take(np.array([False, True]))).field == "rows"


def test_concatenate_nothing_or_different_experts() -> None:
    assert "no traces" in str(_error(lambda: TokenTrace.concatenate([])))
    two = TokenTrace.from_lists([[1]], [[-1]], [[-1]], routed_experts=np.zeros((1, 2, 1), np.int16))
    three = TokenTrace.from_lists([[1]], [[-1]], [[-1]], routed_experts=np.zeros((1, 3, 1), np.int16))
    assert _error(lambda: TokenTrace.concatenate([two, three])).field == "routed_experts"


@settings(max_examples=30)
@given(st.lists(st.lists(logprobs, max_size=4), max_size=4))
def test_from_lists_keeps_every_value(lists: list[list[float]]) -> None:
    trace = TokenTrace.from_lists([[1] * len(values) for values in lists], lists, lists)
    assert trace.rollout_logprobs.tolist() == [value for values in lists for value in values]
    assert trace.mask.all()
    assert trace.sequence_id.tolist() == list(range(len(lists)))
