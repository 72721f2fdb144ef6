"""Tables to text: CSV files and Excel sheets, a record for each row in which every value has its column's name.

Whatever a chunk holds of a table, it says what its values are; a row of bare numbers would be found by nobody,
and read wrongly by a model.
"""

from __future__ import annotations

import csv
import io
import re
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any

from rag.errors import DocumentTooLarge, UnreadableDocument, UnsupportedFormat
from rag.parse import Draft, ParsedDocument
from rag.unpack import FAILURES, unpack

INSTALL_DOCS = "needs the extra docs: pip install palisade-rag[docs]"

DELIMITERS = ",;\t|"
# Names of columns are repeated in every row.
MAX_NAME_CHARACTERS = 64
# A cell of a megabyte is no cell; a quotation mark without a partner makes one of all that follows.
MAX_CELL_CHARACTERS = 256 * 1024
# A row up to here is one line; above, each value has a line, so that a row is cut between values.
MAX_LINE_CHARACTERS = 400
# The text is longer than the table by the names; a name of 64 letters over columns of one digit asks for it.
MAX_GROWTH = 8
# As for a PDF: an Excel sheet can claim 17 billion cells in a few bytes.
MAX_SECONDS = 60.0
MAX_COLUMNS = 16_384

_NUMBER = re.compile(r"[-+(]?[\d\s.,'%€$£)-]*\d[\d\s.,'%€$£)-]*")


def read_csv(text: str, name: str, source_type: str, max_bytes: int, *, field: str | None = None) -> ParsedDocument:
    """A table whose delimiter is a comma, semicolon, tab or pipe, whichever cuts its first lines most evenly.

    Raises UnreadableDocument, DocumentTooLarge, EmptyDocument.
    """
    draft = Draft(name, MAX_GROWTH * max_bytes, field=field)
    add_rows(draft, rows_of(text, name, field=field))
    return draft.document(source_type)


def rows_of(text: str, name: str, *, field: str | None = None) -> Iterator[list[str]]:
    """The rows of a CSV text."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    try:
        yield from csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=False)
    except csv.Error as error:
        raise UnreadableDocument(f"{name} is not a readable table: {error}", field=field) from error


def delimiter_of(text: str) -> str:
    """The delimiter that most of the first rows have equally often; the comma when none has."""
    best, votes = ",", 0
    # As rows and not as lines: a value in quotation marks may hold line ends and other delimiters.
    sample = text[:65_536].splitlines(keepends=True)[:50]
    for delimiter in DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(sample, delimiter=delimiter) if row]
        except csv.Error:
            continue
        common = max(set(widths), key=widths.count, default=1)
        found = widths.count(common) * (common - 1)
        if common > 1 and found > votes:
            best, votes = delimiter, found
    return best


def add_rows(draft: Draft, rows: Iterable[Sequence[str]]) -> None:
    """Add a block for each row; the first row names the columns, unless it has a number among its values."""
    names: list[str] | None = None
    for row in rows:
        values = [" ".join(value.split()) for value in row[:MAX_COLUMNS]]
        if not any(values):
            continue
        if names is None:
            is_header = names_columns(values)
            names = [value[:MAX_NAME_CHARACTERS] for value in values] if is_header else []
            if is_header:
                continue
        said = [
            f"{_name(names, place)}: {value}" if names or len(values) > 1 else value
            for place, value in enumerate(values)
            if value
        ]
        line = " | ".join(said)
        draft.add(line if len(line) <= MAX_LINE_CHARACTERS else "\n".join(said), "table", tight=True)
    if names and not draft.blocks:
        draft.add(" | ".join(name for name in names if name), "table")


def names_columns(row: Sequence[str]) -> bool:
    """Whether the first row of a table names its columns: several words, and no number."""
    return len([value for value in row if value.strip()]) > 1 and not any(map(_NUMBER.fullmatch, row))


def _name(names: Sequence[str], place: int) -> str:
    return (names[place] if place < len(names) else "") or f"column {place + 1}"


def read_xlsx(data: bytes, name: str, source_type: str, max_bytes: int) -> ParsedDocument:
    """Every visible sheet of a workbook under its name; of formulas the values that were last computed.

    Raises UnsupportedFormat where openpyxl is not installed, UnreadableDocument, DocumentTooLarge, EmptyDocument.
    """
    try:
        import openpyxl
        from lxml.etree import LxmlError
        from openpyxl.utils.exceptions import InvalidFileException
    except ImportError as error:
        raise UnsupportedFormat(f"{name}: .xlsx {INSTALL_DOCS}") from error
    unpack(data, name, max_bytes).close()
    draft = Draft(name, MAX_GROWTH * max_bytes)
    deadline = time.monotonic() + MAX_SECONDS
    try:
        workbook = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
        for sheet in workbook.worksheets:
            if sheet.sheet_state == "visible":
                sheet.reset_dimensions()  # what a file says of its own size need not be so
                draft.add(sheet.title, "heading", level=2)
                add_rows(draft, _cells(sheet, name, deadline))
        title = workbook.properties.title
    except (InvalidFileException, LxmlError, SyntaxError, zipfile.LargeZipFile, *FAILURES) as error:
        raise UnreadableDocument(f"{name} is not a readable Excel workbook") from error
    if all(block.is_heading for block in draft.blocks):
        draft.blocks.clear()
    return draft.document(source_type, title=title)


def _cells(sheet: Any, name: str, deadline: float) -> Iterator[list[str]]:
    for row in sheet.iter_rows(values_only=True):
        if time.monotonic() > deadline:
            raise DocumentTooLarge(f"{name} takes more work to read than is allowed")
        yield [_shown(value) for value in row]


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        midnight = (value.hour, value.minute, value.second) == (0, 0, 0)
        return value.date().isoformat() if midnight else value.isoformat(" ", "seconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g}" if isinstance(value, float) else str(value)
