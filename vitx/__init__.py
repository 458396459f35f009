"""vitx: vision transformers that do not over-smooth, from training to a proved deployment."""

import os

__version__ = "0.1.0"

# ONNX Runtime would send its maker an id of the machine, the program's path and what it loads, and keep a data base of
# that in the user's cache. It reads this when it is imported, and so do processes that are started.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
