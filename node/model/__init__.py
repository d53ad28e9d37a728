"""The decoder, cut into the parts that stages hold. Build parts with `node.model.build`."""
