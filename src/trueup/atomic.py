"""Write a file completely or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trueup.errors import InputError


@contextmanager
def atomic_path(target: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it when the block ends without an error.

    On an error or an interrupt the temporary file is removed and ``target`` stays as it was.
    A link is followed, and a file that is replaced keeps its permissions. Raises ``InputError`` when the folder
    does not exist, cannot be written, or ``target`` is a directory or a device.
    """
    named = str(target)
    try:
        target = Path(target).resolve()
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        if target.is_dir():
            raise InputError("is a directory, not a file to write", file=named)
        if mode is not None and not target.is_file():
            # Replacing /dev/null by a file would break the machine.
            raise InputError("is not a regular file", file=named)
        descriptor, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=f".partial{target.suffix}"
        )
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", file=named) from None
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        if mode is None:
            # mkstemp makes the file private; give it what an ordinary new file would have.
            umask = os.umask(0)
            os.umask(umask)
            mode = 0o666 & ~umask
        temporary.chmod(mode)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path | str, text: str) -> None:
    """Write ``text`` as UTF-8 to ``target``, completely or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
