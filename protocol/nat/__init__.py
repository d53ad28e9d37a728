"""NAT traversal: dial-back tests, and tunnels through relays."""
