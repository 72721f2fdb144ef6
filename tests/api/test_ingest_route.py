"""POST /rag/ingest: what goes in, what replaces what, and what is refused with nothing stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from starlette.testclient import TestClient

from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import JSON, Person, fields_of, problem_of, running
from tests.conftest import Deployment

REFUNDS = "# Refunds\n\nA refund takes five working days."
ASKED = "How long does a refund take?"
KIB = 1024


# --- the same source again -----------------------------------------------------------------------


def test_a_new_document_is_created_and_the_same_again_is_not(mara: Person) -> None:
    first = mara.ingest("refunds.md", REFUNDS)
    assert first.status_code == 201
    created = first.json()
    assert UUID(created["document_id"]).version == 4
    assert (created["status"], created["chunks"], created["embedded"]) == ("created", 1, 1)

    again = mara.ingest("refunds.md", REFUNDS)
    assert again.status_code == 200
    assert again.json() == {
        "document_id": created["document_id"],
        "status": "unchanged",
        "chunks": 0,
        "embedded": 0,
        "tokens": 0,
    }


def test_another_text_replaces_the_document_under_its_id(mara: Person) -> None:
    document = mara.store("refunds.md", REFUNDS)
    response = mara.ingest("refunds.md", REFUNDS.replace("five", "nine"))
    assert response.status_code == 200
    assert (response.json()["status"], response.json()["document_id"]) == ("updated", document)
    (hit,) = mara.ask(ASKED, generate=False).json()["hits"]
    assert hit["text"] == "# Refunds\n\nA refund takes nine working days."


def test_other_details_replace_the_document_and_embed_nothing(mara: Person) -> None:
    mara.store("refunds.md", REFUNDS)
    response = mara.ingest("refunds.md", REFUNDS, metadata={"reviewed": True})
    assert (response.json()["status"], response.json()["embedded"]) == ("updated", 0)


def test_two_users_have_documents_of_their_own_under_one_source_id(mara: Person, jonas: Person) -> None:
    assert mara.store("notes.md", REFUNDS) != jonas.store("notes.md", REFUNDS)


# --- moving to other tags ------------------------------------------------------------------------


def test_a_document_with_other_tags_keeps_its_id_and_is_gone_for_the_old_ones(
    mara: Person, stored: Callable[[str], int]
) -> None:
    both = replace(mara, user_tags=["hr", "public"])
    document = both.store("refunds.md", REFUNDS, tags=["public"])
    response = both.ingest("refunds.md", REFUNDS, tags=["hr"])
    assert response.status_code == 200
    assert (response.json()["status"], response.json()["document_id"]) == ("moved", document)
    assert stored(str(mara.tenant_id)) == 2  # one document, one chunk

    assert mara.finds(ASKED) == []
    problem_of(mara.read(document), 404, "not_found")
    in_hr = replace(mara, user_tags=["hr"])
    assert in_hr.finds(ASKED) == ["Refunds"]
    assert in_hr.read(document).json()["tags"] == ["hr"]


def test_restricting_a_document_leaves_no_open_copy_when_no_tags_are_asserted(
    mara: Person, stored: Callable[[str], int]
) -> None:
    document = mara.store("refunds.md", REFUNDS)
    response = mara.ingest("refunds.md", REFUNDS, tags=["hr"])
    assert (response.json()["status"], response.json()["document_id"]) == ("moved", document)
    assert stored(str(mara.tenant_id)) == 2
    assert mara.finds(ASKED) == []


def test_a_document_that_its_writer_could_not_read_is_refused(mara: Person, stored: Callable[[str], int]) -> None:
    outside = replace(mara, user_tags=["public"])
    problem_of(outside.ingest("refunds.md", REFUNDS, tags=["hr"]), 403, "scope_forbidden")
    assert stored(str(mara.tenant_id)) == 0


# --- scopes --------------------------------------------------------------------------------------


def test_the_scope_is_the_narrowest_that_the_principal_names(mara: Person) -> None:
    on_orion = replace(mara, project_id="orion")
    of_user = mara.read(mara.store("one.md", REFUNDS)).json()
    assert (of_user["scope"], of_user["user_id"], of_user["project_id"]) == ("user", 7, None)
    of_project = on_orion.read(on_orion.store("two.md", REFUNDS)).json()
    assert (of_project["scope"], of_project["user_id"], of_project["project_id"]) == ("project", 7, "orion")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "user_id"),
        ({"scope": "user"}, "user_id"),
        ({"scope": "project"}, "user_id"),
        ({"scope": "project", "user_id": 7}, "project_id"),
        ({"scope": "project", "user_id": 7, "project_id": "*"}, "project_id"),
        ({"user_id": 7, "project_id": "*"}, "project_id"),
        ({"project_id": "orion"}, "user_id"),
        ({"scope": "organization", "user_id": 7}, "scope"),
        ({"scope": "documents", "user_id": 7}, "scope"),
        ({"scope": "PUBLIC"}, "scope"),
    ],
)
def test_a_scope_without_its_owner_names_the_field(
    visitor: Person, fields: dict[str, Any], named: str, stored: Callable[[str], int]
) -> None:
    problem = problem_of(visitor.ingest("refunds.md", REFUNDS, **fields), 422, "invalid_input")
    assert fields_of(problem) == [named]
    assert stored(str(visitor.tenant_id)) == 0


def test_a_public_document_is_for_everyone_of_the_tenant(mara: Person, jonas: Person, visitor: Person) -> None:
    mara.store("refunds.md", REFUNDS, scope="public")
    assert [person.finds(ASKED) for person in (mara, jonas, visitor)] == [["Refunds"]] * 3


def test_a_service_without_the_scope_cannot_publish(service: TestClient, stored: Callable[[str], int]) -> None:
    before = stored(ACME)
    response = Person(client=service, tenant_id=ACME, user_id=7).ingest("refunds.md", REFUNDS, scope="public")
    problem = problem_of(response, 403, "scope_forbidden")
    assert fields_of(problem) == ["scope"]
    assert stored(ACME) == before


def test_nobody_publishes_where_rag_publisher_cannot_log_in(deployment: Deployment, settings: Settings) -> None:
    with running(deployment, settings, publishes=False) as client:
        mara = Person(client=client, tenant_id="acme", user_id=7)
        problem_of(mara.ingest("refunds.md", REFUNDS, scope="public"), 403, "scope_forbidden")
        assert mara.ingest("refunds.md", REFUNDS, scope="user").status_code == 201


# --- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_id", "format_", "source_type", "title"),
    [
        ("refunds.md", None, "markdown", "Refunds"),
        ("wiki/page/17", None, "markdown", "Refunds"),
        ("refunds.txt", None, "text", "refunds"),
        ("page.txt", "markdown", "markdown", "Refunds"),
        ("adr/0007-refunds.md", None, "adr", "Refunds"),
    ],
)
def test_the_format_is_the_callers_word_or_the_suffix(
    mara: Person, source_id: str, format_: str | None, source_type: str, title: str
) -> None:
    fields = {} if format_ is None else {"format": format_}
    document = mara.read(mara.store(source_id, REFUNDS, **fields)).json()
    assert (document["source_id"], document["source_type"], document["title"]) == (source_id, source_type, title)


# --- content that is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        pytest.param("", 422, "empty_document", id="empty"),
        pytest.param(" \n\t\u00a0\r\n", 422, "empty_document", id="white space"),
        pytest.param("before\0after", 422, "unreadable_document", id="NUL"),
        pytest.param("x" * (10 * KIB * KIB), 413, "document_too_large", id="10 MB"),
        pytest.param("я" * (4 * KIB * KIB + 1), 413, "document_too_large", id="8 MiB and two bytes"),
    ],
)
def test_content_that_cannot_be_kept_is_refused_and_nothing_is_stored(
    mara: Person, content: str, status: int, code: str, stored: Callable[[str], int]
) -> None:
    # As UTF-8, not as escapes: ten million of those would be refused for the size of the body.
    body = json.dumps({"source_id": "a.md", "content": content} | mara.identity, ensure_ascii=False).encode()
    problem = problem_of(mara.client.post("/rag/ingest", content=body, headers=JSON), status, code)
    assert fields_of(problem) == ["content"]
    assert stored(str(mara.tenant_id)) == 0


def test_what_is_refused_leaves_the_version_before(mara: Person) -> None:
    document = mara.store("refunds.md", REFUNDS)
    problem_of(mara.ingest("refunds.md", " "), 422, "empty_document")
    assert mara.read(document).json()["body"] == REFUNDS
    assert mara.finds(ASKED) == ["Refunds"]


# --- metadata ------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    """An object so many levels deep."""
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"in": found}
    return found


def test_metadata_comes_back_as_it_went_in(mara: Person) -> None:
    metadata = {
        "team": "Zahlungen",
        "größe": 1.5,
        "n": 10**30,
        "ok": None,
        "😀": ["\u202e", "'; drop table rag_documents; --", "\\", '"'],
        "deep": nested(15),
    }
    document = mara.read(mara.store("refunds.md", REFUNDS, metadata=metadata)).json()
    assert document["metadata"] == metadata


@pytest.mark.parametrize(
    ("metadata", "status", "code"),
    [
        pytest.param('{"a": NaN}', 400, "bad_request", id="NaN"),
        pytest.param('{"a": [-Infinity]}', 400, "bad_request", id="infinity"),
        pytest.param('{"a": 1e999}', 422, "invalid_input", id="beyond a float"),
        pytest.param('{"a": 1' + "0" * 4300 + "}", 400, "bad_request", id="4,301 digits"),
        pytest.param('{"a": "\\u0000"}', 422, "invalid_input", id="NUL"),
        pytest.param('{"\\u0000": 1}', 422, "invalid_input", id="NUL in a key"),
        pytest.param('{"a": ["\\ud800"]}', 422, "invalid_input", id="lone surrogate"),
        pytest.param('{"\\udfff": 1}', 422, "invalid_input", id="lone surrogate in a key"),
        pytest.param('{"a": 1, "a": 2}', 400, "bad_request", id="one key twice"),
        pytest.param(json.dumps(nested(17)), 422, "invalid_input", id="17 levels"),
        pytest.param("[" * 17 + "]" * 17, 422, "invalid_input", id="a list"),
        pytest.param('{"a": ' + "[" * 500 + "]" * 500 + "}", 422, "invalid_input", id="501 levels"),
        pytest.param('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", 400, "bad_request", id="50,001 levels"),
        pytest.param(json.dumps({"a": "x" * 64 * KIB}), 422, "invalid_input", id="more than 64 KiB"),
        pytest.param(json.dumps(dict.fromkeys(map(str, range(10_000)), 1)), 422, "invalid_input", id="10,000 keys"),
        pytest.param("null", 422, "invalid_input", id="null"),
        pytest.param('"text"', 422, "invalid_input", id="a string"),
    ],
)
def test_metadata_that_some_reader_could_not_read_is_refused(
    mara: Person, metadata: str, status: int, code: str, stored: Callable[[str], int]
) -> None:
    head = json.dumps({"source_id": "a.md", "content": REFUNDS} | mara.identity)[:-1]
    response = mara.client.post("/rag/ingest", content=f'{head}, "metadata": {metadata}}}', headers=JSON)
    problem = problem_of(response, status, code)
    if status == 422:
        assert [name.split(".")[0] for name in fields_of(problem)] == ["metadata"]
    assert stored(str(mara.tenant_id)) == 0


def test_metadata_of_64_kib_is_kept(mara: Person) -> None:
    # {"a": "…"} takes nine characters around the text.
    metadata = {"a": "x" * (64 * KIB - 9)}
    assert mara.ingest("refunds.md", REFUNDS, metadata=metadata).status_code == 201


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source_id", ["x" * 512, "я" * 256, "Ünïcode/päth (1).md", "a b", "..", "'; --"])
def test_a_source_id_is_any_text_of_up_to_512_bytes(mara: Person, source_id: str) -> None:
    assert mara.read(mara.store(source_id, REFUNDS)).json()["source_id"] == source_id


def test_256_tags_are_not_too_many(mara: Person) -> None:
    tags = sorted(f"tag-{number}" for number in range(256))
    document = mara.store("a.md", REFUNDS, tags=tags)
    assert replace(mara, user_tags=["tag-17"]).read(document).json()["tags"] == tags


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"source_id": ""}, "source_id", id="no source"),
        pytest.param({"source_id": "x" * 513}, "source_id", id="source of 513 bytes"),
        pytest.param({"source_id": "я" * 256 + "x"}, "source_id", id="source of 257 characters in 513 bytes"),
        pytest.param({"source_id": "a\0b"}, "source_id", id="source with NUL"),
        pytest.param({"source_id": "a\nb"}, "source_id", id="source with a line feed"),
        pytest.param({"source_id": " a"}, "source_id", id="source with outer spaces"),
        pytest.param({"source_id": 7}, "source_id", id="source as a number"),
        pytest.param({"source_id": None}, "source_id", id="source null"),
        pytest.param({"content": None}, "content", id="content null"),
        pytest.param({"content": ["text"]}, "content", id="content as a list"),
        pytest.param({"title": "x" * 513}, "title", id="long title"),
        pytest.param({"title": "a\0b"}, "title", id="title with NUL"),
        pytest.param({"source_uri": "x" * 2049}, "source_uri", id="long address"),
        pytest.param({"source_type": "a\x1bb"}, "source_type", id="type with escape"),
        pytest.param({"language": "english"}, "language", id="language as a word"),
        pytest.param({"language": "en\n"}, "language", id="language with a line feed"),
        pytest.param({"domain": "x" * 129}, "domain", id="long domain"),
        pytest.param({"doc_type": ""}, "doc_type", id="empty type"),
        pytest.param({"provenance_id": "x" * 257}, "provenance_id", id="long provenance"),
        pytest.param({"task_id": "\u0085"}, "task_id", id="task of a control character"),
        pytest.param({"verified": "yes"}, "verified", id="verified as a word"),
        pytest.param({"verified": 1}, "verified", id="verified as a number"),
        pytest.param({"source_updated_at": "yesterday"}, "source_updated_at", id="no time"),
        pytest.param({"format": "pdf"}, "format", id="PDF as text"),
        pytest.param({"tags": "public"}, "tags", id="tags as a string"),
        pytest.param({"tags": ["x" * 65]}, "tags", id="tag of 65 characters"),
        pytest.param({"tags": [f"tag-{number}" for number in range(257)]}, "tags", id="257 tags"),
        pytest.param({"tags": ["a\0b"]}, "tags", id="tag with NUL"),
        pytest.param({"tags": [""]}, "tags", id="empty tag"),
        pytest.param({"tags": [7]}, "tags.0", id="tag as a number"),
    ],
)
def test_a_field_that_cannot_be_kept_is_named(
    mara: Person, fields: dict[str, Any], named: str, stored: Callable[[str], int]
) -> None:
    body = {"source_id": "a.md", "content": REFUNDS} | mara.identity | fields
    problem = problem_of(mara.client.post("/rag/ingest", json=body), 422, "invalid_input")
    assert fields_of(problem) == [named]
    assert stored(str(mara.tenant_id)) == 0
