"""Which codec for which link, and what a link carries."""
