"""Both renderers on real reports of synthetic traces: complete, inert, self-contained, readable when narrow."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from policy.synthetic import random_trace
from rich.console import Console

from trueup.diagnosis import Cause, Clue, Diagnosis
from trueup.evidence import MISSING, TokenTrace
from trueup.gap import Gap, GapReport
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


def hostile_report() -> tuple[GapReport, Diagnosis]:
    gaps = tuple(
        Gap(f"{text}-{i}", math.nan, None, None, 3, text, method=text, note=text, label=text, source=text)
        for i, text in enumerate(HOSTILE)
    )
    clues = tuple(Clue(text, text, 1.0) for text in HOSTILE)
    causes = tuple(Cause(text, text, text, clues, clues, None, text, text) for text in HOSTILE)
    report = GapReport(gaps, (), dict.fromkeys(HOSTILE, 1), tuple(HOSTILE), {text: text for text in HOSTILE})
    return report, Diagnosis(HOSTILE[0], HOSTILE[1], causes, tuple(HOSTILE))


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


def test_page_needs_nothing_else(page: str) -> None:
    seen = Page(page)
    assert {tag for tag, _ in seen.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
    for tag, attributes in seen.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value is not None
                assert value.startswith("#"), (tag, name, value)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?://|url\((?!#)|@import", without_namespaces)
    policy = next(a["content"] for t, a in seen.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


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


def test_hostile_report_and_diagnosis_are_inert_too() -> None:
    report, diagnosis = hostile_report()
    seen = Page(render_html(report, diagnosis, None, title=HOSTILE[2]))
    assert sum(tag == "script" for tag, _ in seen.elements) == 1
    assert not any(tag == "img" for tag, _ in seen.elements)
    assert not any(name.startswith("on") for _, attributes in seen.elements for name in attributes)
    assert "</style><style>*{display:none}</style>" in seen.text
    text = printed(report, diagnosis, width=100, every=True)
    assert "\x1b" not in text
    assert "[bold red]markup[/]" in text
    text.encode("utf-8")


def test_every_token_of_a_short_sequence_is_a_chip_with_its_numbers() -> None:
    trace = TokenTrace.from_lists(
        [[11, 12, 13, 14, 15, 16]], [[-1.0, -1.0, -1.0, -1.0, MISSING, -1.0]],
        [[-1.005, -0.95, -1.2, -6.0, -1.0, -1.0]], mask=[[True] * 5 + [False]], sequence_id=["answer 7"],
        token_texts=[" a", "b", "c", "d", "e", "f"],
    )  # fmt: skip
    seen = Page(rendered(trace))
    chips = [a for tag, a in seen.elements if tag == "span" and (a.get("class") or "").startswith("t ")]
    # ℓ = −.005, .05, −.2, −5, not recorded, masked; colours deepen at .01, .03, .1, .3, 1 and 3.
    assert [chip["class"] for chip in chips] == ["t z", "t m2", "t l3", "t l6", "t x", "t x"]
    facts = [chip["title"] or "" for chip in chips]
    assert "token id: 12" in facts[1]
    assert "ℓ = log π − log μ: +0.05" in facts[1]
    assert "p, sampler → trainer: 0.3679 → 0.3867" in facts[1]
    assert "not recorded" in facts[4]
    assert "masked" in facts[5]
    assert "answer 7" in seen.text
    assert "sequence 3" in Page(rendered(dataclasses.replace(trace, sequence_id=np.array([3])))).text


def test_long_sequences_are_cut_around_the_worst_and_the_page_stays_small() -> None:
    trace = trace_with_texts(["0123456789ABCDEFGHIJ\n"], sequences=12, longest=4000)
    page = rendered(trace)
    assert len(page.encode()) < 3_000_000
    assert "tokens not shown" in page
    chips = re.findall(r'<span class="t ', page)
    assert len(chips) <= 12 * 400


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("every", [False, True])
def test_terminal_fits_and_says_what_matters(width: int, every: bool) -> None:
    sums = scan_trace(trace_with_texts(["a"]))
    report = report_mismatch(sums, replicates=20)
    text = printed(report, diagnose(sums), width=width, every=every)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "Cannot tell" in flat or "noise" in flat
    assert "mean_k3" in text
    assert ("--all" in text) != every
    if every:
        # Long names fold on a narrow terminal.
        assert width < 120 or all(gap.name in text for gap in report.gaps if len(gap.name) < 45)


def test_undefined_numbers_are_dashes_not_words() -> None:
    gaps = (
        Gap("a", math.nan, None, None, 0, "nats"), Gap("b", math.inf, None, None, 1, ""),
        Gap("c", 1.0, -math.inf, math.nan, 1, ""),
    )  # fmt: skip
    report = GapReport(gaps)
    diagnosis = Diagnosis("cannot tell", "Because.", ())
    words = Page(render_html(report, diagnosis, None, title="t")).text + printed(report, diagnosis, width=80)
    assert not re.search(r"\b(nan|inf|None)\b(?!\.)", words)
    assert "∞" in words


def test_smallest_reports_render() -> None:
    one = TokenTrace.from_lists([[1]], [[-1.0]], [[-1.0]])
    assert "Cannot tell" in Page(rendered(one)).text
    sums = scan_trace(one)
    text = printed(report_mismatch(sums), diagnose(sums), width=80)
    assert "Only 1 tokens" in text


def test_importing_the_package_does_not_bring_the_charting_library() -> None:
    code = "import sys, trueup.report; sys.exit('altair' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
