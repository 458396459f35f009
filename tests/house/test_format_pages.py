"""The pages that readers outside vitx rely on name every field that vitx writes; an unnamed one must be refused."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from vitx.core.bundle import Manifest, OutputSpec, Provenance
from vitx.core.certificate import Certificate, Executable, OutputVerdict, Verdict
from vitx.train.study.result import StudyResult

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("record", "pages"),
    [
        (Manifest, ["bundle.md"]),
        (OutputSpec, ["bundle.md"]),
        (Provenance, ["bundle.md"]),
        (Certificate, ["bundle.md", "parity.md"]),
        (Verdict, ["bundle.md", "parity.md"]),
        (Executable, ["bundle.md"]),
        (OutputVerdict, ["bundle.md"]),
        (StudyResult, ["studies.md"]),
    ],
)
def test_a_page_names_every_field(record: type[BaseModel], pages: list[str]) -> None:
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in pages)
    unnamed = [name for name in record.model_fields if f"`{name}`" not in text]
    assert not unnamed, f"{' and '.join(pages)} do not name {unnamed} of {record.__name__}"


def test_a_page_names_the_evidence_of_every_verdict() -> None:
    text = (DOCS / "bundle.md").read_text(encoding="utf-8")
    kinds = get_args(Verdict.model_fields["evidence"].annotation)
    assert [kind for kind in kinds if f"`{kind}`" not in text] == []
