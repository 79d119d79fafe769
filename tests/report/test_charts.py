from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from fake_report import Rollouts, fake_curves

from trueup.gap import Curve, GapReport
from trueup.report.charts import by_axis, edge_label, ratio_histogram
from trueup.report.svg import PALETTE

AXES = ("position", "probability", "entropy", "segment", "version_lag", "repetition")
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def draw(report: GapReport, name: str) -> str:
    if name == "histogram":
        return ratio_histogram(report.curve("log_ratio_histogram"))
    size, signed = (report.curve(f"{kind}_log_ratio_by_{name}") for kind in ("mean_abs", "mean"))
    return by_axis(size, signed, axis=name)


@pytest.mark.parametrize("name", ["histogram", *AXES])
def test_every_chart_is_well_formed_sealed_and_scales(report: GapReport, name: str) -> None:
    svg = draw(report, name)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.attrib["viewBox"]
    assert root.attrib["width"] == "100%"
    assert "height" not in root.attrib
    assert not re.search(r"href|<image|<style|<script|<foreignObject|url\((?!#)", svg)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", svg)
    assert not {word for text in texts(svg) for word in re.findall(r"\w+", text)} & {"NaN", "null", "undefined"}
    used = set(re.findall(r"url\(#([\w-]+)\)", svg))
    assert used <= set(re.findall(r'id="([\w-]+)"', svg))


def test_colours_are_those_that_the_page_can_remap(report: GapReport) -> None:
    found = {c for name in ("histogram", *AXES) for c in re.findall(r"#[0-9a-fA-F]{6}\b", draw(report, name))}
    assert found <= set(PALETTE.values())


def test_ids_of_two_charts_do_not_collide(report: GapReport) -> None:
    ids = [set(re.findall(r' id="([^"]+)"', draw(report, name))) for name in ("position", "entropy")]
    assert not ids[0] & ids[1]


def histogram(left: tuple[float, ...], right: tuple[float, ...], n: tuple[int, ...]) -> Curve:
    share = tuple(count / (sum(n) or 1) for count in n)
    return Curve("log_ratio_histogram", "ℓ", "share", left, right, n, share, (None,) * len(n), (None,) * len(n))


def test_histogram_draws_one_token_in_the_tail_next_to_a_million() -> None:
    svg = ratio_histogram(
        histogram((-10.0, -0.1, 0.0, 0.01, 0.1), (-1.0, -0.01, 0.0, 0.1, 1.0), (1, 10**6, 50, 10**6, 0))
    )
    heights = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        shape = re.fullmatch(r"M[\d.,-]+h([\d.]+)v([\d.]+)h-[\d.]+Z", path.attrib.get("d", ""))
        if shape and path.attrib.get("fill") in (PALETTE["less"], PALETTE["more"], PALETTE["same"]):
            heights.setdefault(path.attrib["fill"], []).append(float(shape[2]))
    assert len(heights[PALETTE["less"]]) == 2
    assert len(heights[PALETTE["more"]]) == 1  # the empty bin has no bar
    assert len(heights[PALETTE["same"]]) == 1
    assert min(heights[PALETTE["less"]]) > 4  # pixels of 250
    assert {"−1", "−0.1", "0", "0.1", "1"} <= set(texts(svg))


@pytest.mark.parametrize(
    "curve",
    [
        histogram((), (), ()),
        histogram((-1.0, 0.0, 0.1), (-0.1, 0.0, 1.0), (0, 0, 0)),
        dataclasses.replace(histogram((0.1,), (1.0,), (5,)), value=(math.nan,)),
    ],
)
def test_an_empty_histogram_draws_nothing(curve: Curve) -> None:
    assert ratio_histogram(curve) == ""


@pytest.mark.parametrize(
    ("left", "right", "n"),
    [
        ((0.0,), (0.0,), (7,)),  # all alike
        ((0.5,), (1.0,), (1,)),  # a single token
        ((-math.inf, 0.0, 1e-6), (-20.0, 1e-6, 1e-5), (1, 2, 3)),  # open bins
    ],
)
def test_histogram_of_awkward_bins_is_drawn(
    left: tuple[float, ...], right: tuple[float, ...], n: tuple[int, ...]
) -> None:
    assert "0" in texts(ratio_histogram(histogram(left, right, n)))


def test_histogram_falls_back_to_shares_where_n_is_not_the_count() -> None:
    curve = dataclasses.replace(histogram((0.1, 1.0), (1.0, 10.0), (900, 100)), n=(1000, 1000))
    assert any("share" in text for text in texts(ratio_histogram(curve)))


def axis_curve(values: tuple[float, ...], low: tuple[float | None, ...] | None = None) -> Curve:
    size = len(values)
    edges = tuple(float(index) for index in range(size + 1))
    none: tuple[float | None, ...] = (None,) * size
    return Curve("c", "x", "nats", edges[:-1], edges[1:], (9,) * size, values, low or none, low or none)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("values", [(0.5,), (math.nan, 0.2), (0.0, 0.0), (1e-7, 3.0), (math.inf, 1.0, 2.0)])
def test_holes_zeros_and_single_bins_are_drawn(axis: str, values: tuple[float, ...]) -> None:
    svg = by_axis(axis_curve(values), axis_curve(values), axis=axis)
    ElementTree.fromstring(svg)
    assert "NaN" not in svg
    assert "Infinity" not in svg


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("values", [(), (math.nan,)])
def test_a_curve_without_a_finite_value_draws_nothing(axis: str, values: tuple[float, ...]) -> None:
    assert by_axis(axis_curve(values), axis=axis) == ""


def test_hostile_names_of_a_curve_do_not_reach_the_drawing() -> None:
    hostile = dataclasses.replace(axis_curve((0.1, 0.2)), x="</svg><script>", label="</svg><script>", name="<x>")
    assert "<script" not in by_axis(hostile, axis="position")


@pytest.mark.parametrize(
    ("edge", "label"),
    [(0.0, "0"), (0.5, "0.5"), (0.9999, "0.9999"), (0.999999999, "0.999999"), (1e-6, "10⁻⁶"), (math.inf, "∞")],
)
def test_edge_labels(edge: float, label: str) -> None:
    assert edge_label(edge) == label


def test_the_same_curves_give_the_same_bytes() -> None:
    first, second = (fake_curves(Rollouts(sequences=16)) for _ in range(2))
    assert ratio_histogram(first[0]) == ratio_histogram(second[0])


def test_importing_the_package_does_not_import_altair() -> None:
    code = "import sys, trueup.report; sys.exit(bool({'altair', 'vl_convert', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
