"""From a chart to SVG text that a page can hold inline: compiled offline, with our theme, and sealed.

Sealed means: shapes and text only; no size, script, style sheet, link or handler; ids of its own. The colours are
a closed set of literals (``PALETTE``), so that a page can remap them for a dark background by attribute selectors.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from xml.etree import ElementTree

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


def inline_data(rows: list[dict[str, Any]]) -> Any:
    """Rows for a chart, kept inside its specification."""
    import altair as alt

    return alt.InlineData(values=rows)


def to_svg(chart: Any, *, label: str) -> str:
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
