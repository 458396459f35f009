"""Every line that calls TensorRT, against the names and signatures of TensorRT 10.16, 11.4 and TensorRT for RTX 1.7."""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from light_checkout import copy_modules

ROOT = Path(__file__).parents[3]
STUB = ROOT / "typings" / "tensorrt" / "__init__.pyi"
RTX = "TENSORRT_RTX_1_7"
VERSIONS = ("TENSORRT_10_16", "TENSORRT_11_4", RTX)
CALLERS = (
    "vitx/export/engines/tensorrt_engine.py",
    "vitx/export/engines/tensorrt_library.py",
    "vitx/runtimes/tensorrt.py",
)
# TensorRT for RTX has no plugins compiled ahead of time.
CLASSIC_CALLERS = ("vitx/export/engines/flash_plugin.py",)
NEEDED = (
    *CALLERS,
    *CLASSIC_CALLERS,
    *(
        f"vitx/export/engines/{name}.py"
        for name in ("architectures", "build_log", "fused_layers", "profiles", "tensorrt_graph")
    ),
    *(f"vitx/export/engines/{name}.py" for name in ("flash_kernel", "flash_nodes")),
    "vitx/export/graph/dataflow.py",
    *(f"vitx/runtimes/{name}.py" for name in ("session", "cuda", "plan_choice", "requirements")),
)


WRONG = """    def wrong(self) -> None:
        self.trt.Bilder
        self.trt.BuilderFlag.FP61
        config = self.trt.Builder(self.trt.Logger()).create_builder_config()
        config.max_workspace_size = 1
        self.trt.OnnxParser(config)
        {foreign}

"""
# What other versions have, and the words of the error with this one.
FOREIGN = {
    "TENSORRT_10_16": ("self.trt.ComputeCapability", '"ComputeCapability"'),
    "TENSORRT_11_4": (
        "self.trt.Builder(self.trt.Logger()).create_network().get_input(0).dtype = self.trt.DataType.UINT8",
        'Property "dtype" defined in "ITensor" is read-only',
    ),
    RTX: ("self.trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS", '"PREFER_AOT_PYTHON_PLUGINS"'),
}
RUNNING_WRONG = """    def wrong(self) -> None:
        self._engine.create_context()
        self._context(0).execute_async_v2(self._stream.handle)
        self._context(0).set_tensor_address(self._images.device)
        self.trt.ExecutionContextAllocationStrategy.ON_DEMAND

"""
PLUGIN_WRONG = {
    '"liek"': ("query.like()", "query.liek()"),
    '"grid"': ("grid_y=batch", "grid=batch"),
    '"FormatCombination"': ("[trtp.AutoTuneCombination(", "[trtp.FormatCombination("),
    '"aot_implement"': ("@trtp.aot_impl(REATTENTION)", "@trtp.aot_implement(REATTENTION)"),
}
GUARD = 'if not hasattr(self.trt, "ComputeCapability") or not hasattr(config, "set_compute_capability"):'


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules that call TensorRT and what they import, without the rest of their stages and its torch."""
    return copy_modules(tmp_path_factory.mktemp("sources"), NEEDED)


def replaced(path: Path, changes: Iterable[tuple[str, str]]) -> str:
    """The text of a module after changes: what to look for, and what to put there."""
    text = path.read_text()
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    return text


def write_wrong_modules(sources: Path) -> list[str]:
    """Copies of modules with wrong lines; wrong_VERSION.py is for that version alone."""
    engines = "vitx/export/engines"
    place = "    def _logger("
    texts = {
        f"{engines}/wrong_{version}.py": replaced(
            sources / engines / "tensorrt_library.py", [(place, WRONG.format(foreign=foreign) + place)]
        )
        for version, (foreign, _) in FOREIGN.items()
    }
    texts[f"{engines}/unguarded.py"] = replaced(
        sources / engines / "tensorrt_library.py", [(GUARD, "if not architectures:")]
    )
    texts[f"{engines}/wrong_plugin.py"] = replaced(sources / engines / "flash_plugin.py", PLUGIN_WRONG.values())
    place = "    def _name("
    texts["vitx/runtimes/wrong.py"] = replaced(
        sources / "vitx" / "runtimes" / "tensorrt.py", [(place, RUNNING_WRONG + place)]
    )
    for name, text in texts.items():
        (sources / name).write_text(text)
    return list(texts)


@pytest.fixture(scope="module")
def type_errors(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """(version, module) -> what a strict mypy says of the module, with the stub's conditions set to one version.

    mypy reads all modules once a version. Only the stub's sections differ between versions, so what the modules import
    from elsewhere is analysed once.
    """
    names = [*CALLERS, *CLASSIC_CALLERS, *write_wrong_modules(sources)]
    folder = tmp_path_factory.mktemp("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--explicit-package-bases"]
    command += [f"--cache-dir={folder / 'cache'}", f"--config-file={folder / 'mypy.ini'}", *names]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(sources), str(ROOT / "typings")])}

    @functools.cache
    def all_errors(version: str) -> list[str]:
        others = ",".join(name for name in VERSIONS if name != version)
        of_the_stub = f"[mypy-tensorrt,tensorrt.*]\nalways_true = {version}\nalways_false = {others}\n"
        (folder / "mypy.ini").write_text(f"[mypy]\n{of_the_stub}")
        done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout + done.stderr  # errors were found, the wrong modules'
        return done.stdout.splitlines()

    return lambda version, name: "\n".join(line for line in all_errors(version) if line.startswith(f"{name}:"))


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_exist_in_every_version(type_errors: Callable[[str, str], str], version: str) -> None:
    for name in CALLERS if version == RTX else (*CALLERS, *CLASSIC_CALLERS):
        assert type_errors(version, name) == ""
    # And the check can fail: of names, of attributes, of signatures, of names that other versions have.
    errors = type_errors(version, f"vitx/export/engines/wrong_{version}.py")
    for text in ('"Bilder"', '"FP61"', '"max_workspace_size"', '"OnnxParser"', FOREIGN[version][1]):
        assert text in errors, f"{text} not found in:\n{errors}"


def test_a_call_of_one_flavour_alone_needs_its_branch(type_errors: Callable[[str, str], str]) -> None:
    """Without its `hasattr`, what only TensorRT for RTX has is an error with the classic one."""
    errors = type_errors("TENSORRT_11_4", "vitx/export/engines/unguarded.py")
    assert 'has no attribute "set_compute_capability"' in errors
    assert type_errors(RTX, "vitx/export/engines/unguarded.py") == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_check_of_the_serving_session_can_fail(type_errors: Callable[[str, str], str], version: str) -> None:
    errors = type_errors(version, "vitx/runtimes/wrong.py")
    for text in ('"create_context"', '"execute_async_v2"', '"set_tensor_address"', '"ON_DEMAND"'):
        assert text in errors, f"{text} not found in:\n{errors}"


def test_the_check_of_the_plugin_can_fail(type_errors: Callable[[str, str], str]) -> None:
    errors = type_errors("TENSORRT_11_4", "vitx/export/engines/wrong_plugin.py")
    for name in PLUGIN_WRONG:
        assert name in errors, f"{name} not found in:\n{errors}"
    # TensorRT for RTX has no plugins: there every line is wrong.
    assert '"register"' in type_errors(RTX, *CLASSIC_CALLERS)


def names_of(body: list[ast.stmt], version: str) -> set[str]:
    """Classes, their members, functions and constants of one version, as dotted names."""
    names: set[str] = set()
    for entry in body:
        if isinstance(entry, ast.If) and version in ast.unparse(entry.test).split(" or "):
            names |= names_of(entry.body, version)
        if isinstance(entry, ast.AnnAssign):
            names.add(ast.unparse(entry.target))
        if isinstance(entry, ast.FunctionDef | ast.ClassDef):
            names.add(entry.name)
        if isinstance(entry, ast.ClassDef):
            names |= {f"{entry.name}.{member}" for member in names_of(entry.body, version)}
    return {name for name in names if "__" not in name and name not in VERSIONS}


# Printed by the bindings themselves: those of the stub's names that they do not have.
MISSING = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
for name in sys.stdin.read().split():
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        print(name)
"""


def missing_names(module: str, version: str, environment: dict[str, str]) -> list[str]:
    names = "\n".join(sorted(names_of(ast.parse(STUB.read_text()).body, version)))
    command = [sys.executable, "-c", MISSING, module]
    done = subprocess.run(command, input=names, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_rtx_stub_is_the_library() -> None:
    tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    if not tensorrt_rtx.__version__.startswith("1.7."):
        pytest.skip(f"the stub is of 1.7, installed is {tensorrt_rtx.__version__}")
    assert missing_names("tensorrt_rtx", RTX, dict(os.environ)) == []
    assert "KernelLaunchParams" in missing_names("tensorrt_rtx", "TENSORRT_11_4", dict(os.environ))


def test_the_classic_stubs_are_the_bindings(bindings: tuple[str, dict[str, str]]) -> None:
    version, environment = bindings
    assert missing_names("tensorrt_bindings", version, environment) == []
    assert "ComputeCapability" in missing_names("tensorrt_bindings", RTX, environment)  # the comparison can fail


# What of our code runs without a builder: the subclasses, the flags, the refusal when the library gives no builder.
DRIVE = """
import sys
sys.path[:0] = sys.argv[1:2]
import tensorrt_bindings as bindings
from vitx.export.engines.build_log import BuildLog, BuildProgress
from vitx.export.engines.tensorrt_library import Library, check_version

class Bar:
    def update(self, done, note=""):
        print(done, note)

check_version("tensorrt", bindings.__version__)
library, log, steps = Library("tensorrt", bindings), BuildLog(), BuildProgress(Bar())
logger, monitor = library._logger(log), library._monitor(steps)
assert isinstance(logger, bindings.ILogger) and isinstance(monitor, bindings.IProgressMonitor)
logger.log(bindings.ILogger.Severity.WARNING, "slow")
assert log.warnings() == ("slow",)
monitor.phase_start("Building", None, 2)
assert monitor.step_complete("Building", 0)
for flag in ("VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL"):
    assert flag in bindings.BuilderFlag.__members__
assert library.architectures() == ()
try:
    bindings.Builder(logger)
except TypeError as error:
    print(error)
"""


def test_our_code_runs_on_the_real_bindings(bindings: tuple[str, dict[str, str]], sources: Path) -> None:
    from vitx.core.machine import local_architectures

    if local_architectures():
        pytest.skip("tells what happens on a machine without a GPU")
    _, environment = bindings
    command = [sys.executable, "-c", DRIVE, str(sources)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["500 Building", "pybind11::init(): factory function returned nullptr"]
