"""Model parts held by the stages of a run. `node.model.parts` builds them."""
