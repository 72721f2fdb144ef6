"""Takes from quoted material what a model could take for the structure of its prompt.

A document may hold the tokens by which chat templates tell speakers apart, names of speakers at the start of a line,
and look-alikes of our own labels. Each loses one character: an opening bracket becomes a round one, a colon a dash.
The words stay, so that a text about such things can still be answered from. What is stored, searched and cited is
the original. What a document *says* is not taken away: a lie, or a polite request, reads like any other sentence.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Iterator
from itertools import accumulate

# Letters that look like those of the words below; NFKD already takes care of full width, mathematical alphabets,
# circles and accents. After Unicode's confusables.txt (UTS 39).
_TWINS = {
    "A": "АΑᎪᴀ",
    "B": "ВΒᏴʙ",
    "C": "СϹᏟᴄⅭ",
    "D": "ᎠᴅԀ",
    "E": "ЕΕᎬᴇ",
    "F": "Ϝꜰ",
    "G": "Ԍɢ",
    "H": "НΗᎻʜ",
    "I": "ІΙӀᏆɪ",
    "J": "ЈᎫᴊ",
    "K": "КΚᏦᴋ",
    "L": "ᏞʟⅬ",
    "M": "МΜᎷᴍⅯ",
    "N": "Νɴ",
    "O": "ОΟՕᴏ",
    "P": "РΡᏢᴘ",
    "Q": "Ԛ",
    "R": "Ꭱʀ",
    "S": "ЅᏚՏꜱ",
    "T": "ТΤᎢᴛ",
    "U": "Սᴜ",
    "V": "ѴᏙᴠ",
    "W": "ԜᎳᴡ",
    "X": "ХΧⅩ",
    "Y": "УΥҮʏ",
    "Z": "ΖᏃᴢ",
    "a": "аαɑ",
    "c": "сϲ",
    "d": "ԁ",
    "e": "еҽ",
    "g": "ɡց",
    "h": "һհ",
    "i": "іıι",
    "j": "јϳ",
    "k": "κк",
    "l": "ӏ",
    "m": "м",
    "n": "ոп",
    "o": "оοօ",
    "p": "рρ",
    "q": "ԛգ",
    "r": "гᴦ",
    "s": "ѕ",
    "t": "тτ",
    "u": "սυ",
    "v": "ѵν",
    "w": "ԝա",
    "x": "хχ",
    "y": "уүγ",
    "[": "【〔〖〚⟦⁅❲⦋⌈⌊",
    "]": "】〕〗〛⟧⁆❳⦌⌉⌋",
    "<": "‹«〈⟨❮❬《⟪˂ᐸ",
    ">": "›»〉⟩❯❭》⟫˃ᐳ",
    "|": "│∣ǀ❘┃⎮︱丨",
    ":": "꞉ː∶׃܃։᠄⁚",
    "-": "‐‑‒–—―−─━ー﹘⁃➖",
    "/": "⁄∕╱⧸",
    "_": "▁‗ˍ",
    "#": "⌗♯",
}
# Negative circles, negative squares and the letters of flags, each an alphabet that NFKD leaves alone.
_ALPHABETS = (0x1F150, 0x1F170, 0x1F1E6)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Letters that are drawn as nothing.
_BLANK = "\u115f\u1160\u3164\uffa0"


class _Folding(dict[int, str]):
    """What each character comes to in a reader's eyes; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        folded = "".join(_look(part) for part in unicodedata.normalize("NFKD", character))
        self[code] = folded
        return folded


_TWIN_OF = {twin: letter for letter, twins in _TWINS.items() for twin in twins} | {
    chr(first + place): chr(ord("A") + place) for first in _ALPHABETS for place in range(26)
}


def _look(character: str) -> str:
    if character in _LINE_ENDS:
        return "\n"
    if character in _BLANK:
        return ""
    if character in _TWIN_OF:
        return _TWIN_OF[character]
    if character.isspace():
        return " "
    if unicodedata.category(character) in ("Cc", "Cf", "Mn", "Me"):
        return ""
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


_FOLDING = _Folding()
_PLAIN = re.compile(r"[\t\n\x20-\x7e]*")

# Invisible text: tag characters outside of the three flags that are spelt with them, orders of writing forced upon
# the reader, and runs of what is used one at a time (joiners, variation selectors).
_SMUGGLED = re.compile(
    r"(\U0001f3f4\U000e0067\U000e0062(?:\U000e0065\U000e006e\U000e0067|\U000e0073\U000e0063\U000e0074"
    r"|\U000e0077\U000e006c\U000e0073)\U000e007f)"
    r"|[\U000e0000-\U000e007f\u202a-\u202e\u2061-\u2069\u206a-\u206f\ufff9-\ufffb]"
    r"|[\u200b-\u200f\u2060\ufeff]{3,}|(?<=[\ufe00-\ufe0f\U000e0100-\U000e01ef])[\ufe00-\ufe0f\U000e0100-\U000e01ef]+"
)

# Our own labels: what an alias or a SourceId looks like, and the lines above a source.
_OURS = r"\[(?=\s*(?:S\d|SourceId\b))"
_HEADINGS = r"\[(?=\s*(?:Document|Page|Section)\s*:)"
# Llama 2 and Mistral; then ChatML and its kin, Llama 3, Gemma, Command; tags of speakers, thoughts and tools.
_TEMPLATES = (
    r"\[(?=\s*/?\s*(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS?|TOOL_RESULTS?|TOOL_CONTENT|THINK)\s*\])"
    r"|<(?=\s*<?\s*/?\s*SYS\s*>)"
    r"|<(?=\|[^\s<>|]{1,60}\|>)"
    r"|<(?=\s*\|\s*(?:im_|start|end|begin|eot|eom|bos|eos|system|user|assistant|tool|channel|message|return|call))"
    r"|<(?=\s*/?\s*(?:s|bos|eos|pad|unk|bos_token|eos_token|start_of_turn|end_of_turn|end_of_utterance)\s*>)"
    r"|<(?=\s*/?\s*(?:\w{1,20}:)?(?:system|user|assistant|human|developer|instructions?|think|thinking|tool_calls?"
    r"|tool_response|tool_results?|function_calls?|function_results?|function_response|invoke|system-reminder)"
    r"(?:\s[^<>]{0,200})?>)"
)
_BRACKETS = re.compile(f"{_OURS}|{_HEADINGS}|{_TEMPLATES}", re.IGNORECASE)
_LABELS = re.compile(_OURS, re.IGNORECASE)

# A line up to its colon. What Markdown may put in front of a name or behind it does not make it another one.
_BEFORE = r"[ \t>*_#`(\[-]*"
_AFTER = r"[ \t*_`)\]]*"
_SPEAKER = re.compile(
    rf"{_BEFORE}(?:human|user|assistant|developer|system(?:[ _-]?(?:prompt|message|note|override|instructions?))?"
    rf"|ai|bot|question|new instructions?){_AFTER}"
    rf"|{_BEFORE}#{{2,}}[ \t]*(?:instructions?|response|input){_AFTER}",
    re.IGNORECASE,
)
_SHOUTED = re.compile(r"(?:.*\W)?(?:SYSTEM|ASSISTANT|HUMAN|USER)(?: (?:PROMPT|MESSAGE|NOTE|OVERRIDE))?[ \t]*")
_LOUD = ("SYSTEM", "ASSISTANT", "HUMAN", "USER", "PROMPT", "MESSAGE", "NOTE", "OVERRIDE")
# No name is longer, whatever surrounds it.
_MAX_SPEAKER = 60
_ENDS = re.compile(
    r"^[ \t>*_#-]*end[ \t]+of([ \t]+)(?=(?:the[ \t]+)?(?:sources?|earlier[ \t]+messages|answer|question)\b)"
    r"|\b(?-i:END[ \t]+OF)([ \t]+)(?=(?-i:(?:THE[ \t]+)?(?:SOURCES?|EARLIER[ \t]+MESSAGES|ANSWER|QUESTION)\b))"
    r"|^[ \t>*_#-]*(?:earlier[ \t]+messages|sources|answer|question)([ \t]*\()(?=[0-9a-f]{4,12}\))",
    re.IGNORECASE | re.MULTILINE,
)
_RULES = re.compile(r"^[ \t]*(-{3,})[ \t]*$", re.MULTILINE)


def disarm(text: str) -> str:
    """`text` to be quoted in a prompt: without labels of ours, tokens of chat templates and names of speakers."""
    if not text.isascii():
        text = _SMUGGLED.sub(r"\1", text)
    folded = fold(text)
    return edited(text, folded, [*_opened(_BRACKETS, folded), *_spoken(folded), *_laid_out(folded)])


def disarm_line(text: str) -> str:
    """The same for a title or a heading, which has one line."""
    return disarm(" ".join(text.split()))


def unlabelled(text: str) -> str:
    """`text` without anything that reads like an alias or a SourceId of ours, to be quoted in an answer."""
    folded = fold(text)
    return edited(text, folded, list(_opened(_LABELS, folded)))


Edit = tuple[int, int, str]
"""Start and end in the folded text, and what comes in the place."""


def fold(text: str) -> str:
    """What a text comes to in a reader's eyes, whatever letters it is written in; to search in, not to show."""
    return text if _PLAIN.fullmatch(text) else text.translate(_FOLDING)


# A pattern that begins with one of two characters is slow to search for, and the characters are quick to find.


def _opened(pattern: re.Pattern[str], folded: str) -> Iterator[Edit]:
    for at in (*_places(folded, "["), *_places(folded, "<")):
        if pattern.match(folded, at):
            yield at, at + 1, "("


def _spoken(folded: str) -> Iterator[Edit]:
    for at in _places(folded, ":"):
        start = folded.rfind("\n", 0, at) + 1
        line = folded[max(start, at - _MAX_SPEAKER) : at]
        if (len(line) == at - start and _SPEAKER.fullmatch(line)) or (
            line.rstrip(" \t").endswith(_LOUD) and _SHOUTED.fullmatch(line)
        ):
            yield at, at + 1, " –"


def _laid_out(folded: str) -> Iterator[Edit]:
    if "---" in folded:
        for match in _RULES.finditer(folded):
            yield *match.span(1), "- - -"
    lowered = folded.lower()
    if any(word in lowered for word in ("source", "earlier", "answer", "question")):
        for match in _ENDS.finditer(folded):
            yield *match.span(match.lastindex or 0), " – "


def _places(folded: str, character: str) -> Iterator[int]:
    at = folded.find(character)
    while at >= 0:
        yield at
        at = folded.find(character, at + 1)


def edited(text: str, folded: str, edits: list[Edit]) -> str:
    """`text` with edits that were found in what it was folded to; they do not overlap."""
    if not edits:
        return text
    # Where each character of the text ends in what it was folded to.
    ends = None if text is folded else list(accumulate(len(_FOLDING[ord(character)]) for character in text))
    parts: list[str] = []
    done = 0
    for start, end, instead in sorted(edits):
        if ends is not None:
            # The first character that reaches beyond the start, and the first that reaches the end.
            start, end = bisect.bisect_right(ends, start), bisect.bisect_left(ends, end) + 1
        parts += (text[done:start], instead)
        done = end
    return "".join(parts) + text[done:]
