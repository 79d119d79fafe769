"""A report as one HTML file that needs nothing else: no network, and nothing alive that came from the data.

Every expression of the template passes through ``inert`` and is escaped. The only markup that is let through are
our own charts, and the only script is ours, named by its hash in the page's content security policy.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trueup.diagnosis import Diagnosis
from trueup.evidence.trace import TokenTrace
from trueup.gap import Curve, Gap, GapReport, format_number
from trueup.report import charts, reader, summary
from trueup.report.inert import inert

_TEMPLATES = files("trueup.report") / "templates"
#: Axes in the order of the page: the words of their headings.
_AXES: dict[str, str] = {
    "position": "By position",
    "probability": "By probability",
    "entropy": "By entropy",
    "segment": "By segment",
    "version_lag": "By version lag",
    "repetition": "By repetition",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart (two, where a narrow screen gets its own drawing) with the numbers behind it."""

    id: str
    title: str
    svg: Markup
    narrow: Markup | None
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval as percentages of a strip that also holds the ideal."""

    left: float
    width: float
    dot: float
    ideal: float


def render_html(report: GapReport, diagnosis: Diagnosis, worst: TokenTrace | None, *, title: str) -> str:
    """The whole page as text that encodes to UTF-8.

    ``worst`` holds the sequences that carry the most of the gap, the worst first; ``None`` leaves the reader out.
    """
    script = (_TEMPLATES / "mismatch.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    outcome, meaning = summary.outcome_of(diagnosis)
    found, absent = summary.exclusions(report)
    methods = _methods(report)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, finalize=_finalize
    )
    environment.filters |= {
        "number": format_number,
        "interval": summary.interval_text,
        "value": summary.value_text,
    }
    template = environment.from_string((_TEMPLATES / "mismatch.html.j2").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        style=Markup((_TEMPLATES / "mismatch.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(digest),
        report=report,
        diagnosis=diagnosis,
        outcome=outcome,
        meaning=meaning,
        headlines=[(row, _bar(row), summary.reading(row)) for row in summary.headlines(report)],
        sizes=[
            (summary.count_label(name), report.counts[name]) for name in summary.SIZES if name in report.counts
        ],
        histogram=_histogram(report),
        figures=_figures(report),
        passages=reader.passages(report, worst),
        steps=reader.STEPS,
        most_tokens=reader.MOST_TOKENS,
        sources=summary.by_source(report),
        methods=methods,
        exclusions=found,
        absent=absent,
        provenance=_facts(report.provenance),
    )


def _finalize(value: Any) -> Any:
    """Applied to every expression of the template, so that no string can be forgotten."""
    return value if isinstance(value, Markup | int | float) else inert(value)


def _bar(headline: summary.Headline) -> Bar | None:
    gap, ideal = headline.gap, headline.ideal
    if ideal is None or gap.low is None or gap.high is None:
        return None
    marks = (gap.value, gap.low, gap.high, ideal)
    if not all(math.isfinite(mark) for mark in marks) or max(marks) == min(marks):
        return None
    first, reach = min(marks), max(marks) - min(marks)

    def place(mark: float) -> float:
        return round(6 + 88 * (mark - first) / reach, 2)

    return Bar(place(gap.low), round(place(gap.high) - place(gap.low), 2), place(gap.value), place(ideal))


def _methods(report: GapReport) -> dict[str, int]:
    """Every distinct method with its footnote number: it would otherwise be repeated in each row."""
    methods: dict[str, int] = {}
    for gap in report.gaps:
        if gap.method:
            methods.setdefault(gap.method, len(methods) + 1)
    return methods


def _histogram(report: GapReport) -> Figure | None:
    curve = _curve(report, "log_ratio_histogram")
    if curve is None:
        return None
    wide = charts.ratio_histogram(curve, width=880, height=250)
    if not wide:
        return None
    narrow = charts.ratio_histogram(curve, width=300, height=250)
    rows = tuple(
        (_edges(left, right), f"{n:,}", format_number(share))
        for left, right, n, share in zip(curve.left, curve.right, curve.n, curve.value, strict=True)
        if n or share
    )
    columns = ("ℓ, nats", "tokens", "share")
    return Figure("histogram", "", Markup(wide), Markup(narrow), columns, rows, curve.method)


def _figures(report: GapReport) -> list[Figure]:
    figures = []
    for axis, heading in _AXES.items():
        size, signed = (_curve(report, f"{name}_by_{axis}") for name in ("mean_abs_log_ratio", "mean_log_ratio"))
        if size is None:
            continue
        spread = _curve(report, f"std_log_ratio_by_{axis}")
        svg = charts.by_axis(size, signed, spread, axis=axis)
        if svg:
            rows = tuple(_row(size, signed, index, axis) for index in range(len(size.value)))
            columns = (axis.replace("_", " "), "tokens", "mean |ℓ|", "interval", "mean ℓ")
            figures.append(Figure(axis, heading, Markup(svg), None, columns, rows, size.method))
    return figures


def _row(size: Curve, signed: Curve | None, index: int, axis: str) -> tuple[str, ...]:
    place = (
        charts.category_label(axis, size.left[index])
        if axis in charts.CATEGORICAL
        else _edges(size.left[index], size.right[index])
    )
    as_gap = Gap("", size.value[index], size.low[index], size.high[index], size.n[index], "")
    mean = signed.value[index] if signed is not None and index < len(signed.value) else None
    return (
        place,
        f"{size.n[index]:,}",
        format_number(size.value[index]),
        summary.interval_text(as_gap) or "–",
        format_number(mean),
    )


def _edges(left: float, right: float) -> str:
    return format_number(left) if left == right else f"{format_number(left)} … {format_number(right)}"


def _curve(report: GapReport, name: str) -> Curve | None:
    try:
        return report.curve(name)
    except KeyError:
        return None


def _facts(plain: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as flat (name, text) pairs."""
    facts: list[tuple[str, str]] = []
    for name, value in plain.items():
        if isinstance(value, Mapping):
            facts += _facts(value, f"{prefix}{name} · ")
        elif isinstance(value, list | tuple):
            facts.append((f"{prefix}{name}", "\n".join(_fact(item) for item in value) or "–"))
        else:
            facts.append((f"{prefix}{name}", _fact(value)))
    return facts


def _fact(value: Any) -> str:
    if value is None:
        return "–"
    return format_number(value) if isinstance(value, float) else str(value)
