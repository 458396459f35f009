"""Who may ask: TLS, and bearer tokens for inference and for management."""

import hmac
import re
import ssl
from pathlib import Path
from typing import Literal

from vitx.core.errors import InputError
from vitx.serve.errors import RequestError
from vitx.serve.options import ServeOptions

Kind = Literal["inference", "management"]
_TOKEN = re.compile(r"[!-~]{16,}")


class Tokens:
    """The tokens of each kind of request; None: none is needed."""

    def __init__(self, inference: bytes | None, management: bytes | None) -> None:
        self._tokens: dict[Kind, bytes | None] = {"inference": inference, "management": management}

    def __bool__(self) -> bool:
        return any(self._tokens.values())

    @classmethod
    def read(cls, options: ServeOptions) -> "Tokens":
        """Read the token files; raise InputError for one that is missing or whose token is short."""
        return cls(_read_token(options.token_file), _read_token(options.management_token_file))

    def check(self, kind: Kind, authorization: str | None) -> None:
        """Raise RequestError 401 unless `authorization` is "Bearer " and the token of this kind."""
        token = self._tokens[kind]
        if token is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # The time of the comparison does not depend on where the two differ.
        right = hmac.compare_digest(given.strip(" ").encode("latin-1", "replace"), token)
        if scheme.lower() != "bearer" or not right:
            what = "no bearer token was given" if authorization is None else "the token is not valid"
            raise RequestError(
                f"{what}: send 'Authorization: Bearer TOKEN' with the {kind} token", status=401, reason="unauthorized"
            )


def read_pem(options: ServeOptions) -> tuple[bytes, bytes] | None:
    """(key, certificate chain) in PEM, None without TLS; raise InputError for files that are no such pair."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InputError("TLS needs both --tls-cert and --tls-key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
        return key.read_bytes(), certificate.read_bytes()
    except (OSError, ssl.SSLError) as error:  # a missing file, no PEM, or a key of another certificate
        raise InputError(f"'{certificate}' and '{key}' are no certificate with its key, in PEM: {error}") from None


def _no_password() -> str:
    return ""  # instead of asking on the terminal


def _read_token(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token file '{path}': {error}") from None
    if not _TOKEN.fullmatch(token):
        raise InputError(
            f"the token in '{path}' is not 16 or more visible ASCII characters: write one, such as 32 hex digits"
        )
    return token.encode()
