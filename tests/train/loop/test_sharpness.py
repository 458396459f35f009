"""SAM's way uphill and back, and BatchNorm's statistics meanwhile."""

import pytest
import torch
from torch import nn

from vitx.train.loop.sharpness import perturbed, untracked_batch_norm


def test_the_way_uphill_has_the_length_rho_over_all_parameters_together() -> None:
    first, second, frozen = (nn.Parameter(torch.tensor(value)) for value in ([1.0, 2.0], [3.0], [5.0]))
    first.grad, second.grad = torch.tensor([2.0, 0.0]), torch.tensor([-1.5])  # of norm 2.5 together
    parameters = [first, frozen, second]
    with perturbed(parameters, 0.5):
        assert first.tolist() == pytest.approx([1.4, 2.0])
        assert second.tolist() == pytest.approx([2.7])
        assert frozen.tolist() == [5.0]
        first.grad.zero_()  # the second pass makes its own gradient
    assert [each.tolist() for each in parameters] == [[1.0, 2.0], [5.0], [3.0]]


def test_the_old_bits_come_back_after_an_error_too() -> None:
    weight = nn.Parameter(torch.tensor([0.1, 0.7]))
    weight.grad = torch.tensor([1.0, 3.0])
    before = weight.detach().clone()
    with pytest.raises(ZeroDivisionError), perturbed([weight], 1e-3):
        raise ZeroDivisionError
    assert torch.equal(weight.detach(), before)


def test_no_gradient_is_no_way() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.zeros(1)
    with perturbed([weight], 0.5):
        assert weight.tolist() == [2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_running_statistics_are_as_before_though_the_batch_was_normalised_by_its_own(fails: bool) -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    network(torch.rand(4, 2, generator=torch.Generator().manual_seed(0)))
    before = {name: value.clone() for name, value in network.named_buffers()}
    try:
        with untracked_batch_norm(network):
            out = network[0](torch.tensor([[0.0, 10.0], [2.0, 30.0]]))
            network[2](out)
            assert network[0].num_batches_tracked == 2
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    torch.testing.assert_close(out, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), rtol=1e-4, atol=1e-4)
    assert {name: value.tolist() for name, value in network.named_buffers()} == {
        name: value.tolist() for name, value in before.items()
    }
