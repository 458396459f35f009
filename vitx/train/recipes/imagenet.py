"""The papers' recipes for ImageNet and CIFAR. Each docstring has the command, hardware, time and published result.

What the authors printed (commands, YAML files) is in published.toml, and a test compares every value; where a recipe
differs, its docstring says why ("Differs"). We have run none of them to its end: results are quoted with their source.
`--data` is the path of the images, by default $VITX_DATA/imagenet or $VITX_DATA/cifar100. On N GPUs put `torchrun
--nproc-per-node N --no-python` before the command; a batch size is that of all processes together. Rates change from
step to step, the authors' from epoch to epoch.
"""

from typing import Any

from vitx.core.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitx.train.recipes.image_and_loss_settings import Augmentation, CutMix, Losses, Mixup
from vitx.train.recipes.optimization_settings import Optimizer, Schedule, Stage
from vitx.train.recipes.recipe import ModelChoice, Recipe

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
PIXELS = Preprocessing(image_size=224, crop_fraction=0.875, mean=IMAGENET_MEAN, std=IMAGENET_STD)
# What DeiT trains with: RandAugment, erasing, and each image three times in an epoch of a third of the images.
DEIT_AUGMENTATION = Augmentation(smallest_crop=0.08, flip=0.5, auto_augment=RANDAUGMENT, erasing=0.25, repeats=3)
DEIT_MIXUP = Mixup(mixup=0.8, cutmix=1.0)


def deit_ti() -> Recipe:
    """DeiT-Ti (Touvron et al., arXiv 2012.12877) on ImageNet, the plain baseline of 5.7 M parameters.

    Command: vitx train deit-ti --data IMAGENET
    Hardware: the paper's one node of 8 GPUs; 300 epochs at batch 1024.
    Time: two to three days for DeiT-B by the paper, less for this; not measured here.
    Result: top-1 72.2 % (table 5 of the paper).
    """
    return _deit("deit-ti", "deit_tiny_12")


def deit_s() -> Recipe:
    """DeiT-S on ImageNet, the plain baseline of 22 M parameters.

    Command: vitx train deit-s --data IMAGENET
    Hardware: the paper's one node of 8 GPUs; 300 epochs at batch 1024.
    Time: two to three days for DeiT-B by the paper, less for this; not measured here.
    Result: top-1 79.9 % (Gong et al., arXiv 2104.12753; 79.6 % with 24 blocks: --set model.name=deit_small_24).
    """
    return _deit("deit-s", "deit_small_12")


def deit_b() -> Recipe:
    """DeiT-B on ImageNet, the plain baseline of 87 M parameters.

    Command: vitx train deit-b --data IMAGENET
    Hardware: the paper's one node of 8 GPUs; 300 epochs at batch 1024.
    Time: two to three days by the DeiT paper; not measured here.
    Result: top-1 81.8 % (81.4 % with 24 blocks: Gong et al., arXiv 2104.12753).
    """
    return _deit("deit-b", "deit_base_12")


def patchvit_s_12() -> Recipe:
    """DeiT-S with talking heads, contrastive and mixing losses (Gong et al., arXiv 2104.12753), 12 blocks.

    Command: vitx train patchvit-s-12 --data IMAGENET
    Hardware: one node of 8 GPUs; 300 epochs at batch 1200.
    Time: not measured here.
    Result: top-1 81.2 %, the baseline 79.9 % (the paper; their script for this network does not say that it is of it).
    Differs: cutmix, --cutmix 1.0 is off: beside the patch-aligned CutMix it would give a patch two labels.
    """
    recipe = _patchvit("patchvit-s-12", "deit_small_12_talking", drop_path=0.1)
    return recipe.changed({"epochs": 300, "batch_size": 1200, "augmentation.repeats": 3})


def patchvit_s_24() -> Recipe:
    """DeiT-S with talking heads, contrastive and mixing losses, 24 blocks.

    Command: vitx train patchvit-s-24 --data IMAGENET
    Hardware: one node of 8 GPUs; 400 epochs at batch 1024.
    Time: not measured here.
    Result: top-1 82.2 %, the baseline 79.6 % (Gong et al., who print no command: patchvit-b-24's settings).
    """
    return _patchvit("patchvit-s-24", "deit_small_24_talking", drop_path=0.75)


def patchvit_b_12() -> Recipe:
    """DeiT-B with talking heads, contrastive and mixing losses, 12 blocks.

    Command: vitx train patchvit-b-12 --data IMAGENET
    Hardware: one node of 8 GPUs; 300 epochs at drop path .5, then 100 at .75, at batch 576.
    Time: not measured here.
    Result: top-1 82.9 %; 82.6 % without talking heads after 300 epochs; the baseline 81.8 % (Gong et al.).
    Differs: cutmix, --cutmix 1.0 is off: beside the patch-aligned CutMix it would give a patch two labels.
    """
    recipe = _patchvit("patchvit-b-12", "deit_base_12_talking", drop_path=0.75)
    # Their second command loads the weights, but not the optimizer's state.
    return recipe.changed({"batch_size": 576, "stages": (Stage(until=300, drop_path_rate=0.5),)})


def patchvit_b_24() -> Recipe:
    """DeiT-B with talking heads, contrastive and mixing losses, 24 blocks.

    Command: vitx train patchvit-b-24 --data IMAGENET
    Hardware: one node of 8 GPUs; 400 epochs at batch 1024; --set execution.grad_checkpointing=true saves memory.
    Time: not measured here.
    Result: top-1 83.3 %, with drop path .10 and .50 82.0 and 83.0 %; the baseline 81.4 % (Gong et al., who print no
    command: one schedule of 400 epochs at batch 1024).
    """
    return _patchvit("patchvit-b-24", "deit_base_24_talking", drop_path=0.75)


def patchvit_b_12_384() -> Recipe:
    """patchvit-b-12 fine-tuned at 384 px.

    Command: vitx train patchvit-b-12-384 --data IMAGENET --set model.initial_checkpoint=runs/patchvit-b-12
    Hardware: one node of 8 GPUs; 30 epochs at batch 512.
    Time: not measured here.
    Result: top-1 84.2 %, the baseline 83.1 % (Gong et al., who print no command: DeiT's rates for fine-tuning).
    """
    return _finetuned(patchvit_b_12(), "patchvit-b-12-384", "deit_base_12_talking_384", 384, "runs/patchvit-b-12")


def patchvit_b_24_512() -> Recipe:
    """patchvit-b-24 fine-tuned at 512 px.

    Command: vitx train patchvit-b-24-512 --data IMAGENET --set model.initial_checkpoint=runs/patchvit-b-24
    Hardware: one node of 8 GPUs; 30 epochs at batch 512, gradient checkpointing.
    Time: not measured here.
    Result: top-1 85.0 % (Gong et al., who print no command: DeiT's rates for fine-tuning).
    """
    recipe = _finetuned(patchvit_b_24(), "patchvit-b-24-512", "deit_base_24_talking_512", 512, "runs/patchvit-b-24")
    return recipe.changed({"execution.grad_checkpointing": True})


def patchvit_l_finetune() -> Recipe:
    """ViT-L/16, pretrained on ImageNet-21k, fine-tuned with the contrastive and mixing losses.

    Command: vitx train patchvit-l-finetune --data IMAGENET --set model.initial_checkpoint=vit_large_in21k.safetensors
    Hardware: one node of 8 GPUs; 40 epochs at batch 128. The file is timm's vit_large_patch16_224.augreg_in21k.
    Time: not measured here.
    Result: top-1 83.9 %; at 384 px (--set preprocessing.image_size=384 --set preprocessing.crop_fraction=1) 85.3 %, the
        baseline 85.1 % (Gong et al.).
    Differs: cutmix, --cutmix 1.0 is off: beside the patch-aligned CutMix it would give a patch two labels; mean and
        std are ½, those of that checkpoint, where their code takes ImageNet's.
    """
    recipe = _patchvit("patchvit-l-finetune", "deit_large_24", drop_path=0.0)
    return recipe.changed(
        {
            "model.initial_checkpoint": "vit_large_in21k.safetensors",
            "preprocessing.mean": HALF,  # as that checkpoint was trained
            "preprocessing.std": HALF,
            "augmentation.auto_augment": "rand-n1-m1-mstd0.5-inc1",
            "augmentation.erasing": 1e-6,
            "losses.label_smoothing": 1e-6,
            "optimizer.lr": 5e-5,
            "optimizer.weight_decay": 1e-8,
            "epochs": 40,
            "batch_size": 128,
        }
    )


def attnscale_s_12() -> Recipe:
    """DeiT-S with AttnScale (Wang et al., arXiv 2203.05962), 12 blocks.

    Command: vitx train attnscale-s-12 --data IMAGENET
    Hardware: two GPUs; 500 epochs, which the authors' commands leave at the default of their code, at batch 1024.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing("attnscale-s-12")


def attnscale_s_24() -> Recipe:
    """DeiT-S with AttnScale, 24 blocks.

    Command: vitx train attnscale-s-24 --data IMAGENET
    Hardware: two GPUs; 500 epochs at batch 512, with dropout.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing("attnscale-s-24")


def featscale_s_12() -> Recipe:
    """DeiT-S with FeatScale (Wang et al., arXiv 2203.05962), 12 blocks.

    Command: vitx train featscale-s-12 --data IMAGENET
    Hardware: two GPUs; 500 epochs, which the authors' commands leave at the default of their code, at batch 1024.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing("featscale-s-12")


def featscale_s_24() -> Recipe:
    """DeiT-S with FeatScale, 24 blocks.

    Command: vitx train featscale-s-24 --data IMAGENET
    Hardware: two GPUs; 500 epochs at batch 512, with dropout.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing("featscale-s-24")


def attnscale_cait_s24() -> Recipe:
    """CaiT-S24 with AttnScale (Wang et al., arXiv 2203.05962), fine-tuned.

    Command: vitx train attnscale-cait-s24 --data IMAGENET --set model.initial_checkpoint=cait_s24_224.safetensors
    Hardware: two GPUs; 60 epochs at batch 256. The file is timm's cait_s24_224.fb_dist_in1k.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing_finetuned("attnscale-cait-s24")


def featscale_cait_s24() -> Recipe:
    """CaiT-S24 with FeatScale (Wang et al., arXiv 2203.05962), fine-tuned.

    Command: vitx train featscale-cait-s24 --data IMAGENET --set model.initial_checkpoint=cait_s24_224.safetensors
    Hardware: two GPUs; 60 epochs at batch 256. The file is timm's cait_s24_224.fb_dist_in1k.
    Time: not measured here.
    Result: not trained here; the paper's abstract has up to 1.1 points over the plain networks.
    """
    return _anti_oversmoothing_finetuned("featscale-cait-s24")


def neutreno_ti() -> Recipe:
    """DeiT-Ti with NeuTRENO (Nguyen et al., arXiv 2312.00751).

    Command: vitx train neutreno-ti --data IMAGENET
    Hardware: four GPUs; 300 epochs, which the authors' command leaves at the default of their code, at batch 1024.
    Time: not measured here.
    Result: not trained here; the paper's tables were not at hand.
    """
    return _deit("neutreno-ti", "deit_tiny_neutreno_patch16_224")


def deepvit_16() -> Recipe:
    """DeepViT of 16 blocks, Re-Attention in all (Zhou et al., arXiv 2103.11886).

    Command: vitx train deepvit-16 --data IMAGENET
    Hardware: one node of 8 GPUs; 310 epochs, the last ten at the smallest rate, at batch 256.
    Time: not measured here.
    Result: top-1 79.10 %, the plain ViT of this size 78.88 % (the paper). No YAML file is printed: deepvit-24's.
    """
    return _deepvit("deepvit-16", "deepvit_16b")


def deepvit_24() -> Recipe:
    """DeepViT of 24 blocks, Re-Attention in all.

    Command: vitx train deepvit-24 --data IMAGENET
    Hardware: one node of 8 GPUs; 310 epochs, the last ten at the smallest rate, at batch 256.
    Time: not measured here.
    Result: top-1 79.99 %, the plain ViT of this size 79.35 % (Zhou et al.).
    """
    return _deepvit("deepvit-24", "deepvit_24b")


def deepvit_32() -> Recipe:
    """DeepViT of 32 blocks, Re-Attention in all.

    Command: vitx train deepvit-32 --data IMAGENET
    Hardware: one node of 8 GPUs; 310 epochs, the last ten at the smallest rate, at batch 256.
    Time: not measured here.
    Result: top-1 80.90 %, the plain ViT of this size 79.27 % (Zhou et al.). Light mixup, and the similarity of the
    first twelve pairs of attention maps as a further loss.
    """
    recipe = _deepvit("deepvit-32", "deepvit_32b")
    return recipe.changed({"mixup": Mixup(mixup=0.1), "losses.attention": 0.1, "losses.attention_pairs": 12})


def deepvit_s() -> Recipe:
    """DeepViT-S: CNN embedding, 16 blocks, Re-Attention in the last five; 27 M parameters.

    Command: vitx train deepvit-s --data IMAGENET
    Hardware: one node of 8 GPUs; 310 epochs, the last ten at the smallest rate, at batch 256.
    Time: not measured here.
    Result: top-1 82.3 % (Zhou et al.).
    """
    return _deepvit("deepvit-s", "deepvit_s")


def deepvit_l() -> Recipe:
    """DeepViT-L: CNN embedding, 32 blocks, Re-Attention in the last twelve; 59 M parameters.

    Command: vitx train deepvit-l --data IMAGENET
    Hardware: one node of 8 GPUs; 310 epochs, the last ten at the smallest rate, at batch 256; less memory with
        --set execution.grad_checkpointing=true.
    Time: not measured here.
    Result: top-1 83.1 %; fine-tuned at 384 px (deepvit-l-384) 84.25 % (Zhou et al.).
    """
    return _deepvit("deepvit-l", "deepvit_l")


def deepvit_l_384() -> Recipe:
    """deepvit-l fine-tuned at 384 px.

    Command: vitx train deepvit-l-384 --data IMAGENET --set model.initial_checkpoint=runs/deepvit-l
    Hardware: one node of 8 GPUs; 30 epochs at batch 512.
    Time: not measured here.
    Result: top-1 84.25 % (Zhou et al.). No command is printed: DeiT's rates for fine-tuning.
    """
    return _finetuned(deepvit_l(), "deepvit-l-384", "deepvit_l_384", 384, "runs/deepvit-l")


def alternet_cifar() -> Recipe:
    """AlterNet-18 (Park & Kim, arXiv 2202.06709) on CIFAR-100.

    Command: vitx train alternet-cifar --data FOLDER (with cifar-100-python or cifar-100-binary in it)
    Hardware: one GPU; 305 epochs at batch 96, the first five of warm-up.
    Time: not measured here.
    Result: not trained here; the paper draws its CIFAR-100 results and prints none for this network.
    Differs: weight_decay_of_norms, norms and biases are not decayed, as in every recipe here.
    """
    return Recipe(
        name="alternet-cifar",
        data="cifar100",
        model=ModelChoice(name="alternet_18_cifar", kwargs={"drop_path_rate": 0.1}),
        preprocessing=Preprocessing(image_size=32, mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761)),
        augmentation=Augmentation(
            interpolation="random", padding=4, flip=0.5, auto_augment="rand-m9-n2-mstd1.0", erasing=0.0
        ),
        mixup=Mixup(mixup=1.0, cutmix=0.8),
        losses=Losses(label_smoothing=0.1),
        optimizer=Optimizer(lr=1.25e-4, weight_decay=0.05, clip=5),
        schedule=Schedule(warmup_epochs=5),
        ema_decay=0,
        epochs=305,
        batch_size=96,
    )


def _deit(name: str, model: str) -> Recipe:
    return _on_imagenet(name, model, {"drop_path_rate": 0.1}, min_lr=1e-5)


def _anti_oversmoothing(name: str) -> Recipe:
    """The authors' commands, with dropout after positions, attention and MLP in the deep networks."""
    deep = name.endswith("-24")
    dropout = dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), 0.2) if deep else {}
    model = name.replace("-s-", "_small_")
    recipe = _on_imagenet(name, model, {"drop_path_rate": 0.1, **dropout}, epochs=500, min_lr=1e-5)
    return recipe.changed({"batch_size": 512 if deep else 1024})


def _anti_oversmoothing_finetuned(name: str) -> Recipe:
    """The authors' commands for CaiT, which begin from its published weights."""
    recipe = _on_imagenet(name, name.replace("-", "_") + "_224", {"drop_path_rate": 0.1}, epochs=60, min_lr=1e-6)
    return recipe.changed(
        {
            "model.initial_checkpoint": "cait_s24_224.safetensors",
            "optimizer.lr": 5e-5,
            "optimizer.weight_decay": 5e-4,
            "schedule.warmup_epochs": 1,
            "batch_size": 256,
        }
    )


def _deepvit(name: str, model: str) -> Recipe:
    """The YAML files of the authors' code; its rate does not follow from the batch."""
    return _on_imagenet(name, model, {"drop_path_rate": 0.2}, min_lr=1e-5).changed(
        {
            "preprocessing": Preprocessing(image_size=224, crop_fraction=0.9),
            "augmentation.repeats": 1,
            "augmentation.interpolation": "random",
            "optimizer.lr_base_size": 0,
            "schedule.cooldown_epochs": 10,
            "epochs": 310,
            "batch_size": 256,
            "seed": 42,
        }
    )


def _patchvit(name: str, model: str, *, drop_path: float) -> Recipe:
    """The dropout before the classifier is in the authors' network and not in their commands."""
    return _on_imagenet(
        name,
        model,
        {"drop_path_rate": drop_path, "drop_rate": 0.2},
        epochs=400,
        min_lr=1e-7,
        augmentation=DEIT_AUGMENTATION.model_copy(update={"repeats": 1}),
        mixup=Mixup(),
        cutmix=CutMix(probability=1.0),
        losses=Losses(contrastive=1.0, mixing=1.0, label_smoothing=0.1),
    )


def _on_imagenet(
    name: str, model: str, arguments: dict[str, Any], *, min_lr: float, epochs: int = 300, **settings: Any
) -> Recipe:
    """DeiT's training: AdamW, lr 5e-4 · batch/512, five epochs of warm-up, half a cosine, averaged weights."""
    return Recipe(
        name=name,
        data="imagenet",
        model=ModelChoice(name=model, kwargs=arguments),
        preprocessing=PIXELS,
        optimizer=Optimizer(lr=5e-4, lr_base_size=512, weight_decay=0.05, clip=0),
        schedule=Schedule(warmup_epochs=5, warmup_lr=1e-6, warmup_prefix=False, min_lr=min_lr),
        ema_decay=0.99996,
        ema_warmup=False,
        epochs=epochs,
        batch_size=1024,
        workers=8,
        **{
            "augmentation": DEIT_AUGMENTATION,
            "mixup": DEIT_MIXUP,
            "losses": Losses(label_smoothing=0.1),
            **settings,
        },
    )


def _finetuned(recipe: Recipe, name: str, model: str, image_size: int, initial_checkpoint: str) -> Recipe:
    """DeiT's fine-tuning: a constant lr of 5e-6 · batch/512, hardly any weight decay, the whole image evaluated."""
    return recipe.changed(
        {
            "name": name,
            "model.name": model,
            "model.initial_checkpoint": initial_checkpoint,
            "preprocessing.image_size": image_size,
            "preprocessing.crop_fraction": 1.0,
            "optimizer": Optimizer(lr=5e-6, lr_base_size=512, weight_decay=1e-8, clip=0),
            "schedule": Schedule(name="constant", warmup_epochs=5, warmup_lr=1e-6),
            "stages": (),
            "epochs": 30,
            "batch_size": 512,
        }
    )
