"""Fourier analysis and variance of feature maps: reference numbers, and the transform written out."""

import numpy as np
import pytest
import torch

from vitx.analyze.spectrum import (
    feature_variance,
    feature_variances,
    fourier_log_amplitude,
    frequencies,
    image_log_amplitudes,
    square_map,
)
from vitx.core.errors import InputError

Z = (torch.sin(0.013 * torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).square()) + 0.2).reshape(2, 3, 8, 8)


def test_reference_numbers() -> None:
    found = fourier_log_amplitude(Z)
    assert found[:4].tolist() == pytest.approx([0, -1.691434, -1.180496, -1.790693], abs=1e-6)
    assert len(found) == 5  # Nyquist's is there
    assert feature_variance(Z).item() == pytest.approx(0.515196, abs=1e-6)
    channels_last = Z.movedim(1, -1).contiguous().movedim(-1, 1)
    assert feature_variance(channels_last).item() == pytest.approx(0.515196, abs=1e-6)


def test_each_image_has_its_own_variance() -> None:
    for maps in (Z, Z.movedim(1, -1).contiguous().movedim(-1, 1)):
        torch.testing.assert_close(feature_variances(maps), Z.flatten(2).var(dim=-1).mean(dim=-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_maps_are_measured_in_float32(dtype: torch.dtype) -> None:
    # The squares of float16 are infinite from 256 on, and so is a sum of 56 × 56 values of about 20.
    maps = (torch.sin(0.013 * torch.arange(56 * 56.0).square()) * 8 + 20).reshape(1, 1, 56, 56).to(dtype)
    for measure in (feature_variance, fourier_log_amplitude):
        torch.testing.assert_close(measure(maps), measure(maps.float()), rtol=0, atol=0)
    assert feature_variance(maps).isfinite()


@pytest.mark.parametrize("side", [2, 5, 8, 14])
def test_diagonal_equals_that_of_the_whole_transform(side: int) -> None:
    generator = torch.Generator().manual_seed(side)
    maps = torch.randn(3, 4, side, side, generator=generator, dtype=torch.float64)
    whole = np.log(np.abs(np.fft.fft2(maps.numpy())) + 1e-6).mean(axis=(0, 1))
    expected = [whole[k, k] for k in range(side // 2 + 1)]
    assert image_log_amplitudes(maps).mean(dim=0).tolist() == pytest.approx(expected, abs=1e-9)
    assert image_log_amplitudes(maps.float()).mean(dim=0).tolist() == pytest.approx(expected, abs=1e-4)
    assert len(frequencies(side)) == len(expected)


def test_frequencies_end_at_nyquist_for_even_sides() -> None:
    assert frequencies(8) == [0, 0.25, 0.5, 0.75, 1.0]
    assert frequencies(5) == pytest.approx([0, 0.4, 0.8])


def test_a_checkerboard_is_all_nyquist() -> None:
    index = torch.arange(6)
    maps = ((-1.0) ** (index[:, None] + index)).double()[None, None]
    (found,) = image_log_amplitudes(maps)
    assert found[3].item() == pytest.approx(np.log(36), abs=1e-6)
    assert found[:3].max().item() < np.log(1e-5)


def test_maps_that_are_not_square_are_refused() -> None:
    with pytest.raises(InputError, match="4 × 6"):
        image_log_amplitudes(torch.zeros(1, 1, 4, 6))


def test_square_map_of_each_layout() -> None:
    tokens = torch.arange(2 * 10 * 3.0).reshape(2, 10, 3)
    found = square_map(tokens, 1, channels_last=False)
    assert found is not None
    assert found.shape == (2, 3, 3, 3)
    assert found[1, 2, 1, 0] == tokens[1, 1 + 3, 2]
    channels_last = torch.rand(2, 4, 4, 3)
    moved = square_map(channels_last, 0, channels_last=True)
    assert moved is not None
    assert torch.equal(moved, channels_last.permute(0, 3, 1, 2))
    assert square_map(tokens, 2, channels_last=False) is None  # 8 patches
    assert square_map(torch.zeros(2, 2, 3), 1, channels_last=False) is None  # one patch
    assert square_map(torch.zeros(2, 3), 0, channels_last=False) is None
    assert square_map(torch.zeros(2, 3, 4, 2), 0, channels_last=False) is None
    smallest = torch.rand(2, 3, 2, 2)
    assert square_map(smallest, 0, channels_last=False) is smallest
