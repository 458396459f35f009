"""Runtimes: sessions, one file for each runtime. Importing this package imports no runtime's library."""

from vitx.runtimes.load import load_session
from vitx.runtimes.session import Session, SessionClosed

__all__ = ["Session", "SessionClosed", "load_session"]
