"""Download and serving of anchors."""
