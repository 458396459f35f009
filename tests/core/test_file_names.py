"""File names that are not UTF-8, as text."""

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitx.core.files import escape_invalid_utf8, unescape_invalid_utf8


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.png", "a.png"),
        ("ä\\.png", "ä\\.png"),
        ("\udcff\\.png", "\\xff\\\\.png"),
        ("\\xff\\.png", "\\\\xff\\\\.png"),
        ("\\xfg.png", "\\xfg.png"),
        ("a\\b/c", "a\\b/c"),
        ("a\\x0g", "a\\x0g"),
        ("a\\xff\\b", "a\\\\xff\\\\b"),
        ("ö\\", "ö\\"),
        ("\udcff\\ö", "\\xff\\\\ö"),
        ("plain\\xff", "plain\\\\xff"),
        ("a\\b\\xyz ö", "a\\b\\xyz ö"),
    ],
)
def test_names_that_are_not_utf8_are_told_apart_from_those_that_look_like_them(name: str, told: str) -> None:
    assert escape_invalid_utf8(name) == told


@given(st.lists(st.sampled_from([b"\xff", b"\xc3", b"\\", b"x", b"f", b"0", b"a", "ö".encode()]), max_size=9))
def test_a_name_can_be_told_from_its_text(parts: list[bytes]) -> None:
    name = b"".join(parts)
    text = escape_invalid_utf8(os.fsdecode(name))
    text.encode()
    assert unescape_invalid_utf8(text) == os.fsdecode(name)
    if re.search(r"\\x[0-9a-f]{2}", text):
        found = re.sub(
            rb"\\(\\|x([0-9a-f]{2}))", lambda m: bytes.fromhex(m[2].decode()) if m[2] else b"\\", text.encode()
        )
    else:
        found = text.encode()
    assert found == name
