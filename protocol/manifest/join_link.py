"""Join links, which name a run and some of its peers; both forms may end with `?invitation=GRANT`.

Short, as printed: `skipstone:<run>@<host:port>[,<host:port>...]`. The run is the base32 (RFC 4648, lower case, no
padding) of the RunId's last 16 bytes. A node answers at `host:port` with its certificate, which has the first 16 bytes,
its peer id and the port of its DHT. IPv6 addresses have brackets.

Full: `skipstone:<RunId>@<multiaddr>[,<multiaddr>...]`. A multiaddr is /ip4, /ip6, /dns4 or /dns6 and a host, then
/tcp/PORT or /udp/PORT/quic-v1, then /p2p/PEER. Shells need no quotes, except zsh for an invitation and brackets.
"""

import base64
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.identity.invitations import Grant
from protocol.identity.keys import public_key_of
from protocol.identity.signed_records import is_address
from swarm.vocabulary.errors import ConfigError, ProtocolViolation
from swarm.vocabulary.types import PeerId, RunId

MAX_LINK_PEERS: Final = 16
MAX_LINK_CHARACTERS: Final = 8192

EXAMPLE: Final = "skipstone:uo7u6gzlbobczuk5nqk3b4akba@203.0.113.7:4001"

_SCHEME: Final = "skipstone:"
_INVITATION: Final = "?invitation="
_RUN: Final = re.compile(r"[0-9a-f]{64}")
_SHORT_RUN: Final = re.compile(r"[a-z2-7]{25}[aeimquy4]")
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True, slots=True)
class JoinLink:
    """A RunId and 1 to 16 multiaddrs of the run's peers, each in its shortest spelling. Raises ConfigError."""

    run: RunId
    peers: tuple[str, ...]
    invitation: Grant | None = None

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise _wrong(f"the run is {_shown(self.run)}, not 26 characters of base32, nor 64 lower-case hex digits")
        if not 1 <= len(self.peers) <= MAX_LINK_PEERS:
            raise _wrong(f"it names {len(self.peers)} peers, allowed are 1 to {MAX_LINK_PEERS}")
        object.__setattr__(self, "peers", tuple(_checked_address(peer) for peer in self.peers))

    def __str__(self) -> str:
        invitation = "" if self.invitation is None else f"{_INVITATION}{self.invitation}"
        return f"{_SCHEME}{self.run}@{','.join(self.peers)}{invitation}"

    @property
    def second_half(self) -> str:
        return self.run[32:]


@dataclass(frozen=True, slots=True)
class ShortLink:
    """The second half of a RunId, 32 hexadecimal digits, and 1 to 16 addresses `host:port`. Raises ConfigError."""

    # 128 bits suffice: a stranger's manifest would need a second preimage, as the answerer cannot choose this half. A
    # collision helps only the run's author, whose two manifests would still be two runs with different RunIds.
    second_half: str
    addresses: tuple[str, ...]
    invitation: Grant | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= MAX_LINK_PEERS:
            raise _wrong(f"it names {len(self.addresses)} peers, allowed are 1 to {MAX_LINK_PEERS}")
        for address in self.addresses:
            if not is_address(address):
                raise _wrong(f"{_shown(address)} is not HOST:PORT (an IPv6 address needs brackets)")

    def __str__(self) -> str:
        run = base64.b32encode(bytes.fromhex(self.second_half)).decode().lower().rstrip("=")
        invitation = "" if self.invitation is None else f"{_INVITATION}{self.invitation}"
        return f"{_SCHEME}{run}@{','.join(self.addresses)}{invitation}"


def short_link(run: RunId, addresses: tuple[str, ...]) -> ShortLink:
    return ShortLink(run[32:], addresses)


Link = JoinLink | ShortLink


def is_link(text: str) -> bool:
    """Whether the text looks like a join link; it may still be malformed."""
    return text.strip().startswith(_SCHEME)


def link_in(text: str) -> Link | None:
    """Parses the join link in `text`, or in the file named `text`; None if there is no link. Raises ConfigError."""
    if is_link(text):
        return parse_link(text)
    try:
        with Path(text).open("rb") as file:
            inside = file.read(MAX_LINK_CHARACTERS + 2).decode(errors="replace")
    except (OSError, ValueError):  # ValueError: not a path, for example a zero byte
        return None
    return parse_link(inside) if is_link(inside) else None


def read_link(text: str) -> Link:
    """Parses the join link in `text` or in the file that it names. Raises ConfigError."""
    return link_in(text) or parse_link(text)


def parse_link(text: str) -> Link:
    """Parses a join link, ignoring surrounding white space. Raises ConfigError with an example of a link."""
    link = text.strip()
    if len(link) > MAX_LINK_CHARACTERS:
        raise _wrong(f"it has {len(link)} characters, allowed are {MAX_LINK_CHARACTERS}")
    if any(character.isspace() for character in link):
        raise _wrong("there is white space inside; was it broken into lines?")
    if not link.startswith(_SCHEME):
        raise _wrong(f"it must begin with {_SCHEME!r}, not {_shown(link)}")
    run, at, peers = link.removeprefix(_SCHEME).partition("@")
    if not at:
        raise _wrong("there is no '@' with the address of a peer after the run")
    peers, invited, invitation = peers.partition(_INVITATION)
    addresses, grant = tuple(peers.split(",")), Grant.parse(invitation) if invited else None
    if _SHORT_RUN.fullmatch(run):
        return ShortLink(base64.b32decode(f"{run.upper()}======").hex(), addresses, grant)
    return JoinLink(RunId(run), addresses, grant)


def multiaddr_of(host: str, port: int) -> str:
    """Returns the multiaddr of a TCP port on a host (name or address), without the peer."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns4"
    return f"/{kind}/{host}/tcp/{port}"


def _checked_address(address: str) -> str:
    """Normalises a multiaddr. Raises ConfigError unless it has a valid host, TCP or QUIC port, and peer id."""
    match address.split("/"):
        case ["", kind, host, "tcp", port, "p2p", peer]:
            transport = f"tcp/{port}"
        case ["", kind, host, "udp", port, "quic-v1", "p2p", peer]:
            transport = f"udp/{port}/quic-v1"
        case _:
            raise _wrong(f"the address {_shown(address)} is not /HOST-KIND/HOST/tcp/PORT/p2p/PEER or udp/PORT/quic-v1")
    if not _PORT.fullmatch(port) or int(port) > 65_535:
        raise _wrong(f"in the address {_shown(address)}, the port is {_shown(port)}, not 1 to 65535")
    try:
        public_key_of(PeerId(peer))
    except ProtocolViolation as error:
        raise _wrong(f"in the address {_shown(address)}, {error}") from None
    return f"/{kind}/{_checked_host(kind, host, address)}/{transport}/p2p/{peer}"


def _checked_host(kind: str, host: str, address: str) -> str:
    match kind:
        case "ip4" | "ip6":
            return _checked_ip(kind, host, address)
        case "dns4" | "dns6":
            name = host.lower()
            if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
                raise _wrong(f"in the address {_shown(address)}, {_shown(host)} is not a host name")
            return name
        case _:
            raise _wrong(f"the address {_shown(address)} begins with {_shown(kind)}, not with ip4, ip6, dns4 or dns6")


def _checked_ip(kind: str, host: str, address: str) -> str:
    family = ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address
    try:
        ip = family(host)
    except ValueError:
        raise _wrong(f"in the address {_shown(address)}, {_shown(host)} is not an {kind} address") from None
    if "%" in host:
        raise _wrong(f"in the address {_shown(address)}, the zone after '%' means nothing on another machine")
    if ip.is_unspecified or ip.is_multicast:
        raise _wrong(f"in the address {_shown(address)}, {host} is not an address that can be dialled")
    return str(ip)


def _shown(text: str) -> str:
    """Quotes, escapes and truncates untrusted text for an error message."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _wrong(reason: str) -> ConfigError:
    return ConfigError(
        f"this is not a join link: {reason}. A link looks like this: {EXAMPLE}",
        hint="Ask the author of the run for the link and copy all of it.",
    )
