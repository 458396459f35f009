"""`vitx models`: the networks vitx registers with timm."""

from vitx.cli.options import Json


def command(as_json: Json = False) -> None:
    """List vitx's networks with their parameters and input size."""
    import timm
    import torch

    import vitx.models as models
    from vitx.core.console import print_json, print_table

    rows = []
    for name in timm.list_models(module=models.registry.__name__.rpartition(".")[2]):
        with torch.device("meta"):
            model = timm.create_model(name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rows.append((name, parameters, model.pretrained_cfg["input_size"][1], len(model.blocks)))
    if as_json:
        print_json([dict(zip(("name", "parameters", "image_size", "blocks"), row, strict=True)) for row in rows])
    else:
        print_table("vitx models", ("name", "parameters", "image size", "blocks"), rows)
