"""A page of HTML to blocks: what a reader sees of its main part, without navigation, scripts and hidden text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rag.errors import UnreadableDocument, UnsupportedFormat
from rag.parse import Draft, ParsedDocument

if TYPE_CHECKING:
    from lxml.etree import _Element

INSTALL_DOCS = "needs the extra docs: pip install palisade-rag[docs]"
# libxml2 gives up at 2,048 and would hand over what it had until then.
MAX_DEPTH = 1_000

_DROPPED = frozenset(
    {"script", "style", "noscript", "template", "iframe", "object", "embed", "svg", "canvas", "audio", "video", "map"}
    | {"head", "nav", "aside", "footer", "dialog", "menu", "meta", "link"}
    | {"button", "select", "input", "textarea", "datalist"}
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
# These begin and end a block; all other elements run on in the line.
_BLOCKS = frozenset(
    {"html", "body", "main", "article", "section", "header", "div", "center", "form", "fieldset", "legend", "details"}
    | {"summary", "p", "blockquote", "address", "figure", "figcaption", "hgroup", "hr"}
    | {"ul", "ol", "li", "dl", "dt", "dd", "optgroup"}
    | {"table", "caption", "thead", "tbody", "tfoot", "tr", "td", "th"}
)
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_HIDDEN_ROLES = frozenset({"navigation", "banner", "contentinfo", "search", "complementary", "menu", "dialog"})
_SPACE = re.compile(r"[ \t\n\r\f\u00a0]+")


def read_html(text: str, name: str, source_type: str, max_bytes: int, *, field: str | None = None) -> ParsedDocument:
    """The main part of a page: its `main`, or its only `article`, else all of it.

    What is marked as navigation, as hidden or as a frame of the page is left out, also what only a style
    attribute hides: a reader would never know what an answer quotes. Raises EmptyDocument, DocumentTooLarge,
    UnreadableDocument.
    """
    root = page_tree(text, name, field=field)
    draft = Draft(name, max_bytes, field=field)
    add_page(draft, main_part(root))
    title = next((_visible(element) for element in root.iter("title")), None)
    language = re.match(r"[a-z]{2}(?![a-z])", (root.get("lang") or "").strip().lower())
    return draft.document(source_type, title=draft.first_heading or title, language=language[0] if language else None)


def page_tree(text: str, name: str, *, field: str | None = None) -> _Element:
    """The elements of a page, however broken it is. Raises UnreadableDocument for one that is nested too deep."""
    try:
        from lxml import etree
    except ImportError as error:
        raise UnsupportedFormat(f"{name}: HTML {INSTALL_DOCS}", field=field) from error
    # As bytes, since lxml refuses a string that begins with a declaration of its encoding.
    parser = etree.HTMLParser(encoding="utf-8", huge_tree=True, no_network=True, remove_comments=True, remove_pis=True)
    try:
        root = etree.fromstring(text.encode(), parser)
    except etree.LxmlError as error:
        raise UnreadableDocument(f"{name} is not a readable page", field=field) from error
    if root is None:
        raise UnreadableDocument(f"{name} is not a readable page", field=field)
    depth = 0
    for event, _ in etree.iterwalk(root, events=("start", "end")):
        depth += 1 if event == "start" else -1
        if depth > MAX_DEPTH:
            raise UnreadableDocument(f"{name} is nested more than {MAX_DEPTH:,} elements deep", field=field)
    return root


def main_part(root: _Element) -> _Element:
    """Where the text of a page is."""
    mains = [element for element in root.iter() if element.tag == "main" or element.get("role") == "main"]
    if len(mains) == 1:
        return mains[0]
    articles = list(root.iter("article"))
    if len(articles) == 1 and not mains:
        return articles[0]
    body = root.find("body")
    return root if body is None else body


def add_page(draft: Draft, top: _Element) -> None:
    """Add the blocks of an element to a draft."""
    _Walker(draft).walk(top)


class _Walker:
    """Goes through the elements in order, without recursion, and cuts the text where a reader sees a break."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._line: list[str] = []
        self._list_depth = 0
        self._markers: list[int | None] = []  # the number of the last item of each open list; None for bullets
        self._marker = ""
        self._tight = False

    def walk(self, top: _Element) -> None:
        # Ends are on the stack as well, as a tuple with the element.
        stack: list[tuple[Any, bool]] = [(top, False)]
        while stack:
            element, ends = stack.pop()
            if ends:
                self._end(element)
                if element is not top:
                    self._say(element.tail)
                continue
            if element is not top and _is_dropped(element):
                self._say(element.tail)
                continue
            if self._is_whole(element):
                self._flush()
                self._add_whole(element)
                if element is not top:
                    self._say(element.tail)
                continue
            self._start(element)
            stack.append((element, True))
            stack += [(child, False) for child in reversed(element)]
        self._flush()

    def _is_whole(self, element: _Element) -> bool:
        if element.tag == "table":
            # Tables that lay out a page hold blocks of their own.
            inner = {child.tag for child in element.iterdescendants()}
            return not inner & {"table", "pre", *_HEADINGS}
        return element.tag == "pre" or element.tag in _HEADINGS

    def _add_whole(self, element: _Element) -> None:
        if element.tag == "pre":
            self._draft.add("".join(_texts(element)).strip("\n"), "code")
        elif element.tag == "table":
            rows = [
                " | ".join(_visible(cell).replace("|", "¦") for cell in row if cell.tag in ("td", "th"))
                for row in element.iter("tr")
                if not _is_dropped(row)
            ]
            caption = next((_visible(caption) for caption in element.iter("caption")), "")
            self._draft.add(caption)
            self._draft.add("\n".join(f"| {row} |" for row in rows if row.strip(" |")), "table")
        else:
            self._draft.add(_visible(element), "heading", level=_HEADINGS[str(element.tag)])

    def _start(self, element: _Element) -> None:
        if element.tag in _BLOCKS:
            self._flush()
        if element.tag in ("ul", "ol"):
            self._markers.append(0 if element.tag == "ol" else None)
        elif element.tag == "li":
            if self._markers and (number := self._markers[-1]) is not None:
                self._markers[-1] = number + 1
                self._marker = f"{number + 1}. "
            else:
                self._marker = "- "
        elif element.tag == "br":
            self._line.append("\n")
        elif element.tag == "img":
            self._say(element.get("alt"))
        self._say(element.text)

    def _end(self, element: _Element) -> None:
        if element.tag in _BLOCKS:
            self._flush()
        if element.tag in ("ul", "ol"):
            self._markers.pop()
            self._tight = self._tight and bool(self._markers)
        if element.tag == "li":
            self._marker = ""

    def _say(self, text: str | None) -> None:
        if text:
            self._line.append(_SPACE.sub(" ", text))

    def _flush(self) -> None:
        text = "\n".join(" ".join(line.split(" ")).strip() for line in "".join(self._line).split("\n"))
        text = re.sub(r" {2,}", " ", text).strip()
        self._line = []
        if not text:
            return
        if not self._markers:
            self._draft.add(text)
            self._tight = False
            return
        indent = "  " * (len(self._markers) - 1)
        shown = indent + (self._marker or "  ") + text.replace("\n", "\n" + indent + "  ")
        self._draft.add(shown, "list", tight=self._tight)
        self._marker = ""
        self._tight = True


def _is_dropped(element: _Element) -> bool:
    if not isinstance(element.tag, str) or element.tag in _DROPPED:
        return True
    if element.get("hidden") is not None or element.get("aria-hidden") == "true":
        return True
    if (element.get("role") or "") in _HIDDEN_ROLES or _HIDDEN.search(element.get("style") or ""):
        return True
    # The head of a page; within an article it is that article's own.
    return element.tag == "header" and not any(above.tag in ("article", "main") for above in element.iterancestors())


def _texts(element: _Element) -> Iterator[str]:
    """All text below an element that is not dropped."""
    stack: list[tuple[Any, bool]] = [(element, False)]
    while stack:
        part, ends = stack.pop()
        if ends:
            yield part.tail or ""
            continue
        if part is not element:
            stack.append((part, True))
            if _is_dropped(part):
                continue
        if part.tag == "br":
            yield "\n"
        elif part.tag == "img":
            yield part.get("alt") or ""
        yield part.text or ""
        if part.tag in _BLOCKS and part is not element:
            yield " "
        stack += [(child, False) for child in reversed(part)]


def _visible(element: _Element) -> str:
    return " ".join("".join(_texts(element)).replace("\u00a0", " ").split())
