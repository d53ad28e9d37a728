"""Downloads and serves anchors."""
