"""Every pretrained configuration of timm: our pixels are those of timm's own evaluation transform."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
from PIL import Image
from timm.data import create_transform, resolve_data_config

from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.models.source import preprocessing_of

SIZES = ((90, 60), (61, 97), (64, 64), (31, 200))


@cache
def photos() -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for width, height in SIZES]


def configurations() -> dict[str, Any]:
    """One configuration by name for each way of making pixels; and those that are no square."""
    ways: dict[Any, str] = {}
    found: dict[str, Any] = {name: timm.get_pretrained_cfg(name) for name in timm.list_pretrained()}
    for name, config in found.items():
        fill = config.mean if config.crop_mode == "border" else ()
        ways.setdefault((config.input_size, config.crop_pct, config.crop_mode, config.interpolation, fill), name)
    return {name: found[name] for name in ways.values()}


def theirs(config: Any, photo: Image.Image) -> UInt8Array:
    resolved = resolve_data_config(pretrained_cfg=config.to_dict())  # type: ignore[no-untyped-call]  # timm's
    transform = create_transform(**resolved, normalize=False)
    pixels: UInt8Array = transform(photo).permute(1, 2, 0).numpy()
    return pixels


def test_all_of_them_are_looked_at() -> None:
    assert len(timm.list_pretrained()) >= 1500
    modes = {(config.crop_mode, config.interpolation) for config in configurations().values()}
    assert modes >= {("center", "bicubic"), ("center", "bilinear"), ("squash", "bicubic"), ("border", "bicubic")}


@pytest.mark.parametrize("number", range(len(SIZES)), ids=str)
def test_our_pixels_are_timms(number: int) -> None:
    photo, refused = photos()[number], []
    for name, config in configurations().items():
        if config.input_size[1] != config.input_size[2]:
            with pytest.raises(InputError, match=f"{config.architecture}.*3 × 1024 × 768 values: expected RGB and a"):
                preprocessing_of(config)
            refused.append(name)
            continue
        np.testing.assert_array_equal(preprocessing_of(config).apply(photo), theirs(config, photo), err_msg=name)
    assert len(refused) < 10
