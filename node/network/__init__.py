"""One node in its run: session, membership, dispatcher and client."""
