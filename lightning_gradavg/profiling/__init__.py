"""Where the time of the reduction goes."""
