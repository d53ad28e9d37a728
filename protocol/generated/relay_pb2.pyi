from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayMessage(_message.Message):
    __slots__ = ("attach", "open", "accept", "answer", "incoming", "decline", "ping")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    attach: RelayAttach
    open: RelayOpen
    accept: RelayAccept
    answer: RelayAnswer
    incoming: RelayIncoming
    decline: RelayDecline
    ping: RelayPing
    def __init__(self, attach: _Optional[_Union[RelayAttach, _Mapping]] = ..., open: _Optional[_Union[RelayOpen, _Mapping]] = ..., accept: _Optional[_Union[RelayAccept, _Mapping]] = ..., answer: _Optional[_Union[RelayAnswer, _Mapping]] = ..., incoming: _Optional[_Union[RelayIncoming, _Mapping]] = ..., decline: _Optional[_Union[RelayDecline, _Mapping]] = ..., ping: _Optional[_Union[RelayPing, _Mapping]] = ...) -> None: ...

class RelayAttach(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class RelayOpen(_message.Message):
    __slots__ = ("run", "target")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    run: str
    target: str
    def __init__(self, run: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class RelayAccept(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class RelayAnswer(_message.Message):
    __slots__ = ("refused",)
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    refused: str
    def __init__(self, refused: _Optional[str] = ...) -> None: ...

class RelayIncoming(_message.Message):
    __slots__ = ("number", "peer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    number: int
    peer: str
    def __init__(self, number: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class RelayDecline(_message.Message):
    __slots__ = ("number", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: str
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RelayPing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
