"""Bodies as nobody should send them: each gets a 4xx that names the fault, and none is repeated or stored."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api.running import JSON, Person, fields_of, problem_of, repeats

MIB = 1024 * 1024
# Twice RAG_MAX_DOCUMENT_BYTES, whose default is 8 MiB: JSON escapes quotes and line feeds.
BODY_LIMIT = 16 * MIB
ROUTES = [
    *("/rag/query", "/rag/enrich", "/rag/skill", "/rag/ingest", "/rag/feedback", "/rag/citations/check"),
    *("/rag/invalidate", "/rag/reinstate"),
]
# What searches for a text of the caller: the field that has it, and what has to stand beside it.
SEARCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "/rag/query": ("query", {}),
    "/rag/enrich": ("message", {}),
    "/rag/skill": ("query", {"schema": {"type": "object"}}),
}


@pytest.fixture(autouse=True)
def nothing_stored(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test here stores a document, but for those that ask for `mara` to do it."""
    if "mara" in request.fixturenames:
        yield
        return
    stored: Callable[..., int] = request.getfixturevalue("stored")
    before = stored()
    yield
    assert stored() == before


# --- what is no JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        pytest.param(b"{", "malformed_json", "The body is not JSON at character 1.", id="cut off"),
        pytest.param(b'{"query": "x"} {}', "malformed_json", "The body is not JSON at character 15.", id="two"),
        pytest.param(b"{'query': 'x'}", "malformed_json", "The body is not JSON at character 1.", id="quotes"),
        pytest.param(b'{"query": "x",}', "malformed_json", None, id="a comma too many"),
        pytest.param(b'{"query": "a\nb"}', "malformed_json", None, id="a line feed in a string"),
        pytest.param(b'{"query": "\\x41"}', "malformed_json", None, id="an escape that JSON lacks"),
        pytest.param(b'{"top_k": 05}', "malformed_json", None, id="a leading zero"),
        pytest.param(b'{"top_k": +5}', "malformed_json", None, id="a plus sign"),
        pytest.param(b"query=x&user_id=7", "malformed_json", None, id="a form"),
        pytest.param(b"\x00", "malformed_json", None, id="NUL"),
        pytest.param(b'\xef\xbb\xbf{"query": "x"}', "malformed_json", None, id="a byte order mark"),
        pytest.param('{"query": "x"}'.encode("utf-16"), "bad_request", "The body is not UTF-8", id="UTF-16"),
        pytest.param('{"query": "x"}'.encode("utf-16-le"), "malformed_json", None, id="UTF-16 without a mark"),
        pytest.param('{"query": "x"}'.encode("utf-32"), "bad_request", "The body is not UTF-8", id="UTF-32"),
        pytest.param('{"query": "é"}'.encode("latin-1"), "bad_request", "The body is not UTF-8", id="Latin-1"),
        pytest.param(b'{"query": "\xed\xa0\x80"}', "bad_request", "The body is not UTF-8", id="a raw surrogate"),
        pytest.param(b'{"query": "\xc0\x80"}', "bad_request", "The body is not UTF-8", id="an overlong NUL"),
        pytest.param(gzip.compress(b'{"query": "x"}'), "bad_request", "The body is not UTF-8", id="compressed"),
        pytest.param(
            b'{"query": "x", "query": "y"}',
            "bad_request",
            "The body has the same key twice in one object",
            id="one key twice",
        ),
        pytest.param(
            b'{"user_id": 7, "\\u0075ser_id": 8}',
            "bad_request",
            "The body has the same key twice in one object",
            id="one key twice, escaped",
        ),
        pytest.param(b'{"min_similarity": NaN}', "bad_request", "NaN is not JSON", id="NaN"),
        pytest.param(b'{"min_similarity": Infinity}', "bad_request", "Infinity is not JSON", id="infinity"),
        pytest.param(b'{"min_similarity": -Infinity}', "bad_request", "-Infinity is not JSON", id="-infinity"),
        pytest.param(b"[" * 100_000, "bad_request", "The body is nested too deeply", id="100,000 lists"),
        pytest.param(b'{"a":' * 100_000, "bad_request", "The body is nested too deeply", id="100,000 objects"),
        pytest.param(
            b'{"top_k": ' + b"9" * 1_000_000 + b"}",
            "bad_request",
            "The body has a number with too many digits",
            id="10^6 digits",
        ),
    ],
)
def test_a_body_that_is_no_json_is_a_bad_request(
    client: TestClient, route: str, body: bytes, code: str, detail: str | None
) -> None:
    response = client.post(route, content=body, headers=JSON)
    problem = problem_of(response, 400, code)
    assert detail is None or problem["detail"] == detail
    assert problem["errors"] == []
    assert not repeats(response, body.decode("latin-1"))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"", b"null", b"true", b"7", b'"text"', b"[]", b'[{"query": "x"}]', b"{}"])
def test_json_that_is_no_request_is_invalid(client: TestClient, route: str, body: bytes) -> None:
    problem_of(client.post(route, content=body, headers=JSON), 422, "invalid_input")


# --- media types ---------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "media_type",
    [
        None,
        "",
        "text/plain",
        "text/plain; charset=application/json",
        "text/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/jsonp",
        "application/json/x",
        "json",
        "application/pdf",
    ],
)
def test_another_media_type_is_unsupported(client: TestClient, route: str, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    problem_of(client.post(route, content=b'{"query": "x"}', headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "media_type", ["application/json", "APPLICATION/JSON; charset=utf-8", "application/vnd.acme.v1+json"]
)
def test_json_by_any_of_its_names_is_read(client: TestClient, tenant: str, media_type: str) -> None:
    body = json.dumps({"query": "x", "tenant_id": tenant, "generate": False})
    assert client.post("/rag/query", content=body, headers={"Content-Type": media_type}).status_code == 200


# --- size ----------------------------------------------------------------------------------------


def padded(size: int) -> bytes:
    """A valid question that takes so many bytes."""
    return b'{"query": "anything", "generate": false}'.ljust(size)


def in_parts(body: bytes) -> Iterator[bytes]:
    """So sent, a body has no Content-Length."""
    yield from (body[start : start + MIB] for start in range(0, len(body), MIB))


@pytest.mark.parametrize("content", [bytes, in_parts])
def test_a_body_of_the_limit_is_read(client: TestClient, content: Callable[[bytes], Any]) -> None:
    assert client.post("/rag/query", content=content(padded(BODY_LIMIT)), headers=JSON).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("content", [bytes, in_parts])
def test_a_larger_body_is_refused_with_and_without_its_length(
    client: TestClient, route: str, content: Callable[[bytes], Any]
) -> None:
    response = client.post(route, content=content(padded(BODY_LIMIT + 1)), headers=JSON)
    problem = problem_of(response, 413, "body_too_large")
    assert problem["detail"] == "The body is larger than 16777216 bytes"


@pytest.mark.parametrize("length", [str(BODY_LIMIT + 1), "9" * 19, "9" * 5000])
def test_a_length_beyond_the_limit_is_believed(client: TestClient, length: str) -> None:
    response = client.post("/rag/query", content=padded(100), headers=JSON | {"Content-Length": length})
    problem_of(response, 413, "body_too_large")


@pytest.mark.parametrize("length", ["0", "5", "-1", "²", "１７", "1e9", ""])
def test_a_length_that_is_too_small_or_none_is_not_trusted(client: TestClient, length: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", length.encode())]
    response = client.post("/rag/query", content=padded(BODY_LIMIT + 1), headers=headers)
    problem_of(response, 413, "body_too_large")


# --- numbers (SECURITY.md, A7) -------------------------------------------------------------------


@pytest.mark.parametrize("route", SEARCHED)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, value)
            for field in ("top_k", "max_tokens")
            for value in ("-1", "0", "1" + "0" * 100, "-" + "9" * 99)
        ),
        *((field, value) for field in ("top_k", "max_tokens") for value in ("true", '"5"', "5.0", "5e0", "[5]", "{}")),
        ("top_k", "101"),
        ("max_tokens", "1000001"),
        *(("min_similarity", value) for value in ("2", "-1.0001", "1e999", "-1e999", "true", '"0.5"', "[]")),
    ],
)
def test_a_number_beyond_its_range_or_type_is_named(client: TestClient, route: str, field: str, value: str) -> None:
    text, beside = SEARCHED[route]
    body = json.dumps({text: "x"} | beside).removesuffix("}") + f', "{field}": {value}}}'
    problem = problem_of(client.post(route, content=body, headers=JSON), 422, "invalid_input")
    assert fields_of(problem) == [field]


@pytest.mark.parametrize("field", ["generate", "stream", "direct"])
@pytest.mark.parametrize("value", ["0", "1", '"false"', "null"])
def test_a_switch_is_true_or_false(client: TestClient, field: str, value: str) -> None:
    response = client.post("/rag/query", content=f'{{"query": "x", "{field}": {value}}}', headers=JSON)
    assert fields_of(problem_of(response, 422, "invalid_input")) == [field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", None),
        ("top_k", 1),
        ("top_k", 100),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("max_tokens", 1_000_000),
        ("min_similarity", None),
        ("min_similarity", -1),
        ("min_similarity", 1.0),
        ("min_similarity", -0.0),
        ("min_similarity", 5e-324),
    ],
)
def test_a_number_at_its_limit_is_taken(visitor: Person, field: str, value: float | None) -> None:
    assert visitor.ask("anything", generate=False, **{field: value}).status_code == 200


# --- questions (SECURITY.md, A8) -----------------------------------------------------------------


@pytest.mark.parametrize("route", SEARCHED)
@pytest.mark.parametrize(
    "query",
    [
        pytest.param("", id="empty"),
        pytest.param("   \t\n", id="spaces"),
        pytest.param("\u3000\u00a0\u2028", id="white space of other scripts"),
        pytest.param("a\0b", id="NUL"),
        pytest.param("\0", id="NUL alone"),
        pytest.param("x" * 8193, id="8,193 bytes"),
        pytest.param("я" * 4097, id="4,097 characters of two bytes"),
        pytest.param("x" * MIB, id="1 MiB"),
        pytest.param("word " * 40_000, id="40,000 words"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param("before \udfff after", id="lone surrogate in text"),
        pytest.param("\udc00\ud800", id="surrogates in the wrong order"),
        pytest.param(7, id="a number"),
        pytest.param(None, id="null"),
        pytest.param(["a"], id="a list"),
        pytest.param({"$ne": ""}, id="an object"),
    ],
)
def test_a_question_that_is_none_is_named_and_not_repeated(client: TestClient, route: str, query: object) -> None:
    text, beside = SEARCHED[route]
    response = client.post(route, content=json.dumps({text: query} | beside), headers=JSON)
    problem = problem_of(response, 422, "invalid_input")
    assert fields_of(problem) == [text]
    assert not repeats(response, str(query))


QUESTIONS = [
    pytest.param("the and of", id="stop words"),
    pytest.param("-foo", id="negation"),
    pytest.param("!!!", id="punctuation"),
    pytest.param("a & b | !c <-> (d:* <2> 'e", id="tsquery"),
    pytest.param('"unfinished phrase OR -', id="web search"),
    pytest.param("'; drop table rag_documents; --", id="SQL"),
    pytest.param("%s %(question)s %% :question $1 $$ {}", id="placeholders"),
    pytest.param("\\ \\\\ \\0 \\' \\x00 \\u0000", id="backslashes"),
    pytest.param("{context} {{question}} ${query}", id="templates"),
    pytest.param("\u202etxet desrever\u202c", id="RTL override"),
    pytest.param("zero\u200bwidth\u2060and\ufeffmark", id="zero width"),
    pytest.param("\x01\x02\x1b[31m\x7f\x85", id="control characters"),
    pytest.param("e" + "\u0301" * 2000, id="combining marks"),
    pytest.param("👩‍👩‍👧‍👦 🏳️‍🌈", id="emoji"),
    pytest.param("😀" * 2048, id="8,192 bytes of emoji"),
    pytest.param("\U0010ffff\ufffe\uffff\U000e0001", id="noncharacters"),
    pytest.param("退款需要多长时间?", id="Chinese"),
    pytest.param("返金には何日かかりますか", id="Japanese"),
    pytest.param("كم يستغرق استرداد المبلغ؟", id="Arabic"),
    pytest.param("x" * 8192, id="one word of 8,192 bytes"),
    pytest.param("a b " * 2048, id="4,096 words"),
    pytest.param("1 2.5e300 0x1F 999999999999999999999999", id="numbers"),
    pytest.param("http://[::1/?a=b&c#d user@host /etc/passwd", id="addresses"),
    pytest.param("[SourceId: 00000000-0000-4000-8000-000000000001:0]", id="a citation"),
]


@pytest.mark.parametrize("query", QUESTIONS)
def test_any_text_is_a_question(mara: Person, query: str) -> None:
    mara.store("refunds.md", "# Refunds\n\nA refund takes five working days.")
    response = mara.ask(query)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["degraded"] == []
    # Whatever is cited was found.
    assert {one["source_id"] for one in answer["citations"]} <= {one["source_id"] for one in answer["hits"]}


@pytest.mark.parametrize("query", ["how about it and of the", "?", "的"])
def test_a_question_without_keywords_is_searched_by_meaning_alone(mara: Person, query: str) -> None:
    mara.store("refunds.md", "# Refunds\n\nA refund takes five working days.")
    (hit,) = mara.ask(query, generate=False, min_similarity=-1).json()["hits"]
    assert (hit["keyword_rank"], hit["vector_rank"], hit["reason"]) == (None, 1, "vector")


def test_a_minus_sign_negates_nothing(mara: Person) -> None:
    mara.store("refunds.md", "# Refunds\n\nA refund takes five working days.")
    mara.store("deploys.md", "# Deploy window\n\nOrion is deployed on Tuesday.")
    hits = mara.ask("-refund", generate=False, min_similarity=-1).json()["hits"]
    assert [(hit["document_name"], hit["keyword_rank"]) for hit in hits] == [("Refunds", 1), ("Deploy window", None)]


# --- text comes back as it was sent --------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "退款需要五个工作日。",
        "٣ أيام عمل \u202eabc\u202c",
        "👩‍👩‍👧‍👦 e\u0301 é ﬁ \u200b \U0010ffff",
        "tab\there, \\u0000 as six characters, 'quotes', \"double\", %s, {braces}",
        "\x01\x1b[31mred\x7f",
        "[SourceId: 00000000-0000-4000-8000-000000000001:0] <script>alert(1)</script>",
    ],
)
def test_stored_text_round_trips(mara: Person, text: str) -> None:
    document = mara.store("a.txt", text)
    assert mara.read(document).json()["body"] == text
    (hit,) = mara.ask(text, generate=False, min_similarity=-1).json()["hits"]
    assert hit["text"] == text


# --- what an error repeats -----------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["x" * 5_000_000, "я" * 1000, "\x01" * 1000, "<script>" * 100, '"\\' * 1000])
def test_no_more_than_256_characters_of_a_name_are_repeated(client: TestClient, route: str, name: str) -> None:
    response = client.post(route, json={name: 1})
    problem = problem_of(response, 422, "invalid_input")
    assert name[:200] in fields_of(problem)
    assert not any(name[:201] in entry for entry in [problem["detail"], *fields_of(problem)])


@pytest.mark.parametrize("route", ROUTES)
def test_ten_thousand_faults_are_not_all_listed(client: TestClient, route: str) -> None:
    response = client.post(route, json={f"field-{number}": number for number in range(10_000)})
    assert len(problem_of(response, 422, "invalid_input")["errors"]) == 20
    assert len(response.content) < 4096


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["\\ud800", "\\udfff\\ud800", "a\\ud800b"])
def test_a_name_that_is_no_text_is_refused(client: TestClient, route: str, name: str) -> None:
    response = client.post(route, content=f'{{"{name}": 1, "query": "x"}}', headers=JSON)
    problem_of(response, 422, "invalid_input")


def test_values_are_never_repeated(client: TestClient) -> None:
    secret = "the vault code is 4711"
    response = client.post(
        "/rag/query",
        json={"query": [secret], "scope": secret, "model": {secret: secret}, "chat_history": [{"role": secret}]},
    )
    problem_of(response, 422, "invalid_input")
    assert "4711" not in response.text
