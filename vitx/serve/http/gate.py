"""Who may ask over HTTP: checks the Host, Origin, content type and bearer token of every request."""

from starlette.types import Scope

from vitx.serve.errors import RequestError, unsupported
from vitx.serve.http.asgi import header
from vitx.serve.security import AllowedHosts, Kind
from vitx.serve.server_core import ServerCore

# Health probes come from machines without the token; the pages show nothing secret, and / asks for the token.
WITHOUT_TOKEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_METRICS = "/metrics"
_REPOSITORY = "/v2/repository"
# No page has a use for these, of whatever origin.
_NOT_FOR_BROWSERS = (_REPOSITORY, "/v2/systemsharedmemory", "/v2/cudasharedmemory")
# What a page of another origin may send without asking first.
_URL_ENCODED = "application/x-www-form-urlencoded"
_FORM_TYPES = ("text/plain", _URL_ENCODED, "multipart/form-data")


def check_allowed(scope: Scope, core: ServerCore, hosts: AllowedHosts) -> None:
    """Raise RequestError for a request that is not allowed, before its body is read."""
    path, origin = scope["path"], header(scope, b"origin")
    given = [value for name, value in scope["headers"] if name == b"host"]
    if len(given) > 1 or (not given and scope["http_version"] == "1.1"):
        raise RequestError(f"the request has {len(given)} Host headers: expected one")
    hosts.check(given[0].decode("latin-1") if given else None, origin)
    if path.startswith(_NOT_FOR_BROWSERS) and (origin or header(scope, b"sec-fetch-site")):
        raise RequestError(f"{path[:80]} is not for browsers", status=403, reason="origin")
    if scope["method"] == "POST" and path != "/v1/classify":  # which takes forms
        content_type = header(scope, b"content-type") or ""
        kind = content_type.partition(";")[0].strip().lower()
        # Where no browser may ask, libcurl's name for any body is taken: Triton's C++ client has no other.
        if kind in _FORM_TYPES and not (kind == _URL_ENCODED and path.startswith(_NOT_FOR_BROWSERS)):
            expected = "application/json or application/octet-stream"
            raise unsupported(f"Content-Type '{content_type[:80]}' is not offered here: expected {expected}")
    if path == _METRICS and core.options.metrics == "off":
        raise RequestError("the metrics are off", status=404, reason="not_offered")
    if path not in WITHOUT_TOKEN:
        asked: Kind = "metrics" if path == _METRICS else "management" if path.startswith(_REPOSITORY) else "inference"
        core.tokens.check(asked, header(scope, b"authorization"))
