"""Mutation testing of one room: `make mutate ROOM=parity`, or a folder or file below vitx/ (docs/mutation.md).

    python benchmarks/mutate.py ROOM [--sample N] [--fresh] [--out FOLDER]

Exit code 1 below the room's floor (benchmarks/mutation/rooms.toml), 2 when the tests fail without a mutant. Outcomes
are kept in .mutation/, and a mutant is run again only when its file or its tests have changed. The report replaces an
older one of the room, and docs/mutation.md lists it.
"""

import argparse
import hashlib
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mutation.mutants import Mutant, mutants_of
from mutation.trial import OUTCOMES, copy_checkout, import_heavy, prepare, run_tests, write_source

ROOT = Path(__file__).parents[1]
SETTINGS = Path(__file__).parent / "mutation"
REPORTS, PAGE = ROOT / "docs/mutation", ROOT / "docs/mutation.md"
# A mutant may take this many times the seconds of its tests under coverage, and these seconds more.
SLOWER, GRACE_SECONDS = 3.0, 20.0


def files_of(room: str) -> list[Path]:
    place = ROOT / "vitx" / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    if not files:
        raise SystemExit(f"no Python file in vitx/{room}: expected a folder or file below vitx/, such as parity")
    return files


def room_settings(room: str) -> tuple[float, list[str]]:
    """The floor in percent, and the paths of the tests."""
    rooms = tomllib.loads((SETTINGS / "rooms.toml").read_text(encoding="utf-8"))
    above = [room, *(str(parent) for parent in Path(room).parents)]
    floor = next(rooms[name]["floor"] for name in above if "floor" in rooms.get(name, {}))
    tests = next((rooms[name]["tests"] for name in above if "tests" in rooms.get(name, {})), None)
    if tests is None:
        place = ROOT / "tests" / room
        mirrored = place.with_name(f"test_{place.name}")
        nearest = next(path for path in (place, mirrored, *place.parents) if path.exists())
        tests = [str(nearest.relative_to(ROOT))]
    return float(floor), tests


def equivalents(mutants: Iterable[Mutant]) -> dict[str, str]:
    """Reason by mutant's key, of the mutants that are listed as equivalent."""
    listed = tomllib.loads((SETTINGS / "equivalent.toml").read_text(encoding="utf-8")).get("mutant", [])
    reasons = {(entry["file"], entry["before"], entry["after"]): entry["reason"] for entry in listed}
    found = {mutant: (mutant.file, mutant.before, mutant.after) for mutant in mutants}
    files = {mutant.file for mutant in found}
    stale = {place for place in reasons if place[0] in files} - set(found.values())
    if stale:
        raise SystemExit(f"equivalent.toml lists what is no mutant of the code any more: {sorted(stale)}")
    return {mutant.key: reasons[place] for mutant, place in found.items() if place in reasons}


def digest_of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def covering_tests(room: str, tests: list[str], copy: Path, kept: Path, *, fresh: bool) -> dict[str, Any]:
    """`lines`: tests by file and line; `seconds` by test; `not_passed`."""
    state = digest_of_files([*(ROOT / "vitx").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    if kept.is_file() and not fresh:
        before: dict[str, Any] = json.loads(kept.read_text())
        if before["state"] == [state, tests]:
            return before
    print(f"which lines do the tests reach: {' '.join(tests)}", flush=True)
    out = copy.parent / "covering.json"
    command = [sys.executable, str(SETTINGS / "covering.py"), str(out), f"vitx/{room}", *tests]
    if subprocess.run(command, cwd=copy, check=False).returncode:
        raise SystemExit(2)
    found: dict[str, Any] = json.loads(out.read_text()) | {"state": [state, tests]}
    kept.write_text(json.dumps(found))
    return found


def tests_of(mutant: Mutant, covering: dict[str, Any]) -> list[str]:
    """Those that reach one of its lines. All for a line that runs on import or in another process, its file's first."""
    lines: dict[str, list[str]] = covering["lines"].get(mutant.file, {})
    reached = {test for line in range(mutant.line, mutant.last_line + 1) for test in lines.get(str(line), ())}
    near = {test for tests in lines.values() for test in tests}
    asked = reached or set(covering["seconds"])
    return sorted(asked, key=lambda test: (test not in near, covering["seconds"][test], test))


def run_room(mutants: list[Mutant], covering: dict[str, Any], copy: Path, kept: Path, *, fresh: bool) -> dict[str, str]:
    """Outcome by mutant's key. Each is written down at once, so that a run which was stopped goes on where it was."""
    known: dict[tuple[str, str], str] = {}
    if kept.is_file() and not fresh:
        for line in kept.read_text().splitlines():
            key, _, rest = line.partition("\t")
            tests_digest, _, outcome = rest.partition("\t")
            if outcome in OUTCOMES:  # the last line may be cut short
                known[key, tests_digest] = outcome
    outcomes = {}
    support = [ROOT / "tests/conftest.py", *(ROOT / "tests/support").glob("*.py")]
    with kept.open("a") as write:
        for number, mutant in enumerate(mutants, 1):
            tests = tests_of(mutant, covering)
            state = digest_of_files([*support, *{ROOT / test.partition("::")[0] for test in tests}])
            outcome = known.get((mutant.key, state), "")
            if not outcome:
                target = copy / mutant.file
                limit = GRACE_SECONDS + SLOWER * sum(covering["seconds"][test] for test in tests)
                original = target.read_text(encoding="utf-8")
                write_source(target, mutant.source)
                try:
                    outcome = run_tests(tests, limit, copy.parent / "log")
                finally:
                    write_source(target, original)
                write.write(f"\n{mutant.key}\t{state}\t{outcome}")
                write.flush()
            outcomes[mutant.key] = outcome
            print(f"{number}/{len(mutants)} {outcome:9} {mutant.file}:{mutant.line} {mutant.operator}", flush=True)
    return outcomes


def report(mutants: list[Mutant], outcomes: dict[str, str], reasons: dict[str, str], head: str) -> str:
    survivors = [mutant for mutant in mutants if outcomes[mutant.key] == "survived" and mutant.key not in reasons]
    lines = [head, "", f"survivors: {len(survivors)}"]
    for mutant in survivors:
        lines += ["", f"{mutant.file}:{mutant.line}  {mutant.operator}", f"- {mutant.before}", f"+ {mutant.after}"]
    lines += ["", f"equivalent: {len(reasons)}, with their reasons in benchmarks/mutation/equivalent.toml", ""]
    return "\n".join(lines)


def table_of_scores(reports: Path) -> str:
    """A row for each report in the folder, by room."""
    rows = []
    for path in reports.glob("*.txt"):
        head = path.read_text(encoding="utf-8")
        pattern = r"vitx/(.+), (.+): (\d+) of (\d+) mutants caught, ([\d.]+) %.*\n(\d+) mutants(?:, a sample of (\d+))?"
        if (found := re.match(pattern, head)) is None:
            raise SystemExit(
                f"{path} is no report of mutants: expected its room, day and counts in the first two lines"
            )
        room, day, caught, total, score, mutants, every = found.groups()
        kept = f"[{int(total) - int(caught) or 'none'}](mutation/{path.name})"
        rows.append(f"| `{room}` | {day} | {mutants} of {int(every or mutants):,} | {float(score):.0f} % | {kept} |\n")
    return "".join(sorted(rows))


def with_scores(page: str, table: str) -> str:
    """The page with the rows of its table of rooms replaced."""
    return re.sub(r"(\| room \|.*\n\|[-|]+\n)(?:\|.*\n)*", lambda found: found[1] + table, page)


def write_scores() -> None:
    """List the reports in docs/mutation.md."""
    PAGE.write_text(with_scores(PAGE.read_text(encoding="utf-8"), table_of_scores(REPORTS)), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, always the same ones; default all")
    parser.add_argument("--fresh", action="store_true", help="run again what is known")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    room, name = arguments.room.strip("/"), arguments.room.strip("/").removesuffix(".py").replace("/", "-")
    floor, tests = room_settings(room)
    every = [mutant for path in files_of(room) for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
    reasons = equivalents(every)
    mutants = every
    if 0 < arguments.sample < len(every):
        mutants = sorted(
            random.Random(0).sample(every, arguments.sample), key=lambda mutant: (mutant.file, mutant.line)
        )
    kept = ROOT / ".mutation"
    kept.mkdir(exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vitx-mutation-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(ROOT, copy)
        prepare(copy)
        covering = covering_tests(room, tests, copy, kept / f"{name}.covering.json", fresh=arguments.fresh)
        import_heavy(covering["heavy"])
        used = sorted(covering["seconds"])
        if (
            run_tests(used, GRACE_SECONDS + SLOWER * sum(covering["seconds"].values()), Path(folder) / "log")
            != "survived"
        ):
            print((Path(folder) / "log").read_text(), "these tests fail without a mutant", sep="\n")
            return 2
        outcomes = run_room(mutants, covering, copy, kept / f"{name}.outcomes.tsv", fresh=arguments.fresh)
    reasons = {mutant.key: reasons[mutant.key] for mutant in mutants if mutant.key in reasons}
    wrong = [mutant for mutant in mutants if mutant.key in reasons and outcomes[mutant.key] != "survived"]
    if wrong:
        print("listed as equivalent, but caught:", *(f"{mutant.file}: {mutant.after}" for mutant in wrong), sep="\n")
        return 2
    counts = Counter(outcome for key, outcome in outcomes.items() if key not in reasons)
    caught, total = counts.total() - counts["survived"], counts.total()
    score = 100 * caught / max(total, 1)
    day = datetime.now(UTC).date().isoformat()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    sampled = f", a sample of {len(every)}" if len(mutants) < len(every) else ""
    head = "\n".join(
        [
            f"vitx/{room}, {day}: {caught} of {total} mutants caught, {score:.1f} % (floor {floor:g} %)",
            f"{len(mutants)} mutants{sampled}; {dict(counts)}; {len(reasons)} equivalent ones set aside",
            f"tests: {' '.join(tests)}; {len(used)} of them, without {len(covering['not_passed'])} skipped or failing",
            f"code of {commit}; Python {platform.python_version()}, mutmut {version('mutmut')}, "
            f"{time.monotonic() - start:.0f} s; python benchmarks/mutate.py {' '.join(sys.argv[1:])}",
        ]
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    for older in arguments.out.glob(f"????-??-??-{name}.txt"):
        older.unlink()
    out = arguments.out / f"{day}-{name}.txt"
    out.write_text(report(mutants, outcomes, reasons, head), encoding="utf-8")
    if arguments.out == REPORTS:
        write_scores()
    print(head, f"survivors: {out}", sep="\n")
    return int(score < floor)


if __name__ == "__main__":
    sys.exit(main())
