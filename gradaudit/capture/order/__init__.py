"""Which calls came in which order, and what became of the gradients in between."""
