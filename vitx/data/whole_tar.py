"""Tar files whose damage is an error.

tarfile ends quietly at a damaged header, at a file that was cut between two members and at a header of zeros. A file is
whole if its last member is followed by zeros alone, up to its end.
"""

import tarfile

# There since Python 3.0, and missing from the typing stubs.
from tarfile import (  # type: ignore[attr-defined]
    EmptyHeaderError,
    InvalidHeaderError,
    SubsequentHeaderError,
    TruncatedHeaderError,
)
from typing import IO, Self

BLOCK_BYTES = 1 << 16
# Of a name, or of anything else that stands before a member's own header.
_MAX_HEADER_BYTES = 4 << 20
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MORE_HEADERS = (*_LONG_NAMES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class WholeTarInfo(tarfile.TarInfo):
    """A header whose damage tarfile does not take for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _MORE_HEADERS and header.size > _MAX_HEADER_BYTES:  # tarfile reads it into memory
            raise InvalidHeaderError(f"bad header: {header.size:,} bytes, and {_MAX_HEADER_BYTES:,} at most are read")
        return header

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:  # tarfile's own name of the argument
        try:
            return super().fromtarfile(tarfile)
        except EmptyHeaderError:
            reason = "the file ends without the zeros that end an archive,"
        except (TruncatedHeaderError, InvalidHeaderError) as error:
            reason = str(error)
        # What tarfile itself trips over: the numbers of a sparse member, or a thousand headers of one member.
        except (ValueError, IndexError, OverflowError, RecursionError) as error:
            reason = f"bad header: {error}"
        # The only one of its errors that TarFile.next raises wherever the header stands.
        raise SubsequentHeaderError(f"{reason} at byte {tarfile.offset:,}")


def check_only_zeros(rest: IO[bytes], end: int) -> None:
    """Read `rest`, what follows the block of zeros at byte `end`, to its end; raise ReadError for any other byte."""
    while block := rest.read(BLOCK_BYTES):
        if block.count(0) < len(block):
            raise tarfile.ReadError(
                f"other bytes follow the block of zeros at byte {end:,}: a header was lost, or several archives are in "
                "one file"
            )
