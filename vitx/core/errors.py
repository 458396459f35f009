"""Errors that reach the user as one message: what was given, what was expected, what to do."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LISTED_NAMES = 100  # of more, such as timm's thousand networks, an unknown name is told the nearest alone


TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)  # are open
MORE_FILES = "raise the limit of open files (ulimit -n)"  # of these
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # on the disk, or in the user's share of it
FULL_DISK = (*NO_SPACE, errno.EFBIG, errno.EROFS)  # or one that takes nothing
TOO_LARGE = "raise the limit of a file's size (ulimit -f)"  # of EFBIG, for which room on the disk is no remedy
# What a library raises for a value or a file that it cannot use is its own choice.
UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class VitxError(Exception):
    """An error with a message for the user; `exit_code` is what the command line returns."""

    exit_code = 1


class CheckFailed(VitxError):
    """A check failed: parity, a digest, accuracy below its limit."""


class InputError(VitxError, ValueError):
    """What the user gave cannot be used."""

    exit_code = 2


class EnvironmentMissing(VitxError):
    """This machine or installation lacks something: a package, a GPU, a free port."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """What an error says first, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not among `known`, with the nearest ones first."""
    names = sorted(known)
    many = len(names) > LISTED_NAMES
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.0 if many else 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    known_names = f"{len(names)} are known" if many else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} '{given}': {hint}{known_names}")


@contextmanager
def naming_extra(extra: str) -> Iterator[None]:
    """A package that is not installed becomes an error that names the extra which brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("vitx"):
            raise
        raise missing_package(error.name, extra) from None


def missing_package(package: str, extra: str) -> EnvironmentMissing:
    """Return the error for an optional package that is not installed."""
    return EnvironmentMissing(
        f"this needs the package '{package}', which is not installed: pip install 'vitx[{extra}]'"
    )
