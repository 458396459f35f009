"""What a plan's sidecar allows, without any TensorRT."""

from importlib import metadata
from pathlib import Path

import pytest

from gpu_fixture import OPTIONS, plan_info, write_plan_files
from vitx.core import tensorrt_plan as plans
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import write_json
from vitx.core.tensorrt_plan import InstalledLibrary, check_plan, library_for, loads_with, read_sidecar, runs_on

COMPATIBLE = plan_info(options=OPTIONS.model_copy(update={"version_compatible": True}))


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make these modules the installed ones."""
    monkeypatch.setattr(
        plans,
        "installed_library",
        lambda module: InstalledLibrary(module, versions[module]) if module in versions else None,
    )


def test_the_full_library_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorrt="10.17.0.1", tensorrt_lean="11.4.0.106")
    assert library_for(COMPATIBLE) == ("tensorrt", "10.17.0.1")


def test_the_lean_runtime_where_the_full_one_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorrt="10.9.0.34", tensorrt_lean="11.4.0.106")
    assert library_for(COMPATIBLE) == ("tensorrt_lean", "11.4.0.106")


def test_the_lean_runtime_takes_version_compatible_plans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorrt_lean="10.16.1.11")
    assert library_for(COMPATIBLE).module == "tensorrt_lean"
    with pytest.raises(EnvironmentMissing, match=r"pip install 'tensorrt==10\.16\.1\.11'") as caught:
        library_for(plan_info())
    assert caught.value.exit_code == 3


def test_rtx_has_no_lean_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorrt="10.16.1.11", tensorrt_lean="10.16.1.11")
    with pytest.raises(EnvironmentMissing, match=r"pip install 'tensorrt-rtx==1\.7\.1\.116'"):
        library_for(plan_info(flavor="tensorrt-rtx", version="1.7.1.116"))


def test_a_plan_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_plan_files(tmp_path / "a.plan", plan_info())
    install(monkeypatch, tensorrt="11.4.0.106")
    with pytest.raises(CheckFailed, match=r"tensorrt 10\.16\.1\.11 and 11\.4\.0\.106 is installed: .* exactly"):
        check_plan(path, architecture="sm89")
    install(monkeypatch, tensorrt="10.16.1.11")
    assert check_plan(path, architecture="sm89") == plan_info()
    with pytest.raises(CheckFailed, match="was built for sm89 and this GPU is sm120"):
        check_plan(path, architecture="sm120")


def test_build_numbers_count_and_post_releases_do_not() -> None:
    assert loads_with(plan_info(), "10.16.1.11.post1")
    assert not loads_with(plan_info(), "10.16.1.12")
    assert loads_with(COMPATIBLE, "11.0.0.1")
    assert not loads_with(COMPATIBLE, "12.0.0.1")


def test_hardware_compatible_plans_need_ampere() -> None:
    wide = plan_info(options=OPTIONS.model_copy(update={"hardware_compatible": True}))
    assert [runs_on(wide, name) for name in ("sm75", "sm80", "sm120")] == [False, True, True]


def test_a_foreign_sidecar_is_refused(tmp_path: Path) -> None:
    path = write_plan_files(tmp_path / "a.plan", plan_info())
    (tmp_path / "a.plan.json").write_text("{}")
    with pytest.raises(InputError, match=r"a\.plan\.json"):
        read_sidecar(path)
    write_json(tmp_path / "a.plan.json", COMPATIBLE.model_copy(update={"version": "newest"}))
    with pytest.raises(InputError, match=r"a\.plan\.json is not a valid PlanInfo: version: String should match"):
        check_plan(path)
    (tmp_path / "a.plan.json").unlink()
    with pytest.raises(InputError, match="build it with vitx export, which writes both"):
        read_sidecar(path)


def test_a_plan_is_the_one_its_sidecar_describes(tmp_path: Path) -> None:
    path = write_plan_files(tmp_path / "a.plan", plan_info())
    assert plans.sidecar_path(path) == tmp_path / "a.plan.json"
    assert plans.read_plan(path) == plan_info()
    same_size = bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    for content in (same_size, path.read_bytes() + b"x"):
        path.write_bytes(content)
        with pytest.raises(CheckFailed) as caught:
            plans.read_plan(path)
        assert str(caught.value) == f"'{path}' is not the plan its sidecar describes: build it again"
    other_size = write_plan_files(tmp_path / "b.plan", plan_info(size=plan_info().size + 1))
    with pytest.raises(CheckFailed, match="is not the plan"):
        plans.read_plan(other_size)
    path.unlink()
    with pytest.raises(InputError) as missing:
        plans.read_plan(path)
    assert str(missing.value) == f"no plan at '{path}'"


def test_what_a_plan_that_is_refused_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_plan_files(tmp_path / "a.plan", COMPATIBLE.model_copy(update={"architectures": ("sm86", "sm89")}))
    install(monkeypatch, tensorrt="12.0.0.1")
    with pytest.raises(CheckFailed) as version:
        check_plan(path, architecture="sm89")
    assert str(version.value) == (
        f"'{path}' was built with tensorrt 10.16.1.11 and 12.0.0.1 is installed: it loads with that version and newer "
        "ones, up to the next major; build it again, or install that version"
    )
    assert check_plan(path, version="10.16.1.11").size == COMPATIBLE.size  # the given version stands for the installed
    with pytest.raises(CheckFailed) as gpu:
        check_plan(path, architecture="sm80", version="10.16.1.11")
    assert str(gpu.value) == f"'{path}' was built for sm86, sm89 and this GPU is sm80: build it for this one"
    install(monkeypatch)
    with pytest.raises(EnvironmentMissing) as library:
        check_plan(path)
    assert str(library.value) == (
        "the plan needs tensorrt 10.16.1.11, which is not installed: pip install 'tensorrt==10.16.1.11'"
    )


def test_the_first_library_is_named_where_none_loads_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorrt="10.9.0.34", tensorrt_lean="10.8.0.43")
    assert library_for(COMPATIBLE) == ("tensorrt", "10.9.0.34")


@pytest.mark.parametrize(
    ("built", "here", "compatible", "plain"),
    [
        ("10.16.1.11", "10.16.1.11", True, True),
        ("10.16.1.11", "10.16.2.0", True, False),
        ("10.16.1.11", "10.16.1.10", False, False),
        ("10.16.1.11", "11.0.0.0", True, False),
        ("10.16.1.11", "12.0.0.0", False, False),
        ("11.0.0.0", "10.16.1.11", False, False),
    ],
)
def test_which_versions_load_a_plan(built: str, here: str, compatible: bool, plain: bool) -> None:
    for info, loads in ((COMPATIBLE, compatible), (plan_info(), plain)):
        assert loads_with(info.model_copy(update={"version": built}), here) is loads


def test_the_distributions_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library may come from several distributions; the first that is installed tells the version."""
    installed: dict[str, str] = {}
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    for flavor, module in (("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")):
        assert plans.MODULES[flavor] == module  # type: ignore[index]
        assert plans.installed_library(module) is None
    assert plans.installed_library(plans.LEAN_MODULE) is None
    assert asked == [
        *("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-rtx"),
        *("tensorrt-lean", "tensorrt-lean-cu13", "tensorrt-lean-cu12"),
    ]
    installed |= {"tensorrt-cu12": "10.1", "tensorrt-lean": "11.0"}
    assert plans.installed_library("tensorrt") == InstalledLibrary("tensorrt", "10.1")
    assert plans.installed_library("tensorrt_lean") == InstalledLibrary("tensorrt_lean", "11.0")


def test_names_that_other_tools_read() -> None:
    """The module to import, the folder in a bundle, the extras of pip, the flavors of a sidecar."""
    assert (plans.ENGINES_FOLDER, plans.LEAN_MODULE) == ("engines", "tensorrt_lean")
    assert plans.EXTRAS == {"tensorrt": "trt", "tensorrt-rtx": "trt-rtx"}
    assert plans.FLAVORS == ("tensorrt", "tensorrt-rtx")
    assert str(plans.Profile(minimum=1, optimum=8, maximum=32)) == "1..32 (best at 8)"
    info = plan_info(options=OPTIONS.model_dump() | {"plugin": "flash"})
    with pytest.raises(ValueError, match="plugin"):
        plan_info(options=OPTIONS.model_dump() | {"plugin": "other"})
    assert (info.format_version, info.options.plugin, info.warnings) == (1, "flash", ())
    assert (info.timing_cache_in_sha256, plan_info().options.plugin) == (None, None)
    assert runs_on(plan_info(architectures=("sm80", "sm89")), "sm89")
    assert not runs_on(plan_info(architectures=("sm80", "sm89")), "sm90")
