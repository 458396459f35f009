"""metrics.jsonl: a line of JSON for each epoch. Specification: docs/run-folder.md."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from vitx.core.errors import InputError
from vitx.core.files import first_fault


class _Scores(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    top1: float
    top5: float
    nll: float
    ece: float
    brier: float


class _Line(_Scores):
    epoch: int
    step: int
    lr: float
    losses: dict[str, float]
    raw: _Scores
    cos_sim: list[float]
    attention_std: list[float]
    seconds: float


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line, [] where there is no file; raise InputError for one that is no epoch's metrics."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        for line in lines:
            _Line.model_validate_json(line)
    except ValidationError as error:
        what = f"a line that is not an epoch's metrics ({first_fault(error, 'JSON')})"
        raise InputError(f"{path} holds {what}: restore it, or train anew") from None
    return [json.loads(line) for line in lines]
