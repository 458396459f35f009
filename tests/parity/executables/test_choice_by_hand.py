"""Which runtimes may run a bundle, and which is taken, on machines that are not here: GPUs and verdicts stand in."""

from pathlib import Path
from typing import Any

import pytest

from bundle_fixture import certificate, write_bundle
from gpu_fixture import add_plan
from vitx.core.bundle import INT8_MODEL, WITNESS, Bundle, FileEntry
from vitx.core.certificate import Executable, Verdict
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_bytes
from vitx.core.machine import Gpu
from vitx.parity.executables import choice, listing
from vitx.parity.executables.choice import load_fastest, runtimes_by_speed
from vitx.parity.executables.listing import RUNTIMES_BY_DEFAULT, merged, runtimes_for, verdicts_of_bundle
from vitx.runtimes.openvino import IR

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
GPU_NAMES = ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
CPU_NAMES = ("onnxruntime-cpu", "onnxruntime-int8", "openvino", "openvino-bf16")


def verdict(
    runtime: str, provider: str = CPU, speed: float | None = 1.0, word: Any = "pass", **changes: Any
) -> Verdict:
    fields: dict[str, Any] = {"version": "1", "architecture": "avx2", "precision": "fp32", "artefacts": {}}
    executable = Executable(runtime=runtime, provider=provider, **(fields | changes))
    reasons, evidence = ("because",), "witness set"
    return Verdict(executable=executable, verdict=word, reasons=reasons, evidence=evidence, images_per_second=speed)  # type: ignore[arg-type]


@pytest.fixture
def everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle with an IR and a plan of each TensorRT, where every runtime can be used and there is a GPU."""
    bundle = add_plan(write_bundle(tmp_path / "tiny.vitx"), "tensorrt", name="ada")
    bundle = add_plan(bundle, "tensorrt-rtx", name="rtx", version="1.7", architectures=("sm89", "sm120"))
    (bundle.path / "openvino").mkdir()
    (bundle.path / "int8").mkdir()
    for name in (IR, INT8_MODEL, WITNESS):
        (bundle.path / name).write_bytes(b"-")
        bundle.manifest.files[name] = FileEntry(sha256=sha256_bytes(b"-"), size=1)
    monkeypatch.setattr(listing, "local_gpus", lambda: (Gpu("A", "sm89"),))
    monkeypatch.setattr(listing, "why_unusable", lambda name: "")
    return bundle


def test_the_runtimes_of_a_machine_and_its_device(everything: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtimes_for(everything) == (*GPU_NAMES, *CPU_NAMES)
    assert runtimes_for(everything, "cuda") == GPU_NAMES
    assert runtimes_for(everything, "cpu") == CPU_NAMES
    monkeypatch.setattr(listing, "why_unusable", lambda name: "broken" if name in ("tensorrt", "openvino") else "")
    assert runtimes_for(everything) == (*GPU_NAMES[::2], *CPU_NAMES[:2], CPU_NAMES[3])
    monkeypatch.setattr(listing, "why_unusable", lambda name: "")
    monkeypatch.setattr(listing, "local_gpus", tuple)
    assert runtimes_for(everything) == runtimes_for(everything, "cuda") == runtimes_for(everything, "cpu") == CPU_NAMES


def test_a_runtime_needs_its_files(everything: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for lost, names in (
        ([], (*GPU_NAMES, *CPU_NAMES)),
        ([IR], (*GPU_NAMES, *CPU_NAMES[:2])),
        ([INT8_MODEL], (*GPU_NAMES, CPU_NAMES[0], *CPU_NAMES[2:])),
        (["engines/ada.plan"], ("onnxruntime-cuda", "tensorrt-rtx", *CPU_NAMES)),
        (["engines/rtx.plan"], ("onnxruntime-cuda", "tensorrt", *CPU_NAMES)),
        (["engines/ada.plan", "engines/rtx.plan", IR, INT8_MODEL], ("onnxruntime-cuda", "onnxruntime-cpu")),
    ):
        files = {name: entry for name, entry in everything.manifest.files.items() if name not in lost}
        fewer = Bundle(everything.path, everything.manifest.model_copy(update={"files": files}))
        assert runtimes_for(fewer) == names
    # Only plans in their folder count.
    files = {"other/ada.plan": everything.manifest.files["engines/ada.plan"]}
    moved = Bundle(everything.path, everything.manifest.model_copy(update={"files": files}))
    assert runtimes_for(moved) == ("onnxruntime-cuda", "onnxruntime-cpu")


class Loads:
    """Stands for sessions and their judgement: `found` by a runtime's name is its verdict, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
        self.asked: list[Any] = []
        self.found = found
        monkeypatch.setattr(listing, "load_session", self.load)
        monkeypatch.setattr(listing, "judge_executable", self.judge)
        monkeypatch.setattr(listing, "read_witness", lambda bundle: "the witness set")

    def load(self, bundle: Bundle, name: str, **options: Any) -> "Loads":
        self.asked.append((name, options))
        self.name = name
        if isinstance(self.found[name], str):
            raise CheckFailed(self.found[name])
        return self

    def judge(self, bundle: Bundle, witness: Any, session: Any, rate: float, *, quiet: bool) -> Verdict:
        assert (witness, session, rate) == ("the witness set", self, 0.25)
        found: Verdict = self.found[self.name]
        return found

    def __enter__(self) -> "Loads":
        return self

    def __exit__(self, *exception: object) -> None:
        self.asked.append("closed")


def test_a_verdict_on_each_and_not_run_of_a_plan_that_could_not(
    everything: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {name: verdict(name) for name in (*GPU_NAMES, *CPU_NAMES)}
    found |= {"tensorrt": verdict("tensorrt", artefacts={"engines/ada.plan": "0"}), "tensorrt-rtx": "out of memory"}
    found["openvino"] = verdict("openvino", word="fail")
    loads = Loads(monkeypatch, found)
    *run, not_run = verdicts_of_bundle(everything, 0.25)
    assert run == [found[name] for name in ("onnxruntime-cuda", "tensorrt", "onnxruntime-cpu", "openvino")]
    assert [name for name, _ in (each for each in loads.asked if each != "closed")] == [*GPU_NAMES, *CPU_NAMES[:3:2]]
    assert loads.asked.count("closed") == 4
    assert not_run == Verdict(
        executable=Executable(
            runtime="tensorrt-rtx",
            version="1.7",
            provider="NVIDIA GPU",
            architecture="sm89, sm120",
            precision="fp32",
            artefacts={"engines/rtx.plan": everything.manifest.files["engines/rtx.plan"].sha256},
        ),
        verdict="not run",
        reasons=("built, not run: no GPU and TensorRT that load it were here",),
        evidence="none",
        created=not_run.created,
    )
    assert not_run.created[:2] == "20"
    said = capsys.readouterr().err.splitlines()
    assert said[2] == "parity: tensorrt-rtx does not run 'tiny' here: out of memory"
    assert [line.split(" in ")[0] for line in said if " in " in line] == [
        *("parity: pass: onnxruntime-cuda 1", "parity: pass: tensorrt 1"),
        *("parity: pass: onnxruntime-cpu 1", "parity: fail: openvino 1"),
    ]
    bfloat16 = verdicts_of_bundle(everything, 0.25, "cpu", ("openvino-bf16",), quiet=True)
    assert [each.executable.runtime for each in bfloat16] == ["openvino-bf16", "tensorrt", "tensorrt-rtx"]
    assert capsys.readouterr().err == ""
    assert RUNTIMES_BY_DEFAULT == ("onnxruntime-cpu", "onnxruntime-cuda", "openvino", "tensorrt", "tensorrt-rtx")


def test_the_last_verdict_on_an_executable_is_kept_at_its_place() -> None:
    first, second, third = verdict("a"), verdict("b"), verdict("a", architecture="avx512f")
    again = verdict("a", speed=2.0)
    assert merged([first, second], [third]) == (first, second, third)
    assert merged([first, second, third], [again]) == (second, third, again)
    assert merged([first, again], []) == (again,)
    assert merged([], [first]) == (first,)


def test_a_fail_on_the_whole_split_stays_until_the_split_is_run_again() -> None:
    of_set = verdict("a").model_copy(update={"verdict": "pass", "evidence": "witness set"})
    failed = of_set.model_copy(update={"verdict": "fail", "evidence": "evaluation split"})
    passed = of_set.model_copy(update={"evidence": "evaluation split"})
    assert merged([failed], [of_set, other := verdict("b")]) == (failed, other)
    assert merged([failed], [of_set, passed]) == (passed,)
    assert merged([passed], [of_set]) == (of_set,)
    assert merged([failed.model_copy(update={"evidence": "witness set"})], [of_set]) == (of_set,)


@pytest.fixture
def kept(everything: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """What this machine has found, of a bundle whose certificate lists four runtimes."""
    verdicts: list[Verdict] = []
    listed = tuple(verdict(name) for name in ("onnxruntime", "openvino", "tensorrt"))
    failed, not_run = verdict("openvino-bf16", word="fail"), verdict("tensorrt-rtx", word="not run")
    monkeypatch.setattr(Bundle, "certificate", lambda self: certificate(executables=(*listed, failed, not_run)))
    monkeypatch.setattr(choice, "cached_verdicts", lambda bundle: verdicts)
    monkeypatch.setattr(choice, "is_of_here", lambda executable: True)
    return verdicts


def judging(monkeypatch: pytest.MonkeyPatch, kept: list[Verdict], found: dict[str, Any]) -> list[Any]:
    """`found` by name is what a runtime is when it is timed, with the word that its judgement has; or why it fails."""
    asked: list[Any] = []

    class Session:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> "Session":
            return self

        def __exit__(self, *exception: object) -> None:
            asked.append("closed")

    def load(bundle: Bundle, name: str, **options: Any) -> Session:
        asked.append((name, options))
        return Session(name)

    def keep_speed(bundle: Bundle, session: Session) -> None:
        if isinstance(found[session.name], str):
            raise CheckFailed(found[session.name])
        kept.append(found[session.name].model_copy(update={"verdict": "not run"}))

    def require(bundle: Bundle, session: Session, *, quiet: bool) -> Verdict:
        asked.append("judged")
        judged: Verdict = found[session.name].model_copy(update={"images_per_second": 1.0})
        kept.append(judged)
        if judged.verdict != "pass":
            raise CheckFailed("it is not its equal")
        return judged

    monkeypatch.setattr(choice, "load_session", load)
    monkeypatch.setattr(choice, "_keep_speed", keep_speed)
    monkeypatch.setattr(choice, "require_verdict", require)
    monkeypatch.setattr(choice, "keep_verdict", lambda bundle, verdict: kept.append(verdict))
    return asked


def test_the_fastest_of_all_devices_is_taken(
    everything: Bundle, kept: list[Verdict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {
        "onnxruntime-cuda": verdict("onnxruntime", CUDA, 400.0),
        "tensorrt": verdict("tensorrt", "A (sm89)", 1234567.0),
        "tensorrt-rtx": "no memory",
        "onnxruntime-cpu": verdict("onnxruntime", CPU, 20.0),
        "openvino": verdict("openvino", "CPU", 2e6, "fail"),
    }
    asked = judging(monkeypatch, kept, found)
    expected = ("tensorrt", "onnxruntime-cuda", "onnxruntime-cpu")
    assert runtimes_by_speed(everything, "auto", threads=3) == expected
    options = {"threads": 3, "outputs": ()}
    timed = [part for name in (*GPU_NAMES, *CPU_NAMES[:3:2]) for part in ((name, options), "closed")]
    # The fastest fails, the next passes, and nothing else is judged.
    judged = [part for name in ("openvino", "tensorrt") for part in ((name, options), "judged", "closed")]
    assert asked == timed + judged
    assert capsys.readouterr().err == (
        "vitx: tensorrt-rtx is left out: no memory\n"
        "vitx: openvino is left out: it is not its equal\n"
        "vitx: 'tiny' runs in tensorrt; images/s: tensorrt 1.235e+06, onnxruntime-cuda 400 (not judged here), "
        "onnxruntime-cpu 20 (not judged here)\n"
    )
    asked.clear()
    assert runtimes_by_speed(everything, "auto", quiet=True) == expected
    assert [name for name, _ in (each for each in asked if each != "closed")] == ["tensorrt-rtx"]
    assert capsys.readouterr().err == ""
    # The newest of two verdicts on a runtime counts; one that was never timed is as none.
    kept.append(verdict("onnxruntime", CPU, 500.0))
    assert runtimes_by_speed(everything, "auto", quiet=True) == ("tensorrt", "onnxruntime-cpu", "onnxruntime-cuda")
    kept.append(verdict("tensorrt", "A (sm89)", None))
    assert runtimes_by_speed(everything, "auto", quiet=True)[0] == "tensorrt"


def test_onnx_runtime_where_nothing_else_may(
    everything: Bundle, kept: list[Verdict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judging(monkeypatch, kept, dict.fromkeys((*GPU_NAMES, *CPU_NAMES), "broken"))
    assert runtimes_by_speed(everything, "auto", device="cpu") == ("onnxruntime",)
    assert "vitx: 'tiny' runs in onnxruntime; images/s: \n" in capsys.readouterr().err
    monkeypatch.setattr(Bundle, "certificate", lambda self: certificate(executables=(verdict("openvino"),)))
    assert runtimes_by_speed(everything, "auto", device="cpu") == ("openvino",)
    assert runtimes_by_speed(everything, "auto", device="cuda") == ("onnxruntime",)
    monkeypatch.setattr(Bundle, "certificate", lambda self: None)
    assert runtimes_by_speed(everything, "auto", device="cpu") == ("onnxruntime",)
    assert capsys.readouterr().err == ""


def test_what_is_loaded_in_the_end(everything: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(choice, "load_session", lambda *a, **o: asked.append((a, o)))

    def by_speed(bundle: Bundle, runtime: str, **options: Any) -> tuple[str, ...]:
        asked.append((runtime, options))
        return "fast", "slow"

    monkeypatch.setattr(choice, "runtimes_by_speed", by_speed)
    load_fastest(everything, "auto", device="cpu", threads=2)
    load_fastest(everything, "openvino", quiet=True)
    cpu, auto = {"device": "cpu", "threads": 2, "outputs": ()}, {"device": "auto", "threads": None, "outputs": ()}
    assert asked == [
        ("auto", {**cpu, "quiet": False}),
        ((everything, "fast"), cpu),
        ("openvino", {**auto, "quiet": True}),
        ((everything, "fast"), auto),
    ]
    asked.clear()
    # A bundle without outputs gives an embedding all the same, and no other.
    monkeypatch.setattr(choice, "load_unlisted_embedding", lambda *a, **o: asked.append((a, o)))
    load_fastest(everything, "auto", outputs=("embedding",))
    load_fastest(everything, "openvino", threads=2, outputs=("embedding",))
    assert asked == [
        ((everything, "onnxruntime"), {"device": "auto", "threads": None}),
        ((everything, "openvino"), {"device": "auto", "threads": 2}),
    ]
    with pytest.raises(InputError, match="attention"):
        load_fastest(everything, "auto", outputs=("attention",))
