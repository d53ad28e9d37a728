"""The directory of peers, on a DHT in a supervised child process."""
