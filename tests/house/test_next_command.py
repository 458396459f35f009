"""The command that a verb prints last."""

import pytest

from vitx.cli.next_command import export_of

EXPORT = ["vitx", "export", "runs/x", "--out", "runs/x.vitx"]


@pytest.mark.parametrize(
    ("images", "more"),
    [(299, []), (298, ["--max-flip-rate", "0.011"]), (100, ["--max-flip-rate", "0.03"]), (5000, [])],
)
def test_few_images_prove_a_higher_rate_and_the_command_asks_for_it(images: int, more: list[str]) -> None:
    assert export_of("runs/x", images) == [*EXPORT, *more]


def test_a_bundle_is_beside_its_run_whose_name_may_end_with_a_slash() -> None:
    assert export_of("runs/x/", 5000)[-1] == "runs/x.vitx"


def test_without_its_images_the_run_is_exported_as_ever() -> None:
    assert export_of("nowhere/x") == ["vitx", "export", "nowhere/x", "--out", "nowhere/x.vitx"]
