"""A report on a terminal: the verdict, the few numbers that matter, what was left out, and the way to the rest.

Everything that came from data goes through ``Text``, never through markup, and is made inert first.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trueup.diagnosis import Cause, Diagnosis
from trueup.gap import Gap, GapReport
from trueup.report import summary
from trueup.report.inert import one_line

_STYLES: dict[summary.Outcome, str] = {"good": "green", "warn": "yellow", "bad": "red", "open": "cyan"}
#: Below this many columns the interval moves under its value.
_NARROW = 72
#: From this many columns on, the long names of frameworks leave room for every field.
_ROOMY = 110
#: Lines of prose get no longer than this; tables may.
_WIDEST = 110


def print_report(report: GapReport, diagnosis: Diagnosis, *, console: Console, every: bool = False) -> None:
    """Print the verdict and the headline numbers; with ``every``, all gaps by source as well."""
    narrow = console.width < _NARROW
    blocks: list[RenderableType] = [_verdict(diagnosis), "", _headline_table(report, narrow=narrow)]
    blocks += _left_out(report) + _warnings(report)
    if not every and len(report.gaps) > summary.HEADLINE_COUNT:
        blocks += ["", Text(f"All {len(report.gaps)} numbers, as each framework logs them: --all", style="dim")]
    console.print(Group(*blocks), width=min(console.width, _WIDEST))
    if every:
        for source, gaps in summary.by_source(report).items():
            console.print()
            console.print(Text(one_line(source), style="bold"))
            console.print(_gap_table(gaps, columns=console.width))


def _verdict(diagnosis: Diagnosis) -> Panel:
    outcome, meaning = summary.outcome_of(diagnosis)
    style = _STYLES[outcome]
    lines: list[RenderableType] = [Text(one_line(diagnosis.because))]
    if diagnosis.causes:
        lines += _leading(diagnosis.causes[0], style)
    others = [one_line(cause.name) for cause in diagnosis.causes[1:4]]
    if others:
        lines += ["", _hanging("Also weighed", Text("; ".join(others)), "dim")]
    if diagnosis.record_next:
        lines.append("")
        lines += [
            _hanging("Record next" if index == 0 else "", Text(one_line(text)), "dim")
            for index, text in enumerate(diagnosis.record_next)
        ]
    return Panel(
        Group(*lines),
        title=Text(_sentence(diagnosis.verdict), style=f"bold {style}"),
        title_align="left",
        subtitle=Text(meaning, style=style) if meaning else None,
        subtitle_align="right",
        border_style=style,
        padding=(1, 2),
    )


def _leading(cause: Cause, style: str) -> list[RenderableType]:
    name = Text(one_line(cause.name), style="bold")
    if cause.probability is not None:
        name.append(f"  {cause.probability:.0%}", style="dim")
    lines: list[RenderableType] = ["", _hanging("Cause", name, "dim")]
    for label, sign, clues in (("For", "+", cause.evidence_for), ("Against", "−", cause.evidence_against)):
        for index, clue in enumerate(clues):
            text = Text.assemble((f"{sign} ", style if sign == "+" else "dim"), one_line(clue.statement))
            lines.append(_hanging(label if index == 0 else "", text, "dim"))
    if cause.confirm:
        lines.append(_hanging("Confirm", Text(one_line(cause.confirm)), "dim"))
    return lines


def _hanging(label: str, text: Text, style: str) -> Table:
    """A label in the margin with text that wraps beside it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=12, no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(label, style=style), text)
    return grid


def _headline_table(report: GapReport, *, narrow: bool) -> Table:
    table = _table("", "value") if narrow else _table("", "value", "unit", "interval")
    for row in summary.headlines(report):
        value, interval = summary.value_text(row.gap), summary.interval_text(row.gap)
        unit, place = one_line(row.gap.unit), summary.reading(row)
        label = Text.assemble(one_line(row.label), "\n", (one_line(row.gap.name), "dim"))
        if narrow:
            number = Text.assemble((value, "bold"), (f" {unit}" if unit else "", "dim"))
            number.append(f"\n{interval}" if interval else "", style="dim")
            table.add_row(label, number)
        else:
            bounds = Text.assemble(interval or ("no interval", "dim"))
            bounds.append(f"\n{place}" if place else "", style="dim")
            table.add_row(label, Text(value, style="bold"), Text(unit, style="dim"), bounds)
    return table


def _gap_table(gaps: list[Gap], *, columns: int) -> Table:
    """The names are long, so that on fewer columns the unit follows the name, and n makes room."""
    wide, narrow = columns >= _ROOMY, columns < _NARROW
    table = (
        _table("", "value", "unit", "interval", "n")
        if wide
        else _table("", "value", *[] if narrow else ["interval"])
    )
    for gap in gaps:
        unit, interval = one_line(gap.unit), Text(summary.interval_text(gap))
        name, value = Text(one_line(gap.name)), Text(summary.value_text(gap), style="bold")
        if wide:
            table.add_row(name, value, Text(unit, style="dim"), interval, Text(f"{gap.n:,}", style="dim"))
        else:
            name.append(f"  {unit}" if unit else "", style="dim")
            table.add_row(*([name, value] if narrow else [name, value, interval]))
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for header in headers:
        if header in ("value", "n"):
            table.add_column(header, justify="right", no_wrap=True)
        elif header == "interval":
            table.add_column(header, no_wrap=True)
        else:
            table.add_column(header, overflow="fold")
    return table


def _left_out(report: GapReport) -> list[RenderableType]:
    found, _ = summary.exclusions(report)
    if not found:
        return []
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for label, count in found:
        table.add_row(Text(f"{count:,}"), Text(one_line(label)))
    return ["", Text("Left out, or odd", style="bold"), Padding(table, (0, 0, 0, 2))]


def _warnings(report: GapReport) -> list[RenderableType]:
    if not report.warnings:
        return []
    lines = [_marked("!", Text(one_line(warning))) for warning in report.warnings]
    return ["", Text("Beware", style="bold"), *lines]


def _marked(mark: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(mark, style="yellow"), text)
    return grid


def _sentence(text: str) -> str:
    line = one_line(text)
    return line[:1].upper() + line[1:]
