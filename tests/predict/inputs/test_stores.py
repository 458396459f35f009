"""Locations: how names are joined, what is an image, and how often a remote object is tried."""

import errno
import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem

from bundle_fixture import listed
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError
from vitx.predict.inputs import remote
from vitx.predict.inputs.inventory import base_of
from vitx.predict.inputs.stores import (
    absolute,
    expand,
    is_folder,
    is_image_name,
    join,
    open_stream,
    read_bytes,
    version_of,
    walk_images,
)


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ("/in", "a.png", "/in/a.png"),
        ("/in/", "a/b.png", "/in/a/b.png"),
        ("/in/X", "a.png", "/in/X/a.png"),
        ("", "a.png", "a.png"),
        ("/", "a.png", "/a.png"),
        ("/in", "/other/a.png", "/other/a.png"),
        ("/in", "s3://bucket/a.png", "s3://bucket/a.png"),
        ("s3://bucket", "a.png", "s3://bucket/a.png"),
    ],
)
def test_names_are_below_their_base_unless_absolute(base: str, name: str, expected: str) -> None:
    assert join(base, name) == expected


@pytest.mark.parametrize(
    ("name", "image"),
    [
        *((name, True) for name in ("a.png", "b/A.JPG", "a.webp", "a.png/", "b/..png")),
        *((name, False) for name in ("a.png.txt", "png", "a.tar", "a.pngX", ".png", "b/.png")),
    ],
)
def test_images_are_known_by_their_last_suffix(name: str, image: bool) -> None:
    assert is_image_name(name) is image


def test_a_pattern_gives_files_and_no_folders(tmp_path: Path) -> None:
    for name in ("a.png", "sub.png/b.png", "sub.png/deep/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(expand(f"{tmp_path}/*.png")) == [f"{tmp_path}/a.png"]
    assert sorted(expand(f"{tmp_path}/**/*.png")) == [
        f"{tmp_path}/{name}" for name in ("a.png", "sub.png/b.png", "sub.png/deep/c.png")
    ]


@pytest.mark.parametrize("folder", ["a[1]", "a*", "a?[[]", ".hidden"])
def test_a_pattern_is_of_the_folder_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Not of another whose name that folder's would match."""
    for name in ("a1/b/1.png", "ab/b/2.png", f"{folder}/b/3.png", f"{folder}/b[3]/4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / folder)
    here = f"{tmp_path}/{folder}"
    assert list(expand(absolute("b/*.png"))) == list(expand("b/*.png")) == [f"{here}/b/3.png"]
    assert list(expand(absolute("b*/../b/../b/*.png"))) == [f"{here}/b/3.png"]
    assert sorted(expand(absolute("*/*.png"))) == [f"{here}/b/3.png", f"{here}/b[3]/4.png"]
    assert absolute("b[3]/4.png") == f"{here}/b[3]/4.png"
    monkeypatch.chdir("b")
    assert list(expand(absolute("../b/?.png"))) == [f"{here}/b/3.png"]


def test_above_a_link_is_above_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("far/images/1.png", "far/target/2.png", "near/images/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "target")
    monkeypatch.chdir(tmp_path / "near")
    for source in ("link/../images", f"{tmp_path}/near/link/..//images/", "./link/./../../far/images"):
        assert absolute(source) == f"{tmp_path}/far/images"
        assert [name for name, _ in walk_images(source, print)] == ["1.png"]
        assert list(expand(f"{source}/*.png")) == [f"{tmp_path}/far/images/1.png"]
    assert [absolute("link/.."), absolute("link/../")] == [f"{tmp_path}/far"] * 2
    assert absolute("link/../X/") == f"{tmp_path}/far/X"
    assert [absolute("."), absolute(""), absolute("images/")] == [*[f"{tmp_path}/near"] * 2, f"{tmp_path}/near/images"]
    assert [absolute("/"), absolute("/../.."), absolute("s3://a/../b")] == ["/", "/", "s3://a/../b"]


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="links")
@pytest.mark.skipif(sys.platform == "win32", reason="removes a folder that is in use")
def test_an_absolute_location_needs_no_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert absolute(f"{tmp_path}/images/") == f"{tmp_path}/images"
    with pytest.raises(FileNotFoundError):
        absolute("images")


def test_a_pattern_of_this_machine_leaves_no_folder_out_and_goes_in_no_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "shut/2.png", "b/deep/3.png", "b/deep/4.txt", "c/.hidden/5.png", "c/.6.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    real, listed = os.scandir, list[str]()

    def guarded(path: str) -> Any:  # the tests may run as root, who may list all
        listed.append(path.removeprefix(f"{tmp_path}/"))
        if path.endswith("shut/"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", guarded)

    def found(pattern: str) -> list[str]:
        listed.clear()
        return sorted(name.removeprefix(f"{tmp_path}/") for name in expand(f"{tmp_path}/{pattern}"))

    assert found("*/*.png") == ["a/1.png", "shut/"]
    assert found("[!s]*/*.png") == ["a/1.png"]
    assert sorted(listed) == ["", "a/", "b/", "c/"]
    assert found("**/*.png") == ["a/1.png", "b/deep/3.png", "b/up/", "shut/"]
    assert found("b/deep/**") == ["b/deep/3.png", "b/deep/4.txt"]
    assert found("b/**/*.png") == ["b/deep/3.png", "b/up/a/1.png", "b/up/b/", "b/up/shut/"]
    assert found("a/**1.png") == ["a/1.png"]
    with pytest.raises(InputError, match=r"^cannot list the folder '.*/nowhere': No such file or directory$"):
        found("nowhere/*.png")


def test_hidden_names_are_left_out_at_every_depth(tmp_path: Path) -> None:
    for name in ("a.png", ".b.png", ".c/d.png", "e/.f.png", "e/.g/h.png", "e/i.png", "e/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(name for name, _ in walk_images(str(tmp_path), print)) == ["a.png", "e/i.png"]


def test_a_folder_linked_twice_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").touch()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert sorted(name for name, _ in walk_images(str(tmp_path), print)) == ["a/1.png", "a/up/", "b/1.png", "b/up/"]


def test_too_many_open_files_are_no_fault_of_an_image_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would be a row, and the run would end well."""
    (tmp_path / "sub").mkdir()
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    real, top = os.scandir, f"{tmp_path}/"

    def scandir(path: str) -> Any:
        if path != top:
            raise full
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Too many open files") as raised:
        list(walk_images(str(tmp_path), print))
    assert raised.value is full

    def refuse(*_: Any) -> int:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            EnvironmentMissing, match=r"^cannot open '/in/a\.png': Too many open files; raise the limit"
        ):
            read_bytes("/in/a.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_what_is_no_file_is_not_opened_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(ImageError, match=r"^not a regular file$"):
        read_bytes(str(tmp_path / "pipe.png"))
    with pytest.raises(OSError, match=r"^'.*pipe\.png' is not a regular file$"):
        open_stream(str(tmp_path / "pipe.png"))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ImageError, match=r"^cannot open the image: Is a directory$"):
        read_bytes(str(tmp_path / "folder.png"))
    os.close(again := os.open(os.devnull, os.O_RDONLY))
    assert again == lowest, "one was left open"


def test_a_url_of_this_machine_is_as_its_path(tmp_path: Path) -> None:
    """fsspec's own listing takes a link to a folder for no folder, its opening waits for pipes."""
    inside, aside = tmp_path / "in", tmp_path / "aside"
    for folder, name in ((inside, "a.png"), (aside, "b.png")):
        folder.mkdir()
        (folder / name).write_bytes(b"content")
    (inside / "link").symlink_to(aside)
    (inside / "loop").symlink_to(inside)
    (inside / "one.png").symlink_to(aside / "b.png")
    os.mkfifo(inside / "pipe.png")
    url = f"file://{inside}"
    here, there = (sorted(walk_images(place, pytest.fail)) for place in (str(inside), url))
    assert here == there == [(name, None) for name in ("a.png", "link/b.png", "loop/", "one.png", "pipe.png")]
    assert sorted(expand(f"{url}/**/*.png")) == [f"file://{name}" for name in sorted(expand(f"{inside}/**/*.png"))]
    for name, reason in (("pipe.png", "not a regular file"), ("loop/", "a link to one of its own parent folders")):
        with pytest.raises(ImageError, match=f"^{reason}"):
            read_bytes(f"{url}/{name}")
    with pytest.raises(OSError, match=r"pipe\.png' is not a regular file"):
        open_stream(f"{url}/pipe.png")
    before = version_of(f"{url}/one.png")
    os.utime(aside / "b.png", ns=(1, 1))
    assert before != version_of(f"{url}/one.png") == "7-1"


def test_a_url_that_nothing_opens_is_one_unreadable_image() -> None:
    with pytest.raises(ImageError, match=r"cannot open 'foo://x/a.png': .*foo"):
        read_bytes("foo://x/a.png")


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/tmp/a\0b.png", "cannot open the image: "),  # as a Parquet file may name it; why: in each Python's words
        ("github://x/a.png", "cannot open 'github://x/a.png': "),
        ("dir://x/a.png", "cannot open 'dir://x/a.png': "),
        ("generic://x/a.png", "cannot open 'generic://x/a.png': "),
        ("/", "a folder: expected an image"),
        ("memory://", "a folder, which can be listed now, by another run; or an object "),
    ],
)
def test_no_name_ends_a_run(location: str, reason: str) -> None:
    with pytest.raises(ImageError) as raised:
        read_bytes(location)
    assert str(raised.value).startswith(reason)
    version_of(location)


def test_two_colons_are_no_chain_of_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """fsspec takes them for one: of zip://a.png::URL, but also in a key or in the address of a server."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "keys", ["b/in/a::b.png", "b/in/c.png"])
    assert [name for name, _ in walk_images("bucket://b/in", print)] == ["a::b.png", "c.png"]
    assert read_bytes("bucket://b/in/a::b.png") == b"b/in/a::b.png"
    assert remote.remote_filesystem("http://[::1]:80/a.png")[1] == "http://[::1]:80/a.png"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", b"in it")
        archive.writestr("in/b.png", b"in a folder of it")
    assert read_bytes(f"zip://a.png::file://{tmp_path}/a.zip") == b"in it"
    folder = f"zip://in::file://{tmp_path}/a.zip"
    assert [read_bytes(join(folder, name)) for name, _ in walk_images(folder, print)] == [b"in a folder of it"]


class Tree:
    """A store with folders of which some cannot be listed; it has been listed before."""

    stale = True

    def invalidate_cache(self) -> None:
        self.stale = False

    def __init__(self, listings: dict[str, list[str] | Exception]) -> None:
        self.listings = listings

    def unstrip_protocol(self, path: str) -> str:
        return f"s3://{path}"

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:
        assert detail
        assert not self.stale
        found = self.listings[path]
        if isinstance(found, Exception):
            raise found
        kinds = {name: "directory" if name.endswith("/") else "file" for name in (path, *found)}
        # Some stores write the slash behind a folder's name, some do not.
        return [{"name": name.rstrip("/") if "gone" in name else name, "type": kinds[name]} for name in kinds]

    def find(self, path: str) -> list[str]:
        raise AssertionError(f"of a store with folders, below {path}")


def test_a_remote_folder_that_cannot_be_listed_is_a_row(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    tree = Tree(
        {
            "b/in": ["b/in/1.png", "b/in/.x.png", "b/in/.y/", "b/in/sub/", "b/in/gone/", "b/in/a.txt"],
            "b/in/sub": ["b/in/sub/2.jpg", "b/in/sub/shut/"],
            "b/in/sub/shut": PermissionError("Access Denied"),
            "b/in/gone": RuntimeError("reset by peer"),
        }
    )
    monkeypatch.setattr(remote, "remote_filesystem", lambda location: (tree, location.partition("://")[2].rstrip("/")))
    skipped: list[str] = []
    found = sorted(name for name, _ in walk_images("s3://b/in", skipped.append))
    assert (found, skipped) == (["1.png", "gone/", "sub/2.jpg", "sub/shut/"], [".x.png", ".y", "a.txt"])
    assert waits == [0.2, 1.0]
    with pytest.raises(ImageError, match=r"^cannot list the folder: Access Denied$"):
        read_bytes("s3://b/in/sub/shut/")
    with pytest.raises(ImageError, match=r"^cannot list the folder: RuntimeError: reset by peer$"):
        read_bytes("s3://b/in/gone/")
    tree.listings["b/in"] = PermissionError("Access Denied")
    with pytest.raises(InputError, match=r"^cannot list the folder 's3://b/in': Access Denied$"):
        list(walk_images("s3://b/in", print))


class Hub(AbstractFileSystem):  # type: ignore[misc]
    """A folder, of which the server fails the first times: to fsspec's `isdir` any error is a no."""

    protocol = "hub"
    cachable = False
    failures = 0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        Hub.failures -= 1
        if Hub.failures >= 0:
            raise OSError("503 Service Unavailable")
        return {"name": path, "type": "directory", "size": 0}


def test_a_server_that_fails_once_does_not_make_a_folder_a_file(
    monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    fsspec.register_implementation("hub", Hub, clobber=True)
    monkeypatch.setattr(Hub, "failures", 1)
    assert is_folder("hub://user/images")
    assert waits == []
    monkeypatch.setattr(Hub, "failures", 3)
    assert is_folder("hub://user/images")
    assert waits == [0.2, 1.0]
    monkeypatch.setattr(Hub, "failures", 9)
    with pytest.raises(EnvironmentMissing, match=r"^cannot look for 'hub://user/images': it gives no answer: OSError"):
        is_folder("hub://user/images")


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """Keys without folders, listed as s3fs lists a bucket: what lies below an empty name is in no folder."""

    protocol = "bucket"
    cachable = False
    keys: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = path.strip("/") + "/"
        below = {key[len(folder) :].partition("/") for key in self.keys if key.startswith(folder)}
        entries = [(folder + name, "directory" if slash else "file") for name, slash, _ in below if name]
        return [{"name": name, "type": kind, "size": 1} for name, kind in sorted(set(entries))]

    def find(self, path: str, prefix: str = "", **_: Any) -> list[str]:
        if path.endswith("/shut"):
            raise PermissionError("Access Denied")
        return [key for key in self.keys if key.startswith(f"{path.rstrip('/')}/{prefix}")]

    def cat_file(self, path: str, **_: Any) -> bytes:
        return path.encode() if path in self.keys else b""


def test_keys_below_an_empty_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As listed by s3fs from an S3 server: `ls` has no folder for them."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    keys = ["b/in/a.jpg", "b/in//x.jpg", "b/in/s//c.jpg", "b/in/s/b.jpg", "b/in//.hidden/x.jpg", "b/in//n.txt"]
    monkeypatch.setattr(Bucket, "keys", [*keys, "b/in/shut/a.jpg", "b/in2//z.jpg", "b/in//deep//y.png", "b/in//.h.png"])
    for root in ("bucket://b/in", "bucket://b/in/"):
        found = sorted(name for name, _ in walk_images(root, print))
        odd = ["bucket://b/in//deep//y.png", "bucket://b/in//x.jpg", "bucket://b/in/s//c.jpg"]
        assert found == ["a.jpg", *odd, "s/b.jpg", "shut/"]
    assert [read_bytes(join("bucket://b/in", name)) for name in odd] == [
        name.partition("//")[2].encode() for name in odd
    ]


class Walked(AbstractFileSystem):  # type: ignore[misc]
    """Of its folders one may not be listed, and one is gone when it is."""

    protocol = "walked"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path.endswith("gone"):
            raise FileNotFoundError(path)
        if path.endswith("shut"):
            raise PermissionError("Access Denied")
        names = ("a.png", "gone", "open", "shut") if path.endswith("in") else ("b.png",)
        return [{"name": f"{path}/{name}", "type": "file" if "." in name else "directory", "size": 1} for name in names]


def test_a_pattern_leaves_no_folder_out_without_a_word() -> None:
    """As fsspec's own walk does."""
    fsspec.register_implementation("walked", Walked, clobber=True)
    gone, shut = "walked://in/gone/", "walked://in/shut/"
    assert sorted(expand("walked://in/*/*.png")) == [gone, "walked://in/open/b.png", shut]
    with pytest.raises(ImageError, match=r"^cannot list the folder: Access Denied$"):
        read_bytes(shut)
    assert list(expand("walked://in/open/*.png")) == ["walked://in/open/b.png"]
    assert list(expand("walked://in/*.png")) == ["walked://in/a.png"]


class Hosted(AbstractFileSystem):  # type: ignore[misc]
    """One image on one host, of which its paths say nothing, as those of FTP and HDFS; Azure's begin with what is
    before the @."""

    protocol = ("hosted", "held")
    cachable = False

    def __init__(self, host: str, password: str | None = None) -> None:
        super().__init__()
        assert (host, password) in (("h:21", "s3cr3t"), ("account", None))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        scheme, found, rest = path.partition("://")
        host, _, below = rest.partition("/")
        container = host.partition("@")[0] if scheme == "held" else ""
        return f"{container}/{below}".rstrip("/") if found else path

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        user, at, host = url.partition("://")[2].partition("/")[0].rpartition("@")
        given = {"password": user.partition(":")[2]} if ":" in user else {}
        return given | ({"host": host} if at else {})

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if not path.endswith("in"):
            raise FileNotFoundError(path)
        return [{"name": f"{path}/{name}", "type": "file", "size": 1} for name in ("a.png", "b.txt")]

    def cat_file(self, path: str, **_: Any) -> bytes:
        return path.encode()


@pytest.mark.parametrize(
    ("folder", "told", "path"),
    [
        ("hosted://bob:s3cr3t@h:21/in", "hosted://bob@h:21/in", "/in/a.png"),
        ("held://container@account/in", "held://container@account/in", "container/in/a.png"),
    ],
)
def test_a_pattern_names_images_with_their_host(tmp_path: Path, folder: str, told: str, path: str) -> None:
    """A store's own way to write a path leaves it out, and no image could be read."""
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    fsspec.register_implementation("held", Hosted, clobber=True)
    assert list(expand(f"{folder}/*.png")) == [f"{told}/a.png"]
    assert read_bytes(join(base_of(f"{folder}/*.png", "pattern"), f"{told}/a.png")) == path.encode()
    # Who asks is no part of what identifies the listing.
    names = hashlib.sha256(f"{told}/a.png".replace("/", "\0").encode() + b"/").hexdigest()
    found = listed(f"{folder}/*.png", tmp_path / "list")
    assert found.digest == hashlib.sha256(f"{names}  []".encode()).hexdigest()
