"""`vitx models`: the networks vitx registers with timm, one of them in full, and published checkpoints converted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Json
from vitx.core.console import print_json, print_result, print_table
from vitx.core.errors import InputError

_EXAMPLE = "vitx models convert FILE.pth --as deepvit_s"


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME | convert", help="A network to show in full, or 'convert'.")
    ] = None,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The checkpoint to convert.")] = None,
    network: Annotated[
        str | None, typer.Option("--as", help="With convert: the network the file was trained as.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="With convert: FILE.safetensors by default.")] = None,
    as_json: Json = False,
) -> None:
    """List the networks, show one in full, or convert a published checkpoint: `convert FILE.pth --as NAME`."""
    if name == "convert":
        if file is None or network is None:
            raise InputError(f"convert needs a file and the network: {_EXAMPLE}")
        _convert(file, network, out or file.with_suffix(".safetensors"), as_json=as_json)
    elif file is not None or network is not None or out is not None:
        otherwise = f": {_EXAMPLE}" if name is None else f", not with '{name}'"
        raise InputError(f"FILE, --as and --out go with 'convert'{otherwise}")
    elif name is None:
        _list(as_json=as_json)
    else:
        _show(name, as_json=as_json)


def _list(*, as_json: bool) -> None:
    # The table in the package, read without importing the networks: the list needs no PyTorch.
    zoo = json.loads((Path(__file__).parents[1] / "models" / "zoo.json").read_bytes())
    if as_json:
        print_json(zoo)
        return
    rows = [(net["name"], net["parameters"] / 1e6, net["gmacs"], net["tokens"] or "", net["image_size"]) for net in zoo]
    print_table("vitx models", ("name", "parameters (M)", "GMACs", "tokens", "image size"), rows)


def _show(name: str, *, as_json: bool) -> None:
    from vitx.models.network_summary import summarize

    print_result(name, summarize(name).model_dump(), as_json=as_json)


def _convert(file: Path, network: str, out: Path, *, as_json: bool) -> None:
    from vitx.core.files import check_file
    from vitx.core.run import ModelSpec
    from vitx.models import build_model, load_public_checkpoint
    from vitx.models.public_checkpoint import classes_in, save_weights

    check_file(out, f"{network}.safetensors")
    if out.exists() and out.samefile(file):
        raise InputError(f"'{out}' is the input itself: choose another --out")
    model = build_model(ModelSpec(name=network, num_classes=classes_in(file, network)))
    report = load_public_checkpoint(model, file)
    save_weights(model, out)
    if as_json:
        print_json({"out": str(out), "network": network, **report.as_dict()})
        return
    for line in report.lines():
        print(line)
    print(f"{out}: {network}, {len(model.state_dict())} tensors")
