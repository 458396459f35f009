"""Runtimes: a session and its life, one file a runtime. Importing this package imports no runtime's library."""

from vitx.runtimes.load import load_session
from vitx.runtimes.session import FeatureSession, Session

__all__ = ["FeatureSession", "Session", "load_session"]
