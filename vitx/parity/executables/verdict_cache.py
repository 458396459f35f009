"""What this machine has found about executables, in the user's cache: a witness set is run once, not at every start."""

import json
from contextlib import suppress
from pathlib import Path

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.certificate import Executable, Verdict
from vitx.core.console import log
from vitx.core.errors import EnvironmentMissing, VitxError
from vitx.core.files import SealedRecord, cache_folder, read_sealed, sha256_bytes, write_json


class CachedVerdict(SealedRecord):
    """A verdict, and the sha256 of the manifest of its bundle, which names every file with its digest."""

    manifest_sha256: str
    verdict: Verdict


# By cache folder, what could not be written there, by manifest and file name: `--runtime auto` chooses by it.
_unwritten: dict[Path | None, dict[tuple[str, str], CachedVerdict]] = {}


def cached_verdict(bundle: Bundle, executable: Executable) -> Verdict | None:
    """The passing verdict that was found here on exactly this executable of exactly this bundle; None without one."""
    known = cached_verdicts(bundle)
    return next((one for one in known if one.executable == executable and one.verdict == "pass"), None)


def cached_verdicts(bundle: Bundle) -> list[Verdict]:
    """What was found here on executables of exactly this bundle, the newest last; damaged records are left out."""
    found = {}
    manifest = bundle.subject()[MANIFEST]
    with suppress(OSError, EnvironmentMissing):  # no cache, or a user without a home
        for path in sorted(_folder(manifest).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            with suppress(VitxError):
                record = read_sealed(path, CachedVerdict, remedy="remove it")
                if record.manifest_sha256 == manifest and path.name == _name(record.verdict):
                    found[path.name] = record.verdict
    for (bundle_of_it, name), record in [*_unwritten.get(_place(), {}).items()]:
        if bundle_of_it == manifest:  # newer than what a cache that can no longer be written has under this name
            found.pop(name, None)
            found[name] = record.verdict
    return [*found.values()]


def keep_verdict(bundle: Bundle, verdict: Verdict) -> None:
    """Keep a verdict; where the cache cannot be written, say so once, and keep it as long as this process lasts."""
    manifest = bundle.subject()[MANIFEST]
    record = CachedVerdict(manifest_sha256=manifest, verdict=verdict).sealed()
    key = (manifest, _name(verdict))
    _unwritten.get(_place(), {}).pop(key, None)
    try:
        write_json(_folder(manifest) / _name(verdict), record)
    except (OSError, EnvironmentMissing) as error:
        if _place() not in _unwritten:
            why = f"{error}: set VITX_CACHE to a folder that can be written" if isinstance(error, OSError) else error
            log(f"vitx: the verdict is not kept: {why}")
        _unwritten.setdefault(_place(), {})[key] = record


def _place() -> Path | None:
    """The cache folder; None for a user without a home."""
    with suppress(EnvironmentMissing):
        return cache_folder()
    return None


def _folder(manifest_sha256: str) -> Path:
    return cache_folder() / "verdicts" / manifest_sha256


def _name(verdict: Verdict) -> str:
    return f"{sha256_bytes(json.dumps(verdict.executable.model_dump(mode='json'), sort_keys=True).encode())[:32]}.json"
