from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from unprivileged import as_ordinary_user

from trueup.atomic import atomic_path, write_text
from trueup.errors import InputError


def test_new_file_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"half")
        assert not target.exists()
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".html"
    assert target.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("new")
            raise error

    with pytest.raises(error):
        write()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_write_text_is_utf8(tmp_path: Path) -> None:
    write_text(str(tmp_path / "a.txt"), "π_old\n")
    assert (tmp_path / "a.txt").read_bytes() == b"\xcf\x80_old\n"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
def test_permissions(tmp_path: Path) -> None:
    old_umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new.txt", "")
        assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640
        (tmp_path / "private.txt").write_text("old")
        (tmp_path / "private.txt").chmod(0o600)
        write_text(tmp_path / "private.txt", "new")
        assert stat.S_IMODE((tmp_path / "private.txt").stat().st_mode) == 0o600
    finally:
        os.umask(old_umask)


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX")
def test_pipes_and_devices_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is not a regular file"):
        write_text(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_folders_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory, not a file to write"):
        write_text(tmp_path, "text")
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        write_text(tmp_path / "nowhere" / "a.txt", "text")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        write_text(tmp_path / "file" / "a.txt", "text")


def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with (
        as_ordinary_user(tmp_path),
        pytest.raises(InputError, match="cannot be written: Permission denied"),
    ):
        write_text(folder / "a.txt", "text")
