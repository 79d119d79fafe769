"""``TokenTrace``: sampled tokens with the log-probability that each side gave them.

This module states the house's one convention, and nobody else shifts:

* **Own-token.** ``logprobs[t]`` is the log-probability of ``token_ids[t]`` given everything before it, in nats.
  Next-token arrays (``logprobs[t]`` scores ``token_ids[t + 1]``) are shifted once, in ``from_padded``.
* **Masks are boolean, True = counts** (enters the loss). Tool output, prompts and padding are False.
* **Ragged.** Sequence ``i`` owns ``[offsets[i], offsets[i + 1])`` of every per-token array.
* **Missing is not zero.** A log-probability that was not recorded is ``MISSING``, a NaN that stays
  distinguishable from one that was computed; 0.0 is a legal log-probability (a certain token).

Names: a plural is a list a sequence (one value a token), a singular is one value a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trueup.errors import InputError

#: A recorded null. A quiet NaN with payload 1, so that "not recorded" needs no second array to be told from NaN.
MISSING: np.float32 = np.array([0x7FC00001], dtype=np.uint32).view(np.float32)[0]


def is_missing(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Where float32 ``values`` hold ``MISSING`` itself; a NaN that was computed is not missing.

    >>> is_missing(np.array([0.0, np.nan, MISSING], dtype=np.float32)).tolist()
    [False, False, True]
    """
    missing: npt.NDArray[np.bool_] = values.view(np.uint32) == MISSING.view(np.uint32)
    return missing


#: Per-token columns that are flat arrays of one number a token, with their dtype.
TOKEN_COLUMNS: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "rollout_logprobs": np.dtype(np.float32),
    "train_logprobs": np.dtype(np.float32),
    "mask": np.dtype(np.bool_),
    "current_logprobs": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
    "prox_logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "positions": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "entropies": np.dtype(np.float32),
    "rollout_entropies": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "train_ranks": np.dtype(np.int32),
}

#: Per-sequence columns of one number a sequence, with their dtype.
SEQUENCE_COLUMNS: Mapping[str, np.dtype[Any]] = {
    "group": np.dtype(np.int64),
    "reward": np.dtype(np.float32),
    "advantage": np.dtype(np.float32),
    "train_version": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class Ragged:
    """A list of lists: item ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, items: npt.NDArray[np.int64]) -> Ragged:
        """The chosen items, in the order asked for."""
        index, offsets = _ranges(self.offsets, items)
        return Ragged(self.values[index], offsets)


@dataclass(frozen=True)
class TokenTrace:
    """Sequences of sampled tokens, ragged: ``S`` sequences, ``N`` tokens.

    Required: ``offsets`` int64[S + 1]; ``token_ids`` int32[N]; ``rollout_logprobs`` and ``train_logprobs``
    float32[N] (the sampler's log μ and the trainer's log π_old); ``mask`` bool[N]; ``sequence_id`` [S].

    Optional, a value a token [N]: ``current_logprobs`` (log π_θ), ``ref_logprobs``, ``prox_logprobs``,
    ``advantages``, ``positions`` (index within the response), ``segments`` (turn index; −1 prompt, odd = tool),
    ``entropies`` (the trainer's, nats), ``rollout_entropies``, ``versions`` (of the weights that sampled this very
    token; −1 prompt), ``train_ranks`` (0 = the trainer's first choice), ``routed_experts`` int16[N, layers, k],
    ``kept_ids`` (the ids that top-p/top-k kept at each token), ``token_texts`` (str[N]).

    Optional, a value a sequence [S]: ``group`` (int64; sequences of one prompt share it), ``reward``,
    ``advantage``, ``train_version`` (of the weights that scored it), ``prompt``, ``response`` (str),
    ``prompt_ids``.

    ``source`` and ``first_row`` say where the first sequence stood, for error messages.

    >>> trace = TokenTrace.from_lists([[5, 6, 7], [8]], [[-1.0, -0.5, -2.0], [0.0]], [[-1.1, -0.5, -2.0], [0.0]])
    >>> len(trace), trace.num_tokens
    (2, 4)
    """

    offsets: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    rollout_logprobs: npt.NDArray[np.float32]
    train_logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    sequence_id: npt.NDArray[Any]
    current_logprobs: npt.NDArray[np.float32] | None = None
    ref_logprobs: npt.NDArray[np.float32] | None = None
    prox_logprobs: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    positions: npt.NDArray[np.int32] | None = None
    segments: npt.NDArray[np.int32] | None = None
    entropies: npt.NDArray[np.float32] | None = None
    rollout_entropies: npt.NDArray[np.float32] | None = None
    versions: npt.NDArray[np.int32] | None = None
    train_ranks: npt.NDArray[np.int32] | None = None
    routed_experts: npt.NDArray[np.int16] | None = None
    kept_ids: Ragged | None = None
    token_texts: npt.NDArray[np.object_] | None = None
    group: npt.NDArray[np.int64] | None = None
    reward: npt.NDArray[np.float32] | None = None
    advantage: npt.NDArray[np.float32] | None = None
    train_version: npt.NDArray[np.int32] | None = None
    prompt: npt.NDArray[np.object_] | None = None
    response: npt.NDArray[np.object_] | None = None
    prompt_ids: Ragged | None = None
    source: str = ""
    first_row: int = 0

    def __post_init__(self) -> None:
        if self.offsets.dtype != np.int64 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise InputError("must be int64[S + 1]", field="offsets")
        sequences, tokens = len(self.offsets) - 1, int(self.offsets[-1])
        if self.offsets[0] != 0 or np.any(np.diff(self.offsets) < 0):
            raise InputError("must start at 0 and never decrease", field="offsets")
        for name, column in self._columns():
            expected = tokens if name in _PER_TOKEN else sequences
            if len(column) != expected:
                unit = "tokens" if name in _PER_TOKEN else "sequences"
                raise InputError(f"has {len(column)} values for {expected} {unit}", field=name)
            dtype = TOKEN_COLUMNS.get(name) or SEQUENCE_COLUMNS.get(name)
            if dtype is not None and column.dtype != dtype:
                raise InputError(f"has dtype {column.dtype}, not {dtype}", field=name)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, masked ones included."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence, int64[S]."""
        return np.diff(self.offsets)

    def _columns(self) -> list[tuple[str, Any]]:
        """Every column that is present, except ``offsets``, by name."""
        every = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _NOT_COLUMNS)
        return [(name, column) for name, column in every if column is not None]

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns that are present."""
        return tuple(name for name, _ in self._columns())

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TokenTrace:
        """The chosen sequences, in the order asked for, as a new trace (a copy).

        Raises ``InputError`` for truth values, which would silently be taken for rows 0 and 1.
        """
        if np.asarray(rows).dtype == np.bool_:
            raise InputError("takes row numbers, not truth values: use np.flatnonzero", field="rows")
        chosen = np.asarray(rows, dtype=np.int64)
        index, offsets = _ranges(self.offsets, chosen)
        taken: dict[str, Any] = {}
        for name, column in self._columns():
            items = index if name in _PER_TOKEN else chosen
            taken[name] = column.take(items) if isinstance(column, Ragged) else column[items]
        return replace(self, offsets=offsets, **taken)

    def block(self, start: int, stop: int) -> TokenTrace:
        """Sequences ``start`` to ``stop`` as views: no token is copied."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        parts: dict[str, Any] = {}
        for name, column in self._columns():
            low, high = (first, last) if name in _PER_TOKEN else (start, stop)
            if isinstance(column, Ragged):
                begin, end = int(column.offsets[low]), int(column.offsets[high])
                parts[name] = Ragged(column.values[begin:end], column.offsets[low : high + 1] - begin)
            else:
                parts[name] = column[low:high]
        return replace(
            self,
            offsets=self.offsets[start : stop + 1] - first,
            first_row=self.first_row + start,
            **parts,
        )

    @classmethod
    def concatenate(cls, traces: Sequence[TokenTrace]) -> TokenTrace:
        """All sequences of ``traces`` in order, with the columns that every one of them has."""
        if not traces:
            raise InputError("no traces to concatenate")
        shared = [name for name in traces[0].column_names if all(getattr(t, name) is not None for t in traces)]
        joined: dict[str, Any] = {}
        for name in shared:
            parts = [getattr(trace, name) for trace in traces]
            if isinstance(parts[0], Ragged):
                joined[name] = Ragged(
                    np.concatenate([part.values for part in parts]),
                    _offsets(np.concatenate([np.diff(part.offsets) for part in parts])),
                )
            elif name == "sequence_id" and len({part.dtype.kind in "iu" for part in parts}) > 1:
                # Numbers in one part and texts in another: one kind of id throughout.
                texts = [np.array([str(value) for value in part.tolist()], dtype=object) for part in parts]
                joined[name] = np.concatenate(texts)
            elif len({part.shape[1:] for part in parts if len(part)}) > 1:
                shapes = ", ".join(sorted({str(part.shape[1:]) for part in parts if len(part)}))
                raise InputError(f"has different shapes a token: {shapes}", file=traces[0].source, field=name)
            else:
                # A part without a token may not know how many layers and experts the others have.
                joined[name] = np.concatenate([part for part in parts if len(part)] or parts[:1])
        return cls(
            offsets=_offsets(np.concatenate([trace.lengths for trace in traces])),
            source=traces[0].source,
            first_row=traces[0].first_row,
            **joined,
        )

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        rollout_logprobs: Sequence[Sequence[float]],
        train_logprobs: Sequence[Sequence[float]],
        *,
        mask: Sequence[Sequence[bool]] | None = None,
        sequence_id: Sequence[Any] | None = None,
        **columns: Any,
    ) -> TokenTrace:
        """Build a trace from one list a sequence. Further per-token and per-sequence columns by name.

        Without ``mask`` every token counts; without ``sequence_id`` sequences are numbered. ``None`` among floats
        is ``MISSING``. ``prompt_ids`` may be lists; ``kept_ids``, ``routed_experts`` and ``token_texts`` are given
        as ``TokenTrace`` holds them. Raises ``InputError`` with the row and the field when a list's length differs
        from that of its tokens.
        """
        lengths = np.array([len(tokens) for tokens in token_ids], dtype=np.int64)
        ragged = {"token_ids": token_ids, "rollout_logprobs": rollout_logprobs, "train_logprobs": train_logprobs}
        ragged |= {name: columns.pop(name) for name in list(columns) if name in TOKEN_COLUMNS}
        if mask is not None:
            ragged["mask"] = mask
        flat: dict[str, Any] = {}
        for name, rows in ragged.items():
            if len(rows) != len(lengths):
                raise InputError(f"has {len(rows)} lists for {len(lengths)} sequences", field=name)
            for row, (values, length) in enumerate(zip(rows, lengths, strict=True)):
                if len(values) != length:
                    raise InputError(f"has {len(values)} values for {length} tokens", row=row, field=name)
            flat[name] = _flat([value for values in rows for value in values], TOKEN_COLUMNS[name])
        flat.setdefault("mask", np.ones(int(lengths.sum()), dtype=np.bool_))
        for name, column in columns.items():
            if name == "prompt_ids" and not isinstance(column, Ragged):
                ids_of_all = np.array([token for prompt in column for token in prompt], dtype=np.int32)
                flat[name] = Ragged(ids_of_all, _offsets(np.array([len(prompt) for prompt in column])))
            elif name in SEQUENCE_COLUMNS:
                flat[name] = _flat(column, SEQUENCE_COLUMNS[name])
            else:
                flat[name] = np.asarray(column, dtype=object) if name in _TEXTS else column
        ids = np.arange(len(lengths)) if sequence_id is None else np.asarray(sequence_id)
        return cls(offsets=_offsets(lengths), sequence_id=ids, **flat)

    @classmethod
    def from_padded(
        cls,
        token_ids: Any,
        rollout_logprobs: Any,
        train_logprobs: Any,
        response_mask: Any,
        *,
        attention_mask: Any = None,
        convention: Literal["own-token", "next-token"] = "own-token",
        sequence_id: Any = None,
        **columns: Any,
    ) -> TokenTrace:
        """Build a trace from padded ``(B, T)`` arrays or tensors, whichever side the padding is on.

        ``response_mask`` (True = counts) becomes ``mask``. ``attention_mask`` says which places hold a token at
        all; without it, everything between the first and the last counted place of a row does, so that tool output
        in the middle is kept (and masked). With ``convention="next-token"`` the log-probability arrays are
        ``(B, T − 1)`` and ``logprobs[:, t]`` scores ``token_ids[:, t + 1]``; the first token then has none.
        Other columns by name: per-token ones ``(B, T)``, ``routed_experts`` ``(B, T, layers, k)``, per-sequence
        ones ``(B,)``. Raises ``InputError`` with the field whose shape is not that of the tokens.

        >>> trace = TokenTrace.from_padded(
        ...     [[9, 9, 4, 5]], [[0, 0, -1.0, -2.0]], [[0, 0, -1.0, -2.5]], [[0, 0, 1, 1]]
        ... )
        >>> trace.token_ids.tolist(), trace.train_logprobs.tolist()
        ([4, 5], [-1.0, -2.5])
        """
        tokens = _array(token_ids)
        mask = _array(response_mask).astype(np.bool_)
        if tokens.ndim != 2 or mask.shape != tokens.shape:
            raise InputError(f"has shape {mask.shape}, the tokens {tokens.shape}", field="response_mask")
        present = _between_first_and_last(mask)
        if attention_mask is not None:
            present = _array(attention_mask).astype(np.bool_)
            if present.shape != tokens.shape:
                raise InputError(f"has shape {present.shape}, the tokens {tokens.shape}", field="attention_mask")
            if np.any(mask & ~present):
                row = int(np.argmax(np.any(mask & ~present, axis=1)))
                raise InputError("is False where response_mask is True", row=row, field="attention_mask")
        padded: dict[str, Any] = {
            "token_ids": tokens,
            "rollout_logprobs": _array(rollout_logprobs),
            "train_logprobs": _array(train_logprobs),
            "mask": mask,
        }
        padded |= {name: _array(columns.pop(name)) for name in list(columns) if name in TOKEN_COLUMNS}
        flat: dict[str, Any] = {}
        for name, values in padded.items():
            if convention == "next-token" and name.endswith(_SCORED):
                if values.shape != (len(tokens), tokens.shape[1] - 1):
                    problem = f"has shape {values.shape}, the tokens {tokens.shape}: one fewer a row is wanted"
                    raise InputError(problem, field=name)
                first = np.full((len(tokens), 1), MISSING, dtype=np.float32)
                values = np.concatenate([first, values.astype(np.float32)], axis=1)
            if values.shape != tokens.shape:
                raise InputError(f"has shape {values.shape}, the tokens {tokens.shape}", field=name)
            flat[name] = values[present].astype(TOKEN_COLUMNS[name], copy=False)
        for name, column in columns.items():
            if name == "routed_experts":
                flat[name] = _array(column)[present].astype(np.int16, copy=False)
            elif name in SEQUENCE_COLUMNS:
                flat[name] = _array(column).astype(SEQUENCE_COLUMNS[name], copy=False)
            else:
                flat[name] = np.asarray(column, dtype=object) if name in _TEXTS else column
        ids = np.arange(len(tokens)) if sequence_id is None else _array(sequence_id)
        return cls(offsets=_offsets(present.sum(axis=1)), sequence_id=ids, **flat)


_PER_TOKEN = frozenset(TOKEN_COLUMNS) | {"routed_experts", "kept_ids", "token_texts"}
_TEXTS = frozenset({"prompt", "response", "token_texts"})
_NOT_COLUMNS = frozenset({"offsets", "source", "first_row"})
#: Columns that score a token, and so move with the convention: log-probabilities and the entropies beside them.
_SCORED = ("logprobs", "entropies")


def _flat(values: Sequence[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array of ``values``; ``None`` among floats is ``MISSING`` (NumPy would make it an ordinary NaN)."""
    array = np.array(values, dtype=dtype)
    if dtype == np.float32 and np.isnan(array).any():
        array[[value is None for value in values]] = MISSING
    return array


def _array(values: Any) -> npt.NDArray[Any]:
    """A NumPy array of ``values``; tensors come from their device, low precisions are widened to float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def _offsets(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ranges(
    offsets: npt.NDArray[np.int64], items: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Flat indices of the chosen items, and the offsets of the result."""
    lengths = np.diff(offsets)[items]
    taken = _offsets(lengths)
    shift = np.repeat(offsets[:-1][items] - taken[:-1], lengths)
    return np.arange(taken[-1], dtype=np.int64) + shift, taken


def _between_first_and_last(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    started = np.logical_or.accumulate(mask, axis=1)
    unfinished = np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    return started & unfinished
