"""Texts of the command line as values, and what is refused."""

import math
from typing import Annotated, Any

import pytest
from pydantic import ByteSize, WrapValidator

from vitx.core.options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    MaxFlipRate,
    Options,
    Threads,
    byte_size,
    comma_separated,
    number_range,
    option,
    parse_batch_sizes,
)


def test_comma_separated_texts() -> None:
    assert comma_separated("1, 8,32") == ("1", "8", "32")
    assert comma_separated(None) == ()
    assert comma_separated(["a,b"]) == ["a,b"]


@pytest.mark.parametrize(
    ("given", "found"), [("4", (4, 4)), ("2:8", (2, 8)), ("1:1", (1, 1)), ((3, 9), (3, 9)), ([3, 9], (3, 9))]
)
def test_a_range_is_a_number_or_two(given: Any, found: tuple[int, int]) -> None:
    assert number_range(given) == found


@pytest.mark.parametrize(
    "given", [(8, 2), [8, 2], (0, 3), (-1, 2), "0", "0:3", "8:2", "-1:2", "a", "1:b", ":4", "4:", "²", "1:2:3", ""]
)
def test_no_range(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected a number such as 4, or a least and a most such as 2:8$"):
        number_range(given)


def test_batch_sizes_of_a_text() -> None:
    assert parse_batch_sizes("1, 8,32") == (1, 8, 32)
    assert parse_batch_sizes((4,)) == (4,)
    assert parse_batch_sizes("1,65536") == (1, 65536)
    for wrong in ("0", "1,0", "1,,2", "", "x", "-1", "1.5", "1,65537"):
        with pytest.raises(ValueError, match=r"^expected batch sizes such as 1,8,32, at most 65,536$"):
            parse_batch_sizes(wrong)


def test_bounds_include_their_ends() -> None:
    class Oven(Options):
        trays: int = option(2, "Trays.", ge=1, le=9)

    assert [Oven(trays=trays).trays for trays in (1, 9)] == [1, 9]
    for wrong in (0, 10):
        with pytest.raises(ValueError, match="trays"):
            Oven(trays=wrong)
    assert Oven().trays == 2


@pytest.mark.parametrize(
    ("given", "size"),
    [("1024", 1024), ("7 b", 7), (" 1.5KiB ", 1536), (".5kb", 500), ("2 MiB", 2**21), (3, 3), ("0", 0)],
)
def test_a_size_is_bytes_or_has_a_unit(given: str | int, size: int) -> None:
    assert Shelf(cache=given).cache == size  # type: ignore[arg-type]  # as on the command line


@pytest.mark.parametrize(
    "given",
    ["1.5", "1,5GiB", "1.5b", "1.5.7", "1GiB,2", "256MiB each", "8 bit", "12 frogs", "256Ki", "-1", "", "²", 1.5],
)
def test_no_size(given: str | float) -> None:
    """pydantic makes one byte of 1,5GiB."""
    with pytest.raises(ValueError, match=r"Value error, expected bytes, such as 268435456 or 256MiB \["):
        Shelf(cache=given)  # type: ignore[arg-type]


class Shelf(Options):
    cache: Annotated[ByteSize | None, WrapValidator(byte_size)] = option(None, "Cache.", text=True)


def test_numbers_that_nobody_means_are_refused() -> None:
    """An infinite size has no whole number, and what is beyond 64 bits fits no queue and no database."""

    class Oven(Options):
        trays: int | None = option(2, "Trays.", ge=1)
        heat: float = option(200, "Heat.", ge=0)
        cache: ByteSize | None = option(None, "Cache.", text=True)

    assert Oven(trays=2**31 - 1, heat=2**31 - 1, cache=2**40).heat == 2**31 - 1  # type: ignore[arg-type]  # any int
    assert Oven(trays=None).trays is None
    for wrong in ({"trays": 2**31}, {"trays": 10**30}, {"heat": math.inf}, {"heat": math.nan}, {"heat": 1e300}):
        with pytest.raises(ValueError, match=r"number below 2,147,483,648|greater than or equal"):
            Oven.model_validate(wrong)


class Common(Options):
    """The options that several verbs have."""

    data: DataOption = None
    device: DeviceOption = "auto"
    checkpoint: CheckpointOption = "best"
    threads: Threads = None
    max_flip_rate: MaxFlipRate = 0.5


def test_what_the_options_of_several_verbs_take() -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "data": (None, "d"),
        "device": ("auto", "cpu", "cuda"),
        "checkpoint": ("best", "last"),
        "threads": (None, 1, 1024),
        "max_flip_rate": (1e-9, 0.999, 0.01),
    }
    refused: dict[str, tuple[Any, ...]] = {
        "data": ("",),
        "device": ("gpu", ""),
        "checkpoint": ("first", None),
        "threads": (0, -1, 1025),
        "max_flip_rate": (-0.001, 0, 1, 1.001),
    }
    for name, values in allowed.items():
        assert [getattr(Common(**{name: value}), name) for value in values] == [*values]
    for name, values in refused.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                Common(**{name: value})
    with pytest.raises(ValueError, match="Extra inputs"):
        Common.model_validate({"other": 1})


def test_what_an_option_says_of_itself() -> None:
    class Oven(Options):
        trays: int = option(2, "Trays.", flag="--plates", metavar="N", text=True, argument=True, ge=1, le=9)
        plain: str = option("x", "Plain.")

    trays, plain = Oven.model_fields["trays"], Oven.model_fields["plain"]
    assert (trays.description, trays.default) == ("Trays.", 2)
    assert trays.json_schema_extra == {"flag": "--plates", "metavar": "N", "text": True, "argument": True}
    assert plain.json_schema_extra == {"flag": None, "metavar": None, "text": False, "argument": False}
    assert (plain.description, plain.default, plain.metadata) == ("Plain.", "x", [])


def test_the_least_of_a_range_is_a_number_too() -> None:
    assert number_range("1:10") == (1, 10)
    assert number_range(None) is None
    assert parse_batch_sizes("2") == (2,)
