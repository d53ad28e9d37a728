"""Download of anchors from other replicas, and upload of anchors to them."""
