"""What an operator does in every tenant: keys, shared projects, and why somebody sees a document.

As rag_operator, which sees keys and names of rows and never a text; one connection, no principal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import Connection
from psycopg.rows import DictRow, dict_row

from rag import deployment, embedded
from rag.database import translated_errors
from rag.errors import DatabaseUnavailable, InvalidInput, SchemaMismatch
from rag.keys import ACTIONS, NewKey, new_key
from rag.principal import ALL_PROJECTS, Principal, check_name, check_user_id
from rag.resources import query
from rag.settings import Settings
from rag.store import SCOPES

OPERATOR = "rag_operator"


class Session:
    """One transaction of an operator."""

    def __init__(self, connection: Connection[DictRow]) -> None:
        self._connection = connection

    def rows(self, name: str, parameters: Mapping[str, Any]) -> list[DictRow]:
        """The rows of `sql/queries/{name}.sql`."""
        return self._connection.execute(query(name).encode(), parameters).fetchall()

    def row(self, name: str, parameters: Mapping[str, Any]) -> DictRow | None:
        """The first row of `sql/queries/{name}.sql`, None when there is none."""
        return self._connection.execute(query(name).encode(), parameters).fetchone()

    def run(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Run `sql/queries/{name}.sql` for its effect."""
        self._connection.execute(query(name).encode(), parameters)

    def run_text(self, statement: str) -> None:
        """Run a statement that the database itself put together: names of roles cannot be parameters."""
        self._connection.execute(statement.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """From where a database is operated; `server` is set for the embedded one."""

    operator_url: str
    administrator_url: str | None
    """Of a login that may make roles; None when none is named."""
    server: embedded.EmbeddedPostgres | None = None

    @property
    def default_tenant(self) -> str | None:
        return None if self.server is None else deployment.EMBEDDED_TENANT

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction as rag_operator. Raises the DatabaseError family, InvalidInput for another login."""
        with connected(self.operator_url, "RAG_OPERATOR_DATABASE_URL") as connection:
            if connection.info.user != OPERATOR:
                raise InvalidInput(
                    f"RAG_OPERATOR_DATABASE_URL logs in as {connection.info.user}, and must as {OPERATOR}",
                    field="RAG_OPERATOR_DATABASE_URL",
                )
            yield Session(connection)

    @contextmanager
    def administration(self) -> Iterator[Session]:
        """One transaction as the administrator. Raises like `session`, and InvalidInput when none is named."""
        if self.administrator_url is None:
            raise InvalidInput(
                "RAG_ADMIN_DATABASE_URL must be set: rag_operator may not change roles; "
                "--print shows what an administrator would have to run",
                field="RAG_ADMIN_DATABASE_URL",
            )
        with connected(self.administrator_url, "RAG_ADMIN_DATABASE_URL") as connection:
            yield Session(connection)


def locate(settings: Settings) -> Desk:
    """Find the database; start the embedded one when no other is named. It is not made here.

    Raises EmbeddedUnavailable, SchemaMismatch, DatabaseUnavailable, InvalidInput for a missing setting.
    """
    administrator = settings.rag_admin_database_url
    if settings.rag_operator_database_url is not None:
        return Desk(
            operator_url=settings.rag_operator_database_url.get_secret_value(),
            administrator_url=None if administrator is None else administrator.get_secret_value(),
        )
    if settings.rag_database_url is not None:
        raise InvalidInput(
            "RAG_OPERATOR_DATABASE_URL must be set as well: rag_app may not do this",
            field="RAG_OPERATOR_DATABASE_URL",
        )
    if not settings.rag_home.exists():
        home = settings.rag_home.absolute()
        raise DatabaseUnavailable(f"there is no embedded database in {home}; `rag db start` makes one, or set RAG_HOME")
    server = embedded.start(settings.rag_home)
    deployment.prepare(server, settings)
    return Desk(operator_url=server.url(OPERATOR), administrator_url=server.url("postgres"), server=server)


@contextmanager
def connected(url: str, setting: str, *, autocommit: bool = False) -> Iterator[Connection[DictRow]]:
    """A connection to the database that a setting names; unless `autocommit`, one transaction.

    Raises the DatabaseError family, and InvalidInput for what is no URL or has not the rights.
    """
    try:
        opened: Connection[DictRow] = psycopg.connect(
            url, row_factory=dict_row, autocommit=autocommit, connect_timeout=10
        )
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"the database of {setting} does not answer, or refuses the login") from error
    except psycopg.ProgrammingError as error:
        # Without what was given: it has a password in it.
        raise InvalidInput(f"{setting} is no connection URL", field=setting) from error
    with translated_errors():
        try:
            with opened as connection:
                yield connection
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.InvalidSchemaName,
        ) as error:
            raise SchemaMismatch("this database is not migrated, or not to this version: run `rag migrate`") from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise InvalidInput(f"the login of {setting} has not the rights for this", field=setting) from error


# --- signing keys --------------------------------------------------------------------------------


def add_signing_key(desk: Desk) -> str:
    """A new key, valid beside the others, as RAG_SIGNING_KEY takes it; shown this once."""
    with desk.session() as session:
        row = session.row("add_signing_key", {})
    assert row is not None
    return f"{row['key_id']}.{row['secret']}"


def retire_signing_key(desk: Desk, key_id: str, *, even_last: bool) -> bool:
    """End a signing key; what it signed is worthless at once. True when the embedded database was given another.

    Raises InvalidInput for an unknown key, and for the last one unless `even_last`.
    """
    with desk.session() as session:
        valid = {row["key_id"] for row in session.rows("list_signing_keys", {})}
    if key_id not in valid:
        raise InvalidInput(f"there is no signing key {key_id}", field="key_id")
    kept = None if desk.server is None else desk.server.signing_key()
    replaced = desk.server is not None and kept is not None and kept.startswith(f"{key_id}.")
    if replaced:
        assert desk.server is not None
        # The commands sign with what is kept beside the embedded database; it must not be a dead key.
        desk.server.keep_signing_key(add_signing_key(desk))
    elif valid == {key_id} and not even_last:
        raise InvalidInput(
            f"{key_id} is the last signing key, and without one nobody is let in: "
            "make another one with `rag keys sign`, or say --yes",
            field="key_id",
        )
    with desk.session() as session:
        session.run("retire_signing_key", {"key_id": key_id})
    return replaced


# --- keys of trusted services --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGrant:
    """What a new key is good for. None = no bound. Raises InvalidInput for what could never be used."""

    tenant_id: str
    name: str
    actions: tuple[str, ...]
    scopes: tuple[str, ...]
    """Scopes that it may write."""
    tags: tuple[str, ...] | None
    """Tags that it may assert and write."""
    act_as: bool
    """Whether it may name a user and a project."""
    user_ids: tuple[int, ...] | None
    project_ids: tuple[str, ...] | None
    valid_for: timedelta

    def __post_init__(self) -> None:
        check_name(self.tenant_id, field="tenant_id")
        check_name(self.name, field="name")
        _check_among(self.actions, ACTIONS, field="actions")
        _check_among(self.scopes, SCOPES, field="scopes")
        for user_id in self.user_ids or ():
            check_user_id(user_id)
        for project_id in self.project_ids or ():
            check_name(project_id, field="project_id")
        if not self.actions:
            raise InvalidInput("a key needs an action", field="actions")
        writes = {"ingest", "delete"} & set(self.actions)
        if writes and not self.scopes:
            raise InvalidInput("a key that may write needs a scope to write to", field="scopes")
        if self.scopes and not writes:
            raise InvalidInput("scopes are for writing, which is not among the actions", field="scopes")
        if not self.act_as and (set(self.scopes) - {"public"} or self.user_ids or self.project_ids):
            raise InvalidInput("users, projects and their scopes need --act-as", field="act_as")
        if self.valid_for <= timedelta():
            raise InvalidInput("a key must be valid for a while", field="expires")


def _check_among(values: Sequence[str], known: Sequence[str], *, field: str) -> None:
    if not set(values) <= set(known):
        raise InvalidInput(f"{field} must be among {', '.join(known)}", field=field)


def add_key(session: Session, grant: KeyGrant) -> NewKey:
    """Make a key; the database keeps a digest of its secret."""
    key = new_key()
    session.run(
        "add_key",
        {
            "tenant_id": grant.tenant_id,
            "key_id": key.key_id,
            "name": grant.name,
            "secret_sha256": key.secret_sha256,
            "actions": list(grant.actions),
            "scopes": list(grant.scopes),
            "tags": None if grant.tags is None else list(grant.tags),
            "act_as": grant.act_as,
            "user_ids": None if grant.user_ids is None else list(grant.user_ids),
            "project_ids": None if grant.project_ids is None else list(grant.project_ids),
            "valid_for": grant.valid_for,
        },
    )
    return key


def revoke_key(session: Session, key_id: str, *, tenant_id: str | None) -> list[DictRow]:
    """End a key; its tenant and name. Raises InvalidInput when there is no such key that is not revoked."""
    revoked = session.rows("revoke_key", {"key_id": key_id, "tenant_id": tenant_id})
    if not revoked:
        raise InvalidInput(f"there is no key {key_id} that is not revoked already", field="key_id")
    return revoked


# --- shared projects -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A project of one user that another one sees. Raises InvalidInput for what can be none."""

    tenant_id: str
    owner_user_id: int
    project_id: str
    member_user_id: int

    def __post_init__(self) -> None:
        check_name(self.tenant_id, field="tenant_id")
        check_user_id(self.owner_user_id, field="owner")
        check_user_id(self.member_user_id, field="member")
        check_name(self.project_id, field="project_id")
        if self.project_id == ALL_PROJECTS:
            raise InvalidInput("a project is shared by its name, and * is none", field="project_id")
        if self.owner_user_id == self.member_user_id:
            raise InvalidInput("the owner of a project is no member of it", field="member")

    @property
    def _columns(self) -> dict[str, Any]:
        return {
            "tenant_id": self.tenant_id,
            "owner_user_id": self.owner_user_id,
            "project_id": self.project_id,
            "member_user_id": self.member_user_id,
        }


def share(session: Session, membership: Membership, *, may_write: bool) -> None:
    """Let the member see the project, and write to it or not."""
    session.run("add_member", membership._columns | {"may_write": may_write})


def unshare(session: Session, membership: Membership) -> None:
    """End it. Raises InvalidInput when the project is not shared with them."""
    if session.row("remove_member", membership._columns) is None:
        raise InvalidInput("the project is not shared with this user", field="member")


# --- why somebody sees a document ----------------------------------------------------------------


def explain_access(session: Session, document_id: UUID, principal: Principal) -> list[DictRow]:
    """Each clause of the rule and whether it holds; no row for a document that is not there."""
    return session.rows(
        "explain_access",
        {
            "document_id": document_id,
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "project_id": principal.project_id,
            "tags": list(principal.tags),
        },
    )
