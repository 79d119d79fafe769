from __future__ import annotations

import io
import math

import pytest
from fake_report import BOOKKEEPING, LAW, NOISE, UNKNOWN
from rich.cells import cell_len
from rich.console import Console

from trueup.diagnosis import Cause, Clue, Diagnosis
from trueup.gap import Gap, GapReport
from trueup.report import print_report
from trueup.report.summary import interval_text, value_text


def printed(
    report: GapReport, diagnosis: Diagnosis, *, width: int = 80, every: bool = False, colour: bool = False
) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None
    )
    print_report(report, diagnosis, console=console, every=every)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_verdict_and_headlines_fit_any_width(report: GapReport, width: int) -> None:
    text = printed(report, NOISE, width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "Honest numerical noise" in text
    for gap in report.gaps[:5]:
        assert value_text(gap) in text
        assert interval_text(gap) in text
    for part in ("mean_ratio", "ess_fraction", "1,204", "--all"):
        assert part in text


def test_the_verdict_comes_first_with_evidence_on_both_sides(report: GapReport) -> None:
    text = printed(report, NOISE, width=120)
    order = [
        text.index(part) for part in ("Honest", "0.62 standard errors", "kurtosis", "mean_abs_log_ratio", "--all")
    ]
    assert order == sorted(order)


def test_only_what_was_found_is_listed(report: GapReport) -> None:
    text = printed(report, NOISE)
    assert "417  Sampler's log-probability exactly 0, kept" in text
    assert "9999" not in text


def test_every_lists_all_gaps_by_source(report: GapReport) -> None:
    text = printed(report, NOISE, width=200, every=True)
    assert all(gap.name in text for gap in report.gaps)
    assert all(source in text.split() for source in ("verl", "TRL", "NeMo-RL", "prime-rl", "MiniMax-M1"))
    assert "--all" not in text


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_missing_numbers_are_never_spelled_out(report: GapReport, width: int, every: bool) -> None:
    words = printed(report, NOISE, width=width, every=every).split()
    assert not {"nan", "NaN", "inf", "None"} & set(words)


@pytest.mark.parametrize(
    ("diagnosis", "code"), [(NOISE, "32m"), (LAW, "33m"), (BOOKKEEPING, "31m"), (UNKNOWN, "36m")]
)
def test_the_outcome_is_coloured_on_a_terminal_only(diagnosis: Diagnosis, code: str) -> None:
    assert code in printed(GapReport(gaps=()), diagnosis, colour=True)
    assert "\x1b" not in printed(GapReport(gaps=()), diagnosis)


def test_data_is_neither_markup_nor_control_sequence() -> None:
    text = "[bold red]x[/] \x1b[31m :smile: [link=file:a]b[/link]"
    clue = Clue(text, text, math.nan)
    diagnosis = Diagnosis(text, text, (Cause(text, text, text, (clue,), (clue,), 0.5, text),) * 2, (text,))
    gap = Gap(text, math.nan, None, None, 1, text, label=text, source=text)
    report = GapReport(gaps=(gap,) * 9, counts={text: 1}, warnings=(text,))
    for width in (60, 200):
        shown = printed(report, diagnosis, width=width, every=True, colour=True)
        assert "\x1b]8" not in shown  # no hyperlink
        assert "☺" not in shown
        assert "😄" not in shown
    plain = printed(report, diagnosis, width=200, every=True)
    assert "\x1b" not in plain
    assert plain.count("[bold red]x[/] ␛[31m :smile:") >= 8


def test_an_unknown_verdict_and_an_empty_report_print() -> None:
    text = printed(GapReport(gaps=()), Diagnosis("weights out of date", "Lag 3 is worse than lag 0.", ()))
    assert "Weights out of date" in text
    assert "Lag 3" in text


@pytest.mark.parametrize(
    ("gap", "value", "interval"),
    [
        (Gap("mean_ratio", 1.00012, 0.99991, 1.00033, 9, ""), "1.00012", "0.99991 … 1.00033"),
        (Gap("pearson", 0.99999, None, None, 9, ""), "0.999990", ""),
        (Gap("k3", 0.0012345, 0.001, 0.002, 9, ""), "0.001234", "0.001 … 0.002"),
        (Gap("chi2", math.inf, math.nan, math.inf, 9, ""), "∞", ""),
        (Gap("slope", math.nan, None, None, 0, ""), "–", ""),
        (Gap("zero", 0.0, 0.0, 0.0, 9, ""), "0", "0 … 0"),
        (Gap("one", 1.0, 1.0, 1.0, 9, ""), "1", "1 … 1"),
        (Gap("signed", -1.00004, -1.00006, -1.00002, 9, ""), "−1.000040", "−1.000060 … −1.000020"),
    ],
)
def test_digits_follow_the_interval(gap: Gap, value: str, interval: str) -> None:
    assert (value_text(gap), interval_text(gap)) == (value, interval)
