"""A finding: a statement with its effect, interval, baseline and p value, made only when a test allows it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from vitx.analyze.intervals import CONFIDENCE, Interval, holm, with_interval
from vitx.core.files import Record

RISK = 1 - CONFIDENCE  # of one false finding or more about a network without any


class Finding(Record):
    """statement: one sentence. effect: a number of `unit`, with its interval (None where it has none).

    baseline: what the effect is measured against. p: adjusted for all tests of the network. metric: where the evidence
    is.
    """

    kind: str
    statement: str
    effect: float
    interval: Interval | None
    unit: str
    baseline: str
    p: float
    metric: str


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def effect_text(finding: Finding) -> str:
    return f"{with_interval(finding.effect, finding.interval)} {finding.unit}"


class Findings(Record):
    """found: gravest first. tests: how many were made, by kind of finding; what is missing could not be tested."""

    found: tuple[Finding, ...]
    tests: dict[str, int]


class Rule(NamedTuple):
    """One kind of finding. metric: whose result it reads, the first of these that was measured.

    tests: subject → p value, of the hypotheses that the network is healthy there. In order: the subjects are tested one
    after the other, and the first that is not rejected ends it; else each stands for itself. state: the finding about
    the subjects that were rejected, or None if the effect is too small to speak of; p and metric are filled in.
    """

    kind: str
    metrics: tuple[str, ...]
    tests: Callable[[Any], Mapping[str, float]]
    state: Callable[[Any, Sequence[str]], Finding | None]
    in_order: bool = False


def find(results: Mapping[str, Record], rules: Sequence[Rule]) -> Findings:
    """The findings of one network, in the order of the rules. At most 5 % of networks without any get one.

    All tests of all rules are one family, whose p values are adjusted by Holm's method; of a rule in order only the
    first test is in it, and later ones must stay below the same share of the 5 % (a test that is only made when the one
    before was rejected needs no share of its own).
    """
    applying = [
        (rule, metric, rule.tests(results[metric]))
        for rule in rules
        if (metric := next((name for name in rule.metrics if name in results), None)) is not None
    ]
    family = [
        (rule.kind, subject) for rule, _, tests in applying for subject in [*tests][: 1 if rule.in_order else None]
    ]
    p_of = {rule.kind: tests for rule, _, tests in applying}
    adjusted = dict(zip(family, holm([p_of[kind][subject] for kind, subject in family]), strict=True))
    found = []
    for rule, metric, tests in applying:
        p_values = _adjusted(rule, tests, adjusted)
        subjects = _rejected(rule, p_values)
        finding = rule.state(results[metric], subjects) if subjects else None
        if finding is not None:
            p = max(p_values[subject] for subject in subjects)
            found.append(finding.model_copy(update={"kind": rule.kind, "metric": metric, "p": p}))
    return Findings(found=tuple(found), tests={rule.kind: len(tests) for rule, _, tests in applying})


def _adjusted(rule: Rule, tests: Mapping[str, float], adjusted: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Subject → its adjusted p value; that of a later test of a chain is for the same share of the 5 %."""
    return {subject: adjusted.get((rule.kind, subject), min(1.0, p * len(adjusted))) for subject, p in tests.items()}


def _rejected(rule: Rule, p_values: Mapping[str, float]) -> list[str]:
    if rule.in_order:
        return [*takewhile(lambda subject: p_values[subject] <= RISK, p_values)]
    return [subject for subject, p in p_values.items() if p <= RISK]
