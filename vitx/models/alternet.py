"""AlterNet: pre-activation ResNets whose stages end in self-attention (Park & Kim, arXiv 2202.06709).

A stage of n1 units with n2 attention units is `[C]·(n1 − 2·n2) + [C, M]·n2`: convolutions first, then convolution and
attention in turn, ending in attention. Attention units have no MLP.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypedDict, Unpack

import torch
from timm.layers import DropPath
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models.window_attention import WindowAttention

STEM_WIDTH = 64
STAGE_WIDTHS = (64, 128, 256, 512)


class PreActivationUnit(nn.Module):
    """A pre-activation residual unit (He et al., arXiv 1603.05027): `branch(act(norm(x))) + shortcut`.

    The shortcut is x itself; where width or stride change it is a 1×1 projection of act(norm(x)).
    """

    def __init__(
        self, dim: int, dim_out: int, stride: int, drop_path: float, activation: nn.Module, **factory: Any
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim, **factory)
        self.activation = activation
        self.shortcut: nn.Module | None = None
        if stride != 1 or dim != dim_out:
            self.shortcut = nn.Conv2d(dim, dim_out, 1, stride=stride, bias=False, **factory)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def branch(self, x: Tensor) -> Tensor:
        """What the unit adds, from the normalised and activated input."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(self.norm(x))
        skip = x if self.shortcut is None else self.shortcut(activated)
        out: Tensor = self.drop_path(self.branch(activated)) + skip
        return out


def _norm_conv(dim: int, dim_out: int, kernel_size: int, stride: int = 1, **factory: Any) -> nn.Sequential:
    convolution = nn.Conv2d(dim, dim_out, kernel_size, stride, kernel_size // 2, bias=False, **factory)
    return nn.Sequential(nn.BatchNorm2d(dim, **factory), nn.ReLU(), convolution)


class BasicUnit(PreActivationUnit):
    """Two 3×3 convolutions."""

    def __init__(self, dim: int, width: int, *, stride: int, drop_path: float, **factory: Any) -> None:
        super().__init__(dim, width, stride, drop_path, nn.ReLU(), **factory)
        self.conv1 = nn.Conv2d(dim, width, 3, stride, 1, bias=False, **factory)
        self.conv2 = _norm_conv(width, width, 3, **factory)

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.conv1(x))
        return out


class BottleneckUnit(PreActivationUnit):
    """1×1, 3×3 and 1×1 convolutions; the middle one strides."""

    def __init__(self, dim: int, width: int, *, stride: int, drop_path: float, **factory: Any) -> None:
        super().__init__(dim, 4 * width, stride, drop_path, nn.ReLU(), **factory)
        self.conv1 = nn.Conv2d(dim, width, 1, bias=False, **factory)
        self.conv2 = _norm_conv(width, width, 3, stride, **factory)
        self.conv3 = _norm_conv(width, 4 * width, 1, **factory)

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv3(self.conv2(self.conv1(x)))
        return out


class AttentionUnit(PreActivationUnit):
    """1×1 convolution to dim/expansion channels, BatchNorm, window attention to `width * expansion`: AlterNet's MSA.

    (B, dim, h, w) → (B, width·expansion, h, w); without an MLP, unlike a transformer's block.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        *,
        expansion: int,
        num_heads: int,
        head_dim: int,
        window_size: int,
        drop_path: float,
        **factory: Any,
    ) -> None:
        super().__init__(dim, width * expansion, 1, drop_path, nn.GELU(), **factory)
        inner = dim // expansion
        self.conv = nn.Conv2d(dim, inner, 1, bias=False, **factory)
        self.inner_norm = nn.BatchNorm2d(inner, **factory)
        self.attn = WindowAttention(
            inner, width * expansion, num_heads=num_heads, head_dim=head_dim, window_size=window_size, **factory
        )

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(self.inner_norm(self.conv(x)))
        return out


class Factory(TypedDict, total=False):
    """Where and as what PyTorch makes a tensor."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class AlterNet(nn.Module):
    """Images (B, 3, S, S) → logits (B, num_classes), with timm's interface.

    Args:
        unit: "basic" (18, 34) or "bottleneck" (50 and deeper).
        depths, attention_depths: units and attention units of each of the four stages.
        num_heads, head_dim, window_size: of the attention units.
        stem: "imagenet" (7×7 stride 2 and max-pooling) or "cifar" (3×3).
        device, dtype: of every tensor.
    """

    def __init__(
        self,
        *,
        unit: Literal["basic", "bottleneck"] = "bottleneck",
        depths: Sequence[int] = (3, 4, 6, 4),
        attention_depths: Sequence[int] = (0, 1, 3, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        head_dim: int = 64,
        window_size: int = 7,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        num_classes: int = 1000,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        nn.factory_kwargs(factory)  # type: ignore[no-untyped-call]  # torch's; raises TypeError for any other name
        _check_depths(depths, attention_depths)
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False
        self.stem = _stem(stem, in_chans, **factory)
        self.stem_reduction = 4 if stem == "imagenet" else 1
        expansion = 1 if unit == "basic" else 4
        # The rate of drop path grows linearly over all units, as in timm.
        drop_paths = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
        stages, dim = [], STEM_WIDTH
        for index, width in enumerate(STAGE_WIDTHS):
            units: list[nn.Module] = []
            for position, is_attention in enumerate(attention_sequence(depths[index], attention_depths[index])):
                drop_path = next(drop_paths)
                if is_attention:
                    made: nn.Module = AttentionUnit(
                        dim,
                        width,
                        expansion=expansion,
                        num_heads=num_heads[index],
                        head_dim=head_dim,
                        window_size=window_size,
                        drop_path=drop_path,
                        **factory,
                    )
                else:
                    stride = 2 if index > 0 and position == 0 else 1
                    kind = BasicUnit if unit == "basic" else BottleneckUnit
                    made = kind(dim, width, stride=stride, drop_path=drop_path, **factory)
                units.append(made)
                dim = width * expansion
            stages.append(nn.Sequential(*units))
        self.stages = nn.ModuleList(stages)
        self.num_features = self.head_hidden_size = dim
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": width * expansion, "reduction": self.stem_reduction * 2**i}
            for i, width in enumerate(STAGE_WIDTHS)
        ]
        self.norm = nn.BatchNorm2d(dim, **factory)
        self.activation = nn.ReLU()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) → the normalised last feature map (B, C, h, w), h = S/32 (S/8 with the CIFAR stem)."""
        with self._float32_in_training(x.device.type):
            x = self.stem(x)
            for stage in self.stages:
                x = self._run(stage, x)
            out: Tensor = self.activation(self.norm(x))
            return out

    def _float32_in_training(self, device: str) -> AbstractContextManager[Any]:
        """No autocast while training: each convolution and BatchNorm of a fresh pre-activation ResNet amplifies what
        was rounded before it, so that the first stage's gradients are others in bfloat16 (docs/maths.md §3.1).
        """
        if not self.training or device == "meta" or not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, enabled=False)

    def _run(self, stage: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_seq(stage, x) if self.grad_checkpointing and self.training else stage(x)
        return out

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map → logits, or the pooled features (B, C)."""
        pooled: Tensor = self.head_drop(x.mean(dim=(2, 3)))
        logits: Tensor = pooled if pre_logits else self.head(pooled)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """timm's interface: the outputs of the chosen stages, and the final features unless `intermediates_only`."""
        if output_fmt != "NCHW":
            raise InputError(f"output_fmt '{output_fmt}' of an AlterNet: only NCHW")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        with self._float32_in_training(x.device.type):
            x = self.stem(x)
            for index, stage in enumerate(self.stages):
                if stop_early and index > last:
                    break
                x = self._run(stage, x)
                if index in take:
                    final = norm and index == len(self.stages) - 1
                    intermediates.append(self.activation(self.norm(x)) if final else x)
            return intermediates if intermediates_only else (self.activation(self.norm(x)), intermediates)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; pooling is always the average."""
        if global_pool not in (None, "avg"):
            raise InputError(f"global_pool '{global_pool}' of an AlterNet: only avg")
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes > 0:
            like = self.norm.weight
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)

    def no_weight_decay(self) -> set[str]:
        """Tables of relative positions, which are biases of attention scores."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning rates: the stem, then each unit (or stage)."""
        return {
            "stem": r"^stem",
            "blocks": [
                (r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }


def attention_sequence(depth: int, attention_depth: int) -> list[bool]:
    """Which of a stage's n1 = `depth` units are attention, of n2 = `attention_depth`: `[C]·(n1 − 2·n2) + [C, M]·n2`."""
    return [False] * (depth - 2 * attention_depth) + [False, True] * attention_depth


def _check_depths(depths: Sequence[int], attention_depths: Sequence[int]) -> None:
    if len(depths) != len(STAGE_WIDTHS) or len(attention_depths) != len(STAGE_WIDTHS):
        raise InputError(f"depths {tuple(depths)} and attention_depths {tuple(attention_depths)}: four stages each")
    for stage, (units, attention) in enumerate(zip(depths, attention_depths, strict=True)):
        if 2 * attention > units:
            raise InputError(
                f"stage {stage} has {units} units and {attention} of attention: at most every second can be, so change "
                "depths or attention_depths"
            )


def _stem(kind: str, in_chans: int, **factory: Any) -> nn.Sequential:
    if kind == "cifar":
        return nn.Sequential(nn.Conv2d(in_chans, STEM_WIDTH, 3, 1, 1, bias=False, **factory))
    convolution = nn.Conv2d(in_chans, STEM_WIDTH, 7, 2, 3, bias=False, **factory)
    return nn.Sequential(convolution, nn.MaxPool2d(3, 2, 1))
