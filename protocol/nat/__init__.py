"""Tunnels through relaying peers, for two peers of which neither can be dialled. docs/REACHABILITY.md tells the whole
of it.

messages   what is said before bytes flow, on streams between peers
splicing   carrying bytes between two streams
limits     how much a relaying peer gives
figures    how much it has given
service    the relaying peer's side
attaching  the side of who waits for tunnels
opening    the side of who opens one
streams    libp2p's streams, by hivemind's daemon
child      all of it in the DHT's process
"""
