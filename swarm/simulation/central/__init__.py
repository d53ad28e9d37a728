"""One planner that knows everything at once, for comparison: no node works like this."""
