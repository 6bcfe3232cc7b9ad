"""Measurements of speed: `python -m benchmarks.NAME`. Nothing here is run by the tests."""
