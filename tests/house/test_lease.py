"""benchmarks/lease.py without a GPU: what it imports, its rehearsal, and how it reports steps that fail."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lease
from lease_steps import training
from lease_steps.cuda_tools import launch_summary, parse_raw_page
from lease_steps.step_report import Report

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
CARRIED = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
# Distribution by import name, where they differ.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
# Imported only while a step runs, or by timm, torch and typer.
LATER = {"sklearn", "tensorboard", "torchvision", "triton", "rich"}
LATER |= {"onnx", "onnx_ir", "onnxruntime", "onnxscript", "ml_dtypes"}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def packages() -> set[str]:
    """The distributions that the rented machine has, and those that are carried to it."""
    lines = (BENCHMARKS / "lease_steps" / "machine_packages.txt").read_text().splitlines()
    return {normal(line) for line in lines if line and not line.startswith("#")} | {normal(name) for name in CARRIED}


def files_of_ours() -> list[Path]:
    """Every file of this repository that the steps import, found by importing them."""
    modules = ["lease", *(f"lease_steps.{part}" for part in lease.PARTS), "vitx.cli.train"]
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(BENCHMARKS)]!r}\n"
        f"import {', '.join(modules)}\n"
        "print(*{m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)}, sep='\\n')"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    paths = {Path(line).resolve() for line in finished.stdout.splitlines()}
    ours = (path for path in paths if path.is_relative_to(ROOT) and "site-packages" not in path.parts)
    return sorted(path for path in ours if path.is_file())


def imported_when_imported(path: Path) -> set[str]:
    """Top-level packages that are imported with the file."""
    names: set[str] = set()
    statements = list(ast.parse(path.read_text()).body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Try | ast.With) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
        ):
            statements += node.body
    return names


def test_every_import_is_of_that_machine_or_carried_and_is_looked_for_before_the_first_step() -> None:
    files = files_of_ours()
    assert {"trainer.py", "reattention.py", "training_runs.py"} <= {path.name for path in files}
    ours = {path.stem for path in BENCHMARKS.glob("*.py")} | {"vitx", "reference", "support", "lease_steps"}
    foreign = {name: path for path in files for name in imported_when_imported(path)}
    foreign = {name: path for name, path in foreign.items() if name not in ours | set(sys.stdlib_module_names)}
    known = packages()
    for name, path in [*foreign.items(), *((name, BENCHMARKS) for name in LATER)]:
        assert normal(DISTRIBUTIONS.get(name, name)) in known, f"{path} imports {name}, which that machine lacks"
    assert set(lease.PACKAGES) == foreign.keys() | LATER | CARRIED


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize("name", training.RECIPES)
def test_its_recipes_fit_the_one_epoch_that_they_train(name: str, rehearsed: bool, tmp_path: Path) -> None:
    """A cool-down of ten epochs, which the published recipe has, made every step of the part fail."""
    report = Report(tmp_path / "training.json", "speed", rehearsed=rehearsed)
    assert training.recipe_for(name, tmp_path, report).epochs == 1


def test_a_rehearsal_ends_with_a_table(tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            sys.executable,
            BENCHMARKS / "lease.py",
            "kernels",
            "--out",
            tmp_path,
            "--rehearse",
            "--only",
            "machine,ceilings",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert [step["outcome"] for step in report["steps"].values()] == ["done", "done"]
    assert report["steps"]["ceilings"]["rows"]["float16"]["flops_per_second"] > 0
    table = finished.stdout.splitlines()
    assert len(table) <= 60
    assert max(map(len, table)) <= 150
    assert any("float16 product" in line for line in table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "kernels.log"]


def test_steps_that_fail_or_time_out_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them begins: its outcome is its own."""
    monkeypatch.setitem(lease.PARTS, "kernels", {"ceilings": 0.05, "nonsense": 30, "machine": 0.1})
    assert lease.main(["kernels", "--out", str(tmp_path), "--rehearse"]) == 1
    steps = json.loads((tmp_path / "kernels.json").read_text())["steps"]
    assert steps["ceilings"]["outcome"] == "over its limit of 0.2 s"
    assert steps["nonsense"]["outcome"].startswith("failed (2): ")
    assert "invalid choice: 'nonsense'" in steps["nonsense"]["outcome"]
    assert steps["machine"]["outcome"] == "over its limit of 0.4 s"
    assert "over its limit" in capsys.readouterr().out


def test_steps_without_time_left_are_listed(tmp_path: Path) -> None:
    assert lease.main(["training", "--out", str(tmp_path), "--rehearse", "--minutes", "0.01"]) == 1
    steps = json.loads((tmp_path / "training.json").read_text())["steps"]
    assert {step["outcome"] for step in steps.values()} == {"skipped: time"}
    assert list(steps) == list(lease.PARTS["training"])


def test_without_a_gpu_it_names_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lease.main(["networks", "--out", str(tmp_path)]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("error: no GPU")
    assert "--rehearse" in errors


def test_a_missing_package_is_named_with_how_to_carry_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "PACKAGES", (*lease.PACKAGES, "pydantic_missing"))
    assert lease.main(["networks", "--out", str(tmp_path), "--rehearse"]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("error: missing package: pydantic_missing: carry")
    assert "pip install --no-index --target" in errors
    assert "What to carry" in errors
    assert "## What to carry" in (BENCHMARKS / "lease.md").read_text()


@pytest.mark.parametrize("part", lease.PARTS)
def test_each_step_of_a_part_is_in_its_file(part: str) -> None:
    module = importlib.import_module(f"lease_steps.{part}")
    assert list(module.STEPS) == list(lease.PARTS[part])


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        lease.main(["kernels", "--out", str(tmp_path), "--only", "machine,celings"])
    assert refused.value.code == 2
    assert "no step celings: the steps of kernels are machine, ceilings" in capsys.readouterr().err


def test_rows_are_written_as_soon_as_they_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    first, second = Report(path, "first"), Report(path, "second")
    first.row("a", {"ms": 1.0}, "a took 1 ms")
    second.row("b", 2)
    whole = json.loads(path.read_text())
    assert whole["steps"] == {
        "first": {"rows": {"a": {"ms": 1.0}}, "lines": ["a took 1 ms"]},
        "second": {"rows": {"b": 2}},
    }
    assert second.rows_of("first") == {"a": {"ms": 1.0}}
    assert list(tmp_path.iterdir()) == [path]


def test_nsight_computes_raw_page_is_read() -> None:
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    header = ["ID", "Kernel Name", "gpu__time_duration.sum", "launch__registers_per_thread"]
    header += [stall.format("wait"), stall.format("math_pipe_throttle")]
    units, launch = (
        ["", "", "ns", "register/thread", "inst", "inst"],
        ["0", "mix_kernel", "1,234,567", "128", "0.5", "2.25"],
    )
    text = "ran 1,12,17,33\n==PROF== Connected\n" + "\n".join(
        ",".join(f'"{cell}"' for cell in line) for line in (header, units, launch)
    )
    (found,) = parse_raw_page(text)
    assert found["gpu__time_duration.sum [ns]"] == 1234567.0
    assert launch_summary(found).startswith("mix_kernel: 1235 µs, SM nan %")
    assert launch_summary(found).endswith("128 registers, occupancy nan %, stalls math_pipe_throttle 2.2 wait 0.5")
    assert parse_raw_page("==ERROR== nothing") == []
