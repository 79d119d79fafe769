"""Group numbers: sequences of one prompt get the same int64, in every process and on every machine.

Texts and prompts are hashed (BLAKE2b, 8 bytes) and not counted, so that chunks, files and runs can be joined. Each
distinct key of a chunk is hashed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trueup.evidence.trace import Ragged


def groups_of_names(names: Sequence[int | str]) -> npt.NDArray[np.int64]:
    """int64[S]: integers as they stand, texts (and integers beyond 64 bits, as texts) hashed."""
    numbers = {
        name: name if isinstance(name, int) and -(2**63) <= name < 2**63 else _hash(_encode(str(name)))
        for name in set(names)
    }
    return np.array([numbers[name] for name in names], dtype=np.int64)


def groups_of_prompt_ids(prompt_ids: Ragged) -> npt.NDArray[np.int64]:
    """int64[S]: equal for equal token ids."""
    ids = prompt_ids.values.astype("<i4", copy=False)
    return _hash_each([ids[start:stop].tobytes() for start, stop in pairwise(prompt_ids.offsets)])


def groups_of_prompts(prompts: Sequence[str | None], *, first_row: int) -> npt.NDArray[np.int64]:
    """int64[S]: equal for equal texts; nothing says that two unknown prompts are one, so ``None`` stands alone."""
    return _hash_each(
        [
            b"\x00row %d" % row if prompt is None else _encode(prompt)
            for row, prompt in enumerate(prompts, start=first_row)
        ]
    )


def _hash_each(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    hashed = {key: _hash(key) for key in set(keys)}
    return np.array([hashed[key] for key in keys], dtype=np.int64)


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)


def _encode(text: str) -> bytes:
    # A text that was cut inside an emoji holds half a surrogate pair, which plain UTF-8 refuses.
    return text.encode("utf-8", "surrogatepass")
