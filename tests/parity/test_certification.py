"""The certificate: an honest graph passes, every planted mistake fails for the right reason."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import PREPROCESSING, Fault, Float32Array, NumpySession, colour_images, write_bundle
from cli_fixture import Vitx
from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle, Certificate
from vitx.core.certificate import Verdict
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity import AcceptanceCriteria, Comparison, certification, certify, certify_models, compare
from vitx.parity.certification import record_verdicts
from vitx.parity.comparison import PROBE_IMAGES
from vitx.parity.loaded_model import open_model
from vitx.runtimes import load_session


class Altered(NumpySession):
    """The reference with its logits of each batch passed through a function."""

    def __init__(self, sizes: list[int] | None = None, *, add: Float32Array | None = None, at_batch: int = 0) -> None:
        super().__init__()
        self.sizes = [] if sizes is None else sizes
        self.add, self.at_batch = add, at_batch

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.sizes.append(len(images))
        logits = super()._infer(images)
        return logits + self.add if self.add is not None and len(images) == self.at_batch else logits


def certify_graph(tmp_path: Path, images: ImageSet, fault: Fault | None, **criteria: Any) -> Certificate:
    bundle = write_bundle(tmp_path / "graph.vitx", fault=fault)
    session = load_session(bundle, device="cpu", threads=1)
    return certify(
        NumpySession(),
        session,
        images,
        PREPROCESSING,
        subject=bundle.subject(),
        criteria=AcceptanceCriteria(**criteria),
        quiet=True,
    )


def test_every_measurement_of_the_certificate_is_of_the_comparison() -> None:
    """`certify` copies what has the same name; the other fields it writes itself."""
    written = {
        *("format_version", "verdict", "reasons", "subject", "reference", "reference_sha256", "candidate", "runtime"),
        *(
            "data",
            "data_sha256",
            "max_flip_rate",
            "max_logit_error_allowed",
            "created",
            "token_similarity",
            "sha256",
            "executables",
        ),
    }
    measured = {*dir(Comparison), *Comparison.__dataclass_fields__}
    assert measured & set(Certificate.model_fields) == set(Certificate.model_fields) - written


def test_honest_graph_passes(tmp_path: Path, colours: ImageSet) -> None:
    certificate = certify_graph(tmp_path, colours, None)
    assert certificate.verdict == "pass", certificate.reasons
    assert certificate.images == 360
    assert certificate.batch_sizes == (1, 2, 7, 32)
    assert certificate.flips == ()
    assert certificate.flip_rate_bound == pytest.approx(0.008287, abs=1e-6)
    assert certificate.accuracy_reference == certificate.accuracy_candidate > 0.9
    assert certificate.mcnemar_p == 1
    assert 0 < certificate.mean_logit_error < certificate.max_logit_error < 1e-5
    assert set(certificate.max_logit_error_by_batch_size) == {1, 2, 7, 32}
    assert certificate.max_neighbour_error < 1e-5
    assert certificate.data_sha256 == colours.digest()
    assert certificate.reasons[0] == "0 of 360 images flipped: flip rate at most 0.008287 (95 %), allowed 0.01"


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("mean_std", ["flipped", "largest logit error"]),
        ("bgr", ["flipped", "largest logit error"]),
        ("class_off_by_one", ["360 of 360 images flipped", "largest logit error"]),
        ("batch_mean", ["flipped", "largest logit error", "other neighbours", "change class with the batch"]),
        ("position", ["largest logit error", "other neighbours"]),
        ("drift", ["largest logit error 0.0003"]),
        ("nan", ["flipped", "largest logit error", "other neighbours", "360 of 360 images have logits"]),
    ],
)
def test_a_planted_mistake_fails(tmp_path: Path, colours: ImageSet, fault: Fault, reasons: Sequence[str]) -> None:
    certificate = certify_graph(tmp_path, colours, fault)
    assert certificate.verdict == "fail"
    text = "; ".join(certificate.reasons)
    assert [reason for reason in reasons if reason not in text] == []
    assert len(certificate.reasons) == len(reasons), text
    assert Certificate.model_validate_json(certificate.model_dump_json()) == certificate


def test_drift_does_not_depend_on_neighbours(tmp_path: Path, colours: ImageSet) -> None:
    certificate = certify_graph(tmp_path, colours, "drift")
    assert certificate.flips == ()
    assert certificate.max_neighbour_error < 1e-5
    assert certify_graph(tmp_path, colours, "drift", max_logit_error=1e-3).verdict == "pass"


def test_graph_of_a_fixed_batch_is_refused(tmp_path: Path, colours: ImageSet) -> None:
    with pytest.raises(CheckFailed, match="the graph of 'tiny' fails on a batch of 32"):
        certify_graph(tmp_path, colours, "no_batch")


def test_an_image_counts_once_with_the_margin_of_the_reference(colours: ImageSet) -> None:
    # Grey gains so much at batch 7 that some rows flip, in order and shuffled alike.
    push = np.array([0, 0, 3.0, 0], dtype=np.float32)
    result = compare(NumpySession(), Altered(add=push, at_batch=7), colours, PREPROCESSING, quiet=True)
    logits = NumpySession().infer(np.concatenate(list(colours.batches(PREPROCESSING, 64))))
    moved = np.flatnonzero(logits.argmax(axis=1) != (logits + push).argmax(axis=1))
    # Only the probe images meet a batch of 7, and the last of them no whole one.
    assert 5 < len(result.flips) <= len(moved)
    assert result.probe_flips == len(result.flips)
    assert {flip.key for flip in result.flips} <= {colours.keys[index] for index in moved}
    assert len({flip.key for flip in result.flips}) == len(result.flips)
    assert {flip.batch_size for flip in result.flips} == {7}
    row = colours.keys.index(result.flips[0].key)
    ordered = np.sort(logits[row])
    assert result.flips[0].reference_margin == pytest.approx(ordered[-1] - ordered[-2])
    assert result.max_logit_error_by_batch_size == pytest.approx({1: 0, 2: 0, 7: 3, 32: 0})
    assert result.correct_reference - result.correct_candidate == (
        result.only_reference_correct - result.only_candidate_correct
    )


@pytest.mark.parametrize("sizes", [(1,), (3, 5), (1, 8, 127), (1000,)])
def test_any_batch_sizes_cover_the_whole_split(sizes: tuple[int, ...]) -> None:
    seen: list[int] = []
    found = compare(NumpySession(), Altered(seen), colour_images(300), PREPROCESSING, batch_sizes=sizes, quiet=True)
    sizes = tuple(min(300, size) for size in sizes)
    probe = max(PROBE_IMAGES, *sizes)
    shuffled = sum(size > 1 for size in {found.batch_size, max(sizes)})
    passes = len(sizes) - 1 + shuffled + (found.batch_size > 1)
    assert found.probe_images == probe
    assert sum(seen) == 300 + probe * passes
    assert max(seen) == max(sizes)
    assert set(found.max_logit_error_by_batch_size) == set(sizes)


def test_other_preprocessing_of_the_candidate_is_compared_with_it(colours: ImageSet) -> None:
    cropped = PREPROCESSING.model_copy(update={"crop_fraction": 0.5})
    certificate = certify(
        NumpySession(), NumpySession(), colours, PREPROCESSING, candidate_preprocessing=cropped, quiet=True
    )
    assert certificate.verdict == "fail"
    assert "largest logit error" in "; ".join(certificate.reasons)


def test_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="no images"):
        certify(NumpySession(), NumpySession(), colour_images(0), PREPROCESSING, quiet=True)


@pytest.mark.parametrize("sizes", [(), (0, 1)])
def test_impossible_batch_sizes_are_refused(colours: ImageSet, sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected one or more, each at least 1"):
        compare(NumpySession(), NumpySession(), colours, PREPROCESSING, batch_sizes=sizes, quiet=True)


def test_one_changed_byte_of_the_graph_is_named(tiny_bundle: Bundle) -> None:
    assert tiny_bundle.require_certificate().verdict == "pass"
    data = bytearray(tiny_bundle.model_path.read_bytes())
    data[len(data) // 2] ^= 1
    tiny_bundle.model_path.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.onnx is corrupt: sha256"):
        Bundle.open(tiny_bundle.path)


def test_one_changed_label_makes_the_certificate_one_of_other_files(tiny_bundle: Bundle) -> None:
    manifest = json.loads((tiny_bundle.path / MANIFEST).read_text())
    manifest["labels"][0] = "crimson"
    write_json(tiny_bundle.path / MANIFEST, manifest)
    with pytest.raises(CheckFailed, match=r"is of other files \(manifest\.json differ\)"):
        Bundle.open(tiny_bundle.path).require_certificate()


def test_certificate_of_another_bundle_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other.vitx", fault="drift")
    (other.path / CERTIFICATE).write_bytes((tiny_bundle.path / CERTIFICATE).read_bytes())
    with pytest.raises(CheckFailed, match="is of other files"):
        Bundle.open(other.path).require_certificate()


def test_a_file_that_only_the_certificate_names_is_named(tiny_bundle: Bundle) -> None:
    found = tiny_bundle.require_certificate()
    more = found.model_copy(update={"subject": {**found.subject, "witness.safetensors": "0" * 64}}).sealed()
    write_json(tiny_bundle.path / CERTIFICATE, more)
    with pytest.raises(CheckFailed, match=r"is of other files \(witness\.safetensors differ\): run"):
        tiny_bundle.require_certificate()


def test_certificate_that_says_fail_is_refused(uncertified_bundle: Bundle, colours: ImageSet) -> None:
    certificate = certify(
        NumpySession(),
        load_session(uncertified_bundle, device="cpu", threads=1),
        colours,
        PREPROCESSING,
        subject=uncertified_bundle.subject(),
        criteria=AcceptanceCriteria(max_logit_error=1e-12),
        quiet=True,
    )
    write_json(uncertified_bundle.path / CERTIFICATE, certificate)
    with pytest.raises(CheckFailed, match="says fail: largest logit error"):
        uncertified_bundle.require_certificate()


def test_a_certificate_that_is_written_is_accepted_by_the_bundle(
    tiny_run: RunFolder, uncertified_bundle: Bundle
) -> None:
    reference, candidate = open_model(tiny_run.path, device="cpu"), open_model(uncertified_bundle.path, device="cpu")
    certificate = certify_models(reference, candidate, open_images(reference.data, "val"), write=True, quiet=True)
    assert uncertified_bundle.require_certificate() == certificate
    ema = tiny_run.checkpoint_path("best") / "ema.safetensors"
    assert certificate.reference_sha256 == sha256_file(ema)
    assert certificate.reference == "colours, checkpoint best"
    assert certificate.images == 360


def test_what_another_comparison_finds_meanwhile_stays(
    tiny_run: RunFolder, uncertified_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vitx parity RUN BUNDLE --runtime openvino` may end while the witness set runs through every other runtime."""

    def certified() -> Certificate:
        reference, candidate = (open_model(one.path, device="cpu") for one in (tiny_run, uncertified_bundle))
        return certify_models(reference, candidate, open_images(reference.data, "val"), write=True, quiet=True)

    (own,) = (before := certified()).executables
    another = own.executable.model_copy(update={"runtime": "openvino"})
    found = own.model_copy(update={"executable": another, "verdict": "fail"})

    def meanwhile(*given: Any, quiet: bool) -> list[Verdict]:
        record_verdicts(uncertified_bundle, before, [found])
        return []

    monkeypatch.setattr(certification, "verdicts_of_bundle", meanwhile)
    assert [(each.executable.runtime, each.verdict) for each in certified().executables] == [
        ("openvino", "fail"),
        ("onnxruntime", "pass"),
    ]


def test_parity_command_prints_and_writes_the_same_certificate(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx
) -> None:
    code, out, err = vitx("parity", tiny_run.path, uncertified_bundle.path, "--device", "cpu", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert printed.pop("written") is True
    assert [printed.pop(name) for name in ("notes", "served", "trace")] == [[], None, None]
    assert Certificate.model_validate(printed) == uncertified_bundle.certificate()
    # The bundle of the tests says that it comes from other weights.
    assert "was exported from other weights than this run's 'best'" in err


def test_parity_command_on_another_function_fails_and_writes_why(
    colours_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    from run_fixture import write_run

    other = write_run(tmp_path / "other", str(colours_folder), bias_change=3.0)
    bundle = write_bundle(tmp_path / "tiny.vitx", data=str(colours_folder))
    code, out, err = vitx("parity", other.path, bundle.path, "--device", "cpu", "--quiet")
    assert code == 1
    assert err.startswith(f"error: '{bundle.path}' is not the checkpoint's equal: ")
    assert "largest logit error 3, at batch size" in err
    assert "verdict" in out
    assert "the clearest of" in out
    certificate = bundle.certificate()
    assert certificate is not None
    assert certificate.verdict == "fail"


def test_parity_command_with_too_high_a_demand_writes_nothing(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx
) -> None:
    code, out, err = vitx("parity", tiny_run.path, uncertified_bundle.path, "--max-flip-rate", "0.002")
    assert (code, out) == (2, "")
    assert "360 images cannot prove a flip rate of at most 0.002: it takes 1497 without a flip" in err
    assert not (uncertified_bundle.path / CERTIFICATE).exists()


def test_parity_command_on_digits_names_the_class_that_differs(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx
) -> None:
    code, _, err = vitx("parity", tiny_run.path, uncertified_bundle.path, "--data", "digits")
    assert code == 2
    assert "'digits' has 10 classes, the model has 4" in err
