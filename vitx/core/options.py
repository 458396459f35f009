"""Options of a verb as one frozen record: the command line, the environment, `--config` and Python share its fields."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from vitx.core.errors import unknown_name
from vitx.core.files import Record

_BEYOND = 2**31
_SIZE = re.compile(r"\s*(\d+\s*b?|\d*\.?\d+\s*[kmgtpe]\w*)\s*", re.ASCII | re.IGNORECASE)
MAX_BATCH = 65536  # images


def device_name(name: str) -> "Device":
    """Return `name` as a device; raise InputError for another name."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    return name


class Options(Record):
    """Base of the option records. A field is one option; another record as a field adds that record's options.

    The option of a field is called --FIELD, with dashes; units are in the names. Wrong values raise ValueError.

    headings: what the help prints above the option of a field and those that follow.
    """

    headings: ClassVar[Mapping[str, str]] = {}

    @field_validator("*")
    @classmethod
    def _is_finite(cls, value: Any) -> Any:
        """Refuse numbers that nobody means: inf, NaN, and what no longer fits where it is counted."""
        if type(value) in (int, float) and not abs(value) < _BEYOND:
            raise ValueError(f"expected a number below {_BEYOND:,}")
        return value


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    text: bool = False,
    argument: bool = False,
    ge: float | None = None,
    le: float | None = None,
) -> Any:
    """A field of an option record: its default, its line of help and its bounds.

    flag: where the command line's name is not the field's. text: a tuple, given as one text such as 1,8,32.
    argument: positional on the command line.
    """
    extra: dict[str, Any] = {"flag": flag, "metavar": metavar, "text": text, "argument": argument}
    return Field(default, description=help, ge=ge, le=le, json_schema_extra=extra)


Precision = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
# What surrounds the products of an int8 or fp8 graph.
Base = Literal["fp32", "fp16", "bf16"]
# What a bundle may give beside logits (docs/maths.md §7), in the order in which it is listed.
OutputName = Literal["embedding", "attention", "rollout"]
OUTPUTS: tuple[OutputName, ...] = get_args(OutputName)

# Options of several verbs.
DEVICE_HELP = "Where to run; auto takes a GPU where there is one."
DATA_HELP = "'digits', a folder with a folder a class, or with train/ and val/ of them. Default: the run's or recipe's."
# "-raw": the weights that were trained, in place of their moving average.
Checkpoint = Literal["best", "last", "best-raw", "last-raw"]
CHECKPOINT_HELP = "Which checkpoint of the run; raw: the weights as trained, not their average."
THREADS_HELP = "Threads of one session. Default: all cores."
Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = get_args(Device)
DeviceOption = Annotated[Device, Field(description=DEVICE_HELP)]
DataOption = Annotated[str | None, Field(description=DATA_HELP, min_length=1)]
CheckpointOption = Annotated[Checkpoint, Field(description=CHECKPOINT_HELP)]
MAX_THREADS = 1024
Threads = Annotated[int | None, Field(description=THREADS_HELP, ge=1, le=MAX_THREADS)]
RuntimeOption = Annotated[
    str, Field(description="What runs a bundle: auto takes the fastest certified here; `vitx doctor` lists the names.")
]
MaxFlipRate = Annotated[
    float,
    Field(
        description="Highest allowed 95 % upper bound on the share of changed classes, above 0 and below 1.", gt=0, lt=1
    ),
]
AllowUncertified = Annotated[
    bool, Field(description="Accept a bundle without a passing certificate; shown wherever it runs.")
]
RequireSignature = Annotated[
    Path | None,
    Field(
        description="Refuse bundles that the owner of this public key (PEM) has not signed.",
        json_schema_extra={"metavar": "PUBLIC_KEY"},
    ),
]
RayAddress = Annotated[
    str | None,
    Field(
        description="Run on Ray: a cluster of this machine, or the one at ADDRESS (auto or HOST:PORT).",
        json_schema_extra={"metavar": "[ADDRESS]"},
    ),
]


def comma_separated(given: Any) -> Any:
    """'1, 8,32' → ('1', '8', '32'), None → (), anything else as it is: to be called before pydantic's own check."""
    if given is None:
        return ()
    return tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else given


def number_range(given: Any) -> Any:
    """'4' → (4, 4), '2:8' or two numbers → (2, 8), anything else as it is; raise ValueError unless 1 ≤ least ≤ most."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        given = f"{given[0]}:{given[1]}"
    if not isinstance(given, str):
        return given
    least, colon, most = given.partition(":")
    numbers = least, most if colon else least
    if not all(number.isascii() and number.isdigit() for number in numbers) or not 1 <= int(least) <= int(numbers[1]):
        raise ValueError("expected a number such as 4, or a least and a most such as 2:8")
    return int(least), int(numbers[1])


def byte_size(given: Any, read: Callable[[Any], Any]) -> Any:
    """What `read`, pydantic's check of a ByteSize, makes of a value; raise ValueError that says what is expected.

    That check takes 1,5GiB and 1.5 for one byte: it drops what it cannot read, and the fraction of a byte.
    """
    try:
        if not isinstance(given, str) or _SIZE.fullmatch(given):
            return read(given)
    except ValueError:
        pass
    raise ValueError("expected bytes, such as 268435456 or 256MiB")


def parse_batch_sizes(given: Any) -> Any:
    """'1, 8,32' → (1, 8, 32), anything but a text as it is; raise ValueError for anything but numbers of a batch."""
    if not isinstance(given, str):
        return given
    try:
        sizes = tuple(int(part) for part in given.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > MAX_BATCH:
        raise ValueError(f"expected batch sizes such as 1,8,32, at most {MAX_BATCH:,}")
    return sizes
