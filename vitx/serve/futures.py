"""Between callbacks and tasks: a future that gets what a callback is called with."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(future: "asyncio.Future[T]", value: T | Exception) -> None:
    """Give `future` its value or exception, unless its task was cancelled and has not run since."""
    if future.cancelled():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
