"""`--runtime auto`: the fastest of the executables that pass here."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.parity.executables.choice import load_fastest, runtimes_by_speed
from vitx.parity.executables.listing import BFLOAT16, runtimes_for
from vitx.parity.executables.verdict_cache import cached_verdicts, keep_verdict
from vitx.serve.models.loading import Loader
from vitx.serve.models.served_model import ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.options import ServeOptions
from witnessed_bundle import seal_certificate, seal_manifest, write_ir


def choose(bundle: Bundle, runtime: str = "auto") -> tuple[str, ...]:
    return runtimes_by_speed(bundle, runtime, device="cpu", threads=1, quiet=True)


def set_speed(bundle: Bundle, **speeds: float | None) -> None:
    for verdict in cached_verdicts(bundle):
        speed = speeds[verdict.executable.runtime]
        keep_verdict(bundle, verdict.model_copy(update={"images_per_second": speed}))


def test_each_is_judged_once_and_the_fastest_is_taken(witnessed: Bundle) -> None:
    assert {*choose(witnessed)} == {"onnxruntime-cpu", "openvino"}
    found = {each.executable.runtime: each.images_per_second or 0 for each in cached_verdicts(witnessed)}
    assert found.keys() == {"onnxruntime", "openvino"}
    fastest = max(found, key=found.__getitem__)
    assert choose(witnessed)[0].removesuffix("-cpu") == fastest
    set_speed(witnessed, onnxruntime=5.0, openvino=4.0)
    assert choose(witnessed) == ("onnxruntime-cpu", "openvino")
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    assert choose(witnessed) == ("openvino", "onnxruntime-cpu")
    with load_fastest(witnessed, "auto", device="cpu", threads=1) as session:
        assert session.describe()["runtime"] == "openvino"
    with load_fastest(witnessed, "auto", device="cpu", threads=1, outputs=("embedding",)) as session:
        assert session.describe()["runtime"] == "onnxruntime"


def test_a_runtime_that_is_named_is_taken(witnessed: Bundle) -> None:
    assert choose(witnessed, "openvino") == ("openvino",)
    assert cached_verdicts(witnessed) == []


def test_what_fails_is_left_out_and_said(witnessed: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    write_ir(witnessed.path, "class_off_by_one")
    bundle = seal_manifest(witnessed.path)
    seal_certificate(bundle)
    assert runtimes_by_speed(bundle, "auto", device="cpu", threads=1) == ("onnxruntime-cpu",)
    said = capsys.readouterr().err
    assert "openvino is left out" in said
    assert "is not the checkpoint's equal in openvino" in said
    assert "'tiny' runs in onnxruntime-cpu; images/s: onnxruntime-cpu " in said


def test_only_what_the_certificate_lists_is_a_candidate(witnessed: Bundle) -> None:
    """OpenVINO in bfloat16 could run here, and nobody asked for it at the export."""
    assert {*runtimes_for(witnessed, "cpu")} - {BFLOAT16} == {"onnxruntime-cpu", "openvino"}
    assert BFLOAT16 not in choose(witnessed)
    certificate = witnessed.require_certificate()
    kept = tuple(each for each in certificate.executables if each.executable.runtime == "onnxruntime")
    seal_certificate(witnessed, executables=kept)
    assert choose(witnessed) == ("onnxruntime-cpu",)
    failed = tuple(
        each.model_copy(update={"verdict": "fail"}) if each.executable.runtime == "openvino" else each
        for each in certificate.executables
    )
    seal_certificate(witnessed, executables=failed)
    assert choose(witnessed) == ("onnxruntime-cpu",)


def test_without_evidence_onnx_runtime_is_taken(witnessed: Bundle, bare: Bundle) -> None:
    assert choose(bare) == ("onnxruntime",)
    (witnessed.path / CERTIFICATE).unlink()
    assert choose(witnessed) == ("onnxruntime",)


def test_the_server_says_what_it_chose(witnessed: Bundle) -> None:
    choose(witnessed)
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    loader = Loader(ServeOptions(max_batch=2).batching, device="cpu", instances=1, threads=1)
    warm = loader.warm(loader.verify(witnessed.path))
    assert warm.runtimes == ("openvino", "onnxruntime-cpu")

    async def metadata() -> dict[str, Any]:
        model = ServedModel(warm, Metrics())
        try:
            own: dict[str, Any] = model.metadata(["1"])["vitx"]
            return own
        finally:
            await model.close()

    own = asyncio.run(metadata())
    assert (own["runtime"]["runtime"], [*own["runtimes"]]) == ("openvino", ["openvino", "onnxruntime-cpu"])
    assert own["executable"]["verdict"] == "pass"
    assert sorted(own["executable"]["executable"]["artefacts"]) == ["openvino/model.bin", "openvino/model.xml"]
    json.dumps(own)


def test_predict_takes_it(witnessed: Bundle, vitx: Any, colours_folder: Path, tmp_path: Path) -> None:
    choose(witnessed)
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    code, out, _ = vitx("predict", witnessed.path, colours_folder / "val", "--out", tmp_path / "out", "--json")
    assert (code, json.loads(out)["runtime"]["runtime"]) == (0, "openvino")
