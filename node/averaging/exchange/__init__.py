"""All-reduce of pseudo-gradients in one attempt at a round: partition into pieces, reduction, plausibility checks."""
