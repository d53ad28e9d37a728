"""What members of a round check of each other after it was committed."""
