"""Ways around NAT: dial-back tests, calls, and tunnels through relaying peers. See docs/REACHABILITY.md."""
