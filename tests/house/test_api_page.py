"""docs/api.md is one program: its blocks are run in their order, in a process and a folder of their own."""

import re
from pathlib import Path

from training_jobs import context, script_in

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    output = tmp_path / "printed"
    process = context().Process(target=script_in, args=(tmp_path, program, output))
    process.start()
    process.join()
    printed = output.read_text()
    assert process.exitcode == 0, printed
    for expected in ("after 1 epoch", "torch.Size([2, 197, 384])", "run.vitx pass", "(2, 10) CPUExecutionProvider"):
        assert expected in printed, printed
