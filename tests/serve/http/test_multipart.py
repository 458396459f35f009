"""multipart/form-data without a socket: parts, their names, and what is refused."""

import contextlib
import sys
import threading
import time
from email.message import Message

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vitx.serve.errors import RequestError
from vitx.serve.http.multipart import _PIECE_BYTES, _parameters, parse_multipart

TYPE = 'multipart/form-data; boundary="a b"'


def form(*parts: bytes) -> bytes:
    return b"".join(b"--a b\r\n" + part + b"\r\n" for part in parts) + b"--a b--\r\n"


def test_multipart_parts_keep_their_order_and_bytes() -> None:
    first = (
        b'Content-Disposition: form-data; name="x"; filename="1.png"\r\nContent-Type: image/png\r\n\r\n\r\n--a\r\n\x00'
    )
    second = b"content-disposition:form-data; name=y; filename=\r\n\r\n"
    assert parse_multipart(TYPE, form(first, second), 2) == (["1.png", ""], [b"\r\n--a\r\n\x00", b""])


def test_text_before_the_first_delimiter_and_white_space_behind_one_are_allowed() -> None:
    """RFC 2046 §5.1.1: they are to be ignored."""
    given = form(b'Content-Disposition: form-data; name="x"; filename="1"\r\n\r\n1')
    for preamble in (b"\r\n", b"a MIME preamble --a b\r\n"):
        padded = preamble + given.replace(b"--a b\r\n", b"--a b \t\r\n")
        assert parse_multipart(TYPE, padded, 2) == (["1"], [b"1"])


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("multipart/form-data", b"", "multipart/form-data has no valid boundary (1 to 70 ASCII characters)"),
        (TYPE, b"", "multipart body ends before its closing boundary: is it truncated?"),
        (TYPE, b"\n--a b--", "multipart body ends before its closing boundary: is it truncated?"),
        (TYPE, b"--a b--", "the form has no image"),
        (TYPE, b"--a bX", "multipart boundary is not followed by a line end"),
        (TYPE, form(b"A: b\r\n\r\n")[:-9], "multipart body ends before its closing boundary: is it truncated?"),
        (TYPE, form(b"no headers"), "a multipart part has no headers, or more than 8192 bytes of them"),
        (TYPE, form(b"A: b\r\n\r\n"), "a multipart part has no Content-Disposition: form-data with a name"),
        (
            TYPE,
            form(b"content-disposition:form-data; name=y\r\n\r\n"),
            "form field 'y' is not a file: expected images only",
        ),
        (TYPE, form(*[b"A: b\r\n\r\n"] * 3), "a multipart part has no Content-Disposition: form-data with a name"),
    ],
)
def test_broken_multipart_is_refused(content_type: str, body: bytes, text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_multipart(content_type, body, 2)
    assert (error.value.status, str(error.value)) == (400, text)


@settings(max_examples=300)
@given(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            [
                b"--a b",
                b"--",
                b"\r\n",
                b"Content-Disposition: form-data;",
                b" name=x",
                b";",
                b"\r\n\r\n",
                b"\xff",
                b"*=utf-8''%ff",
            ]
        )
    ),
)
def test_any_multipart_parses_or_is_refused_cleanly(content_type: str, pieces: list[bytes]) -> None:
    for kind in (TYPE, content_type):
        with contextlib.suppress(RequestError):
            assert len(parse_multipart(kind, b"".join(pieces), 4)[0]) <= 4


@pytest.mark.parametrize(
    ("header", "name", "filename"),
    [
        (b'FORM-DATA ;  Name = "a b" ; filename="x;y.png"', "a b", "x;y.png"),
        (b'form-data; name=""; filename=""', "", ""),
        (b'form-data; name="a"; filename="\\"x\\"\\\\y.png"', "a", '"x"\\y.png'),
        (b'form-data; name="a"; filename="C:\\x.png"', "a", "C:\\x.png"),
        ("form-data; name=ä; filename=ö.png".encode(), "ä", "ö.png"),
        (b"form-data; name=a; name=b; filename=x.png ; filename=y.png", "a", "x.png"),
        (b"form-data; name=a; filename=x.png; filename*=utf-8''%c3%b6%ff'.png", "a", "ö\ufffd'.png"),
        (b"form-data; name=a; filename=b=c.png", "a", "b=c.png"),
        (b"form-data; name=a; filename=\xff.png", "a", "\ufffd.png"),
        (b'form-data; name=a; filename="no end', "a", ""),
    ],
)
def test_the_names_of_a_part(header: bytes, name: str, filename: str) -> None:
    part = b"Content-Disposition: " + header + b"\r\n\r\nx"
    assert parse_multipart(TYPE, form(part), 2) == ([filename], [b"x"])
    assert _parameters(header.decode(errors="replace"))["name"] == name


@pytest.mark.parametrize(
    "header", [b"form-data", b"form-data; filename=x", b"file; name=a", b"; name=a", b'form-data "; name=a']
)
def test_a_part_without_a_name_is_refused(header: bytes) -> None:
    with pytest.raises(RequestError, match="has no Content-Disposition: form-data with a name"):
        parse_multipart(TYPE, form(b"Content-Disposition: " + header + b"\r\n\r\nx"), 2)


def test_the_headers_of_a_part_have_a_limit() -> None:
    name = b"Content-Disposition: form-data; name=a; filename=b\r\nX: "
    part = name + b"y" * (8188 - len(name)) + b"\r\n\r\nx"
    assert parse_multipart(TYPE, form(part, part), 2) == (["b"] * 2, [b"x"] * 2)
    with pytest.raises(RequestError, match="no headers, or more than 8192 bytes of them"):
        parse_multipart(TYPE, form(b"X" + part), 2)


@pytest.mark.parametrize("size", [*range(_PIECE_BYTES - 90, _PIECE_BYTES + 10), 2 * _PIECE_BYTES, 5 * _PIECE_BYTES + 3])
def test_a_part_of_several_pieces(size: int) -> None:
    """A boundary may lie across two pieces, and what looks like one may begin anywhere."""
    data = (b"\r\n--a " * (size // 7 + 1))[:size]
    part = b"Content-Disposition: form-data; name=a; filename=b\r\n\r\n"
    assert parse_multipart(TYPE, form(part + data, part), 2) == (["b", "b"], [data, b""])


def test_a_large_form_holds_no_other_thread_up_for_long() -> None:
    """Looking for the end and copying held the interpreter for 0.18 s. Counted in turns, as a clock would be noise."""
    interval = sys.getswitchinterval()
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    body = form(b"Content-Disposition: form-data; name=a; filename=b\r\n\r\n" + b"\r\n--" * 2**24)
    other = threading.Thread(target=count)
    sys.setswitchinterval(1e-4)
    other.start()
    try:
        before = turns
        parse_multipart(TYPE, body, 2)
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(interval)
    assert turns - before > 20


@pytest.mark.parametrize("boundary", ["x" * 71, "ä", '""', ""])
def test_a_boundary_that_is_none_is_refused(boundary: str) -> None:
    with pytest.raises(RequestError, match="has no valid boundary"):
        parse_multipart(f"multipart/form-data; boundary={boundary}", f"--{boundary}--".encode(), 2)


@pytest.mark.parametrize("boundary", ["a", '"a b"', "a; charset=x", "A", '"a\\"b"', "=a=", "x" * 70])
def test_a_boundary_is_what_the_standard_library_reads(boundary: str) -> None:
    message = Message()
    message["content-type"] = f"multipart/form-data; x=y; Boundary={boundary}"
    assert _parameters(message["content-type"])["boundary"] == message.get_boundary()


TOKEN = st.text("ab-_.~!", min_size=1, max_size=3)
QUOTED = st.text("ab ;='/", max_size=6)


@given(st.dictionaries(TOKEN, TOKEN | QUOTED, max_size=4))
@example({"a": ";"})
def test_parameters_are_what_the_standard_library_reads(given: dict[str, str]) -> None:
    message = Message()
    message["content-type"] = "; ".join(["a/b", *(f'{name}="{value}"' for name, value in given.items())])
    found = dict(message.get_params(failobj=[])[1:])
    assert _parameters(message["content-type"]) == {name.lower(): value for name, value in found.items()}


@pytest.mark.parametrize("start", ["x", "x=", 'x="'])
@pytest.mark.parametrize("mark", [";", '"', "\\", " ", "=", "; a=", ';"', '; a="', "a"])
def test_a_long_header_is_read_once(start: str, mark: str) -> None:
    """The standard library would take minutes for some."""
    assert _parameters(f"form-data; name=a; {start}" + mark * 300_000)["name"] == "a"
