"""The charts of a report, as SVG text that needs nothing outside itself.

Each function takes curves and returns an ``<svg>`` that fills the width it is given, or an empty string where the
curves hold nothing that can be drawn.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from trueup.gap import Curve, format_number
from trueup.report.svg import PALETTE, inline_data, to_svg

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

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

    long = width > 600
    reach = max(abs(edge) for bar in bars for edge in (bar["left"], bar["right"])) + 0.1
    counted = bars[0]["counted"]
    floor = 0.6 if counted else min(bar["height"] for bar in bars) * 0.6
    for bar in bars:
        bar["floor"] = floor
    ticks = _signed_ticks(base, reach, per_side=9 if long else 4)
    x_axis = alt.Axis(
        values=[place for place, _ in ticks],
        labelExpr=_lookup({str(round(place * 1000)): text for place, text in ticks}, "round(datum.value * 1000)"),
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
        alt.Chart(inline_data(bars))
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
        rules = alt.Chart(inline_data(marks)).encode(x="x:Q")
        layers.append(rules.mark_rule(color=PALETTE["axis"], strokeDash=[2, 3]))
        layers.append(rules.mark_text(align="left", dx=4, dy=6).encode(text="text:N", y=alt.value(0)))
    layers += [
        _words(
            "← trainer likes the token less" if long else "← trainer likes it less",
            color=PALETTE["less"],
            bold=True,
        ),
        _words(
            "trainer likes it more →" if long else "more →",
            x=width,
            align="right",
            color=PALETTE["more"],
            bold=True,
        ),
    ]
    chart = alt.layer(*layers).properties(width=width, height=height)
    return to_svg(chart, label="Histogram of the log-ratio, with the counts on a log axis")


def by_axis(
    magnitude: Curve, signed: Curve | None = None, spread: Curve | None = None, *, axis: str, width: int = 350
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

    log = _spread_over_decades([point["value"] for point in upper])
    # A line between categories would mean nothing.
    deviations = _points(spread, places, floor=0.0) if spread is not None and axis not in CATEGORICAL else []
    if log:
        upper, deviations = ([p for p in points if p["value"] > 0] for points in (upper, deviations))
    lower = _points(signed, places) if signed is not None else []
    kind, tall, low = ("N", 100, 70) if axis in CATEGORICAL else ("Q", 150, 84)
    shown = alt.X(f"x:{kind}", axis=alt.Axis(**x_axis), **x_scale)
    hidden = alt.X(f"x:{kind}", axis=alt.Axis(**{**x_axis, "labels": False, "title": None}), **x_scale)
    title = "mean |ℓ|, nats, log scale" if log else "mean |ℓ|, nats"
    layers = _panel(upper, hidden if lower else shown, title=title, height=tall, log=log, also=deviations)
    if deviations:
        dashed = alt.Chart(inline_data(deviations)).mark_line(
            color=PALETTE["same"], strokeDash=[4, 3], strokeWidth=1.4
        )
        layers += [
            dashed.encode(x=f"x:{kind}", y="value:Q"),
            _words("- - standard deviation of ℓ", x=width, align="right", color=PALETTE["same"]),
        ]
    panels = [alt.layer(*layers).properties(width=width, height=tall)]
    if lower:
        zero = alt.Chart(inline_data([{"y": 0}])).mark_rule(color=PALETTE["axis"]).encode(y="y:Q")
        layers = [zero, *_panel(lower, shown, title="mean ℓ with its sign, nats", height=low)]
        panels.append(alt.layer(*layers).properties(width=width, height=low))
    chart = panels[0] if len(panels) == 1 else alt.vconcat(*panels, spacing=38, bounds="flush")
    return to_svg(chart, label=f"Mean size of the log-ratio by {axis.replace('_', ' ')}")


def _panel(
    points: list[dict[str, Any]],
    x: Any,
    *,
    title: str,
    height: int,
    log: bool = False,
    also: list[dict[str, Any]] | None = None,
) -> list[Any]:
    """Layers of one panel: intervals, values and a heading. ``also``: other points that the axis must span."""
    import altair as alt

    if log:
        values = [point["value"] for point in [*points, *(also or [])]]
        least = min(values) / 2
        for point in points:  # an interval that reaches 0 has no place on a log axis
            point["low"] = None if point["low"] is None else max(point["low"], least)
        ticks = _log_ticks(values)
        labels = _lookup({_log_key(tick): edge_label(tick) for tick in ticks}, _LOG_KEY)
        y_axis = alt.Axis(title=None, values=ticks, labelExpr=labels)
    else:
        y_axis = alt.Axis(title=None, tickCount=max(2, height // 36), labelExpr=_NUMBER_LABEL)
    y = alt.Y("value:Q", scale=alt.Scale(type="log" if log else "linear", zero=not log, nice=not log), axis=y_axis)
    base = alt.Chart(inline_data(points)).encode(x=x)
    if x.to_dict()["type"] == "nominal":
        layers = [base.mark_rule(color=PALETTE["line"], strokeWidth=2).encode(y="low:Q", y2="high:Q")]
    else:
        layers = [
            base.mark_area(color=PALETTE["line"], opacity=0.18).encode(y="low:Q", y2="high:Q"),
            base.mark_line(color=PALETTE["line"], strokeWidth=1.6).encode(y=y),
        ]
    layers.append(base.mark_circle(color=PALETTE["line"], size=26, opacity=1).encode(y=y))
    return [*layers, _words(title, bold=True)]


def _words(
    text: str, *, x: float = 0, align: Literal["left", "right"] = "left", color: str = "", bold: bool = False
) -> Any:
    """One of our own texts above a panel."""
    import altair as alt

    weight: Literal["bold", "normal"] = "bold" if bold else "normal"
    mark = alt.Chart(inline_data([{}])).mark_text(
        align=align, baseline="bottom", fontWeight=weight, color=color or PALETTE["text"]
    )
    return mark.encode(x=alt.value(x), y=alt.value(-9), text=alt.value(text))


#: Numbers on a vertical axis: short, and powers of ten below a thousandth.
_NUMBER_LABEL = (
    "datum.value == 0 ? '0' : abs(datum.value) < 0.0001 || abs(datum.value) >= 10000"
    " ? format(datum.value, '.1~e') : format(datum.value, '~g')"
)


#: Ticks of a log axis are looked up by a hundred times their decadic logarithm, which survives rounding.
_LOG_KEY = "round(log(datum.value) / LN10 * 100)"


def _log_key(value: float) -> str:
    return str(round(math.log10(value) * 100))


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
    room = reach / (2 * per_side)  # next to the 0, which keeps its label
    powers = list(range(math.ceil(base + room), math.floor(base + reach) + 1))
    every = max(1, math.ceil(len(powers) / per_side))
    kept = [power for power in powers if power % every == 0]
    positive = [(power - base, power_of_ten(power)) for power in kept]
    return [(-place, f"−{text}") for place, text in reversed(positive)] + [(0.0, "0"), *positive]


def _log_ticks(values: list[float]) -> list[float]:
    """Powers of ten that the values span, with 3 (or 2 and 5) between them where there are few."""
    low, high = math.log10(min(values) / 2), math.log10(max(values) * 1.2)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = [
            step * 10.0**power for power in powers for step in steps if low <= math.log10(step) + power <= high
        ]
        if len(ticks) > 2:
            break
    return ticks


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
        return power_of_ten(int(power)) if mantissa == "1" else f"{mantissa}·{power_of_ten(int(power))}"
    return f"{edge:.2g}".replace("-", "−") if math.isfinite(edge) else format_number(edge)


def category_label(axis: str, code: float) -> str:
    """Words for an integer code of a categorical axis."""
    if axis == "repetition":
        return "seen before" if code else "first time"
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
        drawn = [place for place, value in zip(places, curve.value, strict=True) if math.isfinite(value)]
        top = max(drawn, default=1)
        return (
            places,
            {"title": title, "values": [ten for ten in tens if ten <= top], "format": "~s"},
            {"scale": _scale(type="log", domain=[1, max(top, 10)], nice=False)},
        )
    edges = [*curve.left, curve.right[-1]] if curve.left else []
    labels = {str(index): edge_label(edge) for index, edge in enumerate(edges)}
    return (
        [index + 0.5 for index in range(len(curve.left))],
        {
            "title": title,
            "values": list(range(len(edges))),
            "labelExpr": _lookup(labels, "round(datum.value)"),
            "labelOverlap": "parity",
            "labelSeparation": 8,
            "labelFlush": False,
        },
        {"scale": _scale(domain=[0, max(len(curve.left), 1)], nice=False)},
    )


def _scale(**options: Any) -> Any:
    import altair as alt

    return alt.Scale(**options)


def _points(curve: Curve, places: list[Any], *, floor: float | None = None) -> list[dict[str, Any]]:
    """The bins that can be drawn: finite values; a missing bound leaves a hole in the band."""
    points = []
    for place, value, low, high in zip(places, curve.value, curve.low, curve.high, strict=False):
        if math.isfinite(value):
            whole = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
            bottom = max(low, floor) if whole and low is not None and floor is not None else low
            points.append(
                {"x": place, "value": value, "low": bottom if whole else None, "high": high if whole else None}
            )
    return points


def _spread_over_decades(values: list[float]) -> bool:
    positive = [value for value in values if value > 0]
    return len(positive) > 1 and max(positive) / min(positive) > 20


def _lookup(table: dict[str, str], key: str) -> str:
    """A Vega expression that maps the formatted ``key`` through ``table`` (whose texts are ours, never data's)."""
    return f"{json.dumps(table, ensure_ascii=False)}[{key}]"
