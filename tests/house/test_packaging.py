"""The layout: folders at the root, one import name. Mapping, links, packages and the built wheel agree."""

import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOMS = {name: folder for name, folder in SETUPTOOLS["package-dir"].items() if name != "vitx"}


def test_every_room_is_mapped_and_linked() -> None:
    for name, folder in ROOMS.items():
        link = ROOT / "vitx" / name.removeprefix("vitx.")
        assert link.is_symlink(), f"{link} must be a link"
        assert link.resolve() == (ROOT / folder).resolve()
    links = {path.name for path in (ROOT / "vitx").iterdir() if path.is_symlink()}
    assert links == {name.removeprefix("vitx.") for name in ROOMS}


def test_every_package_is_listed() -> None:
    """A folder that is not listed vanishes from the wheel."""
    listed = set(SETUPTOOLS["packages"])
    found = {"vitx", "vitx.cli"}
    for name, folder in ROOMS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *parts)))
    assert listed == found


def test_no_folder_of_code_lacks_its_init() -> None:
    for folder in ROOMS.values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has code but no __init__.py"


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vitx", f"vitx-{PYPROJECT['project']['version']}.dist-info"}
    for name, folder in {**ROOMS, "vitx": "vitx"}.items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT / folder)
            if name == "vitx" and relative.parts[0] in {room.removeprefix("vitx.") for room in ROOMS}:
                continue
            assert f"{name.replace('.', '/')}/{relative.as_posix()}" in names
    assert {"vitx/py.typed", "vitx/serve/http/page.html", "vitx/models/zoo.json"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_version_is_stated_once() -> None:
    import vitx

    assert vitx.__version__ == PYPROJECT["project"]["version"]
