"""A run over two nodes, one of which dies and comes back, against the same run in one process.

    python benchmarks/train/two_nodes.py [--json FILE]

The nodes are network namespaces of this machine, joined by a pair of virtual Ethernet devices; the run folder is the
storage that they share. `torchrun --nnodes 1:2` trains a small DeepViT on the digits over gloo; the command is in
tests/support/network_nodes.py. Within the third epoch everything in the second node's namespace gets SIGKILL, the
first goes on alone from the last checkpoint; later the second is started again, and both go on. Exit code 1 when
the loss of an epoch differs from that of one process by more than 5e-3 of its value: over a thousand steps rounding
grows. Needs root, for the namespaces.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from network_nodes import RENDEZVOUS, Node, two_namespaces, wait_for
from support.targets import command_line, exit_code, report_header, save_report
from training_jobs import TINY, metrics_of, recipe_of, train_one

SETTINGS = (*TINY, "batch_size=48", "checkpoint_steps=4")
EPOCHS, DIES_IN = 40, 3
TOLERANCE = 5e-3


def train_on_two_nodes(names: tuple[str, str], folder: Path, settings: tuple[str, ...]) -> dict[str, float]:
    """Train into `folder`/run in both namespaces while the second dies and comes back; seconds between its events."""
    run = folder / "run"
    overrides = [part for setting in settings for part in ("--set", setting)]
    arguments = ("train", "digits-deepvit", "--out", str(run), "--resume", "-q", *overrides)
    with Node(names, 0, arguments, folder / "first.log") as first:
        with Node(names, 1, arguments, folder / "second.log") as second:
            wait_for(run, first, lambda step, epoch, count: epoch >= DIES_IN - 1 and count == 2)
            second.kill()
            killed = time.monotonic()
            alone = wait_for(run, first, lambda step, epoch, count: count == 1)
        started = time.monotonic()
        with Node(names, 1, arguments, folder / "second.log") as second:
            both = wait_for(run, first, lambda step, epoch, count: count == 2)
            for node in (first, second):
                if node.process.wait(300) != 0:
                    raise RuntimeError(node.log.read_text())
    return {
        "from_kill_to_checkpoint_of_one_seconds": alone - killed,
        "from_start_to_checkpoint_of_both_seconds": both - started,
    }


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[float]:
    """The largest relative difference of a loss, epoch by epoch."""
    return [
        max(abs(after["losses"][name] / loss - 1) for name, loss in before["losses"].items())
        for before, after in zip(expected, found, strict=True)
    ]


def main() -> int:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    settings = (*SETTINGS, f"epochs={options.epochs}")
    with two_namespaces() as names, tempfile.TemporaryDirectory(prefix="vitx-nodes-") as name:
        folder = Path(name)
        train_one(recipe_of(*settings), folder / "alone", {})
        seconds = train_on_two_nodes(names, folder, settings)
        gaps = differences(metrics_of(folder / "alone"), metrics_of(folder / "run"))
    found = {
        "settings": settings,
        "rendezvous": RENDEZVOUS,
        **seconds,
        "largest_relative_difference_of_a_loss": max(gaps),
        "by_epoch": gaps,
    }
    print(json.dumps(found, indent=2))
    save_report(report_header() | found, options.json)
    return int(max(gaps) > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
