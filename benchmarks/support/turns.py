"""Calls that take turns, so that a slow moment of the machine meets all of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Result = TypeVar("Result")
Name = TypeVar("Name")


def turn_order(names: Iterable[Name], number: int) -> tuple[Name, ...]:
    """The order in round `number`: as given, and every other time the other way round, so that none always follows."""
    return (*names,)[:: 1 if number % 2 else -1]


def take_turns(calls: Mapping[str, Callable[[], Result]], rounds: int, *, warm_up: int = 1) -> dict[str, list[Result]]:
    """What each call returned in each round; the order alternates, and the warm-up's rounds are not in the result."""
    results: dict[str, list[Result]] = {name: [] for name in calls}
    for number in range(-warm_up, rounds):
        for name in turn_order(calls, number):
            results[name].append(calls[name]())
    return {name: values[warm_up:] for name, values in results.items()}
