"""BatchNorm over two processes equals BatchNorm over the whole batch, in float64, with its gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reference import seq
from training_jobs import forward_backward, outcome_of_two, small_re_attention, start_all
from vitx.core.errors import InputError
from vitx.train.loop.distributed.synchronized_norm import SynchronizedBatchNorm, synchronize_batch_norm

CPU = torch.device("cpu")


def test_two_processes_are_one_batch(tmp_path: Path) -> None:
    x, weight = seq(3, 4, 3, 8), seq(1, 4, 3, 8)
    start_all(outcome_of_two, 2, small_re_attention, x, weight, tmp_path)
    parts: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    whole = forward_backward(small_re_attention(), x, weight)
    for name, expected in whole.items():
        if name in ("y", "x"):
            found = torch.cat([part[name] for part in parts])
        elif name.startswith("var_norm.running"):
            found = parts[0][name]
            assert torch.equal(found, parts[1][name])
        elif name.startswith("var_norm.num"):
            found = parts[0][name]
        else:
            found = parts[0][name] + parts[1][name]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=name)


def test_names_and_modes_stay_and_evaluation_is_torchs() -> None:
    plain, ours = small_re_attention().eval(), synchronize_batch_norm(small_re_attention(), CPU).eval()
    assert list(plain.state_dict()) == list(ours.state_dict())
    assert isinstance(ours.var_norm, SynchronizedBatchNorm)
    x = seq(3, 2, 3, 8)
    torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)


def test_another_kind_of_batch_norm_is_refused() -> None:
    from timm.layers import BatchNormAct2d

    with pytest.raises(InputError, match=r"'0' is a BatchNormAct2d, .* execution\.sync_batch_norm=false"):
        synchronize_batch_norm(nn.Sequential(BatchNormAct2d(3)), CPU)
