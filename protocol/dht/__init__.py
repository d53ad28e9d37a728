"""The directory: client, supervisor, child process, guards."""
