"""From a bundle to predictions: runtimes, parity, bench, the server, offline prediction.

Importing this package imports neither torch nor ONNX Runtime: a session does when it is loaded.
"""

from vitx.serve.bench import bench
from vitx.serve.parity import certify
from vitx.serve.runtimes import load_session

__all__ = ["bench", "certify", "load_session"]
