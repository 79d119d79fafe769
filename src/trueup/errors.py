"""The few exceptions that trueup raises on purpose: each is one sentence that a user can act on."""

from __future__ import annotations


class TrueupError(Exception):
    """Base of every error that the command line turns into one sentence and exit code 2."""


class InputError(TrueupError):
    """Evidence that cannot be used: says what is wrong, and where (file, row, field).

    Rows count from 0, as in a dataframe.

    >>> str(InputError("has 12 values for 13 tokens", file="a.parquet", row=17, field="train_logprobs"))
    "a.parquet: row 17, field 'train_logprobs': has 12 values for 13 tokens"
    """

    def __init__(
        self, problem: str, *, file: str | None = None, row: int | None = None, field: str | None = None
    ) -> None:
        self.problem, self.file, self.row, self.field = problem, file, row, field
        place = ", ".join(
            part
            for part in (
                f"row {row}" if row is not None else "",
                f"field '{field}'" if field is not None else "",
            )
            if part
        )
        super().__init__(": ".join(part for part in (file, place, problem) if part))


class MissingExtraError(TrueupError):
    """An optional dependency is not installed; names the extra that brings it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'trueup[{extra}]'")
