"""The flash plugin: on TensorRT's real bindings over stub libraries, and where it is refused."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import timm
from light_checkout import copy_modules
from onnx import helper

from cli_fixture import Vitx
from engines import write_half
from reference import randomize_like_trained
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.tensorrt_plan import read_plan
from vitx.export.engines import flash_plugin, tensorrt_library
from vitx.export.engines.flash_kernel import Operator, compiled_kernels
from vitx.export.engines.tensorrt_engine import engine_from_onnx

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
BATCH, TOKENS, HEADS, WIDTH = 5, 65, 4, 16

# Run in a process of its own: TensorRT's plugin framework calls our functions as it would for a builder. Dimension
# expressions, which only a builder can create, are Python objects with a value.
DRIVE = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[1:2]
batch, tokens, heads, width = map(int, sys.argv[2:])
import tensorrt_bindings as trt

class Expression:
    def __init__(self, value): self.value = value
    def is_constant(self): return False

class Expressions:
    def constant(self, value): return Expression(value)
    def operation(self, kind, left, right):
        a, b = left.value, right.value
        return Expression({"CEIL_DIV": lambda: -(-a // b), "SUM": lambda: a + b, "PROD": lambda: a * b}[kind.name]())

class Slots(list):
    def __init__(self, length=0): super().__init__([None] * length)
    nbSymExprs = property(len, lambda self, length: self.extend([None] * length))

class Registry:
    creators = []
    def register_creator(self, creator, namespace):
        self.creators.append(f"{namespace}::{creator.name} {creator.plugin_version}")
        return True
    def get_creator(self, name, version, namespace): return None

class Symbol: pass
class Launch: pass

trt.IDimensionExpr, trt.DimsExprs, trt.ISymExpr = Expression, Slots, Symbol
trt.get_plugin_registry = Registry
sys.modules["tensorrt"] = trt
import tensorrt_bindings.plugin as trtp
sys.modules["tensorrt.plugin"] = trt.plugin = trtp
from tensorrt_bindings.plugin import _lib, _plugin_class
from vitx.export.engines.flash_plugin import register

register("sm89")
register("sm89")  # a second plan in one process
assert trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS is not None
found = {"creators": Registry.creators}

def described(shape, kind):
    desc = trt.DynamicPluginTensorDesc()
    inner = trt.PluginTensorDesc()
    inner.dims, inner.type, inner.format = trt.Dims(shape), kind, trt.TensorFormat.LINEAR
    desc.desc = inner
    desc.min = desc.opt = desc.max = trt.Dims([8 if size < 0 else size for size in shape])
    return desc

for name, mixes in (("Reattention", 1), ("TalkingHeads", 2)):
    definition = _lib.QDP_REGISTRY[f"vitx::{name}"]
    plugin = _plugin_class._TemplateAOTPlugin(name, "vitx", definition.num_outputs)
    plugin.init(definition.register_func, {}, definition.aot_impl_attr_names, definition.aot_impl_func,
                definition.autotune_attr_names, definition.autotune_func)
    shapes = [[-1, tokens, heads, width]] * 3 + [[heads, heads], [heads]] * mixes
    half = trt.DataType.HALF if name == "Reattention" else trt.DataType.BF16
    kinds = [half] * 3 + [trt.DataType.FLOAT] * 2 * mixes
    types = plugin.get_output_data_types(kinds, [len(shape) for shape in shapes])
    dimensions = [[Expression(batch if size < 0 else size) for size in shape] for shape in shapes]
    (out,) = plugin.get_output_shapes(dimensions, [], Expressions())
    in_out = [described(shape, kind) for shape, kind in zip([*shapes, shapes[0]], [*kinds, half])]
    formats = plugin.get_supported_format_combinations(in_out, len(shapes))
    plugin.configure_plugin(in_out[:-1], in_out[-1:])
    launches = []
    for tactic in sorted(plugin.get_valid_tactics()):
        plugin.set_tactic(tactic)
        launch, integers = Launch(), Slots()
        plugin.get_launch_params(dimensions, in_out, len(shapes), launch, integers, Expressions())
        kernel, ptx = plugin.get_kernel([desc.desc for desc in in_out[:-1]], [in_out[-1].desc])
        launches.append({
            "tactic": tactic, "name": kernel, "ptx": ptx.decode(),
            "integers": [(entry.dtype.name, entry.expr.value) for entry in integers],
            **{key: value.expr.value for key, value in vars(launch).items()},
        })
    found[name] = {
        "types": [kind.name for kind in types], "shape": [size.value for size in out],
        "formats": [(desc.type.name, desc.format.name) for desc in formats], "launches": launches,
    }
print("found", json.dumps(found))
"""


@pytest.fixture(scope="module")
def light_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules that the plugin imports, without the rest of their packages: these would take long to import."""
    engines = (f"vitx/export/engines/{name}.py" for name in ("flash_plugin", "flash_kernel", "flash_nodes"))
    flash = (f"vitx/models/flash/{name}.py" for name in ("kernels", "reattention", "sizes", "tile_functions"))
    models = (*flash, "vitx/models/head_mix.py")
    return copy_modules(tmp_path_factory.mktemp("light"), (*engines, "vitx/export/graph/dataflow.py", *models))


def test_the_plugin_framework_gets_every_answer(bindings: tuple[str, dict[str, str]], light_sources: Path) -> None:
    """Types, shape, tactics, grid, block, shared memory, integers and PTX, through TensorRT's own Python code."""
    sizes = [str(size) for size in (BATCH, TOKENS, HEADS, WIDTH)]
    command = [sys.executable, "-c", DRIVE, str(light_sources), *sizes]
    done = subprocess.run(command, env=bindings[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("found ")[2])
    assert found.pop("creators") == ["vitx::Reattention 1", "vitx::TalkingHeads 1"]
    operators: tuple[Operator, ...] = ("Reattention", "TalkingHeads")
    for operator in operators:
        half = "HALF" if operator == "Reattention" else "BF16"
        mixes = 2 if operator == "Reattention" else 4
        answer = found[operator]
        assert answer["types"] == [half]
        assert answer["shape"] == [BATCH, TOKENS, HEADS, WIDTH]
        kinds = [half] * 3 + ["FLOAT"] * mixes + [half]
        assert answer["formats"] == [[kind, "LINEAR"] for kind in kinds]
        kernels = compiled_kernels(operator, "sm89", HEADS, WIDTH, "fp16" if half == "HALF" else "bf16")
        assert len(answer["launches"]) == len(kernels) == 3
        for tactic, (launch, kernel) in enumerate(zip(answer["launches"], kernels, strict=True), 1):
            assert launch == {
                "tactic": tactic,
                "name": kernel.name,
                "ptx": kernel.ptx,
                "integers": [["INT32", TOKENS]],
                "grid_x": kernel.grid_x(TOKENS),
                "grid_y": BATCH,
                "grid_z": 1,
                "block_x": kernel.threads,
                "block_y": 1,
                "block_z": 1,
                "shared_mem": kernel.shared,
            }


def test_without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    flash_plugin.register.cache_clear()
    with pytest.raises(EnvironmentMissing, match=r"Python plugins cannot be imported .*pip install 'vitx\[trt\]'") as e:
        flash_plugin.register("sm89")
    assert e.value.exit_code == 3


class Recorder:
    """A fake classic TensorRT that records the graphs and the flags of its networks."""

    __version__ = "11.2.1.2"
    Dims = list
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1, PREFER_AOT_PYTHON_PLUGINS=3)
    BuilderFlag = SimpleNamespace(TF32="TF32")
    ProfilingVerbosity = SimpleNamespace(DETAILED="DETAILED")

    class ILogger:
        Severity = SimpleNamespace()

    class IProgressMonitor:
        pass

    def __init__(self) -> None:
        self.flags: list[int] = []
        self.graphs: list[onnx.ModelProto] = []

    def Builder(self, logger: Any) -> Any:
        def network(flags: int) -> Any:
            self.flags.append(flags)
            image = SimpleNamespace(name="images", shape=[-1, 32, 32, 3])
            return SimpleNamespace(num_layers=0, get_input=lambda _: image)

        config = SimpleNamespace(clear_flag=lambda _: None, add_optimization_profile=lambda _: 0)
        return SimpleNamespace(
            create_network=network,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *_: None),
            build_serialized_network=lambda *_: b"a plan",
        )

    def OnnxParser(self, network: Any, logger: Any) -> Any:
        def parse(content: bytes) -> bool:
            self.graphs.append(onnx.load_from_string(content))
            return True

        return SimpleNamespace(parse=parse)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    fake, plugins = Recorder(), ModuleType("tensorrt.plugin")
    for name in ("register", "autotune", "aot_impl"):
        setattr(plugins, name, lambda plugin_id: lambda function: function)
    for name in ("TensorDesc", "AutoTuneCombination", "KernelLaunchParams", "SymExprs"):
        setattr(plugins, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugins)
    monkeypatch.setattr(fake, "plugin", plugins, raising=False)
    monkeypatch.setattr(tensorrt_library, "local_architectures", lambda: ("sm89",))
    flash_plugin.register.cache_clear()
    return fake


@pytest.fixture(scope="module")
def half_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "model.onnx"
    network = timm.create_model("deepvit_digits", depth=2, attention="re-attention")
    write_half(randomize_like_trained(network).eval(), 32, path)
    return path


def test_the_builder_gets_plugin_nodes_and_the_aot_flag(recorder: Recorder, half_graph: Path, tmp_path: Path) -> None:
    before = half_graph.read_bytes()
    with_plugin, without = tmp_path / "with.plan", tmp_path / "without.plan"
    engine_from_onnx(half_graph, with_plugin, flavor="tensorrt", plugin="flash", quiet=True)
    engine_from_onnx(half_graph, without, flavor="tensorrt", quiet=True)
    assert half_graph.read_bytes() == before
    fused, plain = recorder.graphs
    nodes = [node for node in fused.graph.node if node.op_type == "Reattention"]
    assert [helper.get_node_attr_value(node, "plugin_namespace") for node in nodes] == [b"vitx"]
    assert not fused.functions
    assert not [node for node in plain.graph.node if node.domain]
    assert recorder.flags == [1 << 1 | 1 << 3, 1 << 1]
    info = read_plan(with_plugin)
    assert info.options.plugin == "flash"
    assert info.precision == read_plan(without).precision == "fp16"
    never_ran, leak = info.warnings
    assert "compiled and not run" in never_ran
    assert "reported to leak GPU memory in 11.1 and 11.2" in leak
    assert read_plan(without).options.plugin is None
    assert read_plan(without).warnings == ()


@pytest.mark.parametrize("option", ["version_compatible", "hardware_compatible"])
def test_a_plan_with_the_plugin_is_for_one_gpu_and_release(
    option: str, recorder: Recorder, half_graph: Path, tmp_path: Path
) -> None:
    wanted: dict[str, Any] = {option: True, "plugin": "flash"}
    with pytest.raises(InputError, match="holds code for one GPU and one release: leave out either"):
        engine_from_onnx(half_graph, tmp_path / "a.plan", flavor="tensorrt", **wanted)


def test_tensorrt_for_rtx_refuses_the_plugin(half_graph: Path, tmp_path: Path) -> None:
    """The reason in the error is checked against the installed package."""
    tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    with pytest.raises(InputError, match=r"no tensorrt_rtx\.plugin\): build with --trt, or leave --plugin out"):
        engine_from_onnx(half_graph, tmp_path / "a.plan", flavor="tensorrt-rtx", plugin="flash")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensorrt_rtx.plugin")
    assert not hasattr(tensorrt_rtx, "IPluginV3QuickAOTBuild")


def test_the_command_line(vitx: Vitx, tmp_path: Path) -> None:
    arguments = ("export", "model:deepvit_digits", "--weights", "random", "--uncertified", "--out", str(tmp_path / "m"))
    code, _, error = vitx(*arguments, "--plugin", "flash")
    assert code == 2
    assert "--plugin flash goes with --trt: TensorRT alone takes it" in error
    code, _, error = vitx(*arguments, "--plugin", "flash", "--trt")
    assert code == 3  # no TensorRT, or no GPU
    assert "pip install 'vitx[trt]'" in error or "the NVIDIA driver offers none here" in error
