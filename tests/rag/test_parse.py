"""Files become text with structure, or an error that names the file."""

import codecs
import contextlib
import io
import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfWriter

from rag import parse as parsing
from rag.errors import DocumentTooLarge, EmptyDocument, InvalidInput, UnreadableDocument, UnsupportedFormat
from rag.parse import ParsedDocument, parse, parse_text, source_type_of

LIMIT = 8 * 1024 * 1024
SAMPLES = Path(os.environ.get("RAG_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "ingest"


def parsed(content: str | bytes, name: str = "Guide.md", **options) -> ParsedDocument:
    data = content.encode() if isinstance(content, str) else content
    document = parse(data, name=name, max_bytes=LIMIT, **options)
    assert_sound(document)
    return document


def assert_sound(document: ParsedDocument) -> None:
    """Blocks are in order, apart, and leave out nothing but white space; metadata fits into JSON."""
    end = 0
    for block in document.blocks:
        assert block.start >= end
        assert not document.body[end : block.start].strip()
        end = block.end
        assert document.body[block.start : end].strip()
        assert block.start == 0 or document.body[block.start - 1] == "\n"
    assert not document.body[end:].strip()
    document.body.encode()
    document.title.encode()
    assert "\0" not in document.body + document.title
    json.dumps(document.metadata, allow_nan=False).encode()


def outline(document: ParsedDocument) -> list[tuple[str, str | None, str]]:
    return [(block.kind, block.section, document.body[block.start : block.end]) for block in document.blocks]


# --- Markdown ------------------------------------------------------------------------------------


def test_headings_give_every_block_its_path():
    document = parsed("intro\n\n# Setup\n\n## Install\n\nRun it.\n\n### Linux\n\n- a\n- b\n\n## Use\n\nNow.\n")
    assert outline(document) == [
        ("text", None, "intro"),
        ("heading", "Setup", "# Setup"),
        ("heading", "Setup > Install", "## Install"),
        ("text", "Setup > Install", "Run it."),
        ("heading", "Setup > Install > Linux", "### Linux"),
        ("list", "Setup > Install > Linux", "- a"),
        ("list", "Setup > Install > Linux", "- b"),
        ("heading", "Setup > Use", "## Use"),
        ("text", "Setup > Use", "Now."),
    ]
    assert document.title == "Setup"
    assert [block.level for block in document.blocks if block.kind == "heading"] == [1, 2, 3, 2]


def test_a_number_sign_inside_a_fence_is_no_heading():
    code = "```sh\n# install\n\n## really\npip install x\n```"
    assert outline(parsed(f"# Setup\n\n{code}\n\nDone."))[1:] == [
        ("code", "Setup", code),
        ("text", "Setup", "Done."),
    ]


@pytest.mark.parametrize("code", ["~~~\n# x\n```\n~~~", "    # x\n\n    y", "```\n# never closed"])
def test_code_of_every_form_is_one_block(code):
    assert outline(parsed(f"text\n\n{code}")) == [("text", None, "text"), ("code", None, code)]


def test_underlined_headings_are_headings():
    document = parsed("Setup\n=====\n\nInstall\n-------\n\ntext\n")
    assert outline(document) == [
        ("heading", "Setup", "Setup\n====="),
        ("heading", "Setup > Install", "Install\n-------"),
        ("text", "Setup > Install", "text"),
    ]


def test_a_heading_is_named_as_readers_see_it():
    document = parsed("# The *new* `Path` [page](/x) of <b>us</b> ![logo](l.png) &amp; you { #the-new }\n\ntext")
    assert document.title == "The new Path page of us logo & you"


def test_a_link_defined_elsewhere_is_followed_in_a_heading():
    assert parsed("# See [the guide][g]\n\n[g]: /guide\n").title == "See the guide"


@pytest.mark.parametrize("text", ["> # quoted\n\ntext", "- item\n\n  # in a list\n\ntext", "#\n\ntext", "#no\n\ntext"])
def test_what_heads_nothing_is_no_section(text):
    document = parsed(text)
    assert {block.path for block in document.blocks} == {()}
    assert document.title == "Guide"


def test_tables_links_rules_and_comments_are_kept():
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    text = f"{table}\n\n[x]: /y\n\n---\n\n<!-- # note -->\n\n-\n"
    assert outline(parsed(text)) == [
        ("table", None, table),
        ("text", None, "[x]: /y"),
        ("text", None, "---"),
        ("text", None, "<!-- # note -->"),
        ("text", None, "-"),
    ]


def test_code_in_a_list_is_a_block_of_its_own():
    assert outline(parsed("1. Run\n\n   ```\n   x\n   ```\n\n2. Stop\n")) == [
        ("list", None, "1. Run"),
        ("code", None, "   ```\n   x\n   ```"),
        ("list", None, "2. Stop"),
    ]


def test_line_separators_of_unicode_do_not_shift_offsets():
    document = parsed("a\u2028b\x0b\x0c\x85c\n\n# T\n\nend")
    assert outline(document)[1:] == [("heading", "T", "# T"), ("text", "T", "end")]


def test_a_heading_of_a_megabyte_is_cut_in_the_path_and_kept_in_the_text():
    document = parsed("# " + "x" * 1_000_000)
    assert len(document.title) == 300
    assert document.title.endswith("…")
    assert document.blocks[0].end == 1_000_002


@pytest.mark.parametrize("text", ["a\n\n" * 600_000, "# a\n" * 600_000, "> - > - a\n" * 100_000])
def test_data_under_the_name_of_markdown_is_read_as_plain_text(text):
    document = parsed(text)
    assert {block.kind for block in document.blocks} == {"text"}
    assert len(document.blocks) < 100_000


def test_a_table_of_too_many_cells_is_read_as_lines():
    document = parsed("# T\n\n|a|b|\n|-|-|\n" + "|1|2|\n" * 40_000)
    assert [block.kind for block in document.blocks] == ["heading", "text"]


# --- front matter --------------------------------------------------------------------------------


def test_front_matter_is_taken_off_and_read():
    document = parsed(
        "---\n"
        "title: Leave policy\n"
        "language: de-AT\n"
        "tags: [hr, secret]\n"
        "owner: People team\n"
        "version: 1.10\n"
        "revision: 7\n"
        "draft: false\n"
        "reviewed: 2026-11-01\n"
        "ratio: .nan\n"
        "nothing:\n"
        "nested: {a: 1}\n"
        "---\n"
        "# Other title\n\ntext\n"
    )
    assert document.title == "Leave policy"
    assert document.language == "de"
    assert document.metadata == {
        "owner": "People team",
        "version": 1.1,
        "revision": 7,
        "draft": False,
        "reviewed": "2026-11-01",
        "ratio": ".nan",
    }
    assert document.body == "# Other title\n\ntext\n"
    assert outline(document)[1] == ("text", "Other title", "text")


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nA rule, not front matter.\n\n---\n",
        "---\ntitle: never closed\n",
        "---\n- a\n- list\n---\ntext",
        "---\na: [\n---\ntext",
        "---\na: " + "[" * 5_000 + "\n---\ntext",
        "text\n---\ntitle: not at the top\n---\n",
        " ---\ntitle: indented\n---\n",
        "---\ntitle: long\n" + "# filler\n" * 10_000 + "---\n",
    ],
)
def test_what_is_no_front_matter_stays_in_the_text(text):
    document = parsed(text)
    assert document.body == text
    assert document.metadata == {}


@pytest.mark.parametrize(
    ("declared", "title"),
    [
        ("title: 2026", "2026"),
        ("title: no", "no"),
        ("title: '  '", "Guide"),
        ("title: [a]", "Guide"),
        ("", "Guide"),
    ],
)
def test_a_declared_title_is_taken_as_written(declared, title):
    assert parsed(f"---\n{declared}\n---\ntext").title == title


@pytest.mark.parametrize(
    ("declared", "language"),
    [
        ("en", "en"),
        ("no", "no"),
        ("EN_us", "en"),
        ("german", None),
        ("[de]", None),
        ("1", None),
        ("''", None),
    ],
)
def test_a_declared_language_is_a_code_of_two_letters_or_none(declared, language):
    assert parsed(f"---\nlanguage: {declared}\n---\ntext").language == language


@pytest.mark.parametrize("value", [r'"\0"', r'"\ud800"', r'"\x00"'])
@pytest.mark.parametrize("key", ["title", "owner", "language"])
def test_front_matter_cannot_smuggle_in_what_the_database_refuses(key, value):
    with pytest.raises(UnreadableDocument, match=r"^Guide\.md has "):
        parsed(f"---\n{key}: {value}\n---\ntext")


@pytest.mark.parametrize("tag", ["!!bool maybe", "!!int x", "!!timestamp x", "!!python/name:os.system x", "!x y"])
def test_tags_of_yaml_are_words_and_nothing_else(tag):
    assert parsed(f"---\nkey: {tag}\n---\ntext").metadata["key"] in {tag.split()[1], False}


def test_front_matter_without_a_text_is_an_empty_document():
    with pytest.raises(EmptyDocument, match=r"^Guide\.md has no text$"):
        parsed("---\ntitle: x\n---\n\n")


# --- plain text and YAML -------------------------------------------------------------------------


def test_plain_text_is_cut_at_blank_lines_and_has_no_headings():
    document = parsed("# one\ntwo\n \t\n\n  three\n", name="notes/meeting notes.TXT")
    assert outline(document) == [("text", None, "# one\ntwo"), ("text", None, "  three")]
    assert document.title == "meeting notes"
    assert document.source_type == "text"


def test_yaml_is_kept_as_it_is():
    text = "on: x\n\nsteps:\n  - run: 'a'  # why\n"
    document = parsed(text, name="deploy/.project-spec.yaml")
    assert document.body == text
    assert [block.kind for block in document.blocks] == ["code", "code"]
    assert (document.title, document.source_type) == ("project-spec", "project_spec")


@pytest.mark.parametrize(
    "data",
    [
        "Grüße\n".encode(),
        codecs.BOM_UTF8 + "Grüße\n".encode(),
        codecs.BOM_UTF16_LE + "Grüße\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "Grüße\n".encode("utf-16-be"),
        "Grüße\r\n".encode(),
        "Grüße\r".encode(),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.yaml"])
def test_encodings_and_line_ends_give_one_text(data, name):
    assert parsed(data, name=name).body == "Grüße\n"


def test_letters_are_not_composed():
    assert parsed("u\u0308ber \ufb01ne").body == "u\u0308ber \ufb01ne"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ab\xff", "a.txt is not UTF-8 text: byte 2 cannot be decoded"),
        (codecs.BOM_UTF8 + b"ab\xff", "a.txt is not UTF-8 text: byte 5 cannot be decoded"),
        (b"caf\xe9 au lait", "a.txt is not UTF-8 text: byte 3 cannot be decoded"),
        (b"\xed\xa0\x80", "a.txt is not UTF-8 text: byte 0 cannot be decoded"),
        (codecs.BOM_UTF16_LE + b"a\0b", "a.txt is not UTF-16 text: byte 4 cannot be decoded"),
        (b"ab\0c", "a.txt has a NUL character at character 2"),
    ],
)
def test_what_is_not_text_is_refused_with_the_place(data, message):
    with pytest.raises(UnreadableDocument) as caught:
        parsed(data, name="a.txt")
    assert caught.value.message == message


@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.yaml", "a.pdf"])
@pytest.mark.parametrize("data", [b"", b" \n\t\r\n "])
def test_a_file_without_text_is_empty(name, data):
    with pytest.raises(EmptyDocument, match=f"^{name} has no text$"):
        parse(data, name=name, max_bytes=LIMIT)


@pytest.mark.parametrize("data", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE + b" \0", "\u3000\xa0".encode()])
def test_marks_and_wide_spaces_are_no_text(data):
    with pytest.raises(EmptyDocument):
        parse(data, name="a.txt", max_bytes=LIMIT)


def test_a_file_above_the_limit_is_refused_unread():
    with pytest.raises(DocumentTooLarge) as caught:
        parse(b"\0" * 1_001, name="a.pdf", max_bytes=1_000)
    assert caught.value.message == "a.pdf has 1,001 bytes; the limit is 1,000"


@pytest.mark.parametrize(("name", "named"), [("a.mov", ".mov"), ("b/a.tar.gz", ".gz"), ("Makefile", "no suffix")])
def test_other_formats_are_refused_with_the_accepted_ones(name, named):
    with pytest.raises(UnsupportedFormat) as caught:
        parsed("x", name=name)
    assert caught.value.message == (
        f"{name}: {named} is not accepted; accepted are .md, .markdown, .txt, .rst, .log, .yaml, .yml, .pdf, "
        ".html, .htm, .xhtml, .csv, .tsv, .docx, .xlsx, .epub"
    )


@pytest.mark.parametrize("name", ["", "  ", "a\0.md", "a\udcff.md", "a\n.md"])
def test_a_name_that_cannot_be_stored_is_refused_and_not_repeated_raw(name):
    with pytest.raises(InvalidInput) as caught:
        parse(b"x", name=name, max_bytes=LIMIT)
    assert caught.value.field == "name"
    assert caught.value.message.isascii()


# --- text of requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source_type", "kinds"),
    [
        ("ticket-17", None, ["heading", "text"]),
        ("v1.2", None, ["heading", "text"]),
        ("ticket-17", "runbook", ["heading", "text"]),
        ("ticket-17", "text", ["text", "text"]),
        ("ticket-17", "yaml", ["code", "code"]),
        ("ticket-17", "project_spec", ["code", "code"]),
        ("scan.pdf", None, ["text", "text"]),
        ("a.txt", "runbook", ["text", "text"]),
        ("a.md", "text", ["heading", "text"]),
    ],
)
def test_the_format_of_a_text_follows_from_suffix_then_type(name, source_type, kinds):
    document = parse_text("# A\n\ntext", name=name, source_type=source_type, max_bytes=LIMIT)
    assert_sound(document)
    assert [block.kind for block in document.blocks] == kinds


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", EmptyDocument, "t has no text"),
        ("\ufeff \n", EmptyDocument, "t has no text"),
        ("a\0b", UnreadableDocument, "t has a NUL character at character 1"),
        ("ab\ud800", UnreadableDocument, "t has half a surrogate pair at character 2"),
        ("äää", DocumentTooLarge, "t has 6 bytes; the limit is 5"),
    ],
)
def test_a_text_that_cannot_be_stored_is_refused_with_its_field(text, error, message):
    with pytest.raises(error) as caught:
        parse_text(text, name="t", max_bytes=5)
    assert caught.value.message == message
    assert caught.value.field == "content"


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.sampled_from(["# a", "---", "```", "- x", "> y", "| a | b |", "|---|---|", "", "", "[a]: b", "\t x"]),
            st.text(max_size=20),
        ),
        max_size=20,
    ),
    name=st.sampled_from(["a.md", "a.txt", "a.yml"]),
)
def test_whatever_the_text_its_blocks_cover_it(lines, name):
    text = "\n".join(lines)
    try:
        document = parse_text(text, name=name, max_bytes=LIMIT)
    except InvalidInput:
        assert "\0" in text or not text.removeprefix("\ufeff").strip() or text.startswith("---")
    else:
        assert_sound(document)


# --- source types --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source_type"),
    [
        (".project-spec.yaml", "project_spec"),
        ("services/shop/.project-spec.yml", "project_spec"),
        ("project-spec.yaml", "yaml"),
        ("README.md", "readme"),
        ("docs/readme.de.txt", "readme"),
        ("incidents/README.md", "readme"),
        ("docs/adr/0001-use-postgres.md", "adr"),
        ("docs/ADRs/records.md", "adr"),
        ("adr-7-queues.md", "adr"),
        ("0007-use-queues.md", "adr"),
        ("2026-11-21-notes.md", "markdown"),
        ("0007.md", "markdown"),
        ("decisions/0001-use-postgres.md", "decision"),
        ("decision-log.md", "decision"),
        ("incidents/2026-03-02.md", "incident"),
        ("post-mortems/march.md", "incident"),
        ("2026-03-02-incident-search-down.md", "incident"),
        ("runbooks/0003-restart.md", "runbook"),
        ("adr/runbook-restore.md", "runbook"),
        ("incidents/runbooks/restore.md", "runbook"),
        ("conversation_summaries/17.md", "conversation_summary"),
        ("conversation-summary-17.txt", "conversation_summary"),
        ("docs\\adr\\use-postgres.md", "adr"),
        ("notes.md", "markdown"),
        ("notes.MARKDOWN", "markdown"),
        ("notes.txt", "text"),
        ("values.yaml", "yaml"),
        ("paper.pdf", "pdf"),
        ("ticket-17", "markdown"),
    ],
)
def test_the_source_type_follows_from_the_name(name, source_type):
    assert source_type_of(name) == source_type


def test_the_callers_source_type_wins():
    assert parsed("x", name="README.md", source_type="house-rules").source_type == "house-rules"


@pytest.mark.parametrize("source_type", ["", " x", "a\nb", "a\0", "x" * 129])
def test_a_source_type_that_is_no_name_is_refused(source_type):
    with pytest.raises(InvalidInput) as caught:
        parsed("x", source_type=source_type)
    assert caught.value.field == "source_type"


# --- PDF -----------------------------------------------------------------------------------------


def pdf_of(*pages: str, title: str | None = None) -> bytes:
    """Write a PDF by hand: a page for each text, whose lines are set one below the other."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    kids = []
    for page in pages:
        lines = "".join(f"({line}) Tj T* " for line in page.split("\n")) if page else ""
        stream = f"BT /F1 12 Tf 14 TL 50 700 Td {lines}ET" if page else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Contents {len(objects)} 0 R /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(pages)} >>"
    info = ""
    if title is not None:
        objects.append(f"<< /Title ({title}) >>")
        info = f"/Info {len(objects)} 0 R"
    out = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {info} >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def encrypted(data: bytes, *, user_password: str) -> bytes:
    writer = PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user_password, "owner", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_the_pages_of_a_pdf_are_numbered():
    document = parsed(pdf_of("First page\nsecond line", "", "Third page"), name="b/Plan 7.pdf")
    assert document.body == "First page\nsecond line\n\n\n\nThird page"
    assert [(block.page_number, block.start, block.end) for block in document.blocks] == [
        (1, 0, 22),
        (3, 26, 36),
    ]
    assert (document.title, document.source_type, document.metadata) == ("Plan 7", "pdf", {"pages": 3})


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Travel policy", "Travel policy"),
        ("Microsoft Word - travel.docx", "Guide"),
        ("untitled", "Guide"),
        ("travel_final.tex", "Guide"),
        ("  ", "Guide"),
        ("2026-11", "Guide"),
    ],
)
def test_the_title_of_a_pdf_is_believed_if_a_person_wrote_it(written, title):
    assert parsed(pdf_of("text", title=written), name="Guide.pdf").title == title


def test_words_that_typesetting_broke_are_mended():
    page = "The data-\nbase is well-known. A well-\nknown rule. Vor-\nund Nachteile. New-\nYork. It is re-\nal."
    assert parsed(pdf_of(page), name="a.pdf").body == (
        "The database\nis well-known. A well-\nknown rule. Vor-\nund Nachteile. New-\nYork. It is real."
    )


def test_an_encrypted_pdf_is_refused_as_such():
    with pytest.raises(UnreadableDocument, match=r"^a\.pdf is encrypted; a password is needed to read it$"):
        parsed(encrypted(pdf_of("secret"), user_password="user"), name="a.pdf")


def test_a_pdf_that_opens_without_a_password_is_read_though_encrypted():
    assert parsed(encrypted(pdf_of("readable"), user_password=""), name="a.pdf").body == "readable"


def test_a_pdf_of_images_has_no_text_layer():
    with pytest.raises(EmptyDocument, match=r"^a\.pdf has no text layer: its 2 pages are images or empty$"):
        parsed(pdf_of("", ""), name="a.pdf")


@pytest.mark.parametrize(
    "data",
    [
        b"not a pdf at all",
        b"%PDF-1.7\n",
        pdf_of("text")[:200],
        pdf_of("text").replace(b"/Kids", b"/Kits").replace(b"/Pages", b"/Fonts"),
        b"%PDF-1.4\n" + b"[" * 100_000,
        codecs.BOM_UTF8 + b"# Markdown\n",
    ],
)
def test_a_broken_pdf_is_refused(data):
    with pytest.raises((UnreadableDocument, EmptyDocument), match=r"^a\.pdf "):
        parsed(data, name="a.pdf")


def test_a_pdf_of_too_many_pages_is_refused(monkeypatch):
    monkeypatch.setattr(parsing, "MAX_PDF_PAGES", 2)
    with pytest.raises(DocumentTooLarge, match=r"^a\.pdf has 3 pages; the limit is 2$"):
        parsed(pdf_of("a", "b", "c"), name="a.pdf")


def test_a_pdf_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(parsing, "MAX_PDF_SECONDS", -1.0)
    with pytest.raises(DocumentTooLarge, match=r"^a\.pdf takes more work to read than is allowed$"):
        parsed(pdf_of("a"), name="a.pdf")


def test_a_small_pdf_with_a_large_text_is_refused():
    writer = PdfWriter(clone_from=io.BytesIO(pdf_of("x" * 100_000)))
    writer.pages[0].compress_content_streams()
    out = io.BytesIO()
    writer.write(out)
    data = out.getvalue()
    for limit in (20_000, 70_000):  # stopped while it is unpacked, and when its text is counted
        assert len(data) < limit
        with pytest.raises(DocumentTooLarge, match=r"a\.pdf"):
            parse(data, name="a.pdf", max_bytes=limit)


def test_the_pdf_reader_says_nothing_by_itself(capfd):
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.name)

    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        parsed(pdf_of("readable").replace(b"startxref\n", b"startxref\n9"), name="a.pdf")
    finally:
        logging.getLogger().removeHandler(listener)
    assert heard == []
    assert capfd.readouterr() == ("", "")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_pdf_is_read_or_refused_and_nothing_else(data):
    content = bytearray(pdf_of("First page\nline", "Second", title="Some title"))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    with contextlib.suppress(InvalidInput):
        parsed(bytes(content), name="a.pdf")


# --- real files ----------------------------------------------------------------------------------


@pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"sample files are absent: {SAMPLES} (set RAG_TEST_DATA)")
@pytest.mark.parametrize(
    ("name", "pages", "title", "phrase"),
    [
        ("markitdown_test.pdf", 1, "markitdown_test", "Large language models (LLMs)"),
        ("pypdf_google-doc-document.pdf", 1, "PDF Example Document", "Beautiful is better than ugly."),
        ("pypdf_minimal-document.pdf", 1, "pypdf_minimal-document", "no sea takimata sanctus"),
        ("pypdf_multicolumn.pdf", 3, "pypdf_multicolumn", "two columns filled"),
        ("pypdf_pdflatex-4-pages.pdf", 4, "pypdf_pdflatex-4-pages", "If you read this text"),
        ("pypdf_pdflatex-outline.pdf", 4, "pypdf_pdflatex-outline", "Contents"),
    ],
)
def test_real_pdfs_are_read(name, pages, title, phrase):
    document = parsed((SAMPLES / name).read_bytes(), name=name)
    assert document.metadata == {"pages": pages}
    assert {block.page_number for block in document.blocks} == set(range(1, pages + 1))
    assert document.title == title
    assert phrase in " ".join(document.body.split())


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("project: orion\ntitle: Booking and boarding\n", "Booking and boarding"),
        ("name: 'orion'  # short\n", "orion"),
        ('name: orion\ntitle: "Booking"\n', "Booking"),
        ("parts:\n  title: inner\n", "project-spec"),
        ("title: [a, b]\n", "project-spec"),
        ("title: &anchor x\n", "project-spec"),
    ],
)
def test_a_yaml_file_is_called_by_its_own_title_or_name(text, title):
    assert parse(text.encode(), name="x/.project-spec.yaml", max_bytes=1000).title == title
