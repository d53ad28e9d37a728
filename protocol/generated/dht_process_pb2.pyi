from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DhtRequest(_message.Message):
    __slots__ = ("number", "start", "store", "find", "status", "attach", "open_tunnel")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    OPEN_TUNNEL_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: DhtStart
    store: DhtStore
    find: DhtFind
    status: DhtStatus
    attach: DhtAttach
    open_tunnel: DhtOpenTunnel
    def __init__(self, number: _Optional[int] = ..., start: _Optional[_Union[DhtStart, _Mapping]] = ..., store: _Optional[_Union[DhtStore, _Mapping]] = ..., find: _Optional[_Union[DhtFind, _Mapping]] = ..., status: _Optional[_Union[DhtStatus, _Mapping]] = ..., attach: _Optional[_Union[DhtAttach, _Mapping]] = ..., open_tunnel: _Optional[_Union[DhtOpenTunnel, _Mapping]] = ...) -> None: ...

class DhtReply(_message.Message):
    __slots__ = ("number", "failed", "situation", "records", "port")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SITUATION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    number: int
    failed: str
    situation: DhtSituation
    records: _containers.RepeatedScalarFieldContainer[bytes]
    port: int
    def __init__(self, number: _Optional[int] = ..., failed: _Optional[str] = ..., situation: _Optional[_Union[DhtSituation, _Mapping]] = ..., records: _Optional[_Iterable[bytes]] = ..., port: _Optional[int] = ...) -> None: ...

class DhtStart(_message.Message):
    __slots__ = ("folder", "identity", "peer", "run", "experts", "host", "port", "announce", "initial_peers", "client", "timeout_s", "relay_bytes_per_hour", "relay_before")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_PEERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RELAY_BYTES_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    RELAY_BEFORE_FIELD_NUMBER: _ClassVar[int]
    folder: str
    identity: str
    peer: str
    run: str
    experts: _containers.RepeatedScalarFieldContainer[int]
    host: str
    port: int
    announce: _containers.RepeatedScalarFieldContainer[str]
    initial_peers: _containers.RepeatedScalarFieldContainer[str]
    client: bool
    timeout_s: float
    relay_bytes_per_hour: int
    relay_before: DhtRelayFigures
    def __init__(self, folder: _Optional[str] = ..., identity: _Optional[str] = ..., peer: _Optional[str] = ..., run: _Optional[str] = ..., experts: _Optional[_Iterable[int]] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., announce: _Optional[_Iterable[str]] = ..., initial_peers: _Optional[_Iterable[str]] = ..., client: _Optional[bool] = ..., timeout_s: _Optional[float] = ..., relay_bytes_per_hour: _Optional[int] = ..., relay_before: _Optional[_Union[DhtRelayFigures, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("keys", "wide")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    wide: bool
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., wide: _Optional[bool] = ...) -> None: ...

class DhtStatus(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DhtAttach(_message.Message):
    __slots__ = ("relays", "local")
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    relays: _containers.RepeatedScalarFieldContainer[str]
    local: str
    def __init__(self, relays: _Optional[_Iterable[str]] = ..., local: _Optional[str] = ...) -> None: ...

class DhtOpenTunnel(_message.Message):
    __slots__ = ("relay", "target")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    relay: str
    target: str
    def __init__(self, relay: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class DhtSituation(_message.Message):
    __slots__ = ("multiaddrs", "peers", "records", "relay", "attachments")
    MULTIADDRS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    multiaddrs: _containers.RepeatedScalarFieldContainer[str]
    peers: int
    records: int
    relay: DhtRelayFigures
    attachments: _containers.RepeatedCompositeFieldContainer[DhtAttachment]
    def __init__(self, multiaddrs: _Optional[_Iterable[str]] = ..., peers: _Optional[int] = ..., records: _Optional[int] = ..., relay: _Optional[_Union[DhtRelayFigures, _Mapping]] = ..., attachments: _Optional[_Iterable[_Union[DhtAttachment, _Mapping]]] = ...) -> None: ...

class DhtRelayFigures(_message.Message):
    __slots__ = ("carried_bytes", "left_bytes", "attached", "tunnels", "opened", "refused", "cut_off")
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TUNNELS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    carried_bytes: int
    left_bytes: int
    attached: int
    tunnels: int
    opened: int
    refused: int
    cut_off: int
    def __init__(self, carried_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ..., attached: _Optional[int] = ..., tunnels: _Optional[int] = ..., opened: _Optional[int] = ..., refused: _Optional[int] = ..., cut_off: _Optional[int] = ...) -> None: ...

class DhtAttachment(_message.Message):
    __slots__ = ("relay", "standing", "reason")
    RELAY_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    relay: str
    standing: bool
    reason: str
    def __init__(self, relay: _Optional[str] = ..., standing: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
