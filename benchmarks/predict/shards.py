"""`vitx predict --shard` on two nodes that share only a network, or only a folder; one is killed and restarted.

    pip install 'moto[server]' s3fs
    python benchmarks/predict/shards.py [--images 1000] [--json FILE]

The nodes are network namespaces of this machine (needs the right to make them), each with a `--state` of its own. On
the first one moto's server is the S3 that both read and write; then both write to one folder. Job 2 is killed (SIGKILL)
when its first part is there, and started again. Exit code 1 unless it was killed in time and every image is there once,
with its class.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from bundle_fixture import LABELS, NumpySession, colour_image, png, write_bundle
from network_nodes import ADDRESSES, two_namespaces
from support.targets import command_line, report_header, save_report
from vitx.predict import PREDICTIONS

PORT, JOBS, SHARD, SECONDS = 5000, 2, 16, 120.0
ENDPOINT = f"http://{ADDRESSES[0]}:{PORT}"
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
ENVIRONMENT = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": ENDPOINT, "OMP_NUM_THREADS": "1"}
SOURCE, RESULTS = "s3://bucket/images", "s3://bucket/results"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--inside", choices=["fill", "fetch"], help="what this process does within a node")
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, args.images)
        return
    report = report_header() | {"images": args.images}
    with tempfile.TemporaryDirectory() as name, two_namespaces() as nodes:
        folder = Path(name)
        write_bundle(folder / "tiny.vitx")
        address, port = ("--host", ADDRESSES[0]), ("--port", str(PORT))
        server = start(nodes[0], "moto.server", *address, *port)
        try:
            run(nodes[0], str(Path(__file__)), "--inside", "fill", "--images", str(args.images), cwd=folder)
            for where, out in (("s3", RESULTS), ("folder", str(folder / "out"))):
                report[where] = attacked(nodes, folder / where, out)
                if where == "s3":
                    run(nodes[1], str(Path(__file__)), "--inside", "fetch", cwd=folder / where)
                rows = pq.read_table(folder / ("s3/fetched" if where == "s3" else f"out/{PREDICTIONS}")).to_pylist()
                report[where] |= judged(rows, args.images)
                print(where, report[where])
        finally:
            server.kill()
            server.wait()
    save_report(report, args.json)
    sys.exit(not all(report[where]["holds"] and report[where]["killed"] for where in ("s3", "folder")))


def inside(task: str, images: int) -> None:
    import s3fs

    store = s3fs.S3FileSystem(client_kwargs={"endpoint_url": ENDPOINT})
    if task == "fetch":
        store.get(f"{RESULTS}/{PREDICTIONS}/", "fetched/", recursive=True)
        return
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            store.mkdir("bucket")
            break
        except OSError:  # the server starts
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    for index in range(images):
        store.pipe_file(f"{SOURCE}/{index:05d}.png", png(pixels(index)))


def pixels(index: int) -> Any:
    return colour_image(index % 4, np.random.default_rng(index))


def start(node: str, module: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    runs = ["-m", module] if not module.endswith(".py") else [module]
    return subprocess.Popen(
        ["ip", "netns", "exec", node, sys.executable, *runs, *arguments],
        env=ENVIRONMENT,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if module == "moto.server" else None,
    )


def run(node: str, module: str, *arguments: str, cwd: Path) -> None:
    cwd.mkdir(exist_ok=True)
    if start(node, module, *arguments, cwd=cwd).wait():
        raise SystemExit(f"{module} {' '.join(arguments)} has failed")


def attacked(nodes: tuple[str, str], states: Path, out: str) -> dict[str, Any]:
    """Both jobs at once; job 2 is killed when its first part is there, and begun again."""
    states.mkdir()

    def job(number: int) -> subprocess.Popen[bytes]:
        more = ("--state", str(states / str(number))) if out == RESULTS else ()
        given = (str(states.parent / "tiny.vitx"), SOURCE, "--out", out, "--shard", f"{number}/{JOBS}", *more)
        sizes = ("--shard-size", str(SHARD), "--decode-threads", "1", "--threads", "1", "--device", "cpu")
        return start(nodes[number - 1], "vitx", "predict", *given, *sizes, "--allow-uncertified", "--quiet")

    began = time.monotonic()
    first, second = job(1), job(2)
    parts = (states / "2" if out == RESULTS else Path(out)) / PREDICTIONS
    while second.poll() is None and not any(int(one.stem[5:]) % JOBS == 0 for one in parts.glob("part-*.parquet")):
        time.sleep(0.005)
    killed = second.poll() is None
    second.kill()
    second.wait()
    codes = [job(2).wait(), first.wait()]
    return {"killed": killed, "exit_codes": codes, "seconds": round(time.monotonic() - began, 1)}


def judged(rows: list[dict[str, Any]], images: int) -> dict[str, Any]:
    expected = NumpySession().infer(np.stack([pixels(index) for index in range(images)])).argmax(axis=1)
    counted = Counter(row["path"] for row in rows)
    wrong = [row["path"] for row in rows if row["class"] != LABELS[expected[int(row["path"][:5])]]]
    missing, double = images - len(counted), sum(count > 1 for count in counted.values())
    return {"missing": missing, "double": double, "wrong": len(wrong), "holds": not (missing or double or wrong)}


if __name__ == "__main__":
    main()
