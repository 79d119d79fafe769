"""The result types: look-up, round trips and rendering."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from trueup.gap import Curve, Gap, GapReport, format_interval, format_number

REPORT = GapReport(
    gaps=(
        Gap(
            "mean_k3", 0.00124, 0.0011, 0.0014, 10292, "nats", train=1.0, infer=2.0, method="bootstrap", label="k3"
        ),
        Gap("rollout_corr/k3_kl", math.inf, None, None, 3, "nats", source="verl"),
        Gap("rollout_corr/kl", math.nan, -1.0, 1.0, 3, "nats", source="verl"),
        Gap("rollout_correction/kl", 0.5, None, None, 3, "nats", source="<script>"),
    ),
    curves=(Curve("c", "x", "nats", (0.0,), (1.0,), (2,), (-math.inf,), (None,), (0.5,)),),
    counts={"nan": 0},
    warnings=("Beware.",),
    provenance={"seed": 1, "files": ["a"]},
)


def test_json_round_trip_keeps_everything() -> None:
    again = GapReport.from_json(REPORT.to_json())
    assert again.gaps[:2] == REPORT.gaps[:2]
    assert math.isnan(again.gaps[2].value)
    assert (again.gaps[2].low, again.gaps[2].high) == (-1.0, 1.0)
    assert (again.curves, again.counts, again.warnings, again.provenance) == (
        REPORT.curves, REPORT.counts, REPORT.warnings, REPORT.provenance,
    )  # fmt: skip
    assert GapReport.from_dict(REPORT.to_dict()).gaps[0] == REPORT.gaps[0]
    # JSON knows neither: they travel as words.
    assert REPORT.to_dict()["gaps"][1]["value"] == "Infinity"
    assert REPORT.to_dict()["gaps"][2]["value"] == "NaN"


def test_look_up_by_name_or_unambiguous_ending() -> None:
    assert REPORT["mean_k3"].n == 10292
    assert REPORT["k3_kl"].source == "verl"
    assert "k3_kl" in REPORT
    assert "absent" not in REPORT
    with pytest.raises(KeyError, match=r"rollout_corr/kl, rollout_correction/kl"):
        REPORT["kl"]
    assert REPORT.curve("c").n == (2,)
    with pytest.raises(KeyError, match="absent"):
        REPORT.curve("absent")


def test_frame_has_a_row_a_gap() -> None:
    frame = REPORT.to_frame()
    assert frame.height == 4
    assert frame["name"].to_list()[0] == "mean_k3"
    assert frame["low"].to_list()[1] is None


def test_rendering_escapes_and_never_says_nan() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(REPORT)
    text = console.export_text()
    assert "0.00124" in text
    assert "nan" not in text
    page = GapReport((Gap("<b>", 1.0, None, None, 1, ""),))._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0334132, "0.03341"), (-1234.5, "−1234"), (math.inf, "∞"), (-math.inf, "−∞"), (math.nan, "–"), (0.0, "0")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert format_number(value) == text
    assert format_interval(REPORT.gaps[0]) == "0.0011 … 0.0014"
    assert format_interval(REPORT.gaps[1]) == ""
