"""`vitx predict --ray` on a cluster of two network namespaces, one of which dies and comes back: every image once.

    python benchmarks/predict/ray_nodes.py [--images 4000] [--json FILE]

The nodes share this machine's disk, but no network but the one between them, no host name and no folder of Ray (needs
the right to make namespaces). Everything on the second one is killed when eight parts are there, and it joins again.
Exit code 1 unless that was before its end and the files are, byte for byte, those of a run without Ray.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import colour_image, png, write_bundle
from network_nodes import ADDRESSES, DEVICE, two_namespaces
from support.targets import command_line, report_header, save_report
from vitx.core.files import sha256_file
from vitx.predict import PREDICTIONS

PORT, SHARD, PARTS, SECONDS = 6379, 10, 8, 120.0
HEAD = f"{ADDRESSES[0]}:{PORT}"
# A token that an earlier cluster left would be asked for.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}
# Mounts and a host name of its own, with `$1` as Ray's folder.
ISOLATED = 'hostname "$1"; mkdir -p "$2" /tmp/ray; mount --bind "$2" /tmp/ray; shift 2; exec "$@"'


class Nodes:
    def __init__(self, names: tuple[str, str], scratch: Path) -> None:
        self._names, self._scratch = names, scratch
        for name in names:  # by which Ray finds its own address
            route = ["ip", "-n", name, "route", "add", "default", "dev", DEVICE]
            subprocess.run(route, check=True)

    def start(self, index: int, *command: str) -> "subprocess.Popen[bytes]":
        name = self._names[index]
        alone = ["ip", "netns", "exec", name, "unshare", "-m", "-u", "bash", "-c", ISOLATED, "node"]
        given = [f"node{index + 1}", str(self._scratch / f"ray{index + 1}"), sys.executable, "-m", *command]
        with (self._scratch / f"node{index + 1}.log").open("a") as log:
            return subprocess.Popen([*alone, *given], stdout=log, stderr=log, env=ENVIRONMENT)

    def join(self, index: int) -> None:
        where = ("--address", HEAD) if index else ("--head", "--port", str(PORT), "--include-dashboard", "false")
        size = ("--num-cpus", "1", "--object-store-memory", str(100 << 20), "--disable-usage-stats")
        self.start(index, "ray.scripts.scripts", "start", *where, "--node-ip-address", ADDRESSES[index], *size).wait()

    def kill(self, index: int) -> None:
        running = subprocess.run(
            ["ip", "netns", "pids", self._names[index]], capture_output=True, text=True, check=True
        )
        for process in running.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def digests(out: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in (out / PREDICTIONS).iterdir()}


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vitx-ray-nodes-") as name, two_namespaces() as names:
        scratch = Path(name)
        bundle = write_bundle(scratch / "tiny.vitx").path
        (scratch / "images").mkdir()
        for index in range(args.images):
            image = png(colour_image(index % 4, np.random.default_rng(index)))
            (scratch / "images" / f"{index:05d}.png").write_bytes(image)
        sizes = ("--shard-size", str(SHARD), "--threads", "1", "--decode-threads", "1", "--device", "cpu")
        given = ("vitx", "predict", str(bundle), str(scratch / "images"), *sizes, "--allow-uncertified", "--quiet")
        nodes = Nodes(names, scratch)
        try:
            nodes.join(0)
            nodes.join(1)
            driver = nodes.start(0, *given, "--out", str(scratch / "ray"), "--ray", HEAD, "--ray-actors", "2")
            until = time.monotonic() + SECONDS
            while len(list((scratch / "ray" / PREDICTIONS).glob("part-*"))) < PARTS:
                if driver.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"no {PARTS} parts: {(scratch / 'node1.log').read_text()}")
                time.sleep(0.01)
            nodes.kill(1)
            running = driver.poll() is None
            nodes.join(1)
            code = driver.wait()
        finally:
            nodes.kill(1)
            nodes.kill(0)
        subprocess.run([sys.executable, "-m", *given, "--out", str(scratch / "here")], check=True, cwd=scratch)
        same = digests(scratch / "ray") == digests(scratch / "here")
    report = {"images": args.images, "killed_while_it_ran": running, "exit_code": code, "same_files": same}
    print(report)
    save_report(report_header() | report, args.json)
    sys.exit(code != 0 or not same or not running)


if __name__ == "__main__":
    main()
