"""Replicas of a loader batch on any number of ranks."""
