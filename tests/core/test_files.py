"""Files and folders appear whole or not at all."""

import errno
import os
import re
import shutil
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from faulty_disk import assert_old_or_new, failures_at_every_step, faulty_disk
from server_process import open_files
from vitx.core import files
from vitx.core.errors import InputError, unknown_name
from vitx.core.files import (
    Record,
    apply_umask,
    check_file,
    check_folder,
    link_atomically,
    make_folder,
    read_record,
    replace_folder,
    staged_folder,
    write_bytes,
    write_bytes_once,
    write_json,
)


class Point(Record):
    x: int
    y: float = 0.0


def test_write_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    write_bytes(path, b"old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_pipe_is_written_to_and_a_link_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_bytes)
        write_bytes(tmp_path / "pipe", b"report")
        assert read.result() == b"report"
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "to").mkdir()
    (tmp_path / "link").symlink_to("to/file")
    for content in (b"first", b"second"):
        write_bytes(tmp_path / "link", content)
        assert (tmp_path / "to" / "file").read_bytes() == content
        assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link", "pipe", "to"]


def test_of_several_writers_one_is_the_first(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    contents = [bytes([number]) * 9 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_bytes_once(path, content), contents))
    first = path.read_bytes()
    assert first in contents
    write_bytes_once(path, b"later")
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"value": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": float("nan")})
    assert '"value": 1' in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_records_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "point.json"
    write_json(path, Point(x=3))
    assert read_record(path, Point) == Point(x=3)
    for text, complaint in (
        ('{"x": "three"}', "x: Input should be a valid integer"),
        ('{"x": 1, "z": 2}', "z: Extra inputs are not permitted"),
        ("{", "the file: Invalid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=complaint):
            read_record(path, Point)
    with pytest.raises(InputError, match="does not exist"):
        read_record(tmp_path / "none.json", Point)


def test_staged_folder_replaces_at_once(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for content in ("one", "two"):
        with staged_folder(target) as stage:
            (stage / "file").write_text(content)
        assert (target / "file").read_text() == content
        assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "folder"
    link.symlink_to("folder")
    for content in ("one", "two"):  # first it leads nowhere
        with staged_folder(link) as stage:
            (stage / "file").write_text(content)
        assert link.is_symlink()
        assert (target / "file").read_text() == content
        assert sorted(tmp_path.iterdir()) == [target, link]


def test_what_is_no_folder_stays_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("work")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "fifo", "loop"):
        for target in (tmp_path / name, tmp_path / name / "made"):
            with pytest.raises(InputError, match=rf"' cannot be a folder: '.*{name}' is none$"), staged_folder(target):
                raise AssertionError("nothing is staged")
    assert (tmp_path / "file").read_text() == "work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file", "loop"]


def test_a_failed_stage_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with staged_folder(target) as stage:
        (stage / "file").write_text("old")
    with pytest.raises(RuntimeError), staged_folder(target) as stage:  # noqa: PT012
        (stage / "file").write_text("new")
        raise RuntimeError
    assert (target / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_told_of_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    """Of a graph that did not fit nothing was named, of a manifest a file in the stage, which is gone by then."""
    for name in ("file", "unnamed"):
        with pytest.raises(OSError, match="No space") as caught, staged_folder(tmp_path / "folder") as stage:  # noqa: PT012
            (stage / "file").write_text("x")
            (stage / "full").symlink_to("/dev/full")
            if name == "file":
                shutil.copyfile(stage / name, stage / "full")  # its error names both
            (stage / "full").write_text("x")
        assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "folder"), None)
        assert str(caught.value).endswith("/folder'")  # which ended in "-> None"
    with pytest.raises(OSError, match="No space left") as caught, staged_folder(tmp_path / "folder"):
        raise OSError(errno.ENOSPC, "No space left", "/elsewhere")
    assert caught.value.filename == "/elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_replace_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the platform cannot exchange two folders, two renames do."""
    monkeypatch.setattr("vitx.core.files._exchange", lambda first, second: False)
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_old_folder_that_may_not_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of another user in a folder of a group: the new one is in its place, so nothing has failed."""

    def refused(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", "a.txt")

    write_stage(tmp_path, "old")
    monkeypatch.setattr(shutil, "rmtree", refused)
    write_stage(tmp_path, "new")
    assert texts(tmp_path) == [("a.txt", "new"), ("sub/b.txt", "new")]
    (left,) = tmp_path.glob(".target.*")
    assert capsys.readouterr().err == f"what was at '{tmp_path / 'target'}' is left in '{left}': Permission denied\n"


def test_where_the_old_folder_may_not_be_moved_no_other_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user in a folder with the sticky bit."""

    def refused(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(old))

    write_stage(tmp_path, "old")
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(PermissionError):
        write_stage(tmp_path, "new")
    assert os.listdir(tmp_path) == ["target"]


def test_of_two_that_are_done_at_once_the_last_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has put its folder there since this one looked."""
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    replace_folder(tmp_path / "new", tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_links_switch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_atomically(tmp_path / "link", name)
        assert os.readlink(tmp_path / "link") == name


def test_unknown_names_suggest_the_nearest() -> None:
    message = str(unknown_name("recipe", "digits-deepvitt", ["digits-deit", "digits-deepvit"]))
    assert message == (
        "unknown recipe 'digits-deepvitt': did you mean digits-deepvit or digits-deit? "
        "known: digits-deepvit, digits-deit"
    )


def nothing(folder: Path) -> None:
    folder.mkdir()


def content(folder: Path) -> str | None:
    path = folder / "file.json"
    return path.read_text() if path.exists() else None


def test_a_new_file_is_flushed_before_it_is_named_and_its_folder_after(tmp_path: Path) -> None:
    calls = assert_old_or_new(tmp_path, nothing, lambda folder: write_bytes(folder / "file.json", b"new"), content)
    assert calls == ["fsync .file.json.*", "chmod .file.json.*", "replace file.json", "fsync (root)"]


def test_an_old_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_json(folder / "file.json", {"value": 1})

    calls = assert_old_or_new(tmp_path, prepare, lambda folder: write_json(folder / "file.json", {"value": 2}), content)
    assert calls == ["fsync .file.json.*", "chmod .file.json.*", "replace file.json", "fsync (root)"]


def test_a_failed_call_leaves_no_temporary_file(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        write_bytes(folder / "file.json", b"old")

    found = failures_at_every_step(tmp_path, prepare, lambda folder: write_bytes(folder / "file.json", b"new"), content)
    assert found == [
        ("fsync .file.json.*", "old", []),
        ("chmod .file.json.*", "old", []),
        ("replace file.json", "old", []),
        ("fsync (root)", "new", []),
    ]


def test_what_a_full_disk_did_not_take_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a write the system names no file, and the error of the command line named none."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_bytes(tmp_path / "file.json", b"new")
    assert caught.value.filename == str(tmp_path / "file.json")


def test_new_folders_stay_too(tmp_path: Path) -> None:
    calls = assert_old_or_new(
        tmp_path, nothing, lambda folder: make_folder(folder / "a" / "b"), lambda folder: (folder / "a" / "b").is_dir()
    )
    assert calls.count("fsync a") == calls.count("fsync (root)") == 1
    with faulty_disk(tmp_path) as disk:
        make_folder(tmp_path / "whole" / "a" / "b")
    assert disk.calls.count("fsync a") == 0  # nothing was made


def texts(folder: Path) -> list[tuple[str, str]] | None:
    target = folder / "target"
    if not target.exists():
        return None
    return sorted((path.relative_to(target).as_posix(), path.read_text()) for path in target.rglob("*.txt"))


def write_stage(folder: Path, text: str) -> None:
    """Two files, one of them in a folder of its own, neither flushed by who writes it."""
    with staged_folder(folder / "target") as stage:
        (stage / "sub").mkdir()
        (stage / "a.txt").write_text(text)
        (stage / "sub" / "b.txt").write_text(text)


def test_a_new_folder_is_whole(tmp_path: Path) -> None:
    calls = assert_old_or_new(tmp_path, nothing, lambda folder: write_stage(folder, "new"), texts)
    assert calls[-2:] == ["rename target", "fsync (root)"]
    assert {"fsync a.txt", "fsync b.txt", "fsync sub", "fsync .target.*"} <= set(calls[:-2])


def test_an_old_folder_is_exchanged_in_one_step(tmp_path: Path) -> None:
    calls = assert_old_or_new(
        tmp_path, lambda folder: write_stage(folder, "old"), lambda folder: write_stage(folder, "new"), texts
    )
    # The old content is removed when the exchange is on the disk, not before.
    assert calls[calls.index("exchange target") + 1] == "fsync (root)"


def test_without_an_exchange_the_old_folder_is_put_aside_until_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)

    def read(folder: Path) -> list[tuple[str, str]] | None:
        found = texts(folder)
        aside = [texts(path) for path in folder.glob(".target.old.*")]
        return found or next(filter(None, aside), None)

    calls = assert_old_or_new(
        tmp_path, lambda folder: write_stage(folder, "old"), lambda folder: write_stage(folder, "new"), read
    )
    renames = [index for index, call in enumerate(calls) if call == "rename target"]
    assert len(renames) == 2
    assert calls[renames[1] + 1] == "fsync (root)"


def test_a_folder_whose_writing_fails_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    found = failures_at_every_step(
        tmp_path, lambda folder: write_stage(folder, "old"), lambda folder: write_stage(folder, "new"), texts
    )
    switched = next(index for index, (call, *_) in enumerate(found) if call == "exchange target")
    for index, (call, state, left) in enumerate(found):
        assert state == [("a.txt", text := "new" if index > switched else "old"), ("sub/b.txt", text)], call
        assert call.startswith(("unlink", "rmdir")) or not left, call


def test_a_link_switches_in_one_step(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        for name in ("a", "b"):
            make_folder(folder / name)
        link_atomically(folder / "link", "a")

    calls = assert_old_or_new(
        tmp_path,
        prepare,
        lambda folder: link_atomically(folder / "link", "b"),
        lambda folder: os.readlink(folder / "link"),
    )
    assert calls == ["symlink .link.*", "replace link", "fsync (root)"]


def test_one_thread_at_a_time_asks_for_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told only when it is set: of two in turn the second would have set back the 0 of the first."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    second = Thread(target=apply_umask, args=(tmp_path / "b",))
    asked: list[int] = []

    def umask(mask: int) -> int:
        asked.append(mask)
        if len(asked) == 1:
            second.start()
            second.join(0.2)  # it waits
        return 0o22

    monkeypatch.setattr(os, "umask", umask)
    apply_umask(tmp_path / "a")
    second.join()
    assert asked == [0, 0o22, 0, 0o22]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_and_folders_have_the_modes_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "file.json", b"{}")
        write_stage(tmp_path, "text")
        assert os.umask(mask) == mask  # as it was
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("file.json", "target", "target/a.txt")}
    file, folder = 0o666 & ~mask, 0o777 & ~mask
    assert list(modes.values()) == [file, folder, file], modes


@pytest.mark.skipif(sys.platform == "win32", reason="has no groups of folders")
def test_in_a_folder_of_a_group_all_that_is_written_is_the_groups(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    write_stage(tmp_path, "text")
    assert [bool((tmp_path / name).stat().st_mode & stat.S_ISGID) for name in ("target", "target/sub")] == [True, True]


def test_a_file_is_its_owners_alone_until_it_is_whole(tmp_path: Path) -> None:
    with faulty_disk(tmp_path, kill_after=1):
        write_bytes(tmp_path / "file.json", b"secret")
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    files.remove_unfinished(tmp_path / "file.json")
    assert list(tmp_path.iterdir()) == []


def test_all_that_lasts_is_written_by_one_layer() -> None:
    """No other file flushes or renames with `os`, so what holds here holds of every file that is written to last."""
    package = Path(files.__file__).parent.parent
    calls = re.compile(r"\bos\.(fsync|fdatasync|replace|rename|renames|link|symlink)\b")
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if calls.search(path.read_text())}
    assert found == {"core/files.py"}


def test_the_bytes_of_a_json_file(tmp_path: Path) -> None:
    """Digests are of these bytes, so another blank would make every sealed file a changed one."""
    write_json(tmp_path / "file.json", {"name": "Größe", "values": [1, 2.5]})
    expected = '{\n  "name": "Größe",\n  "values": [\n    1,\n    2.5\n  ]\n}\n'
    assert (tmp_path / "file.json").read_bytes() == expected.encode("utf-8")


def test_digests_are_sha256(tmp_path: Path) -> None:
    """FIPS 180-2's example."""
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256_bytes(b"abc") == files.sha256_file(tmp_path / "abc") == digest


def test_a_record_cannot_be_changed_and_the_first_wrong_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(Point(x=1), "x", 2)  # noqa: B010
    (tmp_path / "point.json").write_text('{"x": "a", "y": "b"}')
    with pytest.raises(InputError, match="is not a valid Point: x: "):
        read_record(tmp_path / "point.json", Point)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a file system of Linux")
def test_where_no_folder_can_be_made_nothing_is_called_missing() -> None:
    """VITX_CACHE=/proc/nope was a traceback: a missing file is a mistake in the code, and no folder is ever missing."""
    with pytest.raises(PermissionError, match="nothing can be made there: '/proc/nope/a'"):
        make_folder(Path("/proc/nope/a"))
    for make in (lambda path: staged_folder(path).__enter__(), lambda path: write_bytes(path, b"")):
        with pytest.raises(PermissionError, match="nothing can be made there: '/proc/nope'"):
            make(Path("/proc/nope"))
        with pytest.raises(OSError, match=r"'/sys/nope'$"):  # not of the file that was tried beside it
            make(Path("/sys/nope"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux lists them")
def test_no_file_stays_open(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"")
    write_stage(tmp_path, "text")
    assert open_files(str(tmp_path)) == 0


def test_leftovers_are_those_of_this_name_alone(tmp_path: Path) -> None:
    for name in (".a[b].1", ".ab.1", "a[b]", ".a[b]c"):
        (tmp_path / name).touch()
    files.remove_unfinished(tmp_path / "a[b]")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a[b]c", ".ab.1", "a[b]"]


def test_a_link_that_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f".link.{os.getpid()}").symlink_to("old")
    link_atomically(tmp_path / "link", "new")
    assert [(path.name, os.readlink(path)) for path in tmp_path.iterdir()] == [("link", "new")]


def test_a_folder_in_the_place_of_a_file_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "new" / "file", Path("/dev/null")):
        check_file(path, "report.html")
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError) as caught:
        check_file(tmp_path, "report.html")
    assert str(caught.value) == f"'{tmp_path}' is a folder: expected a file name, such as {tmp_path}/report.html"
    with pytest.raises(InputError, match=r"file' cannot be a folder"):
        check_file(tmp_path / "file" / "report.html", "report.html")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a file system of Linux")
def test_a_folder_that_takes_no_file_is_said_at_once() -> None:
    """A report of a run that another user owns was made, for seconds, before it could not be written."""
    for path in (Path("/proc/report.html"), Path("/proc/nope/report.html")):
        with pytest.raises(PermissionError, match="nothing can be made there: '/proc/") as caught:
            check_file(path, "report.html")
        assert caught.value.filename == str(path)


def test_a_url_is_no_folder_called_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "^'s3://bucket/a:/b' is a URL: expected a path of this machine; copy it to the store afterwards$"
    with pytest.raises(InputError, match=message), staged_folder(Path("s3://bucket/a:/b")):
        pass
    assert not any(tmp_path.iterdir())
    check_folder(Path("d:/run"))  # a drive
