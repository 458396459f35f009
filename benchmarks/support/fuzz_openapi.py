"""Requests that schemathesis makes from a server's own OpenAPI description, right ones and wrong ones.

Each answer must have a status and a body that the description has for its operation. Of the 5xx only two are right: 501
for what is not offered, and 503 with Retry-After for a deadline that cannot be kept.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

PATIENCE_SECONDS = 10.0
NOT_OFFERED = 501


@dataclass
class Answers:
    """Statuses by operation, and sentences about answers that the description does not have."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        by_status = Counter[int]()
        for (_, status), count in self.counts.items():
            by_status[status] += count
        return {
            "operations": len({operation for operation, _ in self.counts}),
            "answers": {str(status): count for status, count in sorted(by_status.items())},
            "wrong": self.wrong[:100],
        }


def run(url: str, model: str, management_token: str, examples: int) -> Answers:
    """Ask so many examples of every operation in each of four ways: right or wrong data, about this model or any."""
    answers = Answers()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), f"the description is broken: {found}"
            operation = found.ok()
            ask = _asker(operation.label, answers, url, session, management_token)
            named = {"model": model, "version": "1"} if not operation.label.endswith("/unload") else {}
            fixed = {name: value for name, value in named.items() if name in operation.path_parameters}
            modes = [GenerationMode.POSITIVE]
            if operation.body or operation.query or operation.headers:  # any text is a right part of a path
                modes.append(GenerationMode.NEGATIVE)
            for mode, path_parameters in product(modes, (None, fixed) if fixed else (None,)):
                _limited(examples)(given(operation.as_strategy(mode, path_parameters=path_parameters))(ask))()
    return answers


def _limited(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def _asker(label: str, answers: Answers, url: str, session: requests.Session, token: str) -> Any:
    wanted = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]

    def ask(case: Case[Any]) -> None:
        headers = {"Authorization": f"Bearer {token}"} if "/repository/" in label else {}
        response = case.call(base_url=url, session=session, headers=headers, timeout=PATIENCE_SECONDS)
        answers.counts[label, response.status_code] += 1
        late = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code >= 500 and response.status_code != NOT_OFFERED and not late:
            answers.wrong.append(f"{label}: {response.status_code}: {case.as_curl_command()}")
        try:
            case.validate_response(response, checks=wanted)
        except FailureGroup as failures:
            answers.wrong.append(f"{label}: {failures.exceptions[0]}")

    return ask
