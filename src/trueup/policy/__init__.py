"""Trainer against sampler in LLM reinforcement learning: the flagship."""

from trueup.policy.mismatch import mismatch, report_mismatch
from trueup.policy.rollout_correction import RolloutCorrection
from trueup.policy.sums import MismatchSums, scan_trace

__all__ = ["MismatchSums", "RolloutCorrection", "mismatch", "report_mismatch", "scan_trace"]
