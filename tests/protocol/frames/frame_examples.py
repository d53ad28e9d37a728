"""One example and more of every small frame, each with a name: what `wire_bytes.txt` holds the bytes of."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from protocol.frames.frames import (
    AnnouncementFrame,
    AnswerFrame,
    Cancel,
    Farewell,
    FarewellReason,
    Hello,
    Ping,
    Pong,
    QuestionFrame,
    SmallFrame,
)
from protocol.frames.tensors import TensorFrame
from protocol.identity.keys import peer_id_of
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout
from swarm.vocabulary.averaging_messages import (
    Accepting,
    Accusation,
    AuditRefused,
    AuditRequest,
    Commit,
    Contribution,
    Declined,
    DeclineReason,
    Dissolved,
    Entry,
    Evidence,
    Invitation,
    LinkRate,
    Prepared,
    Progress,
    Pulse,
    Reduced,
    RoundId,
    SignedHash,
    SignedRoster,
    StateChunk,
    StateRefusal,
    StateRefused,
    StateRequest,
)
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Close,
    Direction,
    Forward,
    Purpose,
    Recall,
    Receipt,
    ReceiptStatus,
    Settled,
    Stranded,
    Unsettled,
)
from swarm.vocabulary.types import (
    AnchorVersion,
    Codec,
    Hop,
    MicrobatchId,
    ModuleId,
    Path,
    PeerId,
    RunId,
    SignedRoute,
    VersionRange,
)


def peer(number: int) -> PeerId:
    """A peer that is the same in every run: its key is the number in each of its bytes, as far as that goes."""
    return peer_id_of((number * _ONES % 2**256).to_bytes(32, "big"))


_ONES: Final = int.from_bytes(b"\1" * 32, "big")
A, B, C, D = (peer(number) for number in range(4))
SIGNATURE, HASH = bytes(range(64)), bytes(range(32))
MICROBATCH, FIRST_MICROBATCH = MicrobatchId(A, 2**40 + 7), MicrobatchId(A, 0)
HOPS = (Hop(ModuleId(1, 0), B), Hop(ModuleId(300, 2), C), Hop(ModuleId(0, 0), B))
ROUTE = SignedRoute((ModuleId(1), ModuleId(300, 2), ModuleId(0)), 61.5, SIGNATURE)
PATH, SIGNED_PATH = Path(A, HOPS), Path(A, HOPS, ROUTE)
OF_DOCUMENTS = Path(A, HOPS, replace(ROUTE, documents=(1, 300, 2**20)))
OF_LABELS = Path(A, HOPS, replace(ROUTE, labels=300))
HIDDEN = TensorSpec((2, 128, 64), DType.BFLOAT16, Codec.INT8, outliers=3)
FLOATS, PLANES = TensorSpec((5000,), DType.FLOAT32), TensorSpec((5000,), DType.FLOAT32, Codec.PLANES, 0, 12345)
ROUND, FIRST_ROUND = RoundId(ModuleId(3, 1), 300, 2, B), RoundId(ModuleId(0), 1, 0, A)
BASE, INITIAL = AnchorVersion(299, 70_000, 2**45, 5, HASH), AnchorVersion(0, 0, 0, 0, HASH)
ENTRY = Entry(B, ROUND, BASE, 32, 65_536, 1.75, (LinkRate(0xABCDEF, 12), LinkRate(0, 1)), INITIAL, SIGNATURE)
EMPTY_ENTRY = Entry(C, ROUND, BASE, 0, 0, 0.0, (), None, SIGNATURE)
SIGNED = (SignedHash(A, HASH, SIGNATURE), SignedHash(A, bytes(32), bytes(64)), SignedHash(C, HASH, SIGNATURE))

EXAMPLES: Final[dict[str, SmallFrame]] = {
    "hello": Hello(A, RunId("ab" * 32), VersionRange(1, 7), b"record", 2**63 + 1, 123_456),
    "hello without a record": Hello(A, RunId("0f" * 32), VersionRange(2, 2), b""),
    "ping": Ping(2**64 - 1),
    "pong": Pong(7),
    "pong of 0": Pong(0),
    "cancel": Cancel(2**32 - 1),
    "farewell": Farewell(FarewellReason.SAME_KEY, "another took the place", b"record"),
    "farewell of no reason": Farewell(FarewellReason.UNSPECIFIED),
    "announcement": AnnouncementFrame(b"record"),
    "forward": TensorFrame(Forward(MICROBATCH, SIGNED_PATH, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "forward of documents": TensorFrame(Forward(MICROBATCH, OF_DOCUMENTS, 1, Purpose.TRAIN, 61.5), HIDDEN, 12, 3),
    "backward of labels": TensorFrame(Backward(MICROBATCH, OF_LABELS, 1), HIDDEN, 12, 3),
    "forward at first hop": TensorFrame(Forward(FIRST_MICROBATCH, PATH, 0, Purpose.EVALUATE, 0.0), HIDDEN, 0, 3),
    "forward unsigned": TensorFrame(Forward(MICROBATCH, PATH, 3, Purpose.TRAIN, 1.25), FLOATS, 2**32 - 1, 2),
    "backward": TensorFrame(Backward(MICROBATCH, SIGNED_PATH, -1), HIDDEN, 13, 2),
    "backward unsigned": TensorFrame(Backward(MICROBATCH, PATH, 2), FLOATS, 13, 2),
    "receipt": Receipt(
        MICROBATCH, Direction.BACKWARD, -1, ReceiptStatus.PASSED_ON, 1.5, "so it is", 0.25, 0.000001, 3.0
    ),
    "receipt of little": Receipt(FIRST_MICROBATCH, Direction.FORWARD, 0, ReceiptStatus.ACCEPTED),
    "receipt beyond bounds": Receipt(
        MICROBATCH, Direction.FORWARD, 256, ReceiptStatus.BUSY, 1e9, "x" * 300, -1.0, 5000.0, 0.0
    ),
    "stranded": Stranded(MICROBATCH, Direction.BACKWARD, 256, "nobody there", SIGNATURE),
    "stranded unsigned": Stranded(MICROBATCH, Direction.FORWARD, -1, ""),
    "close": Close(MICROBATCH, "abandoned: \u00e4"),
    "recall": Recall(MICROBATCH, SIGNED_PATH, -1),
    "recall unsigned": Recall(MICROBATCH, PATH, 1),
    "settled": Settled(MICROBATCH, PATH),
    "settled of nobody": Settled(FIRST_MICROBATCH, Path(A, ())),
    "unsettled": Unsettled(MICROBATCH),
    "question manifest": QuestionFrame(1, Question(QuestionAbout.MANIFEST)),
    "question status": QuestionFrame(0, Question(QuestionAbout.STATUS)),
    "question evaluate": QuestionFrame(2, Question(QuestionAbout.EVALUATE, 256, stages=(1, 3, 1023))),
    "question state": QuestionFrame(2**32 - 1, Question(QuestionAbout.STATE, module=ModuleId(0), digest=HASH)),
    "question dial_back": QuestionFrame(4, Question(QuestionAbout.DIAL_BACK, port=65_535)),
    "question call": QuestionFrame(5, Question(QuestionAbout.CALL, peer=B, record=b"record")),
    "question router": QuestionFrame(7, Question(QuestionAbout.ROUTER)),
    "question tokenizer": QuestionFrame(7, Question(QuestionAbout.TOKENIZER, piece=258)),
    "question called": QuestionFrame(6, Question(QuestionAbout.CALLED, record=b"record")),
    **{f"answer {about.value}": AnswerFrame(9, about, b"content") for about in QuestionAbout},
    "answer empty": AnswerFrame(9, QuestionAbout.CALLED, b""),
    "answer refused": AnswerFrame(9, None, b"not now"),
    "progress": Progress(ModuleId(3, 1), BASE, 32, 65_536),
    "progress of nothing": Progress(ModuleId(0), INITIAL, 0, 0),
    "invitation": Invitation(ROUND, BASE),
    "accepting": Accepting(FIRST_ROUND),
    "entry": ENTRY,
    "entry of nothing": EMPTY_ENTRY,
    "declined": Declined(ROUND, DeclineReason.NOT_READY, BASE),
    "roster": SignedRoster(ROUND, BASE, (ENTRY, EMPTY_ENTRY), Codec.TOP_K_4, "slow links"),
    "roster without a reason": SignedRoster(ROUND, BASE, (EMPTY_ENTRY,)),
    "contribution": TensorFrame(Contribution(ROUND, 7, 300, SIGNATURE), FLOATS, 15, 5),
    "reduced": TensorFrame(Reduced(ROUND, 1, 2), FLOATS, 16, 1),
    "reduced first": TensorFrame(Reduced(ROUND, 0, 1), FLOATS, 16, 1),
    "pulse": Pulse(ROUND, (A, B), (C,)),
    "pulse of nothing": Pulse(FIRST_ROUND),
    "prepared": Prepared(ROUND, BASE),
    "commit": Commit(ROUND, BASE, (C, A)),
    "dissolved": Dissolved(ROUND, "too few"),
    "state_request": StateRequest(ModuleId(3, 1), HASH, (5, 0, 2**20 - 1)),
    "state_chunk": TensorFrame(StateChunk(ModuleId(3, 1), HASH, 2**20 - 1), PLANES, 17, 1),
    "state_chunk first": TensorFrame(StateChunk(ModuleId(0), HASH, 0), FLOATS, 17, 1),
    "state_refused": StateRefused(ModuleId(3, 1), HASH, (1, 2), StateRefusal.GONE),
    "audit_request": AuditRequest(ROUND, 5, 9),
    "audit_request first": AuditRequest(ROUND, 0, 1),
    "evidence": Evidence(ROUND, 7, 300, SIGNED),
    "evidence of nothing": Evidence(ROUND, 0, 1, ()),
    "audit_refused": AuditRefused(ROUND, 7, 2**20),
    "accusation": Accusation(ROUND, 7, 300, SIGNED),
}
