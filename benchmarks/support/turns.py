"""Calls that take turns, so that a slow moment of the machine meets all of them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


def take_turns(calls: Mapping[str, Callable[[], Result]], rounds: int, *, warm_up: int = 1) -> dict[str, list[Result]]:
    """What each call returned in each round; the order alternates, and the warm-up's rounds are not in the result."""
    results: dict[str, list[Result]] = {name: [] for name in calls}
    for number in range(-warm_up, rounds):
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            results[name].append(calls[name]())
    return {name: values[warm_up:] for name, values in results.items()}
