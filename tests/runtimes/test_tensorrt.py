"""TensorRT plans in service: what is decided before a GPU is touched, and the calls on fakes. No plan is run."""

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, NumpySession, write_bundle
from gpu_fixture import OPTIONS, PROFILES, FakeTensorRT, HostMemoryCuda, add_plan, build_driver
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.machine import Gpu, local_gpus
from vitx.core.tensorrt_plan import Flavor, InstalledLibrary, Profile, installed_library
from vitx.runtimes import SessionClosed, load_session
from vitx.runtimes.cuda import CudaError, CudaStream, array_bytes
from vitx.runtimes.plan_choice import Chunk, find_plan, plans_of, split_batch
from vitx.runtimes.tensorrt import TensorRTSession

RTX: Flavor = "tensorrt-rtx"
needs_no_gpu = pytest.mark.skipif(bool(local_gpus()), reason="tells what happens on a machine without a GPU")


def random_images(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


@pytest.mark.parametrize("images", [0, 1, 2, 8, 9, 31, 32, 33, 64, 65, 100])
def test_every_image_is_run_once_in_a_profile_that_takes_it(images: int) -> None:
    chunks = split_batch(images, PROFILES)
    covered = [index for chunk in chunks for index in range(chunk.start, chunk.stop)]
    assert covered == list(range(images))
    assert len(chunks) == -(-images // 32)
    for chunk in chunks:
        profile = PROFILES[chunk.profile]
        assert chunk.rows == chunk.stop - chunk.start
        assert profile.minimum <= chunk.rows <= profile.maximum


def test_a_batch_between_two_profiles_is_filled_up() -> None:
    gap = (Profile(minimum=8, optimum=8, maximum=16), Profile(minimum=1, optimum=1, maximum=2))
    assert split_batch(5, gap) == (Chunk(0, 5, 8, 0),)
    assert split_batch(18, gap) == (Chunk(0, 16, 16, 0), Chunk(16, 18, 2, 1))


def test_of_two_profiles_the_nearer_optimum_wins() -> None:
    both = (Profile(minimum=1, optimum=32, maximum=32), Profile(minimum=1, optimum=4, maximum=32))
    assert [split_batch(images, both)[0].profile for images in (1, 4, 17, 18, 19, 32)] == [1, 1, 1, 0, 0, 0]


def test_sizes_of_buffers() -> None:
    assert array_bytes((128, 224, 224, 3), np.uint8) == 128 * 224 * 224 * 3
    assert array_bytes((100_000, 1024, 1024, 3), np.float32) == 1_258_291_200_000  # no 32-bit number, nor a wrapped one
    assert array_bytes((0, 10), np.float32) == 0


def test_the_plan_of_this_gpu_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vitx.core.tensorrt_plan.installed_library", lambda module: InstalledLibrary(module, "10.16.1.11")
    )
    bundle = add_plan(write_bundle(tmp_path / "b.vitx"), "tensorrt", name="ada")
    bundle = add_plan(bundle, "tensorrt", name="blackwell", architectures=("sm120",))
    bundle = add_plan(bundle, "tensorrt-rtx", version="10.16.1.11", architectures=("sm120",))
    assert find_plan(bundle, "tensorrt", "sm89")[0].name == "ada.plan"
    assert find_plan(bundle, "tensorrt", "sm120")[0].name == "blackwell.plan"
    assert find_plan(bundle, "tensorrt-rtx", "sm120")[1].flavor == "tensorrt-rtx"
    with pytest.raises(CheckFailed, match="was built for sm89 and this GPU is sm75"):
        find_plan(bundle, "tensorrt", "sm75")


def test_plans_that_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vitx.core.tensorrt_plan.installed_library", lambda module: InstalledLibrary(module, "10.16.1.11")
    )
    bare = write_bundle(tmp_path / "bare.vitx")
    with pytest.raises(InputError, match="has no plan of tensorrt: build one with vitx export --trt,"):
        find_plan(bare, "tensorrt", "sm89")
    stray = Bundle(bare.path, bare.manifest)
    add_plan(bare, "tensorrt")
    with pytest.raises(InputError, match="has no plan of tensorrt"):
        find_plan(stray, "tensorrt", "sm89")  # a manifest, and so a certificate, that does not know it
    stale = add_plan(write_bundle(tmp_path / "stale.vitx"), "tensorrt", onnx_sha256="1" * 64)
    with pytest.raises(CheckFailed, match=r"was not built from the graph of .*: export it again"):
        find_plan(stale, "tensorrt", "sm89")


def test_a_plan_beside_the_sidecar_of_another_is_named_without_a_gpu(tmp_path: Path) -> None:
    swapped = add_plan(write_bundle(tmp_path / "swapped.vitx"), "tensorrt-rtx", sha256="2" * 64)
    with pytest.raises(CheckFailed, match=r"tensorrt-rtx\.plan' is not the plan its sidecar describes: build it again"):
        plans_of(swapped)


def test_the_bindings_have_every_name_that_is_used() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="NVIDIA's bindings are not installed")
    used = ("StreamCreate", "StreamDestroy", "StreamSynchronize", "HostAlloc", "HostAllocDefault", "FreeHost", "Malloc")
    for name in (*used, "Free", "MemcpyAsync", "GetErrorString"):
        assert hasattr(runtime, f"cuda{name}"), name
    assert {"cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"} <= set(runtime.cudaMemcpyKind.__members__)
    assert "cudaSuccess" in runtime.cudaError_t.__members__


@needs_no_gpu
def test_a_cuda_error_is_named() -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="NVIDIA's bindings are not installed")
    with pytest.raises(CudaError, match=r"cudaStreamCreate failed: cudaError\w+ \(.*driver") as caught:
        CudaStream()
    assert caught.value.exit_code == 3


LOAD = """
import sys
from vitx.core.bundle import Bundle
from vitx.core.errors import VitxError
from vitx.runtimes import load_session
from vitx.runtimes.tensorrt import TensorRTSession
for load in (lambda bundle: load_session(bundle, sys.argv[2]), lambda bundle: TensorRTSession(bundle, sys.argv[2])):
    try:
        load(Bundle.open(sys.argv[1]))
    except VitxError as error:
        print(error.exit_code, "imported" if sys.argv[3] in sys.modules else "untouched", error)
"""


def load_in_child(bundle: Bundle, flavor: str, module: str, environment: dict[str, str]) -> list[str]:
    """What loading the plan says, by name and directly, in a process that must not crash."""
    command = [sys.executable, "-c", LOAD, str(bundle.path), flavor, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert len(done.stdout.splitlines()) == 2, done.stderr
    return done.stdout.splitlines()


@needs_no_gpu
def test_without_a_gpu_nothing_of_tensorrt_is_touched(tmp_path: Path) -> None:
    bundle = add_plan(write_bundle(tmp_path / "b.vitx"), "tensorrt-rtx", version="1.7.1.116")
    by_name, direct = load_in_child(bundle, "tensorrt-rtx", "tensorrt_rtx", dict(os.environ))
    assert by_name.startswith("3 untouched the runtime tensorrt-rtx needs an NVIDIA GPU, and the driver offers none")
    assert direct.startswith("3 untouched a plan of tensorrt-rtx runs on an NVIDIA GPU, and the driver offers none")


@needs_no_gpu
def test_what_a_driver_decides_is_decided_before_a_library_is_imported(tmp_path: Path) -> None:
    installed = installed_library("tensorrt_rtx")
    if installed is None:
        pytest.skip("TensorRT for RTX is not installed")
    environment = build_driver(tmp_path)
    here, flavor = installed.version, RTX
    ada = add_plan(write_bundle(tmp_path / "ada.vitx"), flavor, version=here, architectures=("sm86", "sm89"))
    for line in load_in_child(ada, "tensorrt-rtx", "tensorrt_rtx", environment):
        assert line.startswith("1 untouched")
        assert line.endswith("was built for sm86, sm89 and this GPU is sm90: build it for this one")
    old = add_plan(write_bundle(tmp_path / "old.vitx"), flavor, version="1.6.0.1", architectures=("sm90",))
    for line in load_in_child(old, "tensorrt-rtx", "tensorrt_rtx", environment):
        assert line.startswith("1 untouched")
        assert "was built with tensorrt-rtx 1.6.0.1" in line
    # The right plan: CUDA itself finds that this driver can do nothing, before TensorRT makes its runtime.
    right = add_plan(write_bundle(tmp_path / "right.vitx"), flavor, version=here, architectures=("sm90",))
    for line in load_in_child(right, "tensorrt-rtx", "tensorrt_rtx", environment):
        assert line.startswith("3 imported cudaStreamCreate failed: cudaError")


LEAN = "11.4.0.106"


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real lean runtime."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the wheels that are tested are of Linux on x86-64")
    folder = tmp_path_factory.mktemp("lean")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=10", "-d", str(folder)]
    command += [f"tensorrt-lean-cu13-{part}=={LEAN}" for part in ("bindings", "libs")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"tensorrt-lean-cu13 {LEAN} cannot be downloaded here")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    (folder / "tensorrt_lean.py").write_text("from tensorrt_lean_bindings import *\n")
    (folder / f"tensorrt_lean-{LEAN}.dist-info").mkdir()
    (folder / f"tensorrt_lean-{LEAN}.dist-info" / "METADATA").write_text(f"Name: tensorrt-lean\nVersion: {LEAN}\n")
    return folder


@needs_no_gpu
def test_the_probe_prevents_the_crash_of_the_lean_runtime(lean: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(lean)}
    crash = "import tensorrt_lean as trt; trt.Runtime(trt.Logger())"
    done = subprocess.run([sys.executable, "-c", crash], env=environment, capture_output=True, check=False)
    assert done.returncode < 0  # SIGSEGV: what the probe is there for
    options = OPTIONS.model_copy(update={"version_compatible": True})
    bundle = add_plan(
        write_bundle(tmp_path / "b.vitx"), "tensorrt", version="10.16.1.11", options=options, architectures=("sm90",)
    )
    for line in load_in_child(bundle, "tensorrt", "tensorrt_lean", environment):
        assert line.startswith("3 untouched")
    # With a driver that only says who it is, the lean runtime is chosen, imported, and stopped by CUDA's own error.
    environment = {**build_driver(tmp_path), "PYTHONPATH": str(lean)}
    for line in load_in_child(bundle, "tensorrt", "tensorrt_lean", environment):
        assert line.startswith("3 imported cudaStreamCreate failed: cudaError")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> HostMemoryCuda:
    cuda = HostMemoryCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    return cuda


@pytest.fixture
def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, cuda: HostMemoryCuda) -> FakeTensorRT:
    fake = FakeTensorRT(cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr(
        "vitx.core.tensorrt_plan.installed_library", lambda module: InstalledLibrary(module, "10.16.1.11")
    )
    monkeypatch.setattr(importlib.import_module("vitx.runtimes.tensorrt"), "local_gpus", lambda: (GPU,))
    return fake


GPU = Gpu("Fake GPU", "sm89")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return add_plan(write_bundle(tmp_path / "b.vitx"), "tensorrt")


def test_batches_go_through_their_profiles(bundle: Bundle, fake_tensorrt: FakeTensorRT) -> None:
    session = TensorRTSession(bundle, "tensorrt")
    assert session.profiles == PROFILES
    images = random_images(75)
    np.testing.assert_array_equal(session.infer(images), NumpySession().infer(images))
    assert fake_tensorrt.ran == [(2, 32), (2, 32), (2, 11)]
    for count in (1, 5):
        np.testing.assert_array_equal(session.infer(images[:count]), NumpySession().infer(images[:count]))
    assert fake_tensorrt.ran[3:] == [(0, 1), (1, 5)]
    with pytest.raises(InputError, match=r"expected uint8 \(N, 16, 16, 3\)"):
        session.infer(images.astype(np.float32))
    assert fake_tensorrt.runtime.engine_host_code_allowed is False


def test_concurrent_callers_get_their_own_logits(bundle: Bundle, fake_tensorrt: FakeTensorRT) -> None:
    session = TensorRTSession(bundle, "tensorrt")
    wrong: list[int] = []

    def call(seed: int) -> None:
        images = random_images(3 + seed, seed)
        for _ in range(20):
            if not np.array_equal(session.infer(images), NumpySession().infer(images)):
                wrong.append(seed)

    threads = [Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_close_frees_the_memory(bundle: Bundle, fake_tensorrt: FakeTensorRT, cuda: HostMemoryCuda) -> None:
    session = TensorRTSession(bundle, "tensorrt")
    assert sorted(len(memory) for memory in cuda.memory.values()) == [32 * 4 * 4] * 2 + [32 * 16 * 16 * 3] * 2
    session.close()
    assert (cuda.memory, cuda.streams) == ({}, [])
    with pytest.raises(SessionClosed):
        session.infer(random_images(1))
    assert session.describe()["provider"] == "Fake GPU (sm89)"


def test_a_description_tells_what_runs(bundle: Bundle, fake_tensorrt: FakeTensorRT) -> None:
    description = TensorRTSession(bundle, "tensorrt").describe()
    assert description == {
        "runtime": "tensorrt",
        "version": "10.16.1.11",
        "provider": "Fake GPU (sm89)",
        "precision": "fp32",
        "threads": "GPU",
        "library": "tensorrt",
        "plan": "tensorrt.plan",
        "profiles": ["1..1 (best at 1)", "2..8 (best at 8)", "9..32 (best at 32)"],
    }


def test_an_engine_that_is_not_what_its_sidecar_says(bundle: Bundle, fake_tensorrt: FakeTensorRT) -> None:
    fake_tensorrt.profiles = (*PROFILES[:2], Profile(minimum=9, optimum=16, maximum=16))
    with pytest.raises(CheckFailed, match=r"profile 2 of .* is \(9, 16, 16\), and its sidecar says 9\.\.32"):
        TensorRTSession(bundle, "tensorrt")
    fake_tensorrt.engine.num_optimization_profiles = 1
    with pytest.raises(CheckFailed, match="has 1 profiles, and its sidecar names 3"):
        TensorRTSession(bundle, "tensorrt")
    fake_tensorrt.output = SimpleNamespace(name="HALF")
    with pytest.raises(CheckFailed, match=r"has the tensors images UINT8, logits HALF, and the manifest images"):
        TensorRTSession(bundle, "tensorrt")
    fake_tensorrt.refuses = "plan"
    with pytest.raises(CheckFailed, match=r"tensorrt 10\.16\.1\.11 could not open .*: it gave no reason$"):
        TensorRTSession(bundle, "tensorrt")


@pytest.mark.parametrize(
    ("refused", "error", "said"),
    [
        ("plan", CheckFailed, r"tensorrt 10\.16\.1\.11 could not open .*tensorrt\.plan'"),
        ("context", EnvironmentMissing, r"could not make a context for .*tensorrt\.plan'"),
        *((name, EnvironmentMissing, "cannot use profile 0 of ") for name in ("profile", "images", "logits", "shape")),
    ],
)
def test_what_tensorrt_refuses_is_told_with_its_errors(
    bundle: Bundle, fake_tensorrt: FakeTensorRT, cuda: HostMemoryCuda, refused: str, error: Any, said: str
) -> None:
    fake_tensorrt.refuses = refused
    fake_tensorrt.errors = (("INFO", "hello"), ("ERROR", " no memory\n"), ("INTERNAL_ERROR", "no kernel"))
    with pytest.raises(error, match=f"{said}.*: no memory; no kernel$"):
        TensorRTSession(bundle, "tensorrt")


@pytest.mark.parametrize("refused", ["shape", "execute"])
def test_a_batch_that_fails_is_one_error_and_the_next_one_runs(
    bundle: Bundle, fake_tensorrt: FakeTensorRT, refused: str
) -> None:
    session, images = TensorRTSession(bundle, "tensorrt"), random_images(5)
    fake_tensorrt.refuses = refused
    with pytest.raises(CheckFailed, match=r"^the plan of 'tiny' fails on a batch of 5: it gave no reason$"):
        session.infer(images)
    fake_tensorrt.refuses = ""
    np.testing.assert_array_equal(session.infer(images), NumpySession().infer(images))


def test_a_plan_of_other_images_or_classes_is_refused(bundle: Bundle, fake_tensorrt: FakeTensorRT) -> None:
    """What it writes would not fit the buffer of the logits."""
    fake_tensorrt.classes = 1000
    with pytest.raises(CheckFailed, match=r"tensorrt\.plan' gives \(1, 1000\) for 1 images: expected \(1, 4\)$"):
        TensorRTSession(bundle, "tensorrt")
    fake_tensorrt.size = 224
    with pytest.raises(
        CheckFailed, match=r"takes images \(224, 224, 3\), and those of the manifest are \(16, 16, 3\)$"
    ):
        TensorRTSession(bundle, "tensorrt")


def test_black_images_fill_a_batch_up(tmp_path: Path, fake_tensorrt: FakeTensorRT) -> None:
    eight = (Profile(minimum=4, optimum=8, maximum=8),)
    bundle = add_plan(write_bundle(tmp_path / "b.vitx"), "tensorrt", profiles=eight)
    fake_tensorrt.profiles, fake_tensorrt.engine.num_optimization_profiles = eight, 1
    session, images = TensorRTSession(bundle, "tensorrt"), random_images(8)
    session.infer(images)
    np.testing.assert_array_equal(session.infer(images[:2]), NumpySession().infer(images[:2]))
    assert (fake_tensorrt.ran, fake_tensorrt.seen[2:].any()) == ([(0, 8), (0, 4)], False)


def test_a_plan_that_changes_after_it_was_verified_is_not_run(
    bundle: Bundle, fake_tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold code, which a signed manifest vouches for."""

    def replaced(*given: Any) -> Any:
        found = find_plan(*given)
        found[0].write_bytes(b"other code")
        return found

    monkeypatch.setattr("vitx.runtimes.tensorrt.find_plan", replaced)
    with pytest.raises(CheckFailed, match=r"tensorrt\.plan' was changed while it was loaded: load it again$"):
        TensorRTSession(bundle, "tensorrt")


def test_a_gpu_without_memory_is_one_error(bundle: Bundle, fake_tensorrt: FakeTensorRT, cuda: HostMemoryCuda) -> None:
    cuda.failing = "cudaMalloc"
    with pytest.raises(CudaError, match=r"^cudaMalloc failed: cudaErrorMemoryAllocation \(out of memory\)$"):
        TensorRTSession(bundle, "tensorrt")
    assert (cuda.memory, cuda.streams) == ({}, [])


def test_a_library_without_its_own_libraries(
    bundle: Bundle, fake_tensorrt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EnvironmentMissing, match=r"tensorrt cannot be imported .*: pip install 'vitx\[trt\]'"):
        TensorRTSession(bundle, "tensorrt")


def test_a_cpu_and_a_plan_exclude_each_other(bundle: Bundle) -> None:
    with pytest.raises(InputError, match="the runtime tensorrt runs on cuda, and device cpu was asked for"):
        load_session(bundle, "tensorrt", device="cpu")
