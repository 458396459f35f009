"""A metric measures its network, its images and what the options say: as its function does that is called by hand."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm

from cli_fixture import Vitx
from run_fixture import ColourMean, digits_source
from vitx.analyze import METRICS, AnalysisRequest, analyze, analyze_networks
from vitx.analyze.curvature import augmented_batches
from vitx.analyze.metric import AnalysisOptions, MetricContext, NotApplicable
from vitx.analyze.metrics.adversarial import adversarial_robustness
from vitx.analyze.metrics.frequency_noise import frequency_robustness
from vitx.analyze.metrics.hessian import hessian_spectrum
from vitx.analyze.metrics.hessian_density import hessian_density
from vitx.analyze.metrics.landscape import loss_landscape
from vitx.analyze.metrics.occlusion import gradient_saliency, occlusion
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.data.open import open_images

IMAGES = open_images("digits", "val").first(6)
SOURCE = digits_source("colours", ColourMean(10))
MODEL, PREPROCESSING = SOURCE.model, SOURCE.preprocessing
CONTEXT = MetricContext(
    SOURCE,
    IMAGES,
    AnalysisOptions(seed=3, batch_size=3, loss_batches=2, weight_decay=0.5, eigenvalues=4, module="head"),
)
LOSS: dict[str, Any] = {"weight_decay": 0.5, "seed": 3}


def pixels() -> Any:
    return IMAGES.batches(PREPROCESSING, 3)


BY_HAND: dict[str, Callable[[], Any]] = {
    "adversarial": lambda: adversarial_robustness(MODEL, pixels(), IMAGES.labels, PREPROCESSING, seed=3),
    "frequency-noise": lambda: frequency_robustness(
        predictor(MODEL, PREPROCESSING), pixels(), IMAGES.labels, bands=10, seed=3
    ),
    "occlusion": lambda: occlusion(
        predictor(MODEL, PREPROCESSING),
        pixels(),
        IMAGES.labels,
        patch_size=4,
        mean=PREPROCESSING.mean,
        saliency=gradient_saliency(MODEL, PREPROCESSING),
        seed=3,
    ),
    "hessian": lambda: hessian_spectrum(MODEL, augmented_batches(CONTEXT), 4, module="head", **LOSS),
    "hessian-density": lambda: hessian_density(MODEL, augmented_batches(CONTEXT), module="head", **LOSS),
    "landscape": lambda: loss_landscape(MODEL, [*augmented_batches(CONTEXT)], points=11, **LOSS),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_metric_is_its_function_with_the_options(name: str) -> None:
    measure = METRICS[name].measure
    assert measure is not None
    assert measure(CONTEXT) == BY_HAND[name]()


class ReadOptions:
    """Options that remember which of their fields were read."""

    def __init__(self, options: AnalysisOptions) -> None:
        self.options, self.read = options, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.options, name)


@pytest.mark.parametrize("name", sorted({*METRICS} - {"trajectory", "corruptions"}))
def test_a_metric_names_the_options_that_its_kept_result_depends_on(name: str) -> None:
    """One that it reads and does not name would be changed, and the old result be shown. (Batches are named always.)"""
    options: Any = ReadOptions(CONTEXT.options)
    context, metric = CONTEXT._replace(options=options), METRICS[name]
    if metric.activation is not None:
        metric.activation(context)
    else:
        assert metric.measure is not None
        with suppress(NotApplicable):  # this network has no units
            metric.measure(context)
    assert options.read - {"batch_size"} <= {*metric.options}
    if name not in ("cka", "lesions"):
        assert options.read - {"batch_size"} == {*metric.options}


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.activation is not None])
def test_a_metric_that_is_measured_alone_is_shown_what_it_reads(name: str) -> None:
    """Streams or attention maps are not kept where no metric asks for them."""
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}
    size["attention"] = ["plain", "re-attention"]
    source = digits_source("small", timm.create_model("deepvit_digits", num_classes=10, **size))
    assert [*analyze(source, IMAGES, (name,), AnalysisOptions(), quiet=True).results] == [name]


def test_what_a_metric_needs_and_whether_it_is_measured_by_default_is_as_documented() -> None:
    """docs/analyses.md marks what takes long; answers are held against labels in two of its parts, and by lesions."""
    page = (Path(__file__).parents[2] / "docs" / "analyses.md").read_text(encoding="utf-8")
    described = re.findall(r"^\*\*([a-z-]+)\*\*( \\\*)?", page, flags=re.MULTILINE)
    assert {name for name, marked in described if marked} == {
        name for name, each in METRICS.items() if not each.default
    }
    trusted = page.partition("## Trust")[2]
    of_answers = {name for name, _ in described if f"\n**{name}**" in trusted} - {"trajectory"} | {"lesions"}
    assert of_answers == {name for name, metric in METRICS.items() if metric.labels}
    assert {name for name, metric in METRICS.items() if metric.checkpoints} == {"landscape", "trajectory"}


OF_NO_PAPERS_CLAIM = (
    *("adversarial", "cka", "corruptions", "hessian-density", "landscape", "residual-update", "temperature"),
    "trajectory",
)


@pytest.mark.parametrize("name", METRICS)
def test_what_is_said_of_a_metric_are_sentences_a_paper_s_claim_and_a_kind_of_interval(name: str) -> None:
    metric = METRICS[name]
    assert re.fullmatch(r"([A-Z][a-z]|NLL).*[^.]\.", metric.reading)
    assert re.fullmatch(r"([A-Z][a-z]+ (& [A-Z][a-z]+|et al\.) \(\d{4}\.\d{5}\): .+\.)?", metric.claim)
    assert re.fullmatch(r"(bootstrap over|Wilson's|Student's|none:).*[^.]|Wilson's", metric.precision)
    assert re.fullmatch(r"([A-Z][a-z]|CKA)[A-Za-z, -]+[a-z]", metric.title)
    assert bool(metric.claim) == (name not in OF_NO_PAPERS_CLAIM)
    assert [each.reading for each in METRICS.values()].count(metric.reading) == 1


def test_weights_of_a_run_and_a_checkpoint_of_a_network_are_refused(
    vitx: Vitx, make_run: Callable[[str, int], Path]
) -> None:
    """They would not be those that are measured; of a run and a network, each has its own."""
    run = make_run("with-its-weights", 0)
    network = ("model:deit_digits", "--data", "digits")
    for arguments, expected in (
        ((run, "--weights", "w"), f"error: --weights w is of a model:NAME, and '{run}' is a run: choose with"),
        ((run, run, "--weights", "w"), "error: --weights w is of a model:NAME"),
        ((*network, "--checkpoint", "last"), "error: --checkpoint last is of a run, and 'model:deit_digits' is none"),
    ):
        code, _, said = vitx("analyze", *arguments)
        assert code == 2
        assert said.startswith(expected)
    both = ("--weights", "random", "--checkpoint", "last", "--images", "2", "--only", "over-smoothing", "--quiet")
    assert vitx("analyze", run, "model:deit_digits", "--data", "digits", *both)[0] == 0


def test_what_cannot_be_measured_is_refused_before_anything_is(tmp_path: Path) -> None:
    """Three networks were measured for minutes before there were too many."""
    request = AnalysisRequest(data="digits", out=tmp_path / "out")
    for count in (0, 3):
        with pytest.raises(InputError, match=rf"^{count} networks: expected one, or two to be compared$"):
            analyze_networks(["model:deit_digits"] * count, ("cka",), request)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"^no images of 'digits' to analyze 'colours' with$"):
        analyze(SOURCE, IMAGES.first(0), ("confidence",), AnalysisOptions(), quiet=True)
    with pytest.raises(ValueError, match="seed"):
        AnalysisOptions(seed=-1)
