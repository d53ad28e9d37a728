"""Which codec for which link."""
