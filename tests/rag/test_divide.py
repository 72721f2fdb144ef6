"""Texts that are too large for one document: where their parts end, and that nothing is lost between them."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rag import divide
from rag.errors import DocumentTooLarge, InvalidInput, UnreadableDocument, UnsupportedFormat
from rag.parse import parse_text
from tests.conftest import SIGNING_KEY, Deployment
from tests.rag.stored import rows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(divide, "PART_BYTES", 1_000)
    monkeypatch.setattr(divide, "READ_BYTES", 64)


def parts(data: bytes, name: str = "a.txt", **options: object) -> list[tuple[int | None, bytes | str]]:
    limits = {"max_bytes": 1_500, "max_file_bytes": 1_000_000} | options
    return list(divide.contents(io.BytesIO(data), name=name, size=len(data), **limits))


def test_a_file_that_fits_is_handed_over_as_it_is():
    assert parts(b"\xff\xfeanything") == [(None, b"\xff\xfeanything")]
    assert parts(b"%PDF-1.7", "a.pdf") == [(None, b"%PDF-1.7")]


TEXTS = {
    "paragraphs": "".join(f"Paragraph {number}\nof two lines.\n\n" for number in range(200)),
    "lines": "".join(f"2026-11-01 line {number}\n" for number in range(300)),
    "words": "word " * 2_000,
    "one word": "x" * 5_000,
    "umlauts": "Größe über alles – 5 €.\n" * 300,
    "surrogates": "😀😀 a" * 1_000,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_the_parts_are_the_whole_text_and_none_is_large(name: str, encoding: str):
    text = TEXTS[name]
    found = parts(text.encode(encoding))
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    assert "".join(str(content) for _, content in found) == text
    assert len(found) > 2
    assert all(len(content) <= 1_000 for _, content in found)
    ends = {"paragraphs": "\n\n", "lines": "\n", "umlauts": "\n", "words": " "}.get(name, "")
    assert all(str(content).endswith(ends) for _, content in found)


def test_an_old_encoding_is_used_when_it_is_named_and_else_the_place_is_told():
    data = ("a" * 3_000 + "é" + "b" * 3_000).encode("latin-1")
    assert "".join(str(content) for _, content in parts(data, encoding="cp1252")).count("é") == 1
    with pytest.raises(UnreadableDocument, match="is not UTF-8 text: byte 3000 cannot be decoded"):
        parts(data)
    with pytest.raises(InvalidInput):
        parts(data, encoding="rot13")


def test_every_part_of_a_table_begins_with_the_names_of_its_columns():
    text = "Name;Note\n" + "".join(f'row {number};"first\nsecond; {number}"\n' for number in range(200))
    found = [str(content) for _, content in parts(text.encode(), "a.csv")]
    assert len(found) > 5
    lines = []
    for content in found:
        header, *records = list(csv.reader(io.StringIO(content), delimiter=";"))
        assert header == ["Name", "Note"]
        lines += records
    assert lines == [[f"row {number}", f"first\nsecond; {number}"] for number in range(200)]
    body = parse_text(found[3], name="a.csv", max_bytes=10_000).body
    assert all(line.startswith("Name: row ") for line in body.splitlines())


def test_a_table_without_names_repeats_no_row():
    text = "".join(f"{number},{number}\n" for number in range(1_000))
    joined = "".join(str(content) for _, content in parts(text.encode(), "a.csv"))
    assert joined.replace("\r", "") == text


@pytest.mark.parametrize(
    ("data", "name", "error"),
    [
        (b"a: b\n" * 1_000, "a.yaml", DocumentTooLarge),
        (b"<p>x</p>" * 1_000, "a.html", DocumentTooLarge),
        (b"%PDF" * 1_000, "a.pdf", DocumentTooLarge),
        (b"x" * 1_000_001, "a.txt", DocumentTooLarge),
        (b"x" * 5_000, "a.exe", UnsupportedFormat),
        (b'a,b\n"' + b"x" * 5_000, "a.csv", UnreadableDocument),
        (b",".join(b"name%d" % number for number in range(20)) + b"\n" + b"x,y\n" * 900, "a.csv", DocumentTooLarge),
    ],
    ids=["yaml", "html", "pdf", "beyond", "format", "quotation mark", "names"],
)
def test_what_cannot_be_divided_is_refused(data: bytes, name: str, error: type[Exception]):
    with pytest.raises(error):
        parts(data, name)


# --- memory --------------------------------------------------------------------------------------

MEMORY_MIB = 300
# Of these 90 are the weights, which all processes of a machine share.
MODEL_MIB = 200

# A model that gives every text one vector.
CONSTANT = """
from rag import embed

class Constant:
    model_id = "test/constant"
    max_input_tokens = 256
    min_similarity = 0.0
    token_counter = "bytes/3"

    def count_tokens(self, text):
        return len(text.encode()) // 3 + 2

    async def embed(self, texts, *, purpose, progress=None):
        if progress is not None:
            progress(len(texts))
        return [[1.0] + [0.0] * 511 for _ in texts]

    async def close(self):
        pass

embed.open_embedder = lambda settings: Constant()
"""
# The command itself, and what it took at most; with the local model, and what its process took.
PROGRAM = """
import pathlib, sys
from rag import cli, model_process

# Of this program alone: what getrusage() tells outlives the exec that began it, and would be that of the tests.
def peak(process):
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

model, stop = [0], model_process._stop
def note(process):
    if process.poll() is None:
        model.append(peak(process.pid))
    stop(process)
model_process._stop = note

sys.argv = ["rag", "ingest", *sys.argv[1:]]
code = 0
try:
    cli.main()
except SystemExit as ended:
    code = ended.code or 0
print(peak("self"), max(model), file=sys.stderr)
raise SystemExit(code)
"""


def ingest_in_a_process(
    deployment: Deployment, path: Path, *, model: str = CONSTANT, **environment: str
) -> tuple[int, int]:
    """The most memory that it took, in MiB, and that the process of the local model took, 0 without one."""
    done = subprocess.run(
        [sys.executable, "-c", model + PROGRAM, str(path), "--user", "7", "--tenant", "acme"],
        env={
            "PATH": os.environ["PATH"],
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_SIGNING_KEY": SIGNING_KEY,
            "RAG_HOME": str(path.parent / "home"),
            **environment,
        },
        cwd=path.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    program, apart = done.stderr.splitlines()[-1].split()
    return int(program), int(apart)


def test_a_large_text_is_taken_in_with_bounded_memory(
    tmp_path: Path, deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
):
    size = scaled(test=4, ci=12, prove=100) * 1_000_000
    path = tmp_path / "large.txt"
    with path.open("w", encoding="utf-8") as file:
        written = number = 0
        while written < size:
            written += file.write(
                f"Paragraph {number} of the report says what station {number * 7} measured in the morning, and that "
                f"nobody was there to read it. It rained for {number % 50} minutes.\n\n"
            )
            number += 1
    # As a deployment with smaller documents would take it: in parts from 1 MB on.
    memory, _ = ingest_in_a_process(deployment, path, RAG_MAX_DOCUMENT_BYTES="1000000")
    (stored,) = rows(
        deployment.url("postgres"), "select count(*) as parts, sum(length(body)) as size from rag.rag_documents"
    )
    assert stored["size"] == written
    figure(f"a text of {written / 1e6:.0f} MB, {stored['parts']} parts: {memory} MiB at most")
    assert memory <= MEMORY_MIB


def test_with_the_local_model_as_well(
    tmp_path: Path,
    deployment: Deployment,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
):
    size = scaled(test=20, ci=100, prove=2_000) * 1_000
    path = tmp_path / "large.txt"
    path.write_text(
        "".join(f"Nobody was there when it rained at station {number}.\n\n" for number in range(size // 47))
    )
    memory, apart = ingest_in_a_process(deployment, path, model="", RAG_MAX_DOCUMENT_BYTES="1000000")
    figure(
        f"a text of {path.stat().st_size / 1e6:.2f} MB, embedded by the local model: {memory} MiB at most, and the "
        f"model's process {apart} MiB"
    )
    assert memory <= MEMORY_MIB
    assert 0 < apart <= MODEL_MIB


def test_a_pdf_of_many_pages_is_taken_in_with_bounded_memory(
    tmp_path: Path, deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
):
    pages = scaled(test=100, ci=300, prove=1_000)
    path = tmp_path / "large.pdf"
    path.write_bytes(pdf(pages))
    memory, _ = ingest_in_a_process(deployment, path)
    (stored,) = rows(deployment.url("postgres"), "select max(page_number) as pages from rag.rag_chunks")
    assert stored["pages"] == pages
    figure(f"a PDF of {pages} pages, {path.stat().st_size / 1e6:.1f} MB: {memory} MiB at most")
    assert memory <= MEMORY_MIB


def pdf(pages: int) -> bytes:
    """A book of so many pages of 40 lines, none of them packed."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for number in range(1, pages + 1):
        lines = "".join(
            f"(Page {number}, line {line}: the harbour of Nr. {number * line} opens at six and closes late.) Tj T*\n"
            for line in range(40)
        )
        stream = f"BT /F1 10 Tf 12 TL 50 780 Td\n{lines}ET".encode()
        content = len(objects) + 2
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >> "
            b"/Contents %d 0 R >>" % content
        )
        objects.append(b"<< /Length %d >>\nstream\n%b\nendstream" % (len(stream), stream))
    kids = b" ".join(b"%d 0 R" % (4 + 2 * page) for page in range(pages))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%b] >>" % (pages, kids)
    file = io.BytesIO(b"%PDF-1.4\n")
    file.seek(0, io.SEEK_END)
    places = []
    for number, content in enumerate(objects, start=1):
        places.append(file.tell())
        file.write(b"%d 0 obj\n%b\nendobj\n" % (number, content))
    start = file.tell()
    file.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    file.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    file.write(b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start))
    return file.getvalue()
