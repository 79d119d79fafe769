"""Parquet: one row a sequence, one list column a per-token quantity; read in batches, mostly without a copy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.errors import InputError
from trueup.evidence.readers.columns import Chunk, build_trace, list_depth
from trueup.evidence.schema import COLUMNS, SCHEMA_VERSION, Shape
from trueup.evidence.trace import TokenTrace

MAGIC = b"PAR1"

#: Read through a buffer of this many bytes, and not ahead, so that a large row group is not held whole.
_BUFFER = 1 << 20

_PREFIX = "trueup."


def inspect(path: Path) -> tuple[dict[str, Shape], int, dict[str, str]]:
    """The shape of every column, the number of rows, and the file's own ``trueup.*`` metadata without the prefix.

    Raises ``InputError`` for a file that cannot be read, has no rows, or was written by a newer trueup.
    """
    with _opened(path) as file:
        try:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            shapes = {field.name: _shape(field.type) for field in schema}
        except UnicodeDecodeError:
            raise InputError("has a column whose name is not valid UTF-8", file=str(path)) from None
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise InputError(f"has two columns named '{min(twice)}'", file=str(path))
    if rows == 0:
        raise InputError("has no rows", file=str(path))
    metadata = {
        key.decode("utf-8", "replace").removeprefix(_PREFIX): value.decode("utf-8", "replace")
        for key, value in (schema.metadata or {}).items()
        if key.startswith(_PREFIX.encode())
    }
    if metadata.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise InputError(
            f"has trueup's schema {metadata['schema']}, and this version reads {SCHEMA_VERSION}: upgrade trueup",
            file=str(path),
        )
    return shapes, rows, metadata


def check_types(path: Path, columns: Mapping[str, str]) -> None:
    """Raise ``InputError`` if a column of this Parquet file cannot hold what its canonical column wants."""
    with _opened(path) as file:
        schema = file.schema_arrow
    for canonical, name in columns.items():
        kind = schema.field(name).type
        if not COLUMNS[canonical].accepts(_shape(kind)):
            wanted = COLUMNS[canonical].wanted
            raise InputError(f"holds {kind}, where {wanted} is wanted", file=str(path), field=name)


def read_chunks(path: Path, columns: Mapping[str, str], *, rows: int) -> Iterator[TokenTrace]:
    """Yield traces of at most ``rows`` sequences. Raises ``InputError`` where the file cannot be read or used."""
    first_row = 0
    with _opened(path) as file:
        batches = file.iter_batches(batch_size=rows, columns=list(columns.values()))
        while (batch := _next_batch(batches, path, first_row)) is not None:
            if batch.num_rows:
                yield build_trace(_chunk(batch, path, columns, first_row))
            first_row += batch.num_rows


def _chunk(batch: pa.RecordBatch, path: Path, columns: Mapping[str, str], first_row: int) -> Chunk:
    numbers: dict[str, pa.Array] = {}
    values: dict[str, list[Any]] = {}
    for canonical, name in columns.items():
        array = _plain(batch.column(name))
        if COLUMNS[canonical].family in ("text", "key"):
            values[canonical] = _python_values(array, path, name, first_row)
        else:
            numbers[canonical] = array
    return Chunk(str(path), first_row, columns, numbers, values)


def _python_values(array: pa.Array, path: Path, name: str, first_row: int) -> list[Any]:
    try:
        values: list[Any] = array.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError):
        for row, scalar in enumerate(array, start=first_row):
            try:
                scalar.as_py()
            except (pa.ArrowException, UnicodeDecodeError):
                raise InputError("is not valid UTF-8 text", file=str(path), row=row, field=name) from None
        raise
    return values


def _plain(array: pa.Array) -> pa.Array:
    """The array without a dictionary or an extension type around it."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


def _shape(kind: pa.DataType) -> Shape:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    depth, leaf = list_depth(kind)
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    if pa.types.is_null(leaf):
        return Shape(depth or None, None)
    if pa.types.is_floating(leaf) or pa.types.is_integer(leaf):
        return Shape(depth, "number")
    if pa.types.is_boolean(leaf):
        return Shape(depth, "boolean")
    text = pa.types.is_string(leaf) or pa.types.is_large_string(leaf) or pa.types.is_string_view(leaf)
    return Shape(depth, "text" if text else "other")


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        file = pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"cannot be read: {os.strerror(error.errno or 0)}", file=str(path)) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"is not a whole Parquet file ({_reason(error)})", file=str(path)) from None
    with file:
        yield file


def _next_batch(batches: Iterator[pa.RecordBatch], path: Path, first_row: int) -> pa.RecordBatch | None:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"cannot be read from row {first_row} on: the file is damaged ({_reason(error)})", file=str(path)
        ) from None


def _reason(error: BaseException) -> str:
    """The first sentence of what Arrow says, which may go on for a paragraph."""
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")[:200] or type(error).__name__
