"""A Word document to blocks: headings by their styles, paragraphs, lists, tables, notes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rag.errors import UnreadableDocument, UnsupportedFormat
from rag.parse import Draft, ParsedDocument
from rag.unpack import FAILURES, unpack

if TYPE_CHECKING:
    from docx.document import Document
    from lxml.etree import _Element

INSTALL_DOCS = "needs the extra docs: pip install palisade-rag[docs]"

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
# Text that was taken out with changes tracked, and what is there twice for older readers.
_GONE = frozenset({f"{_W}del", f"{_W}moveFrom", _FALLBACK, f"{_W}delText", f"{_W}instrText"})
_MAX_STYLE_DEPTH = 20


def read_docx(data: bytes, name: str, source_type: str, max_bytes: int) -> ParsedDocument:
    """The text of a document as it is with all tracked changes accepted, notes at the end; no headers and footers.

    Raises UnsupportedFormat where python-docx is not installed, UnreadableDocument, DocumentTooLarge, EmptyDocument.
    """
    try:
        import docx
        from docx.opc.exceptions import OpcError
        from lxml.etree import LxmlError
    except ImportError as error:
        raise UnsupportedFormat(f"{name}: .docx {INSTALL_DOCS}") from error
    unpack(data, name, max_bytes).close()
    draft = Draft(name, max_bytes)
    try:
        document = docx.Document(io.BytesIO(data))
        _add_blocks(draft, document.element.body, _Styles(document))
        for notes in _notes(document):
            _add_blocks(draft, notes, _Styles(document))
        title = document.core_properties.title
    except (OpcError, LxmlError, *FAILURES) as error:
        raise UnreadableDocument(f"{name} is not a readable Word document") from error
    return draft.document(source_type, title=title)


class _Styles:
    """Which styles are headings, by their own outline level or that of a style they are based on."""

    def __init__(self, document: Document) -> None:
        self._styles: dict[str, Any] = {
            str(style.get(f"{_W}styleId")): style for style in document.styles.element.iterchildren(f"{_W}style")
        }
        self._levels: dict[str, int] = {}

    def level(self, paragraph: _Element) -> int:
        """1 to 6 for a heading, 0 for all else."""
        properties = paragraph.find(f"{_W}pPr")
        if properties is None:
            return 0
        own = _outline(properties)
        if own is not None:
            return own
        style = properties.find(f"{_W}pStyle")
        name = None if style is None else style.get(f"{_W}val")
        return 0 if name is None else self._of_style(name)

    def _of_style(self, name: str) -> int:
        if name not in self._levels:
            self._levels[name] = self._look_up(name)
        return self._levels[name]

    def _look_up(self, name: str | None) -> int:
        for _ in range(_MAX_STYLE_DEPTH):
            style = self._styles.get(name or "")
            if style is None:
                return 0
            shown = style.find(f"{_W}name")
            if shown is not None and str(shown.get(f"{_W}val")).lower() == "title":
                return 1
            properties = style.find(f"{_W}pPr")
            level = None if properties is None else _outline(properties)
            if level is not None:
                return level
            base = style.find(f"{_W}basedOn")
            name = None if base is None else base.get(f"{_W}val")
        return 0


def _outline(properties: _Element) -> int | None:
    """The level of a heading; 0 for body text, which is level 9 in the file; None where nothing is said."""
    level = properties.find(f"{_W}outlineLvl")
    number = None if level is None else level.get(f"{_W}val")
    if number is None or not number.isdecimal():
        return None
    return min(int(number) + 1, 6) if int(number) < 9 else 0


def _add_blocks(draft: Draft, top: _Element, styles: _Styles) -> None:
    after_item = False
    stack: list[_Element] = [top]
    while stack:
        element = stack.pop()
        if element.tag == f"{_W}p":
            text = _text(element)
            level = styles.level(element)
            is_item = not level and element.find(f"{_W}pPr/{_W}numPr") is not None
            if level:
                draft.add(text, "heading", level=level)
            elif is_item and text.strip():
                draft.add(f"- {text.strip()}", "list", tight=after_item)
            else:
                draft.add(text)
            after_item = is_item
        elif element.tag == f"{_W}tbl":
            rows = (
                " | ".join(_one_line(_text(cell)) for cell in row.iterchildren(f"{_W}tc"))
                for row in element.iterchildren(f"{_W}tr")
            )
            draft.add("\n".join(f"| {row} |" for row in rows if row.strip(" |")), "table")
            after_item = False
        elif element.tag not in _GONE:
            # Content controls and inserted parts hold paragraphs of the document.
            stack += reversed(element)


def _text(element: _Element) -> str:
    return "".join(_pieces(element)).strip()


def _pieces(top: _Element) -> Iterator[str]:
    stack: list[_Element] = [top]
    while stack:
        element = stack.pop()
        if element.tag in _GONE:
            continue
        if element.tag == f"{_W}t":
            yield element.text or ""
        elif element.tag == f"{_W}tab":
            # A tab stop of a paragraph's format is no character.
            yield "\t" if element.getparent() is not None and element.getparent().tag == f"{_W}r" else ""
        elif element.tag in (f"{_W}br", f"{_W}cr"):
            yield "\n"
        elif element.tag == f"{_W}noBreakHyphen":
            yield "-"
        elif element.tag == f"{_W}p" and element is not top:
            yield "\n"
        stack += reversed(element)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "¦")


def _notes(document: Document) -> Iterator[_Element]:
    """Footnotes, then endnotes."""
    from docx.oxml import parse_xml

    for kind in ("footnotes", "endnotes"):
        for relation in document.part.rels.values():
            if not relation.is_external and relation.reltype.endswith(f"/{kind}"):
                yield parse_xml(relation.target_part.blob)
