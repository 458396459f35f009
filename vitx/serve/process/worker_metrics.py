"""The metrics of all workers together: the worker that is asked at /metrics collects those of the others."""

from collections.abc import Mapping

from vitx.serve.process.siblings import Siblings

QUESTION = "metrics"
_SECONDS = 1.0  # for each worker's answer; one that hangs or is gone is left out


async def gather(siblings: Siblings) -> bytes:
    """Every worker's series in Prometheus' text format; the label `worker` is its index."""
    answers = await siblings.ask(QUESTION, seconds=_SECONDS)
    return merge({index: data.decode() for index, data in answers.items()}).encode()


def merge(texts: Mapping[str, str], label: str = "worker") -> str:
    """Merge Prometheus texts, by source, into one: a family's lines stay together, and `label` names the source."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for source, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, label, source))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(line + "\n" for line in lines)


def _labelled(sample: str, label: str, source: str) -> str:
    """`name{a="b"} 1` → `name{worker="0",a="b"} 1`."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{{label}="{source}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{{label}="{source}"}} {value}'
