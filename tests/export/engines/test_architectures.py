"""Names of GPU architectures: which are taken, and what the error says of the others."""

import pytest

from vitx.core.errors import InputError
from vitx.export.engines.architectures import parse_architectures

KNOWN = ("sm75", "sm80", "sm86", "sm89", "sm120")


def test_architectures_are_parsed() -> None:
    assert parse_architectures(" SM120,sm86, sm86 ", KNOWN) == ("sm86", "sm120")
    assert parse_architectures((), KNOWN) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sm87", "cannot build for 'sm87': it knows sm75, sm80, sm86, sm89, sm120$"),
        ("sm89,sm90", "'sm90': it knows .*data-centre GPU: build with --trt on a machine that has it"),
        ("8.9", r"'8\.9': it knows .*\(the compute capability without its point: 8\.9 is sm89\)"),
        ("ada", "cannot build for 'ada'"),
        ("", "cannot build for ''"),  # of a variable of the shell's that is not set
        ("sm86,", "cannot build for ''"),
    ],
)
def test_unknown_architectures(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_architectures(text, KNOWN)
