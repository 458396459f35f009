"""A network as a function of pixels, for the metrics that change the pixels; afterwards it is as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitx.analyze.accuracy import Predict
from vitx.analyze.activations import differentiating_only, in_evaluation_mode
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.models import image_tensor

# Pixels (B, 3, S, S) between 0 and 1 → logits (B, C), differentiable.
PixelLogits = Callable[[Tensor], Tensor]


def predictor(model: nn.Module, preprocessing: Preprocessing) -> Predict:
    """A network as a function of pixels, in evaluation mode on its own device; its modes return after each call."""

    def predict(pixels: UInt8Array) -> npt.NDArray[np.floating]:
        parameter = next(model.parameters())
        inputs = image_tensor(pixels, preprocessing.mean, preprocessing.std).to(parameter.device, parameter.dtype)
        with in_evaluation_mode(model), torch.inference_mode():
            return model(inputs).float().cpu().numpy()  # type: ignore[no-any-return]  # what a module returns is Any

    return predict


@contextmanager
def pixel_logits(model: nn.Module, preprocessing: Preprocessing) -> Iterator[PixelLogits]:
    """The network as a differentiable function of pixels in [0, 1], of its own device and dtype.

    Inside the block it is in evaluation mode and its parameters take no gradients; afterwards modes, `requires_grad`
    and `grad` are what they were.
    """
    with in_evaluation_mode(model), differentiating_only(model, ()):
        parameter, shape = next(model.parameters()), (1, 3, 1, 1)
        mean = parameter.new_tensor(preprocessing.mean).view(shape)
        std = parameter.new_tensor(preprocessing.std).view(shape)
        yield lambda pixels: model((pixels - mean) / std)


def as_pixels(images: UInt8Array, model: nn.Module) -> Tensor:
    """uint8 (B, S, S, 3) as (B, 3, S, S) between 0 and 1, of the network's device and dtype."""
    parameter = next(model.parameters())
    return torch.as_tensor(images).permute(0, 3, 1, 2).to(parameter.device, parameter.dtype) / 255
