"""`vitx doctor`: what this machine and installation can do."""

from importlib.util import find_spec

from vitx.cli.options import Json
from vitx.core.console import print_fields, print_json, print_table

# Of each extra: packages that are there together only where all of it is, and the verbs that need it.
EXTRAS = {
    "train": (("torch", "sklearn", "tensorboard"), "vitx train, vitx eval RUN"),
    "analyze": (("matplotlib", "sklearn", "tensorboard"), "vitx analyze"),
    "export": (("onnxscript", "timm"), "vitx export, vitx parity RUN BUNDLE"),
    "serve": (("starlette", "pyarrow", "prometheus_client"), "vitx serve, vitx predict"),
    "grpc": (("starlette", "grpc"), "vitx serve --grpc-port"),
    "ray": (("starlette", "ray"), "--ray"),
    "sign": (("model_signing", "OpenSSL"), "--sign, --require-signature"),
    "huggingface": (("datasets",), "image sets saved by datasets"),
}


def command(as_json: Json = False) -> None:
    """Say what this machine and installation can do, which runtimes can be used, and what to install for the rest."""
    from vitx import __version__
    from vitx.core.machine import describe_machine, installed_versions, local_gpus
    from vitx.runtimes.requirements import RUNTIMES, why_unusable
    from vitx.runtimes.tensorrt_versions import tensorrt_report

    extras = {
        name: "installed"
        if all(map(find_spec, packages))
        else f"not installed, needed by {verbs}: pip install 'vitx[{name}]'"
        for name, (packages, verbs) in EXTRAS.items()
    }
    runtimes = {name: why_unusable(name) for name in RUNTIMES}
    report: dict[str, object] = {
        "vitx": __version__,
        **describe_machine(),
        "gpus": len(local_gpus()),
        **{f"extra {name}": state for name, state in extras.items()},
        **{name: version for name, version in installed_versions().items() if name != "vitx"},
        **tensorrt_report(),
    }
    if as_json:
        usable = {name: {"usable": not reason, "reason": reason} for name, reason in runtimes.items()}
        print_json({**report, "runtimes": usable})
        return
    print_fields("vitx doctor", report)
    print_table(
        "runtimes",
        ("runtime", "runs", "usable here"),
        [(name, RUNTIMES[name].runs, f"no: {reason}" if reason else "yes") for name, reason in runtimes.items()],
    )
