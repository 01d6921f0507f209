"""Which rank reads which samples in which order, and how microbatches become steps."""
