"""The decoder model, cut into the parts that stages hold. Build parts with `node.model.parts`."""
