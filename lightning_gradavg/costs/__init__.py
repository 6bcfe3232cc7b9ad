"""What communication costs: an alpha-beta model of a training step, and the figures of the links that it needs."""
