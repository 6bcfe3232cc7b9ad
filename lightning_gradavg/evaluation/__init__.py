"""Evaluation that sees each sample once."""
