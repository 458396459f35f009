"""How the command line ends: one line for an error of the user's, and nothing half written after a signal."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vitx.cli
from cli_fixture import Vitx
from server_process import HANG
from vitx.cli import _command
from vitx.cli.doctor import EXTRAS
from vitx.serve.options import ServeOptions

HALF_WRITTEN = """
import signal, sys, time, vitx.cli
from pathlib import Path
from vitx.core.files import staged_folder

signal.signal(signal.SIGHUP, signal.SIG_DFL if sys.argv[1:] == [] else signal.SIG_IGN)

def app():
    with staged_folder(Path("made")) as stage:
        (stage / "file").write_text("half")
        print("begun", flush=True)
        sys.stdin.readline()
        print("goes on", flush=True)
        while True:  # one long sleep would not end for a signal that comes just before it
            time.sleep(0.05)

vitx.cli.app = app
vitx.cli.main()
"""


def half_written(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HALF_WRITTEN, *arguments]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_what_is_half_written(tmp_path: Path, number: signal.Signals) -> None:
    with half_written(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len([*tmp_path.iterdir()]) == 1
        process.send_signal(number)
        assert process.wait(HANG) == 128 + number
    assert [*tmp_path.iterdir()] == []


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    with half_written(tmp_path, "ignored") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGHUP)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"goes on\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == 128 + signal.SIGTERM


def test_a_second_sighup_does_not_disturb_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def app() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            ended.append("in order")

    monkeypatch.setattr(vitx.cli, "app", app)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as error:
            vitx.cli.main()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (error.value.code, ended) == (128 + signal.SIGHUP, ["in order"])


def test_a_reload_that_is_asked_for_while_a_server_starts_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, vitx: Vitx
) -> None:
    def launch(options: ServeOptions) -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    def imported(verb: str) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return command(verb)

    command = _command
    monkeypatch.setattr("vitx.cli._command", imported)
    monkeypatch.setattr("vitx.serve.process.launch.launch", launch)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert vitx("serve", "a.vitx") == (0, "", "")
        assert vitx("serve", "a.vitx", "--ray") == (129, "", "")  # which loads nothing again
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert vitx("serve", "a.vitx", "--ray") == (0, "", "")  # under nohup
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_of_a_verb_says_so(monkeypatch: pytest.MonkeyPatch, vitx: Vitx) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def stopped(signalled: BaseException) -> Callable[[], None]:
        def load() -> None:
            raise ImportError("initialization failed") from signalled  # as pybind11 does

        return load

    monkeypatch.setattr("vitx.cli.recipes.command", interrupt)
    assert vitx("recipes") == (130, "", "interrupted\n")
    monkeypatch.setattr("vitx.cli.recipes.command", stopped(KeyboardInterrupt()))
    assert vitx("recipes") == (130, "", "interrupted\n")
    monkeypatch.setattr("vitx.cli.recipes.command", stopped(SystemExit(143)))  # by SIGTERM
    assert vitx("recipes") == (143, "", "")
    monkeypatch.setattr("vitx.cli._command", lambda verb: interrupt())  # while its module is imported
    assert vitx("recipes") == (130, "", "interrupted\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_may_be_closed(tmp_path: Path, closed: str) -> None:
    """And no file that is opened then is taken for it."""
    program = """if True:
        import os, vitx.cli
        from vitx.core.console import print_fields, progress

        def app():
            with progress("title", 1):
                print_fields("title", {"name": "value"})
            assert os.open("file", os.O_CREAT) > 2

        vitx.cli.app = app
        vitx.cli.main()
    """
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    assert subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False).returncode == 0
    assert (tmp_path / "file").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_standard_error_that_takes_nothing_changes_no_exit_code(tmp_path: Path) -> None:
    program = """if True:
        import sys, vitx.cli

        def app():
            print("a warning", file=sys.stderr, flush=True)

        vitx.cli.app = app
        vitx.cli.main()
    """
    words = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh", sys.executable, "-c", program]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("full", "code", "said"),
    [
        (True, 3, "error: cannot write to standard output: No space left on device\n"),
        (False, 1, ""),  # a reader that has gone, such as head, needs no message
    ],
)
def test_standard_output_that_takes_nothing_is_named(full: bool, code: int, said: str, unbuffered: str) -> None:
    """Also where that is found out at the end, as of so little text."""
    program = """if True:
        import sys, vitx.cli

        def app():
            print("a table")
            sys.exit(0)

        vitx.cli.app = app
        vitx.cli.main()
    """
    if full and not Path("/dev/full").exists():
        pytest.skip("has no device that is always full")
    if full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-c", program]
    ran = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(output)
    assert (ran.returncode, ran.stderr) == (code, said)


@pytest.mark.parametrize("names", [("there/file",), ("read/file", None, "there/file")], ids=["one", "copied"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.ENOENT, 2, "error: cannot use 'there/file': No such file or directory\n"),
        (errno.EACCES, 2, "error: cannot use 'there/file': Permission denied\n"),
        (errno.EPERM, 2, "error: cannot use 'there/file': Operation not permitted\n"),
        (errno.EBUSY, 2, "error: cannot use 'there/file': Device or resource busy\n"),
        (errno.ENOTEMPTY, 2, "error: cannot use 'there/file': Directory not empty\n"),
        (errno.EISDIR, 2, "error: cannot use 'there/file': Is a directory\n"),
        (errno.ENOSPC, 3, "error: cannot write 'there/file': No space left on device; what was there before is "),
        (errno.EROFS, 3, "error: cannot write 'there/file': Read-only file system; what was there before is "),
    ],
)
def test_an_error_of_the_system_about_a_file_is_one_line(
    number: int,
    code: int,
    said: str,
    names: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def app() -> None:
        raise OSError(number, os.strerror(number), *names)

    monkeypatch.setattr(vitx.cli, "app", app)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        vitx.cli.main()
    assert signal.getsignal(signal.SIGTERM) is before
    assert ended.value.code == code
    found = capsys.readouterr().err
    assert found.startswith(said)
    assert found.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            FileNotFoundError("No such file or directory: runs/a/model.safetensors"),
            2,
            "No such file or directory: runs",
        ),
        (OSError("Could not open the stream\nfor two reasons"), 3, "Could not open the stream\n"),
    ],
)
def test_an_error_of_a_file_that_is_a_library_s_own_is_one_line(
    raised: OSError, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no errno: safetensors and pyarrow raise such."""

    def app() -> None:
        raise raised

    monkeypatch.setattr(vitx.cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        vitx.cli.main()
    found = capsys.readouterr().err
    assert (ended.value.code, found.count("\n")) == (code, 1)
    assert found.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("tempfile._candidate_tempdir_list = list; tempfile.gettempdir()", "no folder for temporary files can be "),
        ("os.rmdir(os.getcwd()); os.getcwd()", "the working folder is gone: change to another one, or give absolute "),
        ("[os.dup(0) for _ in range(20)]", "Too many open files: raise the limit of open files (ulimit -n)"),
        ("raise RuntimeError('unable to open <x>: Too many open files (24)')", "Too many open files: raise the limit "),
        ("threading.stack_size(1 << 50); threading.Thread().start()", "can't start new thread: raise the limit of thr"),
        ("raise BlockingIOError(errno.EAGAIN, 'of fork')", "[Errno 11] of fork: raise the limit of threads and "),
    ],
)
def test_what_the_machine_lacks_is_one_line_with_the_remedy(tmp_path: Path, program: str, said: str) -> None:
    source = f"""if True:
        import errno, os, tempfile, threading, vitx.cli

        def app():
            {program}

        vitx.cli.app = app
        vitx.cli.main()
    """
    (tmp_path / "here").mkdir()
    words = ["sh", "-c", 'ulimit -n 16; exec "$@"', "sh", sys.executable, "-c", source]
    ended = subprocess.run(words, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
    assert ended.stderr.startswith(f"error: {said}")


def test_of_a_relative_path_it_is_said_that_the_working_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    program = "import os; os.rmdir(os.getcwd()); from vitx.cli import main; main()"
    # -P as the installed command has it: Python 3.13.0 imports no library with a folder that is gone on its path.
    command = [sys.executable, "-P", "-c", program, "parity", "b.vitx"]
    ended = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    said = "; the working folder is gone: change to another one, or give absolute paths\n"
    assert (ended.returncode, ended.stderr.count("\n"), ended.stderr.endswith(said)) == (2, 1, True)


NO_TENSOR = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 798720 bytes")
NO_FORK = OSError(errno.ENOMEM, "Cannot allocate memory")  # or mmap
NO_SEGMENT = ImportError("libtorch_cpu.so: failed to map segment from shared object")
ON_GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1 MiB is free"
NO_PAGES = torch.OutOfMemoryError(f"{ON_GPU}. Including non-PyTorch memory, this process has 7.90 GiB in use.")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (NO_SEGMENT, "libtorch_cpu.so: failed to map segment from shared object: too little memory"),
        (NO_TENSOR, f"{NO_TENSOR}: too little memory"),
        (MemoryError("Unable to allocate 7.45 GiB"), "Unable to allocate 7.45 GiB: too little memory"),
        (MemoryError(), "MemoryError: too little memory"),
        (NO_FORK, f"{NO_FORK}: too little memory"),
        (NO_PAGES, f"{ON_GPU}: a GPU has too little memory: take smaller batches"),  # with a remedy of its own
    ],
)
def test_too_little_memory_is_one_line_with_the_remedy(
    raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise raised

    monkeypatch.setattr(vitx.cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        vitx.cli.main()
    found = capsys.readouterr().err
    assert (ended.value.code, found.count("\n")) == (3, 1)
    assert found.startswith(f"error: {said}")


def test_an_import_that_fails_for_another_reason_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ImportError("undefined symbol: cudaFree")

    monkeypatch.setattr(vitx.cli, "app", app)
    with pytest.raises(ImportError, match="undefined symbol"):
        vitx.cli.main()


@pytest.mark.parametrize(
    "arguments", [("eval", "LONG"), ("parity", "LONG"), ("predict", "LONG", "."), ("serve", "LONG", "--port", "0")]
)
def test_a_name_that_is_too_long_is_an_error_of_the_user_s(arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = ("--out", "out") if arguments[0] == "predict" else ()
    command = [word.replace("LONG", "x" * 300) for word in (*arguments, *out)]
    program = "from vitx.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.endswith("': File name too long\n")
    assert ended.stderr.count("\n") == 1


def test_a_name_that_is_not_utf_8_is_an_error_of_the_user_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vitx.cli, "app", lambda: os.fsdecode(b"runs/\xff").encode())
    with pytest.raises(SystemExit) as ended:
        vitx.cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a name that is not UTF-8 cannot be used here: 'runs/\\udcff'\n"
    monkeypatch.setattr(vitx.cli, "app", lambda: "ä".encode("ascii"))
    with pytest.raises(UnicodeEncodeError):  # a fault of ours
        vitx.cli.main()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere names are always UTF-8")
def test_names_of_files_are_utf_8() -> None:
    """In a locale of another encoding an image's name would be unreadable, or another in the table."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", "from vitx.cli import main; main()", "--version"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    said = "error: names of files are taken for ascii here, expected utf-8: set PYTHONUTF8=1\n"
    assert (ended.returncode, ended.stderr) == (3, said)
    ended = subprocess.run(words, env={**environment, "PYTHONUTF8": "1"}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "run", "--data", ""],
        ["predict", "bundle", "", "--out", "out"],
        ["analyze", "run", "--out", "report", "--data", ""],
        ["parity", "run", "bundle", "--data", ""],
        ["predict", "bundle", "images", "--out", ""],
        ["export", "run", "--out="],
        ["demo", "--out", ""],
    ],
)
def test_an_empty_data_set_or_folder_is_not_the_default_one(command: list[str], tmp_path: Path) -> None:
    """As of a variable of the shell's that is not set."""
    program = "from vitx.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program, *command], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "it is empty" in ended.stderr or "at least 1 character" in ended.stderr


def test_doctor_names_the_extra_that_the_error_of_a_verb_names() -> None:
    """It sent who wants `vitx parity RUN BUNDLE` to [train], which has no onnx."""
    for extra, (_, needed_by) in EXTRAS.items():
        for words in needed_by.split(", "):
            if words.startswith("vitx "):  # --grpc-port is more than [serve]
                assert vitx.cli.VERBS[words.split()[1]].extra in (extra, "serve" if extra == "grpc" else extra)


def test_the_help_of_a_verb_waits_for_no_numbers_and_no_images() -> None:
    program = (
        "import sys; from vitx.cli import VERBS, _command; "
        "[_command(verb) for verb in VERBS];"
        "print(sorted({'numpy', 'PIL', 'torch', 'timm', 'onnx'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGHUP, 7)])
def test_a_signal_while_the_command_line_is_imported(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C leaves no traceback, and a reload that comes so early ends no server."""
    text = "import sys\nprint('begun', flush=True)\nsys.stdin.readline()\nsys.exit(7)\n"
    (tmp_path / "typer.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(vitx.__file__).parents[1]}"}
    command = [sys.executable, "-m", "vitx", "serve", "bundle"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as early:  # type: ignore[call-overload]
        assert early.stdout.readline() == "begun\n"
        early.send_signal(number)
        assert (early.communicate("\n")[1], early.wait()) == ("", code)


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_torch_spin_less_unless_the_user_says_how(given: dict[str, str], count: str | None) -> None:
    """It is read when torch is imported."""
    program = (
        "import os, sys, vitx.cli as cli; "
        "cli.app = lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules); cli.main()"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run([sys.executable, "-c", program], env=kept | given, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{count} False\n", "")
