"""Lets no link or image out of an answer that is not in a source that it cites.

A model that obeys a document can be made to write what it knows into an address. Whoever shows its answer
may load an image at once, and a reader may follow a link. What counts as one is wider than Markdown:
what a browser, a chat window or a terminal would make an address of.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection

from rag.exchange import Passage
from rag.flow import Flow, Line, by

REMOVED = "(link removed)"

# Longer ones are taken for none, and lose what would make them one.
_MAX_TAG = 1000

# --- what is not seen ----------------------------------------------------------------------------

# Of no width, or of none that is seen; the tag characters can carry whole texts.
_UNSEEN = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
# Where they make letters of other scripts, or one picture of several, they stay.
_INVISIBLE = re.compile(f"[\U000e0000-\U000e007f]+|(?<=[!-~])[{_UNSEEN}]+|(?<![{_UNSEEN}])[{_UNSEEN}]+(?=[!-~])")
_ONE_UNSEEN = re.compile(f"[{_UNSEEN}]")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#x[0-9a-f]{1,6}|colon|sol|bsol|period|commat|quest|tab|newline);", re.IGNORECASE)
_BEGUN_ENTITY = re.compile(r"&[#0-9a-z]{0,9}", re.IGNORECASE)

# --- what is a link ------------------------------------------------------------------------------

# What ends an address in running text; scripts that need no spaces end it with a letter of theirs.
_NO_URL = (
    r"\s<>\"`|\[\]\u2018-\u201f\u2026\u3000\u3001\u3003-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0d\uff1a-\uff5e"
)
# An ideographic full stop between letters is a dot in a host's name.
_STOP = r"[\u3002\uff0e\uff61](?=[a-z0-9])"
_REST = rf"(?:[^{_NO_URL}\u3002\uff0e\uff61]|{_STOP})*"
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,62})\."
_DOMAINS = "com|org|net|ru|cn|xyz|biz|edu|gov"
_MORE_DOMAINS = (
    f"{_DOMAINS}|[a-z]{{2}}|info|app|dev|site|online|shop|store|tech|cloud|page|link|click|top|live|name|mobi"
)

_TAG = r"(?P<tag><)(?=[a-z])"
# What stands in an inline link for the address: with a scheme or another host.
_ELSEWHERE = r"<?(?:[a-z&][a-z0-9+.\-\\&;#%]*:|[/\\]{2})"
_INLINE = (
    rf"\]\(\s{{0,50}}(?={_ELSEWHERE})(?P<inline><[^<>\n]{{0,2000}}>|(?:[^\s<>()\[\]]|\([^\s<>()\[\]]{{0,500}}\)){{1,2000}})"
    r"(?:\s{1,50}(?:\"[^\"]{0,500}\"|'[^']{0,500}'|\([^()]{0,500}\)))?\s{0,50}\)"
)
# The same where Markdown reads on and the two above do not: brackets and more parentheses in an address, a long title,
# a quotation's mark in between, a label with brackets or line ends.
_TARGET = r"<?[!#-;=?-_a-{}~]{1,2000}"
_ELSE = rf"\](?P<else>[(:])[\s>]{{0,50}}(?=<?(?:https?:|[/\\]{{2}})[!-~])(?P<target>{_TARGET})"
_DEFINITION = (
    r"(?P<label>^[ \t>*+-]{0,20}\[[^\[\]\n]{1,300}\]):[ \t]{0,50}\n?[ \t]{0,50}"
    rf"(?={_ELSEWHERE})(?P<defined><[^<>\n]{{0,2000}}>|[^\s<>]{{1,2000}})"
)
_BARE = (
    "(?P<bare>"
    + "|".join(
        (
            rf"[a-z][a-z0-9+.\-]{{1,30}}:(?://|\\\\)(?:\[[0-9a-f:.]{{2,45}}\])?{_REST}",
            rf"(?:https?|wss?|ftps?|file):[/\\]{_REST}",
            rf"(?<![\w:/\\])(?://|\\\\)(?:{_LABEL}){{1,9}}[a-z]{_REST}",
            rf"(?<![\w/])www[0-9]{{0,3}}\.[a-z0-9]{_REST}",
            rf"(?<!\w)(?:javascript|vbscript|livescript|blob|view-source):[^{_NO_URL}]{_REST}",
            rf"(?<!\w)data:[a-z0-9.+/-]{{0,80}}[;,]{_REST}",
            rf"(?<!\w)(?:mailto|xmpp|sips?):[^{_NO_URL}@]{{1,200}}@{_REST}",
            rf"(?<!\w)(?:tel|sms):\+?[0-9]{_REST}",
            rf"(?<![\w@./\\-])(?:{_LABEL}){{1,9}}(?:{_MORE_DOMAINS})(?::[0-9]{{1,5}})?[/?]{_REST}",
            rf"(?<![\w@./\\-])(?:{_LABEL}){{1,9}}(?:{_DOMAINS})(?![\w(-]|\.\w)",
        )
    )
    + ")"
)
_LINK = re.compile("|".join((_INLINE, _DEFINITION, _ELSE, _TAG, _BARE)), re.IGNORECASE | re.MULTILINE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*:(?://)?", re.IGNORECASE)

_WHOLE_TAG = re.compile(rf"<(?P<name>[a-z][a-z0-9:-]*)[^<>]{{0,{_MAX_TAG}}}>", re.IGNORECASE)
_BEGUN_TAG = re.compile(rf"<(?:[a-z][^<>]{{0,{_MAX_TAG}}})?", re.IGNORECASE)
# A browser reads a second `<` in a tag as a part of it; in code it is none, unless the name is an element's that loads.
_LOADING = (
    "a|area|audio|base|body|button|embed|form|frame|iframe|image|img|input|link|meta|object|picture|script|source|style"
    "|svg|table|td|th|track|use|video"
)
_OPEN_TAG = re.compile(
    rf"<[a-z][a-z0-9:-]*[\s/][^<>]{{0,{_MAX_TAG}}}=|<(?=[^<>]{{{_MAX_TAG}}})[a-z][a-z0-9:-]*[\s/]"
    rf"|<(?:{_LOADING})[\s/][^<>]{{0,{_MAX_TAG}}}<",
    re.IGNORECASE,
)
# Elements that do something without an attribute.
_ACTIVE = frozenset(
    ("script", "style", "iframe", "object", "embed", "svg", "math", "base", "template", "plaintext", "xmp")
)

_DELIMITER = re.compile(rf"[{_NO_URL}]")
_ASCII = re.compile(r"[!-~]")
_BEGUN_BRACKET = re.compile(
    r"\[[^\[\]\n]{0,2000}(?:\](?::[ \t]{0,50}\n?[ \t]{0,50}(?:<[^<>\n]{0,2000}|[^\s<>]{0,2000}))?)?"
)
_END_BRACKET = re.compile(r"\]")
_BEGUN_INLINE = re.compile(
    r"\]\([\s>]{0,50}(?:<[^<>\n]{0,2000}(?:>(?:\s[^\n)]{0,600})?)?|(?:[^\s<>()\[\]]|\([^\s<>()\[\]]{0,500}\)?){0,2000}"
    r"(?:\s[^)]{0,600})?)"
)
_BEGUN_TARGET = re.compile(rf"\]:[\s>]{{0,50}}(?:<|{_TARGET})?")


class Release:
    """A stage of `rag.flow` that lets an address pass once it is in a source that has been cited."""

    def __init__(self, sources: Collection[Passage], cited: Callable[[], Collection[Passage]]) -> None:
        """`sources` may still be cited, `cited` says which ones are by now."""
        self._sources = sources
        self._cited = cited
        self._known: dict[tuple[str, int], frozenset[str]] = {}
        self._links = Flow(_LINK, self._judge, _undecided)
        self._line = Line(*_seen(), self._links)

    def feed(self, text: str) -> str:
        return self._line.feed(text)

    def finish(self) -> str:
        return self._line.finish()

    def _judge(self, match: re.Match[str]) -> str | None:
        if match["tag"]:
            return self._judge_tag(match)
        run = _run(match)
        address = _address(run)
        allowed = self._allows(lambda passage: address.rstrip("/") in self._of(passage))
        if allowed is None:
            return None
        if allowed:
            return match[0]
        if match["inline"] or match["else"] == "(":
            return f"] {REMOVED}"
        if match["else"]:
            return f"]: {REMOVED}"
        if match["defined"]:
            return f"{match['label']} {REMOVED}"
        return REMOVED + run[len(address) :]

    def _judge_tag(self, match: re.Match[str]) -> str | None:
        tag = _WHOLE_TAG.match(match.string, match.start())
        if tag is None:
            return "‹" if _OPEN_TAG.match(match.string, match.start()) else "<"
        text = tag[0]
        if "=" not in text and tag["name"].lower() not in _ACTIVE:
            return "<"
        # With an open quote it would go on behind its end.
        whole = text.count('"') % 2 == 0 and text.count("'") % 2 == 0
        allowed = self._allows(lambda passage: whole and text in passage.text)
        return None if allowed is None else "<" if allowed else "‹"

    def _allows(self, has: Callable[[Passage], bool]) -> bool | None:
        """None while it is not known."""
        if any(has(passage) for passage in self._cited()):
            return True
        return None if not self._links.finished and any(has(passage) for passage in self._sources) else False

    def _of(self, passage: Passage) -> frozenset[str]:
        key = (passage.source_id, len(passage.text))
        if key not in self._known:
            self._known[key] = addresses(passage.text)
        return self._known[key]


def released(text: str, cited: Collection[Passage]) -> str:
    """`text` without links and images that are in none of the passages."""
    stage = Release(cited, lambda: cited)
    return stage.feed(text) + stage.finish()


def addresses(text: str) -> frozenset[str]:
    """The addresses that a text has, without a slash at their end; of those with a scheme their hosts as well."""
    line = Line(*_seen())
    found = set()
    for match in _LINK.finditer(line.feed(text) + line.finish()):
        if match["tag"]:
            continue
        address = _address(_run(match)).rstrip("/")
        found |= {address, re.split(r"[/?#]", _SCHEME.sub("", address, count=1), maxsplit=1)[0]}
    return frozenset(found)


def _seen() -> tuple[Flow, Flow]:
    """Stages that take away what would hide an address from us, and from nobody else."""
    return Flow(_INVISIBLE, by(""), _begun_invisible), Flow(_ENTITY, _decoded, _begun_entity)


def _decoded(match: re.Match[str]) -> str:
    """The character, where it can be a part of an address that is hidden thus."""
    character = html.unescape(match[0])
    if character.isspace():
        return " "
    return character if character.isascii() and (character.isalnum() or character in ":/\\.@?%=-_") else match[0]


def _run(match: re.Match[str]) -> str:
    """The address of a link and what stands around it."""
    run = match["inline"] or match["defined"] or match["target"] or match["bare"]
    assert run is not None
    return run


def _address(run: str) -> str:
    """An address without the brackets around it and the punctuation behind it."""
    if run.startswith("<"):
        return run[1:-1].strip()
    while run:
        last = run[-1]
        if last in ".,;:!?'*_~}" or (last == ")" and run.count(")") > run.count("(")):
            run = run[:-1]
        else:
            break
    return run


def _begun_invisible(text: str) -> int:
    end = len(text)
    while end and _ONE_UNSEEN.match(text, end - 1):
        end -= 1
    return end


def _begun_entity(text: str) -> int:
    at = text.rfind("&")
    return at if at >= 0 and _BEGUN_ENTITY.fullmatch(text, at) else len(text)


def _undecided(text: str) -> int:
    """From where on the text may be, or become, a link that what follows still changes."""
    starts = [len(text)]
    # The last word. An address begins in ASCII, and so no other script has to wait for a space.
    delimiter = _DELIMITER.search(text[::-1])
    word = 0 if delimiter is None else len(text) - delimiter.start()
    begun = _ASCII.search(text, word)
    if begun is not None:
        starts.append(begun.start())
    for mark, pattern in (
        ("[", _BEGUN_BRACKET),
        ("]", _END_BRACKET),
        ("](", _BEGUN_INLINE),
        ("]:", _BEGUN_TARGET),
        ("<", _BEGUN_TAG),
    ):
        at = text.rfind(mark)
        if at >= 0 and pattern.fullmatch(text, at):
            # With what it closes: nobody shall see half of a SourceId.
            opened = text.rfind("[", 0, at) if mark[0] == "]" else -1
            starts.append(opened if opened >= 0 and _BEGUN_BRACKET.fullmatch(text, opened, at) else at)
    return min(starts)
