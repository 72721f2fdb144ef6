"""sql/schema/20_identity.sql: who is asking, which access classes are theirs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import product
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import CheckViolation, InsufficientPrivilege

from rag.principal import Principal
from tests.conftest import Deployment
from tests.sql.world import REACHES, Reach, column, protected_tables, refused_with, speaking

Store = Callable[..., UUID]

VARIABLES = ("app.tenant_id", "app.user_id", "app.project_id", "app.tags")
VALID = {
    "app.tenant_id": "t1",
    "app.user_id": "1",
    "app.project_id": "alpha",
    "app.tags": '["public"]',
}

MALFORMED = {
    "app.tenant_id": {
        "empty": "",
        "129 characters": "t" * 129,
        "line feed at the end": "t1\n",
        "control character": "t\x011",
        "a megabyte": "t" * 2**20,
    },
    "app.user_id": {
        "empty": "",
        "letters": "abc",
        "fullwidth digit": "１",
        "arabic digit": "١",
        "outer spaces": " 1 ",
        "space after": "1 ",
        "no-break space": "\u00a01",
        "line feed after": "1\n",
        "hexadecimal": "0x1",
        "binary": "0b1",
        "underscore": "1_0",
        "exponent": "1e3",
        "19 digits": "1000000000000000000",
        "20 digits": "10000000000000000000",
        "negative": "-1",
        "negative zero": "-0",
        "plus sign": "+1",
        "leading zero": "01",
        "two zeros": "00",
        "decimal point": "1.0",
        "NaN": "NaN",
        "Infinity": "Infinity",
        "list": "1,2",
        "null": "null",
        "boolean": "true",
        "injection": "1' or '1'='1",
        "a megabyte": "1" * 2**20,
    },
    "app.project_id": {
        "129 characters": "p" * 129,
        "line feed at the end": "alpha\n",
        "control character": "alp\x1fha",
        "a megabyte": "p" * 2**20,
    },
    "app.tags": {
        "empty": "",
        "null": "null",
        "object": "{}",
        "array of Postgres": "{public}",
        "string": '"public"',
        "bare word": "public",
        "comma-separated": "public,hr",
        "number inside": "[1]",
        "null inside": "[null]",
        "null beside": '["public", null]',
        "boolean inside": "[true]",
        "object inside": "[{}]",
        "list inside": '[["public"]]',
        "cut off": "[",
        "string cut off": '["public',
        "list cut off": '["public"',
        "comma at the end": '["public",]',
        "comma alone": "[,]",
        "comma at the start": '[,"public"]',
        "no comma": '["public" "hr"]',
        "single quotes": "['public']",
        "something after": '["public"] x',
        "second list": '["public"]["hr"]',
        "unicode escape": '["\\u0070ublic"]',
        "NUL escape": '["\\u0000", "public"]',
        "surrogate escape": '["\\ud800", "public"]',
        "newline escape": '["public", "\\n"]',
        "raw line feed": '["public\n"]',
        "deep nesting": "[" * 100_000,
        "deep nesting, closed": "[" * 100_000 + "]" * 100_000,
        "more than 64 KiB": json.dumps(["public", "x" * 2**16]),
        "a megabyte": "x" * 2**20,
    },
}


def set_variables(connection: psycopg.Connection, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        connection.execute("select set_config(%s, %s, true)", (name, value))


def rows_in_every_table(connection: psycopg.Connection) -> dict[str, int]:
    relations = [*protected_tables(connection), "v_documents", "v_chunks"]
    counts = sql.SQL(", ").join(
        sql.SQL("(select count(*) from rag.{})").format(sql.Identifier(relation)) for relation in relations
    )
    row = connection.execute(sql.SQL("select {}").format(counts)).fetchone()
    assert row is not None
    return dict(zip(relations, row, strict=True))


def assert_nobody(connection: psycopg.Connection) -> None:
    """No row anywhere, no error in reading, a refusal in writing. Inside or outside a transaction."""
    counts = rows_in_every_table(connection)
    assert len(counts) == 9
    assert counts == dict.fromkeys(counts, 0)
    assert connection.execute("select * from my_principal()").fetchall() == []
    assert connection.execute("select * from whoami()").fetchall() == []
    assert column(connection, "select my_access_ids() || my_writable_access_ids()") == [[]]
    assert column(connection, "select my_tenant_id() || my_user_id()") == [None]
    assert connection.execute("select * from search('palisade record', top_k => 20)").fetchall() == []
    assert connection.execute("select * from keyword_candidates('palisade', null, null, 50)").fetchall() == []
    assert refused_with(connection, "select access_class('user', 1, null, '{public}')") == "42501"
    assert refused_with(connection, "select access_class('public', null, null, '{public}')") == "42501"
    assert refused_with(connection, "insert into rag_tombstones values ('t1', 3, 'text', 'x', 1, 'y')") == "42501"
    assert refused_with(connection, "insert into rag_tombstones values ('t1', 1, 'text', 'x', 1, 'y')") == "42501"
    assert connection.execute("update rag_documents set title = 'taken'").rowcount == 0
    assert connection.execute("delete from rag_documents").rowcount == 0


# --- begin_as -------------------------------------------------------------------------------------


def test_begin_as_sets_all_four_variables(app: psycopg.Connection) -> None:
    with app.transaction():
        app.execute("select begin_as('t1', 7, 'alpha', '{hr,\"two words\"}')")
        assert [column(app, "select current_setting(%s)", (name,))[0] for name in VARIABLES] == [
            "t1",
            "7",
            "alpha",
            '["hr","two words"]',
        ]


def test_begin_as_writes_what_is_absent_as_no_user_no_project_and_no_tags(app: psycopg.Connection) -> None:
    with app.transaction():
        app.execute("select begin_as('t1', null, null, null)")
        assert [column(app, "select current_setting(%s)", (name,))[0] for name in VARIABLES] == ["t1", "0", "", "[]"]


@pytest.mark.parametrize("project", ["alpha", "*", "", None])
def test_the_same_principal_may_begin_again(app: psycopg.Connection, project: str | None) -> None:
    with app.transaction():
        for _ in range(3):
            app.execute("select begin_as('t1', 1, %s, '{public}')", (project,))
        assert column(app, "select user_id from my_principal()") == [1]


@pytest.mark.parametrize(
    "other",
    [
        ("t2", 1, "alpha", ["public"]),
        ("t1", 2, "alpha", ["public"]),
        ("t1", None, "alpha", ["public"]),
        ("t1", 1, "beta", ["public"]),
        ("t1", 1, "*", ["public"]),
        ("t1", 1, None, ["public"]),
        ("t1", 1, "alpha", ["public", "hr"]),
        ("t1", 1, "alpha", ["hr"]),
        ("t1", 1, "alpha", []),
    ],
)
def test_a_second_principal_is_refused_and_the_first_one_stays(
    app: psycopg.Connection, other: tuple[object, ...]
) -> None:
    with app.transaction():
        app.execute("select begin_as('t1', 1, 'alpha', '{public}')")
        with pytest.raises(InsufficientPrivilege), app.transaction():
            app.execute("select begin_as(%s, %s::bigint, %s, %s)", other)
        assert app.execute("select * from my_principal()").fetchall() == [("t1", 1, "alpha", ["public"])]


@pytest.mark.parametrize("name", VARIABLES)
def test_begin_as_refuses_when_somebody_has_set_a_single_variable(app: psycopg.Connection, name: str) -> None:
    with app.transaction():
        set_variables(app, {name: "9"})
        assert refused_with(app, "select begin_as('t1', 1, 'alpha', '{public}')") == "42501"


@pytest.mark.parametrize("tenant", ["", None])
def test_begin_as_refuses_a_principal_without_tenant(app: psycopg.Connection, tenant: str | None) -> None:
    with app.transaction():
        assert refused_with(app, "select begin_as(%s, 1, null, '{public}')", (tenant,)) == "42501"


def test_quotes_and_backslashes_are_part_of_a_name(app: psycopg.Connection) -> None:
    tenant, project, tags = 'o\'neill \\ $$ "co"', "a'); drop", ['tab"le', "back\\slash", "comma,inside", "ключ"]
    with app.transaction():
        app.execute("select begin_as(%s, 1, %s, %s)", (tenant, project, tags))
        assert app.execute("select * from my_principal()").fetchall() == [(tenant, 1, project, tags)]


def test_nothing_is_left_after_commit(service: psycopg.Connection) -> None:
    with service.transaction():
        service.execute("select begin_as('t1', 1, '*', '{public}')")
        assert column(service, "select user_id from my_principal()") == [1]
    # '' and not null: the trap of SECURITY.md I2.
    assert [column(service, "select current_setting(%s, true)", (name,))[0] for name in VARIABLES] == [""] * 4
    assert_nobody(service)


def test_nothing_is_left_after_a_commit_in_the_middle(app: psycopg.Connection) -> None:
    app.execute("begin")
    app.execute("select begin_as('t1', 1, '*', '{public}')")
    app.execute("commit and chain")
    assert_nobody(app)
    app.execute("rollback")


def test_nothing_is_left_after_an_error(app: psycopg.Connection) -> None:
    app.execute("begin")
    app.execute("select begin_as('t1', 1, '*', '{public}')")
    with pytest.raises(psycopg.errors.DivisionByZero):
        app.execute("select 1 / 0")
    app.execute("rollback")
    assert_nobody(app)


def test_outside_a_transaction_the_principal_is_lost_at_once(app: psycopg.Connection) -> None:
    app.execute("select begin_as('t1', 1, '*', '{public}')")
    assert_nobody(app)


# --- savepoints: SECURITY.md I7 and I8 ------------------------------------------------------------


def test_a_principal_of_a_released_savepoint_stays_and_cannot_be_replaced(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        with app.transaction():
            app.execute("select begin_as('t1', 2, null, '{public}')")
        assert column(app, "select user_id from my_principal()") == [2]
        assert refused_with(app, "select begin_as('t1', 1, null, '{public}')") == "42501"


def test_a_savepoint_cannot_change_the_principal(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        app.execute("select begin_as('t1', 1, null, '{public}')")
        app.execute("savepoint inner_one")
        with pytest.raises(InsufficientPrivilege):
            app.execute("select begin_as('t1', 2, null, '{public}')")
        app.execute("rollback to savepoint inner_one")
        app.execute("release savepoint inner_one")
        assert column(app, "select user_id from my_principal()") == [1]


def test_rolling_back_to_a_savepoint_takes_its_principal_back(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        with app.transaction(force_rollback=True):
            app.execute("select begin_as('t1', 2, null, '{public}')")
        assert_nobody(app)
        app.execute("select begin_as('t1', 1, null, '{public}')")
        assert column(app, "select user_id from my_principal()") == [1]


# --- malformed variables: SECURITY.md I1 to I5 ----------------------------------------------------


def test_a_valid_context_sees_something_in_every_table(service: psycopg.Connection) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID)
        counts = rows_in_every_table(service)
    assert min(counts.values()) > 0


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_variables_that_were_never_set_are_nobody(world: Deployment, role: str) -> None:
    with world.connect(role) as connection:
        assert_nobody(connection)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}: {case}")
        for name, cases in MALFORMED.items()
        for case, value in cases.items()
    ],
)
def test_a_malformed_variable_is_nobody(service: psycopg.Connection, name: str, value: str) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID | {name: value})
        assert_nobody(service)


@pytest.mark.parametrize(
    ("tags", "held"),
    [
        ("[]", ["public"]),
        (" [ ] ", ["public"]),
        ('["hr"]', ["hr"]),
        (' [ "hr" , "legal" ]\n', ["hr", "legal"]),
        ('["hr,finance"]', ["hr,finance"]),
        ('["{hr}"]', ["{hr}"]),
        (r'["a\"b", "c\\d", "e\/f"]', ['a"b', "c\\d", "e/f"]),
        ('["ключ", "鍵", "🔑"]', ["ключ", "鍵", "🔑"]),
        ('[""]', [""]),
    ],
)
def test_a_list_of_strings_is_read_as_it_stands(service: psycopg.Connection, tags: str, held: list[str]) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID | {"app.tags": tags})
        assert column(service, "select tags from my_principal()") == [held]


def test_a_comma_inside_a_tag_does_not_make_two(service: psycopg.Connection) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID | {"app.tags": '["public,hr"]'})
        assert column(service, "select my_access_ids()") == [[]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("app.tenant_id", "t" * 128),
        ("app.user_id", "999999999999999999"),
        ("app.project_id", "p" * 128),
        ("app.tags", json.dumps([f"{number:064d}" for number in range(256)])),
    ],
)
def test_the_longest_values_are_still_somebody(service: psycopg.Connection, name: str, value: str) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID | {name: value})
        assert column(service, "select count(*) from my_principal()") == [1]


def expected_of_partial(present: set[str]) -> set[int]:
    """Classes that a partial context sees: nothing without tenant, user and tags; the project may be absent."""
    if not present >= {"app.tenant_id", "app.user_id", "app.tags"}:
        return set()
    return {1, 3, 6} if "app.project_id" in present else {1, 3}


SUBSETS = [
    {name for name, chosen in zip(VARIABLES, choice, strict=True) if chosen}
    for choice in product((False, True), repeat=4)
]


@pytest.mark.parametrize("present", SUBSETS, ids=lambda present: "+".join(sorted(present)) or "nothing")
def test_partial_contexts_with_the_others_empty(service: psycopg.Connection, present: set[str]) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, {name: VALID[name] if name in present else "" for name in VARIABLES})
        assert set(column(service, "select access_id from rag_documents")) == expected_of_partial(present)
        assert set(column(service, "select unnest(my_access_ids())")) == expected_of_partial(present)


@pytest.mark.parametrize("present", SUBSETS, ids=lambda present: "+".join(sorted(present)) or "nothing")
def test_partial_contexts_with_the_others_never_set(world: Deployment, present: set[str]) -> None:
    with world.connect() as connection, connection.transaction():
        set_variables(connection, {name: VALID[name] for name in present})
        assert set(column(connection, "select access_id from rag_documents")) == expected_of_partial(present)


# --- classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
def test_each_principal_reads_its_classes(service: psycopg.Connection, reach: Reach) -> None:
    with speaking(service, reach.principal):
        assert sorted(column(service, "select unnest(my_access_ids())")) == sorted(reach.reads)


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
def test_each_principal_writes_its_classes(
    app: psycopg.Connection, publisher: psycopg.Connection, reach: Reach
) -> None:
    with speaking(app, reach.principal):
        assert sorted(column(app, "select unnest(my_writable_access_ids())")) == sorted(reach.writes)
    with speaking(publisher, reach.principal):
        assert sorted(column(publisher, "select unnest(my_writable_access_ids())")) == sorted(
            reach.writes | reach.publishes
        )


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
def test_whoami_lists_the_classes_and_which_may_be_written(app: psycopg.Connection, reach: Reach) -> None:
    me = reach.principal
    with speaking(app, me):
        rows = app.execute("select tenant_id, user_id, project_id, tags, access_id, may_write from whoami()").fetchall()
    classes = sorted(reach.reads) or [None]
    assert sorted(rows, key=lambda row: row[4] or 0) == [
        (me.tenant_id, me.user_id, me.project_id, list(me.tags), access_id, access_id in reach.writes)
        if access_id
        else (me.tenant_id, me.user_id, me.project_id, list(me.tags), None, False)
        for access_id in classes
    ]


def test_whoami_describes_each_class(app: psycopg.Connection) -> None:
    with speaking(app, Principal(tenant_id="t1", user_id=1, project_id="gamma", tags=("public",))):
        rows = app.execute(
            "select access_id, scope, class_user_id, class_project_id, class_tags, may_write from whoami()"
        ).fetchall()
    assert rows == [
        (9, "project", 2, "gamma", ["public"], False),
        (1, "public", None, None, ["public"], False),
        (3, "user", 1, None, ["public"], True),
    ]


def test_user_0_sees_public_rows_only(service: psycopg.Connection) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, VALID | {"app.user_id": "0", "app.project_id": "*"})
        assert service.execute("select * from my_principal()").fetchall() == [("t1", None, "*", ["public"])]
        assert column(service, "select access_id from rag_chunks") == [1]
        assert rows_in_every_table(service) == {
            "rag_access_classes": 1,
            "rag_chunks": 1,
            "rag_documents": 1,
            "rag_project_members": 0,
            "rag_query_log_chunks": 0,
            "rag_query_logs": 0,
            "rag_tombstones": 1,
            "v_chunks": 1,
            "v_documents": 1,
        }


def test_sharing_a_project_opens_it_and_ending_it_closes_it(deployment: Deployment, store: Store) -> None:
    owner = Principal(tenant_id="t1", user_id=2, project_id="*")
    member = Principal(tenant_id="t1", user_id=1, project_id="gamma")
    namesake = Principal(tenant_id="t2", user_id=1, project_id="gamma")
    stored = store(owner, "the ferry sails at noon", scope="project", project_id="gamma")
    store(owner, "the ferry sails at dawn", scope="project", project_id="other")

    def documents_of(principal: Principal) -> list[UUID]:
        with deployment.transaction(principal) as connection:
            return column(connection, "select id from rag_documents")

    assert documents_of(member) == []
    with deployment.connect("rag_operator") as operator:
        operator.execute(
            "insert into rag_project_members (tenant_id, owner_user_id, project_id, member_user_id)"
            " values ('t1', 2, 'gamma', 1)"
        )
        assert documents_of(member) == [stored]
        assert documents_of(namesake) == []
        operator.execute("delete from rag_project_members")
        assert documents_of(member) == []


def test_a_member_may_write_once_the_operator_says_so(deployment: Deployment, store: Store) -> None:
    member = Principal(tenant_id="t1", user_id=1, project_id="gamma")
    claim = "select access_class('project', 2, 'gamma', '{public}')"
    with deployment.connect("rag_operator") as operator:
        operator.execute(
            "insert into rag_project_members (tenant_id, owner_user_id, project_id, member_user_id)"
            " values ('t1', 2, 'gamma', 1)"
        )
        with deployment.transaction(member) as connection:
            assert refused_with(connection, claim) == "42501"
        operator.execute("update rag_project_members set may_write = true")
    with deployment.transaction(member) as connection:
        (granted,) = column(connection, claim)
        assert column(connection, "select my_writable_access_ids()") == [[granted]]


# --- access_class ---------------------------------------------------------------------------------

USER_1 = Principal(tenant_id="t1", user_id=1, project_id="alpha", tags=("public",))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("user", 2, None, ["public"]), "another user"),
        (("user", None, None, ["public"]), "no user"),
        (("user", 0, None, ["public"]), "user 0"),
        (("public", None, None, ["public"]), "public, and the login is rag_app"),
        (("project", 1, "beta", ["public"]), "an own project that is not the one named"),
        (("project", 2, "alpha", ["public"]), "another owner's project of the same name"),
        (("project", 2, "gamma", ["public"]), "shared for reading, and not the one named"),
        (("project", 1, None, ["public"]), "no project"),
        (("user", 1, None, ["hr"]), "a tag not held"),
        (("user", 1, None, ["hr", "legal"]), "tags not held"),
        (("organization", 1, None, ["public"]), "unknown scope"),
        (("USER", 1, None, ["public"]), "scope in capitals"),
        (("", 1, None, ["public"]), "empty scope"),
        ((None, 1, None, ["public"]), "no scope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_access_class_refuses(app: psycopg.Connection, arguments: tuple[object, ...], reason: str) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, "select access_class(%s, %s::bigint, %s, %s::text[])", arguments) == "42501"


@pytest.mark.parametrize(
    ("project", "claimed", "allowed"),
    [
        ("gamma", "gamma", False),
        ("delta", "delta", True),
        ("*", "delta", True),
        ("*", "gamma", False),
        ("alpha", "delta", False),
        (None, "delta", False),
    ],
)
def test_access_class_of_a_shared_project_needs_may_write(
    app: psycopg.Connection, project: str | None, claimed: str, allowed: bool
) -> None:
    with speaking(app, Principal(tenant_id="t1", user_id=1, project_id=project)):
        state = refused_with(app, "select access_class('project', 2, %s, '{public}')", (claimed,))
    assert state == (None if allowed else "42501")


def test_access_class_gives_the_class_that_is_there(app: psycopg.Connection, publisher: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        assert column(app, "select access_class('user', 1, null, '{public}')") == [3]
        assert column(app, "select access_class('user', 1, null, '{}')") == [3]
        assert column(app, "select access_class('project', 1, 'alpha', '{public}')") == [6]
    with speaking(publisher, USER_1):
        assert column(publisher, "select access_class('public', null, null, '{public}')") == [1]


def test_access_class_makes_one_class_whatever_the_order_of_the_tags(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        (first,) = column(app, "select access_class('user', 1, null, '{public,hr}')")
        (second,) = column(app, "select access_class('user', 1, null, '{hr,public,hr}')")
        assert first == second
        assert first not in range(1, 14)
        made = app.execute(
            "select tenant_id, scope, user_id, project_id, tags from rag_access_classes where access_id = %s",
            (first,),
        ).fetchall()
        assert made == [("t1", "user", 1, None, ["hr", "public"])]


@pytest.mark.parametrize(
    "arguments",
    [
        ("project", 1, "*", ["public"]),
        ("project", 1, "", ["public"]),
        ("project", 1, "p" * 129, ["public"]),
        ("project", 1, None, ["public"]),
        ("user", 1, "alpha", ["public"]),
        ("user", 1, None, ["public", None]),
        ("user", 1, None, ["public", *map(str, range(256))]),
    ],
)
def test_a_class_that_makes_no_sense_cannot_be_made(app: psycopg.Connection, arguments: tuple[object, ...]) -> None:
    with speaking(app, Principal(tenant_id="t1", user_id=1, project_id="*")):
        before = column(app, "select count(*) from rag_access_classes")
        with pytest.raises((CheckViolation, InsufficientPrivilege)), app.transaction():
            app.execute("select access_class(%s, %s, %s, %s)", arguments)
        assert column(app, "select count(*) from rag_access_classes") == before


def test_two_writers_of_a_new_class_get_the_same_one(deployment: Deployment) -> None:
    principal = Principal(tenant_id="t1", user_id=1)
    claim = "select access_class('user', 1, null, '{public}')"
    second: list[int] = []

    def write() -> None:
        with deployment.transaction(principal) as connection:
            second.extend(column(connection, claim))

    writer = threading.Thread(target=write)
    with deployment.transaction(principal) as connection:
        (first,) = column(connection, claim)
        writer.start()
        # The other one has to wait for the end of this transaction, so wait until it does.
        with deployment.cluster.superuser(deployment.name) as watcher:
            while column(watcher, "select count(*) from pg_locks where not granted") == [0]:
                pass
    writer.join()
    assert second == [first]


# --- the login counts, not the role ---------------------------------------------------------------


def test_a_superuser_in_the_role_of_the_service_is_nobody(superuser: psycopg.Connection) -> None:
    with superuser.transaction(force_rollback=True):
        set_variables(superuser, VALID)
        superuser.execute("set local role rag_app")
        assert_nobody(superuser)


def test_the_owner_is_nobody(world: Deployment) -> None:
    with world.connect("rag_migrator") as connection, connection.transaction(force_rollback=True):
        set_variables(connection, VALID)
        connection.execute("set local role rag_owner")
        assert column(connection, "select count(*) from my_principal()") == [0]
        counts = rows_in_every_table(connection)
        assert counts == dict.fromkeys(counts, 0)


def test_the_operator_may_not_even_ask(operator: psycopg.Connection) -> None:
    with operator.transaction(force_rollback=True):
        set_variables(operator, VALID)
        for statement in (
            "select * from my_principal()",
            "select my_access_ids()",
            "select * from whoami()",
            "select * from search('palisade')",
            "select count(*) from rag_documents",
            "select count(*) from rag_chunks",
            "select count(*) from v_chunks",
            "select begin_as('t1', 1, null, '{public}')",
        ):
            assert refused_with(operator, statement) == "42501", statement


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator"])
def test_the_service_and_operators_cannot_become_another_role(world: Deployment, role: str) -> None:
    with world.connect(role) as connection:
        for other in ("postgres", "rag_owner", "rag_search", "rag_migrator", "rag_publisher", "rag_app"):
            if other != role:
                assert refused_with(connection, f"set role {other}") in ("42501", "22023"), other


EXECUTABLE = {
    "begin_as",
    "my_principal",
    "my_tenant_id",
    "my_user_id",
    "my_access_ids",
    "my_writable_access_ids",
    "narrowed_access_ids",
    "access_class",
    "whoami",
    "text_search_config",
    "lexeme_total",
    "keyword_candidates",
    "search",
}


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("rag_app", EXECUTABLE),
        ("rag_publisher", EXECUTABLE),
        ("rag_search", {"my_principal", "my_tenant_id", "my_user_id", "text_search_config", "lexeme_query"}),
        ("rag_operator", set()),
        ("rag_migrator", set()),
        ("rag_analyst", set()),
    ],
)
def test_each_role_executes_a_listed_set_of_our_functions(
    superuser: psycopg.Connection, role: str, expected: set[str]
) -> None:
    found = column(
        superuser,
        """
        select function.proname
        from pg_proc as function
        where function.pronamespace = 'rag'::regnamespace
            and has_function_privilege(%(role)s, function.oid, 'execute')
            and pg_get_userbyid(function.proowner) <> %(role)s
            and not exists (
                select 1 from pg_depend
                where classid = 'pg_proc'::regclass and objid = function.oid and deptype = 'e'
            )
        """,
        {"role": role},
    )
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator", "rag_migrator", "rag_analyst"])
def test_the_login_roles_own_nothing(superuser: psycopg.Connection, role: str) -> None:
    assert column(
        superuser,
        "select count(*) from pg_shdepend where refobjid = %s::regrole and deptype = 'o'",
        (role,),
    ) == [0]


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator", "rag_migrator"])
@pytest.mark.parametrize(
    "statement",
    [
        "create table rag.mine (id int)",
        "create table public.mine (id int)",
        "create temp table mine (id int)",
        "create view rag.mine as select 1",
        "create function rag.mine() returns int language sql return 1",
        "create function pg_temp.mine() returns int language sql return 1",
        "create schema mine",
        "alter table rag.rag_documents disable row level security",
        "drop policy read_documents on rag.rag_documents",
        "alter function rag.my_access_ids() immutable",
        "truncate rag.rag_documents",
        "alter role rag_app bypassrls",
    ],
)
def test_the_login_roles_create_and_alter_nothing(world: Deployment, role: str, statement: str) -> None:
    with world.connect(role) as connection:
        assert refused_with(connection, statement) == "42501"


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_the_service_cannot_pass_on_its_rights(world: Deployment, role: str) -> None:
    with world.connect(role) as connection, connection.transaction(force_rollback=True):
        # Postgres warns instead of failing, and grants nothing.
        connection.execute("grant select on rag.rag_documents to rag_analyst, rag_operator")
        for grantee in ("rag_analyst", "rag_operator"):
            statement = "select has_table_privilege(%s, 'rag.rag_documents', 'select')"
            assert column(connection, statement, (grantee,)) == [False]


def test_the_definers_owner_may_create_nothing_and_read_no_text(superuser: psycopg.Connection) -> None:
    with superuser.transaction(force_rollback=True):
        superuser.execute("set local role rag_search")
        for statement in (
            "create table rag.mine (id int)",
            "select chunk_text from rag_chunks",
            "select embedding from rag_chunks",
            "select count(*) from rag_documents",
            "select count(*) from rag_query_logs",
            "update rag_access_classes set tags = '{public}'",
            "delete from rag_access_classes",
        ):
            assert refused_with(superuser, statement) == "42501", statement


def test_unknown_scopes_are_an_error_and_not_everything(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        for scope in ("", "PUBLIC", "all", "public ", "tenant"):
            assert refused_with(app, "select narrowed_access_ids(%s)", (scope,)) == "22023"


def test_no_message_of_a_refusal_names_a_tenant_or_a_user(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        app.execute("select begin_as('t1', 1, null, '{public}')")
        for statement in (
            "select begin_as('t2', 777, null, '{public}')",
            "select access_class('user', 777, null, '{public}')",
        ):
            with pytest.raises(InsufficientPrivilege) as caught, app.transaction():
                app.execute(statement)
            assert "777" not in str(caught.value)
            assert "t2" not in str(caught.value)
