"""Every runtime that a CPU has computes the same function, and each refuses what it cannot do."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bundle_fixture import (
    IMAGE_SIZE,
    LABELS,
    PREPROCESSING,
    Float32Array,
    NumpySession,
    int8_sum_graph,
    write_bundle,
)
from cli_fixture import Vitx
from vitx.core.bundle import MANIFEST, Bundle, FileEntry
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.machine import Gpu, local_gpus
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.export.graph.execution import open_session
from vitx.runtimes import load_session
from vitx.runtimes.instances import load_instances
from vitx.runtimes.onnxruntime import OnnxRuntimeSession, compute_elsewhere, tensorrt_options
from vitx.runtimes.requirements import RUNTIMES, why_unusable
from vitx.runtimes.session import Session
from vitx.serve.models.loading import load_warm
from vitx.serve.options import ServeOptions

needs_no_gpu = pytest.mark.skipif(bool(local_gpus()), reason="this machine has a GPU")


def name_files(bundle: Bundle, *added: Path) -> Bundle:
    """Name the graph, as it is now, and these files in the manifest."""
    entries = {
        path.relative_to(bundle.path).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
        for path in (bundle.model_path, *added)
    }
    files = {**bundle.manifest.files, **entries}
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": files}))
    return Bundle.open(bundle.path)


@pytest.fixture(scope="module")
def bundle_with_ir(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    openvino = pytest.importorskip("openvino", reason="an optional target")
    bundle = write_bundle(tmp_path_factory.mktemp("ir") / "tiny.vitx")
    ir = bundle.path / "openvino" / "model.xml"
    openvino.save_model(openvino.convert_model(str(bundle.model_path)), str(ir), compress_to_fp16=False)
    return name_files(bundle, ir, ir.with_suffix(".bin"))


@pytest.fixture(scope="module", params=["onnxruntime", "onnxruntime-cpu", "openvino", "torch", "torch-compile"])
def session(request: pytest.FixtureRequest, certified_original: Bundle, tiny_run: RunFolder) -> Session:
    name = request.param
    if name == "openvino":
        return load_session(request.getfixturevalue("bundle_with_ir"), name, device="cpu", threads=1)
    if RUNTIMES[name].source == "bundle":
        return load_session(certified_original, name, device="cpu", threads=1)
    if why_unusable(name):
        pytest.skip(why_unusable(name))
    from vitx.runtimes.torch import load_run

    return load_run(tiny_run, device="cpu", compiled=name == "torch-compile")[0]


def test_runtime_equals_the_independent_function(session: Session, colours: ImageSet, reference: NumpySession) -> None:
    images = next(colours.batches(PREPROCESSING, 64))
    for batch in (images, images[:1], images[::-1], images[::3]):
        logits = session.infer(batch)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, reference.infer(batch), atol=1e-5)


def test_description_names_what_was_used(session: Session) -> None:
    description = session.describe()
    assert set(description) == {"runtime", "version", "provider", "precision", "threads"}
    assert description["provider"] in ("CPUExecutionProvider", "CPU", "cpu")
    assert description["runtime"] in RUNTIMES
    assert description["version"][0].isdigit()


def test_session_serves_several_threads(session: Session, colours: ImageSet, reference: NumpySession) -> None:
    images = next(colours.batches(PREPROCESSING, 8))
    found: list[Float32Array] = []
    threads = [Thread(target=lambda: found.extend(session.infer(images) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for logits in found:
        np.testing.assert_allclose(logits, reference.infer(images), atol=1e-5)


def test_images_of_another_shape_or_dtype_are_refused(certified_original: Bundle, bundle_with_ir: Bundle) -> None:
    loaded = [load_session(certified_original, device="cpu", threads=1), load_session(bundle_with_ir, "openvino")]
    wrong: list[Any] = [
        np.zeros((1, 8, 8, 3), dtype=np.uint8),
        np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8),
        np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.float32),
        # Of no image at all ONNX Runtime would divide by 0 in some graphs, and end the process with SIGFPE.
        np.zeros((0, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8),
        np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8).tolist(),
        None,
    ]
    for images in wrong:
        for session in loaded:
            with pytest.raises(InputError, match=r"expected uint8 \(N, 16, 16, 3\)"):
                session.infer(images)


@pytest.mark.parametrize("threads", [0, -1, 1025, 1.5, 1.0, np.float64(2), True, "2"])
def test_a_number_of_threads_that_cannot_be_is_refused(certified_original: Bundle, threads: Any) -> None:
    with pytest.raises(InputError, match=f"threads={threads}: expected a whole number from 1 to 1024, or None"):
        load_session(certified_original, device="cpu", threads=threads)


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that takes any bytes for a name")
def test_a_path_that_is_not_utf8_is_refused_by_name(certified_original: Bundle, tmp_path: Path) -> None:
    """ONNX Runtime's own error is a TypeError about its constructors."""
    bundle = Bundle.open(shutil.copytree(certified_original.path, tmp_path / "caf\udce9.vitx"))
    with pytest.raises(
        InputError, match=r"^the runtimes take no path that is not UTF-8, as '.*caf\udce9\.vitx': rename"
    ):
        load_session(bundle, device="cpu")


def test_numpys_whole_numbers_are_numbers_of_threads(bundle_with_ir: Bundle) -> None:
    threads: Any = np.int64(1)
    for runtime in ("onnxruntime-cpu", "openvino"):
        with load_session(bundle_with_ir, runtime, threads=threads) as session:
            assert session.infer(np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)).shape[0] == 1


def test_unknown_runtime_and_device_are_refused(certified_original: Bundle) -> None:
    with pytest.raises(InputError, match=r"unknown runtime 'onnx'.*known: onnxruntime, onnxruntime-cpu, .*torch-comp"):
        load_session(certified_original, "onnx")
    with pytest.raises(InputError, match=r"unknown device 'gpu': did you mean cpu\? known: auto, cpu, cuda"):
        load_session(certified_original, device="gpu")


@needs_no_gpu
def test_gpu_that_is_not_there_is_refused(certified_original: Bundle, tiny_run: RunFolder) -> None:
    from vitx.runtimes.torch import load_run

    with pytest.raises(EnvironmentMissing, match="the NVIDIA driver offers no GPU; choose --device cpu"):
        load_session(certified_original, device="cuda")
    with pytest.raises(EnvironmentMissing, match="torch sees no GPU; choose --device cpu"):
        load_run(tiny_run, device="cuda")


def test_unknown_checkpoint_is_refused(tiny_run: RunFolder) -> None:
    from vitx.runtimes.torch import load_run

    with pytest.raises(InputError, match=r"unknown checkpoint 'newest'.*known: best, best-raw, last, last-raw"):
        load_run(tiny_run, "newest")


def test_graph_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "broken.vitx")
    bundle.model_path.write_bytes(b"not a graph")
    entry = FileEntry(sha256=sha256_file(bundle.model_path), size=11)
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": {"model.onnx": entry}}))
    with pytest.raises(InputError, match=r"ONNX Runtime cannot load .*model\.onnx"):
        load_session(Bundle.open(bundle.path), device="cpu")


def test_manifest_that_names_another_tensor_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "renamed.vitx")
    tensor = bundle.manifest.output.model_copy(update={"name": "scores"})
    renamed = Bundle(bundle.path, bundle.manifest.model_copy(update={"output": tensor}))
    with pytest.raises(InputError, match="the manifest names the output 'scores', but the graph has logits"):
        load_session(renamed, device="cpu")


@pytest.mark.parametrize("name", [name for name, runtime in RUNTIMES.items() if runtime.source == "run"])
def test_a_runtime_of_runs_takes_no_bundle(certified_original: Bundle, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} runs a run's checkpoint and not a bundle: .*onnxruntime-cpu"):
        load_session(certified_original, name)


@pytest.mark.parametrize(("name", "device"), [("onnxruntime-cpu", "cuda"), ("openvino", "cuda")])
def test_device_and_runtime_may_not_contradict(certified_original: Bundle, name: str, device: str) -> None:
    with pytest.raises(InputError, match=f"the runtime {name} runs on cpu, and device {device} was asked for"):
        load_session(certified_original, name, device=device)


@needs_no_gpu
@pytest.mark.parametrize("name", [name for name, runtime in RUNTIMES.items() if runtime.device == "cuda"])
def test_runtimes_of_a_gpu_are_refused_without_one(certified_original: Bundle, name: str) -> None:
    with pytest.raises(EnvironmentMissing, match=f"{name} needs an NVIDIA GPU, and the driver offers none") as caught:
        load_session(certified_original, name)
    assert caught.value.exit_code == 3


def test_a_package_that_is_missing_is_named(certified_original: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.runtimes.requirements.find_spec", lambda name: None)
    monkeypatch.setattr("vitx.runtimes.requirements.local_gpus", lambda: (Gpu("A", "sm89"),))
    with pytest.raises(EnvironmentMissing, match=r"needs the package openvino, .*pip install 'vitx\[openvino\]'"):
        load_session(certified_original, "openvino")
    with pytest.raises(EnvironmentMissing, match=r"tensorrt or tensorrt_lean, .*pip install 'vitx\[trt\]'"):
        load_session(certified_original, "tensorrt")


def test_files_that_were_uninstalled_with_the_other_onnxruntime_are_no_traceback(
    vitx: Vitx, certified_original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip uninstall onnxruntime beside onnxruntime-gpu leaves folders, which Python takes for a package."""
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    monkeypatch.setattr("vitx.core.machine.find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    monkeypatch.setattr("vitx.runtimes.requirements.local_gpus", lambda: (Gpu("A", "sm89"),))
    for name in ("onnxruntime", "onnxruntime-cpu", "onnxruntime-int8", "onnxruntime-cuda", "onnxruntime-tensorrt"):
        code, _, error = vitx("bench", certified_original.path, "--runtime", name, "-q")
        assert code == 3, name
        assert re.search(
            r"onnxruntime are missing: pip install --force-reinstall --no-deps onnxruntime(-gpu)?\n", error
        )
        assert "missing: pip install --force-reinstall" in why_unusable(name)
    with pytest.raises(EnvironmentMissing, match="files of the package onnxruntime are missing"):
        open_session(certified_original.model_path.read_bytes())
    # What serve and predict import before they load a session must not fail first.
    imports = "import sys, vitx.parity.executables.unlisted_embedding; print('onnxruntime' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"


def test_compilation_needs_a_compiler(tiny_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitx.runtimes.torch import load_run

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentMissing, match="'no-such-compiler' is not there: install it") as caught:
        load_run(tiny_run, device="cpu", compiled=True)
    assert caught.value.exit_code == 3
    assert load_run(tiny_run, device="cpu")[0].describe()["runtime"] == "torch"


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("gone", r"InvalidCxxCompiler: No working C\+\+ compiler .*gone.*"), ("true", r"\w+: \S.*")],
)
def test_a_compiler_that_fails_is_no_traceback(
    tiny_run: RunFolder, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    import torch

    from vitx.runtimes.torch import load_run

    true = shutil.which("true")
    assert true is not None
    monkeypatch.setenv("CXX", true)
    torch.compiler.reset()
    # Not by monkeypatch, which deletes the setting at its end.
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, compiler)}),
        pytest.raises(EnvironmentMissing, match=rf"compile the network \({reason}\): choose torch"),
    ):
        load_run(tiny_run, device="cpu", compiled=True)


def test_a_bundle_without_ir_is_refused(certified_original: Bundle, bundle_with_ir: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no OpenVINO IR: export it again with --openvino"):
        load_session(certified_original, "openvino")
    broken = Bundle.open(shutil.copytree(bundle_with_ir.path, tmp_path / "broken.vitx"))
    ir = broken.path / "openvino" / "model.xml"
    ir.write_text("<net>")
    with pytest.raises(InputError, match=r"OpenVINO cannot load .*model\.xml"):
        load_session(name_files(broken, ir), "openvino")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads to cores")
def test_openvino_sessions_of_one_thread_are_bound_to_no_core(bundle_with_ir: Bundle) -> None:
    """Bound, each of them would compute on the first core. Sessions of other tests may have left bound threads."""
    others = set(os.listdir("/proc/self/task"))
    session = load_session(bundle_with_ir, "openvino", threads=1)
    images = np.zeros((4096, 16, 16, 3), np.uint8)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [session.infer(images) for _ in range(20)])
        fewest = min(len(cores) for _ in iter(running.done, True) for cores in cores_of_threads(others))
    assert fewest == len(os.sched_getaffinity(0))


def cores_of_threads(others: set[str]) -> Iterator[set[int]]:
    for task in set(os.listdir("/proc/self/task")) - others:
        with suppress(ProcessLookupError):
            yield os.sched_getaffinity(int(task))


def test_instances_in_openvino_have_a_session_each(bundle_with_ir: Bundle) -> None:
    """One compiled for one thread has one stream, in which the batches of several callers run one after the other."""
    with load_instances(lambda: load_session(bundle_with_ir, "openvino", threads=1), 2, 1) as served:
        assert served.describe()["sessions"] == 2
    with load_instances(lambda: load_session(bundle_with_ir, "onnxruntime-cpu", threads=1), 2, 1) as served:
        assert "sessions" not in served.describe()


def test_a_session_does_not_depend_on_its_files_any_more(tmp_path: Path, bundle_with_ir: Bundle) -> None:
    """They may be overwritten in place, as `cp` and `rsync --inplace` do it, under a server that has verified them."""
    bundle = Bundle.open(shutil.copytree(bundle_with_ir.path, tmp_path / "tiny.vitx"))
    images = np.full((2, IMAGE_SIZE, IMAGE_SIZE, 3), 7, np.uint8)
    loaded = [load_session(bundle, name, device="cpu", threads=1) for name in ("openvino", "onnxruntime-cpu")]
    expected = [session.infer(images) for session in loaded]
    for file in filter(Path.is_file, bundle.path.rglob("*")):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    for session, logits in zip(loaded, expected, strict=True):
        np.testing.assert_array_equal(session.infer(images), logits)
    if sys.platform == "linux":
        assert str(bundle.path) not in Path("/proc/self/maps").read_text()  # what is cut ends the process


def test_ir_equals_the_graph_in_onnx_runtime(bundle_with_ir: Bundle, colours: ImageSet) -> None:
    images = next(colours.batches(PREPROCESSING, 64))
    expected = load_session(bundle_with_ir, "onnxruntime-cpu", threads=1).infer(images)
    session = load_session(bundle_with_ir, "openvino", threads=1)
    np.testing.assert_allclose(session.infer(images), expected, atol=1e-4)
    assert session.describe()["threads"] == 1


def test_bf16_on_a_cpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "low.vitx")
    size = IMAGE_SIZE * IMAGE_SIZE * 3
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", IMAGE_SIZE, IMAGE_SIZE, 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", len(LABELS)])
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [size, len(LABELS)], np.ones(size * len(LABELS)))
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["low"], to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["low", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["logits"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(nodes, "low", [images], [logits], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), bundle.model_path)
    lowered = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": "bf16"}))
    with pytest.raises(
        EnvironmentMissing, match=r"no bf16 kernels for a CPU .*: run the fp32 or fp16 bundle"
    ) as caught:
        OnnxRuntimeSession(lowered, device="cpu")
    assert caught.value.exit_code == 3
    with pytest.raises(InputError, match="ONNX Runtime cannot load"):
        OnnxRuntimeSession(bundle, device="cpu")


def test_int8_sums_are_exact_on_every_processor(tmp_path: Path) -> None:
    """Without VNNI, ONNX Runtime's default would give half here: pairs of products saturate at 32,767."""
    bundle = write_bundle(tmp_path / "low.vitx")
    onnx.save(int8_sum_graph(), bundle.model_path)
    images = np.full((3, IMAGE_SIZE, IMAGE_SIZE, 3), 255, np.uint8)
    found = OnnxRuntimeSession(bundle, device="cpu").infer(images)
    np.testing.assert_allclose(found, 255.0 * 768, rtol=1e-6)


def test_nodes_that_fell_back_are_seen(tmp_path: Path) -> None:
    """A session that computes on the CPU, asked whether all of it ran elsewhere."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    path = write_bundle(tmp_path / "b.vitx").model_path
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert compute_elsewhere(session, "CUDAExecutionProvider") == ("Gemm",)
    assert compute_elsewhere(session, "CPUExecutionProvider") == ()


@needs_no_gpu
@pytest.mark.parametrize(
    ("tensorrt", "provider"), [(False, "CUDAExecutionProvider"), (True, "TensorrtExecutionProvider")]
)
def test_a_provider_that_falls_back_is_an_error(
    certified_original: Bundle, monkeypatch: pytest.MonkeyPatch, tensorrt: bool, provider: str, tmp_path: Path
) -> None:
    """As on a machine whose driver offers a GPU and whose provider cannot use it."""
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        pytest.skip(f"this ONNX Runtime has no {provider}")
    monkeypatch.setattr("vitx.runtimes.onnxruntime.local_gpus", lambda: (Gpu("A", "sm89"),))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(EnvironmentMissing, match=provider) as caught:
        OnnxRuntimeSession(certified_original, device="cuda", tensorrt=tensorrt, engine_cache=tmp_path)
    assert caught.value.exit_code == 3


def test_options_of_the_tensorrt_provider(tmp_path: Path, certified_original: Bundle) -> None:
    name, options = tensorrt_options("images", (224, 224, 3), "fp16", tmp_path)
    assert name == "TensorrtExecutionProvider"
    assert options["trt_profile_max_shapes"] == "images:128x224x224x3"
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path)
    assert options["trt_fp16_enable"] == "1"
    assert "trt_fp16_enable" not in tensorrt_options("images", (224, 224, 3), "fp32", tmp_path)[1]


def test_verbs_take_a_runtime(
    vitx: Vitx, bundle_with_ir: Bundle, tiny_run: RunFolder, colours_folder: Path, tmp_path: Path
) -> None:
    chosen = ("--runtime", "openvino", "--threads", 1, "--json", "--quiet")
    out = tmp_path / "predictions"
    code, printed, _ = vitx(
        "predict", bundle_with_ir.path, colours_folder / "val", "--out", out, "--allow-uncertified", *chosen
    )
    assert code == 0
    assert json.loads(printed)["runtime"]["runtime"] == "openvino"
    code, printed, _ = vitx("eval", bundle_with_ir.path, "--data", colours_folder, *chosen)
    assert code == 0
    assert json.loads(printed)["top1"] > 0.9
    code, _, error = vitx("eval", tiny_run.path, *chosen)
    assert code == 2
    assert "runtime openvino: a run's checkpoint runs in torch" in error
    with ExitStack() as opened:
        batching = ServeOptions(max_batch=4).batching
        session = load_warm(bundle_with_ir, batching, opened, device="auto", threads=1, runtime="openvino")
        assert session.describe()["runtime"] == "openvino"


@needs_no_gpu
def test_a_server_does_not_start_on_a_runtime_that_is_not_there(vitx: Vitx, bundle_with_ir: Bundle) -> None:
    code, _, error = vitx("serve", bundle_with_ir.path, "--port", 0, "--allow-uncertified", "--runtime", "tensorrt-rtx")
    assert code == 3
    assert "the runtime tensorrt-rtx needs an NVIDIA GPU" in error


@needs_no_gpu
def test_the_doctor_lists_every_runtime(vitx: Vitx) -> None:
    code, out, _ = vitx("doctor", "--json")
    runtimes = json.loads(out)["runtimes"]
    assert code == 0
    assert list(runtimes) == list(RUNTIMES)
    assert runtimes["onnxruntime-cpu"] == {"usable": True, "reason": ""}
    assert not runtimes["tensorrt"]["usable"]
    assert "the driver offers none" in runtimes["tensorrt"]["reason"]
    code, out, _ = vitx("doctor")
    assert code == 0
    assert "onnxruntime-tensorrt" in out


CLOSED_ELSEWHERE = """
import signal, sys, threading
from vitx.core.bundle import Bundle
from vitx.runtimes import load_session

for _ in range(2):
    session = load_session(Bundle.open(sys.argv[1]), "openvino", threads=1)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join()
    del session, closing
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
signal.raise_signal(signal.SIGTERM)
print(received == [signal.SIGTERM])
"""


def test_a_signal_after_a_model_was_closed_by_another_thread(bundle_with_ir: Bundle) -> None:
    """As a server does. On processors with AMX OpenVINO gives the thread that loads a stack for signals of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_ELSEWHERE, str(bundle_with_ir.path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
