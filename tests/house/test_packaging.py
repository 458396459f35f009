"""The layout is one ordinary package, and the built wheel and sdist have every file of it and no other code."""

import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"vitx-{PYPROJECT['project']['version']}"
LINKS = ("train", "export", "serve")


def files_of_the_package() -> set[str]:
    """Every file under vitx/, Python or not."""
    found = (path for path in (ROOT / "vitx").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_no_folder_of_code_lacks_its_init() -> None:
    for path in (ROOT / "vitx").rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has code but no __init__.py"


@pytest.mark.parametrize("name", LINKS)
def test_links_lead_to_their_rooms(name: str) -> None:
    link = ROOT / name
    if not link.is_symlink():
        pytest.skip("this checkout has no links, and needs none")
    assert link.resolve() == ROOT / "vitx" / name


def test_nothing_in_the_package_is_a_link() -> None:
    assert not [path for path in (ROOT / "vitx").rglob("*") if path.is_symlink()]


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"vitx", f"{NAME}.dist-info"}
    assert {name for name in names if name.startswith("vitx/")} == files_of_the_package()
    assert {"vitx/py.typed", "vitx/serve/http/page.html", "vitx/models/zoo.json"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_contents(wheel: Path) -> None:
    with tarfile.open(wheel.with_name(f"{NAME}.tar.gz")) as archive:
        names = {member.name.removeprefix(f"{NAME}/") for member in archive.getmembers() if member.isfile()}
    about = {"PKG-INFO", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.cfg"}
    assert {name for name in names if "/" not in name} == about
    assert {name.split("/")[0] for name in names if "/" in name} == {"vitx", "vitx.egg-info"}
    assert {name for name in names if name.startswith("vitx/")} == files_of_the_package()


def test_version_is_stated_once() -> None:
    import vitx

    assert vitx.__version__ == PYPROJECT["project"]["version"]


@pytest.mark.parametrize(
    ("extra", "name", "too_old", "oldest"),
    [
        # It has no `_start_asgi_task`: replies are written in one piece, a second pipelined request's never comes.
        ("serve", "uvicorn", "0.44.0", "0.45.0"),
        ("train", "timm", "1.0.25", "1.0.26"),  # its networks take no `is_causal`: no ViT of ours runs
        ("export", "timm", "1.0.25", "1.0.26"),
        ("export", "torch", "2.9.1", "2.10.0"),  # its exporter wants a batch that is never 1: nothing of ours is traced
    ],
)
def test_no_version_is_taken_with_which_nothing_works(extra: str, name: str, too_old: str, oldest: str) -> None:
    requirements = map(Requirement, PYPROJECT["project"]["optional-dependencies"][extra])
    (found,) = (one for one in requirements if one.name == name)
    assert too_old not in found.specifier
    assert oldest in found.specifier
