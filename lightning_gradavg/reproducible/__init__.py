"""Training to the same bits on any number of processes: a fixed arithmetic, and a fixed order of sums."""
