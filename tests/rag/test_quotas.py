"""Quotas where documents are written: what is counted is what is stored, and a full one stops clearly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rag import ingest as ingesting
from rag.database import Database
from rag.embed import Purpose
from rag.errors import DocumentNotFound, EmbeddingUnavailable, InvalidInput, QuotaExceeded, RAGServiceError
from rag.ingest import Ingested, Source, ingest
from rag.invalidate import Targets, invalidate, reinstate
from rag.limits import take_token
from rag.principal import Principal
from rag.store import destination_of, remove_document
from tests.conftest import Deployment
from tests.rag.quick_embedder import QuickEmbedder
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag
from tests.rag.test_gather import write
from tests.sql.test_limits import limit, used

__all__ = ["named", "rag"]

MARA = Principal(tenant_id="acme", user_id=7, tags=("public", "hr"))
JONAS = Principal(tenant_id="acme", user_id=8, project_id="orion", tags=("public", "hr"))
EVE = Principal(tenant_id="other", user_id=7)
AS_MARA = ("--user", "7", "--tenant", "acme")


class Failing(QuickEmbedder):
    """An embedder that sometimes does not answer."""

    def __init__(self, dice: Random) -> None:
        super().__init__()
        self.dice = dice

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        if self.dice.random() < 0.1:
            raise EmbeddingUnavailable()
        return await super().embed(texts, purpose=purpose, progress=progress)


async def put(
    database: Database,
    principal: Principal,
    name: str,
    text: str,
    *,
    scope: str = "user",
    embedder: QuickEmbedder | None = None,
    tags: tuple[str, ...] = ("public",),
    **fields: Any,
) -> Ingested:
    former = fields.pop("former", None)
    return await ingest(
        Source(name=name, source_id=name, content=text, **fields),
        principal=principal,
        destination=destination_of(principal, scope=scope, tags=tags),
        database=database,
        embedder=embedder or QuickEmbedder(),
        max_bytes=1_000_000,
        former=former,
    )


def truth(deployment: Deployment, tenant_id: str) -> tuple[int, int]:
    (row,) = rows(
        deployment.url("postgres"),
        "select count(*) as documents, coalesce(sum(octet_length(body)), 0) as bytes"
        " from rag.rag_documents where tenant_id = %s",
        (tenant_id,),
    )
    return row["documents"], row["bytes"]


# --- what is counted is what is stored ------------------------------------------------------------


async def test_counts_follow_whatever_is_done_to_documents(
    deployment: Deployment, database: Database, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    """Ingests, replacements, other tags, renames, removals, invalidations, erasures, refusals and faults, at random."""
    seed = int(os.environ.get("RAG_TEST_SEED") or 0) or Random().randrange(10**6)
    dice = Random(seed)
    steps = scaled(test=120, ci=200, prove=5000)
    embedder = Failing(dice)
    refused = 0
    names = [f"{letter}.txt" for letter in "abcdefgh"]
    limit(deployment, "acme", documents=9, bytes=1200)
    for step in range(steps):
        who = dice.choice([MARA, MARA, JONAS, EVE])
        scope = "project" if who is JONAS and dice.random() < 0.7 else "user"
        name = dice.choice(names)
        deed = dice.choice(["put"] * 8 + ["rename", "remove", "remove", "invalidate", "forget"])
        try:
            if deed in ("put", "rename"):
                tags = dice.choice([("public",), ("hr", "public")]) if who is not EVE else ("public",)
                former = ("text", dice.choice(names)) if deed == "rename" else None
                text = dice.choice("xäж€😀") * dice.randint(1, 90)
                await put(database, who, name, text, scope=scope, tags=tags, embedder=embedder, former=former)
            elif deed == "remove":
                ids = rows(deployment.url("postgres"), "select id from rag.rag_documents order by id")
                if ids:
                    await remove_document(database, who, dice.choice(ids)["id"], reason="deleted")
            elif deed == "invalidate":
                targets = Targets(source_ids=[name])
                await invalidate(targets, reason="a test", principal=who, database=database)
                await reinstate(targets, reason="a test", principal=who, database=database)
            else:
                with deployment.connect("rag_operator") as operator:
                    operator.execute("select * from forget(%s, source_id => %s)", (who.tenant_id, name)).fetchall()
        except QuotaExceeded:
            refused += 1
        except (EmbeddingUnavailable, DocumentNotFound, InvalidInput):
            pass
        for tenant_id in ("acme", "other"):
            assert used(deployment, tenant_id) == truth(deployment, tenant_id), f"RAG_TEST_SEED={seed}, step {step}"
        assert truth(deployment, "acme") <= (9, 1200), f"RAG_TEST_SEED={seed}, step {step}"
    assert refused
    with deployment.connect("rag_operator") as operator:
        assert operator.execute("select * from usage_drift()").fetchall() == []
    figure(f"quotas: {steps} random changes, {refused} refused: counted = stored after each")


async def test_an_erased_tenant_leaves_no_limits_and_no_counts(deployment: Deployment, database: Database) -> None:
    limit(deployment, "acme", documents=5, queries_per_minute=5)
    limit(deployment, "other", documents=5)
    for principal in (MARA, EVE):
        await put(database, principal, "a.txt", "text")
        await take_token(database, principal, "query")
    with deployment.connect("rag_operator") as operator:
        removed = dict(operator.execute("select * from forget('acme')").fetchall())
        left = dict(operator.execute("select * from count_traces('acme')").fetchall())
        others = operator.execute("select tenant_id from rag_limits").fetchall()
    tables = ("rag_limits", "rag_rate_buckets", "rag_usage")
    assert [removed[table] for table in tables] == [1, 1, 1]
    assert set(left.values()) == {0}
    assert others == [("other",)]
    assert used(deployment, "other") == (1, 4)


async def test_an_erased_user_makes_room(deployment: Deployment, database: Database) -> None:
    await put(database, MARA, "a.txt", "four")
    await put(database, Principal(tenant_id="acme", user_id=8), "b.txt", "three")
    with deployment.connect("rag_operator") as operator:
        operator.execute("select * from forget('acme', user_id => 7)").fetchall()
    assert used(deployment, "acme") == (1, 5)


async def test_a_failed_write_counts_nothing(
    deployment: Deployment, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charge is the last statement; one that fails after it takes it back."""
    await put(database, MARA, "a.txt", "four")

    async def broken(*_: Any, **__: Any) -> None:
        await charged(*_, **__)
        raise RAGServiceError

    charged = ingesting.store.limits.charge
    monkeypatch.setattr(ingesting.store.limits, "charge", broken)
    with pytest.raises(RAGServiceError):
        await put(database, MARA, "b.txt", "more")
    assert used(deployment, "acme") == truth(deployment, "acme") == (1, 4)


async def test_moving_and_renaming_need_no_room(deployment: Deployment, database: Database) -> None:
    await put(database, MARA, "a.txt", "four")
    limit(deployment, "acme", documents=1, bytes=4)
    assert (await put(database, MARA, "a.txt", "four", tags=("hr",))).status == "moved"
    assert (await put(database, MARA, "b.txt", "four", tags=("hr",), former=("text", "a.txt"))).status == "moved"
    assert used(deployment, "acme") == truth(deployment, "acme") == (1, 4)


async def test_what_is_published_counts_as_well(deployment: Deployment, database: Database) -> None:
    limit(deployment, "acme", documents=1)
    await put(database, MARA, "a.txt", "four", scope="public")
    with pytest.raises(QuotaExceeded) as refused:
        await put(database, MARA, "b.txt", "four")
    assert refused.value.field == "documents"


# --- as it is typed -------------------------------------------------------------------------------


@pytest.fixture
def operating(named: Deployment, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", named.url("rag_operator"))
    return named


def test_an_ingest_stops_at_a_full_quota_and_says_what_went_in(rag: Rag, operating: Deployment) -> None:
    write(Path("docs"), a_md="# A", b_md="# B", c_md="# C", d_md="# D")
    assert rag("limits", "set", "--tenant", "acme", "--documents", "2").code == 0
    ran = rag("ingest", "docs", *AS_MARA)
    assert ran.code == 3
    stored = {row["source_id"] for row in rows(operating.url("postgres"), "select source_id from rag.rag_documents")}
    assert len(stored) == 2
    assert ran.out.splitlines()[0] == "tenant acme: 2 created; 2 chunks embedded"
    assert {line.split()[1] for line in ran.out.splitlines()[1:]} == stored
    assert ran.errors == [
        "the tenant may store 2 documents and has stored 2, so that this does not fit; remove documents, or ask the "
        "operator for more; 2 files were not taken in, or not all of each"
    ]
    rag("limits", "set", "--tenant", "acme", "--documents", "3")
    told = json.loads((again := rag("ingest", "docs", *AS_MARA, "--json")).out)
    assert (again.code, told["created"], told["unchanged"], len(told["waiting"])) == (3, 1, 2, 1)
    assert told["full"].startswith("the tenant may store 3 documents")
    rag("limits", "remove", "--tenant", "acme")
    assert rag("ingest", "docs", *AS_MARA).code == 0


def test_a_sync_stops_at_a_full_quota_and_still_removes_what_is_gone(rag: Rag, operating: Deployment) -> None:
    docs = Path("docs")
    write(docs, a_md="# A", b_md="# B", c_md="# C")
    rag("limits", "set", "--tenant", "acme", "--documents", "2")
    sync = ("sync", "docs", "--name", "handbook", *AS_MARA)
    ran = rag(*sync, "--json")
    assert ran.code == 3
    (source,) = json.loads(ran.out)["sources"]
    assert (len(source["changes"]), len(source["waiting"]), source["embedded"]) == (2, 1, 2)
    (waiting,) = source["waiting"]
    plain = rag(*sync)
    assert plain.code == 3
    assert plain.errors == [
        "handbook: the tenant may store 2 documents and has stored 2, so that this does not fit; remove documents, or "
        "ask the operator for more; 1 documents were not taken in"
    ]
    # What is gone makes room within the same run.
    stored = next(name for name in ("a.md", "b.md", "c.md") if name != waiting)
    (docs / stored).unlink()
    ran = rag(*sync)
    assert (ran.code, ran.errors) == (0, [])
    assert ran.out.splitlines()[:2] == [f"  new         {waiting}", f"  gone        {stored}"]
    assert used(operating, "acme")[0] == 2


def test_limits_are_listed_with_what_is_used(rag: Rag, operating: Deployment) -> None:
    write(Path("docs"), a_txt="ä")
    rag("ingest", "docs", *AS_MARA)
    ran = rag("limits", "set", "--default", "--queries-per-minute", "60", "--query-burst", "10")
    assert (ran.code, ran.out) == (0, "All other tenants: queries_per_minute 60, query_burst 10.\n")
    assert rag("limits", "set", "--tenant", "third", "--documents", "0", "--bytes", "5").code == 0
    listed = json.loads(rag("limits", "list", "--json").out)["limits"]
    nothing = dict.fromkeys(("queries_per_minute", "query_burst", "ingests_per_minute", "ingest_burst"))
    by_default = nothing | {"queries_per_minute": 60, "query_burst": 10, "documents": None, "bytes": None}
    assert listed == [
        {"tenant_id": "acme", "own": False, "default": False, **by_default, "documents_used": 1, "bytes_used": 2},
        {
            "tenant_id": "third",
            "own": True,
            "default": False,
            **nothing,
            "documents": 0,
            "bytes": 5,
            "documents_used": 0,
            "bytes_used": 0,
        },
        {"tenant_id": "", "own": True, "default": True, **by_default, "documents_used": 0, "bytes_used": 0},
    ]
    assert "(default)" in rag("limits", "list").out
    # What is not named stays; a rate that is lifted takes its burst along.
    rag("limits", "set", "--default", "--documents", "9")
    rag("limits", "set", "--default", "--queries-per-minute", "none")
    (row,) = json.loads(rag("limits", "list", "--tenant", "", "--json").out)["limits"]
    assert (row["documents"], row["queries_per_minute"], row["query_burst"]) == (9, None, None)
    assert rag("limits", "remove", "--default").code == 0
    assert rag("limits", "remove", "--default").errors == [
        "there are no such limits: `rag limits list` has all of them (tenant_id)"
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tenant", "acme"), "say which limit"),
        (("--documents", "5"), "--tenant is required"),
        (("--tenant", "acme", "--default", "--documents", "5"), "--default is for those"),
        (("--tenant", "acme", "--documents", "-1"), "documents must be a whole number, or none"),
        (("--tenant", "acme", "--documents", "many"), "documents must be a whole number, or none"),
        (("--tenant", "acme", "--bytes", "9999999999999999999"), "bytes must be a whole number from 0"),
        (("--tenant", "acme", "--queries-per-minute", "1000001"), "queries_per_minute must be"),
        (("--tenant", "acme", "--query-burst", "0", "--queries-per-minute", "5"), "query_burst must be"),
        (("--tenant", "acme", "--query-burst", "5"), "query_burst needs queries_per_minute"),
        (("--tenant", "acme", "--ingest-burst", "5", "--ingests-per-minute", "none"), "ingest_burst needs"),
        (("--tenant", "a\nb", "--documents", "5"), "tenant_id"),
    ],
)
def test_what_is_no_limit_is_refused(rag: Rag, operating: Deployment, arguments: tuple[str, ...], says: str) -> None:
    ran = rag("limits", "set", *arguments)
    assert ran.code == 1
    assert says in ran.errors[0]
    assert json.loads(rag("limits", "list", "--json").out) == {"limits": []}


def test_recounting_names_what_differed(rag: Rag, operating: Deployment) -> None:
    write(Path("docs"), a_txt="four", b_txt="four")
    rag("ingest", "docs", *AS_MARA)
    with operating.cluster.superuser(operating.name) as superuser:
        superuser.execute("delete from rag.rag_documents where source_id like '%a.txt'")
    ran = rag("limits", "recount", "--json")
    assert json.loads(ran.out) == {
        "differences": [
            {
                "tenant_id": "acme",
                "documents_counted": 2,
                "documents_stored": 1,
                "bytes_counted": 8,
                "bytes_stored": 4,
            }
        ]
    }
    assert used(operating, "acme") == (1, 4)
    assert json.loads(rag("limits", "recount", "--json").out) == {"differences": []}
