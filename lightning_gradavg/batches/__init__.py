"""Training data: the chunks of each loader batch, in the order of one process."""
