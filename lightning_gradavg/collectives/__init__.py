"""Collectives for plain loops and for losses over all ranks' rows."""
