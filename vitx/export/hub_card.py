"""The model card of a network in timm's layout: what it is, how it is loaded, and what was measured of it."""

import json
from dataclasses import dataclass
from typing import Any

from vitx.core.bundle import Bundle
from vitx.core.probabilities import wilson_interval
from vitx.models.source import Source

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
SHOWN_CLASSES = 20
HEAD = """---
tags:
- image-classification
- timm
- vitx
library_name: timm
pipeline_tag: image-classification
---"""


@dataclass(frozen=True)
class TimmForm:
    """How timm builds the network. imports: modules that it needs beside timm."""

    architecture: str
    arguments: dict[str, Any]
    imports: tuple[str, ...]


def model_card(source: Source, form: TimmForm, bundle: Bundle) -> str:
    """README.md; names of classes are quoted as JSON, so that none can end its line."""
    count = len(source.class_names)
    names = json.dumps(source.class_names[:SHOWN_CLASSES], ensure_ascii=False)
    more = f" and {count - SHOWN_CLASSES} more" if count > SHOWN_CLASSES else ""
    imports = "".join(f"import {name}  # of vitx: registers the network with timm\n" for name in form.imports)
    return f"""{HEAD}

# {bundle.manifest.name}

{source.spec.name}, {source.preprocessing.image_size} px, {count} classes ({names}{more}), exported by vitx.

```python
import timm
{imports}
model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

FOLDER is where this file lies. `transform` resizes, crops and normalises an RGB image as `pretrained_cfg` in `{CONFIG}`
says.

## What was measured

{_measured(bundle)}
"""


def _measured(bundle: Bundle) -> str:
    certificate = bundle.certificate()
    if certificate is None:
        return "Nothing: the bundle was exported without a certificate."
    n, accuracy, flips = certificate.images, certificate.accuracy_reference, len(certificate.flips)
    low, high = wilson_interval(round(accuracy * n), n)
    error, allowed = certificate.max_logit_error, certificate.max_logit_error_allowed
    bound = f"at most {certificate.flip_rate_bound:.4f} (95 %), allowed {certificate.max_flip_rate:g}"
    rows = {
        "top-1 of these weights": f"{accuracy:.2%} of {n} images, 95 % interval {low:.1%} to {high:.1%} (Wilson)",
        "ONNX graph against these weights": f"{certificate.verdict}: {flips} of {n} classes changed",
        "rate of changed classes": bound,
        "largest logit error": f"{error:.3g}, allowed {allowed:.3g}",
        "digest of the weights": certificate.reference_sha256,
        "measured": certificate.created,
    }
    return "| what | value |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())
