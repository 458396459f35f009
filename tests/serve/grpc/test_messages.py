"""The messages of the gRPC service against those of NVIDIA's client, which is in the same process."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from vitx.serve.grpc import messages
from vitx.serve.grpc.messages import message_class

FOLDER = Path(messages.__file__).parent
NOT_TRITONS = ("Empty", "HealthCheckRequest", "HealthCheckResponse")


def message_names(among: Iterable[Descriptor], outer: str = "") -> Iterator[str]:
    for message in among:
        if not message.GetOptions().map_entry:
            yield outer + message.name
            yield from message_names(message.nested_types, f"{outer}{message.name}.")


NAMES = [*message_names(message_class("Empty").DESCRIPTOR.file.message_types_by_name.values())]


def tritons(name: str) -> Any:
    first, *inner = name.split(".")
    found: Any = getattr(service_pb2, first, None) or getattr(model_config_pb2, first)
    for part in inner:
        found = getattr(found, part)
    return found


def test_the_descriptor_is_what_the_proto_file_compiles_to(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    compiled = tmp_path / "inference.desc"
    command = ["-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={compiled}", "inference.proto"]
    subprocess.run([sys.executable, *command], check=True)
    kept = FileDescriptorSet.FromString((FOLDER / compiled.name).read_bytes())
    assert kept == FileDescriptorSet.FromString(compiled.read_bytes())


def signature(field: FieldDescriptor) -> tuple[object, ...]:
    of, group = field.message_type or field.enum_type, field.containing_oneof
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    choice = group is not None and group.name == "parameter_choice"
    return field.name, field.type, field.is_repeated, of and of.name, is_map, choice


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_TRITONS])
def test_every_field_is_tritons(name: str) -> None:
    fields = {field.number: signature(field) for field in tritons(name).DESCRIPTOR.fields}
    for field in message_class(name).DESCRIPTOR.fields:
        assert signature(field) == fields[field.number]


def test_the_values_of_enums_are_tritons() -> None:
    tensor = message_class("ModelInput").DESCRIPTOR.fields_by_name
    for field, enum in (("data_type", model_config_pb2.DataType), ("format", model_config_pb2.ModelInput.Format)):
        for value in tensor[field].enum_type.values:
            assert enum.Value(value.name) == value.number


def test_a_request_of_tritons_client_reads_the_same() -> None:
    request = service_pb2.ModelInferRequest(model_name="tiny", id="7", raw_input_contents=[b"abc"])
    request.inputs.add(name="images", datatype="UINT8", shape=[1, 3])
    request.parameters["priority"].uint64_param = 2
    read = message_class("ModelInferRequest").FromString(request.SerializeToString())
    assert (read.model_name, read.id, list(read.raw_input_contents)) == ("tiny", "7", [b"abc"])
    assert (read.inputs[0].name, list(read.inputs[0].shape)) == ("images", [1, 3])
    assert read.parameters["priority"].WhichOneof("parameter_choice") == "uint64_param"
    assert read.SerializeToString(deterministic=True) == request.SerializeToString(deterministic=True)
