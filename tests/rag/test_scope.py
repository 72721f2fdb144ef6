"""What a list of ids or paths stands for: outsiders learn as much of a hidden document as of a missing one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.database import Database
from rag.errors import DocumentNotFound, InvalidInput, MultipleOrganizations
from rag.principal import Principal
from rag.resources import query
from rag.scope import organization_of, resolve_scope_ids, validate_document_access
from tests.conftest import Deployment, begin

MARA = Principal(tenant_id="acme", user_id=7)
MARA_ON_ALL = Principal(tenant_id="acme", user_id=7, project_id="*")
ILSE = Principal(tenant_id="acme", user_id=8)
# The same person, and number, elsewhere.
MARA_AT_UMBRA = Principal(tenant_id="umbra", user_id=7)

Keep = Callable[..., UUID]


@pytest.fixture
def keep(deployment: Deployment) -> Keep:
    """`keep(principal, source_id, …)` writes a document by plain SQL, and returns its id."""

    def write(
        principal: Principal,
        source_id: str,
        *,
        scope: str = "user",
        project_id: str | None = None,
        owner_user_id: int | None = None,
        tags: tuple[str, ...] = ("public",),
        source_type: str = "markdown",
        document_id: UUID | None = None,
    ) -> UUID:
        document_id = document_id or uuid4()
        role = "rag_publisher" if scope == "public" else "rag_app"
        owner = None if scope == "public" else owner_user_id or principal.user_id
        with deployment.transaction(principal, role=role) as connection:
            row = connection.execute(
                "select access_class(%s, %s, %s, %s)", (scope, owner, project_id, list(tags))
            ).fetchone()
            assert row is not None
            connection.execute(
                """
                insert into rag_documents (
                    tenant_id, access_id, id, scope, user_id, project_id, tags,
                    source_type, source_id, source_hash, title, body
                )
                select tenant_id, access_id, %s, scope, user_id, project_id, tags, %s, %s, 'hash', 'A document', 'Text'
                from my_classes()
                where access_id = %s
                """,
                (document_id, source_type, source_id, row[0]),
            )
        return document_id

    return write


# --- ids -----------------------------------------------------------------------------------------


async def test_ids_are_resolved_each_once_in_the_order_in_which_they_are_listed(database: Database, keep: Keep):
    one, two = keep(MARA, "one.md"), keep(MARA, "two.md")
    for listed in ([two, one, two], [str(two), str(one), str(two).upper()]):
        resolved = await resolve_scope_ids(database, [MARA], listed)
        assert (resolved.document_ids, resolved.organization_id) == ((two, one), "acme")
    assert await validate_document_access(database, [MARA], [two, one, two]) == {two: "acme", one: "acme"}
    assert await organization_of(database, [MARA], [two, one]) == "acme"


HEXADECIMAL = "0e7c1d8f5a2b4c3d9e8f7a6b5c4d3e2f"


@pytest.mark.parametrize(
    "source_id",
    [
        HEXADECIMAL,
        f"{{{UUID(HEXADECIMAL)}}}",
        f"urn:uuid:{UUID(HEXADECIMAL)}",
        f"{UUID(HEXADECIMAL)}.md",
        str(UUID(HEXADECIMAL)).replace("1", "١"),
        str(UUID(HEXADECIMAL)).replace("1", "１"),
    ],
)
async def test_what_is_not_written_as_an_id_is_a_path(database: Database, keep: Keep, source_id: str):
    document_id = keep(MARA, source_id)
    assert (await resolve_scope_ids(database, [MARA], [source_id])).document_ids == (document_id,)


# --- paths ---------------------------------------------------------------------------------------


async def test_paths_are_resolved_in_the_order_in_which_they_are_listed(database: Database, keep: Keep):
    one, two = keep(MARA, "handbook/one.md"), keep(MARA, "handbook/two.md")
    keep(MARA, "handbook/three.md")
    listed = ["handbook/two.md", "handbook/one.md", "handbook/two.md"]
    resolved = await resolve_scope_ids(database, [MARA], listed)
    assert (resolved.document_ids, resolved.organization_id) == ((two, one), "acme")


async def test_a_path_stands_for_every_document_of_that_source_that_may_be_read(database: Database, keep: Keep):
    readable = {
        keep(MARA, "readme.md"),
        keep(MARA, "readme.md", source_type="text"),
        keep(MARA, "readme.md", scope="public"),
        keep(MARA_ON_ALL, "readme.md", scope="project", project_id="orion"),
    }
    keep(ILSE, "readme.md")
    keep(MARA_AT_UMBRA, "readme.md")
    resolved = await resolve_scope_ids(database, [MARA_ON_ALL], ["readme.md"])
    assert set(resolved.document_ids) == readable
    assert len(resolved.document_ids) == 4


@pytest.mark.parametrize(
    "near",
    [
        *("handbook", "handbook/", "handbook/refunds", "refunds.md", "Handbook/refunds.md", "handbook/%", "handbook/*"),
        *("handbook/refunds.md/", "./handbook/refunds.md", "handbook//refunds.md", "handbook\\refunds.md"),
    ],
)
async def test_a_path_is_the_whole_source_id(database: Database, keep: Keep, near: str):
    keep(MARA, "handbook/refunds.md")
    with pytest.raises(DocumentNotFound):
        await resolve_scope_ids(database, [MARA], [near])


# --- who is told what ----------------------------------------------------------------------------

# The rule: how the document is kept, by whom, and then who may and who may not read it.
RULES: dict[str, tuple[dict[str, Any], Principal, Principal, Principal]] = {
    "own": ({}, MARA, MARA, ILSE),
    "own, and somebody without a user": ({}, MARA, MARA, Principal(tenant_id="acme")),
    "own, in another tenant": ({}, MARA, MARA, MARA_AT_UMBRA),
    "public": ({"scope": "public"}, MARA, Principal(tenant_id="acme"), Principal(tenant_id="umbra")),
    "tags": (
        {"tags": ("hr",), "scope": "public"},
        Principal(tenant_id="acme", user_id=7, tags=("hr",)),
        Principal(tenant_id="acme", user_id=8, tags=("hr", "public")),
        MARA,
    ),
    "own project": ({"scope": "project", "project_id": "orion"}, MARA_ON_ALL, MARA_ON_ALL, MARA),
    "own project, by its name": (
        {"scope": "project", "project_id": "orion"},
        MARA_ON_ALL,
        Principal(tenant_id="acme", user_id=7, project_id="orion"),
        Principal(tenant_id="acme", user_id=7, project_id="lyra"),
    ),
    "shared project": (
        {"scope": "project", "project_id": "shared"},
        MARA_ON_ALL,
        Principal(tenant_id="acme", user_id=8, project_id="shared"),
        Principal(tenant_id="acme", user_id=9, project_id="shared"),
    ),
}


@pytest.mark.parametrize("by", ["id", "path"])
@pytest.mark.parametrize("rule", RULES)
async def test_an_outsider_of_a_rule_is_told_what_is_said_of_a_missing_document(
    database: Database, deployment: Deployment, keep: Keep, rule: str, by: str
):
    how, author, insider, outsider = RULES[rule]
    with deployment.transaction(MARA) as connection:
        connection.execute("select share_project('shared', 8, false)")
    document_id = keep(author, "plan.md", **how)
    own = keep(outsider, "mine.md") if outsider.user_id else None
    there: UUID | str = document_id if by == "id" else "plan.md"
    missing: UUID | str = uuid4() if by == "id" else "no-plan.md"
    mine: list[Any] = [] if own is None else [own if by == "id" else "mine.md"]

    assert (await resolve_scope_ids(database, [insider], [there])).document_ids == (document_id,)
    refusals = set()
    for listed in ([there], [missing], [*mine, there], [missing, *mine], [there, missing]):
        with pytest.raises(DocumentNotFound) as refused:
            await resolve_scope_ids(database, [outsider], listed)
        refusals.add((type(refused.value), refused.value.args, refused.value.field))
    assert refusals == {(DocumentNotFound, ("No such document.",), "document_ids")}


async def test_access_to_all_is_refused_for_one_that_is_hidden(database: Database, keep: Keep):
    mine, hers = keep(MARA, "one.md"), keep(ILSE, "two.md")
    assert await validate_document_access(database, [MARA], [mine]) == {mine: "acme"}
    for listed in ([mine, hers], [mine, uuid4()]):
        with pytest.raises(DocumentNotFound):
            await validate_document_access(database, [MARA], listed)
        with pytest.raises(DocumentNotFound):
            await organization_of(database, [MARA], listed)


# --- organizations -------------------------------------------------------------------------------


async def test_whoever_is_in_two_organizations_asks_in_the_one_of_the_documents(database: Database, keep: Keep):
    here, there = keep(MARA, "here.md"), keep(MARA_AT_UMBRA, "there.md")
    both = [MARA, MARA_AT_UMBRA]
    assert await organization_of(database, both, [here]) == "acme"
    assert (await resolve_scope_ids(database, both, [there])).organization_id == "umbra"
    assert (await resolve_scope_ids(database, both, ["there.md"])).document_ids == (there,)
    assert await validate_document_access(database, both, [here, there]) == {here: "acme", there: "umbra"}


async def test_documents_of_two_own_organizations_are_refused_as_such(database: Database, keep: Keep):
    here, there = keep(MARA, "here.md"), keep(MARA_AT_UMBRA, "there.md")
    both = [MARA, MARA_AT_UMBRA]
    for listed in ([here, there], ["there.md", "here.md"]):
        with pytest.raises(MultipleOrganizations) as refused:
            await resolve_scope_ids(database, both, listed)
        assert refused.value.field == "document_ids"
    with pytest.raises(MultipleOrganizations):
        await organization_of(database, both, [here, there])


async def test_a_path_that_two_own_organizations_have_names_neither(database: Database, keep: Keep):
    here = keep(MARA, "readme.md")
    keep(MARA_AT_UMBRA, "readme.md")
    with pytest.raises(MultipleOrganizations):
        await resolve_scope_ids(database, [MARA, MARA_AT_UMBRA], ["readme.md"])
    assert (await resolve_scope_ids(database, [MARA], ["readme.md"])).document_ids == (here,)


async def test_an_id_that_two_own_organizations_have_names_neither(database: Database, keep: Keep):
    # Ids are random, but whoever knows one can write it into a tenant of their own.
    copied = keep(MARA, "plan.md")
    keep(MARA_AT_UMBRA, "plan.md", document_id=copied)
    with pytest.raises(MultipleOrganizations):
        await validate_document_access(database, [MARA, MARA_AT_UMBRA], [copied])
    assert await organization_of(database, [MARA], [copied]) == "acme"


async def test_another_organization_is_never_spoken_of_to_somebody_who_is_not_in_it(database: Database, keep: Keep):
    here, there = keep(MARA, "here.md"), keep(MARA_AT_UMBRA, "there.md")
    for principals in ([MARA], [MARA, Principal(tenant_id="third", user_id=7)]):
        for listed in ([here, there], ["here.md", "there.md"]):
            with pytest.raises(DocumentNotFound):
                await resolve_scope_ids(database, principals, listed)


async def test_two_principals_of_one_organization_are_no_two_organizations(database: Database, keep: Keep):
    mine, hers = keep(MARA, "plan.md"), keep(ILSE, "other.md")
    resolved = await resolve_scope_ids(database, [MARA, MARA_ON_ALL, ILSE], ["plan.md", "other.md"])
    assert (resolved.document_ids, resolved.organization_id) == ((mine, hers), "acme")


async def test_nobody_finds_nothing(database: Database, deployment: Deployment, keep: Keep):
    document_id = keep(MARA, "plan.md", scope="public")
    for listed in ([document_id], ["plan.md"]):
        with pytest.raises(DocumentNotFound):
            await resolve_scope_ids(database, [], listed)
    with deployment.connect() as connection:
        assert connection.execute("select * from my_documents_among(%s)", ([document_id],)).fetchall() == []
        assert connection.execute("select * from my_sources_among(%s)", (["plan.md"],)).fetchall() == []


# --- what the caller sent ------------------------------------------------------------------------


async def test_ids_and_paths_are_not_mixed(database: Database, keep: Keep):
    document_id = keep(MARA, "plan.md")
    listings: list[list[Any]] = [[document_id, "plan.md"], ["plan.md", str(document_id)], [str(uuid4()), "missing.md"]]
    for listed in listings:
        with pytest.raises(InvalidInput) as refused:
            await resolve_scope_ids(database, [MARA], listed)
        assert (refused.value.message, refused.value.field) == (
            "document_ids must be ids or paths, not both",
            "document_ids",
        )


async def test_a_list_has_1_to_1000_entries(database: Database, keep: Keep):
    document_id = keep(MARA, "plan.md")
    listings: list[tuple[list[Any], bool]] = [
        *(([one] * 1000, True) for one in (document_id, "plan.md")),
        *(([one] * 1001, False) for one in (document_id, "plan.md")),
        ([], False),
    ]
    for listed, accepted in listings:
        if accepted:
            assert (await resolve_scope_ids(database, [MARA], listed)).document_ids == (document_id,)
            continue
        with pytest.raises(InvalidInput, match="must list 1 to 1000") as refused:
            await resolve_scope_ids(database, [MARA], listed)
        assert refused.value.field == "document_ids"
    for listed in ([], [document_id] * 1001):
        with pytest.raises(InvalidInput, match="must list 1 to 1000"):
            await validate_document_access(database, [MARA], listed)


@pytest.mark.parametrize("path", ["", " ", "a\0b", "a\nb", " plan.md", "plan.md ", "a\ud800b", "p" * 513])
async def test_what_no_source_can_be_called_is_refused_before_it_is_looked_for(database: Database, path: str):
    with pytest.raises(InvalidInput) as refused:
        await resolve_scope_ids(database, [MARA], ["plan.md", path])
    assert (type(refused.value), refused.value.field) == (InvalidInput, "document_ids")


@pytest.mark.parametrize("path", ["p" * 512, "ж" * 256, "%", "' or true --", "документы/план.md", "a\u202eb"])
async def test_what_a_source_can_be_called_is_found(database: Database, keep: Keep, path: str):
    document_id = keep(MARA, path)
    assert (await resolve_scope_ids(database, [MARA], [path])).document_ids == (document_id,)


async def test_a_path_longer_than_any_source_can_be_is_merely_missing(database: Database):
    with pytest.raises(DocumentNotFound):
        await resolve_scope_ids(database, [MARA], ["ж" * 512])


# --- what it costs -------------------------------------------------------------------------------


@pytest.fixture
def library(deployment: Deployment) -> Deployment:
    """Twelve small classes and a large one of Mara's, and as many of Ilse's."""
    with deployment.cluster.superuser(deployment.name) as connection:
        for access_id, user_id, project, documents in [
            (100 * user_id + number, user_id, f"project-{number}", 5000 if number == 0 else 12)
            for user_id in (7, 8)
            for number in range(13)
        ]:
            connection.execute(
                """
                insert into rag.rag_access_classes (
                    tenant_id, access_id, scope, user_id, project_id, tags, tags_digest
                )
                values ('acme', %(access)s, 'project', %(user)s, %(project)s, '{public}', sha256('["public"]'))
                """,
                {"access": access_id, "user": user_id, "project": project},
            )
            connection.execute(
                """
                insert into rag.rag_documents (
                    tenant_id, access_id, scope, user_id, project_id, tags, source_type, source_id, source_hash, title,
                    body
                )
                select
                    'acme', %(access)s, 'project', %(user)s, %(project)s, '{public}', 'text',
                    %(access)s || '/' || number || '.md', 'hash', 'A document', 'Text'
                from generate_series(1, %(documents)s) as number
                """,
                {"access": access_id, "user": user_id, "project": project, "documents": documents},
            )
        connection.execute("vacuum analyze rag.rag_documents, rag.rag_access_classes")
    return deployment


def listed_of(deployment: Deployment, user_id: int) -> dict[str, list[Any]]:
    with deployment.cluster.superuser(deployment.name) as connection:
        rows = connection.execute(
            "select id, source_id from rag.rag_documents where user_id = %s order by source_id", (user_id,)
        ).fetchall()
    return {"documents_among": [row[0] for row in rows], "sources_among": [row[1] for row in rows]}


PARAMETER = {"documents_among": "document_ids", "sources_among": "source_ids"}


def cost(connection: psycopg.Connection, name: str, listed: list[Any]) -> tuple[int, int, str]:
    """Rows, buffers and plan of a query."""
    statement = "explain (analyze, buffers, timing off, summary off, format json) " + query(name)
    connection.execute(statement.encode(), {PARAMETER[name]: listed})
    row = connection.execute(statement.encode(), {PARAMETER[name]: listed}).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    shape = {key: value for key, value in plan.items() if "Blocks" not in key and "Actual" not in key}
    buffers = int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])
    return int(plan["Actual Rows"]), buffers, json.dumps(shape, sort_keys=True)


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan", "force_custom_plan"])
def test_what_is_hidden_costs_what_is_missing(
    library: Deployment, plans: str, scaled: Callable[..., int], figure: Callable[[str], None]
):
    pairs = scaled(test=40, ci=170, prove=1700)
    hidden = listed_of(library, 8)
    numbers = random.Random(20261122)
    with library.connect() as connection:
        connection.execute(f"set plan_cache_mode = {plans}")
        with connection.transaction():
            begin(connection, MARA_ON_ALL)
            # Reading the catalog, and planning for good after five runs, cost buffers that are nobody's.
            for name in hidden:
                for _ in range(4):
                    cost(connection, name, hidden[name][:2])
            for number in range(pairs):
                name = ("documents_among", "sources_among")[number % 2]
                size = numbers.choice((1, 1, 2, 30))
                there = numbers.sample(hidden[name], size)
                # Next to it in every index.
                missing = [UUID(int=one.int ^ 1) if isinstance(one, UUID) else one + "." for one in there]
                arms = [there, missing]
                numbers.shuffle(arms)
                # Whoever analyses a table meanwhile empties our caches of the catalog; a leak is there each time.
                for _ in range(3):
                    one, other = (cost(connection, name, listed) for listed in arms)
                    if one == other:
                        break
                assert one == other
                assert one[0] == 0
    figure(f"{pairs} pairs of hidden and missing documents, {plans}: the same buffers and plans")


@pytest.mark.parametrize("name", ["documents_among", "sources_among"])
def test_a_large_class_is_not_read_through_for_one_document(library: Deployment, name: str):
    own = listed_of(library, 7)[name]
    with library.connect() as connection, connection.transaction():
        begin(connection, MARA_ON_ALL)
        rows, buffers, _ = cost(connection, name, [own[17]])
        assert rows == 1
        # 13 classes, at most 6 pages each beside those of the identity; the large one has more than 100.
        assert buffers < 100
