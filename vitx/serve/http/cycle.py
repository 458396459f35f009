"""uvicorn's request-response cycle, changed to send a complete reply with one write."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class SingleWriteCycle(RequestResponseCycle):
    """Holds the head of a reply until its body comes: two writes would be two system calls and two packets."""

    _start: Any = None  # the held `http.response.start` message

    async def send(self, message: Any) -> None:
        """ASGI's send. uvicorn sends everything but complete replies on connections that stay open."""
        if message["type"] == "http.response.start" and not self.response_started:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            if (whole := self._whole(start, message)) is not None:
                self._finish(whole)
                return
            await super().send(start)
        await super().send(message)

    def _whole(self, start: Any, message: Any) -> bytes | None:
        """Return head and body as bytes; None if the reply is not complete or needs uvicorn's handling."""
        if self.disconnected or self.flow.write_paused or not self.keep_alive or self.scope["method"] == "HEAD":
            return None
        if message["type"] != "http.response.body" or message.get("more_body", False):
            return None
        body: bytes = message.get("body", b"")
        length = None
        lines = [STATUS_LINE[start["status"]]]
        for name, value in (*self.default_headers, *start.get("headers", ())):
            if name == b"content-length":
                length = int(value)
            elif name in (b"connection", b"transfer-encoding"):
                return None
            lines += (name, b": ", value, b"\r\n")
        if length != len(body):
            return None
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) // 4 + 1:  # a line break inside a header, which uvicorn refuses
            return None
        return head + b"\r\n" + body

    def _finish(self, whole: bytes) -> None:
        self.transport.write(whole)
        self.waiting_for_100_continue = False
        self.response_started = self.response_complete = True
        self.message_event.set()
        self.on_response()
