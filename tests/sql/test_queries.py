"""sql/queries/: one statement a file, written so that a reader and a distributed database can follow it."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from rag.resources import query, sql_folder
from tests.sql.world import refused_with

CHECKOUT = Path(__file__).parents[2]
FILES = sorted((sql_folder() / "queries").glob("*.sql"))
PARAMETER = re.compile(r"%\((\w+)\)[sb]")
TABLE = re.compile(
    r"\b(from|join|into|update|using)\s+rag\.(rag_\w+)(?:\s+(?:as\s+)?(?!on\b|where\b|set\b|using\b|cross\b|left\b)(\w+))?"
)

every_query = pytest.mark.parametrize("name", [file.stem for file in FILES])


def asker(name: str) -> str:
    """The login that asks a query: as its header says, else the service."""
    header = " ".join(line.lstrip("- ") for line in query(name).splitlines() if line.startswith("--"))
    named = re.search(r"\bas (rag_operator|rag_worker|rag_owner|a superuser)\b", header, re.IGNORECASE)
    logins = {
        None: "rag_app",
        "rag_operator": "rag_operator",
        "rag_worker": "rag_worker",
        "rag_owner": "superuser",
        "a superuser": "superuser",
    }
    return logins[named and named[1].lower()]


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


@pytest.mark.parametrize("name", [file.stem for file in FILES if asker(file.stem) == "rag_app"])
def test_every_table_reference_carries_the_tenant(name: str) -> None:
    """Otherwise a distributed database asks all of its workers. People may ask for all tenants at once."""
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


# Names of tables are values there.
ASKING_THE_CATALOG = (
    *("check_barrier", "doctor_schema", "doctor_surroundings"),
    *("second_indexes", "unchecked_models"),
)


def test_the_tables_of_the_queries_are_recognised() -> None:
    names = [file.stem for file in FILES if file.stem not in ASKING_THE_CATALOG]
    found = {name: TABLE.findall(statement(name)) for name in names}
    mentions = {name: len(re.findall(r"rag\.rag_\w+", statement(name))) for name in names}
    assert {name: len(tables) for name, tables in found.items()} == mentions
    assert sum(mentions.values()) >= 20


def refusal(connection: psycopg.Connection, name: str) -> str | None:
    """The SQLSTATE of parsing, planning and checking privileges, with parameters of unknown value; None for none."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    text = PARAMETER.sub(numbered, statement(name)).replace("%%", "%")
    return refused_with(connection, f"explain (generic_plan, costs off) {text}")


@every_query
def test_whoever_asks_a_query_may_run_it(request: pytest.FixtureRequest, app: psycopg.Connection, name: str) -> None:
    """And rag_app not what is an operator's or an administrator's, where it is about our tables and functions."""
    who = asker(name)
    asking = {"rag_app": "app", "rag_operator": "operator", "rag_worker": "worker", "superuser": "superuser"}[who]
    assert refusal(request.getfixturevalue(asking), name) is None
    if who != "rag_app" and re.search(r"\brag\.", without_strings(statement(name))):
        assert refusal(app, name) == "42501"
