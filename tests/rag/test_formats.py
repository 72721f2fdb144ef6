"""Files of each format: what comes out of good ones, and with which reason the others are refused."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import docx
import openpyxl
import pytest

from rag import chunk
from rag.errors import (
    DocumentTooLarge,
    EmptyDocument,
    InvalidInput,
    RAGServiceError,
    UnreadableDocument,
    UnsupportedFormat,
)
from rag.parse import SUFFIXES, ParsedDocument, parse, parse_text

MAX_BYTES = 1_000_000
W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def read(data: bytes, name: str, **options: str) -> ParsedDocument:
    return parse(data, name=name, max_bytes=MAX_BYTES, **options)


def blocks(document: ParsedDocument) -> list[tuple[str, str, str | None]]:
    return [(block.kind, document.body[block.start : block.end], block.section) for block in document.blocks]


def covered(document: ParsedDocument) -> bool:
    """Whether every character but white space is in a block, and blocks do not overlap."""
    rest, end = "", 0
    for block in document.blocks:
        assert block.start >= end
        rest += document.body[end : block.start]
        end = block.end
    return not (rest + document.body[end:]).strip()


# --- the files of other projects -----------------------------------------------------------------

# What a person finds in each, its language apart; None stands for the reason why it is refused.
SHARED: dict[str, str | tuple[type[RAGServiceError], str]] = {
    "README.md": "py-pdf/sample-files",
    "markitdown_test.docx": "AutoGen is an open-source framework",
    "markitdown_test.epub": "Here's a second chapter with a different style.",
    "markitdown_test.pdf": "Large language models (LLMs) are becoming a crucial building block",
    "markitdown_test.pptx": (UnsupportedFormat, ".pptx is not accepted; save it as PDF"),
    "markitdown_test.xlsx": "Alpha: 89 | Beta: 82 | Gamma: 100 | Delta: 12",
    "markitdown_test_blog.html": "the tuned gpt-3.5-turbo model vastly outperformed untuned gpt-4",
    "markitdown_test_mskanji.csv": (UnreadableDocument, "is not UTF-8 text: byte 0 cannot be decoded"),
    "pypdf_google-doc-document.pdf": "Beautiful is better than ugly.",
    "pypdf_minimal-document.pdf": "Lorem ipsum dolor sit amet",
    "pypdf_multicolumn.pdf": "This is a sample document with two columns",
    "pypdf_pdflatex-4-pages.pdf": "Hello, here is some text without a meaning.",
    "pypdf_pdflatex-outline.pdf": "printed text will look like",
}


@pytest.mark.parametrize("name", SHARED)
def test_files_of_other_projects_are_read_or_refused_with_the_right_reason(shared_data: Path, name: str):
    data = (shared_data / "ingest" / name).read_bytes()
    expected = SHARED[name]
    if isinstance(expected, tuple):
        with pytest.raises(expected[0], match=expected[1]) as refused:
            read(data, name)
        assert refused.value.message.startswith(name)
        return
    document = read(data, name)
    assert expected in " ".join(document.body.split())
    assert covered(document)
    for piece in chunk.split(document, limit_tokens=256, count=lambda text: len(text.split())):
        assert piece.text == document.body[piece.start : piece.end]


def test_there_is_no_file_among_them_that_is_not_judged(shared_data: Path):
    assert {path.name for path in (shared_data / "ingest").iterdir()} == set(SHARED)


def test_an_encoding_that_somebody_names_is_used(shared_data: Path):
    data = (shared_data / "ingest" / "markitdown_test_mskanji.csv").read_bytes()
    assert read(data, "list.csv", encoding="cp932").body.splitlines()[0] == "名前: 佐藤太郎 | 年齢: 30 | 住所: 東京"


# --- encodings -----------------------------------------------------------------------------------

TEXT = "Größe und Maß: 5 €\n"


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        TEXT.encode("utf-16"),
        b"\xfe\xff" + TEXT.encode("utf-16-be"),
        TEXT.encode("utf-32"),
    ],
    ids=["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-32"],
)
def test_text_that_says_how_it_is_encoded_is_read(data: bytes):
    assert read(data, "note.txt").body == TEXT


@pytest.mark.parametrize("suffix", [".txt", ".md", ".yaml", ".csv", ".html"])
def test_text_of_an_unnamed_old_encoding_is_refused_and_never_guessed(suffix: str):
    with pytest.raises(UnreadableDocument, match=r"is not UTF-8 text: byte 2 cannot be decoded"):
        read("Größe".encode("latin-1"), f"note{suffix}")


def test_utf_16_without_a_mark_is_refused_and_told():
    with pytest.raises(UnreadableDocument, match=r"NUL|may be UTF-16 without a mark"):
        read(TEXT.encode("utf-16-le"), "note.txt")


def test_a_named_encoding_does_not_count_against_a_mark():
    assert read(TEXT.encode("utf-8-sig"), "note.txt", encoding="cp1252").body == TEXT


@pytest.mark.parametrize("encoding", ["zlib", "rot13", "hex", "utf-99", "idna", "unicode_escape", "undefined"])
def test_what_is_no_encoding_of_text_is_refused(encoding: str):
    with pytest.raises(InvalidInput) as refused:
        read(b"text", "note.txt", encoding=encoding)
    assert refused.value.field == "encoding"


# --- names that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "name", "says"),
    [
        (b"%PDF-1.7\n", "page.md", "is a PDF file by its content, and no .md file"),
        (b"PK\x03\x04rest", "page.txt", "is a ZIP archive"),
        (b"\x89PNG\r\n\x1a\n", "page.html", "is a picture"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "list.csv", "is an old or encrypted Office file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "paper.docx", "is encrypted, or of an Office before 2007"),
        (b"plain words", "paper.docx", "is not a readable ZIP archive"),
        (b"plain words", "list.xlsx", "is not a readable ZIP archive"),
        (b"plain words", "book.epub", "is not a readable ZIP archive"),
        (b"plain words", "paper.pdf", "is not a readable PDF file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(data: bytes, name: str, says: str):
    with pytest.raises(UnreadableDocument, match=says):
        read(data, name)


@pytest.mark.parametrize("name", ["a.pptx", "a.doc", "a.xls", "a.odt", "a.rtf", "a.zip", "a.png", "a.exe", "a"])
def test_formats_that_are_not_accepted_are_refused_by_name(name: str):
    with pytest.raises(UnsupportedFormat, match="is not accepted"):
        read(b"anything", name)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("data", [b"", b" \n\t "], ids=["empty", "blank"])
def test_empty_files_are_refused(suffix: str, data: bytes):
    with pytest.raises(EmptyDocument):
        read(data, f"a{suffix}")


@pytest.mark.parametrize(
    ("name", "library"), [("a.html", "lxml"), ("a.epub", "lxml"), ("a.docx", "docx"), ("a.xlsx", "openpyxl")]
)
def test_without_the_extra_the_format_is_refused_with_the_command_that_brings_it(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
):
    files = {"a.epub": "markitdown_test.epub", "a.docx": "markitdown_test.docx", "a.xlsx": "markitdown_test.xlsx"}
    data = (shared_data / "ingest" / files[name]).read_bytes() if name in files else b"<p>text</p>"
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedFormat, match=r"needs the extra docs: pip install palisade-rag\[docs\]"):
        read(data, name)


# --- HTML ----------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="de-CH"><head><title>Fenster – Firma</title><style>p {color: red}</style></head>
<body><nav><a href="/">Start</a></nav><header>Kopf</header>
<main><h1>Das  <em>Fenster</em></h1><p>Es ist am<br>Dienstag,&nbsp;9&nbsp;Uhr.</p>
<h2>Schritte</h2><ol><li>Eins<ul><li>innen</li></ul></li><li>Zwei</li></ol>
<pre><code>x  = 1
  y = 2</code></pre>
<table><caption>Tage</caption><tr><th>Tag</th><th>Uhr</th></tr><tr><td>Di</td><td>9|10</td></tr></table>
<p hidden>Geheim eins</p><p style="display: none">Geheim zwei</p><p aria-hidden="true">Geheim drei</p>
<script>alert("nein")</script><!-- Geheim vier --><p>Bild: <img src="x" alt="ein Kran"></p></main>
<footer>Fuß</footer></body></html>"""


def test_a_page_is_what_a_reader_sees_of_its_main_part():
    document = parse_text(PAGE, name="page.html", max_bytes=MAX_BYTES)
    assert (document.title, document.language) == ("Das Fenster", "de")
    top, steps = "Das Fenster", "Das Fenster > Schritte"
    assert blocks(document) == [
        ("heading", "Das Fenster", top),
        ("text", "Es ist am\nDienstag, 9 Uhr.", top),
        ("heading", "Schritte", steps),
        ("list", "1. Eins", steps),
        ("list", "  - innen", steps),
        ("list", "2. Zwei", steps),
        ("code", "x  = 1\n  y = 2", steps),
        ("text", "Tage", steps),
        ("table", "| Tag | Uhr |\n| Di | 9¦10 |", steps),
        ("text", "Bild: ein Kran", steps),
    ]
    assert covered(document)


def test_a_page_without_a_main_part_is_read_without_its_frame():
    page = "<nav>Start</nav><div>One <b>bold</b> word.</div>loose<div role=navigation>Menu</div><footer>End</footer>"
    assert parse_text(page, name="a.htm", max_bytes=MAX_BYTES).body == "One bold word.\n\nloose"


def test_a_table_that_lays_out_a_page_is_read_block_by_block():
    page = (
        "<table><tr><td><h1>Left</h1><p>One.</p></td><td><table><tr><td>a</td><td>b</td></tr></table></td></tr></table>"
    )
    assert parse_text(page, name="a.html", max_bytes=MAX_BYTES).body == "Left\n\nOne.\n\n| a | b |"


@pytest.mark.parametrize("declared", ["iso-8859-1", "windows-1252"])
def test_a_page_may_name_its_encoding(declared: str):
    page = f'<html><meta charset="{declared}"><p>Größe: 5 €</p></html>'.encode("cp1252")
    assert read(page, "a.html").body == "Größe: 5 €"


def test_a_page_without_words_is_empty():
    with pytest.raises(EmptyDocument):
        read(b"<html><body><script>1</script><img src=a></body></html>", "a.html")


def test_a_page_that_is_nested_too_deep_is_refused_and_not_cut():
    deep = b"<div>" * 30_000 + b"inside" + b"</div>" * 30_000
    with pytest.raises(UnreadableDocument, match="nested more than"):
        read(deep, "a.html")


@pytest.mark.parametrize(
    "page",
    [
        "<p>word" * 100_000,
        "<a " * 200_000,
        "<b>" * 900 + "x",
        "&lt;" * 200_000,
        "<" * 500_000,
        "<table><tr><td>" * 60_000,
    ],
    ids=["open", "attributes", "inline", "entities", "brackets", "tables"],
)
def test_pages_that_are_made_to_take_long_do_not(page: str):
    began = time.process_time()
    with contextlib.suppress(InvalidInput):
        parse_text(page, name="a.html", max_bytes=MAX_BYTES)
    # A second at most where it was measured; a quadratic walk takes minutes.
    assert time.process_time() - began < 30


def test_a_page_asks_no_network_and_no_file_for_entities():
    page = '<!DOCTYPE html [<!ENTITY x SYSTEM "file:///etc/passwd">]><p>before &x; after</p>'
    assert "root:" not in parse_text(page, name="a.html", max_bytes=MAX_BYTES).body


# --- Word ----------------------------------------------------------------------------------------


def word(build: Callable[[object], None]) -> bytes:
    document = docx.Document()
    build(document)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def repacked(data: bytes, **members: bytes) -> bytes:
    """The archive with other content in some members; a name's dots and slashes are written as underscores."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            key = item.filename.replace("/", "_").replace(".", "_")
            new.writestr(item.filename, members.pop(key, old.read(item.filename)))
    assert not members
    return file.getvalue()


def test_a_word_document_is_read_with_its_headings_lists_and_tables():
    def build(document):
        document.core_properties.title = "The plan"
        document.add_heading("Deploy", 1)
        document.add_paragraph("On Tuesday.")
        document.add_heading("Steps", 2)
        document.add_paragraph("one", style="List Bullet")
        table = document.add_table(rows=2, cols=2)
        for place, text in enumerate(["Day", "Hour", "Tue", "9|10"]):
            table.cell(*divmod(place, 2)).text = text
        document.add_paragraph("After.")

    document = read(word(build), "plan.docx")
    assert document.title == "The plan"
    assert blocks(document) == [
        ("heading", "Deploy", "Deploy"),
        ("text", "On Tuesday.", "Deploy"),
        ("heading", "Steps", "Deploy > Steps"),
        ("text", "one", "Deploy > Steps"),
        ("table", "| Day | Hour |\n| Tue | 9¦10 |", "Deploy > Steps"),
        ("text", "After.", "Deploy > Steps"),
    ]


def body_of(xml: str) -> bytes:
    plain = word(lambda document: document.add_paragraph("x"))
    return repacked(plain, word_document_xml=f"<w:document {W}><w:body>{xml}</w:body></w:document>".encode())


@pytest.mark.parametrize(
    ("xml", "text"),
    [
        (
            "<w:p><w:ins><w:r><w:t>new</w:t></w:r></w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del></w:p>",
            "new",
        ),
        ("<w:sdt><w:sdtContent><w:p><w:r><w:t>controlled</w:t></w:r></w:p></w:sdtContent></w:sdt>", "controlled"),
        ("<w:p><w:hyperlink><w:r><w:t>link</w:t></w:r></w:hyperlink><w:r><w:t> on</w:t></w:r></w:p>", "link on"),
        ("<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r></w:p>", "a\tb\nc"),
        ("<w:p><w:r><w:instrText>TOC</w:instrText><w:t>seen</w:t></w:r></w:p>", "seen"),
        ('<w:p><w:pPr><w:outlineLvl w:val="0"/></w:pPr><w:r><w:t>Head</w:t></w:r></w:p>', "Head"),
    ],
    ids=["changes", "control", "hyperlink", "breaks", "field", "outline"],
)
def test_word_shows_what_a_reader_sees(xml: str, text: str):
    document = read(body_of(xml), "a.docx")
    assert document.body == text
    assert document.blocks[0].is_heading == (text == "Head")


LAUGHS = (
    '<!DOCTYPE x [<!ENTITY a "lol">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]>"
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_word_document_that_declares_entities_is_refused(encoding: str):
    xml = f"{LAUGHS}<w:document {W}><w:body><w:p><w:r><w:t>&i;</w:t></w:r></w:p></w:body></w:document>"
    plain = word(lambda document: document.add_paragraph("x"))
    with pytest.raises(UnreadableDocument, match="declares XML entities"):
        read(repacked(plain, word_document_xml=xml.encode(encoding)), "a.docx")


def test_a_word_document_that_is_nested_too_deep_is_refused():
    deep = "<w:sdt><w:sdtContent>" * 2_000 + "</w:sdtContent></w:sdt>" * 2_000
    with pytest.raises(UnreadableDocument):
        read(body_of(deep), "a.docx")


def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_is_unpacked():
    plain = word(lambda document: document.add_paragraph("x"))
    bomb = repacked(plain, word_document_xml=bytes(9 * MAX_BYTES))
    assert len(bomb) < 100_000
    with pytest.raises(DocumentTooLarge, match="unpacks to"):
        read(bomb, "a.docx")


def test_an_archive_that_lies_about_its_sizes_yields_no_more_than_it_says():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(9 * MAX_BYTES))
    small = (100).to_bytes(4, "little")
    data = file.getvalue().replace((9 * MAX_BYTES).to_bytes(4, "little"), small)
    for name in ("a.docx", "a.xlsx", "a.epub"):
        with pytest.raises(UnreadableDocument):
            read(data, name)


def test_an_archive_of_too_many_files_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(10_001):
            archive.writestr(str(number), b"")
    for name in ("a.docx", "a.xlsx", "a.epub"):
        with pytest.raises(DocumentTooLarge, match="holds 10,001 files"):
            parse(file.getvalue(), name=name, max_bytes=8 * MAX_BYTES)


def test_an_encrypted_archive_is_refused_as_such():
    data = bytearray(word(lambda document: document.add_paragraph("x")))
    for start in range(len(data) - 4):
        if data[start : start + 4] == b"PK\x01\x02":
            data[start + 8] |= 1
    with pytest.raises(UnreadableDocument, match="is encrypted"):
        read(bytes(data), "a.docx")


def test_another_office_file_under_the_name_of_word_is_refused(shared_data: Path):
    for name in ("markitdown_test.xlsx", "markitdown_test.epub", "markitdown_test.pptx"):
        data = (shared_data / "ingest" / name).read_bytes()
        with pytest.raises(UnreadableDocument, match="is not a readable Word document"):
            read(data, "a.docx")


def test_files_that_were_damaged_are_refused_or_read_and_raise_nothing_else(shared_data: Path):
    chance = random.Random(6)
    for name in ("markitdown_test.docx", "markitdown_test.xlsx", "markitdown_test.epub", "markitdown_test_blog.html"):
        whole = (shared_data / "ingest" / name).read_bytes()
        for _ in range(25):
            data = bytearray(whole)
            for _ in range(chance.choice([1, 10, 200])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            with contextlib.suppress(InvalidInput):
                read(bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data))])]), name)


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_every_row_of_a_table_says_what_its_values_are(delimiter: str):
    rows = [["Name", "City", "Fee"], ["Ada", "Ulm", "3"], ["Bo", "", "4"], ["Cy", "Bonn", "5", "odd"]]
    text = "\n".join(delimiter.join(row) for row in rows)
    document = parse_text(text, name="fees.csv", max_bytes=MAX_BYTES)
    assert document.body.splitlines() == [
        "Name: Ada | City: Ulm | Fee: 3",
        "Name: Bo | Fee: 4",
        "Name: Cy | City: Bonn | Fee: 5 | column 4: odd",
    ]
    assert {block.kind for block in document.blocks} == {"table"}


def test_values_in_quotation_marks_may_hold_anything():
    text = 'Name,Note\n"Ada, B.","first\nsecond ""line"""\n'
    assert parse_text(text, name="a.csv", max_bytes=MAX_BYTES).body == 'Name: Ada, B. | Note: first second "line"'


def test_a_table_of_numbers_has_no_names_to_lose():
    assert (
        parse_text("1,2\n3,4\n", name="a.csv", max_bytes=MAX_BYTES).body
        == "column 1: 1 | column 2: 2\ncolumn 1: 3 | column 2: 4"
    )


def test_all_chunks_of_a_table_have_the_names_of_its_columns_whatever_their_size():
    wide = [f"column name {number}" for number in range(30)]
    lines = [",".join(wide)] + [",".join(f"value {row} {place}" for place in range(30)) for row in range(40)]
    document = parse_text("\n".join(lines), name="wide.csv", max_bytes=MAX_BYTES)
    pieces = chunk.split(document, limit_tokens=64, count=lambda text: len(text.split()))
    assert len(pieces) > 40
    for piece in pieces:
        for line in piece.text.splitlines():
            assert line.startswith("column name ")


def test_a_quotation_mark_without_a_partner_is_refused_when_it_swallows_the_file():
    text = 'a,b\n"' + "x,y\n" * 100_000
    with pytest.raises(UnreadableDocument, match="is not a readable table"):
        parse_text(text, name="a.csv", max_bytes=MAX_BYTES)


def test_a_table_whose_names_would_fill_the_memory_is_refused():
    names = ",".join("n" * 64 for _ in range(3_000))
    text = names + "\n" + (",".join("1" for _ in range(3_000)) + "\n") * 120
    with pytest.raises(DocumentTooLarge, match="the text of"):
        parse_text(text, name="a.csv", max_bytes=MAX_BYTES)


def workbook(build: Callable[[openpyxl.Workbook], None]) -> bytes:
    book = openpyxl.Workbook()
    build(book)
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def test_the_sheets_of_a_workbook_are_tables_under_their_names():
    from datetime import datetime

    def build(book):
        book.active.title = "Fees"
        book.active.append(["Who", "When", "Fee", "Paid"])
        book.active.append(["Ada", datetime(2026, 11, 1), 3.5, True])
        hidden = book.create_sheet("Secret")
        hidden.append(["not", "seen"])
        hidden.sheet_state = "hidden"

    document = read(workbook(build), "fees.xlsx")
    assert blocks(document) == [
        ("heading", "Fees", "Fees"),
        ("table", "Who: Ada | When: 2026-11-01 | Fee: 3.5 | Paid: yes", "Fees"),
    ]


def test_a_workbook_without_values_is_empty():
    with pytest.raises(EmptyDocument):
        read(workbook(lambda book: None), "a.xlsx")


def test_a_sheet_that_claims_billions_of_cells_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rag.read_table.MAX_SECONDS", 0.5)
    rows = "".join(f'<row r="{row}"><c r="XFD{row}"><v>1</v></c></row>' for row in range(1, 20_000))
    sheet = f'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>{rows}</sheetData></worksheet>'
    data = repacked(workbook(lambda book: book.active.append(["x"])), xl_worksheets_sheet1_xml=sheet.encode())
    with pytest.raises(DocumentTooLarge, match="takes more work"):
        read(data, "a.xlsx")
