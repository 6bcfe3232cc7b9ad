"""Proof on the user's own model: a run on several processes against one process, stage by stage."""

from lightning_gradavg.verification.api import verify
from lightning_gradavg.verification.report import Report
from lightning_gradavg.verification.verifier import GradAvgVerifier

__all__ = ["GradAvgVerifier", "Report", "verify"]
