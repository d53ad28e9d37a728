"""Judges the event logs of a run: does what the nodes report add up? Nothing here does IO; `node.lab.audit.log_files`
reads the files."""
