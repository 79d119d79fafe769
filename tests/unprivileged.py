"""Permissions as an ordinary user meets them, also where the tests run as root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def as_ordinary_user(folder: Path) -> Iterator[None]:
    """Give ``folder`` and what is in it to an ordinary user, and be that user while the block runs."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    # pytest's own folders above are private to root.
    for above in folder.parents:
        if above.stat().st_uid == 0 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o111)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
