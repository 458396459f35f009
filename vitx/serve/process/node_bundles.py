"""Whether a node of a Ray cluster has the bundles that were deployed.

Imports no Ray Serve: the check runs in a process of its own on every node, before anything is started there.
"""

from collections.abc import Sequence
from pathlib import Path

from vitx.core.bundle import MANIFEST
from vitx.core.errors import InputError
from vitx.core.files import sha256_file


def problem_on_node(paths: Sequence[Path], digests: Sequence[str]) -> str | None:
    """What is wrong with the bundles on this node, if anything. `digests`: of their manifests."""
    try:
        for path, digest in zip(paths, digests, strict=True):
            require_same(path, digest)
    except InputError as error:
        return str(error)
    return None


def require_same(path: Path, digest: str) -> None:
    """Raise InputError unless the bundle is here, and the one that the application was built with."""
    if not (path / MANIFEST).is_file():
        raise InputError(f"no bundle at '{path}': every node needs it there, in a shared folder or as a copy")
    if sha256_file(path / MANIFEST) != digest:
        raise InputError(f"the bundle at '{path}' is not the one that was deployed: deploy the application again")
