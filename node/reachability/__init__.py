"""Reachability of this node: found out with other peers' help, and made better where the router lets itself be
asked.
"""
