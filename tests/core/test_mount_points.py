"""A mount point, such as a container's volume, cannot be renamed to."""

from pathlib import Path

import pytest

from vitx.core.errors import InputError
from vitx.core.files import staged_folder


@pytest.mark.parametrize("replaces", [False, True])
def test_a_mount_point_is_refused_before_anything_is_staged(
    tmp_path: Path, replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, link = tmp_path / "volume", tmp_path / "link"
    volume.mkdir()
    link.symlink_to("volume")
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == volume)
    for target in (volume, link):
        with pytest.raises(InputError, match=r"volume' is a mount point, .*: give a folder below it$"):  # noqa: SIM117
            with staged_folder(target, replaces=replaces):
                raise AssertionError("nothing is staged")
    with staged_folder(volume / "run", replaces=replaces) as stage:
        (stage / "file").touch()
    assert sorted(tmp_path.rglob("*")) == [link, volume, volume / "run", volume / "run" / "file"]
