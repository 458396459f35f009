"""docs/api.md is one program: its blocks are run in their order, in a process and a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    program = tmp_path / "page.py"
    # Processes that an export starts import this file again.
    program.write_text("if __name__ == '__main__':\n" + re.sub(r"(?m)^(?=.)", "    ", "\n".join(blocks)))
    finished = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    printed = finished.stdout
    for expected in ("after 1 epoch", "torch.Size([2, 197, 384])", "run.vitx pass", "(2, 10) CPUExecutionProvider"):
        assert expected in printed, printed
