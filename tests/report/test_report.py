"""From a trace to what people see: both renderers on reports that the meters really made."""

from __future__ import annotations

import dataclasses
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from policy.synthetic import random_trace
from rich.console import Console

from trueup.diagnosis import Diagnosis
from trueup.evidence import TokenTrace
from trueup.gap import GapReport
from trueup.policy import diagnose, report_mismatch, scan_trace
from trueup.report import print_report, render_html

HOSTILE = [
    "<script>alert(1)</script>", "</style><style>*{display:none}</style>", "</svg><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)', "javascript:alert(1)", "[bold red]markup[/] [link=http://x]y[/link]", "\x1b[31mred",
    "\u202eevil", "\x00", "\ud800", "{{ 7 * 7 }}", "&lt;b&gt;",
]  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: elements, attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text += data


def trace_with_texts(texts: list[str], *, sequences: int = 40, longest: int = 30) -> TokenTrace:
    trace = random_trace(np.random.default_rng(3), sequences=sequences, longest=longest, holes=False)
    tokens = np.array([texts[i % len(texts)] for i in range(trace.num_tokens)], dtype=object)
    words = np.array([texts[i % len(texts)] for i in range(sequences)], dtype=object)
    return dataclasses.replace(trace, token_texts=tokens, prompt=words, response=words, sequence_id=words)


def rendered(trace: TokenTrace, *, title: str = "rollouts.parquet") -> str:
    sums = scan_trace(trace)
    return render_html(report_mismatch(sums, replicates=20), diagnose(sums), sums.worst_trace(), title=title)


def printed(report: GapReport, diagnosis: Diagnosis, *, width: int, every: bool = False) -> str:
    out = io.StringIO()
    print_report(report, diagnosis, console=Console(file=out, width=width), every=every)
    return out.getvalue()


@pytest.fixture(scope="module")
def page() -> str:
    return rendered(trace_with_texts([" the", "\n", " <b>", "x"]))


def test_page_is_complete(page: str) -> None:
    seen = Page(page)
    for heading in ("The numbers that matter", "How far apart, token by token", "Where the gap sits",
                    "The sequences that carry the most", "All numbers", "Left out, or odd", "Provenance",
                    ):  # fmt: skip
        assert heading in seen.text
    for name in ("rollout_corr/chi2_seq", "sampling/importance_sampling_ratio/mean", "nemo_rl/gen_kl_error",
                 "mismatch_kl/all/mean", "slime/tis"):  # fmt: skip
        assert name in seen.text
    # Histogram (wide and narrow), and a chart an axis that this trace has.
    assert sum(tag == "svg" for tag, _ in seen.elements) == 2 + 6


def test_hostile_text_is_shown_and_inert() -> None:
    trace = trace_with_texts(HOSTILE)
    clean, hostile = Page(rendered(trace_with_texts(["a"]))), Page(rendered(trace, title=HOSTILE[0]))
    # No text of the data makes an element or an attribute that the same page without it does not have.
    assert {tag for tag, _ in hostile.elements} == {tag for tag, _ in clean.elements}
    assert {name for _, a in hostile.elements for name in a} == {name for _, a in clean.elements for name in a}
    assert sum(tag == "script" for tag, _ in hostile.elements) == 1
    assert sum(tag == "style" for tag, _ in hostile.elements) == 1
    assert "<script>alert(1)</script>" in hostile.text
    # The template engine never reads the data as a template.
    assert "{{ 7 * 7 }}" in hostile.text
    assert "\u202e" not in hostile.text
    assert "\x1b" not in hostile.text


def test_smallest_reports_render() -> None:
    one = TokenTrace.from_lists([[1]], [[-1.0]], [[-1.0]])
    assert "Cannot tell" in Page(rendered(one)).text
    sums = scan_trace(one)
    text = printed(report_mismatch(sums), diagnose(sums), width=80)
    assert "Only 1 tokens" in text


def test_a_numbered_sequence_is_called_one() -> None:
    trace = TokenTrace.from_lists([[11]], [[-1.0]], [[-1.5]], sequence_id=np.array([3]))
    assert "sequence 3" in Page(rendered(trace)).text
    assert "answer 7" in Page(rendered(dataclasses.replace(trace, sequence_id=np.array(["answer 7"])))).text
