"""Opens the ZIP archive that an Office file or an e-book is, and refuses what would not end well."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib

from rag.errors import DocumentTooLarge, UnreadableDocument

# A book of 5,000 pages with a picture on each.
MAX_MEMBERS = 10_000
# Real files of words pack to a tenth; what is unpacked is read into memory.
MAX_GROWTH = 8

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"

# What broken archives and the XML in them may raise, beside the errors of the library that reads them.
FAILURES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)

_DECLARATION = re.compile(rb"<!\s*(DOCTYPE|ENTITY)", re.IGNORECASE)


def unpack(data: bytes, name: str, max_bytes: int, *, allow_doctype: bool = False) -> zipfile.ZipFile:
    """An archive whose members together are at most `MAX_GROWTH * max_bytes`, none of them encrypted.

    No XML in it declares a document type, with which entities would come, unless `allow_doctype`. Reading a
    member never yields more than it declares. Raises UnreadableDocument, DocumentTooLarge.
    """
    if data.startswith(OLE):
        raise UnreadableDocument(f"{name} is encrypted, or of an Office before 2007")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = archive.infolist()
    except FAILURES as error:
        raise UnreadableDocument(f"{name} is not a readable ZIP archive, which its format is") from error
    if len(members) > MAX_MEMBERS:
        raise DocumentTooLarge(f"{name} holds {len(members):,} files; the limit is {MAX_MEMBERS:,}")
    size = sum(member.file_size for member in members)
    if size > MAX_GROWTH * max_bytes:
        raise DocumentTooLarge(f"{name} unpacks to {size:,} bytes; the limit is {MAX_GROWTH * max_bytes:,}")
    if any(member.flag_bits & 1 for member in members):
        raise UnreadableDocument(f"{name} is encrypted; a password is needed to read it")
    if not allow_doctype:
        for member in members:
            if not member.filename.lower().endswith((".xml", ".rels")):
                continue
            text = member_of(archive, member.filename, name)
            # UTF-16 has a zero beside each letter.
            if _DECLARATION.search(text) or _DECLARATION.search(text.replace(b"\0", b"")):
                raise UnreadableDocument(f"{name} declares XML entities, which no such file does")
    return archive


def member_of(archive: zipfile.ZipFile, member: str, name: str) -> bytes:
    """The content of one member. Raises UnreadableDocument."""
    try:
        return archive.read(member)
    except FAILURES as error:
        raise UnreadableDocument(f"{name} is damaged: {member[:100]!a} cannot be unpacked") from error
