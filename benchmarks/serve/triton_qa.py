"""Triton's own tests (qa/L0_* of its server's repository), unmodified, against `vitx serve`: the methods that apply.

    python benchmarks/serve/triton_qa.py --qa FOLDER --python VENV/bin/python [--json FILE] [SCRIPT …]

FOLDER is `qa` of a checkout of github.com/triton-inference-server/server. The environment has what the scripts import:
`pip install 'tritonclient[all]' requests psutil ml_dtypes`. SCRIPT is a part of a name in `RUNS`, by default all but
the fuzzer, which takes half an hour and needs an environment of Python 3.8, as its test.sh says, with `boofuzz==0.3.0
'numpy<2' ml_dtypes`. The scripts ask ports 8000 and 8001, which must be free.

A method is here if what it asks does not depend on the pixels or numbers of a model that is no image classifier. Models
are ViTs of random weights under the names that the methods expect. Each method has a process of its own, before which
all shared memory is unregistered (Triton's test.sh starts a server for each). A method holds if unittest says so.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.server_peers import TINY, bundle_of, wait_until_ready
from support.targets import all_hold, command_line, report_header, save_report, verdict
from vitx import __version__
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.files import write_json

HTTP, GRPC = 8000, 8001
METHOD_SECONDS, FUZZ_SECONDS = 120, 3600
MODELS = ("onnx_int32_int8_int8", "onnx_zero_1_float32", "onnx_int32_int32_int32", "libtorch_int32_int32_int32")
ASYNCHRONOUS = (
    "is_server_live is_server_ready is_model_ready get_server_metadata get_model_metadata get_model_config "
    "get_inference_statistics get_system_shared_memory_status unregister_system_shared_memory "
    "get_cuda_shared_memory_status unregister_cuda_shared_memory"
)
MEMORY = (
    "invalid_create_shm valid_create_set_register unregister_before_register unregister_after_register "
    "reregister_after_register unregisterall register_out_of_bound register_reserved_names register_invalid_shm_key"
)
HTTP_AIO, STATUS = "L0_http/python_http_aio_test.py", "L0_server_status/server_status_test.py"
PLUGIN, SHARED = "L0_http/http_client_plugin_test.py", "L0_shared_memory/shared_memory_test.py"
FUZZER = "L0_http_fuzz/fuzztest.py"
BOTH = ("http", "grpc")


class Run(NamedTuple):
    """Methods of a script, without "test_". memory: whether the server has shared memory."""

    script: str
    test_class: str
    methods: str
    protocols: tuple[str, ...] = ("",)
    memory: bool = True

    def tests(self) -> Iterator[tuple[str, str]]:
        """Each method as unittest takes it, and the protocol it is to ask with."""
        for protocol in self.protocols:
            yield from ((f"{self.test_class}.test_{method}", protocol) for method in self.methods.split())


RUNS = (
    Run(HTTP_AIO, "TestHttpAioClient", ASYNCHRONOUS),
    Run(HTTP_AIO, "TestHttpAioClient", "register_system_shared_memory register_cuda_shared_memory"),
    Run("L0_grpc/python_grpc_aio_test.py", "TestGrpcAioClient", ASYNCHRONOUS),
    Run(PLUGIN, "HTTPClientPluginTest", "server_is_live simple_infer"),
    Run(PLUGIN, "HTTPClientPluginAsyncTest", "server_is_live simple_infer"),
    Run("L0_http/http_test.py", "HttpTest", "content_encoding_unsupported_client"),
    Run("L0_http/http_test.py", "HttpTest", "inference_header_content_length_out_of_range"),
    Run("L0_http/http_input_size_limit_test.py", "InferSizeLimitTest", "no_leak_on_invalid_inference_header_length"),
    Run(STATUS, "ServerMetadataTest", "unknown_model unknown_model_version"),
    Run(STATUS, "ModelMetadataTest", "model_versions_deleted infer_stats_no_model_version"),
    Run(SHARED, "SharedMemoryTest", MEMORY, BOTH),
    Run(SHARED, "SharedMemoryTest", "client_shm_disabled_by_default", BOTH, memory=False),
    Run(FUZZER, "FuzzTest", "failures_from_db"),
)


def run_method(python: Path, script: Path, method: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run one method in its script's own folder, where it writes its results."""
    command = [str(python.absolute()), script.name, method]
    limit = FUZZ_SECONDS if FUZZER.endswith(script.name) else METHOD_SECONDS
    try:
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"holds": False, "said": f"not done after {limit} s", **sent_by_fuzzer(script.parent)}
    said = {} if done.returncode == 0 else {"said": "\n".join(done.stderr.strip().splitlines()[-6:])[-600:]}
    return {"holds": done.returncode == 0, **said, **sent_by_fuzzer(script.parent)}


def sent_by_fuzzer(folder: Path) -> dict[str, int]:
    """How many requests boofuzz sent, and how many it counts as failures, by its databases: one for each URL."""
    counts: dict[str, int] = {}
    for path in folder.glob("boofuzz-results/*.db"):
        with closing(sqlite3.connect(path)) as database:
            found = dict(database.execute("select type, count(*) from steps group by type").fetchall())
        sums = {"urls": 1, "requests": found.get("send", 0), "failures": found.get("fail", 0)}
        counts = {name: counts.get(name, 0) + value for name, value in sums.items()}
    return counts


def models(folder: Path) -> list[Bundle]:
    bundles = [bundle_of(replace(TINY, name="simple"), folder)]
    for name in MODELS:
        shutil.copytree(bundles[0].path, folder / f"{name}.vitx")
        write_json(folder / f"{name}.vitx" / MANIFEST, bundles[0].manifest.model_copy(update={"name": name}))
        bundles.append(Bundle.open(folder / f"{name}.vitx"))
    return bundles


@contextmanager
def server(bundles: Sequence[Bundle], log: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A server called triton on Triton's ports, as its methods ask; what it writes goes into `log`."""
    program, paths = "from vitx.cli import main; main()", [str(bundle.path) for bundle in bundles]
    command = [sys.executable, "-c", program, "serve", *paths]
    command += ["--allow-uncertified", "--server-id", "triton", "--port", str(HTTP), "--grpc-port", str(GRPC), *options]
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=file, text=True) as process:
        try:
            wait_until_ready("vitx", process, HTTP, "/v2/health/ready")
            yield process
        finally:
            process.terminate()


def run_all(runs: Sequence[Run], given: Path, python: Path, folder: Path) -> dict[str, Any]:
    """The outcome of each method by its script; `given`: Triton's qa, of which `folder` gets what is run."""
    report: dict[str, Any] = {}
    qa, log, bundles = folder / "qa", folder / "server.log", models(folder)
    for part in {"common", *(run.script.split("/")[0] for run in runs)}:
        shutil.copytree(given / part, qa / part)
    if (fuzzer := qa / FUZZER).is_file():  # it would write 10 GB of what it sends
        fuzzer.with_name("fuzz_results.csv").symlink_to(os.devnull)
    for memory in sorted({run.memory for run in runs}):
        of_memory = [run for run in runs if run.memory is memory]
        with server(bundles, log, *["--shared-memory"] * memory) as process:
            environment = os.environ | {"SERVER_PID": str(process.pid), "TRITON_SERVER_VERSION": __version__}
            for run, (test, protocol) in ((each, test) for each in of_memory for test in each.tests()):
                if memory:
                    forget = f"http://localhost:{HTTP}/v2/systemsharedmemory/unregister"
                    urllib.request.urlopen(urllib.request.Request(forget, method="POST")).close()
                found = run_method(python, qa / run.script, test, environment | {"CLIENT_TYPE": protocol})
                if process.poll() is not None or b"Traceback" in log.read_bytes():
                    found |= {"holds": False, "server": log.read_text()[-600:]}
                title = f"{test} {protocol}".strip()
                report.setdefault(run.script, {})[title] = found
                print(f"{run.script} {title}: {verdict(found)} {found.get('said', '')}", flush=True)
    return report


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--qa", required=True, type=Path)
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    arguments = parser.parse_args()
    names = arguments.scripts
    if unknown := [name for name in names if not any(name in run.script for run in RUNS)]:
        parser.error(
            f"no script with {', '.join(unknown)} in its name: {', '.join(sorted({run.script for run in RUNS}))}"
        )
    runs = [run for run in RUNS if (any(name in run.script for name in names) if names else run.script != FUZZER)]
    with tempfile.TemporaryDirectory() as folder:
        report = report_header() | run_all(runs, arguments.qa, arguments.python, Path(folder))
    command = ["python benchmarks/serve/triton_qa.py --qa FOLDER --python VENV/bin/python", *names]
    save_report(report, arguments.json, " ".join(command))
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
