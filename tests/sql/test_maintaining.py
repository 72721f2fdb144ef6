"""What large classes are counted by: statistics that equal a count by hand, and that show nobody a word."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.conftest import Deployment, unit_vector
from tests.sql.world import column, refused_with

TENANT = "acme"
CLASS, OTHER = 1152921504606846975, 17  # the largest number that a class can have, and a small one
TABLES = ("rag_class_indexes", "rag_class_languages", "rag_class_lexemes")
DOCUMENT = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def admin(deployment: Deployment) -> Iterator[psycopg.Connection]:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("set search_path = rag, pg_temp")
        yield connection


@pytest.fixture
def desk(deployment: Deployment) -> Iterator[psycopg.Connection]:
    with deployment.connect("rag_operator") as connection:
        yield connection


def add_class(admin: psycopg.Connection, access_id: int, *, tenant: str = TENANT) -> None:
    place = {"tenant": tenant, "access": access_id, "document": DOCUMENT}
    admin.execute(
        "insert into rag_access_classes (tenant_id, access_id, scope, user_id, tags, tags_digest)"
        " values (%(tenant)s, %(access)s, 'user', %(access)s, '{public}', sha256('public'))",
        place,
    )
    admin.execute(
        "insert into rag_documents (tenant_id, access_id, id, scope, user_id, tags, source_type, source_id,"
        " source_hash, title, body) values (%(tenant)s, %(access)s, %(document)s, 'user', %(access)s, '{public}',"
        " 'text', 'the source', 'hash', 'A title', 'a text')",
        place,
    )


def add_chunk(
    admin: psycopg.Connection, access_id: int, number: int, tsv: str, language: str | None, *, tenant: str = TENANT
) -> None:
    """A chunk with these lexemes; `tsv` is a tsvector as text."""
    admin.execute(
        "insert into rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,"
        " token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count, language)"
        " values (%(tenant)s, %(access)s, %(document)s, %(number)s, 'a text', 'hash', 2, 'words', 0, 6,"
        " %(vector)s::halfvec, 'test-model', %(tsv)s, lexeme_total(%(tsv)s::tsvector), %(language)s)",
        {
            "tenant": tenant,
            "access": access_id,
            "document": DOCUMENT,
            "number": number,
            "vector": unit_vector(1.0),
            "tsv": tsv,
            "language": language,
        },
    )


def measure(desk: psycopg.Connection, access_id: int = CLASS, at_least: int = 2) -> Any:
    return desk.execute("select * from rag.measure_class(%s, %s, %s)", (TENANT, access_id, at_least)).fetchone()


def lexemes(admin: psycopg.Connection, access_id: int = CLASS) -> dict[tuple[str, str], int]:
    found = admin.execute("select language, lexeme, chunks from rag_class_lexemes where access_id = %s", (access_id,))
    return {(language, lexeme): chunks for language, lexeme, chunks in found}


def languages(admin: psycopg.Connection, access_id: int = CLASS) -> dict[str, tuple[int, int]]:
    found = admin.execute(
        "select language, chunks, lexemes from rag_class_languages where access_id = %s", (access_id,)
    )
    return {language: (chunks, total) for language, chunks, total in found}


# --- counting -------------------------------------------------------------------------------------


def test_each_language_is_counted_by_itself(admin: psycopg.Connection, desk: psycopg.Connection):
    add_class(admin, CLASS)
    add_class(admin, OTHER)
    for number, (tsv, language) in enumerate(
        [
            ("'gate':1,2,3 'note':4", "en"),
            ("'gate':1 'note':2 'once':3", "en"),
            ("'gate':1", "de"),
            ("'gate':1 'tor':2,3", "de"),
            ("'gate':1 'tor':2", None),
            ("", None),
        ]
    ):
        add_chunk(admin, CLASS, number, tsv, language)
        add_chunk(admin, OTHER, number, "'gate':1 'elsewhere':2", "en")
    assert measure(desk) == (6, 4 + 3 + 1 + 3 + 2 + 0, 3)
    assert languages(admin) == {"en": (2, 7), "de": (2, 4), "": (2, 2)}
    assert lexemes(admin) == {("en", "gate"): 2, ("en", "note"): 2, ("de", "gate"): 2}
    assert lexemes(admin, OTHER) == {}


def test_statistics_equal_a_count_of_every_chunk(admin: psycopg.Connection, desk: psycopg.Connection):
    drawn = random.Random(4)
    # Also what a lexeme of a URL or of another script may hold.
    words = [f"word{number}" for number in range(60)] + ["it''s", "back\\\\slash", "sch\u00f6n", "\u5b57", "a b"]
    add_class(admin, CLASS)
    expected: Counter[tuple[str, str]] = Counter()
    plain = {"it''s": "it's", "back\\\\slash": "back\\slash"}
    for number in range(150):
        # The first words are in most chunks, the last ones in few.
        chosen = {words[min(int(drawn.expovariate(0.1)), len(words) - 1)] for _ in range(12)}
        language = drawn.choice(["en", "ru", None])
        tsv = " ".join(f"'{word}':{place}" for place, word in enumerate(sorted(chosen), start=1))
        add_chunk(admin, CLASS, number, tsv, language)
        expected.update((language or "", plain.get(word, word)) for word in chosen)
    measure(desk, at_least=4)
    assert lexemes(admin) == {lexeme: chunks for lexeme, chunks in expected.items() if chunks >= 4}
    assert min(expected.values()) < 4


def test_counting_again_replaces_what_was_counted(admin: psycopg.Connection, desk: psycopg.Connection):
    add_class(admin, CLASS)
    for number in range(3):
        add_chunk(admin, CLASS, number, "'gate':1 'note':2", "en")
    measure(desk)
    before = column(admin, "select measured_at from rag_class_indexes")
    admin.execute("delete from rag_chunks")
    for number in range(2):
        add_chunk(admin, CLASS, number, "'tor':1", "de")
    assert measure(desk) == (2, 2, 1)
    assert (languages(admin), lexemes(admin)) == ({"de": (2, 2)}, {("de", "tor"): 2})
    assert column(admin, "select chunks from rag_class_indexes") == [2]
    assert column(admin, "select measured_at from rag_class_indexes") > before
    admin.execute("delete from rag_chunks")
    assert measure(desk) == (0, 0, 0)
    assert (languages(admin), lexemes(admin)) == ({}, {})


def test_the_longest_lexeme_of_the_longest_tenant_is_counted(admin: psycopg.Connection, desk: psycopg.Connection):
    """An entry of a b-tree holds 2,704 bytes."""
    drawn = random.Random(1)

    def long(characters: int, first: int) -> str:
        return "".join(chr(drawn.randrange(first, first + 2000)) for _ in range(characters))

    # Three and four bytes each, which nothing compresses: a lexeme has 2,046 bytes, a tenant 128 characters.
    tenant, lexeme = long(128, 0x10000 + 0x10000), long(682, 0x4E00)
    add_class(admin, OTHER, tenant=tenant)
    add_chunk(admin, OTHER, 0, f"'{lexeme}':1", "en", tenant=tenant)
    counted = desk.execute("select statistics_rows from rag.measure_class(%s, %s, 1)", (tenant, OTHER)).fetchone()
    assert counted == (1,)
    assert lexemes(admin, OTHER) == {("en", lexeme): 1}


def test_a_class_that_is_gone_is_not_counted(admin: psycopg.Connection, desk: psycopg.Connection):
    assert measure(desk) is None
    assert desk.execute("select rag.set_class_ready(%s, %s, false)", (TENANT, CLASS)).fetchone() == (False,)
    assert desk.execute("select rag.demote_class(%s, %s)", (TENANT, CLASS)).fetchone() == (False,)
    assert [column(admin, f"select count(*) from {table}") for table in TABLES] == [[0], [0], [0]]


def test_erasing_a_class_erases_its_statistics(admin: psycopg.Connection, desk: psycopg.Connection):
    for access_id in (CLASS, OTHER):
        add_class(admin, access_id)
        for number in range(2):
            add_chunk(admin, access_id, number, "'gate':1", "en")
        measure(desk, access_id)
    desk.execute("select from rag.forget(%s, user_id => %s)", (TENANT, OTHER))
    for table in TABLES:
        assert column(admin, f"select access_id from {table}") == [CLASS]


def test_counting_waits_for_an_erasure_and_then_finds_nothing(
    deployment: Deployment, admin: psycopg.Connection, desk: psycopg.Connection
):
    add_class(admin, CLASS)
    for number in range(2):
        add_chunk(admin, CLASS, number, "'gate':1", "en")
    measure(desk)
    with deployment.connect("rag_operator") as counting, ThreadPoolExecutor() as aside:
        with desk.transaction():
            desk.execute("select from rag.forget(%s, user_id => %s)", (TENANT, CLASS))
            counted = aside.submit(measure, counting)
            waits = "select count(*) from pg_locks where not granted and pid = %s"
            while column(admin, waits, (counting.info.backend_pid,)) == [0]:
                assert not counted.done()
        assert counted.result() is None
    assert [column(admin, f"select count(*) from {table}") for table in TABLES] == [[0], [0], [0]]


# --- sizes ----------------------------------------------------------------------------------------


def sizes(desk: psycopg.Connection, at_least: int) -> dict[tuple[str, int], int]:
    found = desk.execute("select tenant_id, access_id, chunks from rag.class_sizes(%s)", (at_least,))
    return {(tenant, access_id): chunks for tenant, access_id, chunks in found}


def test_large_classes_are_listed_and_those_that_have_statistics(admin: psycopg.Connection, desk: psycopg.Connection):
    for access_id, chunks in {1: 3, 2: 2, 3: 1, 4: 0}.items():
        add_class(admin, access_id)
        for number in range(chunks):
            add_chunk(admin, access_id, number, "'gate':1", "en")
    assert sizes(desk, 2) == {(TENANT, 1): 3, (TENANT, 2): 2}
    measure(desk, 3)
    measure(desk, 4)
    assert sizes(desk, 3) == {(TENANT, 1): 3, (TENANT, 3): 1, (TENANT, 4): 0}


def test_a_number_of_two_tenants_counts_as_an_empty_class(admin: psycopg.Connection, desk: psycopg.Connection):
    """An index of that number would hold rows of both."""
    add_class(admin, CLASS)
    add_class(admin, CLASS, tenant="globex")
    add_class(admin, OTHER)
    for number in range(3):
        add_chunk(admin, CLASS, number, "'gate':1", "en")
        add_chunk(admin, OTHER, number, "'gate':1", "en")
    assert sizes(desk, 1) == {(TENANT, CLASS): 0, (TENANT, OTHER): 3}


# --- indexes and readiness ------------------------------------------------------------------------

VECTOR = "hnsw (embedding halfvec_cosine_ops)"
WORDS = "gin (tsv)"


def build(admin: psycopg.Connection, kind: str, what: str, access_id: int = CLASS, *, ending: str = "") -> None:
    admin.execute(f"create index rag_chunks_{kind}_{access_id}{ending} on rag_chunks using {what}")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("words", f"{WORDS} where access_id = {CLASS + 1}"),
        ("words", WORDS),
        ("words", f"{WORDS} where access_id = {CLASS} and chunk_index = 0"),
        ("words", f"{VECTOR} where access_id = {CLASS}"),
        ("vector", f"{WORDS} where access_id = {CLASS}"),
        ("vector", f"hnsw (embedding halfvec_l2_ops) where access_id = {CLASS}"),
        ("vector", f"ivfflat (embedding halfvec_cosine_ops) where access_id = {CLASS}"),
    ],
    ids=[
        "of another",
        "of all",
        "of a part",
        "vectors",
        "words",
        "other distance",
        "other method",
    ],
)
def test_an_index_is_what_its_name_says_or_of_no_use(
    admin: psycopg.Connection, desk: psycopg.Connection, kind: str, what: str
):
    build(admin, kind, what)
    found = desk.execute("select access_id, kind, is_usable from rag.class_indexes()").fetchall()
    assert found == [(CLASS, kind, False)]


def test_other_indexes_are_not_taken_for_those_of_a_class(admin: psycopg.Connection, desk: psycopg.Connection):
    admin.execute("create index rag_chunks_words_all on rag_chunks (created_at)")
    admin.execute("create index rag_chunks_words_9999999999999999999 on rag_chunks (created_at)")
    admin.execute("create index rag_chunks_vector_17 on rag_documents (created_at)")
    assert desk.execute("select index_name from rag.class_indexes()").fetchall() == []


def test_what_a_rebuild_left_is_seen_and_not_used(admin: psycopg.Connection, desk: psycopg.Connection):
    build(admin, "words", f"{WORDS} where access_id = {CLASS}", ending="_ccnew")
    found = desk.execute("select access_id, index_name, is_usable from rag.class_indexes()").fetchall()
    assert found == [(CLASS, f"rag_chunks_words_{CLASS}_ccnew", False)]


def test_a_class_is_ready_when_it_was_counted_and_all_its_indexes_are_valid(
    admin: psycopg.Connection, desk: psycopg.Connection
):
    add_class(admin, CLASS)
    ready = f"select rag.set_class_ready('{TENANT}', {CLASS}, true)"
    assert refused_with(desk, ready) == "55000"
    build(admin, "vector", f"{VECTOR} where access_id = {CLASS}")
    assert refused_with(desk, ready) == "55000"
    build(admin, "words", f"{WORDS} where access_id = {CLASS}")
    assert column(desk, ready) == [False]
    measure(desk)
    assert column(admin, "select ready from rag_class_indexes") == [False]
    admin.execute(
        "update pg_index set indisvalid = false where indexrelid = %s::regclass", (f"rag_chunks_words_{CLASS}",)
    )
    assert refused_with(desk, ready) == "55000"
    admin.execute(
        "update pg_index set indisvalid = true where indexrelid = %s::regclass", (f"rag_chunks_words_{CLASS}",)
    )
    assert column(desk, ready) == [True]
    assert column(admin, "select ready from rag_class_indexes") == [True]
    assert column(desk, f"select rag.demote_class('{TENANT}', {CLASS})") == [True]
    assert [column(admin, f"select count(*) from {table}") for table in TABLES] == [[0], [0], [0]]


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator", "rag_migrator", "rag_analyst"])
@pytest.mark.parametrize("table", TABLES)
def test_nobody_who_logs_in_reads_or_writes_the_tables(admin: psycopg.Connection, role: str, table: str):
    """Lexemes are content; and what a search reads must not be somebody's to change."""
    for statement in (
        f"select count(*) from rag.{table}",
        f"select tenant_id from rag.{table}",
        f"insert into rag.{table} default values",
        f"update rag.{table} set chunks = 1",
        f"delete from rag.{table}",
        f"truncate rag.{table}",
    ):
        with admin.transaction(force_rollback=True):
            admin.execute(f"set local role {role}")
            assert refused_with(admin, statement) == "42501", statement


CALLS = (
    "class_indexes()",
    "class_sizes(0)",
    f"measure_class('{TENANT}', {CLASS}, 2)",
    f"set_class_ready('{TENANT}', {CLASS}, false)",
    f"demote_class('{TENANT}', {CLASS})",
)


@pytest.mark.parametrize("call", CALLS, ids=[call.partition("(")[0] for call in CALLS])
def test_operators_alone_call_the_functions(admin: psycopg.Connection, call: str):
    for role in ("rag_app", "rag_publisher", "rag_analyst", "rag_migrator", "rag_principal", "rag_steward"):
        with admin.transaction(force_rollback=True):
            admin.execute(f"set local role {role}")
            assert refused_with(admin, f"select from rag.{call}") == "42501", role
    with admin.transaction(force_rollback=True):
        admin.execute("set local role rag_operator")
        assert refused_with(admin, f"select from rag.{call}") is None


def test_an_operator_is_told_no_word(admin: psycopg.Connection, desk: psycopg.Connection):
    """Whatever is in the database, and whatever the planner says of it."""
    add_class(admin, CLASS)
    for number in range(200):
        add_chunk(admin, CLASS, number, "'confidential':1 'secret':2", "en")
    measure(desk)
    admin.execute("analyze rag_class_lexemes, rag_class_languages, rag_class_indexes")
    told: list[Any] = []
    for call in CALLS:
        told += desk.execute(f"select * from rag.{call}").fetchall()
        told += desk.execute(f"explain (analyze, verbose) select * from rag.{call}").fetchall()
    told += desk.execute("select * from pg_stats where schemaname = 'rag'").fetchall()
    assert told
    assert "confidential" not in str(told)
    assert "secret" not in str(told)
    kept = column(admin, "select attname from pg_stats where schemaname = 'rag' and tablename = 'rag_class_lexemes'")
    assert set(kept) <= {"access_id", "language"}
