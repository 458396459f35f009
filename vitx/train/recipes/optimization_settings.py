"""Settings of a recipe for how the network is optimised and executed; they need no torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from vitx.core.console import counted
from vitx.core.files import Record
from vitx.train.recipes.image_and_loss_settings import Decay, Fraction, Losses, PositiveFloat, Weight

Metric = Literal["top1", "nll", "ece", "brier"]
# timm's schedulers that follow from the step alone. Its "plateau" has counters that timm cannot save.
ScheduleName = Literal["cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant"]
WITHOUT_END = ("constant", "step", "multistep")  # they fall by factors, if at all, and stay where they are


class Optimizer(Record):
    """An optimizer of timm by name; biases, norms, positions and the class token are not decayed."""

    name: str = Field(default="adamw", description="of timm.optim.list_optimizers(): adamw, lamb, muon, sgd, …")
    lr: PositiveFloat = Field(description="learning rate after the warm-up")
    lr_base_size: NonNegativeInt = Field(
        default=0, description="images of a step that lr is meant for: it grows with batch_size; 0 is lr as it is"
    )
    weight_decay: Weight = Field(default=0.05, description="of matrices alone")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="of an optimizer that has two betas")
    momentum: Decay = Field(default=0.9, description="of an optimizer that has a momentum")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="further arguments of the optimizer, such as eps")
    clip: Weight = Field(default=1.0, description="largest norm of the gradient; 0 is no clipping")
    layer_decay: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        default=1.0, description="factor of the learning rate from each layer to the one before it"
    )
    accumulate: PositiveInt = Field(default=1, description="passes of batch_size/accumulate images to one step")
    sam_rho: Weight = Field(default=0.0, description="radius of sharpness-aware minimisation (SAM); 0 is off")

    def rate(self, batch_size: int) -> float:
        """The learning rate of steps of `batch_size` images, before warm-up and schedule."""
        return self.lr * batch_size / self.lr_base_size if self.lr_base_size else self.lr


class Schedule(Record):
    """Linear warm-up from `warmup_lr`, then timm's schedule `name` down to `min_lr`, step by step."""

    name: ScheduleName = Field(default="cosine", description="of timm: how the rate falls after the warm-up")
    warmup_epochs: Weight = Field(default=0.0, description="at most half of all epochs")
    warmup_lr: Weight = Field(default=0.0, description="learning rate at which the warm-up begins")
    warmup_prefix: bool = Field(
        default=True, description="the schedule begins after the warm-up; false is with it, as timm does unless told"
    )
    cooldown_epochs: Weight = Field(default=0.0, description="the last epochs, at min_lr")
    min_lr: Weight = Field(default=0.0, description="learning rate at which the schedule ends")
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="of timm's create_scheduler_v2, in epochs: decay_epochs, decay_rate, …",
    )

    def warmup(self, epochs: int) -> float:
        """Epochs of warm-up in a run of `epochs`."""
        return min(self.warmup_epochs, epochs / 2)


class Execution(Record):
    """How the network is executed: number formats, memory, and how processes share the work."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of autocast; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    compile: bool = Field(default=False, description="torch.compile, block by block")
    channels_last: bool = Field(default=False, description="the memory format that convolutions on GPUs prefer")
    deterministic: bool = Field(
        default=False, description="the same bits on a GPU too, also after a resume; refused where an operator cannot"
    )
    grad_checkpointing: bool = Field(default=False, description="compute activations twice, keep them once")
    sync_batch_norm: bool = Field(default=True, description="statistics over the batch of all processes")
    parallel: Literal["ddp", "fsdp"] = Field(default="ddp", description="how processes started by torchrun share")


class Distillation(Record):
    """A teacher beside the labels (Touvron et al., DeiT, arXiv 2012.12877, §4): (1−weight)·CE + weight·distillation."""

    teacher: str = Field(default="", description="a run folder, or timm:NAME (pretrained) or timm:NAME@FILE; '' is off")
    kind: Literal["hard", "soft"] = Field(default="hard", description="the teacher's class, or its distribution")
    weight: Fraction = Field(default=0.5, description="share of the distillation in the loss")
    # Beyond these the loss is noise in float32: at 10,000 it is 6 % off, at 1e30 it is NaN.
    temperature: Annotated[FiniteFloat, Field(ge=0.01, le=1000)] = Field(
        default=3.0, description="of soft distillation"
    )


class Stage(Record):
    """Epochs that are trained as a run of their own before those that the recipe's other settings describe."""

    until: PositiveInt = Field(description="the last epoch of the stage, and the length of its schedule")
    drop_path_rate: Decay  # 1 would drop every path, and rounding makes more of it
    fresh_optimizer: bool = Field(default=True, description="the optimizer's state is begun anew after the stage")


class Selection(Record):
    """Which epoch is the best one, and when to stop early."""

    metric: Metric = Field(default="top1", description="of the evaluation split, by which an epoch is the best")
    patience: NonNegativeInt = Field(default=0, description="epochs without a better one before stopping; 0 is never")


def refuse_unsupported(optimizer: Optimizer, execution: Execution, losses: Losses) -> None:
    """Raise ValueError for settings that contradict each other."""
    if losses.attention and losses.attention_maps == "mixed" and execution.grad_checkpointing:
        # The maps are looked at in the first pass only: the blocks computed again would keep other tensors.
        raise ValueError(
            "execution.grad_checkpointing does not go with losses.attention of mixed maps: set "
            "losses.attention_maps=softmax, or execution.grad_checkpointing=false"
        )
    if execution.parallel == "fsdp" and execution.channels_last:
        raise ValueError("execution.parallel=fsdp takes contiguous weights: set execution.channels_last=false")
    if optimizer.sam_rho and execution.precision == "float16":
        raise ValueError(
            "optimizer.sam_rho needs unscaled gradients, and float16 scales them: set execution.precision=bfloat16"
        )
    if execution.parallel == "fsdp" and (optimizer.sam_rho or execution.precision == "float16"):
        raise ValueError("execution.parallel=fsdp goes without optimizer.sam_rho and float16: use ddp, or bfloat16")


def refuse_impossible_schedule(rate: float, schedule: Schedule, epochs: int) -> None:
    """Raise ValueError for a schedule that does not fit the learning rate or the number of epochs."""
    if schedule.min_lr > rate:
        raise ValueError(f"schedule.min_lr {schedule.min_lr:g} is above the learning rate {rate:g}: lower it")
    if schedule.cooldown_epochs >= epochs / 2:
        raise ValueError(
            f"schedule.cooldown_epochs {schedule.cooldown_epochs:g} is half of {counted(epochs, 'epoch')} or more: set "
            "schedule.cooldown_epochs=0, or more epochs"
        )


def refuse_impossible_stages(stages: tuple[Stage, ...], epochs: int, drop_path_rate: float) -> None:
    """Raise ValueError unless the stages follow each other, end before the run does, and can change the drop path."""
    ends = [stage.until for stage in stages]
    if ends != sorted(set(ends)) or (ends and ends[-1] >= epochs):
        raise ValueError(
            f"stages end after {ends} epochs, expected rising numbers below {epochs}: set stages=[] for none"
        )
    if stages and not drop_path_rate:
        raise ValueError("stages change the drop path, which model.kwargs.drop_path_rate=0 leaves out of the network")
