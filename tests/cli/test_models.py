"""What `vitx models` lists, shows and converts, with networks that are known here."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fixture import Vitx
from vitx.cli import models
from vitx.core.run import ModelSpec

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was done and printed, each by its name."""
    made: Calls = []
    network = SimpleNamespace(state_dict=lambda: {"a": 0, "b": 1})
    report = SimpleNamespace(lines=lambda: ["one line", "another"], as_dict=lambda: {"missing": []})

    def noted(name: str, found: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            made.append((name, *given, *options.items()))
            return found

        return call

    summary = SimpleNamespace(model_dump=lambda: {"tokens": 4})
    monkeypatch.setattr("vitx.models.build_model", noted("build", network))
    monkeypatch.setattr("vitx.models.load_public_checkpoint", lambda _, path: noted("load", report)(path))
    monkeypatch.setattr("vitx.models.public_checkpoint.classes_in", noted("classes", 7))
    monkeypatch.setattr("vitx.models.public_checkpoint.save_weights", lambda _, path: made.append(("save", path)))
    monkeypatch.setattr("vitx.models.network_summary.summarize", noted("summarize", summary))
    monkeypatch.setattr(models, "print_table", noted("table", None))
    monkeypatch.setattr(models, "print_result", noted("result", None))
    return made


def test_the_list_is_that_of_the_package(vitx: Vitx, calls: Calls) -> None:
    zoo = json.loads((Path(models.__file__).parents[1] / "models/zoo.json").read_text())
    assert vitx("models") == (0, "", "")
    ((name, title, columns, rows),) = calls
    assert (name, title) == ("table", "vitx models")
    assert columns == ("name", "parameters (M)", "GMACs", "tokens", "image size")
    assert len(rows) == len(zoo) > 10
    for row, of in zip(rows, zoo, strict=True):
        tokens = "" if of["tokens"] is None else of["tokens"]
        assert row == (of["name"], of["parameters"] / 1e6, of["gmacs"], tokens, of["image_size"])
    assert json.loads(vitx("models", "--json")[1]) == zoo
    assert len(calls) == 1


def test_a_network_in_full(vitx: Vitx, calls: Calls) -> None:
    for options, as_json in (((), False), (("--json",), True)):
        assert vitx("models", "deit_digits", *options) == (0, "", "")
        assert calls == [("summarize", "deit_digits"), ("result", "deit_digits", {"tokens": 4}, ("as_json", as_json))]
        calls.clear()


def test_a_checkpoint_is_converted_beside_itself_or_elsewhere(vitx: Vitx, calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "public.pth"
    file.touch()
    code, out, err = vitx("models", "convert", file, "--as", "net")
    written = tmp_path / "public.safetensors"
    assert (code, out.splitlines(), err) == (0, ["one line", "another", f"{written}: net, 2 tensors"], "")
    built = ("build", ModelSpec(name="net", num_classes=7))
    assert calls == [("classes", file, "net"), built, ("load", file), ("save", written)]
    calls.clear()
    other = tmp_path / "other.safetensors"
    other.touch()
    code, out, err = vitx("models", "convert", file, "--as", "net", "--out", other, "--json")
    assert (code, json.loads(out), err) == (0, {"out": str(other), "network": "net", "missing": []}, "")
    assert calls[-1] == ("save", other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            (("convert", *rest), "convert needs a file and the network: vitx models convert FILE.pth --as deepvit_s")
            for rest in ((), ("f.pth",), ("--as", "net"))
        ),
        *(
            (("net", *rest), "FILE, --as and --out go with 'convert', not with 'net'")
            for rest in (("f.pth",), ("--as", "x"), ("--out", "x"))
        ),
        (("--out", "x"), "FILE, --as and --out go with 'convert': vitx models convert FILE.pth --as deepvit_s"),
        (
            ("convert", "f.pth", "--as", "net", "--out", "f.pth"),
            "'f.pth' is the input itself: choose another --out",
        ),
        (("convert", "f.safetensors", "--as", "net"), "'f.safetensors' is the input itself: choose another --out"),
        (("convert", "f.pth", "--as", "net", "--out", "."), "'.' is a folder: expected a file name, such as net.saf"),
    ],
)
def test_what_is_refused(
    vitx: Vitx,
    calls: Calls,
    given: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("f.pth", "f.safetensors"):
        Path(name).touch()
    code, out, err = vitx("models", *given)
    assert (code, out, err[: len(said) + 7]) == (2, "", f"error: {said}")
    assert calls == []
