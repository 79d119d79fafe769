"""Renders any ``GapReport`` with its ``Diagnosis``: in a terminal, or as one self-contained HTML file.

Charts are drawn only when a page is rendered, so that importing this package stays cheap.
"""

from trueup.report.html import render_html
from trueup.report.terminal import print_report

__all__ = ["print_report", "render_html"]
