"""What `simulate` does."""
