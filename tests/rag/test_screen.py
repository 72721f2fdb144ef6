"""What the commands print."""

from __future__ import annotations

import dataclasses
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from rag import screen
from rag.exchange import Citation, ConfidenceScore, RAGResponse, RouteTarget
from tests.rag.passages import passage

ONE = "00000001-0000-4000-8000-000000000000:0"
TWO = "00000002-0000-4000-8000-000000000000:4"
ADMIN = RouteTarget(tag="system", owner_user_id=None, owner_email="a@b.c", reason="Low confidence: 12%", fallback=True)


def citation(source_id: str, **changes: Any) -> Citation:
    document_id, _, index = source_id.partition(":")
    plain = Citation(
        source_id=source_id,
        document_id=document_id,
        document_name="Handbook",
        chunk_index=int(index),
        page_number=None,
        section=None,
        relevance_score=0.5,
        snippet="Text.",
        snippet_full="Text.",
    )
    return dataclasses.replace(plain, **changes)


def response(answer: str = "It is so.", **changes: Any) -> RAGResponse:
    plain = RAGResponse(
        answer=answer,
        confidence=ConfidenceScore(overall=64, retrieval_score=0.7, coverage_score=0.4, llm_score=90),
        citations=[],
        action="CITE",
        route_to=None,
        model_used="extractive",
        context_chunks_used=1,
        context_tokens_used=10,
        generation_time_ms=12.4,
        grounded=False,
        query_id="5f0c8a52-9f0e-4b64-8a8e-3c1d2e4f5a6b",
    )
    return dataclasses.replace(plain, **changes)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# --- an answer -----------------------------------------------------------------------------------


def test_source_ids_are_shown_as_numbers_and_listed_below(capsys):
    screen.print_answer(
        response(
            f"A [SourceId: {TWO}]. B [SourceId: {ONE}] [SourceId: {TWO}].",
            citations=[citation(TWO, page_number=7, section="Handbook > Leave"), citation(ONE, stale=True)],
        ),
        indent="  ",
    )
    assert printed(capsys) == [
        "  A [1]. B [2] [1].",
        f"    [1] Handbook › Leave, page 7 {TWO}",
        f"    [2] Handbook (changed since) {ONE}",
        "    CITE · confidence 64 (retrieval 0.70, coverage 0.40, grade 90) · answered by extractive in 12 ms",
    ]


def test_whom_to_ask_and_what_was_missing_are_said(capsys):
    screen.print_answer(response(action="ROUTE", route_to=ADMIN, degraded=["only keywords were searched"]))
    # First of all: what follows is not to be relied on.
    routed, *_, note = printed(capsys)
    assert routed == "Low confidence: 12%: better ask a@b.c"
    assert note == "  note: only keywords were searched"


def test_without_an_address_the_tag_is_named(capsys):
    screen.print_answer(response(route_to=dataclasses.replace(ADMIN, owner_email=None, tag="finance")))
    assert printed(capsys)[0] == "Low confidence: 12%: better ask finance"


@pytest.mark.parametrize(
    "text", ["[bold]loud[/bold]", "[/]", "[red]", "list[int]", "a\\[b]", "[link=http://x]y[/link]"]
)
def test_text_that_looks_like_markup_is_printed_as_it_is(capsys, text):
    screen.print_answer(response(text, citations=[citation(ONE, document_name=text, section=text)]))
    first, second, *_ = printed(capsys)
    assert first == text
    assert text in second


@pytest.mark.parametrize("control", ["\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\x08\x08\x08", "\r", "\x00", "\x7f"])
def test_documents_cannot_steer_the_terminal(monkeypatch, control):
    written = io.StringIO()
    monkeypatch.setattr(screen, "out", Console(file=written, highlight=False, soft_wrap=True))
    hostile = f"before{control}after"
    screen.print_answer(
        response(
            hostile,
            citations=[citation(ONE, document_name=hostile, section=hostile)],
            route_to=dataclasses.replace(ADMIN, reason=hostile, owner_email=hostile),
            degraded=[hostile],
            model_used=hostile,
        )
    )
    screen.print_passages([passage("Text.", document_name=hostile, section=hostile)], [])
    assert not {character for character in written.getvalue() if character < " " or "\x7f" <= character <= "\x9f"} - {
        "\n"
    }


def test_lines_and_tabs_of_an_answer_stay(capsys):
    screen.print_answer(response("one\n\ttwo — три 好"))
    assert printed(capsys)[:2] == ["one", "        two — три 好"]


# --- JSON ----------------------------------------------------------------------------------------


def test_the_json_has_every_field_as_plain_values(capsys):
    given = response(
        "Ça va [bold]",
        citations=[citation(ONE)],
        passages=[passage("Text.")],
        route_to=ADMIN,
        degraded=["note"],
    )
    screen.print_json(screen.as_json(given))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "Ça va [bold]" in out
    parsed = json.loads(out)
    assert set(parsed) == {field.name for field in dataclasses.fields(RAGResponse)}
    assert parsed["citations"][0]["source_id"] == ONE
    assert parsed["confidence"]["overall"] == 64
    assert parsed["route_to"]["owner_email"] == "a@b.c"
    assert parsed["passages"][0]["document_id"] == ONE.partition(":")[0]
    assert datetime.fromisoformat(parsed["passages"][0]["content_updated_at"]) == datetime(
        2026, 11, 2, 8, 30, tzinfo=UTC
    )


def test_what_has_no_json_is_an_error_and_not_a_guess():
    with pytest.raises(TypeError):
        screen.as_json(response(degraded=[object()]))


# --- passages ------------------------------------------------------------------------------------


def test_passages_are_listed_with_their_scores_and_why(capsys):
    screen.print_passages(
        [
            passage("a b c", number=1, score=0.227, keyword_score=3.5, cosine=0.61, document_name="Backups"),
            passage("a b", number=2, score=0.1, cosine=None, reason="keyword", section="Document 2 > Leave"),
        ],
        [passage("a", rank=None, keyword_rank=None, reason="duplicate", duplicate_of=ONE)],
    )
    header, first, second, third = printed(capsys)
    assert header.split() == ["#", "fused", "keyword", "vector", "tokens", "why", "source"]
    assert first.split() == ["1", "0.2270", "1.", "(3.50)", "1.", "(0.61)", "3", "keyword_and_vector", "Backups"]
    assert second.split() == ["2", "0.1000", "2.", "(1.00)", "–", "2", "keyword", "Document", "2", "›", "Leave"]
    assert third.split() == [
        *("–", "0.1000", "–", "1.", "(0.50)", "1", "duplicate"),
        *("Document", "1", "(of", f"{ONE})"),
    ]


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (15, 15), (16, 16), (40, 16)])
def test_of_those_that_fell_out_fifteen_are_listed_and_the_rest_counted(capsys, count, lines):
    dropped = [passage("a", number=number, rank=None, reason="beyond_top_k") for number in range(1, count + 1)]
    screen.print_passages([], dropped)
    _, *rest = printed(capsys)
    assert len(rest) == lines
    if count > 15:
        assert rest[-1] == f"and {count - 15} further candidates"


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (1, ["1/1"]),
        (3, ["1/3", "2/3", "3/3"]),
        (100, [f"{number}/100" for number in range(10, 101, 10)]),
    ],
)
def test_progress_without_a_terminal_is_about_ten_lines(capsys, total, expected):
    with screen.counting(total, "ingesting") as counter:
        for number in range(total):
            counter.note(f"file {number}")
            counter.step()
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"ingesting: {line}" for line in expected]
    assert captured.out == ""


def test_progress_on_a_terminal_names_the_file_it_is_at(monkeypatch):
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=120, highlight=False)
    monkeypatch.setattr(screen, "err", terminal)
    with screen.counting(2, "ingesting") as counter:
        counter.note("docs/[draft] \x1b[2Jplan.md")
        counter.step()
        counter.note("docs/b.md")
        counter.step()
    assert "docs/b.md" in written.getvalue()
    assert "2/2" in written.getvalue()
    assert "\x1b[2Jplan" not in written.getvalue()
