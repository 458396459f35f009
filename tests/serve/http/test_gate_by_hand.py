"""Which check a request of each path, method and head is given, without a socket."""

from types import SimpleNamespace
from typing import Any

import pytest

from vitx.serve.errors import RequestError
from vitx.serve.http.gate import check_allowed
from vitx.serve.options import ServeOptions
from vitx.serve.security import AllowedHosts

HOSTS = AllowedHosts("127.0.0.1", ("vitx.example",))
FORM = "application/x-www-form-urlencoded"
REGISTER = "/v2/systemsharedmemory/region/r/register"


def asked(
    path: str = "/v2",
    method: str = "GET",
    version: str = "1.1",
    hosts: tuple[str, ...] = ("localhost",),
    metrics: Any = "token",
    **headers: str,
) -> list[tuple[str, str | None]]:
    """The tokens that are asked for, by kind, and what was given for one; raises what refuses the request."""
    given = [*(("host", host) for host in hosts), *((name.replace("_", "-"), of) for name, of in headers.items())]
    lines = [(name.encode(), of.encode()) for name, of in given]
    scope = {"path": path, "method": method, "http_version": version, "headers": lines}
    checked: list[tuple[str, str | None]] = []
    tokens = SimpleNamespace(check=lambda *of: checked.append(of))
    core: Any = SimpleNamespace(options=ServeOptions(metrics=metrics), tokens=tokens)
    check_allowed(scope, core, HOSTS)
    return checked


def refusal(**of: Any) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as error:
        asked(**of)
    return error.value.status, error.value.reason, str(error.value)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *[(path, None) for path in ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")],
        *[(path, "inference") for path in ("/v2", "/v1/stats", "/v1/classify", "/v2/models/m/infer", "/v2/health", "")],
        *[(path, "inference") for path in (REGISTER, "/metrics/", "/v2/models/repository", "//", "/v2/health/live/")],
        ("/metrics", "metrics"),
        ("/v2/repository/index", "management"),
        ("/v2/repository/models/m/load", "management"),
    ],
)
def test_each_path_has_its_token(path: str, kind: str | None) -> None:
    assert asked(path) == ([] if kind is None else [(kind, None)])
    assert asked(path, "POST", authorization="Bearer x") == ([] if kind is None else [(kind, "Bearer x")])


def test_metrics_that_are_off_are_not_there_and_others_are() -> None:
    assert refusal(path="/metrics", metrics="off") == (404, "not_offered", "the metrics are off")
    assert asked("/v2", metrics="off") == [("inference", None)]
    assert asked("/metrics", metrics="open") == [("metrics", None)]


def test_one_host_is_expected_and_none_of_http_1_0() -> None:
    assert asked(hosts=(), version="1.0") == [("inference", None)]
    for version, hosts in (("1.1", ()), ("1.1", ("localhost",) * 2), ("1.0", ("localhost",) * 2)):
        text = f"the request has {len(hosts)} Host headers: expected one"
        assert refusal(version=version, hosts=hosts) == (400, "bad_request", text)
    assert refusal(hosts=("attacker.example",))[:2] == (403, "host")
    assert refusal(hosts=(), version="1.0", origin="http://attacker.example")[:2] == (403, "origin")
    assert refusal(origin="http://localhost:1")[:2] == (403, "origin")
    assert asked(origin="http://localhost") == asked(origin="https://vitx.example") == [("inference", None)]


@pytest.mark.parametrize(
    "path", ["/v2/repository/index", REGISTER, "/v2/cudasharedmemory/status", "/v2/systemsharedmemory/" + "x" * 80]
)
def test_some_paths_are_for_no_browser(path: str) -> None:
    for mark in ({"origin": "http://localhost"}, {"sec_fetch_site": "same-origin"}):
        for method in ("GET", "POST"):
            assert refusal(path=path, method=method, **mark) == (403, "origin", f"{path[:80]} is not for browsers")
    assert asked(path, "POST", content_type=FORM)
    assert asked("/v2/models", sec_fetch_site="same-origin")


@pytest.mark.parametrize("kind", [FORM, "text/plain", "multipart/form-data"])
def test_what_a_page_may_send_unasked_is_taken_where_forms_are(kind: str) -> None:
    for given in (kind, kind.upper(), f" {kind} ;charset=utf-8"):
        text = f"Content-Type '{given}' is not offered here: expected application/json or application/octet-stream"
        for path in ("/v2/models/m/infer", "/v1/classify/", *([REGISTER] if kind != FORM else [])):
            assert refusal(path=path, method="POST", content_type=given) == (415, "unsupported_media", text)
        assert asked("/v1/classify", "POST", content_type=given)
        assert asked("/v2/models/m/infer", content_type=given)
    for other in ("application/json", "text/plainer", "image/png", ""):
        assert asked("/v2/models/m/infer", "POST", content_type=other)
    long = refusal(path="/v2", method="POST", content_type=f"{kind};{'x' * 80}")[2]
    assert long.startswith(f"Content-Type '{(kind + ';' + 'x' * 80)[:80]}' is not offered here")
