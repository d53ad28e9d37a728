"""This peer's presence in a run: session, membership, dispatcher, client."""
