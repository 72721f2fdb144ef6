"""What askers make of answers moves documents within their class, as far as RAG_FEEDBACK_BOOST says, and no further."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import InvalidInput, QueryNotFound
from rag.exchange import RAGRequest
from rag.generate import open_generator
from rag.principal import Principal
from rag.recheck import MAX_CITATIONS, CitedSource
from rag.settings import Settings
from tests.conftest import Deployment, unit_vector

ANNA = Principal(tenant_id="acme", user_id=1)
BORIS = Principal(tenant_id="acme", user_id=2)
NAMESAKE = Principal(tenant_id="umbrella", user_id=1)
# In the order of their scores: by words alone, the shorter text is the better one.
FIRST = "palisade record"
SECOND = "palisade record and more words"

Store = Callable[..., UUID]
Rate = Callable[..., None]


@pytest.fixture
def service(database: Database, embedder: Embedder) -> RAGService:
    settings = Settings(_env_file=None, rag_llm_provider="extractive")
    return RAGService(settings, database, embedder, open_generator(settings))


@pytest.fixture
def rate(deployment: Deployment) -> Rate:
    """`rate(principal, document, rating)`: asks, gets the document back, and says something of it."""

    def say(principal: Principal, document: UUID, rating: int | None = 1, *, clicked: bool = False) -> None:
        with deployment.transaction(principal) as connection:
            place = {"tenant": principal.tenant_id, "user": principal.user_id, "id": uuid4(), "document": document}
            connection.execute(
                "insert into rag_query_logs (tenant_id, id, user_id, query_hash, query_length, mode, result_count,"
                " citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)"
                " values (%(tenant)s, %(id)s, %(user)s, 'hash', 4, 'hybrid', 1, 0, 0, 1, 0, 1)",
                place,
            )
            connection.execute(
                "insert into rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index, score,"
                " cited) values (%(tenant)s, %(id)s, %(user)s, 1, %(document)s, 0, 1, true)",
                place,
            )
            said = connection.execute(
                "select give_feedback(%(id)s, %(document)s, 0, %(rating)s, %(clicked)s)",
                place | {"rating": rating, "clicked": clicked},
            ).fetchone()
            assert said == (True,)

    return say


def found(deployment: Deployment, principal: Principal, boost: float, **arguments: Any) -> list[tuple[UUID, float]]:
    """Documents and scores of a search by words, best first."""
    more = "".join(f", {name} => {value}" for name, value in arguments.items())
    with deployment.transaction(principal) as connection:
        rows: list[tuple[UUID, float]] = connection.execute(
            f"select document_id, score from search('palisade', feedback_boost => %s, max_per_document => 5{more})",
            (boost,),
        ).fetchall()
    return rows


def order(deployment: Deployment, principal: Principal, boost: float, **arguments: Any) -> list[UUID]:
    return [document for document, _ in found(deployment, principal, boost, **arguments)]


@pytest.fixture
def pair(store: Store) -> tuple[UUID, UUID]:
    """Two public documents of acme, the better one first."""
    return store(ANNA, FIRST, scope="public"), store(ANNA, SECOND, scope="public")


# --- ranking --------------------------------------------------------------------------------------


def test_readers_lift_a_document_as_far_as_the_boost_goes(
    deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate
) -> None:
    """By words the second has 3/4 of the first's score: k is 3, so ranks 1 and 2 are worth 4/4 and 4/5."""
    first, second = pair
    assert found(deployment, ANNA, 0) == [(first, pytest.approx(1)), (second, pytest.approx(0.8))]
    for user in range(1, 10):
        rate(Principal(tenant_id="acme", user_id=user), second)
    # Nine voices and three neutral ones.
    lifted = 0.8 * (1 + 0.5 * 9 / 12)
    assert found(deployment, ANNA, 0.5) == [(second, pytest.approx(lifted)), (first, pytest.approx(1))]
    assert order(deployment, ANNA, 0.2) == [first, second]


def test_without_a_boost_not_a_bit_of_the_scores_moves(
    deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate
) -> None:
    embedded = {"embedding": f"'{unit_vector(1.0)}'::halfvec", "embedding_model": "'test-model'"}
    for fusion in ("rank", "score"):
        before = found(deployment, ANNA, 0, fusion=f"'{fusion}'", **embedded)
        for user in (1, 2, 3):
            rate(Principal(tenant_id="acme", user_id=user), pair[1], -1)
        assert found(deployment, ANNA, 0, fusion=f"'{fusion}'", **embedded) == before
        assert found(deployment, ANNA, 1, fusion=f"'{fusion}'", **embedded) != before


def test_bad_ratings_lower_a_document(deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate) -> None:
    first, second = pair
    for user in (1, 2, 3):
        rate(Principal(tenant_id="acme", user_id=user), first, -1)
    assert order(deployment, ANNA, 1) == [second, first]


def test_one_person_counts_once(deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate) -> None:
    """However often they say it, and in however many questions: a quarter of the boost at most."""
    rate(ANNA, pair[1])
    once = found(deployment, BORIS, 0.8)
    for _ in range(20):
        rate(ANNA, pair[1], clicked=True)
    assert found(deployment, BORIS, 0.8) == once
    assert dict(once)[pair[1]] == pytest.approx(0.8 * (1 + 0.8 / 4))


def test_a_click_is_half_a_good_rating(deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate) -> None:
    rate(ANNA, pair[1], None, clicked=True)
    assert dict(found(deployment, BORIS, 1))[pair[1]] == pytest.approx(0.8 * (1 + 0.5 / 4))


def test_feedback_counts_in_its_own_class_alone(deployment: Deployment, store: Store, rate: Rate) -> None:
    """What is read by others, in another tenant or under the same id in another class, stays as it was."""
    shared = store(ANNA, SECOND, scope="public")
    mine = store(ANNA, SECOND)
    theirs = store(NAMESAKE, SECOND)
    before = found(deployment, BORIS, 1), found(deployment, NAMESAKE, 1)
    rate(ANNA, mine)
    rate(NAMESAKE, theirs)
    assert found(deployment, BORIS, 1) == before[0]
    with deployment.cluster.superuser(deployment.name) as connection:
        # As if Anna's word on her own document were about the public one.
        connection.execute("update rag.rag_feedback set document_id = %s where document_id = %s", (shared, mine))
    assert found(deployment, BORIS, 1) == before[0]
    assert dict(found(deployment, ANNA, 1))[shared] == dict(found(deployment, ANNA, 0))[shared]


def test_feedback_on_a_document_that_moved_counts_no_more(
    deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate
) -> None:
    rate(ANNA, pair[1])
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("update rag.rag_feedback set access_id = access_id + 1")
    assert found(deployment, BORIS, 1) == found(deployment, BORIS, 0)


@pytest.mark.parametrize("boost", ["-0.1", "1.1", "'NaN'", "null"])
def test_a_boost_beyond_its_bounds_is_refused(deployment: Deployment, boost: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue), deployment.transaction(ANNA) as connection:
        connection.execute(f"select * from search('palisade', feedback_boost => {boost})")


def test_an_explanation_counts_the_boost_as_well(deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate) -> None:
    for user in range(1, 10):
        rate(Principal(tenant_id="acme", user_id=user), pair[1])
    with deployment.transaction(ANNA) as connection:
        ranks = [
            connection.execute(
                "select value from explain('palisade', %s, feedback_boost => %s) where stage = 'returned'",
                (pair[1], boost),
            ).fetchone()
            for boost in (0, 1)
        ]
    assert ranks == [(2,), (1,)]


async def test_the_setting_decides(
    database: Database, embedder: Embedder, deployment: Deployment, pair: tuple[UUID, UUID], rate: Rate
) -> None:
    for user in range(1, 10):
        rate(Principal(tenant_id="acme", user_id=user), pair[1])
    request = RAGRequest(query="palisade", mode="keyword")
    for boost, best in ((0.0, pair[0]), (1.0, pair[1])):
        settings = Settings(_env_file=None, rag_llm_provider="extractive", rag_feedback_boost=boost)
        service = RAGService(settings, database, embedder, open_generator(settings))
        hits = (await service.search(request, principal=ANNA)).passages
        assert hits[0].document_id == best
        assert (await service.explain(request, pair[1], principal=ANNA))[-1].value == (2 if best == pair[0] else 1)


# --- in Python ------------------------------------------------------------------------------------


async def test_an_answer_is_rated_by_who_asked(service: RAGService, store: Store, deployment: Deployment) -> None:
    document = store(ANNA, "Backups of the orders database run every night at 02:00.")
    asked = RAGRequest(query="When do backups of the orders database run?", mode="keyword")
    response = await service.generate(asked, principal=ANNA)
    await service.feedback(response.query_id, principal=ANNA, rating=1)
    await service.feedback(response.query_id, principal=ANNA, source_id=f"{document}:0", clicked=True)
    for stranger in (BORIS, NAMESAKE, Principal(tenant_id="acme")):
        with pytest.raises(QueryNotFound):
            await service.feedback(response.query_id, principal=stranger, rating=1)
    with deployment.transaction(ANNA) as connection:
        said = connection.execute(
            "select source_id, rank, cited, rating, clicked from v_feedback order by rank"
        ).fetchall()
    assert said == [(f"{document}:0", 1, True, None, True), (None, None, None, 1, False)]


@pytest.mark.parametrize(
    "said", [{}, {"rating": 2}, {"rating": True}, {"rating": 1, "source_id": "x"}, {"rating": 1, "query_id": "x"}]
)
async def test_feedback_that_is_none_is_refused(service: RAGService, said: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await service.feedback(**({"query_id": str(uuid4()), "principal": ANNA} | said))


async def test_stored_citations_are_checked_in_one_statement(
    service: RAGService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the list, each place once, however often it is cited."""
    document = store(ANNA, FIRST)
    foreign = store(BORIS, FIRST)
    asked: list[str] = []
    transaction = service.database.transaction

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append("transaction")
        return transaction(*arguments, **options)

    monkeypatch.setattr(service.database, "transaction", counted)
    now = datetime.now(UTC)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    cited = [
        CitedSource(source_id=f"{place}:0", cited_at=cited_at)
        for place, cited_at in ((document, now), (foreign, now), (document, long_ago), (uuid4(), now))
    ]
    states = await service.recheck(cited, principal=ANNA)
    assert [one.source_id for one in states] == [one.source_id for one in cited]
    assert [one.state for one in states] == ["current", "gone", "stale", "gone"]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "cited",
    [
        [],
        [CitedSource(source_id=f"{uuid4()}:0", cited_at=datetime.now(UTC))] * (MAX_CITATIONS + 1),
        [CitedSource(source_id="x", cited_at=datetime.now(UTC))],
        [CitedSource(source_id=f"{uuid4()}:0", cited_at=datetime(2026, 1, 1))],
    ],
)
async def test_a_list_of_citations_that_is_none_is_refused(service: RAGService, cited: list[CitedSource]) -> None:
    with pytest.raises(InvalidInput):
        await service.recheck(cited, principal=ANNA)
