"""The client of the server's benchmarks: which answers of a timed window it counts."""

from types import SimpleNamespace

import pytest

from support import http_load

ANSWER_SECONDS = 0.4


class Pool(list["Pool"]):
    """Connections to a server that answers whatever it is asked after ANSWER_SECONDS."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock = clock
        self.sent = 0.0

    def open(self) -> "Pool":
        self.append(Pool(self.clock))
        return self[-1]

    def ready(self) -> list["Pool"]:
        self.clock.now += ANSWER_SECONDS
        return list(self)

    def send(self, request: bytes) -> None:
        self.sent = self.clock.now

    def receive(self) -> int:
        return 200

    def close(self, connection: "Pool") -> None:
        self[:] = [other for other in self if other is not connection]

    def close_all(self) -> None:
        self.clear()


def test_an_answer_counts_that_was_asked_for_before_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow server a window ends many: left out at both ends, they would lower its rate, not a fast one's."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(http_load, "_Pool", lambda address: Pool(clock))
    monkeypatch.setattr(
        http_load, "time", SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.now)
    )
    load = http_load.closed_loop(("", 0), [b""], connections=3, seconds=2.0, warm_up=1.0)
    # Answers at 1.2, 1.6, 2.0, 2.4 and 2.8 s, of which the first were asked for at 0.8 s.
    assert len(load.answers) == 5 * 3
    assert load.rate() == pytest.approx(3 / ANSWER_SECONDS)
