"""Examples to copy, and the demo that compares stock DDP and GradAvg with one process."""
