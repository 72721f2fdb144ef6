"""Bytes to text with structure: where the headings, pages, code blocks and tables of a document are.

Every format ends as one `body` string and a row of blocks that cover all of it but white space. Line
ends become LF and a byte order mark goes; otherwise the text is kept as it came, not even composed (NFC),
so that offsets, hashes and quotations hold. PDF text is what the reader reconstructs, and is repaired.
"""

from __future__ import annotations

import codecs
import io
import itertools
import logging
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.utils import EnvType
from pypdf import PdfReader, apply_configuration
from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError, PyPdfError

from rag.errors import DocumentTooLarge, EmptyDocument, InvalidInput, UnreadableDocument, UnsupportedFormat
from rag.principal import check_name

Format = Literal["markdown", "text", "yaml", "pdf", "html", "csv", "docx", "xlsx", "epub"]
Kind = Literal["text", "heading", "code", "table", "list"]
Scalar = str | int | float | bool

SUFFIXES: dict[str, Format] = {
    ".md": "markdown",
    ".markdown": "markdown",
    ".txt": "text",
    ".rst": "text",
    ".log": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".pdf": "pdf",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".csv": "csv",
    ".tsv": "csv",
    ".docx": "docx",
    ".xlsx": "xlsx",
    ".epub": "epub",
}
# Formats that are text, and those that are packed or binary.
TEXT_FORMATS = frozenset({"markdown", "text", "yaml", "html", "csv"})
# What many people will try, and what to do instead.
_INSTEAD = {
    ".pptx": "save it as PDF",
    ".ppt": "save it as PDF",
    ".doc": "save it as .docx",
    ".xls": "save it as .xlsx",
    ".odt": "save it as .docx",
    ".ods": "save it as .xlsx",
    ".odp": "save it as PDF",
    ".rtf": "save it as .docx",
}
# First bytes that no text begins with; a name may say what it likes.
_MAGIC = {
    b"%PDF-": "a PDF file",
    b"PK\x03\x04": "a ZIP archive, such as an Office file",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an old or encrypted Office file",
    b"\x89PNG\r\n": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"\x7fELF": "a program",
}

# Metadata of a document is at most 64 KiB.
MAX_FRONT_MATTER_CHARACTERS = 64 * 1024
# A title is read by people and is in front of every chunk; a first "heading" of a megabyte is no title.
MAX_TITLE_CHARACTERS = 300
# markdown-it takes 10 µs and 250 bytes for a token, so 15 s and 400 MB at this estimate. 8 MiB of real
# documentation are estimated at 0.9 million (and have 0.3). What is beyond, such as 3 million lines of one
# letter, is data rather than prose: it is split like plain text.
MAX_MARKDOWN_TOKENS = 1_500_000
# Tables make three tokens of a cell; with more of them than this, they are read as plain lines.
MAX_TABLE_PIPES = 100_000
# More are lines with blank lines between, of which 8 MiB can hold 2.8 million; the rest is joined.
MAX_PARAGRAPHS = 50_000
JOINED_PARAGRAPH_CHARACTERS = 512
# A library of a document; the limit is there because 8 MiB can hold 100,000 pages.
MAX_PDF_PAGES = 10_000
# PDF pages of articles took 20 ms: 3,000 of these.
MAX_PDF_SECONDS = 60.0
# Operators, operands and array elements of one page.
MAX_PDF_PAGE_WORK = 1_000_000

# pypdf says that broken files may raise anything. 20,000 mutations of eight files raised six of these;
# the others are of the same kind. Whatever is left is a fault of ours, and should be loud.
_PDF_FAILURES = (
    PyPdfError,
    DependencyError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RecursionError,
    NotImplementedError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)

# Its warnings quote the document and repeat for every page; what matters of them is raised as an error.
logging.getLogger("pypdf").addHandler(logging.NullHandler())
logging.getLogger("pypdf").propagate = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of text that belongs together: a heading, a paragraph, a list item, a code block, a table.

    `body[start:end]` are whole lines. `path` holds the headings above, outermost first; a heading
    is in the section that it opens, and `level` is 1 to 6 for it and 0 for all else.
    """

    start: int
    end: int
    kind: Kind
    path: tuple[str, ...] = ()
    page_number: int | None = None
    level: int = 0

    @property
    def section(self) -> str | None:
        """The heading path, for example `Setup > Install > Linux`; None before the first heading."""
        return " > ".join(self.path) or None

    @property
    def is_heading(self) -> bool:
        return self.kind == "heading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDocument:
    """A document as text. `language` is what the document itself declares; `metadata` fits into JSON."""

    title: str
    body: str
    source_type: str
    blocks: tuple[Block, ...]
    language: str | None = None
    metadata: dict[str, Scalar] = field(default_factory=dict)


def parse(
    data: bytes, *, name: str, source_type: str | None = None, max_bytes: int, encoding: str | None = None
) -> ParsedDocument:
    """Read a file whose format follows from the suffix of `name`; messages name it by that name alone.

    `encoding` is of text that is neither UTF-8 nor marked; an HTML page may name its own. Raises
    UnsupportedFormat, DocumentTooLarge, EmptyDocument, UnreadableDocument (encrypted, broken, not text), or
    InvalidInput for a name, a source type or an encoding that can be none.
    """
    name = _checked_name(name)
    file_format = format_of(name)
    _refuse_size(len(data), name, max_bytes)
    if not data.strip():
        raise EmptyDocument(f"{name} has no text")
    source_type = _checked_source_type(source_type) or source_type_of(name)
    if file_format == "pdf":
        return _pdf(data, name, source_type, max_bytes)
    if file_format == "docx":
        from rag.read_docx import read_docx

        return read_docx(data, name, source_type, max_bytes)
    if file_format == "xlsx":
        from rag.read_table import read_xlsx

        return read_xlsx(data, name, source_type, max_bytes)
    if file_format == "epub":
        from rag.read_epub import read_epub

        return read_epub(data, name, source_type, max_bytes)
    for magic, what in _MAGIC.items():
        if data.startswith(magic):
            raise UnreadableDocument(f"{name} is {what} by its content, and no {_path(name).suffix} file")
    if file_format == "html" and encoding is None:
        encoding = _declared_encoding(data)
    return _text(_decode(data, name, encoding), name, source_type, file_format, max_bytes=max_bytes)


def is_packed(content: bytes | str) -> bool:
    """Whether this is a file of a format that is unpacked as it is read, so that its size says nothing."""
    return isinstance(content, bytes) and content.startswith(tuple(_MAGIC))


def format_of(name: str) -> Format:
    """The format that the suffix of a name stands for. Raises UnsupportedFormat."""
    suffix = _path(name).suffix
    file_format = SUFFIXES.get(suffix.lower())
    if file_format is None:
        instead = _INSTEAD.get(suffix.lower())
        hint = f"; {instead}" if instead else f"; accepted are {', '.join(SUFFIXES)}"
        raise UnsupportedFormat(f"{name}: {suffix or 'no suffix'} is not accepted{hint}")
    return file_format


def parse_text(text: str, *, name: str, source_type: str | None = None, max_bytes: int) -> ParsedDocument:
    """Read text that is a string already, such as the `content` of a request.

    A name without a suffix of ours is Markdown, unless the source type says `text`, `pdf`, `yaml` or
    `project_spec`; what comes as text under the name of a PDF or an Office file is plain text. `max_bytes`
    counts the text as UTF-8. Errors are those of `parse`, with the field.
    """
    name = _checked_name(name)
    source_type = _checked_source_type(source_type)
    text_format = format_of_text(name, source_type)
    _refuse_unstorable(text, name, field="content")
    _refuse_size(len(text.encode()), name, max_bytes, field="content")
    kind = source_type or source_type_of(name)
    return _text(text, name, kind, text_format, field="content", max_bytes=max_bytes)


def reread(body: str, *, text_format: Format, title: str, source_type: str, language: str | None) -> ParsedDocument:
    """The structure of a body that was parsed before, of Markdown, text or YAML; the body stays as it is.

    Raises UnsupportedFormat for formats whose pages, headings and tables are not in the body.
    """
    if text_format == "markdown":
        return ParsedDocument(
            title=title, body=body, source_type=source_type, blocks=tuple(_markdown_body(body)[0]), language=language
        )
    if text_format not in ("text", "yaml"):
        raise UnsupportedFormat(f"what {text_format} says of its structure is not in the text that is stored")
    kind: Kind = "code" if text_format == "yaml" else "text"
    return ParsedDocument(
        title=title,
        body=body,
        source_type=source_type,
        blocks=tuple(_paragraphs(body, 0, len(body), kind=kind)),
        language=language,
    )


def source_type_of(name: str) -> str:
    """Return the source type of spec 002 that a file's name and directories tell, else its format.

    The file's own name counts before its directories, the nearest directory before the outer ones, and
    all of them before a number in front (`0007-use-postgres.md`), which alone is a weak sign.
    """
    path = _path(name)
    stem = path.stem.lower()
    if path.name.lower() in {".project-spec.yaml", ".project-spec.yml"}:
        return "project_spec"
    if stem.startswith("readme"):
        return "readme"
    words = [word for word in re.split(r"[^a-z0-9]+", stem) if word]
    if words[:1] == ["adr"]:
        return "adr"
    if words[:1] == ["decision"]:
        return "decision"
    if "conversation" in words and "summary" in words:
        return "conversation_summary"
    for word in words:
        if word in _TYPE_OF_WORD:
            return _TYPE_OF_WORD[word]
    for directory in reversed(path.parent.parts):
        folder = re.sub(r"[^a-z0-9]+", "", directory.lower())
        if folder in _TYPE_OF_DIRECTORY:
            return _TYPE_OF_DIRECTORY[folder]
    if re.match(r"0\d{3}-\D", stem):
        return "adr"
    return SUFFIXES.get(path.suffix.lower(), "markdown")


def format_of_text(name: str, source_type: str | None) -> Format:
    """The format in which text under a name is read: by its suffix, else by its type, else Markdown."""
    text_format = SUFFIXES.get(_path(name).suffix.lower()) or _FORMAT_OF_TYPE.get(source_type or "", "markdown")
    return text_format if text_format in TEXT_FORMATS else "text"


_FORMAT_OF_TYPE: dict[str, Format] = {
    "text": "text",
    "pdf": "text",
    "yaml": "yaml",
    "project_spec": "yaml",
    "html": "html",
    "csv": "csv",
}
_TYPE_OF_WORD = {"incident": "incident", "postmortem": "incident", "runbook": "runbook"}
_TYPE_OF_DIRECTORY = {
    "adr": "adr",
    "adrs": "adr",
    "decision": "decision",
    "decisions": "decision",
    "incident": "incident",
    "incidents": "incident",
    "postmortem": "incident",
    "postmortems": "incident",
    "runbook": "runbook",
    "runbooks": "runbook",
    "conversationsummaries": "conversation_summary",
}


# --- text ----------------------------------------------------------------------------------------


def _text(
    text: str, name: str, source_type: str, text_format: Format, *, max_bytes: int, field: str | None = None
) -> ParsedDocument:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise EmptyDocument(f"{name} has no text", field=field)
    if text_format == "markdown":
        return _markdown(text, name, source_type, field)
    if text_format == "html":
        from rag.read_html import read_html

        return read_html(text, name, source_type, max_bytes, field=field)
    if text_format == "csv":
        from rag.read_table import read_csv

        return read_csv(text, name, source_type, max_bytes, field=field)
    kind: Kind = "code" if text_format == "yaml" else "text"
    title = _yaml_title(text) if text_format == "yaml" else None
    return ParsedDocument(
        title=title or _title_of(name),
        body=text,
        source_type=source_type,
        blocks=tuple(_paragraphs(text, 0, len(text), kind=kind)),
    )


def _decode(data: bytes, name: str, encoding: str | None = None) -> str:
    """The text; a mark at its beginning counts before `encoding`, and nothing is ever guessed.

    A wrong guess would be stored, and found by nobody.
    """
    offset = 0
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        encoding = "utf-32"
    elif data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif data.startswith(codecs.BOM_UTF8):
        encoding, offset = "utf-8", len(codecs.BOM_UTF8)
    encoding = check_encoding(encoding) if encoding else "utf-8"
    try:
        text = data[offset:].decode(encoding)
    except UnicodeDecodeError as error:
        # Of every second byte a zero: the likes of Notepad wrote it before they marked what they wrote.
        zeros = data[:1024].count(0)
        advice = "; it may be UTF-16 without a mark" if zeros > len(data[:1024]) // 4 else ""
        raise UnreadableDocument(
            f"{name} is not {encoding.upper()} text: byte {offset + error.start} cannot be decoded{advice}"
        ) from None
    _refuse_unstorable(text, name)
    return text


# Those of text; Python also has codecs of another kind, such as zlib and rot13.
_ENCODING = re.compile(
    r"utf-?(8|16|32)([-_]?[bl]e)?|ascii|us-ascii|latin-?1|iso-?8859-?\d{1,2}|l[1-9]|windows-\d{3,4}|cp\d{3,4}|koi8-?[rut]"
    r"|gb(k|2312|18030)|big5(-?hkscs)?|euc-?(jp|kr)|shift[-_]?jis|sjis|ms_?kanji|johab|tis-?620|mac-?roman",
    re.IGNORECASE,
)


def check_encoding(encoding: str) -> str:
    """The name as it came. Raises InvalidInput for one that is no encoding of text."""
    try:
        if not _ENCODING.fullmatch(encoding):
            raise LookupError(encoding)
        codecs.lookup(encoding)
    except LookupError:
        raise InvalidInput("encoding must be one of text, such as cp1252 or shift_jis", field="encoding") from None
    return encoding


_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,40})""", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"""^\s*<\?xml[^>]{0,100}?encoding\s*=\s*["']([A-Za-z0-9_.:-]{2,40})""")


def _declared_encoding(page: bytes) -> str | None:
    """What a page says of itself; the names as browsers take them: what calls itself Latin-1 is cp1252."""
    found = _XML_ENCODING.search(page[:256]) or _CHARSET.search(page[:4096])
    name = found[1].decode("ascii").lower() if found else None
    if name is None or not _ENCODING.fullmatch(name) or name.startswith("utf"):
        return None
    return "cp1252" if name in ("ascii", "us-ascii", "latin1", "latin-1", "iso-8859-1", "iso8859-1", "l1") else name


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _refuse_unstorable(text: str, name: str, *, field: str | None = None) -> None:
    # Postgres takes no NUL, and a lone surrogate has no UTF-8.
    if found := _UNSTORABLE.search(text):
        what = "a NUL character" if found[0] == "\0" else "half a surrogate pair"
        raise UnreadableDocument(f"{name} has {what} at character {found.start()}", field=field)


def _refuse_size(size: int, name: str, max_bytes: int, *, field: str | None = None) -> None:
    if size > max_bytes:
        raise DocumentTooLarge(f"{name} has {size:,} bytes; the limit is {max_bytes:,}", field=field)


def _checked_name(name: str) -> str:
    # File names of the operating system may hold undecodable bytes, as surrogates: no message may.
    if not name.strip() or re.search("[\x00-\x1f\x7f\ud800-\udfff]", name):
        raise InvalidInput(f"the name {name!a} is not a valid document name", field="name")
    return name


def _checked_source_type(source_type: str | None) -> str | None:
    return None if source_type is None else check_name(source_type, field="source_type")


def _path(name: str) -> PurePosixPath:
    return PurePosixPath(name.replace("\\", "/"))


# Read as a line and not as YAML, so that a file with errors further down has its title all the same.
_YAML_TITLE = re.compile(r"^(title|name):[ \t]+([\"']?)([^\n#]+?)\2[ \t]*(?:#.*)?$", re.MULTILINE)


def _yaml_title(text: str) -> str | None:
    """Return the top-level `title` of a YAML file, else its `name`, when that is a plain word or more."""
    found = {key: value for key, _, value in _YAML_TITLE.findall(text) if re.match(r"\w", value)}
    return _one_line(found.get("title") or found.get("name") or "") or None


def _title_of(name: str) -> str:
    stem = _path(name).stem.strip(". ")
    return _one_line(stem) or _one_line(name)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE_CHARACTERS else line[: MAX_TITLE_CHARACTERS - 1].rstrip() + "…"


class Draft:
    """Puts a body together block by block, for formats whose text is not one string already.

    Raises DocumentTooLarge as soon as the body has more than `max_bytes` of UTF-8.
    """

    def __init__(self, name: str, max_bytes: int, *, field: str | None = None) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._field = field
        self._parts: list[str] = []
        self._length = 0
        self._size = 0
        self._headings: list[tuple[int, str]] = []
        self.blocks: list[Block] = []
        self.first_heading: str | None = None

    def add(self, text: str, kind: Kind = "text", *, level: int = 0, tight: bool = False) -> None:
        """Add a block below the present headings; `tight` without a blank line before it.

        A heading has a level from 1 to 6. Line ends become LF, and white space around the text goes.
        """
        text = _UNSTORABLE.sub("\ufffd", text).replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()
        if not text.strip():
            return
        if kind == "heading":
            heading = _one_line(text)
            text = " ".join(text.split())
            while self._headings and self._headings[-1][0] >= level:
                self._headings.pop()
            self._headings.append((level, heading))
            if self.first_heading is None and level == 1:
                self.first_heading = heading
        separator = ("\n" if tight else "\n\n") if self._parts else ""
        self._size += len(text.encode()) + len(separator)
        _refuse_size(self._size, f"the text of {self._name}", self._max_bytes, field=self._field)
        self._parts += (separator, text)
        start = self._length + len(separator)
        self._length = start + len(text)
        path = tuple(heading for _, heading in self._headings)
        last = self.blocks[-1] if self.blocks else None
        joins = (
            last is not None
            and len(self.blocks) >= MAX_PARAGRAPHS
            and (last.kind, last.path) == (kind, path)
            and last.end - last.start < JOINED_PARAGRAPH_CHARACTERS
        )
        if joins and last is not None:
            self.blocks[-1] = Block(start=last.start, end=self._length, kind=kind, path=path, level=level)
        else:
            self.blocks.append(Block(start=start, end=self._length, kind=kind, path=path, level=level))

    def document(
        self,
        source_type: str,
        *,
        title: str | None = None,
        language: str | None = None,
        metadata: dict[str, Scalar] | None = None,
    ) -> ParsedDocument:
        """What was added, under `title`, else the first heading of level 1, else the name. Raises EmptyDocument."""
        if not self.blocks:
            raise EmptyDocument(f"{self._name} has no text", field=self._field)
        title = _one_line(_UNSTORABLE.sub("", title or ""))
        return ParsedDocument(
            title=title or self.first_heading or _title_of(self._name),
            body="".join(self._parts),
            source_type=source_type,
            blocks=tuple(self.blocks),
            language=language,
            metadata=metadata or {},
        )


def _paragraphs(body: str, start: int, end: int, *, kind: Kind, page_number: int | None = None) -> Iterator[Block]:
    """Cut `body[start:end]` at blank lines."""
    spans = _spans_between_blank_lines(body, start, end)
    head = list(itertools.islice(spans, MAX_PARAGRAPHS))
    for first, last in itertools.chain(head, _joined(spans)):
        yield Block(start=first, end=last, kind=kind, page_number=page_number)


def _spans_between_blank_lines(body: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    first: int | None = None
    last = at = start
    while at < end:
        line_end = body.find("\n", at, end)
        line_end = end if line_end < 0 else line_end
        if line := body[at:line_end].rstrip():
            first = at if first is None else first
            last = at + len(line)
        elif first is not None:
            yield first, last
            first = None
        at = line_end + 1
    if first is not None:
        yield first, last


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    open_start: int | None = None
    open_end = 0
    for start, end in spans:
        if open_start is not None and end - open_start > JOINED_PARAGRAPH_CHARACTERS:
            yield open_start, open_end
            open_start = None
        open_start = start if open_start is None else open_start
        open_end = end
    if open_start is not None:
        yield open_start, open_end


# --- Markdown ------------------------------------------------------------------------------------

_BLOCK_RULES = ["normalize", "block"]  # inline markup is of interest in headings only
_PROSE = MarkdownIt("commonmark").enable("table")
_PROSE.core.ruler.enableOnly(_BLOCK_RULES)
_PIPES = MarkdownIt("commonmark")
_PIPES.core.ruler.enableOnly(_BLOCK_RULES)
_HEADINGS = MarkdownIt("commonmark")

_KIND_OF_TOKEN: dict[str, Kind] = {
    "paragraph_open": "text",
    "heading_open": "heading",
    "fence": "code",
    "code_block": "code",
    "html_block": "text",
    "hr": "text",
    "table_open": "table",
}
# `{ #anchor .class }` after a heading: Pandoc, Python-Markdown and MkDocs write it, no reader sees it.
_ATTRIBUTES = re.compile(r"\s*\{[:\s]*[#.][^{}]*\}\s*$")


def _markdown(text: str, name: str, source_type: str, field: str | None) -> ParsedDocument:
    declared, body = _front_matter(text, name, field)
    if not body.strip():
        raise EmptyDocument(f"{name} has no text", field=field)
    blocks, first_heading = _markdown_body(body)
    title = _one_line(str(declared.pop("title", "")))
    language = re.match(r"[a-z]{2}(?![a-z])", str(declared.pop("language", "")).strip().lower())
    declared.pop("tags", None)  # who may read a document is not for the document to say
    return ParsedDocument(
        title=title or first_heading or _title_of(name),
        body=body,
        source_type=source_type,
        blocks=tuple(blocks),
        language=language[0] if language else None,
        metadata=declared,
    )


def _markdown_body(body: str) -> tuple[list[Block], str | None]:
    """Return the blocks of a body without front matter, and its first heading of level 1."""
    if _markdown_tokens(body) > MAX_MARKDOWN_TOKENS:
        return list(_paragraphs(body, 0, len(body), kind="text")), None
    return _markdown_blocks(body)


def _markdown_tokens(body: str) -> int:
    """Estimate from above: a line opens, fills and closes a block, a marker opens and closes two."""
    return 3 * body.count("\n") + 4 * sum(map(body.count, (">", "- ", "-\t", "* ", "+ ", ". ", ") ")))


def _markdown_blocks(body: str) -> tuple[list[Block], str | None]:
    """Return the blocks and the first heading of level 1."""
    lines = body.split("\n")
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    markdown = _PIPES if body.count("|") > MAX_TABLE_PIPES else _PROSE
    environment: EnvType = {}
    tokens = markdown.parse(body, environment)

    blocks: list[Block] = []
    open_headings: list[tuple[int, str]] = []
    first_heading: str | None = None

    def add(first: int, last: int, kind: Kind, level: int = 0) -> None:
        while first < last and not lines[first].strip():
            first += 1
        while last > first and not lines[last - 1].strip():
            last -= 1
        if first < last:
            path = tuple(heading for _, heading in open_headings)
            end = starts[last - 1] + len(lines[last - 1].rstrip())
            blocks.append(Block(start=starts[first], end=end, kind=kind, path=path, level=level))

    covered = 0
    for token, following in itertools.pairwise([*tokens, Token("end", "", 0)]):
        kind = _KIND_OF_TOKEN.get(token.type)
        if kind is None or token.map is None or token.map[0] < covered:
            continue
        first, last = token.map
        add(covered, first, "text")  # link definitions and empty list items have no token of their own
        covered = last
        if kind == "heading" and token.level == 0:
            level = int(token.tag[1])
            heading = _heading_text(following.content, environment)
            while open_headings and open_headings[-1][0] >= level:
                open_headings.pop()
            if heading:
                open_headings.append((level, heading))
                first_heading = heading if first_heading is None and level == 1 else first_heading
                add(first, last, "heading", level)
                continue
        if kind == "heading":
            kind = "text"  # inside a list or a quotation it heads nothing; an empty one neither
        add(first, last, "list" if kind == "text" and token.level > 0 else kind)
    add(covered, len(lines), "text")
    return blocks, first_heading


def _heading_text(markup: str, environment: EnvType) -> str:
    """Return a heading as a reader sees it."""
    markup = _ATTRIBUTES.sub("", markup[: 4 * MAX_TITLE_CHARACTERS])
    inline = _HEADINGS.parseInline(markup, environment)[0].children or []
    visible = {"text": None, "code_inline": None, "image": None, "softbreak": " ", "hardbreak": " "}
    return _one_line("".join(visible[token.type] or token.content for token in inline if token.type in visible))


def _front_matter(text: str, name: str, field: str | None) -> tuple[dict[str, Scalar], str]:
    """Split off a YAML mapping between `---` lines at the very top; all other text is body.

    A top that is no mapping stays in the body: `---` is also a rule.
    """
    opening = re.match(r"---[ \t]*\n", text)
    if not opening:
        return {}, text
    closing = re.compile(r"^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.MULTILINE).search(
        text, opening.end(), opening.end() + MAX_FRONT_MATTER_CHARACTERS
    )
    if not closing:
        return {}, text
    try:
        # Composed only: constructing runs converters that raise on the likes of `!!bool maybe`.
        node = yaml.compose(text[opening.end() : closing.start()], Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}, text
    if not isinstance(node, yaml.MappingNode):
        return {}, text
    declared = {
        key.value: _scalar(value) if key.value not in {"title", "language"} else value.value
        for key, value in node.value
        if isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)
        if not value.tag.endswith(":null")
    }
    for word in itertools.chain(declared, declared.values()):
        _refuse_unstorable(str(word), name, field=field)  # YAML has escapes for what the text itself may not hold
    return declared, text[closing.end() :]


def _scalar(node: yaml.ScalarNode) -> Scalar:
    written = str(node.value)
    if node.tag.endswith(":bool"):
        return written.lower() in {"true", "yes", "on", "y"}
    if node.tag.endswith(":int") and re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", written):
        return int(written)
    if node.tag.endswith(":float") and re.fullmatch(r"-?[0-9]{1,17}\.[0-9]{1,17}", written):
        return float(written)
    return written


# --- PDF -----------------------------------------------------------------------------------------

# Titles that word processors write by themselves.
_NO_TITLE = re.compile(r"untitled|microsoft word\b|.*\.(docx?|odt|tex|dvi|indd|pdf|rtf|qxd)$", re.IGNORECASE)


def _pdf(data: bytes, name: str, source_type: str, max_bytes: int) -> ParsedDocument:
    limits = apply_configuration(
        disable_legacy_handling=True,
        stream_parsing_work_maximum_count=MAX_PDF_PAGE_WORK,
        page_tree_maximum_entries=2 * MAX_PDF_PAGES,
        # Its own 75 MB let a file of 69 KB take 18 s and 1 GB for one string.
        zlib_maximum_output_length=2 * max_bytes,
        lzw_maximum_output_length=2 * max_bytes,
        run_length_maximum_output_length=2 * max_bytes,
        array_based_stream_maximum_output_length=2 * max_bytes,
    )
    try:
        with limits:
            reader = PdfReader(io.BytesIO(data))
            pages = list(_pdf_pages(reader, name, max_bytes))
            title = _pdf_title(reader)
    except FileNotDecryptedError:
        raise UnreadableDocument(f"{name} is encrypted; a password is needed to read it") from None
    except LimitReachedError as error:
        raise DocumentTooLarge(f"{name} takes more work to read than is allowed") from error
    except _PDF_FAILURES as error:
        raise UnreadableDocument(f"{name} is not a readable PDF file") from error

    pages = _mend(pages)
    if not any(pages):
        raise EmptyDocument(f"{name} has no text layer: its {len(pages)} pages are images or empty")
    blocks: list[Block] = []
    start = 0
    body = "\n\n".join(pages)
    for number, page in enumerate(pages, start=1):
        blocks += _paragraphs(body, start, start + len(page), kind="text", page_number=number)
        start += len(page) + 2
    return ParsedDocument(
        title=title or _title_of(name),
        body=body,
        source_type=source_type,
        blocks=tuple(blocks),
        metadata={"pages": len(pages)},
    )


def _pdf_pages(reader: PdfReader, name: str, max_bytes: int) -> Iterator[str]:
    deadline = time.monotonic() + MAX_PDF_SECONDS

    def check_time(*_: object) -> None:
        if time.monotonic() > deadline:
            raise LimitReachedError(f"more than {MAX_PDF_SECONDS:.0f} s")

    if len(reader.pages) > MAX_PDF_PAGES:
        raise DocumentTooLarge(f"{name} has {len(reader.pages):,} pages; the limit is {MAX_PDF_PAGES:,}")
    size = 0
    for page in reader.pages:
        check_time()
        text = page.extract_text(visitor_operand_before=check_time).replace("\r\n", "\n").replace("\r", "\n")
        # Broken character maps yield NUL and halves of pairs: whole pairs are joined, the rest is marked.
        text = text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()
        size += len(text.encode())
        _refuse_size(size, f"the text of {name}", max_bytes)
        yield text


def _mend(pages: list[str]) -> list[str]:
    """Undo typesetting that hides words from search: ligatures, and hyphens at line ends.

    A hyphen stays when the document writes the same word with it inside a line, and before words that
    follow a suspended hyphen ("Vor- und Nachteile").
    """
    pages = [_LIGATURE.sub(lambda found: _LIGATURES[found[0]], page) for page in pages]
    hyphened = {word.lower() for page in pages for word in _HYPHENED.findall(page)}
    return [_join_broken_words(page.split("\n"), hyphened) for page in pages]


def _join_broken_words(lines: list[str], hyphened: set[str]) -> str:
    mended = lines[:1]
    for line in lines[1:]:
        above = mended[-1]
        word, _, rest = line.partition(" ")
        left = above[:-1].rpartition(" ")[2].lstrip(_OPENING)
        right = word.rstrip(_CLOSING)
        # Capitals start names and new words, so that only lower case continues a word.
        broken = above.endswith(_HYPHENS) and left.isalpha() and right.isalpha() and right.islower()
        if broken and right not in _AFTER_SUSPENDED_HYPHEN and f"{left}-{right}".lower() not in hyphened:
            mended[-1] = above[:-1] + word
            if rest:
                mended.append(rest)
        else:
            mended.append(line)
    return "\n".join(mended).strip()


_LIGATURES = {"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"}
_LIGATURE = re.compile(f"[{''.join(_LIGATURES)}]")
_HYPHENS = ("-", "\u00ad", "\u2010")
_HYPHENED = re.compile(r"\b\w++-\w+")
_OPENING, _CLOSING = "([{\"'„“‚‘«", ")]}\"'“”‘’»,.;:!?"
_AFTER_SUSPENDED_HYPHEN = frozenset({"and", "or", "to", "und", "oder", "bis", "bzw"})


def _pdf_title(reader: PdfReader) -> str | None:
    """Return the title of the file's metadata, if a person may have written it."""
    title = reader.metadata.title if reader.metadata else None
    line = _one_line(_UNSTORABLE.sub("", title or ""))
    return line if any(c.isalpha() for c in line) and not _NO_TITLE.match(line) else None
