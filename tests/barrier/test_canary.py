"""The canary: silent on a deployment that is as it was made, without leaving anything; and heard when a barrier
whose policies are all there is defeated."""

from __future__ import annotations

import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row

from rag.canary import Canary, findings_of_all_logins
from rag.database import Session
from rag.resources import query
from tests.conftest import DIMENSIONS, SIGNER, Deployment


@asynccontextmanager
async def connected(deployment: Deployment, role: str = "postgres") -> AsyncIterator[AsyncConnection[DictRow]]:
    connection = await AsyncConnection.connect(
        deployment.url(role), autocommit=True, row_factory=dict_row, prepare_threshold=None
    )
    async with connection:
        yield connection


@pytest.fixture(scope="module")
def shared(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        yield clone


async def heard_by(connection: AsyncConnection[DictRow], role: str, *, thorough: bool = True) -> list[str]:
    """What a canary of one login has to say."""
    canary = Canary(
        session=Session(connection),
        signer=SIGNER,
        role=role,
        now=time.time(),
        dimensions=DIMENSIONS,
        thorough=thorough,
    )
    return [str(finding) for finding in await canary.findings()]


async def heard_by_all(connection: AsyncConnection[DictRow]) -> list[str]:
    """What a canary says that a superuser lets all logins hold in turn."""
    session = Session(connection)
    findings = await findings_of_all_logins(session, connection.execute, now=time.time(), dimensions=DIMENSIONS)
    return [str(finding) for finding in findings]


# --- a deployment that is as it was made ----------------------------------------------------------


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize("thorough", [False, True])
async def test_it_is_silent(shared: Deployment, role: str, thorough: bool) -> None:
    async with connected(shared, role) as connection:
        assert await heard_by(connection, role, thorough=thorough) == []


async def test_it_is_silent_for_all_logins(shared: Deployment) -> None:
    async with connected(shared) as connection:
        assert await heard_by_all(connection) == []


async def test_it_leaves_nothing(shared: Deployment) -> None:
    async with connected(shared) as superuser, connected(shared, "rag_app") as app:
        before = await contents(superuser)
        assert len(before) == 29 + 1
        assert await heard_by(app, "rag_app") == []
        assert await heard_by_all(superuser) == []
        assert await contents(superuser) == before


async def contents(superuser: AsyncConnection[DictRow]) -> dict[str, int]:
    """How many rows every table has, and how many roles there are."""
    cursor = await superuser.execute(
        "select relname from pg_class"
        " where relnamespace = 'rag'::regnamespace and relname like 'rag\\_%' and relkind = 'r'"
    )
    tables = ["pg_authid", *(f"rag.{row['relname']}" for row in await cursor.fetchall())]
    counts = {}
    for table in tables:
        row = await (await superuser.execute(f"select count(*) as rows from {table}")).fetchone()
        assert row is not None
        counts[table] = row["rows"]
    return counts


async def test_a_key_that_the_database_does_not_know_is_named(shared: Deployment) -> None:
    async with connected(shared) as superuser, superuser.transaction(force_rollback=True):
        await superuser.execute("delete from rag.rag_signing_keys")
        await superuser.execute("set local session authorization rag_app")
        await superuser.execute("set local search_path = rag, pg_temp")
        (said,) = await heard_by(superuser, "rag_app")
    assert said == (
        "canary as rag_app: The database does not accept the service's signature: check RAG_SIGNING_KEY and the clocks."
    )


# Not ways of reading: what begins, decides or writes.
NO_READING = {
    *("begin_as", "access_class", "class_reads", "bury_source", "share_project", "unshare_project"),
    *("give_feedback", "note_synchronisation"),
    # names of sources and counts, by the classes of my_classes
    "my_synchronisations",
    *("close_sources", "reopen_sources"),
    # single values of the principal, which my_classes and whoami show in full
    *("my_principal", "my_tenant_id", "my_user_id", "my_writable_access_ids"),
    # say nothing of any row
    *("text_search_config", "lexeme_total", "tenant_lock"),
    *("search_vector", "text_vector", "prepared_vector", "unspaced_vector", "unspaced_letters", "unspaced_unit"),
    # what look_at_source says, for processes of an earlier version; and what asks it and nothing else
    *("find_source", "retraction_of", "open_source"),
    # jobs and claims, which are each principal's own or digests: tests/barrier/test_jobs_barrier.py
    *("enqueue_job", "record_request", "my_request", "my_job", "cancel_my_job", "settle_job", "queue_depth"),
    *("my_waiting_job", "holds_job"),
    # keys and digests of what my_documents shows in full
    "my_origin",
    *("claim_source", "claim_source_as", "renew_claim", "release_claim"),
    # conversations, which are each principal's own: tests/barrier/test_conversation_barrier.py
    *("post_message", "claim_messages", "my_messages", "my_summaries", "claimed_messages", "add_summary"),
    # one figure, of all of a tenant, that operators alone write
    "my_min_similarity",
    # take and count, and figures of all of a tenant
    *("take_token", "take_token_as", "charge_quota", "my_limits"),
    # which model is searched, and whether one may be written
    *("active_model", "check_model"),
    # counts among what my_chunks shows in full, while there is a second model
    "compare_models",
    # keys of services, for a proof that only the service can give
    "load_service_keys",
}


async def test_it_reads_through_everything_that_the_service_and_analysts_may_read_through(shared: Deployment) -> None:
    async with connected(shared) as superuser:
        cursor = await superuser.execute(
            """
            select distinct function.proname as name
            from pg_proc as function
            cross join unnest(array['rag_app', 'rag_publisher', 'rag_analyst']) as role (name)
            where function.pronamespace = 'rag'::regnamespace
                and function.proowner <> 10
                and has_function_privilege(role.name, function.oid, 'execute')
                and not exists (select from pg_depend where objid = function.oid and deptype = 'e')
            union
            select relation.relname
            from pg_class as relation
            cross join unnest(array['rag_app', 'rag_publisher', 'rag_analyst']) as role (name)
            where relation.relnamespace = 'rag'::regnamespace
                and relation.relname <> 'alembic_version'
                and relation.relkind in ('r', 'v')
                and has_any_column_privilege(role.name, relation.oid, 'select')
            """
        )
        ways = {row["name"] for row in await cursor.fetchall()}
    read = set(re.findall(r"\brag\.(\w+)", query("doctor_read") + query("doctor_read_keys")))
    assert len(ways) >= 20
    assert ways - NO_READING - read == set()


# --- barriers that are defeated ---------------------------------------------------------------------


@dataclass(frozen=True)
class Defeat:
    """What a superuser changes, and what the canary has to say then."""

    heard: str
    """The beginning of a message."""
    sql: str = ""
    function: str = ""
    view: str = ""
    """A function or a view of which `old` becomes `new`."""
    old: str = ""
    new: str = ""
    at_start: str | None = None
    """The login whose quick canary, as at the start of the service, hears it as well."""


APP, PUBLISHER = "rag_app", "rag_publisher"

DEFEATS = [
    # what policies call
    Defeat(
        "canary as rag_app: another user sees the class of the user document through",
        function="classes_of(record)",
        old="    if me.user_scope is not null then",
        new="    if true then return array(select class.access_id from rag_access_classes as class); end if;\n"
        "    if me.user_scope is not null then",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: their owner with other tags sees the user document through",
        function="classes_of(record)",
        old="class.tags && me.tags",
        new="true",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user sees the project document through",
        function="classes_of(record)",
        old="membership.member_user_id = me.user_id",
        new="true",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: their owner in another project sees the project document through",
        function="classes_of(record)",
        old="(me.project_id = '*' or class.project_id = me.project_id)",
        new="true",
    ),
    Defeat(
        # Whose classes a plan has folded depends on who came first: somebody else's, or nobody's.
        "canary as ",
        sql="alter function rag.my_access_ids() immutable",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: a member who may only read changes their document",
        function="my_classes()",
        old="and membership.may_write",
        new="",
    ),
    Defeat(
        "canary as rag_app: their owner changes what is public",
        function="my_classes()",
        old="session_user = 'rag_publisher'",
        new="true",
    ),
    Defeat(
        "canary as rag_app: their owner names other tags than those of the class",
        function="class_reads(bigint, text, bigint, text, text[])",
        old="and class.tags = class_reads.tags",
        new="",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: their owner publishes",
        function="access_class(text, bigint, text, text[])",
        old="session_user = 'rag_publisher'",
        new="true",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user has their class for writing",
        function="access_class(text, bigint, text, text[])",
        old="when 'user' then access_class.user_id = me.user_id",
        new="when 'user' then true",
        at_start=APP,
    ),
    # identity
    Defeat(
        "canary as rag_app: somebody with a key of their own sees the user document through",
        function="signature_holds(text[], text)",
        old="coalesce(code = piece[3], false)",
        new="code is not null",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: somebody with another's signature sees the user document through",
        function="signature_holds(text[], text)",
        old="coalesce(code = piece[3], false)",
        new="code is not null",
    ),
    Defeat(
        "canary as rag_app: somebody without a signature sees the user document through",
        function="my_principal()",
        old="current_setting('app.signature', true)\n            ) then",
        new="current_setting('app.signature', true)\n            ) is not null then",
    ),
    Defeat(
        "canary as rag_app: somebody with an old signature sees the user document through",
        function="signature_holds(text[], text)",
        old="not between 0 and 43200",
        new="is null",
    ),
    Defeat(
        "canary as canary_of_palisade: an analyst of another tenant sees the user document through",
        function="my_principal()",
        old="session_user in ('rag_app', 'rag_publisher', 'rag_worker')",
        new="true",
    ),
    # rights that policies do not bind
    Defeat(
        "canary as rag_app: another user sees the user document through my_documents",
        sql="alter function rag.my_documents() owner to {superuser}",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: the same user of another tenant sees the user document through my_chunks",
        sql="alter function rag.my_chunks() owner to {superuser}",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_publisher: another user sees the user document through",
        sql="alter role rag_principal bypassrls",
        at_start=PUBLISHER,
    ),
    Defeat(
        "canary as rag_app: the same user of another tenant removes their chunks",
        sql="alter role rag_app superuser",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_publisher: nobody sees the public document through",
        sql="alter table rag.rag_documents disable row level security",
        at_start=PUBLISHER,
    ),
    # policies
    Defeat(
        "canary as rag_app: another user sees the user document through",
        sql="create policy second on rag.rag_chunks for select to rag_app using (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: the same user of another tenant sees the user document through",
        sql="alter policy read_documents on rag.rag_documents using (true);"
        " alter policy own_tenant_select on rag.rag_documents using (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user sees the logged question through",
        sql="alter policy read_logs on rag.rag_query_logs using (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user logs a question as theirs",
        sql="alter policy add_logs on rag.rag_query_logs with check (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user is audited as them",
        sql="alter policy add_assertions on rag.rag_assertions with check (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user retracts in their name",
        sql="alter policy add_retractions on rag.rag_retractions with check (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user sees the class of the user document through look_at_source of a deleted one",
        sql="alter policy read_tombstones on rag.rag_tombstones using (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: a member who may only read buries their source",
        sql="alter policy add_tombstones on rag.rag_tombstones with check (true)",
    ),
    Defeat(
        "canary as rag_app: another user adds a chunk to their document",
        sql="alter policy add_chunks on rag.rag_chunks with check (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user adds a document to their class",
        sql="alter policy add_documents on rag.rag_documents with check (true)",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: another user sees the shared project through my_members",
        sql="alter policy read_members on rag.rag_project_members using (true)",
        at_start=APP,
    ),
    # analysts and operators
    Defeat(
        "canary as canary_of_palisade: an analyst of no users sees the user document through v_documents",
        function="my_listed_documents()",
        old="where me.user_scope = 'metadata'",
        new="where me.user_scope is not null",
    ),
    Defeat(
        "canary as canary_of_palisade: an analyst of no text of users sees the user document through titles of",
        view="v_documents",
        old="NULL::text AS title",
        new="'a title'::text AS title",
    ),
    Defeat(
        "canary as rag_operator: an operator may read the way that people do",
        sql="grant execute on all functions in schema rag to rag_operator;"
        " grant select on all tables in schema rag to rag_operator",
    ),
    Defeat(
        "canary as rag_operator: explain_access says the contrary of who sees the user document",
        function="explain_access(uuid, text, bigint, text, text[])",
        old="judged.same_tenant and judged.overlapping and (",
        new="judged.overlapping and (",
    ),
    Defeat(
        "canary as rag_operator: forget leaves rows in rag_query_logs",
        function="forget(text, bigint, text, text, text)",
        old="delete from rag_query_logs as log\n    where",
        new="delete from rag_query_logs as log\n    where false and",
    ),
    # what stops working is heard as well
    Defeat(
        "canary as all logins: cannot be planted or read: permission denied for function my_document (42501)",
        sql="revoke execute on function rag.my_document from rag_app",
        at_start=APP,
    ),
    Defeat(
        "canary as all logins: who has a class does not see it, and can write nothing",
        function="my_classes()",
        old="where class.tenant_id = me.tenant_id",
        new="where false",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: their owner does not see the user document through search",
        function="narrowed_access_ids(text)",
        old="return my_access_ids();",
        new="return '{}';",
        at_start=APP,
    ),
    Defeat(
        "canary as rag_app: their owner cannot remove their document",
        sql="alter policy remove_documents on rag.rag_documents using (false)",
        at_start=APP,
    ),
]


async def change(connection: AsyncConnection[DictRow], one: Defeat) -> None:
    if one.function or one.view:
        if one.function:
            text, name = "pg_get_functiondef(cast(%s as regprocedure))", f"rag.{one.function}"
        else:
            text, name = "pg_get_viewdef(cast(%s as regclass))", f"rag.{one.view}"
        row = await (await connection.execute(f"select {text} as text", (name,))).fetchone()
        assert row is not None
        assert one.old in row["text"], f"{name} has no {one.old}"
        definition = row["text"].replace(one.old, one.new)
        if one.view:
            definition = f"create or replace view {name} with (security_invoker, security_barrier) as {definition}"
        await connection.execute(definition)
    else:
        await connection.execute(one.sql.format(superuser=connection.info.user))


async def test_every_defeated_barrier_is_heard(
    shared: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    count = scaled(test=12, ci=len(DEFEATS), prove=len(DEFEATS))
    # Another part of them each time.
    chosen = DEFEATS if count >= len(DEFEATS) else random.sample(DEFEATS, count)
    unheard = {}
    for one in chosen:
        # A connection of its own: plans that functions have cached outlive a change of role that is undone.
        async with connected(shared) as superuser, superuser.transaction(force_rollback=True):
            await superuser.execute("set local search_path = rag, pg_temp")
            await change(superuser, one)
            said = await heard_by_all(superuser)
            if not any(message.startswith(one.heard) for message in said):
                unheard[one.heard] = said
        if one.at_start is not None:
            async with connected(shared) as superuser, superuser.transaction(force_rollback=True):
                await superuser.execute("set local search_path = rag, pg_temp")
                await change(superuser, one)
                await superuser.execute(f"set local session authorization {one.at_start}")
                if not await heard_by(superuser, one.at_start, thorough=False):
                    unheard[f"{one.heard}, at the start"] = []
    assert unheard == {}
    figure(f"canary: {len(chosen)} of {len(chosen)} defeated barriers heard, silent on one that holds")
