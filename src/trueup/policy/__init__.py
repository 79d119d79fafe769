"""Trainer against sampler in LLM reinforcement learning: the flagship."""

from trueup.policy.diagnose import diagnose
from trueup.policy.mismatch import mismatch, report_mismatch
from trueup.policy.rollout_correction import RolloutCorrection
from trueup.policy.sums import MismatchSums, scan_chunks, scan_trace

__all__ = [
    "MismatchSums",
    "RolloutCorrection",
    "diagnose",
    "mismatch",
    "report_mismatch",
    "scan_chunks",
    "scan_trace",
]
