from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SignedRecord(_message.Message):
    __slots__ = ("public_key", "signature", "body")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    body: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("run", "peer", "state", "has_module", "stage", "expert", "addresses", "certificate", "lowest_version", "highest_version", "tokens_per_second", "slots", "free_slots", "steps", "round", "digest", "sequence", "expires_at", "anchor_steps", "anchor_tokens", "fragment", "incarnation", "via", "relay", "memory_bytes", "device_bytes", "visits", "route")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Announcement.State]
        JOINING: _ClassVar[Announcement.State]
        SERVING: _ClassVar[Announcement.State]
        DRAINING: _ClassVar[Announcement.State]
        VISITING: _ClassVar[Announcement.State]
    UNSPECIFIED: Announcement.State
    JOINING: Announcement.State
    SERVING: Announcement.State
    DRAINING: Announcement.State
    VISITING: Announcement.State
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HAS_MODULE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    LOWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_STEPS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    run: str
    peer: str
    state: Announcement.State
    has_module: bool
    stage: int
    expert: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    certificate: bytes
    lowest_version: int
    highest_version: int
    tokens_per_second: float
    slots: int
    free_slots: int
    steps: int
    round: int
    digest: bytes
    sequence: int
    expires_at: float
    anchor_steps: int
    anchor_tokens: int
    fragment: int
    incarnation: int
    via: _containers.RepeatedScalarFieldContainer[str]
    relay: str
    memory_bytes: int
    device_bytes: int
    visits: _containers.RepeatedScalarFieldContainer[int]
    route: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., peer: _Optional[str] = ..., state: _Optional[_Union[Announcement.State, str]] = ..., has_module: _Optional[bool] = ..., stage: _Optional[int] = ..., expert: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., certificate: _Optional[bytes] = ..., lowest_version: _Optional[int] = ..., highest_version: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., steps: _Optional[int] = ..., round: _Optional[int] = ..., digest: _Optional[bytes] = ..., sequence: _Optional[int] = ..., expires_at: _Optional[float] = ..., anchor_steps: _Optional[int] = ..., anchor_tokens: _Optional[int] = ..., fragment: _Optional[int] = ..., incarnation: _Optional[int] = ..., via: _Optional[_Iterable[str]] = ..., relay: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., visits: _Optional[_Iterable[int]] = ..., route: _Optional[_Iterable[int]] = ...) -> None: ...
