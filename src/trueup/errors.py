"""The few exceptions that trueup raises on purpose: each is one sentence that a user can act on."""

from __future__ import annotations


class TrueupError(Exception):
    """Base of every error that the command line turns into one sentence and exit code 2."""


class InputError(TrueupError):
    """Evidence that cannot be used: says what is wrong, and where (file, row, field).

    Rows count from 0, as in a dataframe.

    >>> str(InputError("has 12 values for 13 tokens", file="a.parquet", row=17, field="train_logprobs"))
    "a.parquet: row 17, field 'train_logprobs': has 12 values for 13 tokens"

    A text file's row also has a ``line``, which counts from 1, as in an editor.

    >>> str(InputError("is not JSON", file="a.jsonl", row=17, line=18))
    'a.jsonl: row 17 (line 18): is not JSON'
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        row: int | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> None:
        self.problem, self.file, self.row, self.line, self.field = problem, file, row, line, field
        where = f"row {row}" if row is not None else ""
        if line is not None:
            where = f"{where} (line {line})" if where else f"line {line}"
        place = ", ".join(
            part
            for part in (
                where,
                f"field '{field}'" if field is not None else "",
            )
            if part
        )
        super().__init__(": ".join(part for part in (file, place, problem) if part))


class MissingExtraError(TrueupError):
    """An optional dependency is not installed; names the extra that brings it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'trueup[{extra}]'")
