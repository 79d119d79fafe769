"""What explains a gap: ranked causes with the numbers for and against each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Clue:
    """One number that speaks for or against a cause.

    ``feature`` is the handbook's id where it has one ("F1"); ``statement`` is one plain sentence that contains the
    number; ``value`` is that number and ``threshold`` what it was held against (``None`` where it only informs).
    """

    feature: str
    statement: str
    value: float
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """A candidate explanation. ``probability`` is ``None`` as long as no calibrated model stands behind one."""

    id: str
    name: str
    explanation: str
    evidence_for: tuple[Clue, ...] = ()
    evidence_against: tuple[Clue, ...] = ()
    probability: float | None = None
    confirm: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict and the causes behind it, the most probable first.

    ``verdict`` is the name of the leading cause; ``because`` is the one sentence that a hurried reader needs;
    ``record_next`` says which columns or how much more data would let trueup say more.
    """

    verdict: str
    because: str
    causes: tuple[Cause, ...]
    record_next: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return asdict(self)
