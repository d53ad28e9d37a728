"""Guards for hivemind's DHT against malicious bytes: bounds on size, work, expiry and DHT positions.

hivemind 1.1.12 decodes nested msgpack recursively in C, stores any value, and accepts the expiry that an answer claims.
"""

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from protocol.identity import signed_records
from protocol.transport.rate_limits import TokenBuckets
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted
from swarm.vocabulary.types import RunId

MAX_OWNERS_OF_KEY = 256
MIN_OWNERS_OF_KEY = 8
MAX_KEYS_OF_OWNER = 8


def owners_per_key(keys: int) -> int:
    """Returns the limit of record owners per DHT key, so that `keys` keys together have about MAX_RECORDS records."""
    return max(MIN_OWNERS_OF_KEY, min(MAX_OWNERS_OF_KEY, signed_records.MAX_RECORDS // keys))


log = logging.getLogger(__name__)

MAX_EXTENSION_DEPTH = 4  # Legitimate values have one level
MAX_PACKED_BYTES = (signed_records.MAX_RECORD_BYTES + 128) * MAX_OWNERS_OF_KEY  # Of one full key, with owner names
MAX_KEYS_PER_REQUEST = 256
BUDGET_BURST_BYTES = 4 * 2**20
BUDGET_BYTES_PER_S = 256 * 2**10  # About 200 records per second, a tenth of a CPU core
LOOKUP_COST_BYTES = 4096
MAX_ANSWERED = 32  # Records of one key in an answer
MAX_NEAREST = 8  # Nodes named in an answer, for each key


def guard_serializer() -> None:
    """Limits the size and nesting that hivemind's msgpack decoder accepts, by patching it once per process."""
    if getattr(MSGPackSerializer, "is_guarded", False):
        return
    decode_extension = MSGPackSerializer._decode_ext_types.__func__
    loads = MSGPackSerializer.loads.__func__
    depth = threading.local()

    def bounded_extension(cls: Any, code: int, data: bytes) -> Any:
        level = getattr(depth, "level", 0)
        if level >= MAX_EXTENSION_DEPTH:
            raise ValueError(f"msgpack extensions nested deeper than {MAX_EXTENSION_DEPTH}")
        depth.level = level + 1
        try:
            return decode_extension(cls, code, data)
        finally:
            depth.level = level

    def bounded_loads(cls: Any, data: bytes) -> Any:
        if len(data) > MAX_PACKED_BYTES:
            raise ValueError(f"{len(data)} bytes of msgpack are more than the {MAX_PACKED_BYTES} allowed")
        return loads(cls, data)

    MSGPackSerializer._decode_ext_types = classmethod(bounded_extension)
    MSGPackSerializer.loads = classmethod(bounded_loads)
    MSGPackSerializer.is_guarded = True


def node_id_of(peer: PeerID) -> Any:
    """Returns a peer's position in the DHT: the hash of its peer id, so that a peer cannot choose its neighbours."""
    return DHTID.generate(peer.to_bytes())


def unpack_bytes(packed: bytes) -> bytes:
    """Returns the content of one msgpack `bin 8` or `bin 16` value. Raises ProtocolViolation for other encodings."""
    if len(packed) >= 2 and packed[0] == 0xC4 and packed[1] == len(packed) - 2:
        return packed[2:]
    if len(packed) >= 3 + 256 and packed[0] == 0xC5 and int.from_bytes(packed[1:3], "big") == len(packed) - 3:
        return packed[3:]
    raise ProtocolViolation("dht: the value is not one packed record")


class RecordRules(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """DHT validator: accepts only signed records of this run, each under its own module's key and its own peer id."""

    # A value without a subkey has a packed None here, which is not a peer id.

    priority = 1000

    def __init__(self, run: RunId, experts: Sequence[int], now: Callable[[], float]) -> None:
        """`experts`: number of modules of each stage."""
        self._run, self._experts, self._now = run, experts, now

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record)
        except ProtocolViolation as violation:
            log.debug("record refused: %s", violation)
            return False
        return True

    def check(self, record: DHTRecord) -> None:
        """Checks a record's size, expiry, signature, key, owner and module. Raises ProtocolViolation with a reason."""
        value, expires_at = record.value, record.expiration_time
        if not isinstance(value, bytes) or len(value) > signed_records.MAX_RECORD_BYTES + 3:
            raise ProtocolViolation("dht: the value is not bytes, or too long")
        now = self._now()
        if (
            not isinstance(expires_at, float)
            or not math.isfinite(expires_at)
            or not now < expires_at <= now + signed_records.MAX_LIFETIME_S
        ):
            raise ProtocolViolation(
                f"dht: expiry {expires_at!r:.40} is not within {signed_records.MAX_LIFETIME_S:.0f} s"
            )
        announcement = signed_records.decode_announced(unpack_bytes(value), run=self._run, now=now)
        if announcement.expires_at != expires_at:
            raise ProtocolViolation("dht: the expiry is not the signed one")
        # hivemind passes the hash of the key to validators.
        if record.key != bytes(DHTID.generate(signed_records.directory_key(announcement.run, announcement.module))):
            raise ProtocolViolation("dht: stored under another key, not the signed one")
        if record.subkey != MSGPackSerializer.dumps(str(announcement.peer)):
            raise ProtocolViolation("dht: the subkey is not the owner's peer id")
        module = announcement.module
        if module is not None and (module.stage >= len(self._experts) or module.expert >= self._experts[module.stage]):
            raise ProtocolViolation(f"dht: the run has no module {module}")


@dataclass(slots=True, eq=False)
class GuardedStorage:
    """Bounded store of unexpired, validated DHT records by key and owner, with the interface of hivemind's storage."""

    now: Callable[[], float]  # Unix time in seconds
    owners_of_key: int = MAX_OWNERS_OF_KEY
    max_records: int = signed_records.MAX_RECORDS
    longest_s: float = math.inf  # Longest remaining time in seconds, in case this machine's clock was set back
    _rooms: dict[Any, dict[str, ValueWithExpiration]] = field(default_factory=dict)
    _keys_of: dict[str, dict[Any, None]] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Any) -> bool:
        return bool(self.of_key(key))

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Stores a record that replaces an older one of its owner, or if the store has room. Returns whether it did."""
        owner, kept = subkey, ValueWithExpiration(value, expiration_time)
        if not self._holds(kept):
            return False
        present = self._rooms.get(key, {}).get(owner)
        if present is not None:
            is_newer = expiration_time > present.expiration_time or not self._holds(present)
            if is_newer:
                self._rooms[key][owner] = kept
            return is_newer
        if self._is_full(key):
            self._drop_expired()
            if self._is_full(key):
                return False
        if len(self._keys_of.get(owner, ())) >= MAX_KEYS_OF_OWNER:
            oldest = min(self._keys_of[owner], key=lambda key: self._rooms[key][owner].expiration_time)
            self._remove(oldest, owner)
        self._rooms.setdefault(key, {})[owner] = kept
        self._keys_of.setdefault(owner, {})[key] = None
        self._count += 1
        return True

    def of_key(self, key: Any) -> dict[str, ValueWithExpiration]:
        return {owner: kept for owner, kept in self._rooms.get(key, {}).items() if self._holds(kept)}

    def get(self, key: Any) -> ValueWithExpiration | None:
        # A new dictionary each time, because hivemind merges into it. Of many records a random sample.
        records = list(self.of_key(key).items())
        return dictionary_of(dict(random.sample(records, min(len(records), MAX_ANSWERED))))

    def items(self) -> Iterator[tuple[Any, ValueWithExpiration]]:
        self._drop_expired()
        for key in tuple(self._rooms):
            if (item := self.get(key)) is not None:
                yield key, item

    def _holds(self, kept: ValueWithExpiration) -> bool:
        return bool(0 < kept.expiration_time - self.now() <= self.longest_s)

    def _is_full(self, key: Any) -> bool:
        return len(self._rooms.get(key, ())) >= self.owners_of_key or self._count >= self.max_records

    def _drop_expired(self) -> None:
        for key, room in tuple(self._rooms.items()):
            for owner, kept in tuple(room.items()):
                if not self._holds(kept):
                    self._remove(key, owner)

    def _remove(self, key: Any, owner: str) -> None:
        del self._rooms[key][owner], self._keys_of[owner][key]
        if not self._rooms[key]:
            del self._rooms[key]
        if not self._keys_of[owner]:
            del self._keys_of[owner]
        self._count -= 1


def dictionary_of(records: Mapping[str, ValueWithExpiration]) -> ValueWithExpiration | None:
    """Converts one key's records, by owner, to hivemind's dictionary with the latest expiry; None for no records."""
    if not records:
        return None
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for owner, (value, expires_at) in records.items():
            dictionary.store(owner, value, expires_at)
    return ValueWithExpiration(dictionary, max(expires_at for _, expires_at in records.values()))


def recomputed(answer: ValueWithExpiration | None) -> ValueWithExpiration | None:
    """Returns a DHT node's answer with the expiry computed from its records, because the node may claim another."""
    if answer is None or not isinstance(answer.value, DictionaryDHTValue):
        return None
    return dictionary_of(answer.value.data)


def plausible(nearest: Mapping[Any, PeerID], most: int) -> dict[Any, PeerID]:
    """Filters the nodes in an answer: keeps at most `most` whose DHT position is the hash of their peer id."""
    honest = [(node, peer) for node, peer in nearest.items() if node == node_id_of(peer)]
    return dict(honest[:most])


class SourceBudgets:
    """Token buckets that limit the work, in bytes, that each remote peer can cause by its DHT requests."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._allowance = TokenBuckets(BUDGET_BURST_BYTES, 1 / BUDGET_BYTES_PER_S)

    def spend(self, peer: str, cost_bytes: int) -> None:
        """Charges a peer for one request. Raises ResourceExhausted until the peer's budget has refilled enough."""
        if not self._allowance.take(peer, self._now(), cost_bytes):
            raise ResourceExhausted("too many requests; try again later")


class GuardedProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no types
    """hivemind's DHT protocol with bounds on requests and checks of answers. Compatible with plain hivemind nodes."""

    budgets: SourceBudgets

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        if len(request.keys) > MAX_KEYS_PER_REQUEST or len(request.subkeys) != len(request.keys):
            raise ProtocolViolation(f"at most {MAX_KEYS_PER_REQUEST} records, each with a subkey")
        if any(request.in_cache):
            raise ProtocolViolation("this node does not cache records")
        self.budgets.spend(str(context.remote_id), request.ByteSize())
        return await super().rpc_store(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        if len(request.keys) > MAX_KEYS_PER_REQUEST:
            raise ProtocolViolation(f"at most {MAX_KEYS_PER_REQUEST} keys")
        self.budgets.spend(str(context.remote_id), LOOKUP_COST_BYTES * len(request.keys))
        response = await super().rpc_find(request, context)
        for result in response.results:
            del result.nearest_node_ids[MAX_NEAREST:], result.nearest_peer_ids[MAX_NEAREST:]
        return response

    async def call_find(self, peer: PeerID, keys: Iterable[Any]) -> dict[Any, tuple[Any, dict[Any, PeerID]]] | None:
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (recomputed(item), plausible(nearest, self.bucket_size)) for key, (item, nearest) in found.items()}

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drops a key's invalid records, so that an expired record does not hide others. False if all are invalid."""
        with dictionary.freeze():
            records = list(dictionary.items())
            # A random choice: a stranger's thousands of records cannot keep the same honest ones out for ever.
            random.shuffle(records)
            for position, (subkey, (value, expires_at)) in enumerate(records):
                record = DHTRecord(key_bytes, self.serializer.dumps(subkey), value, expires_at)
                if position >= MAX_ANSWERED or not self.record_validator.validate(record):
                    del dictionary[subkey]
        return bool(dictionary.data)

    async def update_routing_table(self, node_id: Any, peer_id: PeerID, responded: bool = True) -> None:
        if node_id is not None and node_id != node_id_of(peer_id):
            return
        if responded and node_id is None:
            return
        await super().update_routing_table(node_id, peer_id, responded=responded)
        if node_id is not None:
            self._trim_replacements(node_id)

    def _trim_replacements(self, node_id: Any) -> None:
        """Drops surplus replacement nodes from the routing-table bucket of `node_id`, which hivemind does not limit."""
        table = self.routing_table
        bucket = table.buckets[table.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > self.bucket_size:
            del table[next(iter(bucket.replacement_nodes))]
