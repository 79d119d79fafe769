from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.errors import InputError
from trueup.evidence import TokenTrace
from trueup.evidence.readers import open_trace, read_trace
from trueup.evidence.schema import COLUMNS
from trueup.evidence.writers import write_jsonl, write_parquet

WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Any:
    return WRITERS[request.param]


def test_every_column_comes_back_exactly(
    write: Any, full_trace: TokenTrace, tmp_path: Path, assert_same: Any
) -> None:
    # A column that this trace lacks would not be tested.
    assert set(full_trace.column_names) == set(COLUMNS)
    path = tmp_path / "trace"
    write(full_trace, path)
    assert_same(read_trace(path), full_trace)
    assert open_trace(path).notes == ()


def test_text_ids_come_back(write: Any, tmp_path: Path, full_trace: TokenTrace) -> None:
    path = tmp_path / "trace"
    for ids in (np.array(["b", "ä", ""], dtype=object), np.array(["req-1", "2", "3"])):
        write(dataclasses.replace(full_trace, sequence_id=ids), path)
        assert read_trace(path).sequence_id.tolist() == ids.tolist()


def test_blocks_beyond_one_row_group(write: Any, tmp_path: Path, assert_same: Any) -> None:
    lists = [[row] * (row % 3) for row in range(4100)]
    trace = TokenTrace.from_lists(lists, lists, lists, group=list(range(4100)))
    path = tmp_path / "trace"
    write(trace, path)
    assert_same(read_trace(path), trace)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
def test_parquet_keeps_the_bits_of_every_float(tmp_path_factory: pytest.TempPathFactory, bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    trace = TokenTrace.from_lists([[1] * len(bits)], [[0.0] * len(bits)], [[0.0] * len(bits)])
    trace = dataclasses.replace(trace, rollout_logprobs=values)
    path = tmp_path_factory.mktemp("bits") / "trace.parquet"
    write_parquet(trace, path)
    assert read_trace(path).rollout_logprobs.view(np.uint32).tolist() == bits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_jsonl_keeps_every_number(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    trace = TokenTrace.from_lists([[1] * len(values)], [values], [values])
    path = tmp_path_factory.mktemp("numbers") / "trace.jsonl"
    write_jsonl(trace, path)
    expected = np.array(values, dtype=np.float32).view(np.uint32)
    assert read_trace(path).train_logprobs.view(np.uint32).tolist() == expected.tolist()


def test_missing_is_null_and_nan_is_not(tmp_path: Path) -> None:
    trace = TokenTrace.from_lists([[1, 2, 3]], [[None, float("nan"), -float("inf")]], [[-1, -1, -1]])
    write_parquet(trace, tmp_path / "trace.parquet")
    column = pq.read_table(tmp_path / "trace.parquet")["rollout_logprobs"].combine_chunks().flatten()
    assert column.is_null().to_pylist() == [True, False, False]
    write_jsonl(trace, tmp_path / "trace.jsonl")
    text = (tmp_path / "trace.jsonl").read_text(encoding="utf-8")
    assert '"rollout_logprobs":[null,NaN,-Infinity]' in text
    assert '"mask":[true,true,true]' in text


def test_jsonl_is_one_object_a_line_in_utf8(tmp_path: Path, full_trace: TokenTrace) -> None:
    write_jsonl(full_trace, tmp_path / "trace.jsonl")
    lines = (tmp_path / "trace.jsonl").read_bytes().decode("utf-8").splitlines()
    assert [json.loads(line)["sequence_id"] for line in lines] == [10, -3, 2**62]
    assert "¿qué?" in lines[2]


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    trace = TokenTrace.from_lists([[1]], [[-1]], [[-1]], response=["cut \ud83d"])
    write_jsonl(trace, tmp_path / "trace.jsonl")
    response = read_trace(tmp_path / "trace.jsonl").response
    assert response is not None
    assert response.tolist() == ["cut \ud83d"]
    with pytest.raises(InputError, match="field 'response': holds half a surrogate pair"):
        write_parquet(trace, tmp_path / "trace.parquet")
    assert not (tmp_path / "trace.parquet").exists()


def test_parquet_metadata(tmp_path: Path) -> None:
    trace = TokenTrace.from_lists([[1]], [[-1]], [[-1]])
    path = tmp_path / "trace.parquet"
    write_parquet(trace, path, metadata={"temperature": "0.7", "schema": "not yours"})
    metadata = pq.read_schema(path).metadata
    assert metadata[b"trueup.schema"] == b"1"
    assert metadata[b"trueup.temperature"] == b"0.7"
    assert open_trace(path).metadata == {"schema": "1", "temperature": "0.7"}


def test_other_tools_see_plain_lists(tmp_path: Path) -> None:
    trace = TokenTrace.from_lists([[1, 2], []], [[-1, -2], []], [[-1, -2], []])
    write_parquet(trace, tmp_path / "trace.parquet")
    table = pq.read_table(tmp_path / "trace.parquet")
    assert table.schema.field("token_ids").type == pa.list_(pa.int32())
    assert table["token_ids"].to_pylist() == [[1, 2], []]
    assert table["rollout_logprobs"].to_pylist() == [[-1.0, -2.0], []]


def test_what_cannot_be_written(write: Any, tmp_path: Path) -> None:
    trace = TokenTrace.from_lists([[1], [2]], [[-1], [-1]], [[-1], [-1]])
    path = tmp_path / "trace"
    with pytest.raises(InputError, match="without rows"):
        write(trace.take([]), path)
    with pytest.raises(InputError, match="field 'sequence_id': must be all integers or all texts"):
        write(dataclasses.replace(trace, sequence_id=np.array([1, "a"], dtype=object)), path)
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        write(trace, tmp_path / "nowhere" / "trace")
    assert list(tmp_path.iterdir()) == []
