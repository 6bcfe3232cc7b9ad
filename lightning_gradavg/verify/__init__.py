"""Proof on the user's own model: a run on several processes against one process, stage by stage."""

from lightning_gradavg.verify.callback import GradAvgVerifier
from lightning_gradavg.verify.report import Report
from lightning_gradavg.verify.run import verify

__all__ = ["GradAvgVerifier", "Report", "verify"]
