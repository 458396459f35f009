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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.server_peers import TINY, bundle_of, wait_until_ready
from support.targets import all_hold, command_line, report_header, save_report, verdict
from vitx import __version__
from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.files import write_json

HTTP, GRPC, FUZZER = 8000, 8001, "L0_http_fuzz/fuzztest.py"
FUZZ_SECONDS, METHOD_SECONDS = 3600, 120
MODELS = ("onnx_int32_int8_int8", "onnx_zero_1_float32", "onnx_int32_int32_int32", "libtorch_int32_int32_int32")
ASYNCHRONOUS = (
    "is_server_live is_server_ready is_model_ready get_server_metadata get_model_metadata get_model_config "
    "get_inference_statistics get_system_shared_memory_status unregister_system_shared_memory "
    "get_cuda_shared_memory_status unregister_cuda_shared_memory"
)
# Script -> class -> its methods without "test_".
RUNS: dict[str, dict[str, str]] = {
    "L0_http/python_http_aio_test.py": {
        "TestHttpAioClient": f"{ASYNCHRONOUS} register_system_shared_memory register_cuda_shared_memory"
    },
    "L0_grpc/python_grpc_aio_test.py": {"TestGrpcAioClient": ASYNCHRONOUS},
    "L0_http/http_client_plugin_test.py": {
        "HTTPClientPluginTest": "server_is_live simple_infer",
        "HTTPClientPluginAsyncTest": "server_is_live simple_infer",
    },
    "L0_http/http_test.py": {
        "HttpTest": "content_encoding_unsupported_client inference_header_content_length_out_of_range"
    },
    "L0_http/http_input_size_limit_test.py": {"InferSizeLimitTest": "no_leak_on_invalid_inference_header_length"},
    "L0_server_status/server_status_test.py": {
        "ServerMetadataTest": "unknown_model unknown_model_version",
        "ModelMetadataTest": "model_versions_deleted infer_stats_no_model_version",
    },
    "L0_shared_memory/shared_memory_test.py": {
        "SharedMemoryTest": "invalid_create_shm valid_create_set_register unregister_before_register "
        "unregister_after_register reregister_after_register unregisterall register_out_of_bound "
        "register_reserved_names register_invalid_shm_key"
    },
    FUZZER: {"FuzzTest": "failures_from_db"},
}
# Run once more over gRPC, and once on a server without shared memory.
BOTH_PROTOCOLS, WITHOUT_MEMORY = "L0_shared_memory/shared_memory_test.py", "client_shm_disabled_by_default"


def cases(names: Sequence[str]) -> Iterator[tuple[bool, str, str, str]]:
    """Whether the server has shared memory, the script, the method, and the protocol it shall ask with."""
    for script, classes in RUNS.items():
        if not any(name in script for name in names or [script if script != FUZZER else "none"]):
            continue
        for protocol in ("http", "grpc") if script == BOTH_PROTOCOLS else ("http",):
            for test_class, methods in classes.items():
                yield from ((True, script, f"{test_class}.test_{method}", protocol) for method in methods.split())
            if script == BOTH_PROTOCOLS:
                yield False, script, f"SharedMemoryTest.test_{WITHOUT_MEMORY}", protocol


def run_method(python: Path, folder: Path, script: str, method: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run one method in the script's own folder, where it writes its results."""
    command = [str(python.absolute()), Path(script).name, method]
    limit = FUZZ_SECONDS if script == FUZZER else METHOD_SECONDS
    where = (folder / script).parent
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"holds": False, "said": f"not done after {limit} s"} | sent_by_fuzzer(where)
    found: dict[str, Any] = {"holds": done.returncode == 0}
    said = {} if found["holds"] else {"said": "\n".join(done.stderr.strip().splitlines()[-6:])[-600:]}
    return found | said | sent_by_fuzzer(where)


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
    command = [
        sys.executable,
        "-c",
        "from vitx.cli import main; main()",
        "serve",
        *(str(each.path) for each in bundles),
    ]
    command += ["--allow-uncertified", "--server-id", "triton", "--port", str(HTTP), "--grpc-port", str(GRPC), *options]
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=file, text=True) as process:
        try:
            wait_until_ready("vitx", process, HTTP, "/v2/health/ready")
            yield process
        finally:
            process.terminate()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--qa", required=True, type=Path)
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    arguments = parser.parse_args()
    report: dict[str, Any] = report_header()
    chosen = list(cases(arguments.scripts))
    with tempfile.TemporaryDirectory() as name:
        qa = Path(name) / "qa"
        for part in ("common", *{script.split("/")[0] for _, script, _, _ in chosen}):
            shutil.copytree(arguments.qa / part, qa / part)
        (qa / FUZZER).parent.mkdir(exist_ok=True)
        (qa / FUZZER).with_name("fuzz_results.csv").symlink_to(os.devnull)  # else 10 GB of what was sent
        bundles, log = models(Path(name)), Path(name) / "server.log"
        for memory in (True, False):
            with server(bundles, log, *["--shared-memory"] * memory) as process:
                environment = os.environ | {"SERVER_PID": str(process.pid), "TRITON_SERVER_VERSION": __version__}
                for _, script, method, protocol in (case for case in chosen if case[0] is memory):
                    if memory:
                        forget = f"http://localhost:{HTTP}/v2/systemsharedmemory/unregister"
                        urllib.request.urlopen(urllib.request.Request(forget, method="POST")).close()
                    asked = environment | {"CLIENT_TYPE": protocol}
                    found = run_method(arguments.python, qa, script, method, asked)
                    title = f"{method} {protocol}" if script == BOTH_PROTOCOLS else method
                    report.setdefault(script, {})[title] = found
                    print(f"{script} {title}: {verdict(found)} {found.get('said', '')}", flush=True)
                alive, tracebacks = process.poll() is None, log.read_bytes().count(b"Traceback")
                report["server"] = {"alive": alive, "tracebacks": tracebacks, "holds": alive and not tracebacks}
    save_report(report, arguments.json, "python benchmarks/serve/triton_qa.py --qa FOLDER --python VENV/bin/python")
    return 0 if all_hold(report) else 1


if __name__ == "__main__":
    raise SystemExit(main())
