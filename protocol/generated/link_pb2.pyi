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
    INT8: _ClassVar[Codec]
    BF16: _ClassVar[Codec]
    INT4: _ClassVar[Codec]
    INT2: _ClassVar[Codec]

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
INT8: Codec
BF16: Codec
INT4: Codec
INT2: Codec
PURPOSE_UNSPECIFIED: Purpose
TRAIN: Purpose
EVALUATE: Purpose
DIRECTION_UNSPECIFIED: Direction
FORWARD: Direction
BACKWARD: Direction

class Frame(_message.Message):
    __slots__ = ("hello", "chunk", "ping", "pong", "cancel", "farewell", "forward", "backward", "receipt", "stranded", "close", "question", "answer", "announcement", "progress", "invitation", "accepting", "entry", "declined", "roster", "contribution", "reduced", "pulse", "prepared", "commit", "dissolved", "state_request", "state_chunk", "state_refused", "recall", "settled", "unsettled", "audit_request", "evidence", "audit_refused", "accusation")
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
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DISSOLVED_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    AUDIT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
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
    question: Question
    answer: Answer
    announcement: bytes
    progress: Progress
    invitation: Invitation
    accepting: Accepting
    entry: Entry
    declined: Declined
    roster: Roster
    contribution: Contribution
    reduced: Reduced
    pulse: Pulse
    prepared: Prepared
    commit: Commit
    dissolved: Dissolved
    state_request: StateRequest
    state_chunk: StateChunk
    state_refused: StateRefused
    recall: Recall
    settled: Settled
    unsettled: Unsettled
    audit_request: AuditRequest
    evidence: Evidence
    audit_refused: AuditRefused
    accusation: Accusation
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., forward: _Optional[_Union[Forward, _Mapping]] = ..., backward: _Optional[_Union[Backward, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., stranded: _Optional[_Union[Stranded, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., question: _Optional[_Union[Question, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., announcement: _Optional[bytes] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., invitation: _Optional[_Union[Invitation, _Mapping]] = ..., accepting: _Optional[_Union[Accepting, _Mapping]] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., reduced: _Optional[_Union[Reduced, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., dissolved: _Optional[_Union[Dissolved, _Mapping]] = ..., state_request: _Optional[_Union[StateRequest, _Mapping]] = ..., state_chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., state_refused: _Optional[_Union[StateRefused, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., unsettled: _Optional[_Union[Unsettled, _Mapping]] = ..., audit_request: _Optional[_Union[AuditRequest, _Mapping]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., audit_refused: _Optional[_Union[AuditRefused, _Mapping]] = ..., accusation: _Optional[_Union[Accusation, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "run", "lowest_version", "highest_version", "announcement", "incarnation", "age_ms")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    run: str
    lowest_version: int
    highest_version: int
    announcement: bytes
    incarnation: int
    age_ms: int
    def __init__(self, peer: _Optional[str] = ..., run: _Optional[str] = ..., lowest_version: _Optional[int] = ..., highest_version: _Optional[int] = ..., announcement: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "detail", "record")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Farewell.Reason]
        LEAVING: _ClassVar[Farewell.Reason]
        DUPLICATE: _ClassVar[Farewell.Reason]
        WRONG_RUN: _ClassVar[Farewell.Reason]
        WRONG_VERSION: _ClassVar[Farewell.Reason]
        NOT_YOU: _ClassVar[Farewell.Reason]
        VIOLATION: _ClassVar[Farewell.Reason]
        SAME_KEY: _ClassVar[Farewell.Reason]
    UNSPECIFIED: Farewell.Reason
    LEAVING: Farewell.Reason
    DUPLICATE: Farewell.Reason
    WRONG_RUN: Farewell.Reason
    WRONG_VERSION: Farewell.Reason
    NOT_YOU: Farewell.Reason
    VIOLATION: Farewell.Reason
    SAME_KEY: Farewell.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    reason: Farewell.Reason
    detail: str
    record: bytes
    def __init__(self, reason: _Optional[_Union[Farewell.Reason, str]] = ..., detail: _Optional[str] = ..., record: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("transfer", "dtype", "codec", "shape", "byte_length", "chunk_count", "checksum", "outliers", "token_bytes")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OUTLIERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    dtype: DType
    codec: Codec
    shape: _containers.RepeatedScalarFieldContainer[int]
    byte_length: int
    chunk_count: int
    checksum: int
    outliers: int
    token_bytes: int
    def __init__(self, transfer: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., codec: _Optional[_Union[Codec, str]] = ..., shape: _Optional[_Iterable[int]] = ..., byte_length: _Optional[int] = ..., chunk_count: _Optional[int] = ..., checksum: _Optional[int] = ..., outliers: _Optional[int] = ..., token_bytes: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("microbatch", "hops", "position", "modules", "lifetime_ms", "signature", "documents", "labels", "invitation")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    position: int
    modules: _containers.RepeatedCompositeFieldContainer[ModuleId]
    lifetime_ms: int
    signature: bytes
    documents: _containers.RepeatedScalarFieldContainer[int]
    labels: int
    invitation: bytes
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., position: _Optional[int] = ..., modules: _Optional[_Iterable[_Union[ModuleId, _Mapping]]] = ..., lifetime_ms: _Optional[int] = ..., signature: _Optional[bytes] = ..., documents: _Optional[_Iterable[int]] = ..., labels: _Optional[int] = ..., invitation: _Optional[bytes] = ...) -> None: ...

class Forward(_message.Message):
    __slots__ = ("route", "purpose", "tensor")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    route: Route
    purpose: Purpose
    tensor: TensorHeader
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class Backward(_message.Message):
    __slots__ = ("route", "tensor")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    route: Route
    tensor: TensorHeader
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("microbatch", "direction", "position", "status", "retry_after_ms", "detail", "waited_us", "computed_us", "sent_us")
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
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    direction: Direction
    position: int
    status: Receipt.Status
    retry_after_ms: int
    detail: str
    waited_us: int
    computed_us: int
    sent_us: int
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., direction: _Optional[_Union[Direction, str]] = ..., position: _Optional[int] = ..., status: _Optional[_Union[Receipt.Status, str]] = ..., retry_after_ms: _Optional[int] = ..., detail: _Optional[str] = ..., waited_us: _Optional[int] = ..., computed_us: _Optional[int] = ..., sent_us: _Optional[int] = ...) -> None: ...

class Stranded(_message.Message):
    __slots__ = ("microbatch", "direction", "position", "detail", "signature")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    direction: Direction
    position: int
    detail: str
    signature: bytes
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., direction: _Optional[_Union[Direction, str]] = ..., position: _Optional[int] = ..., detail: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

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

class AnchorVersion(_message.Message):
    __slots__ = ("round", "steps", "tokens", "fragment", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: int
    steps: int
    tokens: int
    fragment: int
    digest: bytes
    def __init__(self, round: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., fragment: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("module", "number", "attempt", "convener")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONVENER_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    number: int
    attempt: int
    convener: str
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., number: _Optional[int] = ..., attempt: _Optional[int] = ..., convener: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("module", "base", "steps", "tokens")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    base: AnchorVersion
    steps: int
    tokens: int
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., base: _Optional[_Union[AnchorVersion, _Mapping]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Invitation(_message.Message):
    __slots__ = ("round", "base")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    base: AnchorVersion
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., base: _Optional[_Union[AnchorVersion, _Mapping]] = ...) -> None: ...

class Accepting(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("round", "steps", "tokens", "norm", "staged", "base", "peer", "measured", "signature")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    steps: int
    tokens: int
    norm: float
    staged: AnchorVersion
    base: AnchorVersion
    peer: str
    measured: _containers.RepeatedScalarFieldContainer[int]
    signature: bytes
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., norm: _Optional[float] = ..., staged: _Optional[_Union[AnchorVersion, _Mapping]] = ..., base: _Optional[_Union[AnchorVersion, _Mapping]] = ..., peer: _Optional[str] = ..., measured: _Optional[_Iterable[int]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("round", "reason", "version")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Declined.Reason]
        OTHER_ANCHOR: _ClassVar[Declined.Reason]
        PAST: _ClassVar[Declined.Reason]
        OTHER_CONVENER: _ClassVar[Declined.Reason]
        NOT_READY: _ClassVar[Declined.Reason]
        BROKEN: _ClassVar[Declined.Reason]
    REASON_UNSPECIFIED: Declined.Reason
    OTHER_ANCHOR: Declined.Reason
    PAST: Declined.Reason
    OTHER_CONVENER: Declined.Reason
    NOT_READY: Declined.Reason
    BROKEN: Declined.Reason
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    reason: Declined.Reason
    version: AnchorVersion
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., reason: _Optional[_Union[Declined.Reason, str]] = ..., version: _Optional[_Union[AnchorVersion, _Mapping]] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("round", "base", "codec", "codec_reason", "entries", "tallies")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_REASON_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    base: AnchorVersion
    codec: Codec
    codec_reason: str
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    tallies: _containers.RepeatedCompositeFieldContainer[WorkTally]
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., base: _Optional[_Union[AnchorVersion, _Mapping]] = ..., codec: _Optional[_Union[Codec, str]] = ..., codec_reason: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., tallies: _Optional[_Iterable[_Union[WorkTally, _Mapping]]] = ...) -> None: ...

class WorkTally(_message.Message):
    __slots__ = ("data_node", "module", "number", "at", "window_s", "rows", "invitation", "signature")
    DATA_NODE_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    data_node: str
    module: ModuleId
    number: int
    at: float
    window_s: float
    rows: _containers.RepeatedCompositeFieldContainer[WorkRow]
    invitation: bytes
    signature: bytes
    def __init__(self, data_node: _Optional[str] = ..., module: _Optional[_Union[ModuleId, _Mapping]] = ..., number: _Optional[int] = ..., at: _Optional[float] = ..., window_s: _Optional[float] = ..., rows: _Optional[_Iterable[_Union[WorkRow, _Mapping]]] = ..., invitation: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class WorkRow(_message.Message):
    __slots__ = ("peer", "visits", "tokens", "recent")
    PEER_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    visits: int
    tokens: int
    recent: int
    def __init__(self, peer: _Optional[str] = ..., visits: _Optional[int] = ..., tokens: _Optional[int] = ..., recent: _Optional[int] = ...) -> None: ...

class WorkTallies(_message.Message):
    __slots__ = ("tallies",)
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    tallies: _containers.RepeatedCompositeFieldContainer[WorkTally]
    def __init__(self, tallies: _Optional[_Iterable[_Union[WorkTally, _Mapping]]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk", "tensor", "signature")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    tensor: TensorHeader
    signature: bytes
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Reduced(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk", "tensor")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    tensor: TensorHeader
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("round", "waiting_for", "rejected")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    rejected: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., rejected: _Optional[_Iterable[str]] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("round", "version")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    version: AnchorVersion
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., version: _Optional[_Union[AnchorVersion, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "version", "holders")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    version: AnchorVersion
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., version: _Optional[_Union[AnchorVersion, _Mapping]] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class Dissolved(_message.Message):
    __slots__ = ("round", "detail")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    detail: str
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., detail: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ...) -> None: ...

class SignedHash(_message.Message):
    __slots__ = ("peer", "hash", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    hash: bytes
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., hash: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk", "signed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    signed: _containers.RepeatedCompositeFieldContainer[SignedHash]
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ..., signed: _Optional[_Iterable[_Union[SignedHash, _Mapping]]] = ...) -> None: ...

class AuditRefused(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("round", "first_chunk", "end_chunk", "signed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    round: RoundId
    first_chunk: int
    end_chunk: int
    signed: _containers.RepeatedCompositeFieldContainer[SignedHash]
    def __init__(self, round: _Optional[_Union[RoundId, _Mapping]] = ..., first_chunk: _Optional[int] = ..., end_chunk: _Optional[int] = ..., signed: _Optional[_Iterable[_Union[SignedHash, _Mapping]]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("module", "digest", "chunks")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    digest: bytes
    chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., digest: _Optional[bytes] = ..., chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("module", "digest", "chunk", "tensor")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    digest: bytes
    chunk: int
    tensor: TensorHeader
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., digest: _Optional[bytes] = ..., chunk: _Optional[int] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ...) -> None: ...

class StateRefused(_message.Message):
    __slots__ = ("module", "digest", "chunks", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_REASON_UNSPECIFIED: _ClassVar[StateRefused.Reason]
        STATE_BUSY: _ClassVar[StateRefused.Reason]
        STATE_GONE: _ClassVar[StateRefused.Reason]
    STATE_REASON_UNSPECIFIED: StateRefused.Reason
    STATE_BUSY: StateRefused.Reason
    STATE_GONE: StateRefused.Reason
    MODULE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    digest: bytes
    chunks: _containers.RepeatedScalarFieldContainer[int]
    reason: StateRefused.Reason
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., digest: _Optional[bytes] = ..., chunks: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[StateRefused.Reason, str]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("id", "manifest", "status", "evaluate", "state", "dial_back", "call", "called", "router", "tokenizer", "work")
    ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CALLED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    id: int
    manifest: ManifestQuestion
    status: StatusQuestion
    evaluate: EvaluateQuestion
    state: StateQuestion
    dial_back: DialBackQuestion
    call: CallQuestion
    called: CalledQuestion
    router: RouterQuestion
    tokenizer: TokenizerQuestion
    work: WorkQuestion
    def __init__(self, id: _Optional[int] = ..., manifest: _Optional[_Union[ManifestQuestion, _Mapping]] = ..., status: _Optional[_Union[StatusQuestion, _Mapping]] = ..., evaluate: _Optional[_Union[EvaluateQuestion, _Mapping]] = ..., state: _Optional[_Union[StateQuestion, _Mapping]] = ..., dial_back: _Optional[_Union[DialBackQuestion, _Mapping]] = ..., call: _Optional[_Union[CallQuestion, _Mapping]] = ..., called: _Optional[_Union[CalledQuestion, _Mapping]] = ..., router: _Optional[_Union[RouterQuestion, _Mapping]] = ..., tokenizer: _Optional[_Union[TokenizerQuestion, _Mapping]] = ..., work: _Optional[_Union[WorkQuestion, _Mapping]] = ...) -> None: ...

class ManifestQuestion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterQuestion(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: int
    def __init__(self, piece: _Optional[int] = ...) -> None: ...

class TokenizerQuestion(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: int
    def __init__(self, piece: _Optional[int] = ...) -> None: ...

class StatusQuestion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateQuestion(_message.Message):
    __slots__ = ("microbatches", "stages")
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    microbatches: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, microbatches: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkQuestion(_message.Message):
    __slots__ = ("module", "accused")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    accused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., accused: _Optional[_Iterable[str]] = ...) -> None: ...

class StateQuestion(_message.Message):
    __slots__ = ("module", "digest")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    module: ModuleId
    digest: bytes
    def __init__(self, module: _Optional[_Union[ModuleId, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class HashList(_message.Message):
    __slots__ = ("round", "steps", "tokens", "fragment", "elements", "chunk_elements", "hashes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    round: int
    steps: int
    tokens: int
    fragment: int
    elements: int
    chunk_elements: int
    hashes: bytes
    def __init__(self, round: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., fragment: _Optional[int] = ..., elements: _Optional[int] = ..., chunk_elements: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class DialBackQuestion(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class DialBackResult(_message.Message):
    __slots__ = ("host", "outcome", "detail")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[DialBackResult.Outcome]
        REACHED: _ClassVar[DialBackResult.Outcome]
        CLOSED: _ClassVar[DialBackResult.Outcome]
        SILENT: _ClassVar[DialBackResult.Outcome]
        ANOTHER: _ClassVar[DialBackResult.Outcome]
        NOT_TRIED: _ClassVar[DialBackResult.Outcome]
    OUTCOME_UNSPECIFIED: DialBackResult.Outcome
    REACHED: DialBackResult.Outcome
    CLOSED: DialBackResult.Outcome
    SILENT: DialBackResult.Outcome
    ANOTHER: DialBackResult.Outcome
    NOT_TRIED: DialBackResult.Outcome
    HOST_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    host: str
    outcome: DialBackResult.Outcome
    detail: str
    def __init__(self, host: _Optional[str] = ..., outcome: _Optional[_Union[DialBackResult.Outcome, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class CallQuestion(_message.Message):
    __slots__ = ("peer", "record")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    peer: str
    record: bytes
    def __init__(self, peer: _Optional[str] = ..., record: _Optional[bytes] = ...) -> None: ...

class CalledQuestion(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    def __init__(self, record: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "manifest", "status", "evaluation", "refused", "state", "dial_back", "call", "called", "router", "tokenizer", "work")
    ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIAL_BACK_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CALLED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    id: int
    manifest: bytes
    status: bytes
    evaluation: bytes
    refused: str
    state: bytes
    dial_back: bytes
    call: bytes
    called: bytes
    router: bytes
    tokenizer: bytes
    work: bytes
    def __init__(self, id: _Optional[int] = ..., manifest: _Optional[bytes] = ..., status: _Optional[bytes] = ..., evaluation: _Optional[bytes] = ..., refused: _Optional[str] = ..., state: _Optional[bytes] = ..., dial_back: _Optional[bytes] = ..., call: _Optional[bytes] = ..., called: _Optional[bytes] = ..., router: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., work: _Optional[bytes] = ...) -> None: ...
