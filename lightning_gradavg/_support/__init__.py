"""What knows nothing of Lightning: ranks and their exchanges, nested values, random states, arguments."""
