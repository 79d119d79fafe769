from __future__ import annotations

import base64
import hashlib
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from fake_report import BOOKKEEPING, LAW, NOISE, UNKNOWN, Rollouts, fake_report, fake_worst

from trueup.diagnosis import Cause, Clue, Diagnosis
from trueup.evidence.trace import MISSING, TokenTrace
from trueup.gap import Curve, Gap, GapReport
from trueup.report import render_html
from trueup.report.inert import inert, one_line, token_text

VOID = {"meta", "br", "input", "path", "rect", "circle", "line"}
HOSTILE = (
    "<script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</svg><svg onload=alert(1)>",
    "</title></head><img src=x onerror=alert(1)>",
    "\" onmouseover=\"alert(1)' onfocus='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "a\u202egnp.exe",
    "nul\x00 esc\x1b[31m bell\x07",
    "lone \ud83d surrogate \udfff",
    "line\u2028separator\ufeff",
    "-->]]><![CDATA[ <!--",
)


class Page(HTMLParser):
    """Elements, attributes and text of a page, and whether every element was closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        self.raw.get(where, self.words).append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def classes(self, tag: str, name: str) -> list[list[str]]:
        return [
            classes
            for element, attrs in self.elements
            if element == tag and name in (classes := (attrs.get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def assert_inert(html: str) -> Page:
    html.encode()  # no lone surrogate
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202a-\u202e\u2066-\u2069\ufeff]", html)
    page = Page(html)
    assert page.open == []
    assert (page.count("script"), page.count("style"), page.count("img")) == (1, 1, 0)
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "link", "base", "form", "image", "use", "foreignobject")
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "srcset", "xlink:href")]
        assert (attrs.get("href") or "#").startswith("#")
    return page


def test_the_page_is_inert_and_offline(page: str) -> None:
    parsed = assert_inert(page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    style = "".join(parsed.raw["style"])
    assert not re.search(r"@import|url\(|//", style)
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|innerHTML)\b", "".join(parsed.raw["script"]))


def test_only_our_script_may_run(page: str) -> None:
    script = "".join(Page(page).raw["script"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy[1]


def test_sections_and_headlines_are_there(page: str) -> None:
    text = Page(page).text
    for words in (
        "Honest numerical noise",
        "For",
        "Against",
        "Record next",
        "The numbers that matter",
        "How far apart, token by token",
        *("By position", "By probability", "By entropy", "By segment", "By version lag", "By repetition"),
        "All numbers",
        "nemo_rl/gen_kl_error",
        "Masked tokens, not counted",
        "Looked for and not found",
        "rollouts/step_000120.parquet",
    ):
        assert words in text


def test_missing_numbers_are_never_spelled_out(page: str) -> None:
    parsed = Page(page)
    titles = " ".join(attrs.get("title") or "" for _, attrs in parsed.elements)
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None|null|undefined)\b", parsed.text + titles)
    assert "∞" in parsed.text


def test_the_largest_worst_set_stays_small(report: GapReport) -> None:
    size, sequences = 6000, 12
    rng = np.random.default_rng(0)
    count = size * sequences
    rows = [[7] * size] * sequences
    texts = np.array(['"<&>\'"' * 40] * count, dtype=object)
    logprobs = -rng.gamma(1, 2.123456, (2, sequences, size)).astype(np.float32)
    entropies = rng.gamma(1, 1, (sequences, size)).tolist()
    worst = TokenTrace.from_lists(
        rows,
        logprobs[0].tolist(),
        logprobs[1].tolist(),
        token_texts=texts,
        entropies=entropies,
        rollout_entropies=entropies,
        train_ranks=[[100_000] * size] * sequences,
        versions=[[123] * size] * sequences,
        prompt=np.array(["<" * 10_000] * sequences, dtype=object),
        sequence_id=["'" * 1000] * sequences,
    )
    html = render_html(report, NOISE, worst, title="largest")
    assert len(html.encode()) < 3_000_000
    assert len(Page(html).classes("span", "t")) == 400 * sequences


def hand_made(texts: list[str], rollout: list[float], train: list[float], **columns: object) -> TokenTrace:
    return TokenTrace.from_lists(
        [list(range(len(texts)))], [rollout], [train], token_texts=np.array(texts, dtype=object), **columns
    )


def test_chips_have_the_colour_of_their_log_ratio() -> None:
    ratios = [0.0, 0.009, 0.02, -0.02, 0.05, -0.2, 0.5, -0.5, 2.0, -2.0, 4.0, -4.0]
    trace = hand_made([f"t{i}" for i in range(12)], [-5.0] * 12, [-5.0 + ratio for ratio in ratios])
    page = Page(render_html(GapReport(gaps=()), UNKNOWN, trace, title="chips"))
    tones = [next(c for c in classes if c != "t") for classes in page.classes("span", "t")]
    assert tones == ["z", "z", "m1", "l1", "m2", "l3", "m4", "l4", "m5", "l5", "m6", "l6"]


def test_tokens_that_cannot_be_scored_are_grey_with_the_reason() -> None:
    texts, mask = ["a", "b", "c", "d", "e"], [True, False, True, True, True]
    rollout = np.array([MISSING, -1, -1, -np.inf, -1], np.float32)
    trace = hand_made(texts, rollout, [-1.0, -1.0, math.nan, -1.0, -1.0], mask=[mask])  # type: ignore[arg-type]
    page = Page(render_html(GapReport(gaps=()), UNKNOWN, trace, title="grey"))
    chips = [
        attrs for tag, attrs in page.elements if tag == "span" and (attrs.get("class") or "").startswith("t ")
    ]
    assert [chip["class"] for chip in chips] == ["t x", "t x", "t x", "t x", "t z"]
    for chip, reason in zip(
        chips,
        ("sampler log-probability not recorded", "masked", "trainer log-probability is not a number", "is −∞"),
        strict=False,
    ):
        assert reason in (chip["title"] or "")
    assert "5 (1 scored)" in page.text


def test_a_chip_tells_both_sides() -> None:
    trace = hand_made(["yes"], [math.log(0.5)], [math.log(0.25)], entropies=[[1.25]], positions=[[17]])
    page = Page(render_html(GapReport(gaps=()), UNKNOWN, trace, title="facts"))
    title = next(attrs["title"] for tag, attrs in page.elements if tag == "span" and attrs.get("title"))
    assert title is not None
    assert title.splitlines() == [
        "token id: 0",
        "position: 17",
        "log μ (sampler): −0.6931",
        "log π (trainer): −1.386",
        "ℓ = log π − log μ: −0.6931",
        "p, sampler → trainer: 0.5 → 0.25",
        "entropy (trainer): 1.25 nats",
    ]


def test_a_long_sequence_is_cut_to_the_part_that_carries_the_most() -> None:
    train = np.full(1000, -1.0)
    train[700:720] = -3.0
    trace = hand_made(["w"] * 1000, [-1.0] * 1000, train.tolist())
    gap = Gap("mean_abs_log_ratio", 0.08, None, None, 1000, "nats")
    text = Page(render_html(GapReport(gaps=(gap,)), UNKNOWN, trace, title="long")).text
    before, after = (int(count) for count in re.findall(r"… (\d+) tokens not shown", text))
    assert before + after == 600
    assert before <= 700 <= 720 <= before + 400
    assert "50.0%" in text  # 20 tokens · 2 nats, of 0.08 · 1000


def test_an_impossible_share_is_not_shown() -> None:
    gap = Gap("mean_abs_log_ratio", 0.001, None, None, 1, "nats")
    html = render_html(GapReport(gaps=(gap,)), UNKNOWN, hand_made(["a"], [-1.0], [-2.0]), title="share")
    assert "<span>share " not in html


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_inert_wherever_it_stands(text: str) -> None:
    number = (0.1,)
    report = GapReport(
        gaps=(
            Gap("mean_k3", 1.0, None, None, 1, text, method=text, note=text, label=text, source=text),
            Gap(text, math.nan, math.nan, math.inf, 0, text, source="trueup"),
        ),
        curves=(
            Curve(
                "mean_abs_log_ratio_by_position", text, text, (0.0,), (1.0,), (1,), number, (None,), (None,), text
            ),
        ),
        counts={text: 3, "nan": 0},
        warnings=(text,),
        provenance={text: text, "files": [text, None], "nested": {text: {text: math.nan}}, "none": None},
    )
    clue = Clue(text, text, math.inf, math.nan)
    cause = Cause(text, text, text, (clue,), (clue,), 0.5, text, text)
    diagnosis = Diagnosis(text, text, (cause, cause), (text,))
    trace = TokenTrace.from_lists(
        [[1, 2]],
        [[-1.0, -1.0]],
        [[-1.0, -2.0]],
        token_texts=np.array([text, text * 9], dtype=object),
        prompt=np.array([text], dtype=object),
        response=np.array([text], dtype=object),
        sequence_id=[text],
    )
    page = assert_inert(render_html(report, diagnosis, trace, title=text))
    assert page.count("span") > 10
    assert "49" not in page.text.replace("0.49", "")


@pytest.mark.parametrize("diagnosis", [NOISE, LAW, BOOKKEEPING, UNKNOWN])
def test_each_verdict_has_its_colour(diagnosis: Diagnosis) -> None:
    colours = {NOISE.verdict: "good", LAW.verdict: "warn", BOOKKEEPING.verdict: "bad", UNKNOWN.verdict: "open"}
    page = Page(render_html(GapReport(gaps=()), diagnosis, None, title="verdict"))
    assert page.classes("section", "verdict") == [["verdict", colours[diagnosis.verdict]]]


def test_nothing_at_all_still_makes_a_page() -> None:
    empty = TokenTrace.from_lists([], [], [])
    hollow = TokenTrace.from_lists([[]], [[]], [[]], prompt=np.array([None], dtype=object))
    for worst in (None, empty, hollow, TokenTrace.from_lists([[5]], [[-1.0]], [[-1.5]])):
        assert_inert(render_html(GapReport(gaps=()), UNKNOWN, worst, title=""))


def test_a_single_sequence_report_renders() -> None:
    rollouts = Rollouts(sequences=8, mean_length=20, seed=1)
    assert_inert(render_html(fake_report(rollouts), LAW, fake_worst(rollouts, count=3), title="small"))


def test_the_same_report_gives_the_same_bytes(report: GapReport, worst: TokenTrace, page: str) -> None:
    assert render_html(report, NOISE, worst, title="Step 120") == page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", " the"),
        (" ", "·"),
        ("x  ", "x··"),
        (" " * 64, "·×64"),
        ("\n", "⏎"),
        ("\r\n", "␍⏎"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("w" * 30, "w×30"),
        ("ab" * 20, "ab" * 11 + "a…"),
    ],
)
def test_white_space_and_odd_characters_of_a_token_are_visible(text: str, shown: str) -> None:
    assert token_text(text) == shown


def test_inert_keeps_what_people_write() -> None:
    text = "naïve 答案 👩‍🔬 π − μ\n\tнорма"
    assert inert(text) == text
    assert one_line(text) == "naïve 答案 👩‍🔬 π − μ норма"
