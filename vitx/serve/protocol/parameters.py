"""The parameters in the JSON of an infer request. An unknown one is refused.

Sources: Triton's docs/protocol/extension_{classification,schedule_policy,shared_memory}.md.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vitx.serve.batching.request_queue import PRIORITY_LEVELS
from vitx.serve.errors import RequestError, too_large
from vitx.serve.protocol.shared_memory import MemoryRegion

REGION_PARAMETERS = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")

_MAX_VALUES = 16_384


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor's place in shared memory; offset and size in bytes.

    held: of an output, from the moment it is accepted: it is written also if a client unregisters all meanwhile.
    """

    name: str
    offset: int
    byte_size: int
    held: MemoryRegion | None = field(default=None, compare=False)

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "Region | None":
        """The region that parameters name, else None. SharedMemory checks its range."""
        if not any(name in parameters for name in REGION_PARAMETERS):
            return None
        name, offset, byte_size = (parameters.get(name) for name in REGION_PARAMETERS)
        if not isinstance(name, str) or byte_size is None:
            text = "'shared_memory_region', a name, and 'shared_memory_byte_size' go together: one of them is missing"
            raise RequestError(text)
        return cls(name, 0 if offset is None else offset, byte_size)

    def check(self, byte_size: int, output: str) -> None:
        """Raise RequestError unless an output of `byte_size` bytes fits here."""
        if byte_size > self.byte_size:
            place = f"{self.byte_size} were set aside for it in shared memory region '{self.name}'"
            raise RequestError(f"output '{output}' has {byte_size} bytes: {place}")

    def write(self, data: bytes, output: str) -> dict[str, Any]:
        """Write an output where it is held; return the parameters that tell the client where it is."""
        assert self.held is not None
        self.check(len(data), output)
        self.held.write(self.offset, data)
        return dict(zip(REGION_PARAMETERS, (self.name, self.offset, len(data)), strict=True))


class RequestedOutput(NamedTuple):
    """How the client wants an output. top_k: the classes of each image, 0 for the values. region: not in the body."""

    name: str
    binary: bool
    top_k: int = 0
    region: Region | None = None


def parse_json(text: bytes, max_depth: int) -> Any:
    """Parse JSON; raise RequestError 400 if it is invalid or nested deeper than `max_depth`, 413 if it is too much."""
    opened = text.count(b"[") + text.count(b"{")
    if opened + text.count(b",") > _MAX_VALUES:  # each becomes a Python object of a hundred bytes
        raise too_large(f"JSON of more than {_MAX_VALUES} values")
    try:
        value = json.loads(text)
        too_deep = opened > max_depth and _depth(value) > max_depth
    except RecursionError:
        too_deep = True
    except ValueError as error:  # UnicodeDecodeError is one
        raise RequestError(f"failed to parse the request's JSON: {str(error)[:200]}") from None
    if too_deep:
        raise RequestError(f"the request's JSON is nested more than {max_depth} levels deep", reason="too_deep")
    return value


def parse_json_object(text: bytes, max_depth: int) -> Mapping[str, Any]:
    """Parse a JSON object; raise RequestError 400 for anything else."""
    value = parse_json(text, max_depth)
    if not isinstance(value, dict):
        raise RequestError("the request's JSON is not an object")
    return value


def known_parameters(owner: Mapping[str, Any], kind: str, known: Sequence[str]) -> Mapping[str, Any]:
    """The `parameters` of a request, input or output (`kind`); raise RequestError for an unknown name."""
    parameters = owner.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f"the 'parameters' of the {kind} are not an object")
    for name in parameters:
        if name not in known:
            text = f"this server does not offer the {kind} parameter '{name[:80]}': known are {', '.join(known)}"
            raise RequestError(text)
    return parameters


def request_parameters(header: Mapping[str, Any]) -> tuple[bool, int, float | None]:
    """Whether outputs are binary by default, the priority, and the timeout in seconds (Triton's: µs, 0 is none)."""
    parameters = known_parameters(header, "request", ("binary_data_output", "priority", "timeout"))
    timeout, priority = count(parameters, "timeout"), count(parameters, "priority")
    if priority > PRIORITY_LEVELS:
        known = f"0 (the default) or 1 (the highest) to {PRIORITY_LEVELS}"
        raise RequestError(f"priority is {str(priority)[:20]}: expected {known}")
    return flag(parameters, "binary_data_output", False), priority, timeout / 1e6 if timeout else None


def expected_bytes(name: str, given: object, shape: Sequence[int]) -> None:
    """Raise RequestError unless `given` is the number of bytes of a uint8 input of this shape."""
    expected = math.prod(shape)
    if given != expected:
        text = f"got unexpected byte size {quoted(given)}, expected {expected} for shape {list(shape)}"
        raise RequestError(f"input '{name}' {text}")


def quoted(value: object) -> str:
    """A client's value for an error message, shortened to about 80 characters."""
    if isinstance(value, dict):
        return "an object"
    text = f"'{value[:80]}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 82 else f"{text[:80]}…"


def count(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise RequestError(f"'{name}' is {quoted(value)}: expected a whole number of 0 or more")
    return value


def flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' is {quoted(value)}: expected true or false")
    return value


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
