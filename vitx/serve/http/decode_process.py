"""A process that decodes images for one thread (`--decode processes`): what crashes or hangs a decoder ends it alone.

The thread sends a job as a pickle and gets bytes back: the pixels, or a text. Nothing that a decoder says is unpickled.
"""

import ctypes
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from vitx.core.preprocess import ImageError, Preprocessing, TooManyPixels, UInt8Array, decode
from vitx.serve.process.process_settings import configure_process

_HUNG_SECONDS = 60  # without an answer: images that are allowed take a few seconds
# In the server's own search path: by itself this command would look into the working folder first.
_MAIN = "import sys; _, file, *sys.path = sys.argv; from vitx.serve.http.decode_process import work; work(int(file))"
_OF_SERVER = {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}  # also those sent to its group: it answers what it accepted
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2): with the thread that started it
_TEXT_BYTES = 2**16  # of an answer that is no pixels at most
_PIXELS, _TOO_MANY, _ERROR = b"p", b"m", b"e"  # first byte of an answer


def decoded(data: bytes, steps: Preprocessing, limit: int) -> UInt8Array:
    """Uint8 (S, S, 3) of an encoded image of at most `limit` pixels; raises ImageError."""
    return steps.apply(decode(data, max_pixels=limit, check_size=steps.check_size))


class DecodeProcess:
    """`decoded` in a process of its own, which is replaced when it ended or hangs. For one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # no room for a process or a file now: the first image looks for it again
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of a stopped process the buffers fill up
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _HUNG_SECONDS, 0))
        self._connection = Connection(ours.detach())
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(number), *sys.path], pass_fds=[number], stdin=subprocess.DEVNULL
            )

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def decoded(self, data: bytes, steps: Preprocessing, limit: int, *, again: bool = True) -> UInt8Array:
        """As the function; an image with which the process ends twice, or hangs, is an ImageError too."""
        if self._process is None:
            self._start()
        try:
            self._connection.send((data, steps, limit))
            answer = self._connection.recv_bytes(1 + max(3 * steps.image_size**2, _TEXT_BYTES))
        except BaseException as error:
            self.close()  # whatever it was: an answer that comes late would be taken for that to the next image
            if not isinstance(error, OSError | EOFError):
                raise
            hung = isinstance(error, BlockingIOError)
            if again and not hung:  # it may have ended by something else, also long before
                return self.decoded(data, steps, limit, again=False)
            what = f"took longer than {_HUNG_SECONDS} s" if hung else "ended twice"
            raise ImageError(f"cannot decode the image: the process that did {what}") from None
        kind, said = answer[:1], answer[1:]
        if kind == _TOO_MANY:
            width, height = map(int, said.split())
            raise TooManyPixels(width, height, limit)
        if kind == _ERROR:
            raise ImageError(said.decode())
        return np.frombuffer(said, np.uint8).reshape(steps.image_size, steps.image_size, 3)


def work(file: int) -> None:
    """The process: answer jobs until the other side closes."""
    for name in _OF_SERVER & signal.Signals.__members__.keys():
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere a stopped process outlives the server
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    configure_process()
    connection = Connection(file)
    with suppress(EOFError, OSError):
        while True:
            try:
                answer = _PIXELS + decoded(*connection.recv()).tobytes()
            except TooManyPixels as found:
                answer = _TOO_MANY + f"{found.width} {found.height}".encode()
            except ImageError as error:
                answer = _ERROR + str(error).encode()
            connection.send_bytes(answer)
