"""Settings that have no effect, because another one, on which they depend, is off."""

from typing import Any

from vitx.train.recipes.optimization_settings import WITHOUT_END
from vitx.train.recipes.recipe import Recipe, flat_settings, setting_fields

# What has no effect while all of these switches are off.
DEPENDENT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("augmentation.smallest_crop", "augmentation.auto_augment"): ("augmentation.interpolation",),
    ("augmentation.erasing",): ("augmentation.erasing_mode",),
    ("mixup.probability",): ("mixup.mixup", "mixup.cutmix"),
    ("mixup.mixup", "mixup.cutmix"): ("mixup.probability", "mixup.mode"),
    ("mixup.mixup",): ("mixup.switch_probability",),
    ("mixup.cutmix",): ("mixup.switch_probability",),
    ("cutmix.probability",): ("cutmix.alpha", "cutmix.box"),
    ("losses.contrastive",): ("losses.contrastive_variant",),
    ("losses.mixing",): ("losses.mixing_variant",),
    ("losses.attention",): ("losses.attention_maps", "losses.attention_over", "losses.attention_pairs"),
    ("optimizer.name",): ("optimizer.betas", "optimizer.momentum"),
    ("schedule.warmup_epochs",): ("schedule.warmup_lr", "schedule.warmup_prefix"),
    ("schedule.name",): ("schedule.min_lr",),
    ("distillation.weight",): ("distillation.teacher",),
    ("distillation.kind",): ("distillation.temperature",),
    ("ema_decay",): ("ema_warmup",),
}
# Of other switches 0, false and no text are off.
OFF = {"augmentation.smallest_crop": (1,), "distillation.kind": ("hard",), "schedule.name": WITHOUT_END}


def idle_settings(recipe: Recipe) -> list[str]:
    """What of a recipe was changed from its default and has no effect, each with the reason."""
    values = dict(flat_settings(recipe.model_dump()))
    defaults = {key: field.default for key, field in setting_fields(Recipe)}
    found: dict[str, str] = {}
    for switches, keys in DEPENDENT.items():
        reason = " and ".join(f"{name}={values[name]}" for name in switches)
        for key in keys:
            if values[key] != defaults[key] and all(_is_off(name, key, values) for name in switches):
                found.setdefault(key, f"{key}={values[key]}, as {reason}")
    return [*found.values()]


def _is_off(switch: str, key: str, values: dict[str, Any]) -> bool:
    value = values[switch]
    if switch == "optimizer.name":
        from timm.optim import get_optimizer_info  # torch's: recipes can be read without it

        info = get_optimizer_info(value.lower().removeprefix("lookahead_"))
        return not (info.has_momentum if key == "optimizer.momentum" else info.has_betas and info.num_betas == 2)
    return value in OFF[switch] if switch in OFF else not value
