"""`vitx export --sign KEY` and `--require-signature PUBLIC_KEY`: whose bundle it is, by OpenSSF's model-signing."""

import base64
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from vitx.core.bundle import CERTIFICATE, LATENCY, MODEL, SIGNATURE, WITNESS, Bundle
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.parity.certification import record_verdicts
from vitx.parity.signature import _reason, require_signature, sign_bundle
from vitx.serve.models.loading import Loader
from vitx.serve.options import ServeOptions
from vitx.serve.server_core import verified
from witnessed_bundle import seal_certificate, seal_manifest, write_ir


class Keys(NamedTuple):
    private: Path
    public: Path


def write_keys(folder: Path, name: str, key: Any) -> Keys:
    keys = Keys(folder / f"{name}.pem", folder / f"{name}.pub")
    keys.private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    keys.public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return write_keys(tmp_path_factory.mktemp("keys"), "ours", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def signed(witnessed: Bundle, keys: Keys) -> Bundle:
    sign_bundle(witnessed, keys.private)
    return Bundle.open(witnessed.path)


def test_a_signed_bundle_is_opened_wherever_it_is(signed: Bundle, keys: Keys, tmp_path: Path) -> None:
    require_signature(signed.path, keys.public)
    moved = signed.path.rename(tmp_path / "another name.vitx")
    require_signature(moved, keys.public)
    (moved / LATENCY).write_text("{}")  # measured anew on each machine
    require_signature(moved, keys.public)
    (moved / MODEL).write_bytes(b"")
    with pytest.raises(CheckFailed, match=r"changed: model\.onnx$"):
        require_signature(moved, keys.public)


def test_the_package_s_own_command_verifies_it(signed: Bundle, keys: Keys) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(signed.path)]
    done = subprocess.run(
        [*command, "--signature", str(signed.path / SIGNATURE), "--public_key", str(keys.public)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_new_certificate_needs_a_new_signature_which_the_package_makes(
    signed: Bundle, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    certificate = signed.require_certificate()
    record_verdicts(signed, certificate.model_copy(update={"created": "later"}), [])
    assert "signature.json' was made with the certificate before and does not hold any more" in capfd.readouterr().err
    with pytest.raises(CheckFailed, match=r"changed: certificate\.json$"):
        require_signature(signed.path, keys.public)
    signature = signed.path / SIGNATURE
    signature.unlink()
    (signed.path / LATENCY).write_text("{}")
    command = [sys.executable, "-m", "model_signing", "sign", "key", str(signed.path), "--no-ignore-git-paths"]
    command += ["--private_key", str(keys.private), "--signature", str(signature)]
    subprocess.run([*command, "--ignore-paths", str(signed.path / LATENCY)], check=True)
    require_signature(signed.path, keys.public)
    signature.unlink()
    capfd.readouterr()
    record_verdicts(signed, certificate, [])
    assert capfd.readouterr().err == ""


def test_what_a_killed_writer_left_is_not_signed(signed: Bundle, keys: Keys) -> None:
    """A bundle is opened with it, so a signature must hold with it and without."""
    left = signed.path / f".{LATENCY}.abcd"
    left.write_bytes(b"{")
    require_signature(signed.path, keys.public)
    sign_bundle(Bundle.open(signed.path), keys.private)
    left.rename(signed.path / f".{CERTIFICATE}.efgh")
    require_signature(signed.path, keys.public)
    (signed.path / f".{CERTIFICATE}.efgh").rename(signed.path / ".other")
    with pytest.raises(CheckFailed, match=r"not signed: \.other$"):
        require_signature(signed.path, keys.public)


@pytest.mark.parametrize("name", [MODEL, CERTIFICATE, WITNESS, "manifest.json", "openvino/model.bin"])
def test_one_byte_of_any_file_is_named(signed: Bundle, keys: Keys, name: str) -> None:
    path = signed.path / name
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckFailed, match=f"the signature of .* does not hold for .*: changed: {name}$"):
        require_signature(signed.path, keys.public)


def test_what_is_sealed_again_is_not_signed_again(signed: Bundle, keys: Keys) -> None:
    write_ir(signed.path, "class_off_by_one")
    seal_certificate(seal_manifest(signed.path))
    with pytest.raises(
        CheckFailed, match=r"changed: certificate\.json, manifest\.json, openvino/model\.bin, openvino/model\.xml$"
    ):
        require_signature(signed.path, keys.public)


def test_added_and_removed_files_are_named(signed: Bundle, keys: Keys) -> None:
    (signed.path / "engines").mkdir()
    (signed.path / "engines" / "extra.plan").write_bytes(b"x")
    with pytest.raises(CheckFailed, match=r"not signed: engines/extra\.plan$"):
        require_signature(signed.path, keys.public)
    (signed.path / "engines" / "extra.plan").unlink()
    (signed.path / CERTIFICATE).unlink()
    with pytest.raises(CheckFailed, match=r"missing: certificate\.json$"):
        require_signature(signed.path, keys.public)


def test_another_s_signature_is_refused(witnessed: Bundle, keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="is not signed, and a signature is required: export it with --sign KEY"):
        require_signature(witnessed.path, keys.public)
    with pytest.raises(CheckFailed, match="is not signed"):
        require_signature(tmp_path / "none", keys.public)
    other = write_keys(tmp_path, "other", ec.generate_private_key(ec.SECP256R1()))
    sign_bundle(witnessed, other.private)
    require_signature(witnessed.path, other.public)
    with pytest.raises(CheckFailed, match="does not hold for"):
        require_signature(witnessed.path, keys.public)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"mediaType": 7}', b"[" * 100_000])
def test_what_is_no_signature_is_refused(signed: Bundle, keys: Keys, content: bytes) -> None:
    (signed.path / SIGNATURE).write_bytes(content)
    with pytest.raises(CheckFailed, match="does not hold for"):
        require_signature(signed.path, keys.public)


def test_a_signature_of_another_bundle_is_refused(signed: Bundle, keys: Keys) -> None:
    other = seal_manifest(signed.path)
    document = json.loads((other.path / SIGNATURE).read_text())
    (other.path / CERTIFICATE).write_text("{}")
    (other.path / SIGNATURE).write_text(json.dumps(document))
    with pytest.raises(CheckFailed, match=r"certificate\.json"):
        require_signature(other.path, keys.public)


def test_keys_that_are_none_are_refused(witnessed: Bundle, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no key")
    wrong = write_keys(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    for path in (tmp_path / "text", tmp_path / "none", tmp_path, wrong.private, keys.public):
        with pytest.raises(InputError, match="is no private key of an elliptic curve"):
            sign_bundle(witnessed, path)
    for path in (tmp_path / "text", tmp_path / "none", tmp_path, wrong.public, keys.private):
        with pytest.raises(InputError, match="is no public key of an elliptic curve"):
            require_signature(witnessed.path, path)
    other_kind = r"\(P-256, P-384, P-521\), in PEM: it is of RSA or another kind$"
    with pytest.raises(InputError, match=other_kind):
        sign_bundle(witnessed, wrong.private)
    with pytest.raises(InputError, match=other_kind):
        require_signature(witnessed.path, wrong.public)
    assert not (witnessed.path / SIGNATURE).exists()


def test_a_key_of_a_curve_that_nobody_knows_is_refused(witnessed: Bundle, keys: Keys, tmp_path: Path) -> None:
    """c2pnb176w1 in the place of P-256: the package cryptography has an error of its own for it, and no other base."""
    p256, other = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030004")
    odd = Keys(tmp_path / "odd.pem", tmp_path / "odd.pub")
    for path, name in zip(keys, ("PRIVATE", "PUBLIC"), strict=True):
        text = base64.encodebytes(base64.b64decode("".join(path.read_text().splitlines()[1:-1])).replace(p256, other))
        (tmp_path / f"odd{path.suffix}").write_text(
            f"-----BEGIN {name} KEY-----\n{text.decode()}-----END {name} KEY-----\n"
        )
    why = r"\(P-256, P-384, P-521\), in PEM: Curve 1\.2\.840\.10045\.3\.0\.4 is not supported$"
    with pytest.raises(InputError, match=rf"odd\.pem' is no private key of an elliptic curve {why}"):
        sign_bundle(witnessed, odd.private)
    with pytest.raises(InputError, match=rf"odd\.pub' is no public key of an elliptic curve {why}"):
        require_signature(witnessed.path, odd.public)


def test_without_the_package_its_extra_is_named(signed: Bundle, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "model_signing" else find_spec(name))
    with pytest.raises(EnvironmentMissing, match=r"model_signing.*vitx\[sign\]"):
        require_signature(signed.path, keys.public)
    with pytest.raises(EnvironmentMissing, match=r"model_signing.*vitx\[sign\]"):
        sign_bundle(signed, keys.private)


def test_an_error_of_several_lines_is_told_by_its_first() -> None:
    assert _reason(ValueError("  it is broken\nsee the log")) == "it is broken"
    assert _reason(ValueError("x" * 300)) == "x" * 200
    assert _reason(KeyError()) == "KeyError"


def test_a_relative_path_leaves_out_what_an_absolute_one_does(
    signed: Bundle, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (signed.path / ".latency.json.k3jx").write_text("half")  # of a killed `vitx bench`
    monkeypatch.chdir(signed.path.parent)
    here = Path(signed.path.name)
    for path in (signed.path, here):
        require_signature(path, keys.public)
    sign_bundle(Bundle.open(here), keys.private)
    for path in (signed.path, here):
        require_signature(path, keys.public)


def test_serve_and_predict_ask_for_it(
    signed: Bundle, witnessed: Bundle, keys: Keys, vitx: Any, colours_folder: Path, tmp_path: Path
) -> None:
    loader = Loader(ServeOptions(max_batch=2, device="cpu", threads=1, require_signature=keys.public))
    assert loader.verify(signed.path).bundle.path == signed.path
    assert len(verified(ServeOptions(bundles=(signed.path,), require_signature=keys.public))) == 1
    (signed.path / SIGNATURE).unlink()
    serve = ("serve", signed.path, "--port", "0", "--require-signature", keys.public)
    predict = (
        *("predict", signed.path, colours_folder / "val", "--out", tmp_path / "out"),
        *("--require-signature", keys.public),
    )
    for command in (serve, predict, (*serve, "--allow-uncertified"), (*predict, "--allow-uncertified")):
        code, out, err = vitx(*command)
        assert (code, out, "is not signed, and a signature is required" in err) == (1, "", True)
    assert not (tmp_path / "out").exists()
