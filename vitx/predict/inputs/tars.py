"""The images of a tar file, read as a stream. What cannot be read to its end is an error, never taken for the end.

tarfile ends quietly at a damaged header, at a file that was cut between two members and at a header of zeros, and does
not check the CRC of gzip. Here a file is whole if its last member is followed by zeros alone, up to its end.
"""

import io
import re
import tarfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import IO, BinaryIO, cast

from vitx.core.preprocess import ImageError
from vitx.data.whole_tar import BLOCK_BYTES, WholeTarInfo, check_only_zeros
from vitx.predict.inputs.remote import check_size
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.stores import is_image_name

# What reading a stream may raise besides ImageError.
ERRORS = (OSError, EOFError, tarfile.TarError, zlib.error)
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# A part of a name that begins with a dot, but for "." and "..": many archives begin each name with "./".
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?(?:/|$))")


def tar_images(
    file: BinaryIO, skipped: SkippedNames | None = None, stopped: threading.Event | None = None
) -> Iterator[tuple[str, bytes | ImageError]]:
    """Yield the name of each visible image and its content, or why it has none; other names are added to `skipped`.

    Raises one of `ERRORS` at the first byte that is not as it should be; the images before it have been yielded. When
    `stopped` is set, CancelledError: there may be hours of other files between two images.
    """
    with tarfile.open(fileobj=_uncompressed(file), mode="r|*", tarinfo=WholeTarInfo) as archive:
        rest = cast(IO[bytes], archive.fileobj)
        for member in archive:
            # tarfile keeps every member that it has passed, a leak over millions: a stream cannot go back to them.
            archive.members = []  # type: ignore[attr-defined]  # undocumented, there since Python 2.3
            if member.isdir():
                continue
            # By the last suffix, as for a file: WebDataset goes by the first dot of a name, but any tar may come here.
            hidden = _HIDDEN.search(member.name) is not None
            if is_image_name(member.name) and not hidden:
                yield member.name, _content(archive, member)
            elif skipped is not None:
                skipped.add(member.name, hidden=hidden)
            # To the next header. tarfile would read on behind the end of the file, as far as the member says that it
            # goes: for ever, if that is damaged.
            while (left := archive.offset - rest.tell()) > 0:
                if stopped is not None and stopped.is_set():
                    raise CancelledError
                if not rest.read(min(left, BLOCK_BYTES)):
                    raise tarfile.ReadError(f"the file ends before byte {archive.offset:,}, where a member ends")
        check_only_zeros(rest, archive.offset)  # also to the end of what is compressed, where gzip's CRC is


class _Gunzip:
    """What a gzip file holds. All of it that stands before damage is read before the error is raised.

    gzip.GzipFile gives what was asked for or the error, and tarfile asks for 10 KiB: dozens of small images.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._inflater = zlib.decompressobj(wbits=31)  # with gzip's header, checksum and length
        self._packed = b""

    def read(self, size: int) -> bytes:
        """Return 1 to `size` bytes, b"" at the end; raise EOFError or zlib.error."""
        while True:
            ended = not self._packed and not (more := self._file.read1(BLOCK_BYTES))
            self._packed = self._packed or more
            if self._inflater.eof:  # zeros may follow, or another gzip
                self._packed = self._packed.lstrip(b"\0")
                if ended:
                    return b""
                if not self._packed:
                    continue
                self._inflater = zlib.decompressobj(wbits=31)
            if found := self._inflate(size):
                return found
            if ended:
                raise EOFError("gzip ends before its checksum")

    def _inflate(self, size: int) -> bytes:
        """Up to `size` bytes of the next ones, fewer before damage, at which zlib gives nothing of what it found."""
        before = self._inflater.copy()
        try:
            found = self._inflater.decompress(self._packed, size)
        except zlib.error:
            if size == 1:
                raise
            self._inflater = before
            return self._inflate(size // 2)
        self._packed = self._inflater.unused_data or self._inflater.unconsumed_tail
        return found


def _uncompressed(file: BinaryIO) -> BinaryIO:
    """`file`, or what it holds if that is gzip; with `read` alone, which gives all that stands before an error."""
    reader = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file))
    beginning = reader.peek(4)
    if beginning.startswith(_ZSTD_MAGIC):
        raise tarfile.ReadError("it is compressed by zstd, which is not read: decompress it (zstd -d), or use gzip")
    packed = beginning.startswith(_GZIP_MAGIC)
    return cast(BinaryIO, _Gunzip(reader) if packed else SimpleNamespace(read=reader.read1))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | ImageError:
    try:
        check_size(member.size)
    except ImageError as error:
        return error
    if member.issym() or member.islnk():  # a stream cannot go back to what it is a link to
        return ImageError("a link, which is not followed: pack it with tar --dereference --hard-dereference")
    content = archive.extractfile(member) if member.isfile() else None
    return ImageError("not a regular file") if content is None else content.read()
