"""Names that are no images: counted by suffix, a few of them kept, however many there are."""

from vitx.predict.inputs.skipped import MAX_NAMES, MAX_SUFFIXES, NONE_SKIPPED, SkippedNames


def of(*names: str) -> SkippedNames:
    skipped = SkippedNames()
    for name in names:
        skipped.add(name)
    return skipped


def test_a_suffix_is_the_last_one_of_the_name_in_lower_case() -> None:
    skipped = of("a/b.TXT", "c.txt", "d.tar.GZ", "e.x/README", ".git", "f/.hidden.txt", ".h/i.txt")
    assert skipped.by_suffix == {".txt": 3, ".gz": 1, "(no suffix)": 1, "(hidden)": 2}
    assert skipped.count == 7
    assert skipped.first == ["a/b.TXT", "c.txt", "d.tar.GZ", "e.x/README", ".git"]


def test_a_name_is_an_example_once() -> None:
    assert of("a.txt", "a.txt", "b.txt").first == ["a.txt", "b.txt"]
    assert of("a.txt", "a.txt", "b.txt").by_suffix == {".txt": 3}


def test_of_many_suffixes_the_first_are_named() -> None:
    skipped = of(*(f"a.{index}" for index in range(MAX_SUFFIXES)))
    assert list(skipped.by_suffix) == [f".{index}" for index in range(MAX_SUFFIXES)]
    for name in ("a.0", "b.x", "c.y", "d.1"):
        skipped.add(name)
    assert (skipped.by_suffix[".0"], skipped.by_suffix[".1"], skipped.by_suffix["(other)"]) == (2, 2, 2)
    assert len(skipped.by_suffix) == MAX_SUFFIXES + 1
    assert len(skipped.first) == MAX_NAMES


def test_counts_are_added_and_examples_taken_while_there_is_room() -> None:
    skipped = of("a.txt", "b.txt", "c.md")
    skipped.merge(of("d.txt", "a.txt", "e.json", "f.json"))
    assert skipped.by_suffix == {".txt": 4, ".md": 1, ".json": 2}
    assert skipped.first == ["a.txt", "b.txt", "c.md", "d.txt", "e.json"]
    skipped.merge(SkippedNames())
    assert skipped.count == 7
    many = of(*(f"a.{index}" for index in range(MAX_SUFFIXES)))
    many.merge(SkippedNames({".x": 3, ".0": 2}))
    assert (many.by_suffix["(other)"], many.by_suffix[".0"]) == (3, 3)


def test_the_default_holds_nothing() -> None:
    assert (NONE_SKIPPED.by_suffix, NONE_SKIPPED.first, NONE_SKIPPED.count) == ({}, [], 0)
