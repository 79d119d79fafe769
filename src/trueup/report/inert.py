"""Text that came from data, made safe to show: it cannot steer a terminal, reorder a page or break UTF-8.

Escaping for HTML is the template engine's work. What is done here is what no escaping does: control characters,
bidirectional overrides, invisible characters and lone surrogates become visible symbols.
"""

from __future__ import annotations

import re

#: Everything but tab and newline that moves a cursor, reorders text, hides, or is no character at all.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
_SPACES = re.compile(r" {2,}|^ +$| +$")


def inert(text: object) -> str:
    """``text`` with every active character replaced by a visible one; tabs and newlines stay.

    >>> inert("a\\x1b[31mb\\u202ec\\ud800")
    'a␛[31mb⟨U+202E⟩c⟨U+D800⟩'
    """
    return _ACTIVE.sub(_symbol, str(text))


def one_line(text: object, *, limit: int | None = None) -> str:
    """``inert`` text on one line, cut to ``limit`` characters with an ellipsis.

    >>> one_line("two\\n  lines", limit=6)
    'two l…'
    """
    line = " ".join(inert(text).split())
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def token_text(text: object, *, limit: int = 24) -> str:
    """A token for a chip: white space that could be missed is marked, a single inner or leading space is left.

    >>> token_text(" the"), token_text("  "), token_text("\\n\\n"), token_text("\\t}")
    (' the', '··', '⏎⏎', '⇥}')
    """
    marked = inert(text).replace("\n", "⏎").replace("\t", "⇥").replace("\xa0", "⍽").replace("\u3000", "□")
    marked = _SPACES.sub(lambda run: "·" * len(run[0]), marked)
    if len(marked) > limit and len(set(marked)) == 1:  # an indentation of 64 spaces
        marked = f"{marked[0]}×{len(marked)}"
    return marked if len(marked) <= limit else marked[: limit - 1] + "…"


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
