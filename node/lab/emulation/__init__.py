"""Links that delay, narrow and cut, for processes on one machine."""
