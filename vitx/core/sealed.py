"""Records that hold the sha256 of their own file: a changed byte is found though no other file lists the digest."""

from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field

from vitx.core.errors import CheckFailed
from vitx.core.files import Record, json_bytes, read_record, sha256_bytes


class SealedRecord(Record):
    """A record whose `sha256` is that of its own file with the field empty."""

    sha256: str = Field(default="", description="of this file's bytes with this field empty")

    def sealed(self) -> Self:
        """The same record with its own digest."""
        return self.model_copy(update={"sha256": self.digest()})

    def digest(self) -> str:
        return sha256_bytes(self.model_copy(update={"sha256": ""}).file_bytes())

    def file_bytes(self) -> bytes:
        """As `vitx.core.files.write_json` writes it."""
        return json_bytes(self.model_dump(mode="json"))


SealedT = TypeVar("SealedT", bound=SealedRecord)


def read_sealed(path: Path, schema: type[SealedT], *, remedy: str) -> SealedT:
    """Read a sealed record; raise InputError for any other file, CheckFailed for one that was changed.

    Every byte counts, blanks too: the file must be what `write_json` makes of its content. The digest finds damage and
    careless edits. It is not a signature: who can write the file can compute the digest.
    """
    record = read_record(path, schema)
    if path.read_bytes() != record.file_bytes() or record.sha256 != record.digest():
        raise CheckFailed(f"{path} was changed after it was written (its own digest differs): {remedy}")
    return record
