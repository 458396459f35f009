"""Names in an input that are no images, counted by their suffix, so that none of them goes unmentioned."""

from dataclasses import dataclass, field
from pathlib import PurePosixPath

# Of each are kept: suffixes beside OTHER, names as examples.
MAX_SUFFIXES, MAX_NAMES = 20, 5
HIDDEN, NO_SUFFIX, OTHER = "(hidden)", "(no suffix)", "(other)"


@dataclass
class SkippedNames:
    """by_suffix: how many names. first: a few of them. A hidden folder is one name."""

    by_suffix: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.by_suffix.values())

    def add(self, name: str, *, hidden: bool = False) -> None:
        """hidden: because of a folder in it; of its last part it is seen here."""
        path = PurePosixPath(name)
        suffix = HIDDEN if hidden or path.name.startswith(".") else path.suffix.lower() or NO_SUFFIX
        self.merge(SkippedNames({suffix: 1}, [name]))

    def merge(self, other: "SkippedNames") -> None:
        for suffix, count in other.by_suffix.items():
            place = suffix if suffix in self.by_suffix or len(self.by_suffix) < MAX_SUFFIXES else OTHER
            self.by_suffix[place] = self.by_suffix.get(place, 0) + count
        for name in other.first:
            if len(self.first) < MAX_NAMES and name not in self.first:
                self.first.append(name)


# As a default: not to be added to.
NONE_SKIPPED = SkippedNames()
