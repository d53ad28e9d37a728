"""A link survives being printed, pasted and read; garbage is refused in words that help."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity.keys import peer_id_of
from protocol.manifest.join_link import EXAMPLE, MAX_LINK_PEERS, JoinLink, multiaddr_of, parse_link
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import RunId

RUN = RunId("0123456789abcdef" * 4)
PEER = peer_id_of(bytes(range(32)))
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified and not ip.is_multicast).map(lambda ip: f"ip4/{ip}"),
    st.ip_addresses(v=6).filter(lambda ip: not ip.is_unspecified and not ip.is_multicast).map(lambda ip: f"ip6/{ip}"),
    st.lists(labels, min_size=1, max_size=4).map(lambda parts: "dns4/" + ".".join(parts)),
    st.lists(labels, min_size=1, max_size=4).map(lambda parts: "dns6/" + ".".join(parts)),
)
ports = st.integers(1, 65_535)
transports = ports.map(lambda port: f"tcp/{port}") | ports.map(lambda port: f"udp/{port}/quic-v1")
peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
addresses = st.builds(lambda host, transport, peer: f"/{host}/{transport}/p2p/{peer}", hosts, transports, peers)
links = st.builds(
    JoinLink,
    st.text("0123456789abcdef", min_size=64, max_size=64).map(RunId),
    st.lists(addresses, min_size=1, max_size=MAX_LINK_PEERS).map(tuple),
)


@given(links)
def test_a_link_round_trips(link: JoinLink) -> None:
    assert parse_link(str(link)) == link
    assert parse_link(f"  {link}\n") == link


@given(links)
def test_a_link_needs_no_quotes(link: JoinLink) -> None:
    assert shlex.quote(str(link)) == str(link)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_leaves_it_alone(shell: str) -> None:
    link = str(JoinLink(RUN, (ADDRESS, f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{PEER}")))
    for written in (link, f"'{link}'", f'"{link}"'):
        printed = subprocess.run([shell, "-c", f"printf %s {written}"], capture_output=True, check=True).stdout
        assert printed.decode() == link


def test_the_documented_form() -> None:
    assert str(JoinLink(RUN, (ADDRESS, ADDRESS))) == f"skipstone:{RUN}@{ADDRESS},{ADDRESS}"
    assert str(parse_link(EXAMPLE)) == EXAMPLE


def test_the_longest_link_is_accepted() -> None:
    name = ".".join(["a" * 63] * 3 + ["b" * 61])
    link = JoinLink(RUN, (f"/dns4/{name}/udp/65535/quic-v1/p2p/{PEER}",) * MAX_LINK_PEERS)
    assert parse_link(str(link)) == link


def test_hosts_are_kept_in_their_shortest_spelling() -> None:
    link = JoinLink(RUN, (f"/ip6/2001:0DB8:0:0::1/tcp/1/p2p/{PEER}", f"/dns4/Node.Example/tcp/1/p2p/{PEER}"))
    assert link.peers == (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", f"/dns4/node.example/tcp/1/p2p/{PEER}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with 'skipstone:'"),
        ("https://example.org", "must begin with 'skipstone:'"),
        (f"skipstone:{RUN}", "no '@'"),
        (f"skipstone:{RUN}@", "does not begin with '/'"),
        (f"skipstone:{RUN[:-1]}@{ADDRESS}", "64 lower-case"),
        (f"skipstone:{RUN.upper()}@{ADDRESS}", "64 lower-case"),
        (f"skipstone://{RUN}@{ADDRESS}", "64 lower-case"),
        (f"skipstone:{RUN}@{ADDRESS},", "does not begin with '/'"),
        (f"skipstone:{RUN}@{ADDRESS}, {ADDRESS}", "white space"),
        (f"skipstone:{RUN}@" + ",".join([ADDRESS] * 17), "17 peers"),
        (f"skipstone:{RUN}@" + ADDRESS * 200, "characters"),
    ],
)
def test_a_malformed_link_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_link(text)
    assert EXAMPLE in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (ADDRESS[1:], "begin with '/'"),
        (ADDRESS + "/", "is not /HOST-KIND/"),
        (ADDRESS + "/p2p-circuit", "is not /HOST-KIND/"),
        ("/ip4/127.0.0.1/tcp/4001", "is not /HOST-KIND/"),
        (f"/ip4/127.0.0.1/udp/4001/p2p/{PEER}", "is not /HOST-KIND/"),
        (f"/ip4/127.0.0.1/udp/4001/quic/p2p/{PEER}", "is not /HOST-KIND/"),
        (f"/ip4/127.0.0.1/tcp/4001/quic-v1/p2p/{PEER}", "is not /HOST-KIND/"),
        (f"/ip4/127.0.0.1/tcp/4001/ipfs/{PEER}", "is not /HOST-KIND/"),
        (f"/dnsaddr/node.example/tcp/4001/p2p/{PEER}", "not with ip4, ip6, dns4 or dns6"),
        (f"/ip4/127.0.0.256/tcp/4001/p2p/{PEER}", "not an ip4 address"),
        (f"/ip4/127.0.0.01/tcp/4001/p2p/{PEER}", "not an ip4 address"),
        (f"/ip4/::1/tcp/4001/p2p/{PEER}", "not an ip4 address"),
        (f"/ip6/127.0.0.1/tcp/4001/p2p/{PEER}", "not an ip6 address"),
        (f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}", "zone"),
        (f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}", "can be dialled"),
        (f"/ip6/::/tcp/4001/p2p/{PEER}", "can be dialled"),
        (f"/ip4/224.0.0.1/tcp/4001/p2p/{PEER}", "can be dialled"),
        (f"/dns4//tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/-a.example/tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/a..example/tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/{'a' * 64}/tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/a$(id)/tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/a\x1b[2J/tcp/4001/p2p/{PEER}", "host name"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/04001/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/٤٠/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/-1/p2p/{PEER}", "1 to 65535"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not the peer id"),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER[:-1]}", "not the peer id"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/", "not the peer id"),
    ],
)
def test_a_malformed_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_link(f"skipstone:{RUN}@{ADDRESS},{address}")
    assert str(raised.value).isprintable()
    with pytest.raises(ConfigError, match=message):
        JoinLink(RUN, (address,))


def test_a_link_to_nobody_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="names 0 peers"):
        JoinLink(RUN, ())


@given(st.text(max_size=200) | st.text(max_size=100).map(lambda text: f"skipstone:{RUN}@{ADDRESS}{text}" + "x"))
def test_any_text_ends_in_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)


@pytest.mark.parametrize(
    ("host", "multiaddr"),
    [
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/4001"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/4001"),
        ("node.example", "/dns4/node.example/tcp/4001"),
    ],
)
def test_a_host_as_a_multiaddr_can_stand_in_a_link(host: str, multiaddr: str) -> None:
    assert multiaddr_of(host, 4001) == multiaddr
    assert JoinLink(RUN, (f"{multiaddr}/p2p/{PEER}",)).peers == (f"{multiaddr}/p2p/{PEER}",)
