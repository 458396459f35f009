"""Settings of a recipe for the images a network sees and the losses that are minimised; they need no torch."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from vitx.core.files import Record

Fraction = Annotated[FiniteFloat, Field(ge=0, le=1)]
Weight = Annotated[FiniteFloat, Field(ge=0)]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]
Decay = Annotated[FiniteFloat, Field(ge=0, lt=1)]

# Of Beta(alpha, alpha): beyond these the libraries draw NaN or one number for ever, or never end.
SMALLEST_ALPHA, LARGEST_ALPHA = 0.001, 1000
Alpha = Annotated[FiniteFloat, Field(ge=0, le=LARGEST_ALPHA)]

LossVariant = Literal["paper", "official"]


class Augmentation(Record):
    """Random changes of a training image, applied in the order of the fields; each is off at its default.

    A random resized crop comes first, or without it the resizing and cropping of evaluation. `auto_augment`,
    `color_jitter` and `erasing` are timm's; erasing works on normalised images.
    """

    smallest_crop: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        default=1.0, description="smallest area of a random resized crop, as a share of the image's; 1 is no such crop"
    )
    interpolation: Literal["bicubic", "random"] = Field(
        default="bicubic", description="of the crop and of auto_augment; random is bilinear or bicubic by the toss"
    )
    padding: NonNegativeInt = Field(
        default=0, le=1024, description="black pixels around the image before a random crop (CIFAR)"
    )
    rotation: Weight = Field(default=0.0, description="degrees, to either side")
    translation: Fraction = Field(default=0.0, description="share of the image side, in either direction")
    scale: Decay = Field(default=0.0, description="largest relative change of size")
    shear: Annotated[FiniteFloat, Field(ge=0, lt=45)] = Field(default=0.0, description="degrees, along either axis")
    flip: Fraction = Field(default=0.0, description="probability of a horizontal flip")
    auto_augment: str = Field(
        default="", description="timm's name, such as rand-m9-mstd0.5-inc1 (RandAugment) or 3a (three-augment)"
    )
    color_jitter: Annotated[FiniteFloat, Field(ge=0, le=100)] = Field(
        default=0.0, description="largest change of brightness, contrast and saturation"
    )
    erasing: Fraction = Field(default=0.0, description="probability of random erasing")
    erasing_mode: Literal["const", "rand", "pixel"] = Field(
        default="pixel", description="what fills the erased box: the mean, one random colour, or noise"
    )
    repeats: PositiveInt = Field(
        default=1,
        le=1000,
        description="repeated augmentation: an epoch shows 1/repeats of the images, each `repeats` times",
    )


class Mixup(Record):
    """timm's mixup and pixel CutMix of whole images. Not beside the patch-aligned CutMix: pixels would mix twice."""

    mixup: Alpha = Field(default=0.0, description="alpha of mixup; 0 is off")
    cutmix: Alpha = Field(default=0.0, description="alpha of pixel CutMix; 0 is off")
    probability: Fraction = Field(default=1.0, description="share of the batches, pairs or images that are mixed")
    switch_probability: Fraction = Field(default=0.5, description="share of CutMix where both are on")
    mode: Literal["batch", "pair", "elem"] = Field(default="batch", description="which images share one random draw")

    @property
    def on(self) -> bool:
        return bool(self.probability and (self.mixup or self.cutmix))


class CutMix(Record):
    """Patch-aligned CutMix: boxes of whole patches, so that every patch has one label."""

    probability: Fraction = Field(default=0.0, description="share of the batches, or images, that are mixed")
    alpha: Annotated[FiniteFloat, Field(ge=SMALLEST_ALPHA, le=LARGEST_ALPHA)] = Field(
        default=1.0, description="the box takes a share ~ Beta(alpha, alpha) of the image"
    )
    box: Literal["batch", "sample"] = Field(default="batch", description="one box for a batch, or one for each image")


class Losses(Record):
    """Weights of the losses beside the cross-entropy (docs/maths.md §2); 0 is off."""

    cosine: Weight = Field(default=0.0, description="patch cosine loss (Gong et al.): keeps patches of an image apart")
    contrastive: Weight = Field(default=0.0, description="patch contrastive loss: late patches stay near early ones")
    contrastive_variant: LossVariant = Field(default="paper", description="as printed, or as the authors' code has it")
    mixing: Weight = Field(default=0.0, description="patch mixing loss: each patch is classified; needs cutmix")
    mixing_variant: LossVariant = Field(default="paper", description="as printed, or as the authors' code has it")
    attention: Weight = Field(default=0.0, description="DeepViT's similarity of the attention maps of adjacent blocks")
    attention_maps: Literal["mixed", "softmax"] = Field(
        default="mixed", description="which maps: those after Re-Attention's mix and norm, as the authors', or before"
    )
    attention_over: Literal["rows", "heads"] = Field(
        default="heads", description="the vectors that are compared: a map's columns, or one entry over the heads"
    )
    attention_pairs: NonNegativeInt = Field(default=0, description="the first pairs of adjacent blocks; 0 is all")
    label_smoothing: Decay = Field(default=0.0, description="share of a label that is spread over all classes")

    @property
    def need_tokens(self) -> bool:
        return bool(self.cosine or self.contrastive or self.mixing)


def check_mixing(mixup: Mixup, cutmix: CutMix, losses: Losses) -> None:
    """Raise ValueError for settings of a recipe that contradict each other, and for an alpha too small to draw with."""
    for name, alpha in (("mixup", mixup.mixup), ("cutmix", mixup.cutmix)):
        if 0 < alpha < SMALLEST_ALPHA:
            raise ValueError(f"mixup.{name} is {alpha:g}: expected 0, or {SMALLEST_ALPHA:g} to {LARGEST_ALPHA:g}")
    if mixup.on and (cutmix.probability or losses.mixing):
        raise ValueError(
            "mixup beside the patch-aligned CutMix would mix pixels twice, and a patch would have no single label: set "
            "mixup.mixup=0 and mixup.cutmix=0, or cutmix.probability=0 and losses.mixing=0"
        )
    if losses.mixing and not cutmix.probability:
        raise ValueError(
            "losses.mixing needs images of mixed patches: set cutmix.probability above 0, or losses.mixing=0"
        )
