"""A wide area network on one machine: each node of a local swarm behind a TCP proxy that delays, narrows and cuts what
passes.

`link_shape`, `regions`, `profiles`, `flow` and `scenario` decide and compute without IO; `emulation` is the network as
it is at a moment; `proxy`, `sockets` and `runner` do the IO; `metrics`, `report` and `plots` say what came of it.
"""
