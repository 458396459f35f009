"""What a session is on this machine, which images it takes, and where it computes."""

from typing import Any

import numpy as np
import pytest

from vitx.core.errors import InputError
from vitx.core.machine import Gpu, cpu_architecture
from vitx.core.options import DEVICES, device_name
from vitx.runtimes import session as module
from vitx.runtimes.session import Session, check_images, executable_of, is_cpu, outputs_of

SUBJECT = {"model.onnx": "a" * 64, "outputs/embedding.onnx": "b" * 64, "manifest.json": "c" * 64}


class Described(Session):
    artefacts = ("model.onnx", "outputs/embedding.onnx", "gone.onnx")

    def __init__(self, **about: object) -> None:
        super().__init__()
        self.about = about

    def _infer(self, images: Any) -> Any:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return self.about


@pytest.mark.parametrize(
    ("provider", "on_gpu"),
    [
        ("CUDAExecutionProvider", True),
        ("cuda:0", True),
        ("TensorrtExecutionProvider", True),
        ("NVIDIA H200 (sm90)", True),
        ("CPUExecutionProvider", False),
        ("CPU", False),
    ],
)
def test_an_executable_is_of_the_processor_or_the_gpu_it_runs_on(
    monkeypatch: pytest.MonkeyPatch, provider: str, on_gpu: bool
) -> None:
    monkeypatch.setattr(module, "local_architectures", lambda: ("sm90", "sm89"))
    monkeypatch.setattr(module, "cuda_driver", lambda: "13.0")
    about = {"runtime": "onnxruntime", "version": "1.31.0", "provider": provider, "precision": "fp16", "threads": 3}
    found = executable_of(SUBJECT, Described(**about))
    assert found.model_dump() == {
        **{name: about[name] for name in ("runtime", "version", "provider", "precision")},
        "architecture": "sm90" if on_gpu else cpu_architecture(),
        "driver": "13.0" if on_gpu else "",
        "artefacts": {name: SUBJECT[name] for name in ("model.onnx", "outputs/embedding.onnx")},
    }
    assert outputs_of(found) == {"embedding"}


def test_of_what_is_not_told_nothing_is_known() -> None:
    found = executable_of({}, Described())
    assert (found.runtime, found.version, found.provider, found.precision, found.artefacts) == ("", "", "", "", {})
    assert outputs_of(found) == frozenset()


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, expected in (((), {"cpu": True, "auto": True, "cuda": False}), ((Gpu("A", "sm89"),), {"cpu": True})):
        monkeypatch.setattr(module, "local_gpus", lambda gpus=gpus: gpus)
        assert {name: is_cpu(device_name(name)) for name in DEVICES} == {"auto": False, "cuda": False} | expected
    with pytest.raises(InputError, match=r"^unknown device 'gpu': did you mean cpu\? known: auto, cpu, cuda$"):
        device_name("gpu")


@pytest.mark.parametrize(
    ("images", "given"),
    [
        (np.zeros((1, 8, 16, 3), np.uint8), "uint8 (1, 8, 16, 3)"),
        (np.zeros((16, 16, 3), np.uint8), "uint8 (16, 16, 3)"),
        (np.zeros((0, 16, 16, 3), np.uint8), "uint8 (0, 16, 16, 3)"),
        (np.zeros((1, 16, 16, 3), np.int8), "int8 (1, 16, 16, 3)"),
        ([[0]], "of type list"),
        (None, "of type NoneType"),
    ],
)
def test_other_images_are_named(images: Any, given: str) -> None:
    with pytest.raises(InputError) as caught:
        check_images(images, (16, 16, 3))
    assert str(caught.value) == f"images are {given}: expected uint8 (N, 16, 16, 3), at least one image"
    check_images(np.zeros((2, 16, 16, 3), np.uint8), [16, 16, 3])


def test_a_session_computes_and_is_described() -> None:
    class Silent(Session):
        def _infer(self, images: Any) -> Any:
            raise NotImplementedError

    class Idle(Session):
        def describe(self) -> dict[str, Any]:
            return {}

    kinds: list[tuple[Any, str]] = [(Silent, "describe"), (Idle, "_infer")]
    for kind, lacking in kinds:
        with pytest.raises(TypeError, match=f"abstract method .*{lacking}"):
            kind()
