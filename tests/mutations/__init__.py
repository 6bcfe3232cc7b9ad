"""Planted defects, each with the claim that the tests catch it; see `__main__.py`."""
