from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DhtRequest(_message.Message):
    __slots__ = ("number", "start", "store", "find", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: DhtStart
    store: DhtStore
    find: DhtFind
    status: DhtStatus
    def __init__(self, number: _Optional[int] = ..., start: _Optional[_Union[DhtStart, _Mapping]] = ..., store: _Optional[_Union[DhtStore, _Mapping]] = ..., find: _Optional[_Union[DhtFind, _Mapping]] = ..., status: _Optional[_Union[DhtStatus, _Mapping]] = ...) -> None: ...

class DhtReply(_message.Message):
    __slots__ = ("number", "failed", "situation", "records")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SITUATION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    failed: str
    situation: DhtSituation
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., failed: _Optional[str] = ..., situation: _Optional[_Union[DhtSituation, _Mapping]] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DhtStart(_message.Message):
    __slots__ = ("folder", "identity", "peer", "run", "stages", "experts", "host", "port", "announce", "initial_peers", "client", "timeout_s")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_PEERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    folder: str
    identity: str
    peer: str
    run: str
    stages: int
    experts: int
    host: str
    port: int
    announce: _containers.RepeatedScalarFieldContainer[str]
    initial_peers: _containers.RepeatedScalarFieldContainer[str]
    client: bool
    timeout_s: float
    def __init__(self, folder: _Optional[str] = ..., identity: _Optional[str] = ..., peer: _Optional[str] = ..., run: _Optional[str] = ..., stages: _Optional[int] = ..., experts: _Optional[int] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., announce: _Optional[_Iterable[str]] = ..., initial_peers: _Optional[_Iterable[str]] = ..., client: _Optional[bool] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DhtStore(_message.Message):
    __slots__ = ("key", "owner", "record", "expires_at")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    key: str
    owner: str
    record: bytes
    expires_at: float
    def __init__(self, key: _Optional[str] = ..., owner: _Optional[str] = ..., record: _Optional[bytes] = ..., expires_at: _Optional[float] = ...) -> None: ...

class DhtFind(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class DhtStatus(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DhtSituation(_message.Message):
    __slots__ = ("multiaddrs", "peers", "records")
    MULTIADDRS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    multiaddrs: _containers.RepeatedScalarFieldContainer[str]
    peers: int
    records: int
    def __init__(self, multiaddrs: _Optional[_Iterable[str]] = ..., peers: _Optional[int] = ..., records: _Optional[int] = ...) -> None: ...
