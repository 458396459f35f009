"""`vitx export` of a graph that differs from its checkpoint: no bundle is written, and the error names the cause."""

from collections.abc import Callable
from pathlib import Path

import pytest

import vitx.export.bundling as vitx_export_bundling
from cli_fixture import Vitx
from vitx.export import ImageClassifier, Source

SMALL = ("--model-arg", "depth=2", "--model-arg", "attention=('plain', 're-attention')")
SOURCE = ("model:deepvit_digits", "--weights", "random", "--data", "digits", "--device", "cpu", "--quiet", *SMALL)


def head_mix_transposed(source: Source) -> ImageClassifier:
    weight = source.model.get_parameter("blocks.1.attn.reatten_matrix.weight")
    weight.data = weight.data.transpose(0, 1).contiguous()
    return ImageClassifier(source.model, source.preprocessing).eval()


def normalization_left_out(source: Source) -> ImageClassifier:
    other = source.preprocessing.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    return ImageClassifier(source.model, other).eval()


@pytest.mark.parametrize(
    ("wrong_classifier", "messages"),
    [
        (
            head_mix_transposed,
            ("no common mistake explains it", "blocks.1 diverges first", "transposed: attn.reatten_matrix.weight"),
        ),
        (normalization_left_out, ("normalisation: mean and std are left out", "embedding diverges first")),
    ],
)
def test_the_error_names_cause_and_layer(
    wrong_classifier: Callable[[Source], ImageClassifier],
    messages: tuple[str, ...],
    tmp_path: Path,
    vitx: Vitx,
    in_this_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vitx_export_bundling, "_classifier", wrong_classifier)
    code, out, err = vitx("export", *SOURCE, "--out", tmp_path / "net.vitx")
    assert (code, out) == (1, "")
    assert "error: the graph is not the checkpoint's equal, no bundle written: " in err
    assert "largest logit error" in err
    assert [message for message in messages if message not in err] == []
    assert list(tmp_path.iterdir()) == []
