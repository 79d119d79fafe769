"""JSON lines: one object a line, one object a sequence; read a chunk of lines at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from trueup.errors import InputError
from trueup.evidence.readers.columns import Chunk, build_trace, describe, list_depth
from trueup.evidence.schema import COLUMNS, Column, Shape, unseen_aliases
from trueup.evidence.trace import TokenTrace

BOM = b"\xef\xbb\xbf"

#: Which columns a file has is decided by this many rows, so that opening it stays quick.
HEAD_ROWS = 256

#: Rows that are held as Python objects at a time.
_PART_ROWS = 64

#: One row: its number (from 0, blank lines not counted), its line (from 1), and the object.
Row = tuple[int, int, dict[str, Any]]


def inspect(path: Path) -> dict[str, Shape]:
    """The shape of every key of the first ``HEAD_ROWS`` rows, in the order in which they appear."""
    shapes: dict[str, Shape] = {}
    rows = 0
    for _, _, fields in islice(_rows(path), HEAD_ROWS):
        rows += 1
        for name, value in fields.items():
            known = shapes.get(name)
            if known is None or known.leaf is None:
                shapes[name] = _deeper(known, _shape(value))
    if not rows:
        raise InputError("has no rows", file=str(path))
    return shapes


def read_chunks(
    path: Path, columns: Mapping[str, str], *, unused: Sequence[str], rows: int
) -> Iterator[TokenTrace]:
    """Yield traces of at most ``rows`` sequences. Raises ``InputError`` with the row and the line."""
    known = {*columns.values(), *unused}
    late = unseen_aliases(columns)
    every = _rows(path)
    while parts := list(_parts(every, path, columns, known=known, late=late, rows=rows)):
        yield TokenTrace.concatenate(parts)


def _parts(
    every: Iterator[Row],
    path: Path,
    columns: Mapping[str, str],
    *,
    known: Set[str],
    late: Mapping[str, str],
    rows: int,
) -> Iterator[TokenTrace]:
    """The next ``rows`` rows as traces of a few rows each, for Python's numbers take eight times the room."""
    while rows > 0 and (part := list(islice(every, min(rows, _PART_ROWS)))):
        rows -= len(part)
        for row, line, fields in part:
            for name in fields.keys() - known:
                if name in late and fields[name] is not None:
                    raise InputError(
                        f"is not in the file's first {HEAD_ROWS} rows: give it in every row or in none",
                        file=str(path), row=row, line=line, field=name,
                    )  # fmt: skip
        yield build_trace(_chunk(part, path, columns))


def _chunk(rows: list[Row], path: Path, columns: Mapping[str, str]) -> Chunk:
    lines = [line for _, line, _ in rows]
    empty = Chunk(str(path), rows[0][0], columns, {}, {}, lines)
    numbers: dict[str, pa.Array] = {}
    values: dict[str, list[Any]] = {}
    for canonical, name in columns.items():
        column = COLUMNS[canonical]
        if column.required:
            for row, (_, _, fields) in enumerate(rows):
                if name not in fields:
                    raise empty.error("is missing from this row", row=row, column=canonical)
        found = [fields.get(name) for _, _, fields in rows]
        if column.family in ("text", "key"):
            values[canonical] = found
        else:
            numbers[canonical] = _array(found, column, empty)
    return Chunk(str(path), rows[0][0], columns, numbers, values, lines)


def _array(values: list[Any], column: Column, chunk: Chunk) -> pa.Array:
    """The values as an Arrow array of the wanted depth, or an ``InputError`` about the first that is not wanted.

    Arrow guesses the type: with a type given, it would silently make 5 of 5.5 and 1.0 of true.
    """
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        array = None
    if array is not None and _fits(array.type, column) and not _hides_truth_values(array, values, column):
        return array
    for row, value in enumerate(values):
        problem = _problem(value, column, column.depth)
        if problem:
            raise chunk.error(f"{problem}, where {column.wanted} is wanted", row=row, column=column.name)
    # Each value is fine and only their mixture is not (true beside 1, or 1.5 beside an integer above 2**53).
    return pa.array([_as_floats(value) for value in values], type=_float_lists(column.depth))


def _fits(kind: pa.DataType, column: Column) -> bool:
    depth, leaf = list_depth(kind)
    if pa.types.is_null(leaf):
        return depth <= column.depth
    if depth != column.depth:
        return False
    number = pa.types.is_floating(leaf) or pa.types.is_integer(leaf)
    return bool(number or (column.family == "boolean" and pa.types.is_boolean(leaf)))


def _hides_truth_values(array: pa.Array, values: list[Any], column: Column) -> bool:
    """Whether Arrow may have made numbers of true and false, which it does beside floats, and only there."""
    depth, leaf = list_depth(array.type)
    if column.family == "boolean" or not pa.types.is_floating(leaf):
        return False
    if depth > 1:
        return True  # rare enough to look at each value
    lists = [values] if depth == 0 else (value for value in values if value is not None)
    return any(bool in set(map(type, items)) for items in lists)


def _problem(value: Any, column: Column, depth: int) -> str:
    """What keeps a value from being a list (of lists) of the wanted numbers; empty if nothing does."""
    if value is None:
        return ""
    if depth:
        if not isinstance(value, list):
            return f"holds {describe(value)}"
        return next(filter(None, (_problem(item, column, depth - 1) for item in value)), "")
    if isinstance(value, bool):
        return "" if column.family == "boolean" else f"holds {describe(value)}"
    if not isinstance(value, int | float):
        return f"holds {describe(value)}"
    try:
        float(value)
    except OverflowError:
        return f"holds {describe(value)}"
    return ""


def _as_floats(value: Any) -> Any:
    if value is None:
        return None
    return [_as_floats(item) for item in value] if isinstance(value, list) else float(value)


def _float_lists(depth: int) -> pa.DataType:
    return pa.float64() if depth == 0 else pa.list_(_float_lists(depth - 1))


def _rows(path: Path) -> Iterator[Row]:
    row = 0
    try:
        with path.open("rb") as file:
            for line, text in enumerate(file, start=1):
                stripped = (text.removeprefix(BOM) if line == 1 else text).strip()
                if not stripped:
                    continue
                yield row, line, _parse(stripped, path, row, line, whole=text.endswith(b"\n"))
                row += 1
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=str(path)) from None


def _parse(text: bytes, path: Path, row: int, line: int, *, whole: bool) -> dict[str, Any]:
    value: Any
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        # Python's reader also takes NaN, Infinity and half a surrogate pair, which real dumps have.
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError("is not valid UTF-8 text", file=str(path), row=row, line=line) from None
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "too large or too deep"
            cut = "" if whole else "; it is the last line, and may have been cut short"
            raise InputError(f"is not a JSON object ({reason}){cut}", file=str(path), row=row, line=line) from None
    if not isinstance(value, dict):
        raise InputError(
            f"is {describe(value)}, where one JSON object a line is wanted", file=str(path), row=row, line=line
        )
    return value


def _shape(value: Any) -> Shape:
    depth = 0
    while isinstance(value, list):
        depth += 1
        value = next((item for item in value if item is not None and item != []), None)
    if value is None:
        return Shape(depth or None, None)
    if isinstance(value, bool):
        return Shape(depth, "boolean")
    if isinstance(value, int | float):
        return Shape(depth, "number")
    return Shape(depth, "text" if isinstance(value, str) else "other")


def _deeper(known: Shape | None, new: Shape) -> Shape:
    """The one of two shapes that tells more."""
    return new if known is None or new.leaf is not None or (new.depth or 0) > (known.depth or 0) else known
