from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FLOAT32: _ClassVar[DType]
    BFLOAT16: _ClassVar[DType]
    FLOAT16: _ClassVar[DType]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    NONE: _ClassVar[Codec]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    TRAIN: _ClassVar[Purpose]
    EVALUATE: _ClassVar[Purpose]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    FORWARD: _ClassVar[Direction]
    BACKWARD: _ClassVar[Direction]
DTYPE_UNSPECIFIED: DType
FLOAT32: DType
BFLOAT16: DType
FLOAT16: DType
CODEC_UNSPECIFIED: Codec
NONE: Codec
PURPOSE_UNSPECIFIED: Purpose
TRAIN: Purpose
EVALUATE: Purpose
DIRECTION_UNSPECIFIED: Direction
FORWARD: Direction
BACKWARD: Direction

class Frame(_message.Message):
    __slots__ = ("hello", "chunk", "ping", "pong", "cancel", "farewell", "forward", "backward", "receipt", "stranded", "close", "arrival_hint", "question", "answer", "announcement", "recall", "settled", "unsettled")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    STRANDED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    chunk: Chunk
    ping: Ping
    pong: Pong
    cancel: Cancel
    farewell: Farewell
    forward: Forward
    backward: Backward
    receipt: Receipt
    stranded: Stranded
    close: Close
    arrival_hint: ArrivalHint
    question: Question
    answer: Answer
    announcement: bytes
    recall: Recall
    settled: Settled
    unsettled: Unsettled
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., backward: _Optional[_Union[Backward, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., stranded: _Optional[_Union[Stranded, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., arrival_hint: _Optional[_Union[ArrivalHint, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., announcement: _Optional[bytes] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., unsettled: _Optional[_Union[Unsettled, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "run", "lowest_version", "highest_version", "announcement")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    run: str
    lowest_version: int
    highest_version: int
    announcement: bytes
    def __init__(self, peer: _Optional[str] = ..., run: _Optional[str] = ..., lowest_version: _Optional[int] = ..., highest_version: _Optional[int] = ..., announcement: _Optional[bytes] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Farewell.Reason]
        LEAVING: _ClassVar[Farewell.Reason]
        DUPLICATE: _ClassVar[Farewell.Reason]
        WRONG_RUN: _ClassVar[Farewell.Reason]
        WRONG_VERSION: _ClassVar[Farewell.Reason]
        NOT_YOU: _ClassVar[Farewell.Reason]
        VIOLATION: _ClassVar[Farewell.Reason]
    UNSPECIFIED: Farewell.Reason
    LEAVING: Farewell.Reason
    DUPLICATE: Farewell.Reason
    WRONG_RUN: Farewell.Reason
    WRONG_VERSION: Farewell.Reason
    NOT_YOU: Farewell.Reason
    VIOLATION: Farewell.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: Farewell.Reason
    detail: str
    def __init__(self, reason: _Optional[_Union[Farewell.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("transfer", "dtype", "codec", "shape", "byte_length", "chunk_count", "checksum")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    dtype: DType
    codec: Codec
    shape: _containers.RepeatedScalarFieldContainer[int]
    byte_length: int
    chunk_count: int
    checksum: int
    def __init__(self, transfer: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., codec: _Optional[_Union[Codec, str]] = ..., shape: _Optional[_Iterable[int]] = ..., byte_length: _Optional[int] = ..., chunk_count: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("transfer", "index", "checksum", "data")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    index: int
    checksum: int
    data: bytes
    def __init__(self, transfer: _Optional[int] = ..., index: _Optional[int] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class MicrobatchId(_message.Message):
    __slots__ = ("data_node", "number")
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    data_node: str
    number: int
    def __init__(self, data_node: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ModuleId(_message.Message):
    __slots__ = ("stage", "expert")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    expert: int
    def __init__(self, stage: _Optional[int] = ..., expert: _Optional[int] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("module", "peer")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    peer: str
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., peer: _Optional[str] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("microbatch", "hops", "position")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    position: int
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., position: _Optional[int] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("route", "purpose", "lifetime_ms", "tensor")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    route: Route
    purpose: Purpose
    lifetime_ms: int
    tensor: TensorHeader
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., lifetime_ms: _Optional[int] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class Backward(_message.Message):
    __slots__ = ("route", "tensor")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    route: Route
    tensor: TensorHeader
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("microbatch", "direction", "position", "status", "retry_after_ms", "detail")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Receipt.Status]
        ACCEPTED: _ClassVar[Receipt.Status]
        PASSED_ON: _ClassVar[Receipt.Status]
        BUSY: _ClassVar[Receipt.Status]
        REFUSED: _ClassVar[Receipt.Status]
    STATUS_UNSPECIFIED: Receipt.Status
    ACCEPTED: Receipt.Status
    PASSED_ON: Receipt.Status
    BUSY: Receipt.Status
    REFUSED: Receipt.Status
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    direction: Direction
    position: int
    status: Receipt.Status
    retry_after_ms: int
    detail: str
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., direction: _Optional[_Union[Direction, str]] = ..., position: _Optional[int] = ..., status: _Optional[_Union[Receipt.Status, str]] = ..., retry_after_ms: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Stranded(_message.Message):
    __slots__ = ("microbatch", "direction", "position", "detail")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    direction: Direction
    position: int
    detail: str
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., direction: _Optional[_Union[Direction, str]] = ..., position: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("microbatch", "detail")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    detail: str
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: Route
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("microbatch", "hops")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ...) -> None: ...

class Unsettled(_message.Message):
    __slots__ = ("microbatch",)
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ...) -> None: ...

class ArrivalHint(_message.Message):
    __slots__ = ("microbatch", "position", "expected_ms")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    position: int
    expected_ms: int
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., position: _Optional[int] = ..., expected_ms: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("id", "manifest", "status", "evaluate")
    ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    id: int
    manifest: ManifestQuestion
    status: StatusQuestion
    evaluate: EvaluateQuestion
    def __init__(self, id: _Optional[int] = ..., manifest: _Optional[_Union[ManifestQuestion, _Mapping]] = ..., status: _Optional[_Union[StatusQuestion, _Mapping]] = ..., evaluate: _Optional[_Union[EvaluateQuestion, _Mapping]] = ...) -> None: ...

class ManifestQuestion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusQuestion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateQuestion(_message.Message):
    __slots__ = ("microbatches",)
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    microbatches: int
    def __init__(self, microbatches: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "manifest", "status", "evaluation", "refused")
    ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    id: int
    manifest: bytes
    status: bytes
    evaluation: bytes
    refused: str
    def __init__(self, id: _Optional[int] = ..., manifest: _Optional[bytes] = ..., status: _Optional[bytes] = ..., evaluation: _Optional[bytes] = ..., refused: _Optional[str] = ...) -> None: ...
