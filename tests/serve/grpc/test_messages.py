"""The messages of the gRPC service against those of NVIDIA's client, which is in the same process."""

import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from vitx.serve.errors import RequestError
from vitx.serve.grpc import messages
from vitx.serve.grpc.messages import MOST_FIELDS, MOST_NESTED, _fields, check_fields, encoding_of, message_class
from vitx.serve.protocol.json_pixels import SMALL_BYTES

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


def message(**fields: int) -> Any:
    """A request of 9 KB with so many entries of each kind."""
    request = message_class("ModelInferRequest")(model_name="m" * 9000)
    tensor = request.inputs.add(name="images", shape=[1, 2, 3])
    tensor.contents.uint_contents.extend([7] * fields.get("numbers", 1))
    for number in range(fields.get("parameters", 0)):
        tensor.parameters[f"{number}"].double_param = 1.0
    for _ in range(fields.get("outputs", 0)):
        request.outputs.add(name="x")
    request.raw_input_contents.extend([b""] * fields.get("raw", 0))
    return request


@pytest.mark.parametrize(("kind", "each"), [("parameters", 1), ("raw", 1), ("outputs", 2)])
def test_the_fields_of_a_message_are_counted_at_all_depths(kind: str, each: int) -> None:
    others = 2 + 3 + 1  # the name and the input, the input's name, shape and contents, and the numbers together
    fits = (MOST_FIELDS - others) // each
    check_fields(message(**{kind: fits}).SerializeToString())
    with pytest.raises(RequestError, match=f"^a message of more than {MOST_FIELDS} fields$") as refused:
        check_fields(message(**{kind: fits + 1}).SerializeToString())
    assert refused.value.status == 413


def test_numbers_that_are_sent_together_are_one_field() -> None:
    check_fields(message(numbers=100_000).SerializeToString())
    alone = b"\x2a\xa3\x1f" + b"\x2a\xa0\x1f" + b"\x30\x07" * 2000  # an input, its contents, numbers with a tag each
    with pytest.raises(RequestError, match=f"^a message of more than {MOST_FIELDS} fields$"):
        check_fields(alone)


@pytest.mark.parametrize(
    "field",
    [
        b"\x09" + bytes(8),
        b"\x0d" + bytes(4),
        b"\x08\x01",
        b"\x08\xff\xff\xff\x01",
        b"\x12\x03abc",
        b"\x3a\x80\x01" + bytes(128),
    ],
)
def test_fields_of_every_wire_type_are_counted(field: bytes) -> None:
    check_fields(field * MOST_FIELDS)
    with pytest.raises(RequestError, match=r" fields$"):
        check_fields(field * (MOST_FIELDS + 1))
    with pytest.raises(RequestError, match=r" fields$"):
        check_fields(b"\x0b" + field * MOST_FIELDS + b"\x0c")  # a group has a field for each of its ends


def test_numbers_of_another_type_are_no_message() -> None:
    """Field 5 of an input's contents are uint64 numbers, together."""
    inner = b"\x2a\xa0\x1f" + b"\x08\x01" * 2000
    assert _fields(b"\x2a\xa6\x1f" + b"\x2a\xa3\x1f" + inner) == (3, 4000, 0)


def test_a_message_has_little_besides_its_tensors() -> None:
    """As over HTTP; each reply has its request's id."""
    fits = message(raw=1)
    fits.id = "i" * (SMALL_BYTES - 9000)
    check_fields(fits.SerializeToString())
    fits.id += "i"
    with pytest.raises(RequestError, match=f"^a message with {SMALL_BYTES + 1} bytes besides its tensors") as refused:
        check_fields(fits.SerializeToString())
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 10**6, b"\x12\xff\xff\xff\xff\x0f" * 2000, b"\x0a" * 3, b"\x2a\x88\x27" + b"\x2a" * 5000],
)
def test_what_is_no_message_is_left_to_the_parser(data: bytes) -> None:
    check_fields(data)
    assert _fields(data)[0] <= MOST_FIELDS


@pytest.mark.parametrize(("compressed", "what"), [(True, "a compressed message"), (False, "a message")])
def test_numbers_and_names_inside_a_message_are_few(compressed: bool, what: str) -> None:
    others, most = len("images") + 3, MOST_NESTED[compressed]  # the input's name, and its shape
    fits = most - others
    check_fields(message(numbers=fits).SerializeToString(), compressed=compressed)
    named = message(numbers=fits)
    named.outputs.add(name="x")
    for request in (message(numbers=fits + 1), named):
        with pytest.raises(RequestError, match=f"^{what} with {most + 1} bytes of numbers and names") as refused:
            check_fields(request.SerializeToString(), compressed=compressed)
        assert refused.value.status == 413
    pixels = message(raw=0)
    pixels.raw_input_contents.append(bytes(2 * most))
    check_fields(pixels.SerializeToString(), compressed=compressed)


@pytest.mark.parametrize(("wbits", "encoding"), [(31, "gzip"), (15, "deflate")])
@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_a_compressed_message_is_told_by_its_first_bytes(wbits: int, encoding: str, level: int) -> None:
    stream = zlib.compressobj(level, wbits=wbits)
    assert encoding_of(stream.compress(b"abc" * 100) + stream.flush()) == encoding


def test_no_message_begins_as_a_compressed_one() -> None:
    for name in NAMES:
        assert 15 not in [field.number for field in message_class(name).DESCRIPTOR.fields]
    with pytest.raises(DecodeError):  # of no type of field
        message_class("ModelInferRequest").FromString(b"\x1f\x8b\x08")
    for data in (b"", b"\x0a", b"\x1f", b"\x78", b"\x78\x00", message().SerializeToString()):
        assert encoding_of(data) is None
