"""The emulated network: links that delay, narrow and cut, for processes on one machine."""
