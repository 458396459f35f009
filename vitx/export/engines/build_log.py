"""The messages and the progress of a TensorRT build."""

import threading

from vitx.core.console import Progress
from vitx.export.engines.fused_layers import TABLE, FusedLayer, fused_layers


class BuildLog:
    """Messages of a build by severity, each once; of those below a warning only the table of fused layers."""

    def __init__(self) -> None:
        self._messages: dict[str, list[str]] = {}
        self._table = ""

    def add(self, severity: str, message: str) -> None:
        """Keep a message; `severity` is the name of a member of `ILogger.Severity`."""
        if severity in ("VERBOSE", "INFO"):
            self._table = message if message.startswith(TABLE) else self._table
            return
        kept = self._messages.setdefault(severity, [])
        if message not in kept:
            kept.append(message)

    def layers(self) -> tuple[FusedLayer, ...]:
        """The layers of the plan, as they were fused; none where the builder did not say."""
        return fused_layers(self._table)

    def warnings(self) -> tuple[str, ...]:
        return tuple(self._messages.get("WARNING", ()))

    def errors(self) -> str:
        """The errors in one line, without CUDA's about a missing driver, which a build without a GPU also logs."""
        errors = [*self._messages.get("INTERNAL_ERROR", ()), *self._messages.get("ERROR", ())]
        relevant = [message for message in errors if "CUDA driver version is insufficient" not in message]
        return "; ".join(message.strip() for message in relevant or errors) or "it gave no reason"


class BuildProgress:
    """The progress of TensorRT's phases, which nest and have steps, as one number from 0 to 1000.

    A phase fills the step of its parent during which it runs. Called from the builder's threads.
    """

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name: parent, steps, steps done
        self._reported = 0
        self.interrupted = False

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[phase] = (parent, max(steps, 1), 0)

    def complete(self, phase: str, step: int) -> bool:
        """A step of a phase is done; return whether to go on.

        Ctrl-C is recorded and not raised: an exception must not cross the C++ builder that called this.
        """
        try:
            with self._lock:
                if phase in self._phases:  # of one that has not begun, or has ended, a step says nothing
                    parent, steps, _ = self._phases[phase]
                    self._phases[phase] = (parent, steps, min(step + 1, steps))
                    self._report(phase)
        except KeyboardInterrupt:
            self.interrupted = True
        return not self.interrupted

    def finish(self, phase: str) -> None:
        with self._lock:
            self._phases.pop(phase, None)

    def _report(self, phase: str) -> None:
        done = 0.0
        name: str | None = phase
        while name in self._phases:
            name, steps, complete = self._phases[name]
            done = min((complete + done) / steps, 1.0)
        # TensorRT may enter a phase again; the bar must not go back.
        self._reported = max(self._reported, int(1000 * done))
        self._bar.update(self._reported, phase)
