"""Directory of a run's peers, on hivemind's DHT in a supervised child process."""
