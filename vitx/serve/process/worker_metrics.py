"""The metrics of all workers together: the worker that is asked at /metrics collects those of the others."""

import re
from collections.abc import Mapping

from vitx.serve.process.siblings import Siblings

QUESTION = "metrics"
_SECONDS = 1.0  # for each worker's answer; one that hangs or is gone is left out


async def gather(siblings: Siblings) -> bytes:
    """Every worker's series in Prometheus' text format; the label `worker` is its index."""
    return merge(await siblings.ask(QUESTION, seconds=_SECONDS))


def merge(texts: Mapping[str, bytes], label: str = "worker") -> bytes:
    """Merge Prometheus texts, by source, into one: a family's lines stay together, and `label` names the source."""
    families: dict[str, list[str]] = {}
    for source, text in texts.items():
        for family in re.split(r"^(?=# HELP )", text.decode(), flags=re.MULTILINE)[1:]:
            head, kind, *samples = family.splitlines()
            lines = families.setdefault(head, [head, kind])
            for sample in samples:  # `name{a="b"} 1` → `name{worker="0",a="b"} 1`
                name, brace, rest = re.split(r"([{ ])", sample, maxsplit=1)
                lines.append(f'{name}{{{label}="{source}"' + ("," if brace == "{" else "} ") + rest)
    return "".join(line + "\n" for lines in families.values() for line in lines).encode()
