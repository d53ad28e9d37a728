"""All-reduce of one attempt: pseudo-gradients, partition into pieces, reduction, plausibility checks."""
