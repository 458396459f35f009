"""The messages of `inference.GRPCInferenceService`, built when this file is imported.

Names, numbers and types are those of Triton's grpc_service.proto and model_config.proto; fields that this server
neither reads nor writes are left out, which the wire format allows. Generated code would tie the package to one range
of protobuf versions, and would claim Triton's message names in the one pool that all generated code of a process
shares: a program could then not import both this server and `tritonclient.grpc`. These messages have a pool of their
own.
"""

import re
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"

# Message → fields in the notation of a .proto file; "Outer.Inner" is a message inside another.
_FIELDS: Final = {
    "Empty": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": "string name = 1; string version = 2",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataRequest": "string name = 1; string version = 2",
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3; "
    "repeated ModelMetadataResponse.TensorMetadata inputs = 4; "
    "repeated ModelMetadataResponse.TensorMetadata outputs = 5",
    "ModelMetadataResponse.TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "InferParameter": "oneof bool bool_param = 1; oneof int64 int64_param = 2; oneof string string_param = 3; "
    "oneof double double_param = 4; oneof uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2; "
    "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; "
    "repeated float fp32_contents = 6; repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "ModelInferRequest": "string model_name = 1; string model_version = 2; string id = 3; "
    "map InferParameter parameters = 4; repeated ModelInferRequest.InferInputTensor inputs = 5; "
    "repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6; repeated bytes raw_input_contents = 7",
    "ModelInferRequest.InferInputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3; "
    "map InferParameter parameters = 4; InferTensorContents contents = 5",
    "ModelInferRequest.InferRequestedOutputTensor": "string name = 1; map InferParameter parameters = 2",
    "ModelInferResponse": "string model_name = 1; string model_version = 2; string id = 3; "
    "map InferParameter parameters = 4; repeated ModelInferResponse.InferOutputTensor outputs = 5; "
    "repeated bytes raw_output_contents = 6",
    "ModelInferResponse.InferOutputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3; "
    "map InferParameter parameters = 4",
    "ModelStreamInferResponse": "string error_message = 1; ModelInferResponse infer_response = 2",
    "ModelConfigRequest": "string name = 1; string version = 2",
    "ModelConfigResponse": "ModelConfig config = 1",
    "ModelConfig": "string name = 1; string platform = 2; int32 max_batch_size = 4; repeated ModelInput input = 5; "
    "repeated ModelOutput output = 6; ModelDynamicBatching dynamic_batching = 11; string backend = 17",
    "ModelInput": "string name = 1; enum DataType data_type = 2; enum Format format = 3; repeated int64 dims = 4",
    "ModelOutput": "string name = 1; enum DataType data_type = 2; repeated int64 dims = 3",
    "ModelDynamicBatching": "repeated int32 preferred_batch_size = 1; uint64 max_queue_delay_microseconds = 2; "
    "uint64 priority_levels = 4; uint64 default_priority_level = 5",
    "ModelStatisticsRequest": "string name = 1; string version = 2",
    "ModelStatisticsResponse": "repeated ModelStatistics model_stats = 1",
    "ModelStatistics": "string name = 1; string version = 2; uint64 last_inference = 3; uint64 inference_count = 4; "
    "uint64 execution_count = 5; InferStatistics inference_stats = 6; repeated InferBatchStatistics batch_stats = 7",
    "StatisticDuration": "uint64 count = 1; uint64 ns = 2",
    "InferStatistics": "StatisticDuration success = 1; StatisticDuration fail = 2; StatisticDuration queue = 3; "
    "StatisticDuration compute_input = 4; StatisticDuration compute_infer = 5; StatisticDuration compute_output = 6; "
    "StatisticDuration cache_hit = 7; StatisticDuration cache_miss = 8",
    "InferBatchStatistics": "uint64 batch_size = 1; StatisticDuration compute_input = 2; "
    "StatisticDuration compute_infer = 3; StatisticDuration compute_output = 4",
    "RepositoryIndexRequest": "string repository_name = 1; bool ready = 2",
    "RepositoryIndexResponse": "repeated RepositoryIndexResponse.ModelIndex models = 1",
    "RepositoryIndexResponse.ModelIndex": "string name = 1; string version = 2; string state = 3; string reason = 4",
    "ModelRepositoryParameter": "oneof bool bool_param = 1; oneof int64 int64_param = 2; "
    "oneof string string_param = 3; oneof bytes bytes_param = 4",
    "RepositoryModelLoadRequest": "string repository_name = 1; string model_name = 2; "
    "map ModelRepositoryParameter parameters = 3",
    "RepositoryModelUnloadRequest": "string repository_name = 1; string model_name = 2; "
    "map ModelRepositoryParameter parameters = 3",
    "SystemSharedMemoryStatusRequest": "string name = 1",
    "SystemSharedMemoryStatusResponse": "map SystemSharedMemoryStatusResponse.RegionStatus regions = 1",
    "SystemSharedMemoryStatusResponse.RegionStatus": "string name = 1; string key = 2; uint64 offset = 3; "
    "uint64 byte_size = 4",
    "SystemSharedMemoryRegisterRequest": "string name = 1; string key = 2; uint64 offset = 3; uint64 byte_size = 4",
    "SystemSharedMemoryUnregisterRequest": "string name = 1",
    # grpc.health.v1; its two messages are on the wire what they are there.
    "HealthCheckRequest": "string service = 1",
    "HealthCheckResponse": "int32 status = 1",
}
_ENUMS: Final = {
    "DataType": {"TYPE_INVALID": 0, "TYPE_UINT8": 2, "TYPE_FP32": 11},
    "Format": {"FORMAT_NONE": 0, "FORMAT_NHWC": 1},
}
_FIELD = re.compile(r"(?:(repeated|oneof|map|enum) )?([\w.]+) (\w+) = (\d+)")
_Field = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="vitx/inference.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        file.enum_type.add(name=name, value=[{"name": value, "number": number} for value, number in values.items()])
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name in sorted(_FIELDS, key=lambda name: name.count(".")):  # an outer message before those inside it
        outer, _, inner = name.rpartition(".")
        messages[name] = messages[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, fields in _FIELDS.items():
        for field in filter(None, fields.split("; ")):
            _add_field(messages[name], name, field)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, path: str, notation: str) -> None:
    match = _FIELD.fullmatch(notation)
    assert match is not None, notation
    kind, type_name, name, number = match.groups()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind in ("repeated", "map"):
        field.label = _Field.LABEL_REPEATED
    if kind == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind == "map":
        type_name = f"{path}.{_add_map_entry(message, name, type_name)}"
    _set_type(field, type_name, is_enum=kind == "enum")


def _add_map_entry(message: descriptor_pb2.DescriptorProto, field: str, value: str) -> str:
    """Add the message that a map from strings is a list of; return its name."""
    entry = message.nested_type.add(name=f"{field.title()}Entry")
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL)
    _set_type(key, "string", is_enum=False)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), value, is_enum=False)
    return str(entry.name)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, type_name: str, *, is_enum: bool) -> None:
    if type_name.islower():
        field.type = _Field.Type.Value(f"TYPE_{type_name.upper()}")
        return
    field.type = _Field.TYPE_ENUM if is_enum else _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{type_name}"


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def message_class(name: str) -> Any:
    """Return the class of a message, such as "ModelInferRequest"."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def names() -> list[str]:
    return list(_FIELDS)
