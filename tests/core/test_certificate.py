"""A certificate holds the digest of its own file, and any change of the file is found."""

import hashlib
import json
from pathlib import Path

import pytest

from bundle_fixture import certificate
from vitx.core.certificate import Certificate, TokenSimilarity
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import read_sealed, write_bytes, write_json


def read(path: Path) -> Certificate:
    return read_sealed(path, Certificate, remedy="do it again")


def test_the_digest_is_of_the_files_bytes_with_the_field_empty(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    write_json(path, certificate(reference="Größe").sealed())
    text = path.read_text(encoding="utf-8")
    digest = json.loads(text)["sha256"]
    assert digest == hashlib.sha256(text.replace(digest, "").encode()).hexdigest()
    assert "Größe" in text
    assert read(path) == certificate(reference="Größe", sha256=digest)


def test_sealing_twice_changes_nothing() -> None:
    once = certificate().sealed()
    assert once.sealed() == once
    assert once.sha256 != certificate(verdict="fail").sealed().sha256


def test_what_json_cannot_hold_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        certificate(mcnemar_p=float("nan")).sealed()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"accuracy_candidate": 0.5', '"accuracy_candidate": 0.9'),
        ('"verdict": "pass"', '"verdict":  "pass"'),
        ('"images": 300,', '"images": 3e2,'),
        ('"accuracy_candidate": 0.5', '"accuracy_candidate": 5e999'),
        ("}\n", "}"),
    ],
)
def test_a_changed_byte_is_found(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "certificate.json"
    write_json(path, certificate().sealed())
    content = path.read_text()
    assert old in content
    write_bytes(path, content.replace(old, new).encode())
    with pytest.raises((CheckFailed, InputError)) as caught:
        read(path)
    if new != '"images": 3e2,':
        assert str(caught.value) == (f"{path} was changed after it was written (its own digest differs): do it again")
        assert caught.value.exit_code == 1


def test_a_certificate_without_a_seal_or_with_that_of_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    for wrong in (certificate(), certificate(sha256=certificate(images=301).digest())):
        write_json(path, wrong)
        with pytest.raises(CheckFailed, match="its own digest differs"):
            read(path)
    with pytest.raises(InputError, match=r"other\.json does not exist"):
        read(tmp_path / "other.json")


TOKENS = TokenSimilarity(images=4, layers=("a",), reference=(0.5,), candidate=(0.6,), allowed=0.01)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"batch_size": -1}, "batch_size: Input should be greater than or equal to 0"),
        ({"batch_sizes": (1, 0)}, "batch_sizes.1: Input should be greater than 0"),
        ({"batch_sizes": ()}, "batch_sizes: Tuple should have at least 1 item after validation, not 0"),
        (
            {"max_logit_error_by_batch_size": {}},
            "max_logit_error_by_batch_size: Dictionary should have at least 1 item",
        ),
        (
            {"token_similarity": TOKENS.model_copy(update={"layers": ("a", "b")})},
            "token_similarity: Value error, 2 layers, 1 and 1 numbers: expected one of each side for every layer",
        ),
        (
            {"token_similarity": TOKENS.model_copy(update={"layers": (), "reference": (), "candidate": ()})},
            "token_similarity: Value error, is of no layer: expected null where none was measured",
        ),
    ],
)
def test_what_no_comparison_gives_is_no_certificate_however_sealed(
    tmp_path: Path, changes: dict[str, object], fault: str
) -> None:
    path = tmp_path / "certificate.json"
    write_json(path, certificate().model_copy(update=changes).sealed())
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is not a valid Certificate: {fault}")


def test_the_worst_layer_is_that_of_the_largest_difference_either_way() -> None:
    similarity = TokenSimilarity(
        images=4, layers=("a", "b", "c"), reference=(0.5, 0.9, 0.2), candidate=(0.6, 0.7, 0.3), allowed=0.01
    )
    assert similarity.worst() == ("b", 0.9, 0.7)
    assert similarity.model_copy(update={"candidate": (0.9, 0.8, 0.3)}).worst() == ("a", 0.5, 0.9)
    with pytest.raises(ValueError, match="shorter"):
        similarity.model_copy(update={"candidate": (0.9, 0.8)}).worst()


def test_a_certificate_of_few_fields_claims_the_least(tmp_path: Path) -> None:
    """Fields that older files lack: no probe image, and so no bound below one."""
    write_json(tmp_path / "certificate.json", certificate().sealed())
    found = read(tmp_path / "certificate.json").model_copy(update={"sha256": ""})
    assert (found.format_version, found.batch_size, found.probe_images, found.probe_flips) == (2, 0, 0, 0)
    assert (found.probe_flip_rate_bound, found.max_position_error) == (1.0, 0.0)
    assert (found.min_cosine, found.mean_cosine, found.ece_reference, found.ece_candidate) == (1.0, 1.0, 0.0, 0.0)
    assert (found.token_similarity, found.classes_sha256, found.sha256) == (None, "", "")
