"""`skipstone doctor`: is this machine fit for a node, and what can be made better? One module for a check or a few of a
kind."""
