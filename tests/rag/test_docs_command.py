"""`rag docs` as it is typed: pages, one document with where it came from, and taking documents out."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest

from rag.browse import Wanted, browse
from rag.database import Database
from rag.errors import InvalidInput
from rag.principal import Principal
from tests.conftest import Deployment
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag
from tests.rag.test_gather import write

__all__ = ["named", "rag"]

AS_MARA = ("--user", "7", "--tenant", "acme")
AS_ILSE = ("--user", "8", "--tenant", "acme")


def synchronised(rag: Rag) -> None:
    """Seven documents of Mara's, one of Ilse's, and one that is public."""
    write(
        Path("docs"), a_md="# A\n\nOne.", b_md="# B\n\nTwo.", c_txt="Three.", ä_md="# Ä\n\nVier.", z_md="# Z\n\nFive."
    )
    assert rag("sync", "docs", "--name", "handbook", *AS_MARA).code == 0
    write(Path("more"), x_md="# X\n\nSix.", y_txt="Seven.")
    assert rag("ingest", "more", *AS_MARA).code == 0
    write(Path("hers"), h_md="# H\n\nHers.")
    assert rag("ingest", "hers", *AS_ILSE).code == 0
    write(Path("ours"), o_md="# O\n\nOurs.")
    assert rag("ingest", "ours", "--scope", "public", "--tenant", "acme").code == 0


def listed(rag: Rag, *options: str) -> list[str]:
    ran = rag("docs", "list", "--json", *options)
    assert (ran.code, ran.err) == (0, "")
    return [row["source_id"] for row in json.loads(ran.out)["documents"]]


ALL_OF_MARAS = [
    *("handbook:a.md", "handbook:b.md", "handbook:c.txt", "handbook:z.md", "handbook:ä.md"),
    *("more/x.md", "more/y.txt", "ours/o.md"),
]


def test_somebody_lists_what_they_see_and_nothing_else(rag: Rag, named: Deployment):
    synchronised(rag)
    assert listed(rag, *AS_MARA) == ALL_OF_MARAS
    assert listed(rag, *AS_ILSE) == ["hers/h.md", "ours/o.md"]
    assert listed(rag, "--user", "7", "--tenant", "other") == []
    assert listed(rag, *AS_MARA, "--source", "handbook:") == ALL_OF_MARAS[:5]
    # No pattern: a prefix is taken as it is.
    assert listed(rag, *AS_MARA, "--source", "handbook_") == []
    assert listed(rag, *AS_MARA, "--type", "text") == ["handbook:c.txt", "more/y.txt"]
    assert listed(rag, *AS_MARA, "--scope", "public") == ["ours/o.md"]
    table = rag("docs", "list", *AS_ILSE).out.splitlines()
    assert table[0].split() == ["id", "scope", "source_type", "source_id", "chunks"]
    assert table[1].split()[1:] == ["user", "markdown", "hers/h.md", "1"]


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9])
def test_pages_have_each_document_once(rag: Rag, named: Deployment, limit: int):
    synchronised(rag)
    told, cursor = [], None
    for _ in range(9):
        more = () if cursor is None else ("--cursor", cursor)
        page = json.loads(rag("docs", "list", "--json", "--limit", str(limit), *AS_MARA, *more).out)
        assert len(page["documents"]) <= limit
        told += [row["source_id"] for row in page["documents"]]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert told == ALL_OF_MARAS
    # A cursor names a place and opens nothing: what Ilse sees behind it is hers.
    first = json.loads(rag("docs", "list", "--json", "--limit", "1", *AS_MARA).out)["cursor"]
    assert listed(rag, *AS_ILSE, "--cursor", first) == ["hers/h.md", "ours/o.md"]


@pytest.mark.parametrize("cursor", ["", "x", "é", "W10=", "WyJhIiwgImIiXQ==", "bnVsbA==", "W1" * 50_000])
async def test_a_cursor_that_no_page_gave_is_refused(database: Database, cursor: str):
    with pytest.raises(InvalidInput) as refused:
        await browse(database, Principal(tenant_id="acme", user_id=7), Wanted(), cursor=cursor)
    assert refused.value.field == "cursor"


def test_a_document_says_where_it_came_from(rag: Rag, named: Deployment):
    write(Path("docs"), a_md="---\nowner: mara\n---\n# A\n\nOne [bold]two[/bold].")
    assert rag("sync", "docs", "--name", "handbook", *AS_MARA).code == 0
    found = json.loads(rag("docs", "list", "--json", *AS_MARA).out)["documents"][0]
    shown = json.loads(rag("docs", "show", found["id"], "--json", *AS_MARA).out)
    assert shown["origin"]["source"] == "handbook"
    assert shown["origin"]["path"] == "a.md"
    assert shown["source_uri"] == Path("docs/a.md").resolve().as_uri()
    assert (shown["metadata"], shown["chunk_count"], shown["provenance_id"]) == ({"owner": "mara"}, 1, None)
    assert not {"body", "access_id", "source_hash"} & set(shown)
    whole = json.loads(rag("docs", "show", found["id"], "--json", "--body", *AS_MARA).out)
    assert whole["body"] == "# A\n\nOne [bold]two[/bold]."
    plain = rag("docs", "show", found["id"], "--body", *AS_MARA).out
    assert "origin.path         a.md" in plain
    assert plain.endswith("# A\n\nOne [bold]two[/bold].\n")


def test_a_foreign_document_and_a_missing_one_look_the_same(rag: Rag, named: Deployment):
    synchronised(rag)
    hers = json.loads(rag("docs", "list", "--json", *AS_ILSE).out)["documents"][0]["id"]
    missing = str(uuid4())
    for command in (("show",), ("rm", "--yes"), ("rm", "--dry-run"), ("rm", "--yes", "--json")):
        foreign = rag("docs", *command, hers, *AS_MARA)
        absent = rag("docs", *command, missing, *AS_MARA)
        assert foreign.code == absent.code == 1
        assert (foreign.out.replace(hers, "ID"), foreign.err.replace(hers, "ID")) == (
            absent.out.replace(missing, "ID"),
            absent.err.replace(missing, "ID"),
        )
    assert listed(rag, *AS_ILSE) == ["hers/h.md", "ours/o.md"]


def test_documents_go_and_come_back_when_they_are_ingested_again(rag: Rag, named: Deployment):
    synchronised(rag)
    by_source = {
        row["source_id"]: row["id"] for row in json.loads(rag("docs", "list", "--json", *AS_MARA).out)["documents"]
    }
    both = (by_source["more/x.md"], by_source["more/y.txt"])
    dry = rag("docs", "rm", *both, "--dry-run", *AS_MARA)
    assert dry.code == 0
    assert [line.split()[1] for line in dry.out.splitlines()] == ["source_id", "more/x.md", "more/y.txt"]
    assert listed(rag, *AS_MARA) == ALL_OF_MARAS

    gone = rag("docs", "rm", *both, "--yes", "--json", *AS_MARA)
    assert gone.code == 0
    assert [row["source_id"] for row in json.loads(gone.out)["removed"]] == ["more/x.md", "more/y.txt"]
    assert gone.err.splitlines()[-1] == "removing: 2/2"
    assert listed(rag, *AS_MARA, "--source", "more/") == []
    # The ordinary path: what was in flight meanwhile finds the tombstone.
    assert (
        rows(named.url("postgres"), "select reason, retracted from rag.rag_tombstones")
        == [{"reason": "deleted", "retracted": False}] * 2
    )
    assert rag("ingest", "more", *AS_MARA).code == 0
    assert listed(rag, *AS_MARA) == ALL_OF_MARAS


def test_what_somebody_may_only_read_stays(rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch):
    synchronised(rag)
    monkeypatch.delenv("RAG_PUBLISHER_DATABASE_URL")
    ours = json.loads(rag("docs", "list", "--json", "--scope", "public", *AS_MARA).out)["documents"][0]["id"]
    ran = rag("docs", "rm", ours, "--yes", *AS_MARA)
    assert (ran.code, ran.out.splitlines()[-1]) == (1, "Removed 0 documents.")
    assert listed(rag, *AS_ILSE) == ["hers/h.md", "ours/o.md"]
