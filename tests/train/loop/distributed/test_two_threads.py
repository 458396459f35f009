"""What processes say to each other, with two threads in place of two processes: nothing is started."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from reference import seq
from server_process import HANG
from vitx.core.errors import InputError
from vitx.train.loop.distributed import processes as module
from vitx.train.loop.distributed.fsdp_tensors import gathered, placed_like
from vitx.train.loop.distributed.processes import (
    ALONE,
    Processes,
    accumulating,
    is_first_process,
    join_processes,
    parallelize,
    shard_module,
    unsharded,
)
from vitx.train.loop.distributed.synchronized_norm import SynchronizedBatchNorm, synchronize_batch_norm

T = TypeVar("T")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class TwoThreads:
    """The calls of torch.distributed that are used, between two threads; `seconds` is the clock of both."""

    def __init__(self) -> None:
        self.barrier, self.of = threading.Barrier(2, timeout=HANG), threading.local()
        self.given: list[Any] = [None, None]
        self.seconds, self.tries, self.speed = [0.0, 0.0], [0, 0], [1, 1]
        self.exchanges = [0, 0]

    def exchanged(self, value: Any) -> list[Any]:
        self.given[self.of.rank] = value
        self.exchanges[self.of.rank] += 1
        self.barrier.wait()
        both = [*self.given]
        self.barrier.wait()
        return both

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(sum(self.exchanged(tensor.detach().clone())))

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        values[:] = self.exchanged(value)

    def sleep(self, seconds: float) -> None:
        self.seconds[self.of.rank] += seconds * self.speed[self.of.rank]

    def monotonic(self) -> float:
        return float(self.seconds[self.of.rank])

    def run(self, function: Callable[[int], T]) -> list[T]:
        """`function(rank)` in both."""

        def one(rank: int) -> T:
            self.of.rank = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            return [running.result(HANG) for running in [pool.submit(one, rank) for rank in range(2)]]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> TwoThreads:
    threads = TwoThreads()
    monkeypatch.setattr(dist, "all_reduce", threads.all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", threads.all_gather_object)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=threads.sleep, monotonic=threads.monotonic))
    return threads


def passed(norm: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Any]:
    """Output, gradients of Σ weight·y and what is tracked."""
    x = x.clone().requires_grad_()
    y = norm(x)
    (y * weight).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{n: p.grad for n, p in norm.named_parameters()},
        **dict(norm.named_buffers()),
    }


NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "vectors": (nn.BatchNorm1d, (6, 3), {}),
    "images": (nn.BatchNorm2d, (4, 3, 2, 5), {"momentum": 0.3, "eps": 0.1}),
    "videos": (nn.BatchNorm3d, (2, 3, 2, 2, 3), {}),
    "mean of all steps": (nn.BatchNorm2d, (4, 3, 2, 2), {"momentum": None}),
    "without weights": (nn.BatchNorm2d, (4, 3, 2, 2), {"affine": False}),
    "nothing tracked": (nn.BatchNorm2d, (4, 3, 2, 2), {"track_running_stats": False}),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_two_parts_is_that_of_the_whole_batch(name: str, two: TwoThreads) -> None:
    kind, shape, options = NORMS[name]
    half = shape[0] // 2
    whole = kind(3, **options).double()
    parts = [synchronize_batch_norm(kind(3, **options).double(), CPU) for _ in range(2)]
    for norm in (whole, *parts):
        for parameter, start in zip(norm.parameters(), (5, 6), strict=False):
            parameter.data = seq(start, 3)
    for step in range(3):
        x, weight = 3 * seq(step, *shape) + 1, seq(step + 9, *shape)
        for norm in (whole, *parts):
            norm.zero_grad()
        expected = passed(whole, x, weight)
        found = two.run(
            lambda rank, x=x, weight=weight: passed(  # type: ignore[misc]
                parts[rank], x[rank * half :][:half], weight[rank * half :][:half]
            )
        )
        assert isinstance(parts[0], SynchronizedBatchNorm)
        for key, value in expected.items():
            if key in ("y", "x"):
                torch.testing.assert_close(torch.cat([part[key] for part in found]), value, rtol=0, atol=1e-12)
            elif key in ("weight", "bias"):
                torch.testing.assert_close(found[0][key] + found[1][key], value, rtol=0, atol=1e-12)
            else:
                assert torch.equal(found[0][key], found[1][key])
                torch.testing.assert_close(found[0][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(dtype: torch.dtype, two: TwoThreads) -> None:
    """A mean of 64 and a spread of 1: in the half type itself a variance about the mean would lose its digits."""
    x = (64 + seq(0, 2, 2, 40)).to(dtype)
    norm: Any = synchronize_batch_norm(nn.Sequential(nn.BatchNorm1d(2)), CPU)
    y = torch.cat(two.run(lambda rank: norm[0](x[rank : rank + 1])))
    values = x.double()
    mean, variance = values.mean((0, 2), keepdim=True), values.var((0, 2), keepdim=True, correction=0)
    assert y.dtype == dtype
    torch.testing.assert_close(y, ((values - mean) / (variance + 1e-5).sqrt()).to(dtype), rtol=0, atol=0.02)
    assert norm[0].running_mean.dtype == torch.float32


def test_a_vector_alone_is_no_batch() -> None:
    norm = synchronize_batch_norm(nn.BatchNorm1d(3), CPU)
    with pytest.raises(ValueError, match=r"expected \(B, C, …\), got 1 axes"):
        norm(torch.zeros(3))


def test_all_norms_of_a_network_are_synchronised_and_nothing_else() -> None:
    network: Any = nn.Sequential(
        nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm3d(2), nn.LayerNorm(2)), nn.BatchNorm2d(2)
    )
    assert synchronize_batch_norm(network, CPU) is network
    kinds = [type(each).__name__ for each in network.modules() if not isinstance(each, nn.Sequential)]
    assert kinds == ["SynchronizedBatchNorm"] * 2 + ["LayerNorm", "SynchronizedBatchNorm"]
    with pytest.raises(InputError, match=r"'1' is a BatchNormAct2d, .* execution\.sync_batch_norm=false"):
        synchronize_batch_norm(nn.Sequential(nn.BatchNorm2d(2), BatchNormAct2d(3)), CPU)
    on_gpus: Any = synchronize_batch_norm(nn.Sequential(nn.BatchNorm2d(2)), GPU)
    assert [type(each) for each in on_gpus] == [nn.SyncBatchNorm]


def test_a_process_knows_its_part() -> None:
    processes = [Processes(rank, 3) for rank in range(3)]
    assert [each.writes for each in processes] == [True, False, False]
    assert [each.indices(8).tolist() for each in processes] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [each.indices(2).tolist() for each in processes] == [[0], [1], []]
    assert processes[1].batch_part.of(np.arange(12)).tolist() == [2, 3, 8, 9]
    assert (ALONE.rank, ALONE.count, ALONE.writes) == (0, 1, True)
    assert len({Processes(1, 3), *processes}) == 3  # values, which can be keys
    assert ALONE.indices(3).tolist() == ALONE.batch_part.of(np.arange(3)).tolist() == [0, 1, 2]


def test_values_are_gathered_by_rank(two: TwoThreads) -> None:
    assert two.run(lambda rank: Processes(rank, 2).gather(f"of {rank}")) == [["of 0", "of 1"]] * 2
    assert ALONE.gather("mine") == ["mine"]
    two.run(lambda rank: Processes(rank, 2).barrier())
    assert two.exchanges == [2, 2]
    ALONE.barrier()


def agreed(two: TwoThreads, values: list[list[str]], timeout: float, clocks: tuple[float, float] = (0, 0)) -> list[str]:
    """What both return, or the error; `values` are read one after the other, the last again and again."""
    two.seconds, two.tries = [*clocks], [0, 0]

    def one(rank: int) -> str:
        def read() -> str:
            two.tries[rank] += 1
            return values[rank][min(two.tries[rank], len(values[rank])) - 1]

        try:
            return Processes(rank, 2).agreed(read, "they differ", timeout)
        except InputError as error:
            return f"error: {error}"

    return two.run(one)


def test_processes_read_again_until_they_agree_or_it_is_too_late(two: TwoThreads) -> None:
    assert agreed(two, [["a"], ["a"]], 0) == ["a", "a"]
    assert (two.tries, two.seconds) == ([1, 1], [0, 0])
    assert agreed(two, [["a", "b"], ["b"]], 5) == ["b", "b"]
    assert (two.tries, two.seconds) == ([2, 2], [1, 1])
    # Tries after 0, 1, 2 and 3 s; the last is over the time, and agrees, or does not.
    assert agreed(two, [["a", "a", "a", "b"], ["b"]], 2.5) == ["b", "b"]
    assert agreed(two, [["a"], ["b"]], 2.5) == ["error: they differ"] * 2
    assert (two.tries, two.seconds) == ([4, 4], [3, 3])
    assert agreed(two, [["a"], ["b"]], 3) == ["error: they differ"] * 2
    assert two.tries == [5, 5]


def test_one_whose_time_is_over_ends_the_tries_of_all(two: TwoThreads) -> None:
    two.speed = [1, 2]
    assert agreed(two, [["a"], ["b"]], 3.5) == ["error: they differ"] * 2
    assert (two.tries, two.seconds) == ([3, 3], [2, 4])


@pytest.mark.parametrize(("device", "backend"), [(CPU, "gloo"), (GPU, "cpu:gloo,cuda:nccl")])
def test_torchrun_s_processes_are_joined_and_left(
    device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name: called.append(name))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("left"))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    for count in (None, "1"):
        if count:
            monkeypatch.setenv("WORLD_SIZE", count)
        with join_processes(device) as found:
            assert found is ALONE
    assert called == []
    monkeypatch.setenv("WORLD_SIZE", "5")
    joined = join_processes(device)
    assert (joined.__enter__(), called) == (Processes(3, 5), [backend])
    assert not joined.__exit__(KeyError, KeyError(), None)
    assert called == [backend, "left"]


def test_the_first_process_is_rank_0_or_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_first_process()
    for rank in ("0", "1", "10"):
        monkeypatch.setenv("RANK", rank)
        assert is_first_process() == (rank == "0")


def test_what_averages_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def ddp(*arguments: Any, **options: Any) -> str:
        made.append((arguments, options))
        return "ddp"

    monkeypatch.setattr(module, "DistributedDataParallel", ddp)
    for name in ("shard_module", "make_root"):
        monkeypatch.setattr(module, name, lambda *arguments: made.append(arguments))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    objective, both = nn.Identity(), Processes(0, 2)
    with pytest.raises(
        InputError, match=r"start them with torchrun, or go on in one with --set execution\.parallel=ddp"
    ):
        parallelize(objective, "fsdp", ALONE, CPU)
    assert parallelize(objective, "ddp", ALONE, CPU) is objective
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert parallelize(objective, "fsdp", ALONE, CPU) is objective
    assert made == []
    assert parallelize(objective, "fsdp", both, GPU) is objective
    assert parallelize(objective, "ddp", both, CPU) == parallelize(objective, "ddp", both, GPU) == "ddp"  # type: ignore[comparison-overlap]
    of_ddp = [((objective,), {"device_ids": None}), ((objective,), {"device_ids": [GPU]})]
    assert made == [(objective, GPU), (objective,), *of_ddp]


class Network(nn.Module):
    """Two blocks and a head, as a network of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)


class Objective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()


class Group(nn.Module):
    """Stands for a module that FSDP has split; notes what it is told. A real one leaves threads in this process."""

    def __init__(self, told: list[Any], *inner: nn.Module) -> None:
        super().__init__()
        self.told, self.inner = told, nn.Sequential(*inner)

    def set_requires_gradient_sync(self, wanted: bool) -> None:
        self.told.append(wanted)

    def set_reshard_after_forward(self, wanted: bool, *, recurse: bool = True) -> None:
        self.told.append((self, "reshard after forward", wanted, recurse))

    def unshard(self) -> None:
        self.told.append((self, "whole"))

    def reshard(self) -> None:
        self.told.append((self, "split"))


class Averaging(nn.Module):
    """Stands for DistributedDataParallel."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told = told

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.told.append("apart")
        yield
        self.told.append("together")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FSDPModule", Group)
    monkeypatch.setattr(module, "DistributedDataParallel", Averaging)


def test_the_mesh_is_of_the_device_and_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(module, "init_device_mesh", lambda *arguments: arguments)
    monkeypatch.setattr(module, "fully_shard", lambda part, mesh: asked.append((part, mesh)))
    objective, plain = Objective(), nn.Linear(2, 2)
    shard_module(objective, GPU)
    shard_module(plain, CPU)
    assert asked == [(part, ("cuda", (5,))) for part in (*objective.network.blocks, objective)] + [
        (plain, ("cpu", (5,)))
    ]


def test_a_tensor_that_is_not_split_is_copied() -> None:
    """Those that are split are tested in processes of their own (test_resharding.py)."""
    parameter, value = torch.ones(2, requires_grad=True), seq(1, 3, 4)
    assert (gathered(parameter).tolist(), gathered(parameter).requires_grad) == ([1, 1], False)
    placed = placed_like(torch.zeros(3, 4), value)
    assert torch.equal(placed, value)
    assert placed.data_ptr() != value.data_ptr()


@pytest.mark.usefixtures("stand_ins")
def test_gradients_of_accumulated_passes_are_exchanged_with_the_last() -> None:
    told: list[Any] = []
    for last in (False, True):
        for each in (Group(told), Averaging(told), nn.Identity()):
            with accumulating(each, last=last):
                told.append("pass")
    assert told == [False, "pass", "apart", "pass", "together", "pass", True, "pass", "pass", "pass"]


@pytest.mark.usefixtures("stand_ins")
def test_parameters_are_whole_inside_the_block_only() -> None:
    told: list[Any] = []
    inner = Group(told, nn.Linear(2, 2))
    outer = Group(told, nn.Linear(2, 2), inner)
    block = unsharded(nn.Sequential(outer))
    block.__enter__()
    told.append("passes")
    assert not block.__exit__(KeyError, KeyError(), None)
    begun = [
        part for each in (outer, inner) for part in ((each, "reshard after forward", False, False), (each, "whole"))
    ]
    ended = [
        part for each in (outer, inner) for part in ((each, "split"), (each, "reshard after forward", True, False))
    ]
    assert told == [*begun, "passes", *ended]
