"""A PostgreSQL server of the tests' own: a private cluster in a temporary folder, on a free port, not as root."""

import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg

PASSWORD = "not/to be@shown"
_URL_PASSWORD = "not%2Fto%20be%40shown"
# No flushing to the disk: the data need not survive a power cut.
_SETTINGS = {"fsync": "off", "shared_buffers": "16MB", "max_connections": "60", "listen_addresses": "127.0.0.1"}


def find_programs() -> Path | None:
    """The folder of `initdb` and `postgres`: on the path, or where Debian and Ubuntu put them, newest first."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4]))
    return Path(versions[-1]).parent if versions else None


class PostgresServer:
    """url: of its database, with the password. Made by `postgres_server`, which ends it."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._account = _unprivileged()
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://vitx:{_URL_PASSWORD}@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[Any] | None = None

    def initialise(self) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if self._account:
            for path in (self._folder, password):
                os.chown(path, self._account["user"], self._account["group"])
        options = ["--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        subprocess.run(
            [self._programs / "initdb", "-U", "vitx", f"--pwfile={password}", *options, self._folder / "data"],
            stdout=subprocess.DEVNULL,
            check=True,
            **self._child_options(),
        )

    def start(self) -> None:
        settings = _SETTINGS | {"port": str(self.port), "unix_socket_directories": str(self._folder)}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with (self._folder / "log").open("ab") as log:
            arguments = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), *options]
            process = subprocess.Popen(arguments, stdout=log, stderr=log, **self._child_options())
        self._process = process
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError((self._folder / "log").read_text()) from error
                time.sleep(0.05)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server, which cuts every connection. at_once: without a checkpoint, as in a crash."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
        self._process.wait(30)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def terminate_connections(self) -> int:
        """Cut every connection of `vitx predict`; return their number."""
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'vitx predict'"
        return len(self.run(query))

    def _child_options(self) -> dict[str, Any]:
        return {"cwd": self._folder, "stdin": subprocess.DEVNULL, **self._account}


def _unprivileged() -> dict[str, Any]:
    """Options of Popen that run a child as `nobody` if the tests run as root: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam("nobody")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


@contextmanager
def postgres_server(programs: Path) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="vitx-postgres-"))  # other accounts may not enter pytest's folders
    server = PostgresServer(programs, folder)
    try:
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop(at_once=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
