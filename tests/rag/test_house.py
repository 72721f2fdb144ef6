"""The rules of the house that no other tool checks: who may know whom, what stands where, what is named how."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag.resources import migrations_folder, sql_folder
from rag.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[2]
MODULES = {
    path.relative_to(CHECKOUT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("rag", "api")
    for path in sorted((CHECKOUT / package).rglob("*.py"))
    if "_sample" not in path.parts
}
RAG = [name for name in MODULES if name.startswith("rag/")]
QUERIES = sorted(path.stem for path in (sql_folder() / "queries").glob("*.sql"))


def imports(name: str) -> Iterator[str]:
    """The full names of all that a module imports, inside of functions too."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def texts(name: str) -> Iterator[tuple[int, str]]:
    """The line and the value of every string of a module that is no docstring."""
    docstrings = set()
    for node in ast.walk(MODULES[name]):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            value = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            yield node.lineno, value


def test_there_is_something_to_check():
    assert {"rag/ingest.py", "rag/answer.py", "api/app.py"} <= set(MODULES)
    assert {"search", "begin_as"} <= set(QUERIES)


# --- one direction: api → rag → sql ---------------------------------------------------------------


@pytest.mark.parametrize("name", RAG)
def test_rag_does_not_know_the_api(name: str):
    known = {module for module in imports(name) if module.split(".")[0] == "api"}
    assert known <= ({"api.serve.run"} if name == "rag/cli.py" else set())


@pytest.mark.parametrize("name", RAG)
def test_rag_speaks_no_http_to_its_callers(name: str):
    servers = {"fastapi", "starlette", "uvicorn", "http"}
    assert not {module for module in imports(name) if module.split(".")[0] in servers}
    arguments = {
        keyword.arg for node in ast.walk(MODULES[name]) if isinstance(node, ast.Call) for keyword in node.keywords
    }
    assert not arguments & {"status_code", "http_status"}


# As clients of model servers these read the numbers that others send.
HTTP_CLIENTS = {"rag/chat.py", "rag/embed.py", "rag/ollama.py", "rag/openai_chat.py"}
STATUS_WORDS = re.compile(r"\bstatus_code\b|\bHTTP_\d{3}|\bHTTPException\b|\bapplication/problem\+json\b")


@pytest.mark.parametrize("name", sorted(set(RAG) - HTTP_CLIENTS))
def test_http_numbers_and_words_stay_in_the_api(name: str):
    assert not STATUS_WORDS.findall((CHECKOUT / name).read_text(encoding="utf-8"))


# A statement begins with its verb and names what it works on.
STATEMENT = re.compile(
    r"^\s*(select\s|insert\s+into\s|update\s+\w+\s+set\s|delete\s+from\s|with\s+\w+\s+as\s|create\s|alter\s|drop\s"
    r"|grant\s|revoke\s|truncate\s|comment\s+on\s|set\s+(local\s|session\s)?\w+\s*(=|to)|begin\b|commit\b|lock\s+table\s)",
    re.IGNORECASE,
)
# What has to be asked before there is a schema that could have queries: which migration a database is at, the
# passwords of roles, the embedded server's first database.
SQL_ALLOWED = {"rag/migrate.py", "rag/frozen.py", "rag/embedded.py"}


@pytest.mark.parametrize("name", sorted(set(MODULES) - SQL_ALLOWED))
def test_statements_stand_in_sql_and_not_in_python(name: str):
    statements = [(line, text) for line, text in texts(name) if STATEMENT.match(text)]
    assert statements == []


@pytest.mark.parametrize("name", MODULES)
def test_no_statement_is_put_together_from_values(name: str):
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            if name in SQL_ALLOWED and node.values[0].value == "create database ":
                continue  # the name is a constant
            assert not STATEMENT.match(str(node.values[0].value)), f"{name}:{node.lineno}"


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_asked(query: str):
    assert any(text == query for name in RAG for _, text in texts(name))


def test_every_query_that_is_asked_exists():
    asked = {
        str(node.args[0].value)
        for name in RAG
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr in {"row", "rows", "rows_alone", "run"})
            or (isinstance(node.func, ast.Name) and node.func.id == "query")
        )
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    # The canary lists what it asks, with the names of its attempts.
    asked |= {text for _, text in texts("rag/canary.py") if text.startswith("doctor_")}
    assert asked == set(QUERIES)


# --- names ---------------------------------------------------------------------------------------

VAGUE = {"utils", "util", "helpers", "helper", "manager", "managers", "base", "common", "misc", "service", "services"}


def test_no_file_has_a_name_that_says_nothing():
    folders = ("rag", "api", "sql", "tests", "bench", "alembic")
    files = [path for folder in folders for path in (CHECKOUT / folder).rglob("*") if path.suffix in (".py", ".sql")]
    assert len(files) > 50
    # A service key is one of a trusted service, as spec 003 calls it.
    names = {path: path.stem.lower().replace("service_key", "") for path in files}
    assert [path for path, name in names.items() if set(re.split(r"[^a-z]+", name)) & VAGUE] == []


@pytest.mark.parametrize("name", MODULES)
def test_nothing_public_has_a_name_that_says_nothing(name: str):
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            words = re.findall(r"[A-Z]?[a-z]+", node.name)
            # RAGService is the name that spec 001 gives it.
            assert not {word.lower() for word in words} & (VAGUE - {"service"}), f"{name}: {node.name}"


def test_the_folder_of_migrations_does_not_shadow_the_library():
    assert not (migrations_folder() / "__init__.py").exists()
    assert not (CHECKOUT / "alembic" / "__init__.py").exists()
    import alembic

    assert alembic.__file__ is not None
    assert CHECKOUT / "alembic" not in Path(alembic.__file__).parents


# --- what is written down ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_says_what_it_is_for(name: str):
    module = MODULES[name]
    assert ast.get_docstring(module)
    silent = [
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("name", MODULES)
def test_no_error_is_swallowed_unnamed(name: str):
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.ExceptHandler):
            passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            assert passed_on or caught not in {"Exception", "BaseException"}, f"{name}:{node.lineno}"


def setting_names() -> set[str]:
    """The environment variables that are read: fields and their aliases."""
    names = set()
    for name, field in Settings.model_fields.items():
        names.add(name.upper())
        for alias in getattr(field.validation_alias, "choices", []):
            names.add(str(alias))
    return names


# RAG_TEST_*: tests/conftest.py. RAG_IMAGE and the like would be Docker's and are read by its files alone.
DOCUMENTS = [
    path
    for path in (
        *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((CHECKOUT / "docs").rglob("*.md")),
    )
    if path.exists()
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_every_setting_that_a_document_names_exists(path: Path):
    named = set(re.findall(r"\b(?:RAG|OLLAMA|OPENAI|CHAT)_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8")))
    of_tests = {name for name in named if name.startswith("RAG_TEST_")}
    read_by_tests = "\n".join(file.read_text(encoding="utf-8") for file in (CHECKOUT / "tests").rglob("*.py"))
    assert named - of_tests - setting_names() == set()
    assert {name for name in of_tests if name not in read_by_tests} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(CHECKOUT).as_posix())
def test_every_file_that_a_document_links_to_exists(path: Path):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_settings_are_read_in_one_place():
    readers = {
        name
        for name in MODULES
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    # tokens.py looks where tiktoken looks; terminal.py and model_process.py hand a program an environment.
    assert readers <= {"rag/tokens.py", "rag/terminal.py", "rag/embedded.py", "rag/model_process.py"}
