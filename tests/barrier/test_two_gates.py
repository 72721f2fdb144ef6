"""Two gates, each closed by itself: the door of the API with row security off, and the database with a door
that lets everybody say who they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from api.identity import configured_door
from rag.settings import Settings
from tests.api.running import Person, issued_key, running
from tests.conftest import Deployment
from tests.sql.world import CLASSES, REACHES, Reach, build, document_id, protected_tables


@pytest.fixture
def site(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """The world of tests/sql/world.py: thirteen documents, one in each class, and fifteen principals."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            build(connection)
        yield clone


def person(client: TestClient, reach: Reach) -> Person:
    who = reach.principal
    return Person(
        client=client,
        tenant_id=who.tenant_id,
        user_id=who.user_id,
        project_id=who.project_id,
        user_tags=list(who.tags),
    )


def check_matrix(people: dict[str, Person]) -> int:
    """Every route, for every principal and document; the number of answers that were compared."""
    compared = 0
    for name, asker in people.items():
        reach = REACHES[name]
        everything = asker.ask("palisade record", generate=False, top_k=100)
        assert {hit["document_id"] for hit in everything.json()["hits"]} == {
            str(document_id(access_id)) for access_id in reach.reads
        }, name
        for access_id in CLASSES:
            one = document_id(access_id)
            readable = access_id in reach.reads
            assert asker.read(one).status_code == (200 if readable else 404), (name, access_id)
            only = asker.ask("palisade record", generate=False, scope="documents", document_ids=[str(one)])
            if readable:
                assert [hit["document_id"] for hit in only.json()["hits"]] == [str(one)], (name, access_id)
            else:
                assert only.status_code == 404 or only.json()["hits"] == [], (name, access_id)
            if not readable:
                assert asker.delete(one).status_code == 404, (name, access_id)
            elif access_id not in reach.writes:
                assert asker.delete(one).status_code == 403, (name, access_id)
            compared += 3
        published = asker.ingest("poison", "palisade record poison", scope="public")
        assert published.status_code == 403, (name, published.text)
        if reach.principal.user_id is None:
            assert asker.ingest("mine", "palisade record", scope="user").status_code in (403, 422)
        compared += 3
    return compared


def documents(site: Deployment) -> int:
    with site.cluster.superuser(site.name) as connection:
        return int(connection.execute("select count(*) from rag.rag_documents").fetchone()[0])


def test_with_the_door_open_the_database_denies(
    site: Deployment, settings: Settings, figure: Callable[[str], None]
) -> None:
    # The printed token lets its holder name anybody, in any tenant; nobody publishes.
    with running(site, settings, publishes=False) as client:
        compared = check_matrix({name: person(client, reach) for name, reach in REACHES.items()})
    assert documents(site) == len(CLASSES)
    figure(f"API checks off: {len(REACHES)} principals, {compared} answers, 0 of them anybody else's")


def test_with_row_security_off_the_door_and_the_statements_deny(
    site: Deployment, settings: Settings, figure: Callable[[str], None]
) -> None:
    with_keys = settings.model_copy(update={"rag_service_keys": True})
    credentials = {
        name: issued_key(
            site,
            tenant_id=reach.principal.tenant_id,
            scopes=("user", "project"),
            tags=reach.principal.tags,
            act_as=True,
            user_ids=[] if reach.principal.user_id is None else [reach.principal.user_id],
            project_ids=None if reach.principal.project_id is None else [reach.principal.project_id],
        )
        for name, reach in REACHES.items()
    }
    with running(site, with_keys, door=configured_door(with_keys)) as client:
        # After the start, which would have refused it.
        with site.cluster.superuser(site.name) as connection:
            for table in protected_tables(connection):
                connection.execute(f"alter table rag.{table} disable row level security")
        people = {
            name: replace(person(client, reach), credential=credentials[name].text) for name, reach in REACHES.items()
        }
        compared = check_matrix(people)
        borrowed = 0
        for name, asker in people.items():
            mine = REACHES[name].principal
            for reach in REACHES.values():
                theirs = reach.principal
                if (theirs.tenant_id, theirs.user_id) == (mine.tenant_id, mine.user_id):
                    continue
                if theirs.user_id is None and theirs.tenant_id == mine.tenant_id:
                    continue  # to name nobody is to narrow
                claimed = replace(asker, tenant_id=theirs.tenant_id, user_id=theirs.user_id)
                assert claimed.ask("palisade record", generate=False).status_code == 403, (name, theirs)
                borrowed += 1
    assert documents(site) == len(CLASSES)
    figure(
        f"row security off: {len(REACHES)} principals, {compared} answers, 0 of them anybody else's; "
        f"{borrowed} borrowed identities refused"
    )
