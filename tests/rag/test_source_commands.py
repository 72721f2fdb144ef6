"""`rag sync`, `rag reconcile` and `rag status` as they are typed: what they print, and with which code they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Deployment
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag
from tests.rag.test_gather import commit, git, write

__all__ = ["named", "rag"]

AS_MARA = ("--user", "7", "--tenant", "acme")


def sources(deployment: Deployment) -> list[str]:
    found = rows(deployment.url("postgres"), "select source_id from rag.rag_documents order by source_id")
    return [row["source_id"] for row in found]


def test_a_folder_is_followed(rag: Rag, named: Deployment):
    docs = Path("docs")
    write(docs, a_md="# A\n\nOne.", b_md="# B\n\nTwo.", c_bin="x")
    sync = ("sync", "docs", "--name", "handbook", *AS_MARA)
    first = rag(*sync)
    assert (first.code, first.errors) == (0, [])
    assert first.out.splitlines() == [
        "  new         a.md",
        "  new         b.md",
        "handbook: 2 new; 2 chunks embedded",
        "1 files of other formats or types left out",
    ]
    # No terminal, so lines and no bar.
    assert first.err.splitlines()[-1] == "ingesting handbook: 2/2"

    (docs / "a.md").rename(docs / "moved.md")
    (docs / "b.md").write_text("# B\n\nOther.", encoding="utf-8")
    dry = rag(*sync, "--dry-run")
    assert dry.code == 1
    assert dry.out.splitlines()[:3] == [
        "  changed     b.md",
        "  moved       moved.md (was a.md)",
        "handbook: 1 changed, 1 moved; nothing was changed",
    ]
    assert sources(named) == ["handbook:a.md", "handbook:b.md"]
    assert rag(*sync).code == 0
    assert sources(named) == ["handbook:b.md", "handbook:moved.md"]
    assert rag(*sync, "--dry-run").code == 0


def test_what_cannot_be_taken_in_is_named_and_nothing_is_lost(rag: Rag, named: Deployment):
    docs = Path("docs")
    write(docs, a_md="# A")
    sync = ("sync", "docs", "--name", "handbook", *AS_MARA)
    assert rag(*sync).code == 0
    (docs / "b.md").write_bytes(b"\xff")
    ran = rag(*sync)
    assert (ran.code, ran.errors) == (1, ["handbook:b.md: is not UTF-8 text: byte 0 cannot be decoded"])
    (docs / "b.md").unlink()
    (docs / "a.md").unlink()
    empty = rag(*sync)
    assert empty.code == 1
    assert empty.errors == ["handbook: the source is empty, and its 1 documents stay; --allow-empty removes them"]
    docs.rmdir()
    gone = rag(*sync)
    assert gone.code == 2
    assert "cannot be listed: no such file or directory" in gone.errors[0]
    assert sources(named) == ["handbook:a.md"]
    docs.mkdir()
    assert rag(*sync, "--allow-empty").code == 0
    assert sources(named) == []


def test_a_repository_is_followed(rag: Rag, named: Deployment):
    place = Path("repository")
    place.mkdir()
    git(place, "init", "--quiet")
    write(place, docs__a_md="# A", b_md="# B")
    head = commit(place)
    ran = rag("sync", "repository", "--git", "--name", "code", "--include", "docs/", *AS_MARA, "--json")
    assert ran.code == 0
    (source,) = json.loads(ran.out)["sources"]
    assert (source["version"], source["changes"]) == (
        head,
        [{"path": "docs/a.md", "reason": "new", "former_path": None}],
    )
    assert sources(named) == ["code:docs/a.md"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("docs", "--name", "No spaces", *AS_MARA), "name: "),
        (("docs", "--name", "a", "--include", "", *AS_MARA), "a pattern of include is empty"),
        (("docs", "--name", "a", "--tenant", "acme"), "needs a user"),
        (("ssh://host/x", "--git", "--name", "a", *AS_MARA), "an https address"),
    ],
)
def test_a_source_that_can_be_none_is_refused(rag: Rag, named: Deployment, arguments: tuple[str, ...], says: str):
    ran = rag("sync", *arguments)
    assert ran.code == 1
    assert says in ran.errors[0]


def test_sources_of_a_file_are_reconciled_one_whether_or_not_the_other_is_there(
    rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch
):
    write(Path("docs"), a_md="# A")
    Path("sources.yaml").write_text(
        "- {name: missing, directory: nowhere, user: 7, tenant: acme}\n"
        "- {name: handbook, directory: docs, user: 7, tenant: acme}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("RAG_SOURCES", "sources.yaml")
    assert rag("reconcile", "--dry-run").code == 2
    ran = rag("reconcile", "--json")
    assert ran.code == 2
    said = json.loads(ran.out)
    assert [source["source"] for source in said["sources"]] == ["handbook"]
    assert [source["source"] for source in said["unavailable"]] == ["missing"]
    assert sources(named) == ["handbook:a.md"]

    drift = "delete from rag.rag_chunks"
    with named.cluster.superuser(named.name) as superuser:
        superuser.execute(drift)
    found = rag("reconcile", "handbook", "--dry-run")
    assert (found.code, found.out.splitlines()[0]) == (1, "  no chunks   a.md")
    assert rag("reconcile", "handbook").code == 0
    assert rag("reconcile", "handbook", "--dry-run").code == 0
    assert rag("reconcile", "other").errors == ["RAG_SOURCES has no source other"]


def test_reconcile_wants_to_know_the_sources(rag: Rag, named: Deployment):
    assert "RAG_SOURCES must name a file of sources" in rag("reconcile").errors[0]


def test_status_counts_what_somebody_sees(rag: Rag, named: Deployment):
    write(Path("docs"), README_md="# A", adr__1_md="# B")
    Path("by-hand.md").write_text("# C", encoding="utf-8")
    rag("sync", "docs", "--name", "handbook", *AS_MARA)
    rag("ingest", "by-hand.md", *AS_MARA)
    with named.cluster.superuser(named.name) as superuser:
        superuser.execute("update rag.rag_documents set source_updated_at = now() + '1 day' where source_type = 'adr'")
        superuser.execute("update rag.rag_chunks set embedding_model = 'other' where chunk_text like '%C%'")
    ran = rag("status", *AS_MARA, "--json")
    assert ran.code == 0
    found = {
        (row["source"], row["source_type"]): (
            row["documents"],
            row["chunks"],
            row["source_is_newer"],
            row["stale"],
            row["other_model_chunks"],
            row["without_chunks"],
        )
        for row in json.loads(ran.out)["sources"]
    }
    assert found == {
        ("", "markdown"): (1, 1, 0, 0, 1, 0),
        ("handbook", "adr"): (1, 1, 1, 1, 0, 0),
        ("handbook", "readme"): (1, 1, 0, 0, 0, 0),
    }
    assert json.loads(rag("status", "--user", "8", "--tenant", "acme", "--json").out) == {
        "sources": [],
        "synchronisations": [],
    }


def test_text_of_an_old_encoding_goes_in_when_it_is_named(rag: Rag, named: Deployment):
    Path("note.txt").write_bytes("Größe".encode("cp1252"))
    assert "is not UTF-8 text" in rag("ingest", "note.txt", *AS_MARA).errors[0]
    assert rag("ingest", "note.txt", "--encoding", "cp1252", *AS_MARA).code == 0
    assert rows(named.url("postgres"), "select body from rag.rag_documents") == [{"body": "Größe"}]
    assert rag("ingest", "note.txt", "--encoding", "rot13", *AS_MARA).code == 1


def synchronisations(rag: Rag, *who: str) -> list[dict[str, object]]:
    return json.loads(rag("status", "--json", *who).out)["synchronisations"]


def test_status_tells_when_a_source_was_last_in_step(rag: Rag, named: Deployment):
    docs = Path("docs")
    write(docs, a_md="# A\n\nOne.", b_md="# B\n\nTwo.")
    sync = ("sync", "docs", "--name", "handbook", *AS_MARA)
    assert rag(*sync, "--dry-run").code == 1
    assert synchronisations(rag, *AS_MARA) == []
    assert rag(*sync).code == 0
    (first,) = synchronisations(rag, *AS_MARA)
    assert first["succeeded_at"] == first["finished_at"]
    assert {
        name: first[name] for name in ("source", "scope", "files", "written", "removed", "unchanged", "failed")
    } == {
        "source": "handbook",
        "scope": "user",
        "files": 2,
        "written": 2,
        "removed": 0,
        "unchanged": 0,
        "failed": 0,
    }
    # One that failed in part is told, and when it last went well as well.
    (docs / "a.md").unlink()
    (docs / "c.md").write_bytes(b"\xff")
    assert rag(*sync).code == 1
    (second,) = synchronisations(rag, *AS_MARA)
    assert second["succeeded_at"] == first["succeeded_at"]
    assert str(second["finished_at"]) > str(first["finished_at"])
    assert (second["written"], second["removed"], second["unchanged"], second["failed"]) == (0, 1, 1, 1)
    # A source that is not there is no synchronisation.
    docs.rename("elsewhere")
    assert rag(*sync).code == 2
    assert synchronisations(rag, *AS_MARA) == [second]

    # Nobody else learns that there is such a source.
    assert synchronisations(rag, "--user", "8", "--tenant", "acme") == []
    assert synchronisations(rag, "--user", "7", "--tenant", "other") == []
    table = rag("status", *AS_MARA).out
    assert "handbook" in table
    assert "succeeded_at" in table


def test_a_commit_is_told_as_the_version(rag: Rag, named: Deployment):
    write(Path("repo"), a_md="# A\n\nOne.")
    git(Path("repo"), "init", "--quiet")
    made = commit(Path("repo"))
    assert rag("sync", "repo", "--git", "--name", "code", *AS_MARA).code == 0
    (found,) = synchronisations(rag, *AS_MARA)
    assert found["version"] == made


def test_an_erased_owner_has_no_synchronisation(rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch):
    write(Path("docs"), a_md="# A\n\nOne.")
    assert rag("sync", "docs", "--name", "handbook", *AS_MARA).code == 0
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", named.url("rag_operator"))
    assert rag("forget", "--tenant", "acme", "--user", "7", "--yes").code == 0
    assert rows(named.url("postgres"), "select 1 from rag.rag_synchronisations") == []
