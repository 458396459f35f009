"""`vitx serve --workers`: real processes, real signals, one port."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from bundle_fixture import write_bundle
from server_process import (
    COMMAND,
    HANG,
    ServerProcess,
    end_under_load,
    http_client,
    is_running,
    load_on,
    run_serve,
    running_server,
    wait_until,
)
from vitx.core.bundle import Bundle
from vitx.serve.observe.metrics import merged
from vitx.serve.process.supervisor import ENVIRONMENT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="POSIX processes, and /proc")


def workers_of(server: ServerProcess) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def opened(pid: int) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            found.append(os.readlink(descriptor))
    return found


def has_open(pid: int, file: Path) -> bool:
    return str(file) in opened(pid)


def reporting(server: ServerProcess) -> float:
    """Workers whose metrics are in the exposition: those that answered within a second."""
    return server.metric("vitx_model_info{")


def test_a_killed_worker_loses_only_what_it_held_and_is_replaced(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        assert server.line.startswith("vitx: serving with 2 workers on http://127.0.0.1:")
        assert server.process.stderr is not None
        following = next(line for line in server.process.stderr if line.startswith("next: "))
        assert following == f"next: curl --data-binary @IMAGE {server.line.split()[-1]}/v1/classify\n"
        before = workers_of(server)
        assert len(before) == 2
        wait_until(lambda: reporting(server) == 2)
        parent = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "onnxruntime" not in parent
        assert "libtorch" not in parent
        stop, outcomes = threading.Event(), Counter[str]()

        def client() -> None:
            ask = http_client(server)
            while not stop.is_set():
                outcomes[ask()] += 1

        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(client) for _ in range(8)]
            wait_until(lambda: outcomes["200"] > 100)
            os.kill(before[0], signal.SIGKILL)
            at_kill = outcomes["200"]
            wait_until(lambda: outcomes["200"] > at_kill + 100)  # the other one serves all
            wait_until(lambda: len(workers_of(server)) == 2 and reporting(server) == 2)
            stop.set()
            for job in jobs:
                job.result(HANG)
        assert outcomes.keys() <= {"200", "closed"}
        assert outcomes["closed"] <= 8  # at most one request a connection
        assert before[0] not in workers_of(server)
        assert before[1] in workers_of(server)
        assert server.stop() == 0
        wait_until(lambda: not is_running(before[1]))


def test_a_service_whose_log_nobody_reads_any_more_goes_on(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        before = workers_of(server)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(workers_of(server)) == 2 and before[0] not in workers_of(server))
        wait_until(lambda: reporting(server) == 2)
        assert server.stop() == 0


def test_a_worker_that_hangs_is_killed_and_replaced(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        before = workers_of(server)
        os.kill(before[0], signal.SIGSTOP)
        try:
            wait_until(lambda: len(workers_of(server)) == 2 and before[0] not in workers_of(server))
        finally:
            with suppress(ProcessLookupError):
                os.kill(before[0], signal.SIGCONT)  # or the end of the server would wait for it
        wait_until(lambda: reporting(server) == 2)
        assert before[1] in workers_of(server)
        assert server.stop() == 0


def test_hangup_replaces_every_worker_and_loses_no_request(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        before, uptime = set(workers_of(server)), server.json("/v1/stats")["uptime_seconds"]
        read = time.monotonic()
        with load_on(server, 4) as answered:
            wait_until(lambda: answered() > 50)
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(workers_of(server)) == 2 and not before & set(workers_of(server)))
        wait_until(lambda: reporting(server) == 2)
        passed = time.monotonic() - read
        assert server.json("/v1/stats")["uptime_seconds"] > uptime + passed - 0.01  # of the service, as the first one's


@pytest.mark.parametrize("ready", [0, 1])
def test_a_hangup_while_workers_are_replaced_replaces_the_new_ones_too(tiny_bundle: Bundle, ready: int) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        known = set(workers_of(server))
        server.process.send_signal(signal.SIGHUP)
        for _ in range(ready + 1):  # the replacement of the first or of the last worker starts
            wait_until(lambda: bool(set(workers_of(server)) - known))
            known.update(workers_of(server))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(workers_of(server)) == 2 and not known & set(workers_of(server)))
        wait_until(lambda: reporting(server) == 2)
        assert server.stop() == 0


def test_a_worker_that_dies_while_it_is_replaced_is_replaced_once(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        before = set(workers_of(server))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(workers_of(server)) == 3)
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(workers_of(server)) == 2 and not before & set(workers_of(server)))
        wait_until(lambda: reporting(server) == 2)
        assert server.stop() == 0


def test_a_worker_that_starts_opens_the_access_log_that_was_rotated_meanwhile(
    tmp_path: Path, tiny_bundle: Bundle
) -> None:
    log = tmp_path / "access.log"
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1", "--access-log", log) as server:
        before = workers_of(server)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(workers_of(server)) == 2 and before[0] not in workers_of(server))
        (new,) = set(workers_of(server)) - set(before)
        wait_until(lambda: has_open(new, log))
        log.rename(tmp_path / "access.log.1")
        server.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: reporting(server) == 2)
        wait_until(lambda: has_open(new, log))
        assert server.stop() == 0


def test_a_worker_that_hangs_while_it_starts_does_not_hold_up_the_end(tiny_bundle: Bundle) -> None:
    program = "import vitx.serve.process.supervisor as s; s._LEAVE_SECONDS = 1; from vitx.cli import main; main()"
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1", program=program) as server:
        before = set(workers_of(server))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(workers_of(server)) == 3)
        (new,) = set(workers_of(server)) - before
        # Not between its fork and its exec, for which the parent waits without an end.
        wait_until(lambda: ENVIRONMENT in Path(f"/proc/{new}/environ").read_text())
        os.kill(new, signal.SIGSTOP)
        assert server.stop() == 0


def test_a_worker_that_is_killed_before_all_are_warm_is_named(tiny_bundle: Bundle) -> None:
    command = [*COMMAND, str(tiny_bundle.path), "--workers", "2", "--threads", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text()))
        os.kill(int(children.read_text()), signal.SIGKILL)
        out, err = process.communicate(timeout=HANG)
    told = "vitx: worker 0 was ended by SIGKILL before every worker was warm\n"
    assert (process.returncode, out, err) == (1, "", told)


@pytest.mark.parametrize("code", [0, 7])
def test_a_worker_that_ends_without_a_word_before_all_are_warm_is_named(tiny_bundle: Bundle, code: int) -> None:
    """As a runtime's library may end it."""
    worker = f"import os, vitx.serve.process.server as s; s.serve = lambda options: os._exit({code})"
    command = [sys.executable, "-c", f"{worker}\nfrom vitx.cli import main; main()", "serve", str(tiny_bundle.path)]
    ended = subprocess.run([*command, "--workers", "2", "--port", "0"], capture_output=True, text=True, timeout=HANG)
    told = f"vitx: worker 0 ended with exit code {code} before every worker was warm\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (code or 1, "", told)


def test_sigterm_under_load_loses_no_accepted_request(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        end_under_load(server, signal.SIGTERM, lambda sent: http_client(server, sent), refused=None, clients=8)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_the_first_for_each(tiny_bundle: Bundle, number: signal.Signals) -> None:
    """As Ctrl-C in a terminal, and systemd, send it."""
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        client = partial(http_client, server)
        end_under_load(server, number, client, refused=None, clients=8, others=workers_of(server))


def test_a_signal_to_the_whole_group_while_a_worker_starts_ends_with_zero(tiny_bundle: Bundle) -> None:
    command = [*COMMAND, str(tiny_bundle.path), "--workers", "2", "--threads", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text()))
        worker = Path(f"/proc/{children.read_text().strip()}/maps")
        wait_until(lambda: "numpy" in worker.read_text())  # it handles a signal, but not yet by draining
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=HANG)
    assert process.returncode == 0


def test_a_configuration_that_only_the_parent_could_read_is_refused(tmp_path: Path, tiny_bundle: Bundle) -> None:
    """Else the workers would serve without what it says, such as the token."""
    (tmp_path / "token").write_text("a token of the test")
    given = f"token_file = '{tmp_path / 'token'}'\nworkers = 2\n"
    command = [*COMMAND, str(tiny_bundle.path), "--port", "0", "--config", "/dev/stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(given.encode())
        process.stdin.close()
        process.stdin = None
        assert process.stdout is not None
        if process.stdout.readline():  # it serves
            process.terminate()
        told = process.communicate(timeout=HANG)[1].decode()
    assert told.startswith("error: --config /dev/stdin: cannot be read as TOML: ")
    assert process.returncode == 2


def listening(pid: int) -> int:
    """How many ports of TCP a process listens on."""
    tables = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listeners = {f"socket:[{row.split()[9]}]" for row in tables if row.split()[3] == "0A"}
    return len(listeners.intersection(opened(pid)))


def test_a_new_worker_has_the_ports_of_the_start_whatever_the_file_says_then(
    tmp_path: Path, tiny_bundle: Bundle
) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("workers = 2\nthreads = 1\n")
    with running_server(tiny_bundle.path, "--config", config) as server:
        before = workers_of(server)
        config.write_text("workers = 2\nthreads = 1\ngrpc-port = 8001\n")
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(workers_of(server)) == 2 and before[0] not in workers_of(server))
        wait_until(lambda: reporting(server) == 2)
        assert [listening(pid) for pid in workers_of(server)] == [1, 1]


def test_workers_drain_with_their_parent_even_when_it_is_killed(tiny_bundle: Bundle) -> None:
    with running_server(tiny_bundle.path, "--workers", "2", "--threads", "1") as server:
        workers = workers_of(server)
        server.process.kill()
        wait_until(lambda: not any(map(is_running, workers)))


def test_a_bundle_that_is_refused_is_refused_once(tmp_path: Path, tiny_bundle: Bundle) -> None:
    uncertified = write_bundle(tmp_path / "uncertified.vitx")
    refused = run_serve(uncertified.path, "--workers", "2", "--port", "0")
    assert (refused.returncode, refused.stdout, refused.stderr.count("has no certificate")) == (1, "", 1)
    refused = run_serve(tiny_bundle.path, "--workers", "2", "--shared-memory", "--port", "0")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: --shared-memory reaches one process, and --workers makes several: use --instances\n"
    )


def test_the_exposition_of_several_workers_is_one() -> None:
    first = b'# HELP a_total A.\n# TYPE a_total counter\na_total{b="x y{"} 1.0\n# HELP c C.\n# TYPE c gauge\nc 2.0\n'
    second = first.replace(b"1.0", b"3.0")
    assert merged({"0": first, "1": second}, "worker").decode() == (
        "# HELP a_total A.\n# TYPE a_total counter\n"
        'a_total{worker="0",b="x y{"} 1.0\na_total{worker="1",b="x y{"} 3.0\n'
        '# HELP c C.\n# TYPE c gauge\nc{worker="0"} 2.0\nc{worker="1"} 2.0\n'
    )
