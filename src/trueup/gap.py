"""The one result type: a ``Gap`` is one quantity under two conditions, a ``GapReport`` is many of them.

Both render alike in a terminal (``rich.print(report)``), in a notebook, and as JSON, and round-trip through it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import polars
    from pydantic import TypeAdapter
    from rich.table import Table

Worse = Literal["higher", "lower", "nonzero"]

#: JSON has no NaN and no infinity; a metric can be either (k3 of an impossible token), and must survive the trip.
_PYDANTIC_CONFIG = {"ser_json_inf_nan": "strings"}


@dataclass(frozen=True, slots=True)
class Gap:
    """One measured difference between the ``train`` and the ``infer`` condition.

    ``low`` and ``high`` bound the interval; both are ``None`` where no honest interval exists, and ``method``
    then says why. ``n`` counts the units that ``value`` averages over (``method`` names them). ``train`` and
    ``infer`` are the two sides' own values, where the quantity has two sides. ``source`` says whose definition
    it is ("trueup", or the framework that logs this very number under this name).

    >>> gap = Gap("mean_k3", 0.00124, 0.0011, 0.0014, 10292, "nats", worse="higher", method="bootstrap")
    >>> print(gap)
    mean_k3 = 0.00124 nats [0.0011, 0.0014], n = 10292
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _PYDANTIC_CONFIG

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    unit: str
    train: float | None = None
    infer: float | None = None
    worse: Worse = "nonzero"
    method: str = ""
    note: str = ""
    label: str = ""
    source: str = "trueup"

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.6g}, {self.high:.6g}]"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} = {self.value:.6g}{unit}{interval}, n = {self.n}"


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity in consecutive bins of another: bin ``i`` covers ``left[i] <= x < right[i]``.

    All tuples have the same length. ``low``/``high`` hold ``None`` where a bin is too small for an interval.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _PYDANTIC_CONFIG

    name: str
    x: str
    unit: str
    left: tuple[float, ...]
    right: tuple[float, ...]
    n: tuple[int, ...]
    value: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    method: str = ""
    label: str = ""


@dataclass(frozen=True)
class GapReport:
    """An ordered set of gaps and curves, with what was excluded, what to beware of, and where it came from.

    ``counts`` holds every exclusion and oddity of the data by name (0 where it was looked for and not found).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _PYDANTIC_CONFIG

    gaps: tuple[Gap, ...]
    curves: tuple[Curve, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Gap:
        """The gap of this name, or the only one whose name ends in ``/name``; ``KeyError`` otherwise."""
        exact = [gap for gap in self.gaps if gap.name == name]
        found = exact or [gap for gap in self.gaps if gap.name.endswith(f"/{name}")]
        if len(found) != 1:
            near = ", ".join(gap.name for gap in found) or "none"
            raise KeyError(f"no single gap is named '{name}' (matches: {near})")
        return found[0]

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except KeyError:
            return False
        return True

    def curve(self, name: str) -> Curve:
        """The curve of this name; ``KeyError`` if there is none."""
        for curve in self.curves:
            if curve.name == name:
                return curve
        raise KeyError(f"no curve is named '{name}'")

    def to_dict(self) -> dict[str, Any]:
        """Plain containers that any JSON writer accepts; non-finite numbers become "NaN" or "Infinity"."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self) -> str:
        """The report as JSON text; ``from_json`` gives an equal report back."""
        return _adapter().dump_json(self, indent=2).decode()

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> GapReport:
        """Rebuild a report from ``to_dict``; other keys are ignored. Raises ``pydantic.ValidationError``."""
        return _adapter().validate_python(plain)

    @classmethod
    def from_json(cls, text: str | bytes) -> GapReport:
        """Rebuild a report from ``to_json``. Raises ``pydantic.ValidationError`` on anything else."""
        return _adapter().validate_json(text)

    def to_frame(self) -> polars.DataFrame:
        """One row a gap, one column a field."""
        import polars

        schema = {
            "name": polars.String, "value": polars.Float64, "low": polars.Float64, "high": polars.Float64,
            "n": polars.Int64, "unit": polars.String, "train": polars.Float64, "infer": polars.Float64,
            "worse": polars.String, "method": polars.String, "note": polars.String, "label": polars.String,
            "source": polars.String,
        }  # fmt: skip
        return polars.DataFrame([dataclasses.asdict(gap) for gap in self.gaps], schema=schema)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table("gap", "value", "interval", "n", "unit", header_style="bold")
        for gap in self.gaps:
            table.add_row(*_cells(gap))
        return table

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(gap)) + "</tr>" for gap in self.gaps
        )
        head = "".join(f"<th>{name}</th>" for name in ("gap", "value", "interval", "n", "unit"))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def format_number(value: float | None) -> str:
    """A number for people: four significant digits, a dash for a missing one.

    >>> format_number(0.0334132), format_number(15.48835), format_number(None)
    ('0.03341', '15.49', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.4g}".replace("-", "−")


def format_interval(gap: Gap) -> str:
    """The interval of a gap for people, or an empty string where there is none."""
    if gap.low is None or gap.high is None:
        return ""
    return f"{format_number(gap.low)} … {format_number(gap.high)}"


def _cells(gap: Gap) -> tuple[str, str, str, str, str]:
    return (gap.name, format_number(gap.value), format_interval(gap), f"{gap.n:,}", gap.unit)


@cache
def _adapter() -> TypeAdapter[GapReport]:
    from pydantic import TypeAdapter

    return TypeAdapter(GapReport)
