"""sql/queries/: one statement a file, written so that a reader and a distributed database can follow it."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from rag.resources import query, sql_folder

CHECKOUT = Path(__file__).parents[2]
FILES = sorted((sql_folder() / "queries").glob("*.sql"))
PARAMETER = re.compile(r"%\((\w+)\)s")
TABLE = re.compile(
    r"\b(from|join|into|update|using)\s+rag\.(rag_\w+)(?:\s+(?:as\s+)?(?!on\b|where\b|set\b|using\b|cross\b|left\b)(\w+))?"
)

every_query = pytest.mark.parametrize("name", [file.stem for file in FILES])


def statement(name: str) -> str:
    """The text of a query without its comments."""
    return re.sub(r"--[^\n]*", "", query(name)).strip()


def without_strings(text: str) -> str:
    return re.sub(r"'(?:[^']|'')*'", "''", text)


def test_there_are_queries() -> None:
    assert len(FILES) >= 17


@every_query
def test_a_file_is_a_single_statement(name: str) -> None:
    assert ";" not in without_strings(statement(name))


@every_query
def test_a_file_begins_with_what_it_is_for(name: str) -> None:
    first, *_ = query(name).splitlines()
    assert re.match(r"-- [A-Z]", first)
    assert len(first.split()) >= 5


@every_query
def test_the_header_names_every_parameter(name: str) -> None:
    header = " ".join(line for line in query(name).splitlines() if line.startswith("--"))
    if "as the columns of" in header or "Parameters as in" in header:
        return
    words = set(re.findall(r"\w+", header))
    assert sorted(set(PARAMETER.findall(statement(name))) - words) == []


@every_query
def test_parameters_in_a_header_carry_no_colon_and_no_percent_sign(name: str) -> None:
    header = "\n".join(line for line in query(name).splitlines() if line.startswith("--"))
    assert re.findall(r"(?<![:\w]):\w|%", header) == []


@every_query
def test_a_query_is_asked_by_the_product(name: str) -> None:
    sources = [*(CHECKOUT / "rag").rglob("*.py"), *(CHECKOUT / "api").rglob("*.py")]
    assert any(f'"{name}"' in source.read_text(encoding="utf-8") for source in sources)


def test_every_query_that_the_product_asks_for_is_there() -> None:
    asked = set()
    for source in [*(CHECKOUT / "rag").rglob("*.py"), *(CHECKOUT / "api").rglob("*.py")]:
        text = source.read_text(encoding="utf-8")
        asked |= set(re.findall(r"session\.(?:rows?|run)\(\s*\"(\w+)\"", text))
        asked |= set(re.findall(r"Session\(connection\)\.(?:rows?|run)\(\s*\"(\w+)\"", text))
        asked |= set(re.findall(r"\bquery\(\"(\w+)\"\)", text))
    assert len(asked) >= 15
    assert asked <= {file.stem for file in FILES}


@every_query
def test_columns_are_listed(name: str) -> None:
    text = without_strings(statement(name)).replace("count(*)", "")
    assert re.findall(r"(?:select|returning|,|\.)\s*\*", text) == []


@every_query
def test_identifiers_and_keywords_are_lower_case(name: str) -> None:
    assert re.findall(r"\b[A-Z]+\b", without_strings(statement(name))) == []


@every_query
def test_casts_are_in_the_long_form(name: str) -> None:
    """`%(x)s::type` binds in psycopg and breaks in others; catalog columns may be cast either way."""
    assert re.findall(r"\)s::", statement(name)) == []


@every_query
def test_objects_of_ours_are_named_with_their_schema(name: str) -> None:
    assert re.findall(r"(?<![\w.])rag_[a-z]\w+", re.sub(r"rag\.rag_\w+", "", without_strings(statement(name)))) == []


@every_query
def test_every_table_reference_carries_the_tenant(name: str) -> None:
    """Otherwise a distributed database asks all of its workers."""
    text = statement(name)
    for verb, table, alias in TABLE.findall(text):
        if verb == "into":
            columns = re.search(rf"into rag\.{table}(?: as \w+)? \(([^)]*)\)", text)
            assert columns is not None, table
            assert "tenant_id" in re.findall(r"\w+", columns[1]), table
        elif alias:
            assert re.search(rf"\b{alias}\.tenant_id = (%\(tenant_id\)s|\w+\.tenant_id)", text), (table, alias)
        else:
            assert re.search(r"(?<![.\w])tenant_id = %\(tenant_id\)s", text), table


def test_the_tables_of_the_queries_are_recognised() -> None:
    found = {name: TABLE.findall(statement(name)) for name in (file.stem for file in FILES)}
    assert {name for name, tables in found.items() if not tables} == {
        "access_class",
        "begin_as",
        "check_barrier",
        "lock_source",
        "schema_revision",
        "search",
    }
    mentions = {name: len(re.findall(r"rag\.rag_\w+", statement(name))) for name in found}
    assert {name: len(tables) for name, tables in found.items()} == mentions | {"check_barrier": 0}


@every_query
def test_the_service_may_run_it(app: psycopg.Connection, name: str) -> None:
    """Parsed, planned and checked for privileges, with parameters of unknown value, and not executed."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    text = PARAMETER.sub(numbered, statement(name)).replace("%%", "%")
    with app.transaction(force_rollback=True):
        plan = app.execute(f"explain (generic_plan, costs off) {text}").fetchall()
    assert plan
