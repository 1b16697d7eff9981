from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_MODE_UNSPECIFIED: _ClassVar[PutMode]
    PUT_MODE_MUST_EXIST: _ClassVar[PutMode]
    PUT_MODE_IF_ABSENT: _ClassVar[PutMode]

class PutState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_STATE_UNSPECIFIED: _ClassVar[PutState]
    PUT_STATE_NOT_HELD: _ClassVar[PutState]
    PUT_STATE_RECEIVING: _ClassVar[PutState]
    PUT_STATE_APPLYING: _ClassVar[PutState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class TrajectoryStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAJECTORY_STATUS_UNSPECIFIED: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_COMPLETED: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_FAILED: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_ABORTED: _ClassVar[TrajectoryStatus]

class IdsSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IDS_SOURCE_UNSPECIFIED: _ClassVar[IdsSource]
    IDS_SOURCE_ENGINE: _ClassVar[IdsSource]
    IDS_SOURCE_RETOKENIZED: _ClassVar[IdsSource]
PUT_MODE_UNSPECIFIED: PutMode
PUT_MODE_MUST_EXIST: PutMode
PUT_MODE_IF_ABSENT: PutMode
PUT_STATE_UNSPECIFIED: PutState
PUT_STATE_NOT_HELD: PutState
PUT_STATE_RECEIVING: PutState
PUT_STATE_APPLYING: PutState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_ABORT: FinishReason
TRAJECTORY_STATUS_UNSPECIFIED: TrajectoryStatus
TRAJECTORY_STATUS_COMPLETED: TrajectoryStatus
TRAJECTORY_STATUS_FAILED: TrajectoryStatus
TRAJECTORY_STATUS_ABORTED: TrajectoryStatus
IDS_SOURCE_UNSPECIFIED: IdsSource
IDS_SOURCE_ENGINE: IdsSource
IDS_SOURCE_RETOKENIZED: IdsSource

class Revision(_message.Message):
    __slots__ = ("epoch", "n")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    n: int
    def __init__(self, epoch: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("client_id", "number", "settled", "retry", "seen", "plane_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    number: int
    settled: int
    retry: bool
    seen: Revision
    plane_id: str
    def __init__(self, client_id: _Optional[str] = ..., number: _Optional[int] = ..., settled: _Optional[int] = ..., retry: bool = ..., seen: _Optional[_Union[Revision, _Mapping]] = ..., plane_id: _Optional[str] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("null_value", "bool_value", "int_value", "float_value", "string_value", "bytes_value", "list_value", "map_value", "tensor_value")
    NULL_VALUE_FIELD_NUMBER: _ClassVar[int]
    BOOL_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    BYTES_VALUE_FIELD_NUMBER: _ClassVar[int]
    LIST_VALUE_FIELD_NUMBER: _ClassVar[int]
    MAP_VALUE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    null_value: bool
    bool_value: bool
    int_value: int
    float_value: float
    string_value: str
    bytes_value: bytes
    list_value: ListValue
    map_value: MapValue
    tensor_value: TensorValue
    def __init__(self, null_value: bool = ..., bool_value: bool = ..., int_value: _Optional[int] = ..., float_value: _Optional[float] = ..., string_value: _Optional[str] = ..., bytes_value: _Optional[bytes] = ..., list_value: _Optional[_Union[ListValue, _Mapping]] = ..., map_value: _Optional[_Union[MapValue, _Mapping]] = ..., tensor_value: _Optional[_Union[TensorValue, _Mapping]] = ...) -> None: ...

class ListValue(_message.Message):
    __slots__ = ("items", "fixed")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    fixed: bool
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., fixed: bool = ...) -> None: ...

class MapValue(_message.Message):
    __slots__ = ("entries",)
    class EntriesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.MessageMap[str, Value]
    def __init__(self, entries: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class TensorValue(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Tags(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.MessageMap[str, Value]
    def __init__(self, values: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("key", "tags", "fields", "lengths")
    class LengthsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    key: str
    tags: Tags
    fields: _containers.RepeatedScalarFieldContainer[str]
    lengths: _containers.ScalarMap[str, int]
    def __init__(self, key: _Optional[str] = ..., tags: _Optional[_Union[Tags, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., lengths: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "dtype", "dims", "ragged_dim", "lengths")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    RAGGED_DIM_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    dims: _containers.RepeatedScalarFieldContainer[int]
    ragged_dim: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., dims: _Optional[_Iterable[int]] = ..., ragged_dim: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("type", "message", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    attributes: _containers.MessageMap[str, Value]
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., attributes: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("plane_id", "revision", "version", "principal", "limits")
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    plane_id: str
    revision: Revision
    version: str
    principal: str
    limits: Limits
    def __init__(self, plane_id: _Optional[str] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., version: _Optional[str] = ..., principal: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_put_bytes", "max_get_bytes", "chunk_bytes", "max_rows", "max_page_size", "resume_s", "absence_s")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    ABSENCE_S_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_put_bytes: int
    max_get_bytes: int
    chunk_bytes: int
    max_rows: int
    max_page_size: int
    resume_s: float
    absence_s: float
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_put_bytes: _Optional[int] = ..., max_get_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_page_size: _Optional[int] = ..., resume_s: _Optional[float] = ..., absence_s: _Optional[float] = ...) -> None: ...

class PutRowsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutRowsHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[PutRowsHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PutRowsHeader(_message.Message):
    __slots__ = ("request", "partition_id", "keys", "tags", "columns", "total_bytes", "mode", "attempt", "return_tags", "resume_offset")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RETURN_TAGS_FIELD_NUMBER: _ClassVar[int]
    RESUME_OFFSET_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[Tags]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    total_bytes: int
    mode: PutMode
    attempt: int
    return_tags: bool
    resume_offset: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., mode: _Optional[_Union[PutMode, str]] = ..., attempt: _Optional[int] = ..., return_tags: bool = ..., resume_offset: _Optional[int] = ...) -> None: ...

class PutRowsResponse(_message.Message):
    __slots__ = ("revision", "tags", "fields")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    tags: _containers.RepeatedCompositeFieldContainer[Tags]
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., tags: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class GetPutProgressRequest(_message.Message):
    __slots__ = ("request", "partition_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ...) -> None: ...

class GetPutProgressResponse(_message.Message):
    __slots__ = ("state", "offset")
    STATE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    state: PutState
    offset: int
    def __init__(self, state: _Optional[_Union[PutState, str]] = ..., offset: _Optional[int] = ...) -> None: ...

class PutTagsRequest(_message.Message):
    __slots__ = ("request", "partition_id", "keys", "tags", "mode", "attempt", "return_tags")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RETURN_TAGS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    tags: _containers.RepeatedCompositeFieldContainer[Tags]
    mode: PutMode
    attempt: int
    return_tags: bool
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., tags: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ..., mode: _Optional[_Union[PutMode, str]] = ..., attempt: _Optional[int] = ..., return_tags: bool = ...) -> None: ...

class PutTagsResponse(_message.Message):
    __slots__ = ("revision", "tags", "fields")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    tags: _containers.RepeatedCompositeFieldContainer[Tags]
    fields: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., tags: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...

class GetRowsRequest(_message.Message):
    __slots__ = ("partition_id", "keys", "fields", "drop_missing")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DROP_MISSING_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    fields: _containers.RepeatedScalarFieldContainer[str]
    drop_missing: bool
    def __init__(self, partition_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., fields: _Optional[_Iterable[str]] = ..., drop_missing: bool = ...) -> None: ...

class GetRowsResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetRowsHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[GetRowsHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class GetRowsHeader(_message.Message):
    __slots__ = ("revision", "keys", "columns", "total_bytes")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    keys: _containers.RepeatedScalarFieldContainer[str]
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    total_bytes: int
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., keys: _Optional[_Iterable[str]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class PutTrajectoriesRequest(_message.Message):
    __slots__ = ("request", "partition_id", "trajectories", "mode", "attempt", "all_or_nothing")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    mode: PutMode
    attempt: int
    all_or_nothing: bool
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., mode: _Optional[_Union[PutMode, str]] = ..., attempt: _Optional[int] = ..., all_or_nothing: bool = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("uid", "session_id", "index", "input_ids", "labels", "logprobs", "prompt_len", "policy_spans", "reward", "finish_reason", "status", "error", "num_turns", "global_steps", "task_name", "data_source", "ids_source", "logprob_kind", "tags", "messages", "extra")
    UID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_SPANS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TASK_NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    IDS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_KIND_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    uid: str
    session_id: int
    index: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    labels: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_len: int
    policy_spans: _containers.RepeatedCompositeFieldContainer[PolicySpan]
    reward: float
    finish_reason: FinishReason
    status: TrajectoryStatus
    error: str
    num_turns: int
    global_steps: int
    task_name: str
    data_source: str
    ids_source: IdsSource
    logprob_kind: str
    tags: Tags
    messages: Value
    extra: Value
    def __init__(self, uid: _Optional[str] = ..., session_id: _Optional[int] = ..., index: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., labels: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., prompt_len: _Optional[int] = ..., policy_spans: _Optional[_Iterable[_Union[PolicySpan, _Mapping]]] = ..., reward: _Optional[float] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., status: _Optional[_Union[TrajectoryStatus, str]] = ..., error: _Optional[str] = ..., num_turns: _Optional[int] = ..., global_steps: _Optional[int] = ..., task_name: _Optional[str] = ..., data_source: _Optional[str] = ..., ids_source: _Optional[_Union[IdsSource, str]] = ..., logprob_kind: _Optional[str] = ..., tags: _Optional[_Union[Tags, _Mapping]] = ..., messages: _Optional[_Union[Value, _Mapping]] = ..., extra: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class PolicySpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class PutTrajectoriesResponse(_message.Message):
    __slots__ = ("revision", "results")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    results: _containers.RepeatedCompositeFieldContainer[TrajectoryResult]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., results: _Optional[_Iterable[_Union[TrajectoryResult, _Mapping]]] = ...) -> None: ...

class TrajectoryResult(_message.Message):
    __slots__ = ("key", "quarantine", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    quarantine: str
    reason: str
    def __init__(self, key: _Optional[str] = ..., quarantine: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("partition_id", "where", "since", "columns", "only_columns", "page_size", "page_token", "limit", "order_by")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ONLY_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    where: Value
    since: Revision
    columns: _containers.RepeatedScalarFieldContainer[str]
    only_columns: bool
    page_size: int
    page_token: str
    limit: int
    order_by: str
    def __init__(self, partition_id: _Optional[str] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., since: _Optional[_Union[Revision, _Mapping]] = ..., columns: _Optional[_Iterable[str]] = ..., only_columns: bool = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., limit: _Optional[int] = ..., order_by: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("revision", "full", "rows", "cleared", "next_page_token")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    full: bool
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    cleared: _containers.RepeatedScalarFieldContainer[str]
    next_page_token: str
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., full: bool = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., cleared: _Optional[_Iterable[str]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("partition_id", "where", "count", "group_by")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    where: Value
    count: int
    group_by: str
    def __init__(self, partition_id: _Optional[str] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., count: _Optional[int] = ..., group_by: _Optional[str] = ...) -> None: ...

class WaitResponse(_message.Message):
    __slots__ = ("revision", "rows")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("partition_id", "where", "since")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    where: Value
    since: Revision
    def __init__(self, partition_id: _Optional[str] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., since: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("revision", "rows", "cleared", "full", "begun")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    cleared: _containers.RepeatedScalarFieldContainer[str]
    full: bool
    begun: bool
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., cleared: _Optional[_Iterable[str]] = ..., full: bool = ..., begun: bool = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("client_id", "plane_id", "partition_id", "task", "count", "fields", "where", "order_by", "groups", "lease_s", "replica", "number", "abandoned")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    plane_id: str
    partition_id: str
    task: str
    count: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    where: Value
    order_by: str
    groups: bool
    lease_s: float
    replica: Replica
    number: int
    abandoned: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client_id: _Optional[str] = ..., plane_id: _Optional[str] = ..., partition_id: _Optional[str] = ..., task: _Optional[str] = ..., count: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., order_by: _Optional[str] = ..., groups: bool = ..., lease_s: _Optional[float] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ..., number: _Optional[int] = ..., abandoned: _Optional[_Iterable[int]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("dp_rank", "dp_size", "batch_index")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    dp_size: int
    batch_index: int
    def __init__(self, dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., batch_index: _Optional[int] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("claim_id", "revision", "rows", "deliveries", "end")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    claim_id: int
    revision: Revision
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    deliveries: _containers.RepeatedScalarFieldContainer[int]
    end: bool
    def __init__(self, claim_id: _Optional[int] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., deliveries: _Optional[_Iterable[int]] = ..., end: bool = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("request", "partition_id", "task", "claim_id", "keys")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    task: str
    claim_id: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., task: _Optional[str] = ..., claim_id: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request", "partition_id", "task", "claim_id", "keys")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    task: str
    claim_id: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., task: _Optional[str] = ..., claim_id: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("client_id", "plane_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    plane_id: str
    def __init__(self, client_id: _Optional[str] = ..., plane_id: _Optional[str] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("request", "partition_id", "keys", "where", "retire", "until")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    where: Value
    retire: bool
    until: Revision
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., retire: bool = ..., until: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class BeginGroupRequest(_message.Message):
    __slots__ = ("request", "uid", "partition_id", "n", "declared_bytes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    DECLARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    request: Request
    uid: str
    partition_id: str
    n: int
    declared_bytes: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., uid: _Optional[str] = ..., partition_id: _Optional[str] = ..., n: _Optional[int] = ..., declared_bytes: _Optional[int] = ...) -> None: ...

class BeginGroupResponse(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class EndGroupRequest(_message.Message):
    __slots__ = ("request", "partition_id", "attempt", "status")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    attempt: int
    status: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., attempt: _Optional[int] = ..., status: _Optional[str] = ...) -> None: ...

class EndGroupResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class ListPartitionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPartitionsResponse(_message.Message):
    __slots__ = ("partitions",)
    class PartitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MapValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MapValue, _Mapping]] = ...) -> None: ...
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.MessageMap[str, MapValue]
    def __init__(self, partitions: _Optional[_Mapping[str, MapValue]] = ...) -> None: ...

class FieldSchema(_message.Message):
    __slots__ = ("dtype", "rank", "ragged_dim")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RAGGED_DIM_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    rank: int
    ragged_dim: int
    def __init__(self, dtype: _Optional[str] = ..., rank: _Optional[int] = ..., ragged_dim: _Optional[int] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("bytes", "rows", "producer_bytes", "producer_rows", "group_bytes")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ROWS_FIELD_NUMBER: _ClassVar[int]
    GROUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    rows: int
    producer_bytes: int
    producer_rows: int
    group_bytes: int
    def __init__(self, bytes: _Optional[int] = ..., rows: _Optional[int] = ..., producer_bytes: _Optional[int] = ..., producer_rows: _Optional[int] = ..., group_bytes: _Optional[int] = ...) -> None: ...

class CreatePartitionRequest(_message.Message):
    __slots__ = ("request", "partition_id", "schema", "open_schema", "quota", "retention_versions")
    class SchemaEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: FieldSchema
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[FieldSchema, _Mapping]] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    OPEN_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    RETENTION_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    schema: _containers.MessageMap[str, FieldSchema]
    open_schema: bool
    quota: Quota
    retention_versions: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., schema: _Optional[_Mapping[str, FieldSchema]] = ..., open_schema: bool = ..., quota: _Optional[_Union[Quota, _Mapping]] = ..., retention_versions: _Optional[int] = ...) -> None: ...

class CreatePartitionResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class SealPartitionRequest(_message.Message):
    __slots__ = ("request", "partition_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ...) -> None: ...

class SealPartitionResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dropped: _Optional[_Iterable[str]] = ...) -> None: ...

class DropPartitionRequest(_message.Message):
    __slots__ = ("request", "partition_id", "older_than")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_FIELD_NUMBER: _ClassVar[int]
    request: Request
    partition_id: str
    older_than: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., partition_id: _Optional[str] = ..., older_than: _Optional[int] = ...) -> None: ...

class DropPartitionResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dropped: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("partition_id", "where", "fields", "task", "group_by", "count")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    where: Value
    fields: _containers.RepeatedScalarFieldContainer[str]
    task: str
    group_by: str
    count: int
    def __init__(self, partition_id: _Optional[str] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., task: _Optional[str] = ..., group_by: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("text", "matching", "total", "failing", "stuck", "holders")
    class FailingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MATCHING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    text: str
    matching: int
    total: int
    failing: _containers.ScalarMap[str, int]
    stuck: _containers.RepeatedCompositeFieldContainer[Tags]
    holders: _containers.RepeatedCompositeFieldContainer[Tags]
    def __init__(self, text: _Optional[str] = ..., matching: _Optional[int] = ..., total: _Optional[int] = ..., failing: _Optional[_Mapping[str, int]] = ..., stuck: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[Tags, _Mapping]]] = ...) -> None: ...

class GetOutcomeRequest(_message.Message):
    __slots__ = ("client_id", "plane_id", "number")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    plane_id: str
    number: int
    def __init__(self, client_id: _Optional[str] = ..., plane_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetOutcomeResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: MapValue
    def __init__(self, outcome: _Optional[_Union[MapValue, _Mapping]] = ...) -> None: ...

class ClientReport(_message.Message):
    __slots__ = ("client_id", "label", "alive")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    label: str
    alive: bool
    def __init__(self, client_id: _Optional[str] = ..., label: _Optional[str] = ..., alive: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: MapValue
    def __init__(self, status: _Optional[_Union[MapValue, _Mapping]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("partition_id", "keys", "client_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    client_id: str
    def __init__(self, partition_id: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., client_id: _Optional[str] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("rows", "looked_at")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[KeyReport]
    looked_at: int
    def __init__(self, rows: _Optional[_Iterable[_Union[KeyReport, _Mapping]]] = ..., looked_at: _Optional[int] = ...) -> None: ...

class KeyReport(_message.Message):
    __slots__ = ("key", "revision", "age_s", "tags", "tag_bytes", "fields", "producer", "group", "tasks", "lost")
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    TAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    key: str
    revision: Revision
    age_s: float
    tags: Tags
    tag_bytes: int
    fields: _containers.RepeatedCompositeFieldContainer[FieldReport]
    producer: ClientReport
    group: MapValue
    tasks: _containers.ScalarMap[str, str]
    lost: bool
    def __init__(self, key: _Optional[str] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., age_s: _Optional[float] = ..., tags: _Optional[_Union[Tags, _Mapping]] = ..., tag_bytes: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[FieldReport, _Mapping]]] = ..., producer: _Optional[_Union[ClientReport, _Mapping]] = ..., group: _Optional[_Union[MapValue, _Mapping]] = ..., tasks: _Optional[_Mapping[str, str]] = ..., lost: bool = ...) -> None: ...

class FieldReport(_message.Message):
    __slots__ = ("name", "dtype", "shape", "nbytes", "store", "block", "segment", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    nbytes: int
    store: str
    block: int
    segment: int
    offset: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., nbytes: _Optional[int] = ..., store: _Optional[str] = ..., block: _Optional[int] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class TallyRequest(_message.Message):
    __slots__ = ("partition_id", "where", "until")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    where: Value
    until: Revision
    def __init__(self, partition_id: _Optional[str] = ..., where: _Optional[_Union[Value, _Mapping]] = ..., until: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class TallyResponse(_message.Message):
    __slots__ = ("revision", "rows", "payload_bytes", "tag_bytes", "statuses", "groups_open", "sample")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OPEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    rows: int
    payload_bytes: int
    tag_bytes: int
    statuses: _containers.RepeatedCompositeFieldContainer[StatusReport]
    groups_open: int
    sample: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., rows: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., tag_bytes: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[StatusReport, _Mapping]]] = ..., groups_open: _Optional[int] = ..., sample: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusReport(_message.Message):
    __slots__ = ("status", "rows", "bytes")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    status: str
    rows: int
    bytes: int
    def __init__(self, status: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("partition_id", "client_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    client_id: str
    def __init__(self, partition_id: _Optional[str] = ..., client_id: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("revision", "keys", "payload_bytes", "extent_bytes", "tag_bytes", "held_bytes", "fields", "statuses", "producers", "ages", "lengths")
    class LengthsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LengthReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LengthReport, _Mapping]] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    keys: int
    payload_bytes: int
    extent_bytes: int
    tag_bytes: int
    held_bytes: int
    fields: _containers.RepeatedCompositeFieldContainer[FieldStats]
    statuses: _containers.RepeatedCompositeFieldContainer[StatusReport]
    producers: _containers.RepeatedCompositeFieldContainer[ProducerStats]
    ages: _containers.RepeatedCompositeFieldContainer[AgeStats]
    lengths: _containers.MessageMap[str, LengthReport]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., keys: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., tag_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[FieldStats, _Mapping]]] = ..., statuses: _Optional[_Iterable[_Union[StatusReport, _Mapping]]] = ..., producers: _Optional[_Iterable[_Union[ProducerStats, _Mapping]]] = ..., ages: _Optional[_Iterable[_Union[AgeStats, _Mapping]]] = ..., lengths: _Optional[_Mapping[str, LengthReport]] = ...) -> None: ...

class FieldStats(_message.Message):
    __slots__ = ("name", "rows", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ProducerStats(_message.Message):
    __slots__ = ("client", "rows", "bytes")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    client: ClientReport
    rows: int
    bytes: int
    def __init__(self, client: _Optional[_Union[ClientReport, _Mapping]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class AgeStats(_message.Message):
    __slots__ = ("from_s", "to_s", "rows", "bytes")
    FROM_S_FIELD_NUMBER: _ClassVar[int]
    TO_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    from_s: float
    to_s: float
    rows: int
    bytes: int
    def __init__(self, from_s: _Optional[float] = ..., to_s: _Optional[float] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class LengthReport(_message.Message):
    __slots__ = ("rows", "min", "max", "mean", "p50", "p90", "p99", "histogram")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    rows: int
    min: int
    max: int
    mean: float
    p50: int
    p90: int
    p99: int
    histogram: _containers.RepeatedCompositeFieldContainer[LengthBin]
    def __init__(self, rows: _Optional[int] = ..., min: _Optional[int] = ..., max: _Optional[int] = ..., mean: _Optional[float] = ..., p50: _Optional[int] = ..., p90: _Optional[int] = ..., p99: _Optional[int] = ..., histogram: _Optional[_Iterable[_Union[LengthBin, _Mapping]]] = ...) -> None: ...

class LengthBin(_message.Message):
    __slots__ = ("low", "high", "rows")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    low: int
    high: int
    rows: int
    def __init__(self, low: _Optional[int] = ..., high: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class ListClaimsRequest(_message.Message):
    __slots__ = ("partition_id", "client_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    client_id: str
    def __init__(self, partition_id: _Optional[str] = ..., client_id: _Optional[str] = ...) -> None: ...

class ListClaimsResponse(_message.Message):
    __slots__ = ("tasks", "claims")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskReport]
    claims: _containers.RepeatedCompositeFieldContainer[ClaimReport]
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskReport, _Mapping]]] = ..., claims: _Optional[_Iterable[_Union[ClaimReport, _Mapping]]] = ...) -> None: ...

class ClaimReport(_message.Message):
    __slots__ = ("partition_id", "task", "claim_id", "keys", "holders", "age_s", "lease_s", "left_s")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    task: str
    claim_id: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    holders: _containers.RepeatedCompositeFieldContainer[ClientReport]
    age_s: float
    lease_s: float
    left_s: float
    def __init__(self, partition_id: _Optional[str] = ..., task: _Optional[str] = ..., claim_id: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ..., holders: _Optional[_Iterable[_Union[ClientReport, _Mapping]]] = ..., age_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., left_s: _Optional[float] = ...) -> None: ...

class TaskReport(_message.Message):
    __slots__ = ("partition_id", "task", "committed", "held", "lag", "waiting")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    task: str
    committed: int
    held: int
    lag: int
    waiting: int
    def __init__(self, partition_id: _Optional[str] = ..., task: _Optional[str] = ..., committed: _Optional[int] = ..., held: _Optional[int] = ..., lag: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class ListWaitersRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class ListWaitersResponse(_message.Message):
    __slots__ = ("waiters",)
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    waiters: _containers.RepeatedCompositeFieldContainer[WaiterReport]
    def __init__(self, waiters: _Optional[_Iterable[_Union[WaiterReport, _Mapping]]] = ...) -> None: ...

class WaiterReport(_message.Message):
    __slots__ = ("kind", "client", "partition_id", "waited_s", "left_s", "count", "where", "task", "fields", "grouped")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    GROUPED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    client: ClientReport
    partition_id: str
    waited_s: float
    left_s: float
    count: int
    where: str
    task: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    grouped: bool
    def __init__(self, kind: _Optional[str] = ..., client: _Optional[_Union[ClientReport, _Mapping]] = ..., partition_id: _Optional[str] = ..., waited_s: _Optional[float] = ..., left_s: _Optional[float] = ..., count: _Optional[int] = ..., where: _Optional[str] = ..., task: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., grouped: bool = ...) -> None: ...

class ListHoldingsRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class ListHoldingsResponse(_message.Message):
    __slots__ = ("store",)
    STORE_FIELD_NUMBER: _ClassVar[int]
    store: StoreReport
    def __init__(self, store: _Optional[_Union[StoreReport, _Mapping]] = ...) -> None: ...

class StoreReport(_message.Message):
    __slots__ = ("store_id", "reachable", "error", "pid", "capacity_bytes", "segment_bytes", "used_bytes", "held_bytes", "live_blocks", "dead_blocks", "orphans", "pins", "reservations")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    reachable: bool
    error: str
    pid: int
    capacity_bytes: int
    segment_bytes: int
    used_bytes: int
    held_bytes: int
    live_blocks: int
    dead_blocks: int
    orphans: _containers.RepeatedCompositeFieldContainer[OrphanReport]
    pins: _containers.RepeatedCompositeFieldContainer[HoldingReport]
    reservations: _containers.RepeatedCompositeFieldContainer[HoldingReport]
    def __init__(self, store_id: _Optional[str] = ..., reachable: bool = ..., error: _Optional[str] = ..., pid: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., live_blocks: _Optional[int] = ..., dead_blocks: _Optional[int] = ..., orphans: _Optional[_Iterable[_Union[OrphanReport, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[HoldingReport, _Mapping]]] = ..., reservations: _Optional[_Iterable[_Union[HoldingReport, _Mapping]]] = ...) -> None: ...

class OrphanReport(_message.Message):
    __slots__ = ("block", "bytes", "age_s")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    block: int
    bytes: int
    age_s: float
    def __init__(self, block: _Optional[int] = ..., bytes: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class HoldingReport(_message.Message):
    __slots__ = ("client", "blocks", "bytes", "dead_bytes", "age_s")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    client: ClientReport
    blocks: int
    bytes: int
    dead_bytes: int
    age_s: float
    def __init__(self, client: _Optional[_Union[ClientReport, _Mapping]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., dead_bytes: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class FindRevisionRequest(_message.Message):
    __slots__ = ("age_s",)
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    def __init__(self, age_s: _Optional[float] = ...) -> None: ...

class FindRevisionResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("partition_id", "uid", "key", "since", "limit", "client_id")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    uid: str
    key: str
    since: int
    limit: int
    client_id: str
    def __init__(self, partition_id: _Optional[str] = ..., uid: _Optional[str] = ..., key: _Optional[str] = ..., since: _Optional[int] = ..., limit: _Optional[int] = ..., client_id: _Optional[str] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("summary", "rows")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    summary: TraceSummary
    rows: _containers.RepeatedCompositeFieldContainer[TraceRow]
    def __init__(self, summary: _Optional[_Union[TraceSummary, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[TraceRow, _Mapping]]] = ...) -> None: ...

class TraceSummary(_message.Message):
    __slots__ = ("partition_id", "findings", "never_read", "read_by_several", "open_keys", "present", "status", "sessions", "sessions_due", "gone", "partial", "next", "detail")
    class ReadBySeveralEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    NEVER_READ_FIELD_NUMBER: _ClassVar[int]
    READ_BY_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    OPEN_KEYS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_DUE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    partition_id: str
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    never_read: _containers.RepeatedScalarFieldContainer[str]
    read_by_several: _containers.ScalarMap[str, int]
    open_keys: _containers.RepeatedScalarFieldContainer[str]
    present: _containers.RepeatedScalarFieldContainer[str]
    status: str
    sessions: int
    sessions_due: int
    gone: int
    partial: bool
    next: int
    detail: str
    def __init__(self, partition_id: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., never_read: _Optional[_Iterable[str]] = ..., read_by_several: _Optional[_Mapping[str, int]] = ..., open_keys: _Optional[_Iterable[str]] = ..., present: _Optional[_Iterable[str]] = ..., status: _Optional[str] = ..., sessions: _Optional[int] = ..., sessions_due: _Optional[int] = ..., gone: _Optional[int] = ..., partial: bool = ..., next: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("rule", "name", "status", "text", "records")
    RULE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    rule: int
    name: str
    status: str
    text: str
    records: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rule: _Optional[int] = ..., name: _Optional[str] = ..., status: _Optional[str] = ..., text: _Optional[str] = ..., records: _Optional[_Iterable[int]] = ...) -> None: ...

class TraceRow(_message.Message):
    __slots__ = ("number", "n", "ts", "stage", "op", "status", "uid", "session_id", "index", "key", "partition", "field", "producer", "consumer", "shape", "layout", "dtype", "device", "len", "valid_len", "mask_sum", "global_steps", "min_global_steps", "max_global_steps", "is_padding", "gen", "bytes", "ms", "hash", "preview", "client", "tags", "detail")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LEN_FIELD_NUMBER: _ClassVar[int]
    VALID_LEN_FIELD_NUMBER: _ClassVar[int]
    MASK_SUM_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIN_GLOBAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_GLOBAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_PADDING_FIELD_NUMBER: _ClassVar[int]
    GEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    n: int
    ts: float
    stage: str
    op: str
    status: str
    uid: str
    session_id: int
    index: int
    key: str
    partition: str
    field: str
    producer: str
    consumer: str
    shape: ShapeReport
    layout: str
    dtype: str
    device: str
    len: int
    valid_len: int
    mask_sum: int
    global_steps: int
    min_global_steps: int
    max_global_steps: int
    is_padding: bool
    gen: int
    bytes: int
    ms: float
    hash: str
    preview: str
    client: str
    tags: Tags
    detail: str
    def __init__(self, number: _Optional[int] = ..., n: _Optional[int] = ..., ts: _Optional[float] = ..., stage: _Optional[str] = ..., op: _Optional[str] = ..., status: _Optional[str] = ..., uid: _Optional[str] = ..., session_id: _Optional[int] = ..., index: _Optional[int] = ..., key: _Optional[str] = ..., partition: _Optional[str] = ..., field: _Optional[str] = ..., producer: _Optional[str] = ..., consumer: _Optional[str] = ..., shape: _Optional[_Union[ShapeReport, _Mapping]] = ..., layout: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., len: _Optional[int] = ..., valid_len: _Optional[int] = ..., mask_sum: _Optional[int] = ..., global_steps: _Optional[int] = ..., min_global_steps: _Optional[int] = ..., max_global_steps: _Optional[int] = ..., is_padding: bool = ..., gen: _Optional[int] = ..., bytes: _Optional[int] = ..., ms: _Optional[float] = ..., hash: _Optional[str] = ..., preview: _Optional[str] = ..., client: _Optional[str] = ..., tags: _Optional[_Union[Tags, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class ShapeReport(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class GetRecordRequest(_message.Message):
    __slots__ = ("samples_only",)
    SAMPLES_ONLY_FIELD_NUMBER: _ClassVar[int]
    samples_only: bool
    def __init__(self, samples_only: bool = ...) -> None: ...

class GetRecordResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class EnterStageRequest(_message.Message):
    __slots__ = ("client_id", "plane_id", "stage")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PLANE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    plane_id: str
    stage: str
    def __init__(self, client_id: _Optional[str] = ..., plane_id: _Optional[str] = ..., stage: _Optional[str] = ...) -> None: ...

class EnterStageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
