"""A text that is too large for one document, as parts that are read one after the other.

Each part is a document of its own, so that neither the memory nor a transaction grows with the file. The borders
are at blank lines or rows, as far as there are any; a part of a table begins with the names of its columns.
"""

from __future__ import annotations

import asyncio
import codecs
import csv
import io
import itertools
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import BinaryIO, TypeVar

from rag.errors import DocumentTooLarge, UnreadableDocument
from rag.parse import check_encoding, format_of
from rag.read_table import MAX_CELL_CHARACTERS, delimiter_of, names_columns

# What is made of a part takes about forty times as much memory: blocks, tokens, chunks, their vectors and statements.
PART_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
_DIVISIBLE = frozenset({"markdown", "text", "csv"})

_Part = TypeVar("_Part")


def contents(
    file: BinaryIO, *, name: str, size: int, max_bytes: int, max_file_bytes: int, encoding: str | None = None
) -> Generator[tuple[int | None, bytes | str], None, None]:
    """The content of a file up to `max_bytes` as it is, under None; of a larger text its parts, numbered from 1.

    Raises UnsupportedFormat, DocumentTooLarge, UnreadableDocument, OSError.
    """
    file_format = format_of(name)
    if size <= max_bytes:
        # One byte more than allowed, which the parser then refuses: the file may have grown.
        yield None, file.read(max_bytes + 1)
        return
    if file_format not in _DIVISIBLE:
        raise DocumentTooLarge(f"{name} has {size:,} bytes; the limit is {max_bytes:,}")
    if size > max_file_bytes:
        raise DocumentTooLarge(f"{name} has {size:,} bytes; the limit of a text is {max_file_bytes:,}")
    pieces = _decoded(file, name, encoding)
    parts = _tables(pieces, name) if file_format == "csv" else _texts(pieces)
    number = 0
    for part in parts:
        if part.strip():
            number += 1
            yield number, part


async def in_threads(parts: Generator[_Part, None, None]) -> AsyncGenerator[_Part, None]:
    """Each part, made in a thread when it is asked for; to be left with `aclosing`, which closes `parts` as well.

    Whoever is cancelled meanwhile waits until the part is made: a generator that runs cannot be closed, and neither
    can the file that it reads.
    """
    end = object()
    try:
        while True:
            made = asyncio.ensure_future(asyncio.to_thread(next, parts, end))
            try:
                part = await asyncio.shield(made)
            except asyncio.CancelledError:
                while not made.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([made])
                raise
            if part is end:
                return
            yield part  # type: ignore[misc]
    finally:
        parts.close()


def title_of(path: str, part: int | None) -> str | None:
    """What a citation calls a part; None for a whole file, which has a title of its own."""
    return None if part is None else f"{PurePosixPath(path).stem}, part {part}"


def id_of(source_id: str, part: int | None) -> str:
    """The source id of a part. No path has two slashes in a row."""
    return source_id if part is None else f"{source_id}//{part}"


def shown(path: str, part: int | None) -> str:
    """What a person is told of a part while it is worked on."""
    return path if part is None else f"{path} (part {part})"


def bound(part: int | None, max_bytes: int) -> int:
    """How many bytes a part may have where a whole file may have `max_bytes`: larger than in a file of UTF-16."""
    return max_bytes if part is None else max(max_bytes, 4 * PART_BYTES)


def _decoded(file: BinaryIO, name: str, encoding: str | None) -> Iterator[str]:
    head = file.read(READ_BYTES)
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        encoding = "utf-32"
    elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif head.startswith(codecs.BOM_UTF8) or encoding is None:
        encoding = "utf-8-sig"
    decoder = codecs.getincrementaldecoder(check_encoding(encoding.removesuffix("-sig")) and encoding)()
    done = 0
    while True:
        try:
            yield decoder.decode(head, final=not head)
        except UnicodeDecodeError as error:
            shown = encoding.removesuffix("-sig").upper()
            place = done + error.start
            raise UnreadableDocument(f"{name} is not {shown} text: byte {place} cannot be decoded") from None
        if not head:
            return
        done += len(head)
        head = file.read(READ_BYTES)


def _texts(pieces: Iterator[str]) -> Iterator[str]:
    rest, size = "", 0
    waiting: list[str] = []
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size < PART_BYTES:
            continue
        text = rest + "".join(waiting)
        while len(text) >= PART_BYTES:
            border = _border(text)
            yield text[:border]
            text = text[border:]
        rest, waiting, size = text, [], len(text)
    yield rest + "".join(waiting)


def _border(text: str) -> int:
    """Where a part ends: at the last blank line of its second half, else at a line, a sentence, a word."""
    for mark in ("\n\n", "\n", ". ", " "):
        found = text.rfind(mark, PART_BYTES // 2, PART_BYTES)
        if found >= 0:
            return found + len(mark)
    return PART_BYTES


def _tables(pieces: Iterator[str], name: str) -> Iterator[str]:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    first = next(pieces)
    delimiter = delimiter_of(first)
    header: list[str] | None = None
    part = io.StringIO()
    writer = csv.writer(part, delimiter=delimiter)
    try:
        for row in csv.reader(_lines(itertools.chain([first], pieces), name), delimiter=delimiter):
            if header is None and any(row):
                header = row if names_columns(row) else []
                if sum(map(len, header)) > PART_BYTES // 16:
                    raise DocumentTooLarge(f"{name} has names of columns that would fill its parts")
            # Half of a text's: every value will have its column's name.
            elif part.tell() >= PART_BYTES // 2:
                yield part.getvalue()
                part = io.StringIO()
                writer = csv.writer(part, delimiter=delimiter)
                if header:
                    writer.writerow(header)
            writer.writerow(row)
    except csv.Error as error:
        raise UnreadableDocument(f"{name} is not a readable table: {error}") from error
    yield part.getvalue()


def _lines(pieces: Iterator[str], name: str) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).splitlines(keepends=True) or [""]
        yield from lines
        if len(rest) > PART_BYTES:
            raise UnreadableDocument(f"{name} is not a readable table: it has a line of {PART_BYTES:,} letters")
    yield rest
