"""Proof on the user's own model: a run on several processes against one process that trains freely."""

from lightning_gradavg.verify.processes import verify
from lightning_gradavg.verify.report import Report

__all__ = ["Report", "verify"]
