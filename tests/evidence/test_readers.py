from __future__ import annotations

import json
import os
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unprivileged import as_ordinary_user

from trueup.errors import InputError
from trueup.evidence import TokenTrace
from trueup.evidence.readers import open_trace, read_trace
from trueup.evidence.readers.columns import Chunk, build_trace
from trueup.evidence.schema import COLUMNS
from trueup.evidence.trace import is_missing
from trueup.evidence.writers import write_jsonl, write_parquet

ROW: dict[str, Any] = {
    "token_ids": [1, 2],
    "rollout_logprobs": [-1.0, -2.0],
    "train_logprobs": [-1.5, -2.5],
}


def save_parquet(path: Path, rows: list[dict[str, Any]], **types: pa.DataType) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = {name: pa.array([row.get(name) for row in rows], type=types.get(name)) for name in names}
    pq.write_table(pa.table(arrays), path)
    return path


def save_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


SAVERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {"parquet": save_parquet, "jsonl": save_jsonl}


@pytest.fixture(params=SAVERS)
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes rows in either format, under a name that does not tell which."""
    return lambda rows: SAVERS[request.param](tmp_path / "trace.dat", rows)


def error_of(path: Path | str, **options: Any) -> InputError:
    """What reading all of a file raises: one sentence that names the file."""
    with pytest.raises(InputError) as caught:
        read_trace(path, **options)
    assert caught.value.file == str(path)
    assert "\n" not in str(caught.value)
    return caught.value


# What is read.


def test_rows_become_sequences(save: Any) -> None:
    path = save(
        [
            {**ROW, "mask": [1, 0], "sequence_id": "a", "group": 7, "reward": 0.5, "response": "x"},
            {**ROW, "token_ids": [], "rollout_logprobs": [], "train_logprobs": [], "mask": [],
             "sequence_id": "b", "group": 7, "reward": 1, "response": ""},
            {**ROW, "token_ids": [3, 4], "mask": [0, 1], "sequence_id": "c", "group": -1, "reward": 2,
             "response": "z"},
        ]
    )  # fmt: skip
    file = open_trace(path)
    assert file.notes == ()
    trace = read_trace(path)
    assert trace.offsets.tolist() == [0, 2, 2, 4]
    assert trace.token_ids.tolist() == [1, 2, 3, 4]
    assert trace.rollout_logprobs.tolist() == [-1, -2, -1, -2]
    assert trace.train_logprobs.tolist() == [-1.5, -2.5, -1.5, -2.5]
    assert trace.mask.tolist() == [True, False, False, True]
    assert trace.sequence_id.tolist() == ["a", "b", "c"]
    assert trace.group is not None
    assert trace.group.tolist() == [7, 7, -1]
    assert trace.reward is not None
    assert trace.reward.tolist() == [0.5, 1, 2]
    assert trace.response is not None
    assert trace.response.tolist() == ["x", "", "z"]


@pytest.mark.parametrize("name", [name for name, column in COLUMNS.items() if column.depth == 1])
def test_every_alias_is_understood(name: str, tmp_path: Path) -> None:
    column = COLUMNS[name]
    value = {"text": ["a", "b"], "boolean": [True, False]}.get(column.family, [3, 4])
    for alias in column.aliases:
        row = {key: item for key, item in ROW.items() if key != name} | {alias: value}
        file = open_trace(save_jsonl(tmp_path / "t", [row]))
        assert file.columns[name] == alias
        found = getattr(read_trace(file.path), name)
        assert getattr(found, "values", found).tolist() == value


def test_the_documentation_lists_every_column_and_alias() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith(("| `", "| **`"))]
    listed = {
        row[0].strip(" *`"): [alias.strip(" `") for alias in row[3].split(",")] for row in rows if len(row) == 4
    }
    assert listed == {name: list(column.aliases[1:]) or [""] for name, column in COLUMNS.items()}
    assert {row[0].strip(" *`") for row in rows if "**" in row[0]} == {n for n, c in COLUMNS.items() if c.required}


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    (tmp_path / "t").write_text(text.split("```json\n")[1].split("```")[0], encoding="utf-8")
    trace = read_trace(tmp_path / "t")
    assert trace.lengths.tolist() == [3, 1]
    assert is_missing(trace.train_logprobs).tolist() == [False, True, False, False]
    assert open_trace(tmp_path / "t").notes == ()


def test_own_names_come_first() -> None:
    assert all(column.aliases[0] == name for name, column in COLUMNS.items())


def test_no_alias_could_be_two_columns_of_one_depth() -> None:
    owners: dict[tuple[str, int], str] = {}
    for name, column in COLUMNS.items():
        for alias in column.aliases:
            assert owners.setdefault((alias, column.depth), name) == name


def test_advantages_go_where_their_shape_fits(save: Any) -> None:
    assert open_trace(save([{**ROW, "advantages": [0.5, 0.5]}])).columns["advantages"] == "advantages"
    trace = read_trace(save([{**ROW, "advantages": 0.5}]))
    assert trace.advantages is None
    assert trace.advantage is not None
    assert trace.advantage.tolist() == [0.5]


def test_sentinels_are_not_altered(tmp_path: Path) -> None:
    odd = [float("nan"), -float("inf"), float("inf"), -9999.0, 0.0, -0.0, 0.25]
    row = {"token_ids": [1] * 7, "rollout_logprobs": odd, "train_logprobs": [-1.0] * 7}
    expected = np.array(odd, dtype=np.float32).view(np.uint32).tolist()
    for path in (save_parquet(tmp_path / "p", [row]), save_jsonl(tmp_path / "j", [row])):
        values = read_trace(path).rollout_logprobs
        assert values.view(np.uint32).tolist() == expected
        assert not is_missing(values).any()


def test_nulls_are_missing(save: Any) -> None:
    rows = [
        {**ROW, "rollout_logprobs": [None, -2.0], "train_logprobs": None, "reward": None},
        {**ROW, "rollout_logprobs": [-1.0, None], "reward": 1.0},
        {**ROW, "token_ids": [5], "rollout_logprobs": None, "train_logprobs": [-3.0], "reward": 0.0},
    ]
    trace = read_trace(save(rows))
    assert is_missing(trace.rollout_logprobs).tolist() == [True, False, False, True, True]
    assert is_missing(trace.train_logprobs).tolist() == [True, True, False, False, False]
    assert trace.train_logprobs.tolist()[2:] == [-1.5, -2.5, -3.0]
    assert trace.rollout_logprobs.tolist()[1:3] == [-2.0, -1.0]
    assert trace.reward is not None
    assert is_missing(trace.reward).tolist() == [True, False, False]


def test_a_column_of_nulls_only(save: Any) -> None:
    trace = read_trace(save([{**ROW, "train_logprobs": None}, {**ROW, "train_logprobs": None}]))
    assert is_missing(trace.train_logprobs).tolist() == [True] * 4


def test_texts_and_kept_ids(save: Any) -> None:
    rows = [
        {**ROW, "token_texts": ["a", None], "kept_ids": [[1, 9], None], "prompt": None},
        {**ROW, "token_texts": None, "kept_ids": [[], [2]], "prompt": "hello"},
    ]
    trace = read_trace(save(rows))
    assert trace.token_texts is not None
    assert trace.token_texts.tolist() == ["a", None, None, None]
    assert trace.kept_ids is not None
    assert trace.kept_ids.values.tolist() == [1, 9, 2]
    assert trace.kept_ids.offsets.tolist() == [0, 2, 2, 2, 3]
    assert trace.prompt is not None
    assert trace.prompt.tolist() == [None, "hello"]


def test_chat_messages_are_kept_as_json(save: Any) -> None:
    messages = [{"role": "user", "content": "¿1 + 1?"}]
    prompt = read_trace(save([{**ROW, "prompt": messages}])).prompt
    assert prompt is not None
    assert prompt.tolist() == ['[{"content": "¿1 + 1?", "role": "user"}]']


# Which column is which.


def test_choosing_the_trainer(save: Any) -> None:
    path = save([{**ROW, "old_log_probs": [-3.0, -4.0], "mine": [-5.0, -6.0]}])
    file = open_trace(path)
    assert file.columns["train_logprobs"] == "train_logprobs"
    assert file.notes[0] == (
        "several columns could be the trainer's: train_logprobs is used, old_log_probs is not; "
        "choose with --train-column"
    )
    assert file.unused == ("old_log_probs", "mine")
    chosen = open_trace(path, train_column="mine")
    assert chosen.columns["train_logprobs"] == "mine"
    assert not any("several" in note for note in chosen.notes)
    assert read_trace(path, train_column="mine").train_logprobs.tolist() == [-5, -6]
    assert read_trace(path, rollout_column="old_log_probs").rollout_logprobs.tolist() == [-3, -4]


def test_three_candidates_make_one_sentence(save: Any) -> None:
    row = {**ROW, "vllm_logprobs": [-1.0, -1.0], "infer_logprobs": [-1.0, -1.0]}
    assert open_trace(save([row])).notes[0] == (
        "several columns could be the sampler's: rollout_logprobs is used, infer_logprobs and vllm_logprobs are "
        "not; choose with --rollout-column"
    )


def test_a_chosen_column_must_hold_numbers(save: Any) -> None:
    path = save([{**ROW, "prompt": "a", "reward": 1.0, "kept_ids": [[1], [2]]}])
    available = "the trainer's log-probabilities can be token_ids, rollout_logprobs, train_logprobs"
    error = error_of(path, train_column="nope")
    assert (error.field, error.problem) == ("nope", f"is not a column of the file: {available}")
    for name in ("prompt", "reward", "kept_ids"):
        error = error_of(path, train_column=name)
        assert error.problem == f"does not hold a list of numbers a sequence: {available}"
    assert error_of(path, rollout_column="nope").problem.startswith("is not a column")


def test_one_column_for_both_sides_is_said(save: Any) -> None:
    notes = open_trace(save([ROW]), train_column="rollout_logprobs").notes
    assert "the trainer's and the sampler's log-probabilities are both 'rollout_logprobs'" in notes


def test_a_text_column_does_not_hide_the_ids(save: Any) -> None:
    row = {**ROW, "response_ids": "some text", "responses": ROW["token_ids"]}
    del row["token_ids"]
    file = open_trace(save([row]))
    assert file.columns["token_ids"] == "responses"
    assert not any("several" in note for note in file.notes)


def test_an_optional_column_of_another_shape_is_said_and_not_used(save: Any) -> None:
    file = open_trace(save([{**ROW, "rewards": [0.0, 1.0]}]))
    assert "reward" not in file.columns
    assert "the column 'rewards' does not hold one number a sequence: it is not used" in file.notes


# What is derived.


def test_mask_ids_and_groups_are_derived_and_said(save: Any) -> None:
    file = open_trace(save([ROW, ROW, ROW]))
    assert file.notes == (
        "no mask column: every response token counts",
        "rows are numbered: there is no sequence id",
        "no prompt group and no prompt: sequences cannot be grouped by prompt",
    )
    chunks = list(file.chunks(2))
    assert [chunk.sequence_id.tolist() for chunk in chunks] == [[0, 1], [2]]
    assert [chunk.first_row for chunk in chunks] == [0, 2]
    assert chunks[1].source == str(file.path)
    assert chunks[0].mask.all()
    assert chunks[0].group is None


def test_groups_from_prompts(save: Any) -> None:
    rows = [{**ROW, "prompt_ids": ids, "prompt": "same"} for ids in ([1, 2], [3], [1, 2], [1], [])]
    file = open_trace(save(rows))
    assert "no prompt group: sequences are grouped by their prompt's token ids" in file.notes
    group = np.concatenate([chunk.group for chunk in file.chunks(1)]).tolist()
    assert group[0] == group[2]
    assert len(set(group)) == 4

    rows = [{**ROW, "prompt": prompt} for prompt in ("a", "b", "a", None, None)]
    file = open_trace(save(rows))
    assert "no prompt group: sequences are grouped by their prompt's text" in file.notes
    group = np.concatenate([chunk.group for chunk in file.chunks(2)]).tolist()
    assert group[0] == group[2]
    # Two unknown prompts are not one prompt.
    assert len(set(group)) == 4


def test_text_groups_are_hashed_alike_everywhere(save: Any) -> None:
    group = read_trace(save([{**ROW, "uid": uid} for uid in ("a", "b", "a")])).group
    assert group is not None
    # BLAKE2b-64 of "a", from `b2sum -l 64`: 40f89e395b66422f, read as a little-endian signed integer.
    assert group.tolist()[0] == int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little", signed=True)
    assert group[0] == group[2] != group[1]


def test_large_ids(tmp_path: Path) -> None:
    ids = [2**63 - 1, 2**63, 2**70]
    trace = read_trace(save_jsonl(tmp_path / "t", [{**ROW, "seq_id": i, "group": i} for i in ids[:2]]))
    assert trace.sequence_id.tolist() == ["9223372036854775807", "9223372036854775808"]
    assert trace.group is not None
    assert trace.group[0] == 2**63 - 1


# Formats.


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    assert open_trace(save_parquet(tmp_path / "a.jsonl", [ROW])).format == "parquet"
    assert open_trace(save_jsonl(tmp_path / "a.parquet", [ROW])).format == "jsonl"
    assert open_trace(str(tmp_path / "a.jsonl")).num_rows == 1


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, lambda item: pa.list_(item, 2)], ids=["list", "large", "fixed"]
)
@pytest.mark.parametrize("number", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("integer", [pa.int16(), pa.int32(), pa.int64(), pa.uint64(), pa.float32()], ids=str)
def test_arrow_types(tmp_path: Path, kind: Any, number: pa.DataType, integer: pa.DataType) -> None:
    rows = [{**ROW, "mask": [1, 0]}, {**ROW, "token_ids": [3, 4], "mask": [0, 0]}]
    types = {
        "token_ids": kind(integer),
        "rollout_logprobs": kind(number),
        "train_logprobs": kind(number),
        "mask": kind(integer),
    }
    trace = read_trace(save_parquet(tmp_path / "t", rows, **types))
    assert trace.token_ids.tolist() == [1, 2, 3, 4]
    assert trace.train_logprobs.tolist() == [-1.5, -2.5, -1.5, -2.5]
    assert trace.mask.tolist() == [True, False, False, False]
    assert trace.offsets.tolist() == [0, 2, 4]


def test_dictionary_columns(tmp_path: Path) -> None:
    table = pa.table([pa.array([value] * 2) for value in ROW.values()], names=list(ROW))
    names = pa.array(["x", "y"]).dictionary_encode()
    pq.write_table(table.append_column("seq_id", names).append_column("prompt", names), tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert trace.sequence_id.tolist() == ["x", "y"]
    assert trace.prompt is not None
    assert trace.prompt.tolist() == ["x", "y"]


def _chunk(**numbers: pa.Array) -> Chunk:
    return Chunk("memory", 0, {name: name for name in numbers}, numbers)


def test_float32_and_int32_lists_are_not_copied() -> None:
    ids = pa.array([[1, 2], [3]], type=pa.list_(pa.int32()))
    scores = pa.array([[-1, -2], [-3]], type=pa.list_(pa.float32()))
    trace = build_trace(_chunk(token_ids=ids, rollout_logprobs=scores, train_logprobs=scores[:]))
    assert np.shares_memory(trace.token_ids, ids.values.to_numpy())
    assert np.shares_memory(trace.rollout_logprobs, scores.values.to_numpy())


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_slices_of_arrow_arrays_are_minded(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    ids = [[10 * row + t for t in range(length)] for row, length in enumerate(lengths)]
    scores: list[Any] = [
        None if data.draw(st.booleans()) else [data.draw(st.sampled_from([None, -float(x)])) for x in tokens]
        for tokens in ids
    ]
    kept = [[[x] * (x % 3) for x in tokens] for tokens in ids]
    experts = [[[[x, 1]] for x in tokens] for tokens in ids]
    list_type = data.draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view]))
    trace = build_trace(
        _chunk(
            token_ids=pa.array(ids, type=pa.list_(pa.int64()))[start:stop],
            rollout_logprobs=pa.array(scores, type=list_type(pa.float32()))[start:stop],
            train_logprobs=pa.array(ids, type=list_type(pa.float32()))[start:stop],
            mask=pa.array([[x % 2 == 0 for x in tokens] for tokens in ids], type=pa.list_(pa.bool_()))[start:stop],
            kept_ids=pa.array(kept, type=pa.list_(pa.list_(pa.int64())))[start:stop],
            routed_experts=pa.array(experts, type=pa.list_(pa.list_(pa.list_(pa.int8()))))[start:stop],
            reward=pa.array([float(row) for row in range(len(ids))])[start:stop],
        )
    )
    flat = [x for tokens in ids[start:stop] for x in tokens]
    expected: list[float | None] = []
    for tokens, values in zip(ids[start:stop], scores[start:stop], strict=True):
        expected += [None] * len(tokens) if values is None else values
    assert trace.lengths.tolist() == lengths[start:stop]
    assert trace.token_ids.tolist() == flat
    assert trace.train_logprobs.tolist() == flat
    assert is_missing(trace.rollout_logprobs).tolist() == [value is None for value in expected]
    present = ~is_missing(trace.rollout_logprobs)
    assert trace.rollout_logprobs[present].tolist() == [value for value in expected if value is not None]
    assert trace.mask.tolist() == [x % 2 == 0 for x in flat]
    assert trace.kept_ids is not None
    assert trace.kept_ids.values.tolist() == [x for x in flat for _ in range(x % 3)]
    assert trace.routed_experts is not None
    if flat:
        assert trace.routed_experts.tolist() == [[[x, 1]] for x in flat]
    assert trace.reward is not None
    assert trace.reward.tolist() == list(range(start, stop))


def test_a_null_list_may_hide_values() -> None:
    # Arrow allows a null list whose offsets still span values; they are not the row's.
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4], type=pa.int32()), pa.array([-7, -7, -1, -2], type=pa.float32()),
        mask=pa.array([True, False]),
    )  # fmt: skip
    ids = pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int32()))
    trace = build_trace(_chunk(token_ids=ids, rollout_logprobs=hidden, train_logprobs=hidden))
    assert is_missing(trace.train_logprobs).tolist() == [True, True, False, False]
    assert trace.train_logprobs.tolist()[2:] == [-1, -2]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_chunks_do_not_depend_on_the_size(
    size: int, save: Any, full_trace: TokenTrace, tmp_path: Path, assert_same: Any
) -> None:
    whole = TokenTrace.concatenate([full_trace] * 3)
    for write in (write_parquet, write_jsonl):
        write(whole, tmp_path / "trace")
        chunks = list(open_trace(tmp_path / "trace").chunks(size))
        assert [len(chunk) for chunk in chunks] == [min(size, 9 - start) for start in range(0, 9, size)]
        assert_same(TokenTrace.concatenate(chunks), whole)


def test_chunks_may_be_read_twice_and_left_early(save: Any) -> None:
    file = open_trace(save([ROW] * 5))
    next(file.chunks(1))
    assert sum(len(chunk) for chunk in file.chunks(2)) == 5
    assert sum(len(chunk) for chunk in file.chunks(2)) == 5
    with pytest.raises(InputError, match="must be at least 1, not 0"):
        file.chunks(0)


def test_only_a_chunk_of_a_parquet_file_is_in_memory(tmp_path: Path) -> None:
    rows, tokens = 1600, 2500
    values = pa.array(np.random.default_rng(0).normal(size=rows * tokens).astype(np.float32))
    column = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * tokens), values)
    table = pa.table([column.cast(pa.list_(pa.float32()))] * 2, names=["rollout_logprobs", "train_logprobs"])
    ids = pa.ListArray.from_arrays(column.offsets, pa.array(np.zeros(rows * tokens, dtype=np.int32)))
    pq.write_table(table.append_column("token_ids", ids), tmp_path / "t", use_dictionary=False)
    before = pa.total_allocated_bytes()
    most = 0
    for _ in open_trace(tmp_path / "t").chunks(10):
        most = max(most, pa.total_allocated_bytes() - before)
    # Each of the three columns holds 1/160 of its 16 MB at a time, a page of 1 MB and a buffer of 1 MiB.
    assert 0 < most < 12e6


def test_only_a_few_rows_of_a_jsonl_file_are_python_objects(tmp_path: Path) -> None:
    rows, tokens = 1000, 500
    line = json.dumps({"token_ids": [70_000] * tokens, **{name: [-0.1] * tokens for name in list(ROW)[1:]}})
    (tmp_path / "t").write_text(f"{line}\n" * rows)
    file = open_trace(tmp_path / "t")
    tracemalloc.start()
    try:
        (trace,) = file.chunks(rows)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 13 bytes a token in arrays, twice while they are joined; as Python objects the file takes 44 MB or more.
    assert trace.num_tokens == rows * tokens
    assert most < 25e6


def test_ids_of_both_kinds_become_texts(tmp_path: Path) -> None:
    path = save_jsonl(tmp_path / "t", [{**ROW, "seq_id": row} for row in range(70)] + [{**ROW, "seq_id": "x"}])
    assert read_trace(path).sequence_id.tolist() == [*map(str, range(70)), "x"]


def test_jsonl_oddities(tmp_path: Path) -> None:
    line = json.dumps(ROW).encode()
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf\r\n  \n" + line + b"\r\n\n" + line.replace(b"-2.5", b"NaN") + b"\n\n  " + line)
    trace = read_trace(path)
    assert trace.train_logprobs[:3].tolist() == [-1.5, -2.5, -1.5]
    assert np.isnan(trace.train_logprobs[3])
    assert len(trace) == 3


def test_many_blank_lines_before_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\n" * 200_000 + json.dumps(ROW).encode())
    assert len(read_trace(tmp_path / "t")) == 1


def test_jsonl_masks_of_every_kind(tmp_path: Path) -> None:
    masks: list[list[Any]] = [[True, False], [1, 0], [1.0, 0.0], [True, 0]]
    trace = read_trace(save_jsonl(tmp_path / "t", [{**ROW, "mask": mask} for mask in masks]))
    assert trace.mask.tolist() == [True, False] * 4


def test_whole_floats_are_ids_and_integers_are_scores(save: Any) -> None:
    rows = [{**ROW, "token_ids": [1.0, 2.0], "train_logprobs": [0, -3]}]
    trace = read_trace(save(rows))
    assert trace.token_ids.tolist() == [1, 2]
    assert trace.train_logprobs.tolist() == [0, -3]


# Bad input: one sentence, with file, row and field.


@pytest.mark.parametrize("name", ["token_ids", "rollout_logprobs", "train_logprobs"])
def test_a_missing_column(name: str, save: Any) -> None:
    path = save([{**{key: value for key, value in ROW.items() if key != name}, "extra": 1}])
    error = error_of(path)
    assert error.field == name
    assert ", ".join(COLUMNS[name].aliases) in error.problem
    assert error.problem.endswith("extra")


def test_unequal_lengths(save: Any) -> None:
    rows = [ROW] * 17 + [{**ROW, "train_logprobs": [-1.0]}]
    error = error_of(save(rows))
    assert (error.row, error.field) == (17, "train_logprobs")
    assert error.problem == "has 1 log-probabilities for 2 tokens"
    error = error_of(save([ROW | {"mask": [1, 1]}, ROW | {"mask": [1, 1, 1]}]))
    assert (error.row, error.field, error.problem) == (1, "mask", "has 3 values for 2 tokens")


def test_the_row_is_right_in_a_later_chunk_and_the_line_too(tmp_path: Path) -> None:
    path = tmp_path / "t"
    lines = [json.dumps(ROW)] * 5 + ["", json.dumps({**ROW, "old_log_probs": [1], "train_logprobs": [1]})]
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        list(open_trace(path).chunks(2))
    assert str(caught.value) == (
        f"{path}: row 5 (line 7), field 'train_logprobs': has 1 log-probabilities for 2 tokens"
    )


BAD_VALUES = [
    ("token_ids", [1, "2"], "holds the text '2', where a list of integers a sequence is wanted"),
    ("token_ids", "12", "holds the text '12', where a list of integers a sequence is wanted"),
    ("token_ids", "", "holds the text '', where a list of integers a sequence is wanted"),
    ("token_ids", 12, "holds the number 12, where a list of integers a sequence is wanted"),
    ("token_ids", [1, True], "holds the truth value true, where a list of integers a sequence is wanted"),
    ("token_ids", [1, [2]], "holds a list, where a list of integers a sequence is wanted"),
    ("token_ids", [[1], [2]], "holds a list, where a list of integers a sequence is wanted"),
    ("token_ids", [1, {}], "holds an object, where a list of integers a sequence is wanted"),
    ("token_ids", {"0": 1}, "holds an object, where a list of integers a sequence is wanted"),
    ("token_ids", [1, 1e99], "holds 1e+99, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, -1], "holds -1, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, 2**31], "holds 2147483648, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, 2**64 + 1], "which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, 1.5], "holds 1.5, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, float("nan")], "holds nan, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, float("inf")], "holds inf, which is not an integer from 0 to 2147483647"),
    ("token_ids", [1, None], "holds a null, where every number is needed"),
    ("token_ids", None, "is missing: give it in every row or in none"),
    ("train_logprobs", [-1.0, "x"], "holds the text 'x', where a list of numbers a sequence is wanted"),
    ("train_logprobs", [-1.0, False], "holds the truth value false, where a list of numbers a sequence is wanted"),
    ("train_logprobs", [-1.0, -1e300], "holds -1e+300, which does not fit"),
    ("train_logprobs", [-1.0, 10**400], "holds the number of several hundred digits, where"),
    ("mask", [1, 2], "holds 2, which is none of 0, 1, true and false"),
    ("mask", [1, 0.5], "holds 0.5, which is none of 0, 1, true and false"),
    ("mask", [1, "true"], "holds the text 'true', where a list of truth values a sequence is wanted"),
    ("mask", [1, None], "holds a null, where true or false is needed"),
    ("mask", None, "is missing: give it in every row or in none"),
    ("versions", [1, 2**40], "holds 1099511627776, which is not an integer from -2147483648 to 2147483647"),
    ("versions", None, "is missing: give it in every row or in none"),
    ("kept_ids", [[1], [-2]], "holds -2, which is not an integer from 0 to 2147483647"),
    ("kept_ids", [[1]], "has 1 values for 2 tokens"),
    ("kept_ids", [1, 2], "holds the number 1, where a list of lists of integers a sequence is wanted"),
    ("routed_experts", [[[1]], [[1], [2]]], "has a token with 2 layers, others have 1"),
    ("routed_experts", [[[1]], None], "has a token without experts"),
    ("routed_experts", [[[1]], [[70000]]], "holds 70000, which is not an integer from -32768 to 32767"),
    ("token_texts", ["a"], "has 1 texts for 2 tokens"),
    ("token_texts", ["a", 2], "does not hold a list of texts"),
    ("sequence_id", None, "is missing: give it in every row or in none"),
    ("sequence_id", 1.5, "is the number 1.5, where an integer or a text is wanted"),
    ("group", True, "is the truth value true, where an integer or a text is wanted"),
    ("group", [1], "is a list, where an integer or a text is wanted"),
    ("reward", "good", "holds the text 'good', where one number a sequence is wanted"),
    ("reward", [1.0], "holds a list, where one number a sequence is wanted"),
    ("prompt_ids", [-1], "holds -1, which is not an integer from 0 to 2147483647"),
    ("prompt_ids", None, "is missing: give it in every row or in none"),
]
GOOD = {
    "mask": [True, False], "versions": [0, 1], "kept_ids": [[1], [2]], "routed_experts": [[[1]], [[2]]],
    "token_texts": ["a", "b"], "sequence_id": 1, "group": 1, "reward": 1.0, "prompt_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "problem"), BAD_VALUES)
def test_a_bad_value_in_a_json_row(name: str, value: Any, problem: str, tmp_path: Path) -> None:
    good = {**ROW, **({name: GOOD[name]} if name in GOOD else {})}
    path = save_jsonl(tmp_path / "t", [good, good, {**good, name: value}])
    error = error_of(path)
    assert (error.row, error.line, error.field) == (2, 3, name)
    assert problem in error.problem


@pytest.mark.parametrize(
    ("name", "kind", "value", "problem"),
    [
        ("token_ids", pa.string(), "1 2", "holds string, where a list of integers a sequence is wanted"),
        ("token_ids", pa.int64(), 1, "holds int64, where a list of integers a sequence is wanted"),
        ("train_logprobs", pa.list_(pa.string()), ["a"], "where a list of numbers a sequence is wanted"),
        (
            "train_logprobs",
            pa.list_(pa.list_(pa.float32())),
            [[1]],
            "where a list of numbers a sequence is wanted",
        ),
        ("rollout_logprobs", pa.list_(pa.bool_()), [True, True], "where a list of numbers a sequence is wanted"),
        ("mask", pa.list_(pa.string()), ["1"], "where a list of truth values a sequence is wanted"),
        ("group", pa.list_(pa.int64()), [1], "where one id a sequence is wanted"),
        ("entropies", pa.list_(pa.string()), ["1"], "where a list of numbers a sequence is wanted"),
    ],
)
def test_a_parquet_column_of_the_wrong_type(
    name: str, kind: pa.DataType, value: Any, problem: str, tmp_path: Path
) -> None:
    path = save_parquet(tmp_path / "t", [{**ROW, name: value}], **{name: kind})
    error = error_of(path)
    assert error.field == name
    assert problem in error.problem


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("token_ids", [1, -1], "holds -1, which is not an integer from 0 to 2147483647"),
        ("token_ids", [1, None], "holds a null, where every number is needed"),
        ("token_ids", None, "is missing"),
        ("train_logprobs", [-1.0, 1e300], "holds 1e+300, which does not fit"),
        ("mask", [1, 7], "holds 7, which is none of 0, 1, true and false"),
        ("sequence_id", None, "is missing"),
    ],
)
def test_a_bad_value_in_a_parquet_row(name: str, value: Any, problem: str, tmp_path: Path) -> None:
    good = {**ROW, "mask": [1, 0], "sequence_id": 1}
    path = save_parquet(tmp_path / "t", [good, good, {**good, name: value}])
    error = error_of(path)
    assert (error.row, error.line, error.field) == (2, None, name)
    assert problem in error.problem


def test_rows_with_other_keys(tmp_path: Path) -> None:
    without = {key: value for key, value in ROW.items() if key != "train_logprobs"}
    error = error_of(save_jsonl(tmp_path / "t", [ROW, without]))
    assert (error.row, error.field, error.problem) == (1, "train_logprobs", "is missing from this row")
    # What can be missing is filled as missing …
    trace = read_trace(save_jsonl(tmp_path / "t", [ROW, {**ROW, "reward": 1.0, "entropy": [1, 2], "prompt": "a"}]))
    assert trace.reward is not None
    assert is_missing(trace.reward).tolist() == [True, False]
    assert trace.entropies is not None
    assert is_missing(trace.entropies).tolist() == [True, True, False, False]
    assert trace.prompt is not None
    assert trace.prompt.tolist() == [None, "a"]
    # … and what cannot is an error.
    error = error_of(save_jsonl(tmp_path / "t", [{**ROW, "loss_mask": [1, 1]}, ROW]))
    assert (error.row, error.field) == (1, "loss_mask")


def test_a_known_key_that_first_appears_late_is_not_dropped(tmp_path: Path) -> None:
    path = save_jsonl(tmp_path / "t", [ROW] * 256 + [{**ROW, "unknown": 1, "response_mask": [1, 0]}])
    error = error_of(path)
    assert (error.row, error.line, error.field) == (256, 257, "response_mask")
    assert error.problem == "is not in the file's first 256 rows: give it in every row or in none"
    assert len(read_trace(save_jsonl(tmp_path / "t", [ROW] * 256 + [{**ROW, "unknown": 1}]))) == 257


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n \n\t\r\n", "has no rows: every line is blank"),
        (b"\xef\xbb\xbf", "has no rows: every line is blank"),
        (b"hello", "is neither Parquet nor JSON lines (one JSON object a line)"),
        (b"[1, 2]\n", "is neither Parquet nor JSON lines (one JSON object a line)"),
        (b"a,b\n1,2\n", "is neither Parquet nor JSON lines (one JSON object a line)"),
        (b"\xff\xfe{\x00}\x00", "is neither Parquet nor JSON lines (one JSON object a line)"),
        (b"\x1f\x8b\x08\x00", "is neither Parquet nor JSON lines (one JSON object a line)"),
        (pickle.dumps({"a": [1]}), "is neither Parquet nor JSON lines (one JSON object a line)"),
        (b"PAR1", "is not a whole Parquet file"),
        (b"PAR1" + b"\0" * 100, "is not a whole Parquet file"),
        (b"PAR1" + b"\xff\xff\xff\x7fPAR1", "is not a whole Parquet file"),
        (b"{}\n{}", "is missing: the sampled tokens are looked for as"),
    ],
)
def test_files_that_are_something_else(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    assert error_of(path).problem.startswith(problem)


def test_a_zip_is_neither(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("data.pkl", b"{}")
    assert error_of(tmp_path / "t.pt").problem.startswith("is neither Parquet nor JSON lines")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"[1, 2]", "is a list, where one JSON object a line is wanted"),
        (b"3", "is the number 3, where one JSON object a line is wanted"),
        (b"null", "is null, where one JSON object a line is wanted"),
        (b'"a"', "is the text 'a', where one JSON object a line is wanted"),
        (b"{'token_ids': [1]}", "is not a JSON object"),
        (b'{"token_ids": "\xff"}', "is not valid UTF-8 text"),
        (b'{"a": ' + b"[" * 100_000, "is not a JSON object (too large or too deep)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not a JSON object (too large or too deep)"),
        (json.dumps(ROW).encode() * 2, "is not a JSON object (Extra data)"),
    ],
)
def test_lines_that_are_no_object(line: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    for before in (3, 300):  # within the head that is read on opening, and beyond
        path.write_bytes((json.dumps(ROW).encode() + b"\n") * before + line + b"\n" + json.dumps(ROW).encode())
        error = error_of(path)
        assert (error.row, error.line) == (before, before + 1)
        assert error.problem.startswith(problem)


def test_a_last_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "t"
    text = (json.dumps(ROW) + "\n") * 2
    for cut in (3, 10, 30):
        path.write_text(text[:-cut])
        error = error_of(path)
        assert (error.row, error.line) == (1, 2)
        assert error.problem.endswith("it is the last line, and may have been cut short")


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert error_of(tmp_path).problem == "is a directory, not a file"
    assert error_of(tmp_path / "nowhere").problem == "cannot be read: No such file or directory"
    with pytest.raises(InputError, match="is not a path"):
        open_trace("a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert error_of(tmp_path / "pipe").problem == "is not a regular file"


def test_a_file_without_permission(tmp_path: Path) -> None:
    path = save_jsonl(tmp_path / "t", [ROW])
    path.chmod(0)
    with as_ordinary_user(tmp_path):
        assert error_of(path).problem == "cannot be read: Permission denied"


def test_a_file_that_vanishes_between_opening_and_reading(save: Any) -> None:
    file = open_trace(save([ROW]))
    file.path.unlink()
    with pytest.raises(InputError, match=r"No such file"):
        list(file.chunks())


def test_parquet_without_rows_or_with_a_name_twice(tmp_path: Path) -> None:
    schema = pa.schema([(name, pa.list_(pa.float32())) for name in ROW])
    pq.write_table(schema.empty_table(), tmp_path / "t")
    assert error_of(tmp_path / "t").problem == "has no rows"
    column = pa.array([[1]])
    pq.write_table(pa.table([column] * 4, names=[*ROW, "token_ids"]), tmp_path / "t")
    assert error_of(tmp_path / "t").problem == "has two columns named 'token_ids'"


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    table = pa.table({name: [value] for name, value in ROW.items()}).replace_schema_metadata(
        {"trueup.schema": "2"}
    )
    pq.write_table(table, tmp_path / "t")
    assert error_of(tmp_path / "t").problem == "has trueup's schema 2, and this version reads 1: upgrade trueup"


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    binary = pa.array([b"fine", b"\xff\xfe"], type=pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    arrays = [pa.array([value] * 2) for value in ROW.values()]
    pq.write_table(pa.table([*arrays, text], names=[*ROW, "prompt"]), tmp_path / "t")
    error = error_of(tmp_path / "t")
    assert (error.row, error.field, error.problem) == (1, "prompt", "is not valid UTF-8 text")


def _trace_or_sentence(path: Path) -> TokenTrace | None:
    """The trace, or ``None`` for an ``InputError``; any other exception fails the test."""
    try:
        return read_trace(path)
    except InputError as error:
        problem = str(error)
    assert problem.startswith(str(path))
    assert "\n" not in problem
    return None


def test_a_parquet_column_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = save_parquet(tmp_path / "t", [{**ROW, "QQQQ": 1}])
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"\xff" * 4))
    assert "UTF-8" in error_of(path).problem or "utf-8" in error_of(path).problem


@pytest.fixture(scope="module")
def parquet_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    lists = [[token % 50 for token in range(row)] for row in range(60)]
    path = tmp_path_factory.mktemp("whole") / "t"
    write_parquet(TokenTrace.from_lists(lists, lists, lists, prompt=[f"p{row}" for row in range(60)]), path)
    return path.read_bytes()


def test_every_truncation_of_a_parquet_file_is_one_sentence(parquet_bytes: bytes, tmp_path: Path) -> None:
    for size in range(4, len(parquet_bytes), 37):
        (tmp_path / "t").write_bytes(parquet_bytes[:size])
        assert error_of(tmp_path / "t").problem.startswith("is not a whole Parquet file")


def test_damaged_pages_are_noticed(parquet_bytes: bytes, tmp_path: Path) -> None:
    damaged = bytearray(parquet_bytes)
    for place in range(200, 400):  # inside the first column's pages: the checksum must notice
        damaged[place] ^= 0x55
    (tmp_path / "t").write_bytes(damaged)
    file = open_trace(tmp_path / "t")
    with pytest.raises(InputError, match="cannot be read from row 0 on: the file is damaged"):
        list(file.chunks())


@pytest.mark.parametrize("seed", range(150))
def test_any_damage_is_a_sentence_or_harmless(seed: int, parquet_bytes: bytes, tmp_path: Path) -> None:
    rng = random.Random(seed)
    damaged = bytearray(parquet_bytes)
    for _ in range(rng.choice([1, 3, 30])):
        damaged[rng.randrange(4, len(damaged))] = rng.randrange(256)
    (tmp_path / "t").write_bytes(damaged)
    _trace_or_sentence(tmp_path / "t")


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from([*ROW, "mask", "group", "reward", "kept_ids", "prompt", "routed_experts"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                lambda inner: (
                    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
                ),
                max_leaves=6,
            ),
        ).map(lambda odd: {**ROW, **odd}),
        min_size=1,
        max_size=3,
    )
)
def test_any_json_rows_are_a_trace_or_a_sentence(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save_jsonl(tmp_path_factory.mktemp("any") / "t", rows)
    trace = _trace_or_sentence(path)
    assert trace is None or len(trace) == len(rows)
