"""What the scripts share around a measurement: the command line, targets (met or not: `holds`), the file of results."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from vitx.core.bundle import timestamp
from vitx.core.errors import EnvironmentMissing, VitxError
from vitx.core.machine import describe_machine, installed_versions


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser that has --json, the file of results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=results_file)
    return parser


def results_file(text: str) -> Path:
    """What --json takes; a file that is there keeps its other parts, and one machine's name stands for them all."""
    path, here = Path(text), describe_machine()
    there = json.loads(path.read_text()).get("machine", here) if path.is_file() else here
    if {name: there.get(name) for name in here} != here:
        raise argparse.ArgumentTypeError(f"{path} was measured on another machine: choose another file")
    return path


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """What an option takes that names some of these, with commas between: its `type`."""
    names = list(known)

    def split(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(names)}")
        return found

    return split


def at_least(least: int) -> Callable[[str], int]:
    """What an option takes that is a whole number from `least` on: its `type`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def network_name(text: str) -> str:
    """What an option takes that is the name of a network: its `type`."""
    import timm

    import vitx.models  # noqa: F401  # registers ours

    if not timm.is_model(text):
        raise argparse.ArgumentTypeError(f"neither timm nor vitx has a network {text!r}: see `vitx models`")
    return text


def require_package(name: str, command: str) -> str:
    """The version of a peer that `command` installs; EnvironmentMissing where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise EnvironmentMissing(f"the package '{name}' is not installed: {command}") from None


def require_program(name: str) -> None:
    """Raise EnvironmentMissing where there is no such program."""
    if shutil.which(name) is None:
        raise EnvironmentMissing(f"the program '{name}' is not installed")


def vitx(*arguments: str) -> None:
    """Run a verb, without its result; raise CalledProcessError for another exit code than 0."""
    subprocess.run([sys.executable, "-m", "vitx", *arguments], check=True, stdout=subprocess.DEVNULL)


def exit_code(main: Callable[[], int | None]) -> int:
    """What a script exits with: main's code, or that of the error of vitx which ended it, here or in another process.

    What was wrong is on standard error.
    """
    try:
        return main() or 0
    except VitxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        # It has said why; what it said may have gone to the script that called it.
        said = error.stderr or ""
        print(said if isinstance(said, str) else said.decode(errors="replace"), end="", file=sys.stderr)
        return max(error.returncode, 1)


def verdict(result: dict[str, Any]) -> str:
    return "holds" if result["holds"] else "MISSED"


def all_hold(report: Any) -> bool:
    """Whether every target in `report`, at any depth, was met."""
    if not isinstance(report, dict):
        return True
    return report.get("holds", True) and all(map(all_hold, report.values()))


def report_header() -> dict[str, Any]:
    """A report that names its machine and versions, and no results yet."""
    return {"machine": describe_machine(), "versions": installed_versions()}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` over `old`, key by key."""
    both = {key: merged(old[key], new[key]) for key in old if isinstance(old[key], dict) and key in new}
    return {**old, **new, **both}


def write_report(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def save_report(report: dict[str, Any], path: Path | None, command: str | None = None) -> dict[str, Any]:
    """Write `report` to `path`: its parts replace those of the file, all other parts and commands stay. Returns both.

    command: what made this report; by default the command line of this process.
    """
    if path is None:
        return report
    script = Path(sys.argv[0]).resolve().relative_to(Path(__file__).parents[2].resolve())
    command = command or " ".join(["python", str(script), *sys.argv[1:]])
    old = json.loads(path.read_text()) if path.is_file() else {}
    whole = {**old, **report, "commands": {**old.get("commands", {}), command: timestamp()}}
    write_report(whole, path)
    return whole
