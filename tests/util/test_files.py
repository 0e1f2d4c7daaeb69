"""Output files: links, pipes and devices keep their kind, and what cannot be written is found before any work."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from foveakv.errors import OutputError
from foveakv.util.files import check_output_files, replacing, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "out.json"
    check_output_files(path, None)
    assert names(tmp_path) == []  # the check leaves nothing behind
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert names(path.parent) == ["out.json"]


def test_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    write_text(tmp_path / "out", "\ud83d")
    assert (tmp_path / "out").read_text() == "\\ud83d"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    target, link, second = tmp_path / "data" / "target", tmp_path / "link", tmp_path / "second"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(Path("data") / "target")
    second.symlink_to(link)
    check_output_files(second)
    write_text(second, "new")
    assert link.is_symlink()
    assert second.is_symlink()
    assert target.read_text() == "new"
    assert names(target.parent) == ["target"]


def test_permissions_of_an_existing_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "out", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600


def test_a_pipe_gets_the_content(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    check_output_files(pipe)
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert found == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_devices_stay_devices() -> None:
    check_output_files("/dev/null")
    write_text("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OutputError, match=r"cannot write /dev/full: No space left on device"):
        write_text("/dev/full", "too much")


def test_stdout_by_name_keeps_what_was_written_before(tmp_path: Path) -> None:
    code = (
        "from foveakv.util.files import check_output_files, write_text\n"
        "check_output_files('/dev/stdout'); print('one'); write_text('/dev/stdout', 'two\\n'); print('three')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    out = tmp_path / "out"
    with out.open("wb") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True, env=environment)
    assert out.read_text().split() == ["one", "two", "three"]
    piped = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, env=environment)
    assert piped.stdout.split() == [b"one", b"two", b"three"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda folder: folder, "is a folder; give the name of a file"),
    (lambda folder: folder / ("x" * 300), "File name too long"),
    (lambda folder: folder / "file" / "out", "Not a directory"),
    (lambda folder: folder / "nul\0l", "is not a file name"),
    (lambda folder: folder / "loop", "Too many levels of symbolic links"),
    (lambda folder: "", "is a folder"),
])  # fmt: skip
def test_what_cannot_be_written_is_found_by_the_check_and_by_the_write(tmp_path: Path, make, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = make(tmp_path)
    with pytest.raises(OutputError, match=message):
        check_output_files(path)
    with pytest.raises(OutputError, match=message):
        write_text(path, "x")
    assert names(tmp_path) == ["file", "loop"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "file").chmod(0o400)
    with pytest.raises(OutputError, match="write-protected"):
        check_output_files(tmp_path / "file")
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        check_output_files(tmp_path / "new" / "out")
    tmp_path.chmod(0o700)


def test_a_full_disk_is_found_by_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="out: No space left on device"):
        check_output_files(tmp_path / "out")
    assert names(tmp_path) == []


def test_two_outputs_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for other in ("out", "link", "sub/../out"):
        with pytest.raises(OutputError, match="two outputs go to"):
            check_output_files(tmp_path / "out", tmp_path / other)


def test_an_error_leaves_the_older_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    path.write_text("precious")

    def stop(error: BaseException) -> None:
        with replacing(path) as temporary:
            assert temporary.suffix == ".png"
            temporary.write_text("half")
            raise error

    with pytest.raises(OutputError, match=r"out\.png: No space left"):
        stop(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        stop(KeyboardInterrupt())
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["out.png"]
