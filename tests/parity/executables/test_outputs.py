"""Further outputs of a bundle: each set of them is an executable, judged by the witness set; faults are named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bundle_fixture import BIAS, NumpySession, colour_image, png, tiny_graph, with_embedding, write_bundle
from cli_fixture import Vitx
from vitx.core.bundle import MANIFEST, WITNESS, Bundle, FileEntry, Manifest, output_file
from vitx.core.certificate import Verdict
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.core.files import read_record, write_json
from vitx.export import ExportOptions
from vitx.export.graph.outputs import embedding_part
from vitx.parity.executables.choice import load_fastest, runtimes_by_speed
from vitx.parity.executables.first_load import certify_here, require_verdict
from vitx.parity.executables.judgement import judge_executable
from vitx.parity.executables.listing import verdicts_of_bundle
from vitx.parity.executables.verdict_cache import cached_verdicts
from vitx.parity.executables.witness import digest_of, read_witness
from vitx.parity.executables.witness_set import add_witness
from vitx.parity.options import ParityOptions
from vitx.parity.statistics import stratified_upper
from vitx.predict import PREDICTIONS
from vitx.runtimes import load_session
from vitx.runtimes.instances import SessionPool
from vitx.runtimes.session import Session, outputs_of
from vitx.serve.models.loading import Loader, infer_rows
from vitx.serve.options import ServeOptions
from witnessed_bundle import (
    IMAGES,
    WITNESS_IMAGES,
    certify_bundle,
    evidence,
    reference_float64,
    seal_certificate,
    seal_manifest,
    write_ir,
)

EMBEDDING = ("embedding",)
FILE = output_file("embedding")
PASS = stratified_upper(0, 0, census=85, sample=WITNESS_IMAGES - 85, population=360)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    bundle = with_embedding(write_bundle(tmp_path_factory.mktemp("outputs") / "tiny.vitx"))
    write_ir(bundle.path)
    assert certify_bundle(seal_manifest(bundle.path)).verdict == "pass"
    return Bundle.open(bundle.path)


@pytest.fixture
def bundle(tmp_path: Path, original: Bundle) -> Bundle:
    """A certified bundle with a witness set, an embedding and IR, that a test may change."""
    return Bundle.open(shutil.copytree(original.path, tmp_path / "net.vitx"))


def images(count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)


def require(bundle: Bundle, runtime: str = "onnxruntime-cpu", outputs: tuple[str, ...] = EMBEDDING) -> Verdict:
    with load_session(bundle, runtime, device="cpu", threads=1, outputs=outputs) as session:
        return require_verdict(bundle, session, quiet=True)


@pytest.mark.parametrize("runtime", ["onnxruntime", "onnxruntime-cpu", "openvino"])
def test_a_session_gives_what_it_was_asked_for(bundle: Bundle, runtime: str) -> None:
    pixels = images(5)
    expected = reference_float64(pixels)
    with load_session(bundle, runtime, device="cpu", threads=1, outputs=EMBEDDING) as session:
        found = session.infer_outputs(pixels)
        assert session.outputs == EMBEDDING
        assert session.describe()["outputs"] == ["embedding"]
        assert session.artefacts == ("model.onnx", FILE)
        np.testing.assert_array_equal(session.infer(pixels), found["logits"])
    assert [*found] == ["logits", "embedding"]
    for name, values in found.items():
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("runtime", ["onnxruntime-cpu", "openvino"])
def test_nothing_is_computed_that_was_not_asked_for(bundle: Bundle, runtime: str) -> None:
    with load_session(bundle, runtime, device="cpu", threads=1) as session:
        held: Any = session
        ports = held._session.get_outputs() if runtime == "onnxruntime-cpu" else held._model.outputs
        assert len(ports) == 1
        assert [*session.infer_outputs(images(1))] == ["logits"]
        assert session.outputs == ()
        assert "outputs" not in session.describe()


def test_sessions_of_a_pool_give_them_too(bundle: Bundle) -> None:
    pixels = images(2)
    sessions = [load_session(bundle, device="cpu", threads=1, outputs=EMBEDDING) for _ in range(2)]
    with SessionPool(sessions) as pool:
        assert pool.outputs == EMBEDDING
        for _ in range(3):
            found = pool.infer_outputs(pixels)["embedding"]
            np.testing.assert_allclose(found, reference_float64(pixels)["embedding"], rtol=1e-5, atol=1e-5)


def test_each_set_of_outputs_is_an_executable(original: Bundle) -> None:
    certificate = original.require_certificate()
    listed = {(each.executable.runtime, outputs_of(each.executable)): each for each in certificate.executables}
    runtimes = ("onnxruntime", "openvino")
    assert listed.keys() == {(name, frozenset(names)) for name in runtimes for names in ((), EMBEDDING)}
    for (_, names), verdict in listed.items():
        assert verdict.verdict == "pass"
        assert verdict.outputs.keys() == names
        plain = verdict.model_dump(mode="json")
        assert ("outputs" in plain) == bool(names)  # as files without outputs were always written
        if names:
            found = verdict.outputs["embedding"]
            assert (found.verdict, found.images, found.exceeding) == ("pass", WITNESS_IMAGES, 0)
            assert found.exceeding_bound == PASS
            assert 0 < found.mean_distance < found.worst_distance < 1e-12 < found.allowed_distance == 1e-9
            assert 0 < found.worst_length_error < 1e-6
            assert found.allowed_length_error == pytest.approx(math.sqrt(2e-9))
            assert any(text.startswith("embedding: 0 of 340 witness images too far") for text in verdict.reasons)
    assert "outputs" not in original.manifest.model_copy(update={"outputs": ()}).model_dump(mode="json")


def test_a_bundle_without_outputs_is_written_as_before(tmp_path: Path) -> None:
    """Readers refuse fields that they do not know: those of older versions read what has no outputs."""
    bare = write_bundle(tmp_path / "tiny.vitx")
    assert certify_bundle(bare).verdict == "pass"
    for path in bare.path.iterdir():
        assert b"outputs" not in path.read_bytes()


def test_a_runtime_that_does_not_take_the_graph_is_named_once(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    """As bfloat16 in ONNX Runtime's CPU, which takes it neither with logits alone nor with an embedding."""
    bundle.model_path.write_bytes(b"no graph")
    sealed = seal_manifest(bundle.path)
    capsys.readouterr()
    assert verdicts_of_bundle(sealed, 0.02, "cpu", ("onnxruntime-cpu",)) == []
    refused, none_gives = capsys.readouterr().err.splitlines()
    assert refused.startswith(f"parity: onnxruntime-cpu does not run '{bundle.manifest.name}' here: ")
    assert none_gives.startswith("warning: nothing here gives embedding of this bundle")


def test_a_verdict_on_other_classes_has_its_outputs_too(bundle: Bundle) -> None:
    class FewerClasses(NumpySession):
        outputs = EMBEDDING

        def _infer_outputs(self, images: Any) -> Any:
            found = reference_float64(images)
            return {"logits": found["logits"][:, :3], "embedding": found["embedding"]}

    witness = read_witness(bundle)
    assert witness is not None
    found = judge_executable(bundle, witness, FewerClasses(), 0.02, quiet=True)
    assert (found.verdict, found.outputs["embedding"].verdict) == ("fail", "pass")


def sealed_with(bundle: Bundle, part: bytes) -> Bundle:
    changed = with_embedding(bundle, part)
    seal_certificate(changed)
    return Bundle.open(changed.path)


def part_of(*nodes: onnx.NodeProto, constants: tuple[TensorProto, ...] = (), inputs: tuple[str, ...] = ()) -> bytes:
    graph = onnx.GraphProto(node=nodes, initializer=constants)
    graph.output.append(helper.make_tensor_value_info("outputs/embedding", TensorProto.FLOAT, ["N", 3]))
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in inputs)
    content: bytes = onnx.ModelProto(graph=graph).SerializeToString()
    return content


def made_by(operator: str, *inputs: str) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, ["outputs/embedding"])


SCALED = numpy_helper.from_array(np.array(1.001, np.float32), "factor")
OTHER_BIAS = numpy_helper.from_array(BIAS + np.float32(0.01), "bias")
PARTS: dict[str, tuple[bytes, str]] = {
    "another tensor": (part_of(made_by("Tanh", "features")), r"embedding: 340 of 340 witness images too far"),
    "a thousandth longer": (
        part_of(made_by("Mul", "features", "factor"), constants=(SCALED,)),
        r"embedding: 340 of 340 .* largest length error 0\.001, allowed 4\.47e-05",
    ),
    "not finite": (part_of(made_by("Log", "features")), r"embedding: \d+ of 340 .* largest cosine distance 2, "),
    "of two images": (
        part_of(
            helper.make_node("CumSum", ["features", "axis"], ["outputs/embedding"]),
            constants=(numpy_helper.from_array(np.array(0, np.int64), "axis"),),
        ),
        r"embedding: \d+ of 340 witness images too far",
    ),
    "a new bias of the classifier": (
        part_of(made_by("Identity", "features"), constants=(OTHER_BIAS,)),
        r"largest logit error 0\.01, allowed 0\.0001",
    ),
    "another model": (tiny_graph("bgr").SerializeToString(), r"cannot load model\.onnx with embedding: .*Duplicate"),
    "one more input": (
        part_of(made_by("Identity", "features"), inputs=("more",)),
        r"the graph has the inputs images, more: expected images alone",
    ),
    "no output": (b"", r"the manifest names the output 'outputs/embedding', but the graph has logits$"),
    "garbage": (b"\x00\xff\xfe", r"cannot load model\.onnx with embedding: "),
    "a tensor that is not there": (
        part_of(made_by("Identity", "nothing")),
        r"cannot load model\.onnx with embedding: ",
    ),
}


@pytest.mark.parametrize("fault", PARTS)
def test_a_part_with_a_fault_is_refused_by_name(bundle: Bundle, fault: str) -> None:
    part, message = PARTS[fault]
    changed = sealed_with(bundle, part)
    with pytest.raises(VitxError, match=message):
        require(changed)
    assert require(changed, outputs=()).verdict == "pass"  # what is not loaded does no harm


@pytest.mark.parametrize("fault", ["another tensor", "a new bias of the classifier", "another model", "no output"])
def test_in_openvino_too(bundle: Bundle, fault: str) -> None:
    with pytest.raises(VitxError, match=r"embedding: 340 of 340|logit error|names the output") as refusal:
        require(sealed_with(bundle, PARTS[fault][0]), "openvino")
    assert "its layers agree" not in str(refusal.value)  # those of the IR do, and it was not run


def test_one_byte_of_a_part_is_found(bundle: Bundle) -> None:
    path = bundle.path / FILE
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"outputs/embedding\.onnx is corrupt"):
        Bundle.open(bundle.path)


def other_reference(bundle: Bundle, change: Callable[[Any], Any], *, resealed: bool) -> Bundle:
    """Another reference embedding in the witness set; `resealed`: with its digest put right."""
    path = bundle.path / WITNESS
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["embedding"] = np.ascontiguousarray(change(tensors["embedding"]))
    if resealed:
        info = json.loads(metadata["witness"])
        info["outputs_sha256"]["embedding"] = digest_of(tensors["embedding"])
        metadata = {"witness": json.dumps(info)}
    save_file(tensors, path, metadata)
    changed = seal_manifest(bundle.path)
    seal_certificate(changed)
    return changed


def test_an_altered_reference_is_refused(bundle: Bundle) -> None:
    def one(values: Any) -> Any:
        values[17, 1] += 1e-3
        return values

    with pytest.raises(CheckFailed, match=r"the reference values of embedding of .* were altered after it was made"):
        require(other_reference(bundle, one, resealed=False))
    with pytest.raises(CheckFailed, match=r"embedding: 1 of 340 witness images too far"):
        require(other_reference(bundle, lambda values: values, resealed=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values[:, :2], r"the embedding of .* is \(340, 2\), the bundle's is \('N', 3\)"),
        (lambda values: values[:9], r"the embedding of .* is \(9, 3\), the bundle's is"),
        (lambda values: values.astype(np.float64), r"expected the tensors png, ends, logits, embedding"),
        (lambda values: values * np.nan, r"is no witness set: 340 images"),
    ],
)
def test_a_reference_of_another_form_is_refused(bundle: Bundle, change: Any, message: str) -> None:
    with pytest.raises(VitxError, match=message):
        read_witness(other_reference(bundle, change, resealed=True))


def test_outputs_and_their_references_belong_together(bundle: Bundle) -> None:
    path = bundle.path / MANIFEST
    manifest = read_record(path, Manifest)
    write_json(path, manifest.model_copy(update={"outputs": ()}))
    with pytest.raises(InputError, match=r"expected the tensors png, ends, logits;"):
        read_witness(Bundle.open(bundle.path))
    files = {name: entry for name, entry in manifest.files.items() if name != FILE}
    for changes, message in (
        ({"files": files}, r"lists the output embedding and not outputs/embedding\.onnx, which computes it"),
        ({"outputs": manifest.outputs * 2}, r"lists the output embedding twice"),
    ):
        write_json(path, manifest.model_copy(update=changes))
        with pytest.raises(InputError, match=message):
            Bundle.open(bundle.path)


def test_without_a_witness_set_an_output_is_not_certified(bundle: Bundle) -> None:
    (bundle.path / WITNESS).unlink()
    certify_bundle(seal_manifest(bundle.path), witness_images=0)
    bare = Bundle.open(bundle.path)
    assert require(bare, outputs=()).verdict == "pass"
    with pytest.raises(CheckFailed, match=r"has no witness set, which alone certifies embedding: export it again"):
        require(bare)


def test_outputs_that_are_not_there_are_refused(bundle: Bundle, tiny_bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"has no output 'attention' \(embedding\): export it again with --output att"):
        load_session(bundle, outputs=("embedding", "attention"))
    with pytest.raises(InputError, match=r"has no output 'embedding' \(logits alone\)"):
        load_session(tiny_bundle, "openvino", outputs=EMBEDDING)


@pytest.mark.parametrize("runtime", ["onnxruntime-int8", "tensorrt", "tensorrt-rtx", "onnxruntime-tensorrt"])
def test_plans_give_logits_alone(bundle: Bundle, runtime: str) -> None:
    with pytest.raises(InputError, match=rf"{runtime} gives logits alone, .*: embedding needs onnxruntime or openvino"):
        load_session(bundle, runtime, outputs=EMBEDDING)


def test_auto_chooses_among_executables_that_give_them(bundle: Bundle, cache: Path) -> None:
    with load_fastest(bundle, "auto", device="cpu", threads=1, outputs=EMBEDDING) as session:
        assert session.outputs == EMBEDDING
    found = cached_verdicts(bundle)
    assert {(each.executable.runtime, outputs_of(each.executable)) for each in found} == {
        ("onnxruntime", frozenset(EMBEDDING)),
        ("openvino", frozenset(EMBEDDING)),
    }
    # The verdicts on executables that give logits alone are others.
    with load_fastest(bundle, "auto", device="cpu", threads=1) as session:
        assert session.outputs == ()
    assert len(cached_verdicts(bundle)) == 4
    assert sorted(each.verdict for each in cached_verdicts(bundle)) == ["not run", "not run", "pass", "pass"]


def test_a_runtime_that_was_certified_for_logits_alone_is_no_candidate(bundle: Bundle, cache: Path) -> None:
    listed = bundle.require_certificate().executables
    kept = [each for each in listed if each.executable.runtime == "onnxruntime" or not each.outputs]
    seal_certificate(bundle, executables=tuple(kept))
    assert runtimes_by_speed(bundle, "auto", device="cpu", outputs=EMBEDDING, quiet=True) == ("onnxruntime-cpu",)
    assert {*runtimes_by_speed(bundle, "auto", device="cpu", quiet=True)} == {"onnxruntime-cpu", "openvino"}


def test_outputs_that_nothing_here_gives_are_said(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts_of_bundle(bundle, 0.02, "cpu", (), quiet=True) == []
    assert "warning: nothing here gives embedding of this bundle" in capsys.readouterr().err
    assert len(verdicts_of_bundle(bundle, 0.02, "cpu", ("onnxruntime-cpu",), quiet=True)) == 2
    assert capsys.readouterr().err == ""


def test_a_verdict_on_logits_is_none_on_outputs(bundle: Bundle, cache: Path) -> None:
    changed = sealed_with(bundle, PARTS["another tensor"][0])
    assert require(changed, outputs=()).outputs == {}
    with pytest.raises(CheckFailed, match="embedding: 340 of 340"):
        require(changed)
    with pytest.raises(CheckFailed, match="embedding: 340 of 340"):  # nor is one that failed kept as a pass
        require(changed)


def test_the_command_judges_both(bundle: Bundle, vitx: Vitx) -> None:
    assert [set(v.outputs) for v in certify_here(bundle.path, ParityOptions(device="cpu"), quiet=True)] == [
        set(),
        {"embedding"},
    ]
    code, out, _ = vitx("parity", bundle.path, "--runtime", "openvino", "--device", "cpu")
    assert (code, "logits, embedding" in out, "largest distance" in out) == (0, True, True)
    changed = sealed_with(bundle, PARTS["another tensor"][0])
    code, out, err = vitx("parity", changed.path, "--json", "--device", "cpu")
    assert (code, [each["verdict"] for each in json.loads(out)["executables"]]) == (1, ["pass", "fail"])
    assert "embedding: 340 of 340 witness images too far" in err


def test_a_runtime_that_parity_does_not_know_is_an_error(bundle: Bundle, vitx: Vitx) -> None:
    code, out, err = vitx("parity", bundle.path, "--runtime", "auto")
    assert (code, out) == (2, "")
    assert err.startswith("error: unknown runtime 'auto': ")


def test_predict_writes_the_certified_embedding(bundle: Bundle, vitx: Vitx, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = np.stack([colour_image(index % 4, rng) for index in range(5)])
    for index, image in enumerate(pixels):
        (folder / f"{index}.png").write_bytes(png(image))
    arguments = (bundle.path, folder, "--device", "cpu", "--quiet", "--embeddings")
    code, _, err = vitx("predict", *arguments, "--out", tmp_path / "out")
    assert code == 0, err
    found = np.array(pq.read_table(tmp_path / "out" / PREDICTIONS)["embeddings"].to_pylist())
    np.testing.assert_allclose(found, reference_float64(pixels)["embedding"], rtol=2e-3, atol=1e-4)
    code, _, err = vitx("predict", *arguments, "--attention", "--out", tmp_path / "other")
    assert (code, "has no output 'attention' (embedding)" in err) == (2, True)
    sealed_with(bundle, PARTS["another tensor"][0])
    for runtime in ("auto", "onnxruntime"):
        code, _, err = vitx("predict", *arguments, "--out", tmp_path / "third", "--runtime", runtime)
        assert (code, "embedding: 340 of 340 witness images too far" in err) == (1, True)


def test_outputs_need_a_witness_set(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="--output rollout is certified by the witness set: leave --witness none out"):
        ExportOptions(outputs=("rollout",), witness=0)
    with pytest.raises(ValueError, match="unknown --output 'embeddings': did you mean embedding"):
        ExportOptions(outputs=("embeddings",))
    (bundle.path / WITNESS).unlink()
    small = seal_manifest(bundle.path)
    measured = evidence(np.linspace(0, 1, 360))
    with pytest.raises(InputError, match=r"not one image fits into 0\.0 MB, .*embedding .*: give --witness N"):
        add_witness(small, IMAGES, *measured, reference_float64, count=None, quiet=True)
    files = {**small.manifest.files, "model.onnx": FileEntry(sha256="0" * 64, size=200_000)}
    wide = small.manifest.outputs[0].model_copy(update={"shape": ("N", 3000)})
    big = Bundle(small.path, small.manifest.model_copy(update={"files": files, "outputs": (wide,)}))

    def reference(pixels: Any) -> Any:
        return {**reference_float64(pixels), "embedding": np.ones((len(pixels), 3000))}

    added = add_witness(big, IMAGES, *measured, reference, count=None, quiet=True)
    assert added.manifest.files[WITNESS].size < 24_000  # what a reference embedding takes is counted
    assert len(load_file(big.path / WITNESS)["embedding"]) == 1


def test_a_part_is_as_it_was(original: Bundle) -> None:
    """The rest of a message: no input, no operator sets, and only names of its own."""
    part = onnx.ModelProto.FromString((original.path / FILE).read_bytes())
    assert (original.path / FILE).read_bytes() == embedding_part(["features"], 3)
    assert not part.HasField("ir_version")
    assert not part.opset_import
    assert not part.graph.input
    assert [value.name for value in part.graph.output] == ["outputs/embedding"]
    whole = onnx.ModelProto.FromString(original.graph_bytes(EMBEDDING))
    onnx.checker.check_model(whole, full_check=True)
    assert original.graph_bytes() == original.model_path.read_bytes()


def test_a_closed_session_refuses(bundle: Bundle) -> None:
    session: Session = load_session(bundle, device="cpu", threads=1, outputs=EMBEDDING)
    session.close()
    with pytest.raises(RuntimeError, match="the session is closed"):
        session.infer_outputs(images(1))


def test_the_server_judges_both_executables_on_first_load(bundle: Bundle, cache: Path) -> None:
    loader = Loader(ServeOptions(device="cpu", runtime="onnxruntime", threads=1))
    warm = loader.warm(loader.verify(bundle.path))
    assert warm.verdict is not None
    assert warm.outputs is not None
    assert warm.outputs.verdict is not None
    assert ([*warm.verdict.outputs], [*warm.outputs.verdict.outputs]) == ([], ["embedding"])
    pixels = images(4)
    rows = infer_rows(warm.outputs.session)(pixels)
    with load_fastest(bundle, "onnxruntime", threads=1, outputs=EMBEDDING) as session:  # what `vitx predict` runs
        found = session.infer_outputs(pixels)
    np.testing.assert_allclose(
        rows, np.concatenate([found["logits"], found["embedding"]], axis=1), rtol=1e-6, atol=1e-6
    )
    for session in (warm.session, warm.outputs.session):
        session.close()


def test_the_server_refuses_an_embedding_that_is_not_the_checkpoint_s(bundle: Bundle, cache: Path) -> None:
    wrong = with_embedding(bundle, embedding_part(["features"], 3, {"weight": np.full(3, 1.01, np.float32)}))
    sealed = seal_manifest(wrong.path)
    seal_certificate(sealed)
    loader = Loader(ServeOptions(device="cpu", runtime="onnxruntime", threads=1))
    with pytest.raises(CheckFailed, match="embedding: 340 of 340 witness images too far from the checkpoint's"):
        loader.warm(loader.verify(sealed.path))
    # With --allow-uncertified it is served, and shown as uncertified as a whole.
    loader = Loader(loader.options.model_copy(update={"allow_uncertified": True}))
    warm = loader.warm(loader.verify(sealed.path))
    assert warm.outputs is not None
    assert (warm.offer.certificate, warm.outputs.verdict) == (None, None)
    for session in (warm.session, warm.outputs.session):
        session.close()
