"""Files that a user names: read only so far, written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from metakernelbench.errors import UserError
from metakernelbench.files import read_text, refusal, replaced_folder, why_unread, write_whole, writing
from tests.disk import files_of_at_most


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, b"old")
    path.chmod(0o600)
    with files_of_at_most(1000), pytest.raises(OSError) as refused:
        write_whole(path, bytes(5000))
    assert refused.value.filename == str(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    write_whole(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])
    assert path.stat().st_mode & 0o777 == 0o600


def test_of_a_link_what_it_points_to_is_replaced_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    write_whole(Path(os.devnull), b"new")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("size", [0, 10])
def test_a_text_is_read_up_to_its_bound(tmp_path: Path, size: int) -> None:
    (tmp_path / "text").write_text("é" * size)
    assert read_text(tmp_path / "text", most=10) == "é" * size


def test_what_never_ends_or_never_begins_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("x" * 11)
    for path, said in (("pipe", "no regular file"), ("/dev/zero", "no regular file"), ("long", "more than 10")):
        with pytest.raises(OSError, match=said):
            read_text(tmp_path / path, most=10)


def test_why_a_file_could_not_be_read_names_only_another_file(tmp_path: Path) -> None:
    for wanted, said in ((tmp_path / "a", "No such file or directory"), (tmp_path / "b", f"{tmp_path}/a: No such")):
        with pytest.raises(FileNotFoundError) as refused:
            read_text(tmp_path / "a")
        assert why_unread(refused.value, wanted).startswith(said)
    assert why_unread(ValueError("no number"), tmp_path) == "no number"


def test_a_refusal_names_the_target_where_the_system_does_not() -> None:
    said = pytest.raises(UserError, match="cannot write a/b: No space left on device")
    with said as refused, writing(Path("a/b"), hint="choose another folder"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert refused.value.hint == "make room there, or choose another folder"
    copied = shutil.Error([("a", "b/c", "[Errno 28] No space left on device: 'a' -> 'b/c'")])
    assert refusal(copied, Path("b")).message == "cannot write b: No space left on device"


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "deep").mkdir(parents=True)
    (old / "deep" / "file").write_text("old")
    for folder in (old, new):
        too_large = pytest.raises(OSError, match="File too large")
        with too_large as refused, files_of_at_most(10), replaced_folder(folder) as unfinished:
            unfinished.mkdir()
            (unfinished / "file").write_text("x" * 100)
        assert refused.value.filename == str(folder)
    assert ((old / "deep" / "file").read_text(), list(tmp_path.iterdir())) == ("old", [old])
    with replaced_folder(old) as unfinished:
        unfinished.mkdir()
        (unfinished / "file").write_text("new")
    assert ([*old.iterdir()], (old / "file").read_text()) == ([old / "file"], "new")
