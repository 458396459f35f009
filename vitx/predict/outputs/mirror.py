"""Predictions in an object store: a copy of the local output, each part of which is put there when it is committed.

An object appears when it is whole, under a name that its shard decides. It is put before the file has its name in the
folder: what the ledger has recorded is in the store, and what a stop left there unrecorded is put again.
"""

import inspect
import json
import os
import re
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.core.preprocess import ImageError
from vitx.predict.inputs.remote import attempts, remote_filesystem
from vitx.predict.ledger import Ledger
from vitx.predict.options import WHOLE, Share
from vitx.predict.outputs.parts import PREDICTIONS, part_path

# Stores whose objects appear whole. memory is of this process: for tests.
PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")

# The markers and summaries of a run and of jobs, and what of a run's description is not the same for all jobs.
_RECORD = re.compile(r"(\.vitx|summary)(-[0-9]{5,}-of-[0-9]{5,})?\.json")
_OF_ONE_JOB = ("id", "skipped", "measured")
_MARKER = {"run", "host", "state", "agreed"}


class Mirror:
    """The copy of the output folder `out` at the URL of an object store, or one job's part of it.

    Raises InputError for what is no object store; its methods raise EnvironmentMissing if that cannot be written.
    """

    def __init__(self, url: str, out: Path, share: Share) -> None:
        if url.partition("://")[0] not in PROTOCOLS:
            raise InputError(
                f"--out '{url}': expected a folder of this machine or the URL of an object store "
                f"({', '.join(PROTOCOLS[:-1])}), where a file appears when it is whole"
            )
        self.url, self._out, self._share = url.rstrip("/"), out, share
        self._system, self._root = remote_filesystem(self.url)
        self._marker, self._mark = f".vitx{share.suffix}.json", b""

    def begin(self, ledger: Ledger, run: str, summary: Path, *, overwrite: bool) -> None:
        """Check that the store can be written, and put what it lacks of the finished shards.

        summary: its copy is removed if it is not there. Raises InputError if the store has predictions of another run.
        """
        parts, marked = self._parts(), f"{self._root}/{self._marker}"
        if overwrite:
            records = [name for name in self._names() if _RECORD.fullmatch(name)]  # of jobs of a --shard too
            # First: a summary says that all parts are there, and a process that still works there looks for its mark.
            for name in (*records, *(f"{PREDICTIONS}/{part}" for part in parts)):
                self._ask("rm_file", f"{self._root}/{name}")
            parts = {}
        marker = self._read(self._marker)
        if (parts or marker) and marker.get("run") != run:
            where = f"its ledger is in {marker['state']} of {marker['host']}" if marker else "nothing tells which"
            remedy = "pass --overwrite" if self._share == WHOLE else "remove them"
            raise InputError(
                f"'{self.url}' holds predictions of another run ({where}): name that folder with --state, choose "
                f"another URL, or {remedy}"
            )
        said = {name: value for name, value in ledger.description().items() if name not in _OF_ONE_JOB}
        # By digests: the URL of an input may have a password.
        agreed = {name: sha256_bytes(repr(value).encode())[:16] for name, value in said.items()}
        place = {"host": socket.gethostname(), "state": os.path.abspath(self._out)}
        self._mark = mark = json.dumps({"run": run, **place, "agreed": agreed}).encode()
        # Of two runs that begin at once the store takes one, if it can.
        can = inspect.signature(self._system.pipe_file).parameters
        once = {"mode": "create"} if "mode" in can else {"overwrite": False} if "overwrite" in can else {}  # of adlfs
        try:
            self._ask("pipe_file", marked, mark, **({} if marker else once))
        except EnvironmentMissing:
            if self._ask("cat_file", marked) != mark:  # else it was taken, and the answer was lost
                raise
        try:
            self._refuse_others(agreed)  # after it: of two jobs that begin at once, one sees the other
        except InputError:
            if not marker:
                self._ask("rm_file", marked)
            raise
        if not summary.exists():
            self._ask("rm_file", f"{self._root}/{summary.name}")
        self._complete(ledger, parts)

    def end(self, ledger: Ledger, summary: Path) -> None:
        """Put the summary, last: where it is, all parts are, and no others."""
        self._complete(ledger, self._parts())
        self.put(summary, summary.name)

    def _complete(self, ledger: Ledger, parts: dict[str, int]) -> None:
        """Put the finished shards that are not among the `parts`; raise InputError for a part that is of no shard."""
        shards = {part_path(self._out, claim.id).name for claim in ledger.shards()}
        if strangers := sorted(name for name in parts.keys() - shards if name.startswith("part-")):
            raise InputError(
                f"'{self.url}/{PREDICTIONS}' holds {strangers[0]}, which is not of this run, and readers would take "
                "its rows: remove it, and run the same command again"
            )
        for number, _, _ in ledger.records():
            path = part_path(self._out, number)
            if parts.get(path.name) != path.stat().st_size:
                self.put(path, f"{PREDICTIONS}/{path.name}")

    def _refuse_others(self, agreed: dict[str, str]) -> None:
        """Raise InputError for the marker of a run that is no job of this one: images would be lost or doubled."""
        for name in self._names():
            if name == self._marker or not name.startswith(".vitx") or not _RECORD.fullmatch(name):
                continue
            other = self._read(name)
            what = ", ".join(sorted(key for key in agreed if agreed[key] != other["agreed"].get(key)))
            if name.rpartition("-of-")[2] != self._marker.rpartition("-of-")[2]:
                what = "number of jobs"
            if what:
                raise InputError(
                    f"'{self.url}' has predictions of another {what} ({name}, of {other.get('host')}): choose another "
                    "URL for all jobs, or remove those"
                )

    def _read(self, name: str) -> dict[str, Any]:
        """The marker of a run: its id, host and state, and what its jobs agree on; empty where there is none.

        Raises InputError for a damaged one: nothing tells whose predictions are there.
        """
        text = self._ask("cat_file", f"{self._root}/{name}")
        if text is None:
            return {}
        with suppress(ValueError, RecursionError):
            marker = json.loads(text)
            if isinstance(marker, dict) and marker.keys() >= _MARKER and isinstance(marker["agreed"], dict):
                return marker
        raise InputError(
            f"'{self.url}/{name}', which says whose predictions these are, is damaged: choose another URL, or remove "
            "what is there"
        )

    def _names(self) -> list[str]:
        """Of what lies beside the predictions now."""
        self._system.invalidate_cache()
        return [str(entry["name"]).rpartition("/")[2] for entry in self._ask("ls", self._root, detail=True) or ()]

    def put(self, path: Path, name: str) -> None:
        """Raises InputError if another run has taken the place of this one."""
        if self._ask("cat_file", f"{self._root}/{self._marker}") != self._mark:
            raise InputError(
                f"another run has overwritten what this one put into '{self.url}', or {self._marker} is gone: "
                "choose another URL"
            )
        self._ask("put_file", os.fspath(path), f"{self._root}/{name}")

    def _parts(self) -> dict[str, int]:
        """The sizes of the parts of this job that the store has, by name."""
        self._system.invalidate_cache()
        found = self._ask("ls", f"{self._root}/{PREDICTIONS}", detail=True) or ()
        sizes = {}
        for entry in found:
            name = str(entry["name"]).rpartition("/")[2]
            number = name.removeprefix("part-").removesuffix(".parquet")
            if not number.isdecimal() or (int(number) - self._share.number) % self._share.jobs == 0:
                sizes[name] = int(entry["size"] or 0)
        return sizes

    def _ask(self, question: str, *given: Any, **options: Any) -> Any:
        """None if there is nothing to read or to remove; where something is written, its bucket is not there."""
        try:
            return attempts(partial(getattr(self._system, question), *given, **options), "it gives no answer")
        except (ImageError, OSError) as error:
            if isinstance(error, FileNotFoundError) and question not in ("pipe_file", "put_file"):
                return None
            raise EnvironmentMissing(
                f"cannot write to '{self.url}': {error}. Finished shards are kept: run the same command again"
            ) from None
