"""This peer in a run: session, membership, dispatcher, client."""
