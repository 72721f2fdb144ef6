"""/rag/projects/{project_id}/members: owners share their own projects, and nobody shares another one's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from tests.api.conftest import ACME
from tests.api.running import Person, fields_of, issued_key, problem_of
from tests.conftest import Deployment

REFUNDS = "# Refunds\n\nA refund takes five working days."
ASKED = "How long does a refund take?"


def path(project: str, member: object | None = None) -> str:
    return f"/rag/projects/{project}/members" + ("" if member is None else f"/{member}")


def put(person: Person, project: str, member: object, **fields: Any) -> Response:
    return person.client.put(path(project, member), json=person.identity | fields, headers=person.headers)


def end(person: Person, project: str, member: object) -> Response:
    return person.client.delete(path(project, member), params=person.identity, headers=person.headers)


def members(person: Person, project: str) -> dict[int, bool]:
    """Whom the person shares a project with, and whether they may write."""
    response = person.client.get(path(project), params=person.identity, headers=person.headers)
    assert response.status_code == 200, response.text
    assert all(set(one) == {"member_user_id", "may_write", "created_at"} for one in response.json()["members"])
    return {one["member_user_id"]: one["may_write"] for one in response.json()["members"]}


def on_orion(person: Person) -> Person:
    return replace(person, project_id="orion")


# --- the owner -------------------------------------------------------------------------------------


def test_a_shared_project_opens_and_closes(mara: Person, jonas: Person) -> None:
    on_orion(mara).store("refunds.md", REFUNDS)
    assert on_orion(jonas).finds(ASKED) == []
    assert (put(mara, "orion", 8).status_code, members(mara, "orion")) == (204, {8: False})
    assert on_orion(jonas).finds(ASKED) == ["Refunds"]
    # Only while they name it.
    assert jonas.finds(ASKED) == []
    assert end(mara, "orion", 8).status_code == 204
    assert (on_orion(jonas).finds(ASKED), members(mara, "orion")) == ([], {})
    problem_of(end(mara, "orion", 8), 404, "not_found")


def test_what_a_member_may_can_be_changed(mara: Person, jonas: Person, site: Deployment) -> None:
    on_orion(mara).store("refunds.md", REFUNDS)
    for may_write in (True, False, True):
        assert put(mara, "orion", 8, may_write=may_write).status_code == 204
        assert members(mara, "orion") == {8: may_write}
    put(mara, "orion", 9)
    put(mara, "lyra", 10)
    assert members(mara, "orion") == {8: True, 9: False}


def test_a_project_name_may_hold_what_an_address_may_not(mara: Person) -> None:
    assert put(mara, "a%20b%3F%C3%A9", 8).status_code == 204
    assert members(mara, "a%20b%3F%C3%A9") == {8: False}
    assert members(mara, "a b") == {}


# --- and nobody else -------------------------------------------------------------------------------


def test_nobody_shares_the_project_of_another(mara: Person, jonas: Person) -> None:
    """Names of projects are each owner's own: who names orion names theirs."""
    on_orion(mara).store("refunds.md", REFUNDS)
    assert put(jonas, "orion", 9).status_code == 204
    assert replace(on_orion(jonas), user_id=9).finds(ASKED) == []
    assert members(mara, "orion") == {}
    # Not even somebody who may write to it.
    put(mara, "orion", 8, may_write=True)
    put(jonas, "orion", 10, may_write=True)
    assert replace(on_orion(jonas), user_id=10).finds(ASKED) == []
    problem_of(end(jonas, "orion", 8), 404, "not_found")
    assert (members(mara, "orion"), members(jonas, "orion")) == ({8: True}, {9: False, 10: True})


def test_a_project_is_shared_within_its_tenant(mara: Person, jonas: Person) -> None:
    on_orion(mara).store("refunds.md", REFUNDS)
    elsewhere = replace(mara, tenant_id=f"{mara.tenant_id}-2")
    assert put(elsewhere, "orion", 8).status_code == 204
    assert on_orion(jonas).finds(ASKED) == []
    assert members(mara, "orion") == {}
    problem_of(end(mara, "orion", 8), 404, "not_found")
    assert members(elsewhere, "orion") == {8: False}


def test_who_is_no_user_owns_no_project(visitor: Person) -> None:
    listed = visitor.client.get(path("orion"), params=visitor.identity)
    for response in (listed, put(visitor, "orion", 8), end(visitor, "orion", 8)):
        assert fields_of(problem_of(response, 422, "invalid_input")) == ["user_id"]


@pytest.mark.parametrize(
    ("project", "member", "field"),
    [
        ("*", 8, "project_id"),
        ("%09", 8, "project_id"),
        ("x" * 129, 8, "project_id"),
        ("orion", 7, "member_user_id"),
        ("orion", 0, "member_user_id"),
        ("orion", -8, "member_user_id"),
        ("orion", "jonas", "member_user_id"),
        ("orion", "9" * 19, "member_user_id"),
    ],
)
def test_what_can_be_no_membership_is_refused(mara: Person, project: str, member: object, field: str) -> None:
    assert fields_of(problem_of(put(mara, project, member), 422, "invalid_input")) == [field]


@pytest.mark.parametrize("fields", [{"may_write": "yes"}, {"may_write": 1}, {"project_id": "lyra"}, {"owner": 8}])
def test_a_body_that_says_something_else_is_refused(mara: Person, fields: dict[str, Any]) -> None:
    assert fields_of(problem_of(put(mara, "orion", 8, **fields), 422, "invalid_input")) == list(fields)


def test_a_stranger_is_turned_away(client: TestClient) -> None:
    for method, address in (("GET", path("orion")), ("PUT", path("orion", 8)), ("DELETE", path("orion", 8))):
        problem_of(client.request(method, address, headers={"Authorization": "Bearer x"}), 401, "unauthenticated")


# --- trusted services ------------------------------------------------------------------------------


def test_a_service_shares_within_its_bounds_and_on_record(service: TestClient, site: Deployment) -> None:
    project = "project-of-a-service"

    def speaking(**bounds: Any) -> Person:
        key = issued_key(site, tenant_id=ACME, act_as=True, **bounds)
        person = Person(client=service, credential=key.text, user_id=7)
        while person.client.get("/health", headers=person.headers).status_code == 401:
            pass  # until the service has seen the key
        return person

    put_it, end_it = (lambda person: put(person, project, 8)), (lambda person: end(person, project, 8))
    problem_of(put_it(speaking(actions=["query", "delete"])), 403, "forbidden")
    problem_of(put_it(speaking(scopes=["user"])), 403, "scope_forbidden")
    problem_of(put_it(speaking(project_ids=["another"])), 403, "principal_mismatch")
    problem_of(put_it(speaking(user_ids=[8])), 403, "principal_mismatch")
    allowed = speaking(user_ids=[7], project_ids=[project], scopes=["project"])
    assert put_it(allowed).status_code == 204
    problem_of(end_it(speaking(actions=["query", "ingest"])), 403, "forbidden")
    problem_of(end_it(speaking(scopes=["user"])), 403, "scope_forbidden")
    assert members(allowed, project) == {8: False}
    assert end_it(allowed).status_code == 204

    assert allowed.credential is not None
    with site.connect("rag_operator") as operator:
        recorded = operator.execute(
            "select action, user_id, project_id from rag_assertions where key_id = %s order by created_at",
            (allowed.credential[4:20],),
        ).fetchall()
    assert recorded == [("ingest", 7, project), ("query", 7, project), ("delete", 7, project)]
