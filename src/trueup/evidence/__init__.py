"""Typed evidence: what was observed under the two conditions, and the files it is kept in."""

from trueup.evidence.trace import MISSING, Ragged, TokenTrace

__all__ = ["MISSING", "Ragged", "TokenTrace"]
