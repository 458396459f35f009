"""The description of the machine, and its GPUs as the NVIDIA driver lists them."""

import os
import platform
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_fixture import build_driver
from vitx.core import machine
from vitx.core.errors import EnvironmentMissing
from vitx.core.machine import (
    PACKAGES,
    Gpu,
    describe_machine,
    first_gpu_address,
    installed_versions,
    local_architectures,
    local_gpus,
    sums_int8_exactly,
)

ASK = """
from vitx.core.machine import describe_machine, local_architectures, local_gpus
print([str(gpu) for gpu in local_gpus()], local_architectures(), describe_machine()["gpu"], sep="\\n")
"""


def test_the_driver_is_asked(tmp_path: Path) -> None:
    environment = build_driver(tmp_path)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "['Fake GPU 0 (sm90)', 'Fake GPU 1 (sm90)']",
        "('sm90', 'sm90')",
        "Fake GPU 0 (sm90), Fake GPU 1 (sm90)",
    ], done.stderr


def test_gpus_are_named_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    if not local_gpus():
        assert "gpu" not in describe_machine()
        assert local_architectures() == ()
    monkeypatch.setattr("vitx.core.machine.local_gpus", lambda: (Gpu("A", "sm89"),))
    assert describe_machine()["gpu"] == "A (sm89)"
    assert local_architectures() == ("sm89",)


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("fma avx2", False),
        ("avx512f avx512bw avx512_vbmi", False),
        ("avx512f avx512_vnni", True),
        ("avx2 avx_vnni", True),
        ("amx_tile amx_int8", True),
    ],
)
def test_which_processors_add_int8_products_in_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, exact: bool
) -> None:
    monkeypatch.setattr("vitx.core.machine.platform.machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: A\nflags\t\t: fpu {flags}\nbugs\t\t:\n")
    assert sums_int8_exactly(path) is exact
    assert not sums_int8_exactly(tmp_path / "another system")
    monkeypatch.setattr("vitx.core.machine.platform.machine", lambda: "aarch64")
    assert sums_int8_exactly(tmp_path / "on ARM")


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/pod/one\n", {"pod/cpu.max": "200000 100000\n", "pod/one/cpu.max": "50000 100000\n"}, [0.5, 2.0]),
        ("0::/host/name\n", {"cpu.max": "150000 100000\n"}, [1.5]),  # a container that sees its own groups alone
        ("0::/pod\n", {"cpu.max": "max 100000\n", "pod/cpu.max": "max 100000\n"}, []),
        (
            "11:memory:/pod\n4:cpuacct,cpu:/pod\n1:name=systemd:/pod\n0::/\n",
            {"cpu/pod/cpu.cfs_quota_us": "300000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"},
            [3.0],
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
        ("4:cpu:/pod\n0::/\n", {}, []),
        ("0::/cri:one\n", {"cri:one/cpu.max": "70000 100000\n"}, [0.7]),
    ],
)
def test_limits_of_time_are_those_of_all_control_groups(
    tmp_path: Path, groups: str, limits: dict[str, str], found: list[float]
) -> None:
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": limits[name] for name in limits},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(machine._cpu_limits(tmp_path)) == found


def test_a_system_without_control_groups_limits_nothing(tmp_path: Path) -> None:
    assert list(machine._cpu_limits(tmp_path)) == []


@pytest.mark.parametrize(("limits", "cores"), [([], 3), ([2.5, 8.0], 3), ([8.0, 1.5], 2), ([0.1], 1), ([9.0], 3)])
def test_a_limit_of_time_is_so_many_cores_rounded_up(
    monkeypatch: pytest.MonkeyPatch, limits: list[float], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_cpu_limits", lambda: limits)
    assert (machine.usable_cores(), machine.threads_here(None), machine.threads_here(5)) == (cores, cores, 5)


def test_where_every_core_may_be_used_a_library_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    assert (machine.threads_here(None), machine.threads_here(2)) == (None, 2)


def test_the_description_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_limits", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3 * 2**18}.__getitem__)
    found = describe_machine()
    assert found["cores"] == 3
    assert found["memory_gib"] == 3
    assert found["system"] == f"{platform.system()} {platform.machine()}"
    assert found["python"] == platform.python_version()
    assert found["processor"]


def test_versions_are_of_what_is_installed() -> None:
    found = installed_versions()
    assert found["numpy"] == np.__version__
    assert set(found) <= set(PACKAGES)
    assert all(found.values())


class Driver:
    """Stands for libcuda: GPU i is called "GPU i é" in bytes, of compute capability (8, 6 + i)."""

    def __init__(self, count: int = 2, *, init: int = 0, counted: int = 0) -> None:
        self.count, self.results = count, (init, counted)

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.results[0]

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return self.results[1]

    def cuDeviceGetName(self, name: Any, size: int, index: int) -> None:
        assert size == len(name) == 256
        name.value = f"GPU {index} é".encode("latin-1" if index else "utf-8")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> None:
        value._obj.value = {75: 8, 76: 6 + index}[attribute]

    def cuDeviceGetPCIBusId(self, address: Any, size: int, index: int) -> int:
        assert size == len(address) == 32
        address.value = f"0000:{65 + index}:00.0".encode()
        return self.results[0]


@pytest.mark.parametrize(("platform_name", "library"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_what_the_driver_answers(monkeypatch: pytest.MonkeyPatch, platform_name: str, library: str) -> None:
    opened: list[str] = []

    def found(driver: Driver) -> tuple[Gpu, ...]:
        def library(name: str) -> Driver:
            opened.append(name)
            return driver

        monkeypatch.setattr("ctypes.CDLL", library)
        return local_gpus.__wrapped__()

    monkeypatch.setattr(sys, "platform", platform_name)
    # A name that is not UTF-8 has a replacement character in the place of what is not.
    assert found(Driver()) == (Gpu("GPU 0 é", "sm86"), Gpu("GPU 1 \ufffd", "sm87"))
    assert found(Driver(0)) == found(Driver(init=100)) == found(Driver(counted=3)) == ()
    assert set(opened) == {library}

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert local_gpus.__wrapped__() == ()


def test_the_first_gpus_address_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("A", "sm89"), Gpu("B", "sm89"))
    for driver, known, address in (
        (Driver(), gpus, "0000:65:00.0"),
        (Driver(init=1), gpus, None),
        (Driver(), (), None),
        (None, gpus, None),
    ):
        monkeypatch.setattr(machine, "_cuda_library", lambda driver=driver: driver)
        monkeypatch.setattr(machine, "local_gpus", lambda known=known: known)
        assert first_gpu_address() == address


def test_gpus_are_listed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: (Gpu("A", "sm89"), Gpu("B", "sm120")))
    assert describe_machine()["gpu"] == "A (sm89), B (sm120)"
    assert local_architectures() == ("sm89", "sm120")
    monkeypatch.setattr(machine, "local_gpus", tuple)
    assert "gpu" not in describe_machine()


def test_the_processor_is_the_one_that_linux_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda place: cpuinfo if place == "/proc/cpuinfo" else Path(place))
    monkeypatch.setattr(platform, "processor", lambda: "a word")
    monkeypatch.setattr(platform, "machine", lambda: "arm9")
    cpuinfo.write_text("vendor_id\t: X\nmodel\t: 7\nmodel name\t:  Chip: fast  \nmodel name\t: other\n")
    assert machine._processor() == "Chip: fast"
    cpuinfo.write_text("vendor_id\t: X\n")
    assert machine._processor() == "a word"
    cpuinfo.unlink()
    assert machine._processor() == "a word"
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert machine._processor() == "arm9"


def test_a_system_that_does_not_say_its_memory_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(machine, "_cpu_limits", list)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    found = describe_machine()
    assert (found["memory_gib"], found["cores"]) == (0, 6)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.usable_cores() == 1


def test_memory_is_in_whole_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for pages, gib in ((2**18 * 8 - 9000, 8), (2**17 * 3 + 1000, 2), (2**18, 1)):
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.__getitem__)
        assert describe_machine()["memory_gib"] == gib


def test_versions_are_asked_for_by_the_names_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "timm":
            raise metadata.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(metadata, "version", version)
    names = ["vitx", "torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy", "pillow"]
    assert installed_versions() == {name: f"{name} 1" for name in names}


def test_flags_are_those_of_the_first_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    for name, known in (("x86_64", False), ("AMD64", False), ("riscv64", True)):
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        path.write_text("processor: 0\n")
        assert sums_int8_exactly.__wrapped__(path) is known
        path.write_text("flags: a b:avx_vnni\nflags: avx_vnni\n")
        assert sums_int8_exactly.__wrapped__(path) is known
        path.write_text("flags: a:b avx_vnni\n")
        assert sums_int8_exactly.__wrapped__(path)


def test_an_architecture_is_the_machine_and_the_sets_that_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda place: cpuinfo if place == "/proc/cpuinfo" else Path(place))
    for name, flags, sets in (
        ("x86_64", "flags\t\t: fpu avx512_bf16 avx2 fma amx_int8 avx512f", "avx2 fma avx512f avx512_bf16 amx_int8"),
        ("x86_64", "flags\t\t: avx_vnni avx512_vnni avx512_fp16 amx_bf16", "avx_vnni avx512_vnni avx512_fp16 amx_bf16"),
        ("aarch64", "Features\t: fp sve2 sve bf16 i8mm asimddp asimd", "asimd asimddp i8mm bf16 sve sve2"),
    ):
        monkeypatch.setattr(platform, "machine", lambda name=name: name)
        cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
        assert machine.cpu_architecture.__wrapped__() == f"{name} {sets}"


@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_kernels_of_fewer_instruction_sets_are_another_architecture(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    of_the_processor = machine.cpu_architecture.__wrapped__()
    monkeypatch.setenv(limit, "AVX2")
    assert machine.cpu_architecture.__wrapped__() == f"{of_the_processor} {limit}=AVX2"


@pytest.mark.parametrize(("exact", "on_cpu"), [(True, True), (False, True), (False, False)])
def test_how_quantisation_runs(monkeypatch: pytest.MonkeyPatch, exact: bool, on_cpu: bool) -> None:
    class Options(dict[str, str]):
        add_session_config_entry = dict.__setitem__

    monkeypatch.setattr(machine, "sums_int8_exactly", lambda: exact)
    options = Options()
    saturates = {"session.x64quantprecision": "1"} if on_cpu and not exact else {}
    assert machine.set_quantization(options, fused=True, on_cpu=on_cpu) is None
    assert options == saturates
    assert machine.set_quantization(options, fused=False, on_cpu=on_cpu) == ["ReluQuantRewrite", "ClipQuantRewrite"]
    assert options == saturates | {"session.disable_quant_qdq": "1"}


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EnvironmentMissing, match=r"'openvino', .*pip install 'vitx\[openvino\]'"):
        machine.openvino_core.__wrapped__()


def test_the_drivers_cuda_has_two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        result = 0

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 12080
            return self.result

    monkeypatch.setattr(machine, "_cuda_library", Cuda)
    for result, found in ((0, "12.8"), (1, "")):
        monkeypatch.setattr(Cuda, "result", result)
        assert machine.cuda_driver.__wrapped__() == found
    monkeypatch.setattr(machine, "_cuda_library", lambda: None)
    assert machine.cuda_driver.__wrapped__() == ""


def test_folders_that_onnxruntime_left_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (None, SimpleNamespace(origin="onnxruntime/__init__.py")):
        monkeypatch.setattr(machine, "find_spec", lambda name, spec=spec: spec)
        machine.require_onnxruntime()
    monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace(origin=None))
    for installed in ("onnxruntime-gpu", "onnxruntime"):
        monkeypatch.setattr(machine, "installed_versions", lambda installed=installed: {installed: "1.31"})
        with pytest.raises(EnvironmentMissing, match=rf"files of .* onnxruntime are missing: .* {installed}$"):
            machine.require_onnxruntime()


def test_a_temporary_folder_has_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:  # a short path
        room = machine._LONGEST_SOCKET_PATH - len(folder)
        with pytest.raises(OSError, match="too long"):
            listener.bind(f"{folder}/{'s' * room}")
        listener.bind(f"{folder}/{'s' * (room - 1)}")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    machine.require_socket_folder(room)
    with pytest.raises(EnvironmentMissing, match=f"is too long for sockets: .* at most {len(folder) - 1} bytes"):
        machine.require_socket_folder(room + 1)
