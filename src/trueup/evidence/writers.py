"""Write token traces under their canonical names, completely or not at all; reading gives an equal trace back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trueup.atomic import atomic_path
from trueup.errors import InputError
from trueup.evidence.schema import COLUMNS, SCHEMA_VERSION
from trueup.evidence.trace import Ragged, TokenTrace, is_missing

#: Sequences of one Parquet row group: enough to compress well, few enough to be read in a chunk.
_GROUP_ROWS = 2048

#: JSON lines that are Python objects at a time; these take eight times the room of the arrays.
_LINES = 64


def write_parquet(trace: TokenTrace, path: Path | str, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write ``trace`` as Parquet, one row a sequence; ``MISSING`` becomes null, every other value keeps its bits.

    ``metadata`` (``{"temperature": "1.0"}``) is kept as the file's ``trueup.*`` metadata, beside the schema's
    version. Raises ``InputError`` when the trace has no sequences, or the path or a text cannot be written.
    """
    trace = _checked(trace, path)
    blocks = (_batch(block, path) for block in _blocks(trace, _GROUP_ROWS))
    first = next(blocks)
    own = {**(metadata or {}), "schema": SCHEMA_VERSION}
    schema = first.schema.with_metadata({f"trueup.{key}": value for key, value in own.items()})
    floats = [name for name in first.schema.names if COLUMNS[name].family == "float"]
    leaves = {name: _leaf_path(first.schema.field(name)) for name in first.schema.names}
    with (
        atomic_path(path) as temporary,
        pq.ParquetWriter(
            temporary,
            schema,
            compression="zstd",
            # A dictionary would make one NaN of NaNs with different bits, and log-probabilities do not repeat.
            use_dictionary=[leaf for name, leaf in leaves.items() if name not in floats],
            use_byte_stream_split=[leaves[name] for name in floats],
            write_page_checksum=True,
        ) as writer,
    ):
        writer.write_batch(first.cast(schema))
        for block in blocks:
            writer.write_batch(block.cast(schema))


def write_jsonl(trace: TokenTrace, path: Path | str) -> None:
    """Write ``trace`` as JSON lines, one object a sequence, UTF-8.

    ``MISSING`` becomes null; NaN and the infinities are written as ``NaN``, ``Infinity`` and ``-Infinity``, which
    Python's own ``json`` reads and strict JSON readers refuse. Float32 values are written with the digits of the
    float64 of equal value, so that they come back exactly. Raises ``InputError`` when the trace has no sequences
    or the path cannot be written.
    """
    trace = _checked(trace, path)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        for block in _blocks(trace, _LINES):
            columns = {name: _python_rows(name, block) for name in block.column_names}
            for row in range(len(block)):
                file.write(_line({name: values[row] for name, values in columns.items()}))


def _checked(trace: TokenTrace, path: Path | str) -> TokenTrace:
    """The trace with sequence ids that are all int64 or all texts; an error if it has none or mixes them."""
    if len(trace) == 0:
        raise InputError("would be a file without rows: the trace has no sequences", file=str(path))
    ids = trace.sequence_id.tolist()
    if all(isinstance(value, Integral) and not isinstance(value, bool) for value in ids):
        return replace(trace, sequence_id=np.array(ids, dtype=np.int64))
    if all(isinstance(value, str) for value in ids):
        return trace
    raise InputError("must be all integers or all texts", file=str(path), field="sequence_id")


def _blocks(trace: TokenTrace, rows: int) -> Iterator[TokenTrace]:
    for start in range(0, len(trace), rows):
        yield trace.block(start, min(start + rows, len(trace)))


def _batch(trace: TokenTrace, path: Path | str) -> pa.RecordBatch:
    arrays: dict[str, pa.Array] = {}
    for name in trace.column_names:
        try:
            arrays[name] = _arrow(name, trace)
        except UnicodeEncodeError:
            # Arrow's text is UTF-8, which has no half surrogate pairs; JSON can escape them.
            raise InputError(
                "holds half a surrogate pair, which Parquet cannot: write JSON lines", file=str(path), field=name
            ) from None
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise InputError("holds something else than texts", file=str(path), field=name) from None
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _arrow(name: str, trace: TokenTrace) -> pa.Array:
    """The column as an Arrow array with one item a sequence."""
    column = getattr(trace, name)
    if name == "kept_ids":
        return _lists(trace.offsets, _lists(column.offsets, _numbers(column.values)))
    if isinstance(column, Ragged):
        return _lists(column.offsets, _numbers(column.values))
    if name == "routed_experts":
        tokens, layers, experts = column.shape
        flat = _numbers(np.ascontiguousarray(column).reshape(-1))
        by_layer = _lists(np.arange(tokens * layers + 1) * experts, flat)
        return _lists(trace.offsets, _lists(np.arange(tokens + 1) * layers, by_layer))
    text = column.dtype.kind in "OU"
    items = pa.array(column.tolist(), type=pa.string()) if text else _numbers(column)
    return items if COLUMNS[name].depth == 0 else _lists(trace.offsets, items)


def _numbers(values: npt.NDArray[Any]) -> pa.Array:
    if values.dtype != np.float32:
        return pa.array(values)
    # ``from_pandas`` would make nulls of all NaNs, and only MISSING is one.
    return pa.array(values, mask=is_missing(values), from_pandas=False)


def _lists(offsets: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _leaf_path(field: pa.Field) -> str:
    """How Parquet names the innermost values of a column."""
    path, kind = field.name, field.type
    while pa.types.is_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    return str(path)


def _python_rows(name: str, trace: TokenTrace) -> list[Any]:
    """The column as one JSON-ready Python value a sequence."""
    column = getattr(trace, name)
    if isinstance(column, Ragged):
        items = _split(column.values.tolist(), column.offsets)
        return _split(items, trace.offsets) if name == "kept_ids" else items
    values = column.tolist()
    if column.dtype == np.float32:
        for item in np.flatnonzero(is_missing(column)):
            values[item] = None
    return values if COLUMNS[name].depth == 0 else _split(values, trace.offsets)


def _split(values: list[Any], offsets: npt.NDArray[np.int64]) -> list[list[Any]]:
    return [values[start:stop] for start, stop in pairwise(offsets.tolist())]


def _line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair, from a text that was cut inside an emoji, has no UTF-8 and must be escaped.
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"
