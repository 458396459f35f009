"""The server: batching, protocol, HTTP, gRPC, models, processes, observability. Never imports torch."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.parity.served import serving
    from vitx.serve.options import ServeOptions

__all__ = ["ServeOptions", "serving"]

__getattr__ = lazy_names(__name__, {"vitx.parity.served": ("serving",), "vitx.serve.options": ("ServeOptions",)})
