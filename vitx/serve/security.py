"""Who may ask: TLS, bearer tokens for inference, management and metrics, and the hosts and pages that may ask."""

import base64
import hmac
import ipaddress
import re
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.urls import read_token
from vitx.serve.errors import RequestError
from vitx.serve.options import ServeOptions

Kind = Literal["inference", "management", "metrics"]
_ALLOWED = re.compile(r"[\w.:%-]+", re.ASCII)
_VALID = re.compile(rb"\x17\r\d{12}Z\x17\r(\d{12})Z")  # in DER from when to when; from 2050 on dates have other tags


class Tokens:
    """The tokens of each kind of request; None: none is needed."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises InputError for files that `read_token` refuses, and for those that do not go together."""
        inference, metrics = read_token(options.token_file), read_token(options.metrics_token_file)
        if options.metrics == "token":
            metrics = metrics or inference
        elif metrics is not None:
            raise InputError(f"--metrics-token-file is of --metrics token, not of --metrics {options.metrics}")
        management = read_token(options.management_token_file)
        if options.management is (management is None) or (management and management in (inference, metrics)):
            raise InputError("--management and --management-token-file go together, with a token that nothing else has")
        self.of: dict[Kind, bytes | None] = {"inference": inference, "management": management, "metrics": metrics}

    def check(self, kind: Kind, authorization: str | None) -> None:
        """Raise RequestError 401 unless `authorization` is "Bearer " and the token of this kind."""
        if (token := self.of[kind]) is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # The time of the comparison does not depend on where the two differ.
        right = hmac.compare_digest(given.strip(" ").encode("latin-1", "replace"), token)
        if scheme.lower() != "bearer" or not right:
            what = "no bearer token was given" if authorization is None else "the token is not valid"
            text = f"{what}: send 'Authorization: Bearer TOKEN' with the {kind} token"
            raise RequestError(text, status=401, reason="unauthorized")


class AllowedHosts:
    """The names under which the server may be asked, against other pages; docs/serving.md (Browsers) says why."""

    def __init__(self, bound: str | None, allowed: Iterable[str]) -> None:
        """`bound`: the address that the server listens on, None if others take the connections."""
        self._allowed = frozenset(name.strip("[]").lower() for name in allowed)
        for name in self._allowed:
            if not _ALLOWED.fullmatch(name) or _host_name(f"[{name}]" if ":" in name else name) != name:
                raise InputError(f"--allow-host {name}: expected a name or address in ASCII, without scheme, port or *")
        self._local = bound is not None and ipaddress.ip_address(bound.partition("%")[0]).is_loopback
        self._any = not self._local and not self._allowed

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise RequestError 403 for a host that is not allowed, or for a page of another origin."""
        # Browsers always send a Host; HAProxy's health check in HTTP/1.0 has none.
        if not (host is None or self._any or self._is_allowed(_host_name(host))):
            text = f"Host '{host[:80]}' is not a name of this server: --allow-host NAME makes it one"
            raise RequestError(text, status=403, reason="host")
        if origin is not None and not self._is_same(origin, host):
            text = f"the page's origin '{origin[:80]}' is not this server: --allow-host NAME, if NAME is its proxy"
            raise RequestError(text, status=403, reason="origin")

    def _is_allowed(self, name: str) -> bool:
        if name in self._allowed or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._local

    def _is_same(self, origin: str, host: str | None) -> bool:
        scheme, _, place = origin.lower().partition("://")
        port = ":443" if scheme == "https" else ":80"
        same = place.removesuffix(port) == (host or "").lower().removesuffix(port)
        return bool(place) and (same or _host_name(place) in self._allowed)


def _host_name(host: str | None) -> str:
    """The name or address in `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`; "" if there is none."""
    try:
        return urlsplit(f"//{host or ''}").hostname or ""
    except ValueError:  # such as a bracket without its other
        return ""


class Pem(NamedTuple):
    """In PEM. client_ca: whose certificates clients need; None: they need none. context: of the same."""

    key: bytes
    chain: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


def read_pem(options: ServeOptions) -> Pem | None:
    """None without TLS; raise InputError for files that are not what their options say."""
    chain, key, authorities = options.tls_cert, options.tls_key, options.tls_client_ca
    if chain is None or key is None:
        if chain is key is authorities:
            return None
        raise InputError("TLS needs both --tls-cert and --tls-key")
    context, no_password = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str  # called instead of asking on the terminal
    try:
        context.load_cert_chain(chain, key, no_password)
        pair = key.read_bytes(), chain.read_bytes()
    except (OSError, ssl.SSLError) as why:  # a missing file, no PEM, or a key with a password or of another certificate
        raise InputError(f"'{chain}' and '{key}' are no certificate with its key, in PEM, unencrypted: {why}") from None
    first = pair[1].partition(b"CERTIFICATE-----")[2].partition(b"-----")[0]
    if dates := _VALID.search(base64.b64decode(first)):
        end = datetime.strptime(f"{dates[1].decode()}+0000", "%y%m%d%H%M%S%z")
        if end < datetime.now(UTC):
            log(f"warning: the certificate in '{chain}' ended on {end}: clients will refuse it")
    if options.grpc_port is not None and not all(pair):
        raise InputError(f"'{chain}' or '{key}' is a pipe, which gRPC reads a second time: give files")
    if authorities is None:
        return Pem(*pair, None, context)
    try:
        context.load_verify_locations(authorities)
        context.verify_mode = ssl.CERT_REQUIRED
        return Pem(*pair, authorities.read_bytes(), context)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"--tls-client-ca '{authorities}' has no certificates in PEM: {error}") from None
