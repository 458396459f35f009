"""Names of GPU architectures: which are taken, and what the error says of the others."""

import pytest

from vitx.core.errors import InputError
from vitx.export.engines.architectures import parse_architectures, with_precision

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


@pytest.mark.parametrize("number", [70, 90, 100, 103, 107, 110])
def test_a_data_centre_gpu_is_named_as_one(number: int) -> None:
    with pytest.raises(InputError, match="; that one is a data-centre GPU: build with --trt on a machine"):
        parse_architectures(f"sm{number}", KNOWN)


def test_fp8_is_for_ada_and_newer() -> None:
    for precision in ("int8", "fp16"):
        assert with_precision(KNOWN, precision, asked=True) == KNOWN
    assert with_precision(KNOWN, "fp8, fp16", asked=False) == ("sm89", "sm120")
    assert with_precision(("sm89",), "fp8", asked=True) == ("sm89",)
    refused = r"^fp8 needs compute capability 8\.9 or newer, and {} has none: leave it out of --arch, or take int8$"
    for architectures, asked, lacking in (
        (KNOWN, True, "sm75, sm80, sm86"),
        (("sm86",), False, "sm86"),
        (("sm80", "sm89"), True, "sm80"),
    ):
        with pytest.raises(InputError, match=refused.format(lacking)):
            with_precision(architectures, "fp8", asked=asked)
