"""Whom to ask instead: the owner of the primary tag, in the asker's tenant and for those who hold the tag alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from rag import operate
from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import InvalidInput
from rag.exchange import Passage, RAGRequest, RouteTarget
from rag.generate import open_generator
from rag.principal import Principal
from rag.route import find_target, primary_tag
from rag.settings import Settings
from rag.store import halfvec
from rag.tags import TagOwner, list_owners, remove_owner, set_owner
from tests.conftest import Deployment
from tests.rag.passages import passage

ANNA = Principal(tenant_id="acme", user_id=1, tags=("hr", "it", "public"))
PLAIN = Principal(tenant_id="acme", user_id=2)
NAMESAKE = Principal(tenant_id="umbrella", user_id=1, tags=("hr", "it", "public"))

LEAVE = "Parental leave is granted for twelve months and is applied for seven weeks ahead."
QUESTION = "Who painted the parental leave of the Sistine Chapel?"

Own = Callable[..., None]
Keep = Callable[..., Awaitable[UUID]]
Open = Callable[..., RAGService]


@pytest.fixture
def desk(deployment: Deployment) -> operate.Desk:
    return operate.Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)


@pytest.fixture
def own(desk: operate.Desk) -> Own:
    """`own("hr", user=7, email="…", tenant="acme")` names the owner of a tag."""

    def name(tag: str, *, user: int | None = None, email: str | None = None, tenant: str = "acme") -> None:
        with desk.session() as session:
            set_owner(session, TagOwner(tenant_id=tenant, name=tag, owner_user_id=user, owner_email=email))

    return name


@pytest.fixture
def keep(store: Callable[..., UUID], embedder: Embedder) -> Keep:
    async def write(principal: Principal, text: str, **fields: Any) -> UUID:
        (vector,) = await embedder.embed([text], purpose="document")
        return store(principal, text, embedding=halfvec(vector), embedding_model=embedder.model_id, **fields)

    return write


@pytest.fixture
async def opened(database: Database, embedder: Embedder) -> AsyncIterator[Open]:
    """`opened(…)` is a service that quotes; keyword arguments are settings."""
    services: list[RAGService] = []

    def opens(**changes: Any) -> RAGService:
        settings = Settings(_env_file=None, **({"rag_llm_provider": "extractive"} | changes))
        services.append(RAGService(settings, database, embedder, open_generator(settings)))
        return services[-1]

    yield opens
    for service in services:
        await service.generator.close()


async def target(
    database: Database, passages: list[Passage], *, principal: Principal = ANNA, **settings: Any
) -> RouteTarget:
    async with database.transaction(principal) as session:
        return await find_target(
            session,
            passages,
            principal=principal,
            settings=Settings(_env_file=None, **settings),
            why="Low confidence: 45%",
        )


# --- spec 001, names as there ---------------------------------------------------------------------


async def test_get_route_target_with_owner(database: Database, own: Own) -> None:
    own("hr", user=7, email="hr@acme.example")
    found = await target(database, [passage("a", tags=("hr", "public"))])
    assert found == RouteTarget(
        tag="hr",
        owner_user_id="7",
        owner_email="hr@acme.example",
        reason="Low confidence: 45%. Routing to hr owner",
        fallback=False,
    )


async def test_get_route_target_no_owner(database: Database, own: Own) -> None:
    own("it", user=8)
    found = await target(database, [passage("a", tags=("hr", "public"))], rag_admin_email="desk@acme.example")
    assert found == RouteTarget(
        tag="system",
        owner_user_id=None,
        owner_email="desk@acme.example",
        reason="Low confidence: 45%. No owner for tag 'hr' - routing to admin",
        fallback=True,
    )


async def test_get_route_target_empty_context(database: Database, own: Own) -> None:
    own("hr", user=7)
    found = await target(database, [], rag_admin_email="desk@acme.example")
    assert (found.tag, found.owner_user_id, found.owner_email) == ("system", None, "desk@acme.example")
    assert found.reason == "Low confidence: 45%. No context available - routing to admin"
    assert found.fallback


# --- which tag ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ([("hr",), ("it",), ("it",)], "it"),
        ([("hr",), ("it",)], "hr"),  # of equals that of the best passage
        ([("it",), ("hr",)], "it"),
        ([("hr", "it"), ("it",)], "it"),
        ([("it", "hr")], "hr"),  # and of one passage's the first by name
        ([("public",), ("public",), ("it", "public")], "it"),
        ([("secret",), ("secret",), ("hr", "secret")], "hr"),  # only what the asker holds
        ([("secret",)], None),
        ([("public",)], None),
        ([], None),
    ],
)
def test_the_primary_tag_is_what_most_passages_have(tags: list[tuple[str, ...]], expected: str | None) -> None:
    passages = [passage("a", number=number, tags=each) for number, each in enumerate(tags, 1)]
    assert primary_tag(passages, held=ANNA.tags) == expected


async def test_public_passages_have_nobody_to_ask(database: Database, own: Own) -> None:
    own("hr", user=7)
    found = await target(database, [passage("a")])
    assert (found.tag, found.fallback) == ("system", True)
    assert found.reason == "Low confidence: 45%. No specific tags in context - routing to admin"


# --- whose owner ----------------------------------------------------------------------------------


async def test_an_owner_of_another_tenant_is_never_named(database: Database, own: Own) -> None:
    """The same tag in both: each asker gets their own tenant's owner, or nobody."""
    passages = [passage("a", tags=("hr",))]
    own("hr", user=66, email="hr@umbrella.example", tenant="umbrella")
    assert (await target(database, passages)).fallback
    own("hr", user=7, email="hr@acme.example")
    assert (await target(database, passages)).owner_email == "hr@acme.example"
    assert (await target(database, passages, principal=NAMESAKE)).owner_email == "hr@umbrella.example"


async def test_an_owner_is_named_to_nobody_who_does_not_hold_the_tag(database: Database, own: Own) -> None:
    own("hr", user=7, email="hr@acme.example")
    found = await target(database, [passage("a", tags=("hr", "public"))], principal=PLAIN)
    assert (found.tag, found.owner_user_id, found.fallback) == ("system", None, True)
    assert "hr" not in found.reason


@pytest.mark.parametrize(("exposed", "email"), [(True, "hr@acme.example"), (False, None)])
async def test_an_address_can_be_kept_back(database: Database, own: Own, exposed: bool, email: str | None) -> None:
    own("hr", user=7, email="hr@acme.example")
    found = await target(database, [passage("a", tags=("hr",))], rag_expose_owner_email=exposed)
    assert (found.owner_user_id, found.owner_email, found.fallback) == ("7", email, False)


async def test_an_owner_may_be_an_address_alone(database: Database, own: Own) -> None:
    own("hr", email="hr@acme.example")
    found = await target(database, [passage("a", tags=("hr",))])
    assert (found.owner_user_id, found.owner_email, found.fallback) == (None, "hr@acme.example", False)


async def test_the_next_question_goes_to_the_next_owner(
    database: Database, own: Own, desk: operate.Desk, opened: Open, keep: Keep
) -> None:
    await keep(ANNA, LEAVE, scope="public", tags=("hr",))
    service = opened()

    async def asked() -> tuple[str, str | None]:
        route = (await service.generate(RAGRequest(query=QUESTION, min_similarity=-1), principal=ANNA)).route_to
        assert route is not None
        return route.tag, route.owner_user_id

    assert await asked() == ("system", None)
    own("hr", user=7)
    assert await asked() == ("hr", "7")
    own("hr", user=8)
    assert await asked() == ("hr", "8")
    with desk.session() as session:
        remove_owner(session, tenant_id="acme", name="hr")
    assert await asked() == ("system", None)


# --- in an answer, and in the log -----------------------------------------------------------------


async def test_an_answer_names_the_owner_and_the_log_the_tag(
    own: Own, opened: Open, keep: Keep, deployment: Deployment
) -> None:
    await keep(ANNA, LEAVE, scope="public", tags=("hr",))
    own("hr", user=7, email="hr@acme.example")
    service = opened()
    response = await service.generate(RAGRequest(query=QUESTION, min_similarity=-1), principal=ANNA)
    assert response.action == "ROUTE"
    assert response.route_to is not None
    assert (response.route_to.tag, response.route_to.owner_email) == ("hr", "hr@acme.example")
    assert re.fullmatch(r"Low confidence: \d+%\. Routing to hr owner", response.route_to.reason)
    nothing = await service.generate(RAGRequest(query="parental leave"), principal=NAMESAKE)
    sure = await service.generate(
        RAGRequest(query="For how long is parental leave granted?", min_similarity=-1), principal=ANNA
    )
    assert sure.action == "CITE"
    with deployment.cluster.superuser(deployment.name) as connection:
        logged = connection.execute(
            "select action, route_tag, route_fallback from rag.rag_query_logs order by created_at"
        ).fetchall()
    assert logged == [("ROUTE", "hr", False), ("ROUTE", "system", True), ("CITE", None, None)]
    assert nothing.route_to is not None
    assert nothing.route_to.reason == "No relevant documents found"
    with deployment.transaction(ANNA) as connection:
        seen = connection.execute("select query_id::text, route_tag, confidence from v_routed_queries").fetchall()
    assert seen == [(response.query_id, "hr", response.confidence.overall)]


# --- who says so ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "field"),
    [
        ({"name": "public"}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "t" * 65}, "name"),
        ({"tenant_id": ""}, "tenant_id"),
        ({"owner_user_id": None}, "owner"),
        ({"owner_user_id": 0}, "owner"),
        ({"owner_email": "nobody"}, "email"),
        ({"owner_email": "a@b@c.example"}, "email"),
        ({"owner_email": "a@b.example\n"}, "email"),
        ({"owner_email": "a" * 250 + "@b.cd"}, "email"),
    ],
)
def test_what_can_be_no_owner_is_refused(owner: dict[str, Any], field: str) -> None:
    plain = {"tenant_id": "acme", "name": "hr", "owner_user_id": 7, "owner_email": None}
    with pytest.raises(InvalidInput) as caught:
        TagOwner(**(plain | owner))
    assert caught.value.field == field


def test_owners_are_listed_by_tenant_and_removed_once(own: Own, desk: operate.Desk) -> None:
    own("it", user=8)
    own("hr", user=7, email="hr@acme.example")
    own("hr", user=66, tenant="umbrella")
    with desk.session() as session:
        listed = [(row["tenant_id"], row["name"], row["owner_user_id"]) for row in list_owners(session, None)]
        assert listed == [("acme", "hr", 7), ("acme", "it", 8), ("umbrella", "hr", 66)]
        remove_owner(session, tenant_id="acme", name="hr")
        assert [row["name"] for row in list_owners(session, "acme")] == ["it"]
        with pytest.raises(InvalidInput):
            remove_owner(session, tenant_id="acme", name="hr")
