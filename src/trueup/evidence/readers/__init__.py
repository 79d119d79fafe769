"""Read token traces from files: what the file is, is decided by its content; what is doubtful is said in notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueup.errors import InputError
from trueup.evidence.readers import jsonl, parquet
from trueup.evidence.schema import match_columns
from trueup.evidence.trace import TokenTrace

__all__ = ["TraceFile", "open_trace", "read_trace"]


@dataclass(frozen=True)
class TraceFile:
    """A file of token traces that was opened, and of which no token has been read yet.

    ``columns`` maps the canonical names to the file's own, for the columns that are used; ``unused`` are the
    others. ``notes`` are plain sentences about what is absent, derived or doubtful. ``num_rows`` is ``None`` where
    only reading the whole file would tell. ``metadata`` is the file's own (``temperature``, …), if it has any.
    """

    path: Path
    format: Literal["parquet", "jsonl"]
    columns: Mapping[str, str]
    notes: tuple[str, ...]
    num_rows: int | None
    metadata: Mapping[str, str]
    unused: tuple[str, ...] = ()

    def chunks(self, rows: int = 2048) -> Iterator[TokenTrace]:
        """Yield the sequences in order, at most ``rows`` at a time; only one chunk is in memory.

        Arrays may be read-only views of the file's buffers. Raises ``InputError`` that names the file, the row and
        the field of the first value that cannot be used.
        """
        if rows < 1:
            raise InputError(f"must be at least 1, not {rows}", field="rows")
        if self.format == "parquet":
            return parquet.read_chunks(self.path, self.columns, rows=rows)
        return jsonl.read_chunks(self.path, self.columns, unused=self.unused, rows=rows)


def open_trace(
    path: Path | str, *, rollout_column: str | None = None, train_column: str | None = None
) -> TraceFile:
    """Open a Parquet or JSON-lines file with one row a sequence, and find out which column is which.

    The names that are understood are in ``docs/formats.md``. ``rollout_column`` and ``train_column`` choose the
    sampler's and the trainer's log-probabilities by the file's own names. Raises ``InputError`` when the path is
    not a readable file of either format, has no rows, or lacks a required column.
    """
    path = Path(path)
    kind = _format(path)
    num_rows: int | None = None
    metadata: dict[str, str] = {}
    if kind == "parquet":
        shapes, num_rows, metadata = parquet.inspect(path)
    else:
        shapes = jsonl.inspect(path)
    match = match_columns(shapes, file=str(path), rollout_column=rollout_column, train_column=train_column)
    if kind == "parquet":
        parquet.check_types(path, match.columns)
    return TraceFile(path, kind, match.columns, match.notes, num_rows, metadata, match.unused)


def read_trace(
    path: Path | str, *, rollout_column: str | None = None, train_column: str | None = None
) -> TokenTrace:
    """The whole file as one trace; ``open_trace(path).chunks()`` is for files that outgrow the memory.

    Raises ``InputError`` as ``open_trace`` and ``TraceFile.chunks`` do.
    """
    file = open_trace(path, rollout_column=rollout_column, train_column=train_column)
    return TokenTrace.concatenate(list(file.chunks()))


def _format(path: Path) -> Literal["parquet", "jsonl"]:
    """What the first bytes say that the file is; its name does not matter."""
    try:
        if path.is_dir():
            raise InputError("is a directory, not a file", file=str(path))
        if path.exists() and not path.is_file():
            raise InputError("is not a regular file", file=str(path))
        with path.open("rb") as file:
            start = file.read(len(parquet.MAGIC))
            if not start:
                raise InputError("is empty", file=str(path))
            if start == parquet.MAGIC:
                return "parquet"
            file.seek(0)
            text = file.read(1 << 16).removeprefix(jsonl.BOM).lstrip()
            while not text and (more := file.read(1 << 16)):
                text = more.lstrip()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=str(path)) from None
    except ValueError:
        raise InputError("is not a path", file=repr(str(path))) from None
    if not text:
        raise InputError("has no rows: every line is blank", file=str(path))
    if text.startswith(b"{"):
        return "jsonl"
    raise InputError("is neither Parquet nor JSON lines (one JSON object a line)", file=str(path))
