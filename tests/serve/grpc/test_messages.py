"""The messages of the gRPC service against those that NVIDIA's client was generated with."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from vitx.serve.grpc.messages import message_class, names

OURS_ALONE = ("Empty", "HealthCheckRequest", "HealthCheckResponse")


def theirs(name: str) -> Any:
    first, *inner = name.split(".")
    found: Any = getattr(service_pb2, first, None) or getattr(model_config_pb2, first)
    for part in inner:
        found = getattr(found, part)
    return found


def signature(field: FieldDescriptor) -> tuple[object, ...]:
    of, group = field.message_type or field.enum_type, field.containing_oneof
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    choice = group is not None and group.name == "parameter_choice"
    return field.name, field.type, field.is_repeated, of and of.name, is_map, choice


@pytest.mark.parametrize("name", [name for name in names() if name not in OURS_ALONE])
def test_every_field_is_tritons(name: str) -> None:
    fields = {field.number: signature(field) for field in theirs(name).DESCRIPTOR.fields}
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
