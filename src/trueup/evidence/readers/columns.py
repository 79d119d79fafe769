"""From the columns of one chunk of a file to a ``TokenTrace``: the part that every format shares.

Numbers arrive as Arrow arrays and are not copied where they already are what ``TokenTrace`` wants. Arrow arrays
may be slices, and a null list may hide values: ``_unnest`` is the only place that looks inside a list array.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trueup.errors import InputError
from trueup.evidence.readers.groups import groups_of_names, groups_of_prompt_ids, groups_of_prompts
from trueup.evidence.schema import COLUMNS, Column
from trueup.evidence.trace import MISSING, SEQUENCE_COLUMNS, TOKEN_COLUMNS, Ragged, TokenTrace

#: Columns of token ids: these are never negative.
_IDS = frozenset({"token_ids", "prompt_ids", "kept_ids"})

#: Gives the row (within the chunk) of an item of a flat array.
Locate = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive rows of a file, column by column, under canonical names.

    ``numbers`` holds the integer, float and boolean columns; ``values`` the text and key columns, one Python value
    a row. ``names`` gives the file's own name of each column and ``lines`` the line of each row, for errors.
    """

    file: str
    first_row: int
    names: Mapping[str, str]
    numbers: Mapping[str, pa.Array]
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    lines: Sequence[int] | None = None

    def error(self, problem: str, *, row: int, column: str) -> InputError:
        """The error to raise about ``row`` (counted within the chunk) of a canonical column."""
        return InputError(
            problem,
            file=self.file,
            row=self.first_row + row,
            line=None if self.lines is None else self.lines[row],
            field=self.names.get(column, column),
        )


def build_trace(chunk: Chunk) -> TokenTrace:
    """The chunk as a ``TokenTrace``; ``InputError`` names the row and the field of the first value that cannot be.

    Absent columns are derived as ``docs/formats.md`` says: a mask of True, row numbers, groups of equal prompts.
    """
    token_ids, lengths = _unnest(_without_null("token_ids", chunk))
    offsets = _offsets(lengths)
    trace: dict[str, Any] = {"token_ids": _integers(token_ids, "token_ids", chunk, _row_of(offsets))}
    for name, array in chunk.numbers.items():
        if name == "token_ids":
            continue
        if name in TOKEN_COLUMNS:
            trace[name] = _per_token(name, chunk, lengths)
        elif name in SEQUENCE_COLUMNS:
            convert = _floats if COLUMNS[name].family == "float" else _integers
            trace[name] = convert(_without_null(name, chunk), name, chunk, _itself)
        elif name == "prompt_ids":
            values, prompt_lengths = _unnest(_without_null(name, chunk))
            starts = _offsets(prompt_lengths)
            trace[name] = Ragged(_integers(values, name, chunk, _row_of(starts)), starts)
        elif name == "kept_ids":
            trace[name] = _kept_ids(array, chunk, lengths)
        elif name == "routed_experts":
            trace[name] = _routed_experts(chunk, lengths)
    for name in ("prompt", "response"):
        if name in chunk.values:
            trace[name] = _objects([_text(value) for value in chunk.values[name]])
    if "token_texts" in chunk.values:
        trace["token_texts"] = _token_texts(chunk, lengths)
    rows = len(lengths)
    trace.setdefault("mask", np.ones(int(offsets[-1]), dtype=np.bool_))
    trace["sequence_id"] = (
        _sequence_ids(chunk)
        if "sequence_id" in chunk.values
        else np.arange(chunk.first_row, chunk.first_row + rows, dtype=np.int64)
    )
    trace["group"] = _groups(chunk, trace)
    return TokenTrace(offsets=offsets, source=chunk.file, first_row=chunk.first_row, **trace)


def _per_token(name: str, chunk: Chunk, lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """One number a token, float32, int32 or bool[N]; a null list of floats is missing for all its tokens."""
    family = COLUMNS[name].family
    array = chunk.numbers[name] if family == "float" else _without_null(name, chunk)
    values, own_lengths = _unnest(array)
    missing = _nulls(array)
    _check_lengths(name, chunk, np.where(missing, lengths, own_lengths), lengths)
    locate = _row_of(_offsets(own_lengths))
    if family == "boolean":
        return _booleans(values, name, chunk, locate)
    if family == "integer":
        return _integers(values, name, chunk, locate)
    floats = _floats(values, name, chunk, locate)
    if not missing.any():
        return floats
    whole = np.full(int(lengths.sum()), MISSING, dtype=np.float32)
    whole[np.repeat(~missing, lengths)] = floats
    return whole


def _kept_ids(array: pa.Array, chunk: Chunk, lengths: npt.NDArray[np.int64]) -> Ragged:
    supports, own_lengths = _unnest(_without_null("kept_ids", chunk))
    _check_lengths("kept_ids", chunk, own_lengths, lengths)
    row_of = _row_of(_offsets(own_lengths))
    if not _is_list(supports.type) and not pa.types.is_null(supports.type):
        raise chunk.error(_not_wanted(COLUMNS["kept_ids"], array.type), row=0, column="kept_ids")
    values, kept = _unnest(supports)
    offsets = _offsets(kept)
    token_of = _row_of(offsets)
    return Ragged(_integers(values, "kept_ids", chunk, lambda item: row_of(token_of(item))), offsets)


def _routed_experts(chunk: Chunk, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    """int16[N, layers, k]: every token has as many layers as the first, and every layer as many experts."""
    name = "routed_experts"
    layers, own_lengths = _unnest(_without_null(name, chunk))
    _check_lengths(name, chunk, own_lengths, lengths)
    row_of_token = _row_of(_offsets(own_lengths))
    _check_no_null(layers, chunk, row_of_token)
    experts, num_layers = _unnest(layers)
    _check_uniform(num_layers, chunk, row_of_token, "layers")
    token_of_layer = _row_of(_offsets(num_layers))
    _check_no_null(experts, chunk, lambda item: row_of_token(token_of_layer(item)))
    values, num_experts = _unnest(experts)
    _check_uniform(num_experts, chunk, lambda item: row_of_token(token_of_layer(item)), "experts")
    layer_of = _row_of(_offsets(num_experts))
    flat = _integers(
        values, name, chunk, lambda item: row_of_token(token_of_layer(layer_of(item))), dtype=np.dtype(np.int16)
    )
    shape = (int(lengths.sum()), *(int(counts[0]) if len(counts) else 0 for counts in (num_layers, num_experts)))
    return flat.reshape(shape)


def _token_texts(chunk: Chunk, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    texts: list[str | None] = []
    for row, value in enumerate(chunk.values["token_texts"]):
        if value is None:
            texts += [None] * int(lengths[row])
            continue
        bad = not isinstance(value, list) or any(not isinstance(text, str | None) for text in value)
        if bad:
            raise chunk.error("does not hold a list of texts", row=row, column="token_texts")
        if len(value) != lengths[row]:
            raise chunk.error(f"has {len(value)} texts for {lengths[row]} tokens", row=row, column="token_texts")
        texts += value
    return _objects(texts)


def _sequence_ids(chunk: Chunk) -> npt.NDArray[Any]:
    """int64[S] if every id is an integer, else object[S]."""
    values = chunk.values["sequence_id"]
    for row, value in enumerate(values):
        _check_key(value, "sequence_id", chunk, row)
    if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return np.array(values, dtype=np.int64)
    return _objects([str(value) for value in values])


def _groups(chunk: Chunk, trace: Mapping[str, Any]) -> npt.NDArray[np.int64] | None:
    """int64[S]: the file's groups, else equal for equal prompts, else ``None``."""
    if "group" in chunk.values:
        for row, value in enumerate(chunk.values["group"]):
            _check_key(value, "group", chunk, row)
        return groups_of_names(chunk.values["group"])
    if "prompt_ids" in trace:
        return groups_of_prompt_ids(trace["prompt_ids"])
    if "prompt" in trace:
        return groups_of_prompts(trace["prompt"], first_row=chunk.first_row)
    return None


def _text(value: Any) -> str | None:
    """A string as it stands; chat messages as JSON with sorted keys; ``None`` stays ``None``."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _check_key(value: Any, column: str, chunk: Chunk, row: int) -> None:
    if value is None:
        raise chunk.error("is missing: give it in every row or in none", row=row, column=column)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise chunk.error(f"is {describe(value)}, where an integer or a text is wanted", row=row, column=column)


def _floats(values: pa.Array, column: str, chunk: Chunk, locate: Locate) -> npt.NDArray[np.float32]:
    """float32, a view where Arrow holds float32 without nulls; nulls are ``MISSING``, nothing else is altered."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.full(len(values), MISSING, dtype=np.float32)
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise chunk.error(_not_wanted(COLUMNS[column], kind), row=locate(0) if len(values) else 0, column=column)
    wide: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    narrow: npt.NDArray[np.float32]
    if wide.dtype == np.float32:
        narrow = wide
    else:
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        overflow = np.isinf(narrow) & np.isfinite(wide)
        if overflow.any():
            item = int(np.argmax(overflow))
            raise chunk.error(f"holds {wide[item]:g}, which does not fit", row=locate(item), column=column)
    if values.null_count:
        narrow = narrow if narrow.flags.writeable else narrow.copy()
        narrow[_nulls(values)] = MISSING
    return narrow


def _integers(
    values: pa.Array, column: str, chunk: Chunk, locate: Locate, *, dtype: np.dtype[Any] | None = None
) -> npt.NDArray[Any]:
    """Integers of the column's dtype, a view where Arrow holds that very dtype; whole floats are accepted."""
    dtype = dtype or TOKEN_COLUMNS.get(column) or SEQUENCE_COLUMNS.get(column) or np.dtype(np.int32)
    kind = values.type
    if len(values) == 0:
        return np.empty(0, dtype=dtype)
    if values.null_count:
        item = int(np.argmax(_nulls(values)))
        raise chunk.error("holds a null, where every number is needed", row=locate(item), column=column)
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise chunk.error(_not_wanted(COLUMNS[column], kind), row=locate(0), column=column)
    wide: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if wide.dtype == np.float16:
        wide = wide.astype(np.float64)  # the bounds do not fit float16
    low = 0 if column in _IDS else np.iinfo(dtype).min
    outside = ~((wide >= low) & (wide <= np.iinfo(dtype).max))
    if pa.types.is_floating(kind):
        outside |= wide != np.floor(wide)
    if outside.any():
        item = int(np.argmax(outside))
        wanted = f"an integer from {low} to {np.iinfo(dtype).max}"
        problem = f"holds {values[item].as_py()!r}, which is not {wanted}"
        raise chunk.error(problem, row=locate(item), column=column)
    return wide.astype(dtype, copy=False)


def _booleans(values: pa.Array, column: str, chunk: Chunk, locate: Locate) -> npt.NDArray[np.bool_]:
    """bool from true/false or from 0/1 of any number type; nothing else is taken for a truth value."""
    kind = values.type
    if len(values) == 0:
        return np.empty(0, dtype=np.bool_)
    if values.null_count:
        item = int(np.argmax(_nulls(values)))
        raise chunk.error("holds a null, where true or false is needed", row=locate(item), column=column)
    if not (pa.types.is_boolean(kind) or pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise chunk.error(_not_wanted(COLUMNS[column], kind), row=locate(0), column=column)
    numbers: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.bool_:
        return numbers
    wrong = (numbers != 0) & (numbers != 1)
    if wrong.any():
        item = int(np.argmax(wrong))
        problem = f"holds {numbers[item]:g}, which is none of 0, 1, true and false"
        raise chunk.error(problem, row=locate(item), column=column)
    return numbers.astype(np.bool_)


def _unnest(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """The values of a list array, one level flatter and without those of null lists, and each list's length."""
    if pa.types.is_null(array.type):
        return pa.nulls(0), np.zeros(len(array), dtype=np.int64)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    # ``flatten`` minds the slice and skips what a null list hides; ``values`` does neither.
    return array.flatten(), np.where(_nulls(array), 0, lengths).astype(np.int64)


def _without_null(column: str, chunk: Chunk) -> pa.Array:
    """The column, if it may have nulls or has none."""
    array = chunk.numbers[column]
    scalar_float = COLUMNS[column].depth == 0 and COLUMNS[column].family == "float"
    if array.null_count and not scalar_float:
        row = int(np.argmax(_nulls(array)))
        raise chunk.error("is missing: give it in every row or in none", row=row, column=column)
    return array


def _check_lengths(column: str, chunk: Chunk, found: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> None:
    if np.array_equal(found, wanted):
        return
    row = int(np.argmax(found != wanted))
    noun = "log-probabilities" if column.endswith("logprobs") else "values"
    raise chunk.error(f"has {found[row]} {noun} for {wanted[row]} tokens", row=row, column=column)


def _check_no_null(lists: pa.Array, chunk: Chunk, locate: Locate) -> None:
    if lists.null_count:
        row = locate(int(np.argmax(_nulls(lists))))
        raise chunk.error("has a token without experts", row=row, column="routed_experts")


def _check_uniform(counts: npt.NDArray[np.int64], chunk: Chunk, locate: Locate, noun: str) -> None:
    if len(counts) and np.any(counts != counts[0]):
        item = int(np.argmax(counts != counts[0]))
        raise chunk.error(
            f"has a token with {counts[item]} {noun}, others have {counts[0]}",
            row=locate(item),
            column="routed_experts",
        )


def _row_of(offsets: npt.NDArray[np.int64]) -> Locate:
    return lambda item: int(np.searchsorted(offsets, item, side="right")) - 1


def _itself(item: int) -> int:
    return item


def _nulls(array: pa.Array) -> npt.NDArray[np.bool_]:
    if array.null_count == 0:
        return np.zeros(len(array), dtype=np.bool_)
    nulls: npt.NDArray[np.bool_] = pc.is_null(array).to_numpy(zero_copy_only=False)
    return nulls


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def list_depth(kind: pa.DataType) -> tuple[int, pa.DataType]:
    """How many lists are around the innermost type of an Arrow type, and that type."""
    depth = 0
    while _is_list(kind):
        depth, kind = depth + 1, kind.value_type
    return depth, kind


def _not_wanted(column: Column, kind: pa.DataType) -> str:
    return f"holds values of type {kind}, where {column.wanted} is wanted"


def describe(value: Any) -> str:
    """A value for a message: its kind, and as much of it as fits.

    >>> describe("a"), describe([1, 2]), describe(True), describe(1.5)
    ("the text 'a'", 'a list', 'the truth value true', 'the number 1.5')
    """
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, str):
        return f"the text {value if len(value) <= 40 else value[:39] + '…'!r}"
    if isinstance(value, int | float):
        text = "of several hundred digits" if isinstance(value, int) and abs(value) > 10**300 else repr(value)
        return f"the number {text}"
    return {list: "a list", dict: "an object", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
