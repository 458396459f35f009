"""Two nodes on one machine: network namespaces joined by a pair of virtual Ethernet devices, with torchrun in each."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.run import RunFolder

ADDRESSES = ("10.213.57.1", "10.213.57.2")
DEVICE, PORT = "vitx0", 29400
# Seconds that a new group waits for more nodes (torchrun's default: 30), seconds between a node's signs of life (5),
# and how many of those may be missed (3).
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"


class NotPermitted(EnvironmentMissing):
    """Network namespaces cannot be made on this machine; the message says why."""


def _ip(*arguments: str) -> None:
    if shutil.which("ip") is None:
        raise NotPermitted("the command `ip` (iproute2) is not installed")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Yield the names of two network namespaces that reach each other only. Raises NotPermitted."""
    names = (f"vitx-{os.getpid()}-a", f"vitx-{os.getpid()}-b")
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


class Node:
    """One node's torchrun, with one process, in a namespace of `two_namespaces`; both write to the file `log`."""

    def __init__(
        self,
        namespaces: tuple[str, str],
        index: int,
        arguments: tuple[str, ...],
        log: Path,
        rendezvous: str = RENDEZVOUS,
    ) -> None:
        self.namespace, self.log = namespaces[index], log
        command = [
            *("ip", "netns", "exec", self.namespace, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", ADDRESSES[index]),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", "run"),
            *("--rdzv-conf", f"is_host={index == 0},{rendezvous}"),
            *("-m", "vitx", *arguments),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": DEVICE,
            # Without it a node that comes back waits for ever: rank 0 tells its address once (torch 2.15).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with log.open("a") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def kill(self) -> None:
        """SIGKILL everything in the namespace: torchrun, the process that trains, its data workers."""
        running = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        for process in running.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def progress_of(run: Path) -> tuple[int, int, int]:
    """Steps, whole epochs, and how many processes wrote the newest checkpoint (0: at the end of an epoch)."""
    from vitx.train.loop.checkpoint import newest_checkpoint  # imports torch, which not all users of this file have

    with suppress(OSError, InputError):  # between two looks the links move and old folders go
        found = newest_checkpoint(RunFolder(run))
        if found is not None:
            state = found[1]
            return state.step, state.epoch, len(state.trainer.get("losses", ()))
    return 0, 0, 0


def wait_for(run: Path, node: Node, wanted: Callable[[int, int, int], bool], seconds: float = 120) -> float:
    """Wait until wanted(steps, epochs, processes); return time.monotonic(). Raises RuntimeError if the node ends."""
    deadline = time.monotonic() + seconds
    while not wanted(*progress_of(run)):
        if node.process.poll() is not None or time.monotonic() > deadline:
            logs = [f"{path}:\n{path.read_text()}" for path in node.log.parent.glob("*.log")]
            raise RuntimeError(f"the run stopped at {progress_of(run)}: {' '.join(logs)}")
        time.sleep(0.02)
    return time.monotonic()
