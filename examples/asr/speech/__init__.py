"""The parts of the speech recipe: corpus on disk, features, units, microbatches, model, decoding."""
