"""Both runtimes compute the same function, and refuse what they cannot do."""

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, PREPROCESSING, Float32Array, NumpySession, write_bundle
from vitx.core.bundle import MANIFEST, Bundle, FileEntry
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.images import ImageSet
from vitx.core.run import RunFolder
from vitx.serve.runtimes import Session, load_session
from vitx.serve.runtimes.cuda import cuda_device_count

needs_no_gpu = pytest.mark.skipif(cuda_device_count() > 0, reason="this machine has a GPU")


@pytest.fixture(params=["onnxruntime", "torch"])
def session(request: pytest.FixtureRequest, certified_original: Bundle, tiny_run: RunFolder) -> Session:
    if request.param == "onnxruntime":
        return load_session(certified_original, device="cpu", threads=1)
    from vitx.serve.runtimes.torch import load_run_session

    return load_run_session(tiny_run, device="cpu")


def test_runtime_equals_the_independent_function(session: Session, colours: ImageSet, reference: NumpySession) -> None:
    images = next(colours.batches(PREPROCESSING, 64))
    for batch in (images, images[:1], images[::-1], images[::3]):
        logits = session.infer(batch)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, reference.infer(batch), atol=1e-5)


def test_description_names_what_was_used(session: Session) -> None:
    description = session.describe()
    assert set(description) == {"runtime", "version", "provider", "precision", "threads"}
    assert description["provider"] in ("CPUExecutionProvider", "cpu")


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


def test_images_of_another_shape_or_dtype_are_refused(certified_original: Bundle) -> None:
    session = load_session(certified_original, device="cpu", threads=1)
    wrong: list[Any] = [
        np.zeros((1, 8, 8, 3), dtype=np.uint8),
        np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8),
        np.zeros((1, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.float32),
    ]
    for images in wrong:
        with pytest.raises(InputError, match=r"expected uint8 \(N, 16, 16, 3\)"):
            session.infer(images)


def test_unknown_runtime_and_device_are_refused(certified_original: Bundle) -> None:
    with pytest.raises(InputError, match=r"unknown runtime of a bundle 'onnx'.*known: onnxruntime"):
        load_session(certified_original, "onnx")
    with pytest.raises(InputError, match=r"unknown device 'gpu': did you mean cpu\? known: auto, cpu, cuda"):
        load_session(certified_original, device="gpu")


@needs_no_gpu
def test_gpu_that_is_not_there_is_refused(certified_original: Bundle, tiny_run: RunFolder) -> None:
    from vitx.serve.runtimes.torch import load_run_session

    with pytest.raises(EnvironmentMissing, match="the NVIDIA driver offers no GPU; choose --device cpu"):
        load_session(certified_original, device="cuda")
    with pytest.raises(EnvironmentMissing, match="torch sees no GPU; choose --device cpu"):
        load_run_session(tiny_run, device="cuda")


def test_unknown_checkpoint_is_refused(tiny_run: RunFolder) -> None:
    from vitx.serve.runtimes.torch import load_run_session

    with pytest.raises(InputError, match=r"unknown checkpoint 'newest'.*known: best, last"):
        load_run_session(tiny_run, "newest")


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
