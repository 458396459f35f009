"""Files and folders appear whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitx.core.errors import InputError, unknown_name
from vitx.core.files import Record, link_atomically, read_record, replace_folder, staged_folder, write_bytes, write_json


class Point(Record):
    x: int
    y: float = 0.0


def test_write_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.bin"
    write_bytes(path, b"old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


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


def test_a_failed_stage_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with staged_folder(target) as stage:
        (stage / "file").write_text("old")
    with pytest.raises(RuntimeError), staged_folder(target) as stage:  # noqa: PT012
        (stage / "file").write_text("new")
        raise RuntimeError
    assert (target / "file").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_replace_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the platform cannot exchange two folders, two renames do."""
    monkeypatch.setattr("vitx.core.files._exchange", lambda first, second: False)
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_links_switch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_atomically(tmp_path / "link", name)
        assert os.readlink(tmp_path / "link") == name


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_writer_leaves_a_whole_folder(tmp_path: Path) -> None:
    """A process that replaces a folder for ever is killed at an arbitrary moment: a reader finds a whole one."""
    code = (
        "import sys; from pathlib import Path; from vitx.core.files import staged_folder\n"
        "i = 0\n"
        "while True:\n"
        "    with staged_folder(Path(sys.argv[1])) as stage:\n"
        "        (stage / 'a').write_text(str(i)); (stage / 'b').write_text(str(i))\n"
        "    i += 1\n"
    )
    target = tmp_path / "folder"
    for delay in (0.05, 0.11, 0.17):
        process = subprocess.Popen([sys.executable, "-c", code, str(target)])
        while not (target / "b").is_file():
            assert process.poll() is None
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (target / "a").read_text() == (target / "b").read_text()


def test_unknown_names_suggest_the_nearest() -> None:
    message = str(unknown_name("recipe", "digits-deepvitt", ["digits-deit", "digits-deepvit"]))
    assert message == (
        "unknown recipe 'digits-deepvitt': did you mean digits-deepvit or digits-deit? "
        "known: digits-deepvit, digits-deit"
    )
