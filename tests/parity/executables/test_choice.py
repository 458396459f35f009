"""`--runtime auto`: the fastest of the executables that pass here."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bundle_fixture import Float32Array, NumpySession
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.certificate import Verdict
from vitx.core.preprocess import UInt8Array
from vitx.parity.executables import choice
from vitx.parity.executables.choice import _keep_speed, load_fastest, runtimes_by_speed
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.executables.listing import BFLOAT16, runtimes_for
from vitx.parity.executables.verdict_cache import cached_verdict, cached_verdicts, keep_verdict
from vitx.runtimes import load_session
from vitx.runtimes.session import Session, executable_of
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


def kept(bundle: Bundle) -> dict[str, tuple[str, float]]:
    return {each.executable.runtime: (each.verdict, each.images_per_second or 0) for each in cached_verdicts(bundle)}


def test_all_are_timed_and_the_fastest_alone_is_judged(
    witnessed: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged: list[str] = []

    def judge(bundle: Bundle, session: Session, *, quiet: bool) -> Verdict:
        judged.append(session.describe()["runtime"])
        return require_verdict(bundle, session, quiet=quiet)

    monkeypatch.setattr(choice, "require_verdict", judge)
    first = runtimes_by_speed(witnessed, "auto", device="cpu", threads=1)
    assert {*first} == {"onnxruntime-cpu", "openvino"}
    said = capsys.readouterr().err
    found = kept(witnessed)
    fastest, other = (name.removesuffix("-cpu") for name in first)
    assert judged == [fastest]
    assert (found[fastest][0], found[other][0]) == ("pass", "not run")
    assert found[fastest][1] >= found[other][1] > 0
    assert re.search(
        rf"runs in {first[0]}; images/s: {first[0]} [\d.e+]+, {first[1]} [\d.e+]+ \(not judged here\)", said
    )
    # The next start asks the cache alone, and chooses alike: the speed is the one that it was chosen by.
    assert choose(witnessed) == first
    assert kept(witnessed) == found
    # One that was judged by name has its place by its speed.
    with load_session(witnessed, first[1], device="cpu", threads=1) as session:
        require_verdict(witnessed, session, quiet=True)
    set_speed(witnessed, onnxruntime=5.0, openvino=4.0)
    assert choose(witnessed) == ("onnxruntime-cpu", "openvino")
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    assert choose(witnessed) == ("openvino", "onnxruntime-cpu")
    assert judged == [fastest]
    with load_fastest(witnessed, "auto", device="cpu", threads=1) as session:
        assert session.describe()["runtime"] == "openvino"
    with load_fastest(witnessed, "auto", device="cpu", threads=1, outputs=("embedding",)) as session:
        assert session.describe()["runtime"] == "onnxruntime"


@pytest.mark.parametrize("changes", [{"version": "2020.1"}, {"architecture": "x86_64 amx"}])
def test_what_another_machine_or_version_found_decides_nothing_here(witnessed: Bundle, changes: dict[str, str]) -> None:
    """Machines may share a cache: there the slower one was fast, and the faster one failed."""
    first = choose(witnessed)
    for verdict in cached_verdicts(witnessed):
        faster = verdict.executable.runtime == first[0].removesuffix("-cpu")
        found = {"verdict": "fail" if faster else "pass", "images_per_second": 1.0 if faster else 1e9}
        executable = verdict.executable.model_copy(update=changes)
        keep_verdict(witnessed, verdict.model_copy(update={**found, "executable": executable}))
    assert choose(witnessed) == first


def test_the_speed_of_a_candidate_is_that_of_warm_batches(witnessed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that compiles, and two of four images of which the faster one counts."""
    clock = iter([0.0, 50.0, 60.0, 64.0, 70.0, 72.0])
    monkeypatch.setattr("vitx.parity.executables.choice.time.perf_counter", lambda: next(clock))
    seen: list[tuple[int, ...]] = []

    class Timed(NumpySession):
        def _infer(self, images: UInt8Array) -> Float32Array:
            seen.append(images.shape)
            return super()._infer(images)

    choice._keep_speed(witnessed, Timed())
    (found,) = cached_verdicts(witnessed)
    assert seen == [(4, 16, 16, 3)] * 3
    assert (found.verdict, found.images_per_second, found.executable.runtime) == ("not run", 2.0, "numpy")
    assert found.reasons == ("timed, and not judged: a faster one passes",)
    assert cached_verdict(witnessed, found.executable) is None


def test_a_runtime_that_is_named_is_taken(witnessed: Bundle) -> None:
    assert choose(witnessed, "openvino") == ("openvino",)
    assert cached_verdicts(witnessed) == []


def test_what_fails_is_left_out_and_the_next_is_judged(
    witnessed: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ir(witnessed.path, "class_off_by_one")
    bundle = seal_manifest(witnessed.path)
    seal_certificate(bundle)
    speeds = {"onnxruntime": 5.0, "openvino": 6.0}

    def keep_speed(bundle: Bundle, session: Session) -> None:
        _keep_speed(bundle, session)
        (timed,) = (
            each for each in cached_verdicts(bundle) if each.executable == executable_of(bundle.subject(), session)
        )
        keep_verdict(bundle, timed.model_copy(update={"images_per_second": speeds[timed.executable.runtime]}))

    monkeypatch.setattr(choice, "_keep_speed", keep_speed)
    assert runtimes_by_speed(bundle, "auto", device="cpu", threads=1) == ("onnxruntime-cpu",)
    said = capsys.readouterr().err
    assert "openvino is left out" in said
    assert "is not the checkpoint's equal in openvino" in said
    assert said.endswith("vitx: 'tiny' runs in onnxruntime-cpu; images/s: onnxruntime-cpu 5\n")
    assert kept(bundle) == {"onnxruntime": ("pass", 5.0), "openvino": ("fail", kept(bundle)["openvino"][1])}
    # What failed is not asked again.
    assert choose(bundle) == ("onnxruntime-cpu",)
    assert capsys.readouterr().err == ""


def test_the_fastest_is_taken_where_the_cache_cannot_be_written(
    witnessed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "a file"))
    speeds = {"onnxruntime": 5.0, "openvino": 6.0}

    def keep_speed(bundle: Bundle, session: Session) -> None:
        _keep_speed(bundle, session)
        executable = executable_of(bundle.subject(), session)
        (timed,) = (each for each in cached_verdicts(bundle) if each.executable == executable)
        keep_verdict(bundle, timed.model_copy(update={"images_per_second": speeds[executable.runtime]}))

    monkeypatch.setattr(choice, "_keep_speed", keep_speed)
    assert choose(witnessed) == ("openvino", "onnxruntime-cpu")
    assert kept(witnessed) == {"onnxruntime": ("not run", 5.0), "openvino": ("pass", 6.0)}
    assert capsys.readouterr().err.count("the verdict is not kept") == 1
    # As long as the process lasts nothing is timed or judged again; a cache that can be written takes over.
    monkeypatch.setattr(choice, "_loaded", lambda *_, **__: pytest.fail("loaded again"))
    assert choose(witnessed) == ("openvino", "onnxruntime-cpu")
    (tmp_path / "a file").unlink()
    set_speed(witnessed, onnxruntime=5.0, openvino=4.0)
    assert len([*(tmp_path / "a file").rglob("*.json")]) == 2
    assert kept(witnessed) == {"onnxruntime": ("not run", 5.0), "openvino": ("pass", 4.0)}


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


def judge_both(bundle: Bundle) -> None:
    for name in ("onnxruntime-cpu", "openvino"):
        with load_session(bundle, name, device="cpu", threads=1) as session:
            require_verdict(bundle, session, quiet=True)


def test_the_server_says_what_it_chose(witnessed: Bundle) -> None:
    judge_both(witnessed)
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=1, threads=1))
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
    judge_both(witnessed)
    set_speed(witnessed, onnxruntime=5.0, openvino=6.0)
    code, out, _ = vitx("predict", witnessed.path, colours_folder / "val", "--out", tmp_path / "out", "--json")
    assert (code, json.loads(out)["runtime"]["runtime"]) == (0, "openvino")
