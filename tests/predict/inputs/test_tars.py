"""Tar files: all of their images, or an error at the byte from which on they are lost."""

import errno
import gc
import gzip
import io
import random
import tarfile
import threading
import tracemalloc
import zlib
from concurrent.futures import CancelledError
from typing import Any, BinaryIO, cast

import pytest

from vitx.core.preprocess import ImageError
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.inputs.tars import ERRORS, tar_images

NAMES = [f"{index:02}.png" for index in range(20)]
SIZE = 700
MEMBER = 512 + 1024  # a header, and the content in whole blocks


def archive(names: list[str] = NAMES) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for index, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = SIZE
            tar.addfile(info, io.BytesIO(random.Random(index).randbytes(SIZE)))
    return file.getvalue()


def read(data: bytes) -> tuple[list[tuple[str, bytes | ImageError]], str]:
    """The images, and the error at the end; "" without one."""
    found = []
    try:
        for image in tar_images(io.BytesIO(data)):
            found.append(image)
    except ERRORS as error:
        return found, str(error)
    return found, ""


WHOLE = archive()
IMAGES = [(name, random.Random(index).randbytes(SIZE)) for index, name in enumerate(NAMES)]


def test_a_whole_archive() -> None:
    assert read(WHOLE) == (IMAGES, "")
    assert read(gzip.compress(WHOLE)) == (IMAGES, "")
    assert read(gzip.compress(WHOLE[:5000]) + gzip.compress(WHOLE[5000:])) == (IMAGES, "")
    assert read(bytes(10_240)) == ([], "")
    # One block of zeros instead of two; every reader takes it.
    assert read(WHOLE[: 20 * MEMBER] + bytes(512)) == (IMAGES, "")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["soft", "hard"])
def test_a_link_says_how_its_image_is_packed(kind: bytes) -> None:
    info = tarfile.TarInfo("link.png")
    info.type, info.linkname = kind, NAMES[0]
    found, error = read(WHOLE[: 20 * MEMBER] + info.tobuf() + bytes(1024))
    assert (found[:-1], error) == (IMAGES, "")
    name, reason = found[-1]
    assert (name, str(reason)) == (
        "link.png",
        "a link, which is not followed: pack it with tar --dereference --hard-dereference",
    )


def test_members_that_were_read_are_not_kept() -> None:
    """The headers of 4,900 members would be 3 MB and more."""
    small = archive([f"{index}.png" for index in range(5000)])
    stream = tar_images(io.BytesIO(small))
    next(stream)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in zip(range(4900), stream, strict=False):
            pass
        gc.collect()  # what is in circles is freed whenever Python sees fit
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("member", [0, 1, 10, 19])
def test_a_header_with_one_bit_flipped_is_named(member: int) -> None:
    generator = random.Random(member)
    for _ in range(50):
        data = bytearray(WHOLE)
        data[member * MEMBER + generator.randrange(512)] ^= 1 << generator.randrange(8)
        found, error = read(bytes(data))
        if found != IMAGES:  # padding between the fields of the checksum is read as written
            assert found == IMAGES[:member]
            assert f"at byte {member * MEMBER:,}" in error


def test_a_header_of_zeros_is_not_the_end() -> None:
    start = 10 * MEMBER
    found, error = read(WHOLE[:start] + bytes(512) + WHOLE[start + 512 :])
    assert found == IMAGES[:10]
    assert error.startswith("other bytes follow the block of zeros at byte 15,360: a header was lost")


def test_what_follows_the_end_is_not_dropped() -> None:
    found, error = read(WHOLE + WHOLE)
    assert found == IMAGES
    assert "several archives are in one file" in error
    assert "other bytes follow" in read(WHOLE + bytes(100_000) + b"x")[1]


def test_a_cut_anywhere_is_an_error() -> None:
    end = 20 * MEMBER
    for length in [*range(0, end, 512), *range(1, end, 997), end]:
        found, error = read(WHOLE[:length])
        assert found == IMAGES[: len(found)]
        assert error != "", length
    assert "ends without the zeros that end an archive, at byte 15,360" in read(WHOLE[: 10 * MEMBER])[1]


def test_gzip_is_read_to_its_checksum() -> None:
    packed = gzip.compress(WHOLE)
    damaged = bytearray(packed)
    damaged[-6] ^= 1
    assert "incorrect data check" in read(bytes(damaged))[1]
    for length in (1, 12, len(packed) // 2, len(packed) - 8, len(packed) - 1):
        assert read(packed[:length])[1] != "", length
    assert read(packed + bytes(70_000)) == (IMAGES, "")
    assert read(packed + bytes(70_000) + packed)[1].startswith("other bytes follow the block of zeros")


def test_zstd_is_named() -> None:
    zstd = b"\x28\xb5\x2f\xfd\x24\x02\x11\x00\x00\x3a\x29\xb5\x1f\x12\xc3"
    assert read(zstd) == ([], "it is compressed by zstd, which is not read: decompress it (zstd -d), or use gzip")


def test_every_whole_image_before_the_damage_of_a_gzip_is_read() -> None:
    """As many as zlib gives byte by byte, which is all that can be had."""
    packed = gzip.compress(WHOLE)
    for damaged in (packed[:-1], packed[:-9], packed + b"garbage"):
        found, error = read(damaged)
        assert found == IMAGES
        assert error
    chance = random.Random(0)
    for _ in range(200):
        data = bytearray(packed[: chance.choice([len(packed), chance.randrange(20, len(packed))])])
        data[chance.randrange(10, len(data))] ^= 1 << chance.randrange(8)
        found, error = read(bytes(data))
        assert error
        assert found == read(byte_by_byte(bytes(data)))[0]


def byte_by_byte(rest: bytes) -> bytes:
    """What zlib gives of a gzip up to its damage, asked for one byte at a time; far from there, for many."""
    inflater, plain, most = zlib.decompressobj(31), b"", 512
    while rest and not inflater.eof:
        before = inflater.copy()
        try:
            plain += inflater.decompress(rest, most)
            rest = inflater.unconsumed_tail
        except zlib.error:
            if most == 1:
                break
            inflater, most = before, 1
    return plain


class Failing(io.RawIOBase):
    """A file on a disk of which a sector cannot be read."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not (count := self.data.readinto(buffer)):
            raise OSError(errno.EIO, "Input/output error")
        return count


@pytest.mark.parametrize("packed", [False, True])
def test_every_whole_image_before_an_error_of_the_disk_is_read(packed: bool) -> None:
    """12 members are 18,432 bytes: no whole number of what tarfile reads at once."""
    data = WHOLE[: 12 * MEMBER]
    found: list[tuple[str, bytes | ImageError]] = []
    with pytest.raises(OSError, match="Input/output error"):
        found.extend(tar_images(cast(BinaryIO, Failing(gzip.compress(data) if packed else data))))
    assert found == IMAGES[:12]


def test_what_is_no_image_is_counted_and_a_folder_is_nothing() -> None:
    """A name is hidden by any part that begins with a dot, as of a file."""
    names = ["a/b.PNG", "notes.txt", "a/b/.c.png", ".a/c.png", "./a/.b/c.png", "a.png.txt", "a/README", "..d.png"]
    names += ["./e.png", "../f.png", "g/./../h.png"]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    skipped = SkippedNames()
    found = [name for name, _ in tar_images(io.BytesIO(file.getvalue()), skipped)]
    assert found == ["a/b.PNG", "./e.png", "../f.png", "g/./../h.png"]
    assert skipped.by_suffix == {".txt": 2, "(hidden)": 4, "(no suffix)": 1}
    assert skipped.first == ["notes.txt", "a/b/.c.png", ".a/c.png", "./a/.b/c.png", "a.png.txt"]
    assert [name for name, _ in tar_images(io.BytesIO(file.getvalue()))] == found


def odd(pax_headers: dict[str, str]) -> bytes:
    """Two whole members, then one with these further headers, which have no checksum, then one more."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for index, name in enumerate(NAMES[:4]):
            info = tarfile.TarInfo(name)
            info.size = SIZE
            info.pax_headers = pax_headers if index == 2 else {}
            tar.addfile(info, io.BytesIO(random.Random(index).randbytes(SIZE)))
    return file.getvalue()


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("data", "images", "reason"),
    [
        (odd({"size": "9" * 23}), 3, "the file ends before byte"),  # tarfile would read for ever
        (odd({"size": "-5"}), 3, "invalid header at byte 4,608"),
        (odd({"GNU.sparse.map": "a,b"}), 2, "bad header: invalid literal for int()"),
        (odd({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}), 2, "bad header: "),
        (header(tarfile.XHDTYPE, 0) * 3000 + WHOLE, 0, "bad header: maximum recursion depth exceeded"),
        (header(tarfile.GNUTYPE_LONGNAME, 8 << 30) + bytes(512), 0, "bad header: 8,589,934,592 bytes, and 4,194,304"),
    ],
    ids=["endless", "negative", "sparse-map", "sparse-numbers", "recursion", "name-of-8-GB"],
)
def test_what_tarfile_trips_over_is_damage_like_any_other(data: bytes, images: int, reason: str) -> None:
    found, error = read(data)
    assert found[:2] == IMAGES[: min(images, 2)]
    assert len(found) == images
    assert error.startswith(reason), error


def test_a_stop_ends_between_images() -> None:
    """Of a tar of films the next image may be hours away."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("0.png", "film.mp4"):
            member = tarfile.TarInfo(name)
            member.size = 100_000
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    stopped = threading.Event()
    images = tar_images(io.BytesIO(file.getvalue()), None, stopped)
    assert next(images)[0] == "0.png"
    stopped.set()
    with pytest.raises(CancelledError):
        next(images)
