"""The rounds' runtime: the anchor and its digest, the exchange of pseudo-gradients, catching up. Decisions are in
`swarm.averaging`.
"""
