"""An event loop whose clock jumps from timer to timer: seconds pass at once, and every moment is exact."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from unittest.mock import patch


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits, and nothing will happen")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Without sockets and threads: only callbacks, tasks and timers run."""

    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class PollingSelector(JumpingSelector):
    """Moves the clock only when no socket has anything to read."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super(JumpingSelector, self).select(0) or super().select(timeout)


class PollingLoop(VirtualLoop):
    """With sockets and signals of this process alone: what comes from others takes real time."""

    def __init__(self) -> None:
        self.clock = PollingSelector()
        asyncio.SelectorEventLoop.__init__(self, self.clock)


def run_virtually(test: Callable[[], Awaitable[None]], *modules: str) -> None:
    """Run a test in virtual time; the `time.monotonic` of these modules is the loop's."""

    async def patched() -> None:
        loop = asyncio.get_running_loop()
        clock = SimpleNamespace(monotonic=loop.time, perf_counter=loop.time, time=loop.time)
        patches = [patch(f"{module}.time", clock) for module in modules]
        for each in patches:
            each.start()
        try:
            await test()
        finally:
            for each in patches:
                each.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(patched())
