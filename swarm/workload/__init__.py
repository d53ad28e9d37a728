"""Workload: microbatches of whole documents and of equal cost, what they cost a peer, and which device computes what
(WLB-LLM, arXiv:2503.17924). Pure decisions.
"""
