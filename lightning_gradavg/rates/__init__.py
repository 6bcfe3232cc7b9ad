"""The learning rate, which follows the global batch."""
