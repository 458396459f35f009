"""Signatures of bundles, by OpenSSF's model-signing: who made it. Digests alone only say that it fits together."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from vitx.core.bundle import LATENCY, SIGNATURE, Bundle, is_unfinished
from vitx.core.errors import CheckFailed, InputError, missing_package
from vitx.core.files import write_bytes

# Measured anew on each machine, and the signature itself.
_UNSIGNED = (LATENCY, SIGNATURE)
# Of the package's message, which quotes a list of messages.
_DIFFERENCES = (
    ("changed:", r"Hash mismatch for \\?'([^'\\]+)"),
    ("not signed:", r"Extra files found in model \\?'[^']*': ([^'\"\]]+)"),
    ("missing:", r"Missing files in model \\?'[^']*': ([^'\"\]]+)"),
)


def sign_bundle(bundle: Bundle, private_key: Path) -> None:
    """Sign every file of a bundle, its certificate and manifest included, into its `signature.json`.

    private_key: of an elliptic curve (P-256, P-384, P-521), in PEM, without a password. Raises InputError for another
    file, EnvironmentMissing without the package model-signing.
    """
    import tempfile

    path = bundle.path.resolve()  # as in `require_signature`
    signing = _signer(private_key).set_hashing_config(_hashing(path))
    with tempfile.TemporaryDirectory() as folder:
        signing.sign(path, Path(folder) / SIGNATURE)
        write_bytes(path / SIGNATURE, (Path(folder) / SIGNATURE).read_bytes())


def check_private_key(private_key: Path) -> None:
    """Raise what `sign_bundle` would raise of the key, before there is a bundle."""
    _signer(private_key)


def _signer(private_key: Path) -> Any:
    return _with_key(_package().signing.Config().use_elliptic_key_signer, "private", private_key)


def require_signature(path: Path, public_key: Path) -> None:
    """Raise CheckFailed unless the bundle at `path` is signed by the owner of `public_key`, every file as it is now.

    Raises InputError for a file that is no public key, EnvironmentMissing without the package model-signing.
    """
    path = path.resolve()  # of a relative one the package would look for what is left out below the bundle itself
    verifying = _package().verifying.Config().set_hashing_config(_hashing(path))
    _with_key(verifying.use_elliptic_key_verifier, "public", public_key)
    if not (path / SIGNATURE).is_file():
        raise CheckFailed(f"'{path}' is not signed, and a signature is required: export it with --sign KEY")
    try:
        verifying.verify(path, path / SIGNATURE)
    # The package raises what its parsers raise: for a file that is no signature these are of many kinds.
    except Exception as error:  # noqa: BLE001
        raise CheckFailed(f"the signature of '{path}' does not hold for '{public_key}': {_reason(error)}") from None


def _with_key(use: Callable[..., Any], kind: Literal["private", "public"], path: Path) -> Any:
    """Call `use` with the key at `path`; raise InputError for a file that is no such key."""
    try:
        return use(**{f"{kind}_key": path})
    # What the package's parser raises has no base class but this: a curve that it does not know is none of its own.
    except Exception as error:  # noqa: BLE001
        why = "it is of RSA or another kind" if isinstance(error, AttributeError) else error  # which has no curve
        wanted = f"no {kind} key of an elliptic curve (P-256, P-384, P-521), in PEM"
        raise InputError(f"'{path}' is {wanted}: {why}") from None


def _hashing(path: Path) -> Any:
    unfinished = [each for each in path.glob(".*") if is_unfinished(each.name)]  # of a killed `vitx bench`, say
    return _package().hashing.Config().set_ignored_paths(
        paths=[*(path / name for name in _UNSIGNED), *unfinished], ignore_git_paths=False
    )  # fmt: skip


def _package() -> Any:
    if importlib.util.find_spec("model_signing") is None:
        raise missing_package("model_signing", "sign")
    import model_signing

    return model_signing


def _reason(error: Exception) -> str:
    """The files that differ, in words; the package gives them with their digests as bytes."""
    text = str(error)
    found = [f"{what} {', '.join(names)}" for what, pattern in _DIFFERENCES if (names := re.findall(pattern, text))]
    return "; ".join(found) or text.strip().partition("\n")[0][:200] or type(error).__name__
