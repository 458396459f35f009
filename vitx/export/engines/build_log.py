"""What a TensorRT build says while it runs: its messages, and how far it is."""

import threading

from vitx.core.console import Progress


class BuildLog:
    """Warnings and errors of a build, each once."""

    def __init__(self) -> None:
        self._messages: dict[str, list[str]] = {}

    def add(self, severity: str, message: str) -> None:
        """Keep a message; `severity` is TensorRT's name of it."""
        kept = self._messages.setdefault(severity, [])
        if message not in kept:
            kept.append(message)

    def warnings(self) -> tuple[str, ...]:
        return tuple(self._messages.get("WARNING", ()))

    def errors(self) -> str:
        """The errors in one line. CUDA's complaint about a missing driver is left out: no build here needs one."""
        errors = [*self._messages.get("INTERNAL_ERROR", ()), *self._messages.get("ERROR", ())]
        telling = [message for message in errors if "CUDA driver version is insufficient" not in message]
        return "; ".join(message.strip() for message in telling or errors) or "it gave no reason"


class BuildSteps:
    """TensorRT's phases, which nest and each have steps, as one number from 0 to 1000.

    A phase counts for the step of its parent that it happens in. Called from the builder's threads.
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
        """A step of a phase is done; return whether to go on. Ctrl-C is remembered: it must not cross into C++."""
        try:
            with self._lock:
                parent, steps, _ = self._phases.get(phase, (None, 1, 0))
                self._phases[phase] = (parent, steps, min(step + 1, steps))
                self._report(phase)
        except KeyboardInterrupt:
            self.interrupted = True
        return not self.interrupted

    def finish(self, phase: str) -> None:
        with self._lock:
            self._phases.pop(phase, None)

    def _report(self, phase: str) -> None:
        done, name = 0.0, phase
        while name in self._phases:
            parent, steps, complete = self._phases[name]
            done = min((complete + done) / steps, 1.0)
            if parent is None:
                break
            name = parent
        # A phase may be entered again: a bar never goes back.
        self._reported = max(self._reported, int(1000 * done))
        self._bar.update(self._reported, phase)
