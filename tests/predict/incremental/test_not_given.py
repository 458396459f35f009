"""`--incremental`: what is there, and what a store or the system does not give for now."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from increments import IMAGES, counts, rows, run, table, tar, write
from vitx.core.bundle import Bundle


@pytest.mark.parametrize("name", ["00.png", "a.tar", "a.parquet"])
def test_what_a_store_or_the_system_does_not_give_now_is_tried_again(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its version is known: it was noted, so what was lost to an answer of 503 was unchanged ever after."""
    source, opened = tmp_path / "in", os.open
    source.mkdir()
    tar(source / "a.tar", {"0.png": IMAGES[0], "1.png": IMAGES[1]})
    table(source / "a.parquet", IMAGES[:4], 2)
    write(source / "00.png", IMAGES[0])

    def refused(path: Any, *given: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *given, **options)

    pattern = source / name.replace("a.", "*.").replace("00", "*")
    run(tiny_bundle, pattern, tmp_path / "whole")
    monkeypatch.setattr(os, "open", refused)
    out = tmp_path / "out"
    assert run(tiny_bundle, pattern, out)[0].errors == 1
    monkeypatch.undo()
    summary, predicted = run(tiny_bundle, pattern, out)
    assert (counts(summary), summary.errors, predicted) == ((0, 1, 0, 0), 0, summary.images)
    assert rows(out) == rows(tmp_path / "whole")
    assert counts(run(tiny_bundle, pattern, out)[0]) == (0, 0, 1, 0)
