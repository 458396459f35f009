"""What a plan's sidecar allows, without any TensorRT."""

from pathlib import Path

import pytest

from gpu_fixture import OPTIONS, plan_info, write_plan_files
from vitx.core import tensorrt_plan as plans
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
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
    (tmp_path / "a.plan.json").unlink()
    with pytest.raises(InputError, match="build it with vitx export, which writes both"):
        read_sidecar(path)
