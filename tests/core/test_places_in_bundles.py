"""Where results may be written."""

from pathlib import Path

import pytest

from vitx.core.bundle import refuse_in_bundle
from vitx.core.errors import InputError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "b.vitx").mkdir()
    for name in ("manifest.json", "model.onnx"):
        (tmp_path / "b.vitx" / name).write_text("")
    return tmp_path / "b.vitx"


def test_nothing_is_added_to_a_bundle_by_any_way_to_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle.parent / "link").symlink_to(bundle)
    monkeypatch.chdir(bundle.parent)
    for place in ("b.vitx", "b.vitx/plot.png", "b.vitx/new/folder", "link/report.html", "x/../b.vitx/report.html"):
        with pytest.raises(InputError) as caught:
            refuse_in_bundle(Path(place))
        why = f"would add to the bundle '{bundle}', which is refused with files that its manifest does not list"
        assert str(caught.value) == f"'{place}' {why}: choose another place"


def test_beside_a_bundle_is_a_place(bundle: Path) -> None:
    (bundle / "model.onnx").unlink()  # a manifest alone is another program's
    for place in (bundle.parent, bundle.parent / "b.vitx.html", bundle / "report.html"):
        refuse_in_bundle(place)
    assert [path.name for path in bundle.iterdir()] == ["manifest.json"]
