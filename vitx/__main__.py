"""The process `vitx`, which its script and `python -m vitx` start."""

import signal
import sys


def main() -> None:
    """Import the command line, then run it. Meanwhile a Ctrl-C ends the process at once, without a traceback.

    A SIGHUP asks a server for a reload, and a service manager may send it before there is anything to load again.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["serve"] and sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: None)
    from vitx.cli import main

    if interrupt is not None:
        signal.signal(signal.SIGINT, interrupt)
    main()


if __name__ == "__main__":
    main()
