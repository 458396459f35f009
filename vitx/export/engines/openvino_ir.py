"""OpenVINO IR from a bundle's graph."""

from pathlib import Path

from vitx.core.errors import missing_package
from vitx.core.files import staged_folder

IR_FOLDER = "openvino"


def openvino_from_onnx(onnx_path: Path, folder: Path) -> list[Path]:
    """Convert a graph to OpenVINO IR: `model.xml` and `model.bin` in `folder`, which appears whole.

    Weights keep the graph's precision: by default `save_model` would compress them to float16. Raises
    EnvironmentMissing when OpenVINO is not installed.
    """
    try:
        import openvino
    except ModuleNotFoundError:
        raise missing_package("openvino", "openvino") from None
    model = openvino.convert_model(str(onnx_path))
    with staged_folder(folder) as stage:
        openvino.save_model(model, str(stage / "model.xml"), compress_to_fp16=False)
    return sorted(folder.iterdir())
