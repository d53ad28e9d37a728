"""The audit of a run's event logs: does what the nodes report add up? Nothing here does IO; `lab.audit.log_files`
reads the files.
"""
