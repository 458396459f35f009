"""Every relative link of the README and docs leads to a file and a heading that exist; the index links every page."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, spaces become hyphens, punctuation is dropped."""
    headings = re.findall(r"^#{1,6} +(.*?) *#*$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{page.name} links to {target}, which is outside the repository"
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}: {file.name} has no such heading"


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / target).resolve() for target in links(DOCS / "index.md")}
    missing = [page.name for page in PAGES if page.resolve() not in listed and page.name != "index.md"]
    assert not missing, f"docs/index.md does not link {missing}"


def test_the_index_is_linked_from_the_readme() -> None:
    assert "docs/index.md" in set(links(ROOT / "README.md"))


def test_sections_that_the_code_cites_exist() -> None:
    """`docs/maths.md §4` in a comment or a test."""
    headings = set(re.findall(r"^#{2,3} ([\d.]+?)\.? ", text_of(DOCS / "maths.md"), re.MULTILINE))
    cited: dict[str, str] = {}
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        if (
            ROOT / name
        ).is_file():  # git also lists symbolic links to folders, and files that were removed but not committed
            for section in re.findall(r"docs/maths\.md §([\d.]*\d)", (ROOT / name).read_text(encoding="utf-8")):
                cited[section] = name
    assert cited, "no file cites docs/maths.md"
    wrong = {section: name for section, name in cited.items() if section not in headings}
    assert not wrong, f"docs/maths.md has no section {wrong}"


def test_lists_of_links_are_read() -> None:
    """The pattern itself: titles and angle brackets are not part of a target."""
    assert LINK.findall('[a](b.md) ![c](<d.png>) [e](f.md#g "h")') == ["b.md", "d.png", "f.md#g"]
