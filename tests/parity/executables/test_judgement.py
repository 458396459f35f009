"""A verdict by the witness set: every number by hand, on a session whose logits are given."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import LABELS
from vitx.core.bundle import Bundle
from vitx.core.certificate import Executable, Verdict
from vitx.core.errors import InputError
from vitx.core.machine import cpu_architecture, describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.parity.executables.judgement import judge_executable
from vitx.parity.executables.witness import Witness, read_witness
from vitx.parity.statistics import stratified_upper
from vitx.runtimes.session import Float32Array, Session
from witnessed_bundle import WITNESS_IMAGES

CENSUS, POPULATION = 85, 360
COUNTS = {"census": CENSUS, "sample": WITNESS_IMAGES - CENSUS, "population": POPULATION}


class Looked(Session):
    """Looks the logits up by the image's bytes; `alone` are those of an image that comes alone."""

    def __init__(self, witness: Witness, logits: Any = None, alone: Any = None, precision: str = "fp32") -> None:
        super().__init__()
        together = witness.logits if logits is None else logits
        self.rows = {image.tobytes(): row for image, row in zip(witness.pixels, together, strict=True)}
        self.alone = (
            {image.tobytes(): row for image, row in zip(witness.pixels, alone, strict=True)}
            if alone is not None
            else self.rows
        )
        self.precision, self.batches = precision, list[int]()

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.batches.append(len(images))
        rows = self.rows if len(images) > 1 else self.alone
        return np.stack([rows[image.tobytes()] for image in images]).astype(np.float32)

    def describe(self) -> dict[str, Any]:
        return {"runtime": "table", "version": "7", "provider": "CPU", "precision": self.precision, "threads": 1}


@pytest.fixture
def witness(witnessed: Bundle) -> Witness:
    found = read_witness(witnessed)
    assert found is not None
    return found


def flipped(witness: Witness, *rows: int) -> Any:
    """The logits with the two largest of these rows exchanged."""
    logits = witness.logits.copy()
    for row in rows:
        first, second = np.argsort(logits[row])[[-1, -2]]
        logits[row, [first, second]] = logits[row, [second, first]]
    return logits


def just_flipped(witness: Witness, *rows: int) -> Any:
    """The logits with the largest of these rows a little below the next."""
    logits = witness.logits.copy()
    for row in rows:
        first, second = np.argsort(logits[row])[[-1, -2]]
        logits[row, first] = logits[row, second] - 1e-3
    return logits


def judged(bundle: Bundle, session: Session, rate: float = 0.02, **options: Any) -> Verdict:
    witness = read_witness(bundle)
    assert witness is not None
    return judge_executable(bundle, witness, session, rate, quiet=True, **options)


def test_every_field_of_a_pass(witnessed: Bundle, witness: Witness) -> None:
    session = Looked(witness, witness.logits + 2.5e-5)
    found = judged(witnessed, session)
    assert session.batches == [16] * 21 + [4] + [1] * 8
    assert found.executable == Executable(
        runtime="table",
        version="7",
        provider="CPU",
        architecture=cpu_architecture(),
        precision="fp32",
        artefacts={"model.onnx": witnessed.manifest.files["model.onnx"].sha256},
    )
    assert (found.verdict, found.evidence, found.flips) == ("pass", "witness set", 0)
    assert (found.images, found.population, found.max_flip_rate) == (WITNESS_IMAGES, POPULATION, 0.02)
    assert found.flip_rate_bound == stratified_upper(0, 0, **COUNTS)
    assert found.max_logit_error == pytest.approx(2.5e-5, rel=0.02)
    assert found.max_logit_error_allowed == 1e-4
    assert found.images_per_second is not None
    assert found.images_per_second > 0
    assert (found.machine, found.created[:2]) == (describe_machine(), "20")
    assert found.reasons == (
        f"0 of 340 witness images flipped: flip rate at most {found.flip_rate_bound:.6f} (95 %), allowed 0.02",
        f"largest logit error {found.max_logit_error:.3g}, allowed 0.0001",
        "all logits finite",
    )


@pytest.mark.parametrize(
    ("rows", "census", "sample"), [((0,), 1, 0), ((84,), 1, 0), ((85,), 0, 1), ((3, 84, 85, 339), 2, 2)]
)
def test_flips_are_counted_where_they_are(
    witnessed: Bundle, witness: Witness, rows: tuple[int, ...], census: int, sample: int
) -> None:
    found = judged(witnessed, Looked(witness, flipped(witness, *rows), precision="int8"), 0.9)
    assert (found.flips, found.flip_rate_bound) == (len(rows), stratified_upper(census, sample, **COUNTS))


def test_a_class_that_changes_alone_is_a_flip(witnessed: Bundle, witness: Witness) -> None:
    alone = flipped(witness, 5, 9)
    found = judged(witnessed, Looked(witness, alone=alone))
    assert found.flips == 1  # the first eight are run alone, 9 is not one of them
    assert found.verdict == "fail"
    assert found.max_logit_error == pytest.approx(float(np.abs(alone[5] - witness.logits[5]).max()), rel=1e-3)


@pytest.mark.parametrize(("precision", "share"), [("fp16", 0.02), ("bf16", 0.15), ("int8", 0.5), ("fp8", 0.5)])
def test_the_limit_is_that_of_the_coarser_precision(
    witnessed: Bundle, witness: Witness, precision: str, share: float
) -> None:
    allowed = share * witness.info.logit_std
    good = judged(witnessed, Looked(witness, witness.logits + 0.99 * allowed, precision=precision))
    assert (good.verdict, good.max_logit_error_allowed) == ("pass", allowed)
    bad = judged(witnessed, Looked(witness, witness.logits + 1.01 * allowed, precision=precision))
    assert (bad.verdict, bad.flips) == ("fail", 0)
    assert bad.reasons == (f"largest logit error {bad.max_logit_error:.3g}, allowed {allowed:.3g}",)
    manifest = witnessed.manifest.model_copy(update={"precision": precision})
    assert judged(Bundle(witnessed.path, manifest), Looked(witness)).max_logit_error_allowed == allowed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail(witnessed: Bundle, witness: Witness, value: float) -> None:
    logits = witness.logits.copy()
    logits[200, 3] = value
    found = judged(witnessed, Looked(witness, logits))
    assert (found.verdict, found.max_logit_error) == ("fail", float(np.finfo(np.float32).max))
    assert "logits that are not finite, allowed none" in found.reasons


def test_another_number_of_classes_fails(witnessed: Bundle, witness: Witness) -> None:
    found = judged(witnessed, Looked(witness, witness.logits[:, :3]))
    assert (found.verdict, found.flip_rate_bound) == ("fail", 1.0)
    assert found.reasons == ("logits (340, 3) where the checkpoint has (340, 4)",)


def test_a_set_that_is_too_small_is_refused_where_a_rate_has_to_be_proved(witnessed: Bundle, witness: Witness) -> None:
    provable = stratified_upper(0, 0, **COUNTS)
    assert 0.018 < provable < 0.019
    assert judged(witnessed, Looked(witness), provable, must_prove=True).verdict == "pass"
    with pytest.raises(InputError, match=re.escape(
        "is too small for a flip rate of at most 0.01: its 340 of 360 images prove 0.019 at best; export with more"
    )):  # fmt: skip
        judged(witnessed, Looked(witness), 0.01, must_prove=True)


def test_where_the_set_is_too_small_no_image_drawn_by_chance_may_flip(witnessed: Bundle, witness: Witness) -> None:
    """Of 360 images a hundredth are 3.6: three of the census may flip, a fourth not, and none of the others."""
    near = {"precision": "int8"}  # whose limit on logits lets images of small margin flip

    def verdict_of(*rows: int) -> Verdict:
        wide = Looked(witness, just_flipped(witness, *rows), **near)
        found = judged(witnessed, wide, 0.01)
        return found.model_copy(update={"reasons": tuple(text for text in found.reasons if "flipped" in text)})

    assert verdict_of().reasons[0].endswith("and none by chance, as 340 images prove no less than 0.0183")
    assert len(LABELS) == 4
    assert verdict_of(0, 1, 2).reasons[0].startswith("3 of 340 witness images flipped")
    assert verdict_of(0, 1, 2, 3).verdict == "fail"
    assert verdict_of(100).verdict == "fail"


def test_flips_that_were_certified_of_the_graph_are_counted_once(witnessed: Bundle, witness: Witness) -> None:
    """Three of the split, two of them here, at any place: they are what was certified, and others are new."""
    ordered = np.sort(witness.logits, axis=1)
    margin = ordered[:, -1] - ordered[:, -2]
    drawn, other = (int(row) for row in CENSUS + np.argsort(margin[CENSUS:])[:2])  # int8's limit lets these flip
    known = replace(witness, info=witness.info.model_copy(update={"split_flips": 3, "flipped": (0, drawn)}))

    def verdict_of(*rows: int, rate: float) -> Verdict:
        session = Looked(witness, just_flipped(witness, *rows), precision="int8")
        return judge_executable(witnessed, known, session, rate, quiet=True)

    proved = stratified_upper(0, 0, **COUNTS, known=3)
    found = verdict_of(0, drawn, rate=proved)
    assert (found.verdict, found.flips, found.flip_rate_bound) == ("pass", 2, proved)
    assert found.reasons[0] == (
        f"2 of 340 witness images flipped, 0 beside the 3 certified of the split: flip rate at most {proved:.6f} "
        f"(95 %), allowed {proved:g}"
    )
    assert verdict_of(rate=proved).flip_rate_bound == proved  # none has to flip
    assert verdict_of(0, drawn, rate=0.01).verdict == "pass"  # too few to prove it: 3 of 360 are allowed
    assert verdict_of(0, drawn, rate=0.008).verdict == "fail"
    assert verdict_of(0, other, rate=0.01).verdict == "fail"  # another one, drawn by chance
    for rows, counts in (((0, 5), (1, 0)), ((other,), (0, 1)), ((0, drawn, 5, other), (1, 1))):
        assert verdict_of(*rows, rate=0.9).flip_rate_bound == stratified_upper(*counts, **COUNTS, known=3)


def test_the_bundle_is_not_touched(witnessed: Bundle, witness: Witness, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in witnessed.path.rglob("*")}
    judged(witnessed, Looked(witness))
    assert {path: path.stat().st_mtime_ns for path in witnessed.path.rglob("*")} == before
