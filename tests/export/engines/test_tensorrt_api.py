"""Every line that calls TensorRT, against the names and signatures of TensorRT 10.16, 11.4 and TensorRT for RTX 1.7."""

import ast
import os
import subprocess
import sys
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
    "vitx/export/engines/inspector.py",
    "vitx/runtimes/tensorrt.py",
)
# TensorRT for RTX has no plugins compiled ahead of time.
CLASSIC_CALLERS = ("vitx/export/engines/flash_plugin.py",)
NEEDED = (
    *CALLERS,
    *CLASSIC_CALLERS,
    *(f"vitx/export/engines/{name}.py" for name in ("architectures", "build_log", "profiles", "tensorrt_graph")),
    *(f"vitx/export/engines/{name}.py" for name in ("flash_kernel", "flash_nodes")),
    "vitx/export/graph/dataflow.py",
    *(f"vitx/runtimes/{name}.py" for name in ("session", "cuda", "plan_choice", "requirements")),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules that call TensorRT and what they import, without the rest of their stages and its torch."""
    return copy_modules(tmp_path_factory.mktemp("sources"), NEEDED)


def type_errors(sources: Path, version: str, *names: str) -> str:
    """What a strict mypy says of the modules, with the stub's conditions set to one version."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    command += ["--explicit-package-bases", f"--cache-dir={sources / 'cache' / version}"]
    command += [f"--always-{str(name == version).lower()}={name}" for name in VERSIONS]
    command += names
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(sources), str(ROOT / "typings")])}
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


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


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_exist_in_every_version(sources: Path, version: str) -> None:
    callers = CALLERS if version == RTX else (*CALLERS, *CLASSIC_CALLERS)
    assert type_errors(sources, version, *callers) == ""
    # And the check can fail: of names, of attributes, of signatures, of names that other versions have.
    wrong, place = sources / "vitx" / "export" / "engines" / "wrong.py", "    def _logger("
    library = (sources / "vitx" / "export" / "engines" / "tensorrt_library.py").read_text()
    assert place in library
    foreign, error = FOREIGN[version]
    wrong.write_text(library.replace(place, WRONG.format(foreign=foreign) + place))
    errors = type_errors(sources, version, "vitx/export/engines/wrong.py")
    for text in ('"Bilder"', '"FP61"', '"max_workspace_size"', '"OnnxParser"', error):
        assert text in errors, f"{text} not found in:\n{errors}"


def test_a_call_of_one_flavour_alone_needs_its_branch(sources: Path) -> None:
    """Without its `hasattr`, what only TensorRT for RTX has is an error with the classic one."""
    path = sources / "vitx" / "export" / "engines" / "unguarded.py"
    text = (sources / "vitx" / "export" / "engines" / "tensorrt_library.py").read_text()
    guard = 'if not hasattr(self.trt, "ComputeCapability") or not hasattr(config, "set_compute_capability"):'
    assert guard in text
    path.write_text(text.replace(guard, "if not architectures:"))
    errors = type_errors(sources, "TENSORRT_11_4", "vitx/export/engines/unguarded.py")
    assert 'has no attribute "set_compute_capability"' in errors
    assert type_errors(sources, RTX, "vitx/export/engines/unguarded.py") == ""


RUNNING_WRONG = """    def wrong(self) -> None:
        self._engine.create_context()
        self._context(0).execute_async_v2(self._stream.handle)
        self._context(0).set_tensor_address(self._images.device)
        self.trt.ExecutionContextAllocationStrategy.ON_DEMAND

"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_check_of_the_serving_session_can_fail(sources: Path, version: str) -> None:
    path, place = sources / "vitx" / "runtimes" / "wrong.py", "    def _name("
    session = (sources / "vitx" / "runtimes" / "tensorrt.py").read_text()
    assert session.count(place) == 1
    path.write_text(session.replace(place, RUNNING_WRONG + place))
    errors = type_errors(sources, version, "vitx/runtimes/wrong.py")
    for text in ('"create_context"', '"execute_async_v2"', '"set_tensor_address"', '"ON_DEMAND"'):
        assert text in errors, f"{text} not found in:\n{errors}"


PLUGIN_WRONG = {
    '"liek"': ("query.like()", "query.liek()"),
    '"grid"': ("grid_y=batch", "grid=batch"),
    '"FormatCombination"': ("[trtp.AutoTuneCombination(", "[trtp.FormatCombination("),
    '"aot_implement"': ("@trtp.aot_impl(REATTENTION)", "@trtp.aot_implement(REATTENTION)"),
}


def test_the_check_of_the_plugin_can_fail(sources: Path) -> None:
    path = sources / "vitx" / "export" / "engines" / "wrong_plugin.py"
    text = (sources / "vitx" / "export" / "engines" / "flash_plugin.py").read_text()
    for right, wrong in PLUGIN_WRONG.values():
        assert right in text
        text = text.replace(right, wrong)
    path.write_text(text)
    errors = type_errors(sources, "TENSORRT_11_4", "vitx/export/engines/wrong_plugin.py")
    for name in PLUGIN_WRONG:
        assert name in errors, f"{name} not found in:\n{errors}"
    # TensorRT for RTX has no plugins: there every line is wrong.
    assert '"register"' in type_errors(sources, RTX, *CLASSIC_CALLERS)


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
