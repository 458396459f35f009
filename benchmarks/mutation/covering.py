"""Which tests reach which lines: one run of the room's tests under coverage, a context for each test.

    python benchmarks/mutation/covering.py OUT.json FILES_UNDER_FOLDER TESTS…

What a fixture of a wider scope reaches counts for every test that uses the fixture.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutation.trial import HEAVY, PYTEST


class Contexts:
    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.tests_of_fixture: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        self.not_passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for name in getattr(item, "fixturenames", ()):
                self.tests_of_fixture[name].append(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        before = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self.measured.switch_context(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.measured.switch_context(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.not_passed.add(report.nodeid)


def main(out: Path, folder: str, tests: list[str]) -> int:
    measured = coverage.Coverage(data_file=None, source=["vitx"])
    contexts = Contexts(measured)
    measured.start()
    pytest.main([*PYTEST, *tests], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    root = Path.cwd()
    passed = contexts.seconds.keys() - contexts.not_passed
    lines: dict[str, dict[int, list[str]]] = {}
    for name in data.measured_files():
        file = Path(name).relative_to(root).as_posix()
        if file.startswith(folder):
            lines[file] = {}
            for line, reached_by in data.contexts_by_lineno(name).items():
                reaching = {
                    test
                    for context in reached_by
                    for test in contexts.tests_of_fixture.get(context.removeprefix("fixture "), [context])
                }
                if kept := sorted(reaching & passed, key=contexts.seconds.__getitem__):
                    lines[file][line] = kept
    seconds = {test: contexts.seconds[test] for test in passed}
    heavy = [name for name in HEAVY if name in sys.modules]
    found = {"lines": lines, "seconds": seconds, "not_passed": sorted(contexts.not_passed), "heavy": heavy}
    out.write_text(json.dumps(found))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
