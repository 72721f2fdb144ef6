"""An e-book to blocks: its pages in the order of its spine."""

from __future__ import annotations

import posixpath
import zipfile
from typing import TYPE_CHECKING
from urllib.parse import unquote

from rag.errors import UnreadableDocument, UnsupportedFormat
from rag.parse import Draft, ParsedDocument
from rag.read_html import INSTALL_DOCS, add_page, main_part, page_tree
from rag.unpack import member_of, unpack

if TYPE_CHECKING:
    from lxml.etree import _Element

_CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
_OPF = "{http://www.idpf.org/2007/opf}"
_DC = "{http://purl.org/dc/elements/1.1/}"
_PAGES = ("application/xhtml+xml", "text/html")


def read_epub(data: bytes, name: str, source_type: str, max_bytes: int) -> ParsedDocument:
    """The text of a book, as `read_html` reads its pages.

    Raises UnsupportedFormat where lxml is not installed, UnreadableDocument, DocumentTooLarge, EmptyDocument.
    """
    # Pages may declare XHTML's document type: they are read as HTML, which knows no entities but its own.
    with unpack(data, name, max_bytes, allow_doctype=True) as archive:
        container = _xml(archive, "META-INF/container.xml", name)
        root_file = container.find(f".//{_CONTAINER}rootfile")
        place = unquote(root_file.get("full-path") or "") if root_file is not None else ""
        package = _xml(archive, place, name)
        pages = {
            str(item.get("id")): posixpath.normpath(
                posixpath.join(posixpath.dirname(place), unquote(item.get("href") or ""))
            )
            for item in package.iter(f"{_OPF}item")
            if item.get("media-type") in _PAGES and "nav" not in (item.get("properties") or "").split()
        }
        spine = [pages[ref] for item in package.iter(f"{_OPF}itemref") if (ref := str(item.get("idref"))) in pages]
        _refuse_encrypted(archive, spine, name)
        draft = Draft(name, max_bytes)
        for page in dict.fromkeys(spine):
            text = member_of(archive, page, name).decode("utf-8-sig", "replace")
            if text.strip():
                add_page(draft, main_part(page_tree(text, name)))
        title = package.findtext(f".//{_DC}title")
        language = (package.findtext(f".//{_DC}language") or "").strip().lower()[:2]
    known = len(language) == 2 and language.isascii() and language.isalpha()
    return draft.document(source_type, title=title, language=language if known else None)


def _xml(archive: zipfile.ZipFile, member: str, name: str) -> _Element:
    try:
        from lxml import etree
    except ImportError as error:
        raise UnsupportedFormat(f"{name}: .epub {INSTALL_DOCS}") from error
    text = member_of(archive, member, name)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    try:
        return etree.fromstring(text, parser)
    except (etree.LxmlError, ValueError) as error:
        raise UnreadableDocument(f"{name} is not a readable e-book") from error


def _refuse_encrypted(archive: zipfile.ZipFile, spine: list[str], name: str) -> None:
    """Fonts are often encrypted, and nobody reads these."""
    if "META-INF/encryption.xml" not in archive.namelist():
        return
    for reference in _xml(archive, "META-INF/encryption.xml", name).iter(
        "{http://www.w3.org/2001/04/xmlenc#}CipherReference"
    ):
        if posixpath.normpath(unquote(reference.get("URI") or "")) in spine:
            raise UnreadableDocument(f"{name} is encrypted (DRM)")
