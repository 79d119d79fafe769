"""Charts as SVG text: drawn offline, without a script, a style sheet or a reference to anything outside.

Each function takes curves and returns an ``<svg>`` that fills the width it is given, or an empty string where the
curves hold nothing that can be drawn. The colours are a closed set of literals (``PALETTE``), so that a page can
remap them for a dark background with attribute selectors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, Literal, cast
from xml.etree import ElementTree

from trueup.gap import Curve, format_number

PALETTE = {
    "text": "#4b525c",
    "grid": "#e3e6ea",
    "axis": "#9aa1ab",
    "line": "#234a73",
    "more": "#2f6db3",
    "less": "#c4601a",
    "same": "#868d97",
}

_SVG = "http://www.w3.org/2000/svg"
_ELEMENTS = {"svg", "g", "path", "rect", "line", "circle", "text", "tspan", "defs", "clipPath", "title"}
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_FONT_SIZE = 11
#: Room for the numbers of the vertical axis, the same in stacked panels so that their plots line up.
_AXIS_ROOM = 46

_THEME: dict[str, Any] = {
    "background": None,
    "font": _FONT,
    "padding": 2,
    "aria": False,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": _FONT_SIZE,
        "titleFontSize": _FONT_SIZE,
        "titleFontWeight": "normal",
        "labelColor": PALETTE["text"],
        "titleColor": PALETTE["text"],
        "gridColor": PALETTE["grid"],
        "domainColor": PALETTE["axis"],
        "tickColor": PALETTE["axis"],
        "tickSize": 4,
        "labelPadding": 4,
        "titlePadding": 8,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "minExtent": _AXIS_ROOM, "maxExtent": _AXIS_ROOM},
    "text": {"fontSize": _FONT_SIZE, "color": PALETTE["text"]},
}

_AXIS_TITLES = {
    "position": "token of the response (log scale)",
    "probability": "sampler probability of the token (equal counts a bin)",
    "entropy": "trainer entropy at the token, nats (equal counts a bin)",
    "segment": "segment (turn)",
    "version_lag": "weight versions between sampling and scoring",
    "repetition": "",
}
CATEGORICAL = ("segment", "version_lag", "repetition")


def ratio_histogram(curve: Curve, *, width: int = 860, height: int = 250) -> str:
    """Tokens by signed log-ratio: both axes logarithmic, so that one token in the tail is as visible as the bulk.

    ``curve`` bins ℓ in log-spaced bins of |ℓ| on both sides of the zero bin (``left == right == 0``).
    """
    bars, base = _histogram_bars(curve)
    if not bars:
        return ""
    import altair as alt

    reach = max(abs(edge) for bar in bars for edge in (bar["left"], bar["right"])) + 0.1
    counted = bars[0]["counted"]
    floor = 0.6 if counted else min(bar["height"] for bar in bars) * 0.6
    for bar in bars:
        bar["floor"] = floor
    ticks = _signed_ticks(base, reach, per_side=6 if width > 600 else 3)
    x_axis = alt.Axis(
        values=[place for place, _ in ticks],
        # Shifted to be positive: Vega would write the key of a negative place with a typographic minus.
        labelExpr=_lookup(
            {f"{place + 100:.6f}": text for place, text in ticks}, "format(datum.value + 100, '.6f')"
        ),
        title="log-ratio ℓ = log π − log μ, nats (log scale, both signs)",
    )
    tallest = max(bar["height"] for bar in bars)
    y_scale = alt.Scale(type="log", domain=[floor, tallest * 1.6], nice=False)
    tens = [10.0**power for power in range(math.ceil(math.log10(floor)), math.ceil(math.log10(tallest)) + 1)]
    y_axis = alt.Axis(
        values=tens,
        format="~s" if counted else "~%",
        title="tokens (log scale)" if counted else "share of tokens (log scale)",
    )
    drawn = (
        alt.Chart(_data(bars))
        .mark_rect()
        .encode(
            x=alt.X("left:Q", axis=x_axis, scale=alt.Scale(domain=[-reach, reach], nice=False)),
            x2="right:Q",
            y=alt.Y("height:Q", axis=y_axis, scale=y_scale),
            y2="floor:Q",
            color=alt.Color("colour:N", scale=None),
        )
    )
    layers: list[Any] = [drawn]
    twice = math.log10(math.log(2)) - base
    if 0 < twice < reach:
        marks = [{"x": -twice, "text": "ratio ½"}, {"x": twice, "text": "ratio 2"}]
        rules = alt.Chart(_data(marks)).encode(x="x:Q")
        layers.append(rules.mark_rule(color=PALETTE["axis"], strokeDash=[2, 3]))
        layers.append(rules.mark_text(align="left", dx=4, dy=6).encode(text="text:N", y=alt.value(0)))
    for text, side, place, align in (
        ("← trainer likes the token less", "less", 0, "left"),
        ("trainer likes it more →", "more", width, "right"),
    ):
        label = alt.Chart(_data([{}])).mark_text(
            align=cast(Literal["left", "right"], align), color=PALETTE[side], fontWeight="bold"
        )
        layers.append(label.encode(x=alt.value(place), y=alt.value(-12), text=alt.value(text)))
    chart = alt.layer(*layers).properties(width=width, height=height)
    return _svg(chart, label="Histogram of the log-ratio, with the counts on a log axis")


def by_axis(
    magnitude: Curve, signed: Curve | None = None, spread: Curve | None = None, *, axis: str, width: int = 390
) -> str:
    """Mean |ℓ| against one axis with its interval band, and below it mean ℓ with its sign, if ``signed`` is given.

    ``spread`` (standard deviation of ℓ) is drawn dashed beside the mean. ``axis`` is the last part of the curves'
    names: "position" is drawn on a log axis, "probability" and "entropy" one step a bin, the rest by category.
    """
    places, x_axis, x_scale = _x_axis(magnitude, axis)
    upper = _points(magnitude, places, floor=0.0)
    if not upper:
        return ""
    import altair as alt

    x_kind = "N" if axis in CATEGORICAL else "Q"
    wide = _spread_over_decades([point["value"] for point in upper])
    hidden = alt.Axis(**{**x_axis, "labels": False, "title": None})
    shown = alt.Axis(**x_axis)
    positive = [point for point in upper if point["value"] > 0] if wide else upper
    # A line between categories would mean nothing.
    deviations = _points(spread, places, floor=0.0) if spread is not None and axis not in CATEGORICAL else []
    deviations = [point for point in deviations if point["value"] > 0 or not wide]
    lower = _points(signed, places) if signed is not None else []

    def panel(points: list[dict[str, Any]], *, title: str, log: bool, height: int, last: bool) -> Any:
        ticks: dict[str, Any] = {"tickCount": 4}
        if log:  # an interval that reaches 0 has no place on a log axis: cut it a little below the values
            least = min(point["value"] for point in points + deviations) / 2
            for point in points:
                point["low"] = None if point["low"] is None else max(point["low"], least)
            largest = max(max(point["value"], point["high"] or 0.0) for point in points + deviations)
            ticks = {"values": _log_ticks(min(point["low"] or point["value"] for point in points), largest)}
        y_scale = alt.Scale(type="log" if log else "linear", zero=not log, nice=not log)
        y_axis = alt.Axis(title=None, labelExpr=_NUMBER_LABEL, **ticks)
        x = alt.X(f"x:{x_kind}", axis=shown if last else hidden, **x_scale)
        y = alt.Y("value:Q", scale=y_scale, axis=y_axis)
        base = alt.Chart(_data(points)).encode(x=x)
        if axis in CATEGORICAL:
            layers = [base.mark_rule(color=PALETTE["line"], strokeWidth=2).encode(y="low:Q", y2="high:Q")]
        else:
            layers = [
                base.mark_area(color=PALETTE["line"], opacity=0.18).encode(y="low:Q", y2="high:Q"),
                base.mark_line(color=PALETTE["line"], strokeWidth=1.6).encode(y=y),
            ]
        layers.append(base.mark_circle(color=PALETTE["line"], size=26, opacity=1).encode(y=y))
        heading = alt.Chart(_data([{}])).mark_text(align="left", baseline="bottom", fontWeight="bold")
        layers.append(heading.encode(x=alt.value(0), y=alt.value(-7), text=alt.value(title)))
        return layers, height

    def finish(layers: list[Any], height: int) -> Any:
        return alt.layer(*layers).properties(width=width, height=height)

    log_note = ", log scale" if wide else ""
    layers, height = panel(positive, title=f"mean |ℓ|, nats{log_note}", log=wide, height=150, last=not lower)
    if deviations:
        dashed = alt.Chart(_data(deviations)).mark_line(color=PALETTE["same"], strokeDash=[4, 3], strokeWidth=1.4)
        layers.append(dashed.encode(x=f"x:{x_kind}", y="value:Q"))
        key = alt.Chart(_data([{}])).mark_text(align="right", baseline="bottom", color=PALETTE["same"])
        layers.append(
            key.encode(x=alt.value(width), y=alt.value(-7), text=alt.value("- - standard deviation of ℓ"))
        )
    panels = [finish(layers, height)]
    if lower:
        layers, height = panel(lower, title="mean ℓ with its sign, nats", log=False, height=84, last=True)
        zero = alt.Chart(_data([{"y": 0}])).mark_rule(color=PALETTE["axis"]).encode(y="y:Q")
        panels.append(finish([zero, *layers], height))
    chart = panels[0] if len(panels) == 1 else alt.vconcat(*panels, spacing=26, bounds="flush")
    return _svg(chart, label=f"Mean size of the log-ratio by {axis.replace('_', ' ')}")


#: Numbers on a vertical axis: short, and powers of ten below a thousandth.
_NUMBER_LABEL = (
    "datum.value == 0 ? '0' : abs(datum.value) < 0.001 || abs(datum.value) >= 10000"
    " ? replace(format(datum.value, '.1~e'), '−', '−') : format(datum.value, '~g')"
)


def _histogram_bars(curve: Curve) -> tuple[list[dict[str, Any]], float]:
    """Bars in decades of |ℓ|, signed: place = sign · (log10 |ℓ| − base); and that base."""
    total = sum(curve.n)
    counted = total > 0 and all(
        math.isclose(n / total, share, rel_tol=0.02, abs_tol=1e-9)
        for n, share in zip(curve.n, curve.value, strict=True)
    )
    rows = [
        (left, right, float(n) if counted else share)
        for left, right, n, share in zip(curve.left, curve.right, curve.n, curve.value, strict=True)
        if math.isfinite(share) and share > 0 and not math.isnan(left) and not math.isnan(right)
    ]
    if not rows:
        return [], 0.0
    step = _decades_a_bin(curve)
    sized = [
        (*_log_edges(left, right, step), left + right > 0, height) for left, right, height in rows if left != right
    ]
    base = min((inner for inner, *_ in sized), default=0.0) - 0.35
    bars = []
    for left, right, height in rows:
        if left == right:
            bars.append({"left": -0.2, "right": 0.2, "height": height, "colour": PALETTE["same"]})
    for inner, outer, positive, height in sized:
        near, far = inner - base, outer - base
        bars.append(
            {
                "left": near if positive else -far,
                "right": far if positive else -near,
                "height": height,
                "colour": PALETTE["more" if positive else "less"],
            }
        )
    for bar in bars:
        bar["counted"] = counted
    return bars, base


def _decades_a_bin(curve: Curve) -> float:
    """The usual width of a bin in decades of |ℓ|, for bins that start at 0 or end at infinity."""
    for left, right in zip(curve.left, curve.right, strict=True):
        if left > 0 and math.isfinite(right):
            return math.log10(right / left)
    return 0.25


def _log_edges(left: float, right: float, step: float) -> tuple[float, float]:
    near, far = sorted((abs(left), abs(right)))
    if near == 0:
        return math.log10(far) - step, math.log10(far)
    return math.log10(near), math.log10(far) if math.isfinite(far) else math.log10(near) + step


def _signed_ticks(base: float, reach: float, *, per_side: int) -> list[tuple[float, str]]:
    """Powers of ten on both sides of 0, thinned to ``per_side``, counted from 1 so that familiar ones stay."""
    powers = range(math.ceil(base + 0.3), math.floor(base + reach) + 1)
    every = max(1, math.ceil(len(powers) / per_side))
    kept = [power for power in powers if power % every == 0]
    positive = [(power - base, power_of_ten(power)) for power in kept]
    return [(-place, f"−{text}") for place, text in reversed(positive)] + [(0.0, "0"), *positive]


def power_of_ten(power: int) -> str:
    """10 to an integer power, written out near 1.

    >>> power_of_ten(-1), power_of_ten(-4)
    ('0.1', '10⁻⁴')
    """
    return f"{10.0**power:g}" if -3 < power < 4 else f"10{str(power).translate(_SUPERSCRIPT)}"


def edge_label(edge: float) -> str:
    """A bin edge in few characters; a probability close to 1 keeps the digit that tells it from 1.

    >>> edge_label(0.0123), edge_label(0.99996), edge_label(1.0), edge_label(0.00004)
    ('0.012', '0.99996', '1', '4·10⁻⁵')
    """
    if 0.99 <= edge < 1:
        digits = min(6, math.ceil(-math.log10(1 - edge)))
        return f"{math.floor(edge * 10**digits) / 10**digits:.{digits}f}".rstrip("0").rstrip(".")
    if 0 < abs(edge) < 0.001:
        mantissa, power = f"{edge:.0e}".split("e")
        return f"{mantissa}·{power_of_ten(int(power))}"
    return f"{edge:.2g}".replace("-", "−") if math.isfinite(edge) else format_number(edge)


def category_label(axis: str, code: float) -> str:
    """Words for an integer code of a categorical axis."""
    if axis == "repetition":
        return "seen before" if code else "first time in its sequence"
    if axis == "segment" and code < 0:
        return "prompt"
    return f"{code:g}".replace("-", "−")


def _x_axis(curve: Curve, axis: str) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Where each bin stands, the axis that says so, and its scale and order."""
    title = _AXIS_TITLES.get(axis, axis.replace("_", " ")) or None
    if axis in CATEGORICAL:
        names = [category_label(axis, code) for code in curve.left]
        return names, {"title": title, "labelAngle": 0, "labelOverlap": True}, {"sort": names}
    if axis == "position":
        # Positions count from 0; a log axis starts at 1, which is how people count tokens anyway.
        places = [
            math.sqrt((left + 1) * max(right, left + 1)) if math.isfinite(right) else left + 1
            for left, right in zip(curve.left, curve.right, strict=True)
        ]
        tens = [10**power for power in range(8)]
        top = max(places, default=1)
        return (
            places,
            {"title": title, "values": [ten for ten in tens if ten <= top * 2], "format": "~s"},
            {"scale": _scale(type="log", domain=[1, max(top, 10)], nice=False)},
        )
    edges = [*curve.left, curve.right[-1]] if curve.left else []
    labels = {str(index): edge_label(edge) for index, edge in enumerate(edges)}
    return (
        [index + 0.5 for index in range(len(curve.left))],
        {
            "title": title,
            "values": list(range(len(edges))),
            "labelExpr": _lookup(labels, "format(datum.value, 'd')"),
            "labelOverlap": "parity",
            "labelFlush": False,
        },
        {"scale": _scale(domain=[0, max(len(curve.left), 1)], nice=False)},
    )


def _scale(**options: Any) -> Any:
    import altair as alt

    return alt.Scale(**options)


def _points(curve: Curve, places: list[Any], *, floor: float | None = None) -> list[dict[str, Any]]:
    """The bins that can be drawn: finite values; a bound that is missing leaves a hole in the band."""
    points = []
    for place, value, low, high in zip(places, curve.value, curve.low, curve.high, strict=False):
        if math.isfinite(value):
            whole = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
            bottom = max(low, floor) if whole and low is not None and floor is not None else low
            points.append(
                {"x": place, "value": value, "low": bottom if whole else None, "high": high if whole else None}
            )
    return points


def _log_ticks(least: float, largest: float) -> list[float]:
    """1 and 3 in every decade between two positive numbers."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(largest)) + 1)
    return [lead * 10.0**power for power in powers for lead in (1, 3) if least <= lead * 10.0**power <= largest]


def _spread_over_decades(values: list[float]) -> bool:
    positive = [value for value in values if value > 0]
    return len(positive) > 1 and max(positive) / min(positive) > 20


def _lookup(table: dict[str, str], key: str) -> str:
    """A Vega expression that maps the formatted ``key`` through ``table`` (whose texts are ours, never data's)."""
    return f"{json.dumps(table, ensure_ascii=False)}[{key}]"


def _data(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    data: Any = alt.Data
    return data(values=rows)


def _svg(chart: Any, *, label: str) -> str:
    """Compile a chart offline, and keep of the drawing only shapes and text."""
    import altair as alt
    import vl_convert

    spec = chart.to_dict()
    spec["config"] = _THEME
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return _sealed(vl_convert.vegalite_to_svg(spec, vl_version=version), label=label)


def _sealed(svg: str, *, label: str) -> str:
    """``svg`` without size, foreign elements, links or handlers; its ids made unique to this drawing."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    prefix = "c" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(f"{{{_SVG}}}") not in _ELEMENTS:
                parent.remove(child)
        for name in list(parent.attrib):
            if name.startswith(("on", "aria", "role", "font-family")) or "href" in name or name == "style":
                del parent.attrib[name]
        if "id" in parent.attrib:
            parent.attrib["id"] = prefix + parent.attrib["id"]
        if "clip-path" in parent.attrib:
            parent.attrib["clip-path"] = re.sub(r"url\(#", f"url(#{prefix}", parent.attrib["clip-path"])
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib.update(
        {"class": "chart", "width": "100%", "role": "img", "aria-label": label, "font-family": _FONT}
    )
    return ElementTree.tostring(root, encoding="unicode")
