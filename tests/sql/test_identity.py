"""sql/schema/20_identity.sql: who is asking, which access classes are theirs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from itertools import product
from uuid import UUID

import psycopg
import pytest
from psycopg.errors import CheckViolation, InsufficientPrivilege, InvalidAuthorizationSpecification

from rag.principal import Principal
from tests.conftest import Deployment
from tests.sql.world import (
    REACHES,
    SERVICE_READS,
    VARIABLES,
    Reach,
    column,
    document_id,
    proof,
    protected_tables,
    refused_with,
    rows_everywhere,
    set_variables,
    signature,
    speaking,
)

Store = Callable[..., UUID]

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


def signed(role: str, changes: dict[str, str] | None = None, *, tags: Sequence[str] = ("public",)) -> dict[str, str]:
    """VALID with changes, and the service's signature over exactly that; `tags` is how the list is to be read."""
    values = VALID | (changes or {})
    named = (values["app.tenant_id"], values["app.user_id"], values["app.project_id"])
    return values | {"app.signature": signature(role, *named, tags)}


def role_of(connection: psycopg.Connection) -> str:
    return connection.info.user


def begin_as(
    connection: psycopg.Connection,
    tenant: str | None,
    user: int | None,
    project: str | None,
    tags: Sequence[str] | None,
    *,
    signed_as: str | None = None,
) -> None:
    """Call begin_as with these arguments, signed by the service unless a signature is given."""
    named = (tenant or "", str(user or 0), project or "")
    given = signature(role_of(connection), *named, tags or ()) if signed_as is None else signed_as
    connection.execute(
        "select begin_as(%s, %s::bigint, %s, %s::text[], %s)",
        (tenant, user, project, None if tags is None else list(tags), given),
    )


def state_of_begin(connection: psycopg.Connection, *arguments: object, signed_as: str | None = None) -> str | None:
    """The SQLSTATE of begin_as(), None when it succeeds; undone either way."""
    try:
        with connection.transaction(force_rollback=True):
            begin_as(connection, *arguments, signed_as=signed_as)
    except psycopg.Error as error:
        return error.sqlstate
    return None


REFUSED_TO_NOBODY = {
    "select access_class('user', 1, null, '{public}')": "42501",
    "select access_class('public', null, null, '{public}')": "42501",
    "select bury_source(3, 'text', 'x', 'y')": "42501",
    "select bury_source(1, 'text', 'x', 'y')": "42501",
    "select close_sources('{3}', '{x}', '{null}', array[null]::uuid[], 'y')": "42501",
    "select share_project('alpha', 2, true)": "42501",
    "select load_service_keys(null)": "28000",
    "select load_service_keys('')": "28000",
    "insert into rag_query_logs (tenant_id, user_id, query_hash, query_length, mode, result_count, citation_count,"
    " context_tokens, retrieval_ms, generation_ms, latency_ms)"
    " values ('t1', 0, '', 0, 'none', 0, 0, 0, 0, 0, 0)": "42501",
    "insert into rag_assertions (tenant_id, key_id, user_id, tags, action)"
    " values ('t1', 'aaaaaaaaaaaaaaaa', 0, '{}', 'query')": "42501",
    "insert into rag_retractions (tenant_id, user_id, action, reason, sources, documents, chunks)"
    " values ('t1', 0, 'reinstate', 'x', 0, 0, 0)": "42501",
}


def assert_nobody(connection: psycopg.Connection) -> None:
    """No row anywhere, no error in reading, a refusal in writing. Inside or outside a transaction."""
    counts = rows_everywhere(connection)
    assert counts == dict.fromkeys(SERVICE_READS, 0)
    assert column(connection, "select my_access_ids() || my_writable_access_ids()") == [[]]
    assert column(connection, "select my_tenant_id() || my_user_id()") == [None]
    assert connection.execute("select * from search('palisade record', top_k => 20)").fetchall() == []
    assert column(connection, "select search_mode('test-model', null, null)") == ["none"]
    for function in ("my_document", "my_document_chunks"):
        assert connection.execute(f"select * from {function}(%s)", (document_id(1),)).fetchall() == []
    found = "select * from find_source(3, 'user', 1, null, 'text', 'the source')"
    assert connection.execute(found).fetchall() == [(None, None, None, None, 0)]
    looked = "select * from look_at_source(3, 'user', 1, null, 'text', 'the source', 'x')"
    assert connection.execute(looked).fetchall() == [(None, None, None, None, 0, 0, None)]
    named = f"'{{{document_id(1)},{document_id(3)}}}', '{{the source}}', '{{x}}'"
    assert connection.execute(f"select * from derived_documents({named}, true)").fetchall() == []
    assert column(connection, "select closed from retraction_of('user', 1, null, 'the source', 'x')") == [None]
    assert column(connection, "select reopen_sources('{the source}', '{x}', '{}', '{}', '{user}')") == [0]
    assert column(connection, "select class_reads(3, 'user', 1, null, '{public}')") == [False]
    assert column(connection, "select unshare_project('alpha', 2)") == [False]
    for statement, state in REFUSED_TO_NOBODY.items():
        assert refused_with(connection, statement) == state, statement
    assert connection.execute("update rag_documents set title = 'taken'").rowcount == 0
    assert connection.execute("delete from rag_chunks").rowcount == 0
    assert connection.execute("delete from rag_documents").rowcount == 0


# --- begin_as -------------------------------------------------------------------------------------


def test_begin_as_sets_all_five_variables(app: psycopg.Connection) -> None:
    code = signature("rag_app", "t1", "7", "alpha", ("hr", "two words"))
    with app.transaction():
        begin_as(app, "t1", 7, "alpha", ["hr", "two words"], signed_as=code)
        assert [column(app, "select current_setting(%s)", (name,))[0] for name in VARIABLES] == [
            "t1",
            "7",
            "alpha",
            '["hr","two words"]',
            code,
        ]


def test_begin_as_writes_what_is_absent_as_no_user_no_project_and_no_tags(app: psycopg.Connection) -> None:
    with app.transaction():
        begin_as(app, "t1", None, None, None)
        found = [column(app, "select current_setting(%s)", (name,))[0] for name in VARIABLES[:4]]
        assert found == ["t1", "0", "", "[]"]


@pytest.mark.parametrize("project", ["alpha", "*", "", None])
def test_the_same_principal_may_begin_again(app: psycopg.Connection, project: str | None) -> None:
    with app.transaction():
        for _ in range(3):
            begin_as(app, "t1", 1, project, ["public"])
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
    """Though the service has signed for either."""
    with app.transaction():
        begin_as(app, "t1", 1, "alpha", ["public"])
        assert state_of_begin(app, *other) == "42501"
        assert principals(app) == [("t1", 1, "alpha", ["public"])]


def principals(connection: psycopg.Connection) -> list[tuple[object, ...]]:
    return connection.execute("select tenant_id, user_id, project_id, tags from my_principal()").fetchall()


@pytest.mark.parametrize("name", VARIABLES[:4])
def test_begin_as_refuses_when_somebody_has_set_a_single_variable(app: psycopg.Connection, name: str) -> None:
    with app.transaction():
        set_variables(app, {name: "9"})
        assert state_of_begin(app, "t1", 1, "alpha", ["public"]) == "42501"


@pytest.mark.parametrize("tenant", ["", None])
def test_begin_as_refuses_a_principal_without_tenant(app: psycopg.Connection, tenant: str | None) -> None:
    with app.transaction():
        assert state_of_begin(app, tenant, 1, None, ["public"]) == "42501"


def test_quotes_and_backslashes_are_part_of_a_name(app: psycopg.Connection) -> None:
    tenant, project, tags = 'o\'neill \\ $$ "co"', "a'); drop", ['tab"le', "back\\slash", "comma,inside", "ключ"]
    with app.transaction():
        begin_as(app, tenant, 1, project, tags)
        assert principals(app) == [(tenant, 1, project, tags)]


def test_nothing_is_left_after_commit(service: psycopg.Connection) -> None:
    with service.transaction():
        begin_as(service, "t1", 1, "*", ["public"])
        assert column(service, "select user_id from my_principal()") == [1]
    # '' and not null: the trap of SECURITY.md I2.
    assert [column(service, "select current_setting(%s, true)", (name,))[0] for name in VARIABLES] == [""] * 5
    assert_nobody(service)


def test_nothing_is_left_after_a_commit_in_the_middle(app: psycopg.Connection) -> None:
    app.execute("begin")
    begin_as(app, "t1", 1, "*", ["public"])
    app.execute("commit and chain")
    assert_nobody(app)
    app.execute("rollback")


def test_nothing_is_left_after_an_error(app: psycopg.Connection) -> None:
    app.execute("begin")
    begin_as(app, "t1", 1, "*", ["public"])
    with pytest.raises(psycopg.errors.DivisionByZero):
        app.execute("select 1 / 0")
    app.execute("rollback")
    assert_nobody(app)


def test_outside_a_transaction_the_principal_is_lost_at_once(app: psycopg.Connection) -> None:
    begin_as(app, "t1", 1, "*", ["public"])
    assert_nobody(app)


# --- signatures -----------------------------------------------------------------------------------


def holds(connection: psycopg.Connection, parts: Sequence[str], text: str | None) -> bool:
    (found,) = column(connection, "select signature_holds(%s::text[], %s)", (list(parts), text))
    assert isinstance(found, bool)
    return found


PARTS = ("rag_app", "t1", "1", "alpha", "public", "hr")


def code_of(parts: Sequence[str] = PARTS, **named: object) -> str:
    """What the service signs PARTS with."""
    role, tenant, user, project, *tags = parts
    return signature(role, tenant, user, project, tags, **named)


def test_a_code_is_the_hmac_of_the_values_as_json(superuser: psycopg.Connection) -> None:
    """The code below is openssl's, of ["rag_app","t1","1","alpha","4102444800","public","ключ \\"/\\\\"]."""
    made = code_of(("rag_app", "t1", "1", "alpha", "public", 'ключ "/\\'), expires=4102444800)
    assert made == "test.4102444800.34a25d389f701391bfa2ea00fb088bd3c61c112e44ed445805d26db156ca7bed"
    with superuser.transaction(force_rollback=True):
        for parts in (PARTS, PARTS[:4], ("rag_app", "t1", "1", "alpha", 'ключ "/\\\x7f\u2028\U0001f511')):
            assert holds(superuser, parts, code_of(parts))


@pytest.mark.parametrize(
    "parts",
    [
        ("rag_publisher", *PARTS[1:]),
        ("rag_app", "t2", *PARTS[2:]),
        ("rag_app", "T1", *PARTS[2:]),
        ("rag_app", "t1", "2", *PARTS[3:]),
        ("rag_app", "t1", "0", *PARTS[3:]),
        (*PARTS[:3], "*", *PARTS[4:]),
        (*PARTS[:3], "", *PARTS[4:]),
        (*PARTS[:4], "hr", "public"),
        (*PARTS, "legal"),
        (*PARTS, "public"),
        PARTS[:5],
        PARTS[:4],
        (*PARTS[:4], "public,hr"),
        (*PARTS[:4], 'public","hr'),
        ("rag_app", "t1", "1alpha", "", "public", "hr"),
        ("rag_app", 't1","1', "alpha", "public", "hr"),
    ],
)
def test_a_signature_is_for_exactly_its_values(superuser: psycopg.Connection, parts: tuple[str, ...]) -> None:
    assert not holds(superuser, parts, code_of())


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (lambda code: None, "null"),
        (lambda code: "", "empty"),
        (lambda code: code[:-1], "one digit less"),
        (lambda code: code + "0", "one digit more"),
        (lambda code: code.upper(), "capitals"),
        (lambda code: " " + code, "space before"),
        (lambda code: code + "\n", "line feed after"),
        (lambda code: code.replace(".", "..", 1), "empty part"),
        (lambda code: code.replace("test.", "", 1), "no key"),
        (lambda code: code.replace("test.", "none.", 1), "unknown key"),
        (lambda code: code.replace("test.", "te%t.", 1), "pattern for a key"),
        (lambda code: code.replace("test.", "test.0", 1), "expiry with a leading zero"),
        (lambda code: code.replace("test.", "test.+", 1), "expiry with a sign"),
        (lambda code: code[:15] + ".0" + code[15:], "expiry with a fraction"),
        (lambda code: code.translate(str.maketrans("0123456789", "０１２３４５６７８９")), "fullwidth digits"),
        (lambda code: code.rpartition(".")[0] + "." + "0" * 64, "zeros"),
        (lambda code: code.rpartition(".")[0] + ".", "no code"),
        (lambda code: "." + code, "more parts"),
        (lambda code: code * 1000, "a long one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_signature_holds_for_nothing_and_is_no_error(
    superuser: psycopg.Connection, spoiled: Callable[[str], str | None], reason: str
) -> None:
    assert holds(superuser, PARTS, code_of())
    assert not holds(superuser, PARTS, spoiled(code_of()))


def test_a_signature_ends_at_its_second_and_is_for_half_a_day_at_most(superuser: psycopg.Connection) -> None:
    """Compared with the start of the transaction, which lies between two whole seconds."""
    with superuser.transaction(force_rollback=True):
        (second,) = column(superuser, "select cast(floor(extract(epoch from now())) as integer)")
        assert [
            holds(superuser, PARTS, code_of(expires=second + ahead)) for ahead in (-60, 0, 1, 43200, 43201, 86400)
        ] == [False, False, True, True, False, False]
        assert not holds(superuser, PARTS, code_of(expires=10**12))
        superuser.execute("select pg_sleep(1.1)")
        assert holds(superuser, PARTS, code_of(expires=second + 1))


def test_a_signature_of_another_key_holds_once_that_key_is_known_and_until_it_is_retired(
    app: psycopg.Connection, operator: psycopg.Connection
) -> None:
    def speaks(key_id: str, secret: bytes) -> bool:
        values = signed("rag_app") | {
            "app.signature": signature("rag_app", "t1", "1", "alpha", ["public"], key_id=key_id, secret=secret)
        }
        with app.transaction(force_rollback=True):
            set_variables(app, values)
            return principals(app) != []

    with contextlib.ExitStack() as undone:
        key_id, hexadecimal = operator.execute("select * from add_signing_key()").fetchone() or ("", "")
        undone.callback(operator.execute, "select retire_signing_key(%s)", (key_id,))
        secret = bytes.fromhex(hexadecimal)
        assert len(secret) == 32
        assert speaks(key_id, secret)
        assert speaks("test", bytes(range(32)))
        assert not speaks("test", secret)
        assert not speaks(key_id, bytes(range(32)))
        assert not speaks("other", secret)
        assert [row[0] for row in operator.execute("select * from list_signing_keys()")] == ["test", key_id]
        assert column(operator, "select retire_signing_key(%s)", (key_id,)) == [True]
        assert not speaks(key_id, secret)
        assert speaks("test", bytes(range(32)))
        assert column(operator, "select retire_signing_key(%s)", (key_id,)) == [False]


def test_two_keys_are_never_the_same(operator: psycopg.Connection) -> None:
    with operator.transaction(force_rollback=True):
        made = [operator.execute("select key_id, secret from add_signing_key()").fetchone() for _ in range(20)]
    assert len({key_id for key_id, _ in made}) == len({secret for _, secret in made}) == 20


@pytest.mark.parametrize("bad", ["none", "no code", "expired", "another principal's"])
def test_begin_as_says_that_a_signature_does_not_hold(service: psycopg.Connection, bad: str) -> None:
    role = role_of(service)
    code = {
        "none": "",
        "no code": "test",
        "expired": signature(role, "t1", "1", "alpha", ["public"], expires=1),
        "another principal's": signature(role, "t1", "2", "alpha", ["public"]),
    }[bad]
    with service.transaction():
        assert state_of_begin(service, "t1", 1, "alpha", ["public"], signed_as=code) == "28000"
        assert_nobody(service)
        begin_as(service, "t1", 1, "alpha", ["public"])
        assert state_of_begin(service, "t1", 1, "alpha", ["public"], signed_as=code) == "28000"
        assert principals(service) == [("t1", 1, "alpha", ["public"])]


def test_a_signature_is_for_one_login(app: psycopg.Connection, publisher: psycopg.Connection) -> None:
    for connection, other in ((app, "rag_publisher"), (publisher, "rag_app")):
        with connection.transaction():
            set_variables(connection, signed(other))
            assert_nobody(connection)
            set_variables(connection, signed(role_of(connection)))
            assert principals(connection) == [("t1", 1, "alpha", ["public"])]


# --- service keys ---------------------------------------------------------------------------------


def test_the_service_loads_the_keys_that_are_valid(service: psycopg.Connection, superuser: psycopg.Connection) -> None:
    """Of all tenants, without a principal; neither those that have ended nor those that were revoked."""
    with superuser.transaction(force_rollback=True):
        superuser.execute(
            """
            insert into rag_service_keys (
                tenant_id, key_id, name, secret_sha256, actions, scopes, tags, act_as, user_ids, project_ids,
                expires_at, revoked_at
            )
            values
                ('t1', 'cccccccccccccccc', 'ended', sha256(''), '{query}', '{}', null, false, null, null, now(), null),
                ('t1', 'dddddddddddddddd', 'revoked', sha256(''), '{query}', '{}', null, false, null, null,
                    'infinity', now()),
                ('t2', 'eeeeeeeeeeeeeeee', 'valid', sha256('x'), '{ingest,delete}', '{user}', '{hr}', true, '{7}',
                    '{alpha}', 'infinity', null)
            """
        )
        superuser.execute(f"set local session authorization {role_of(service)}")
        rows = superuser.execute(
            "select tenant_id, key_id, actions, scopes, tags, act_as, user_ids, project_ids"
            " from rag.load_service_keys(%s) order by key_id",
            (proof(role_of(service)),),
        ).fetchall()
    assert rows == [
        ("t1", "a" * 16, ["query"], ["public"], None, False, None, None),
        ("t2", "b" * 16, ["query"], ["public"], None, False, None, None),
        ("t2", "e" * 16, ["ingest", "delete"], ["user"], ["hr"], True, [7], ["alpha"]),
    ]


# --- savepoints: SECURITY.md I7 and I8 ------------------------------------------------------------


def test_a_principal_of_a_released_savepoint_stays_and_cannot_be_replaced(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        with app.transaction():
            begin_as(app, "t1", 2, None, ["public"])
        assert column(app, "select user_id from my_principal()") == [2]
        assert state_of_begin(app, "t1", 1, None, ["public"]) == "42501"


def test_a_savepoint_cannot_change_the_principal(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        begin_as(app, "t1", 1, None, ["public"])
        app.execute("savepoint inner_one")
        with pytest.raises(InsufficientPrivilege):
            begin_as(app, "t1", 2, None, ["public"])
        app.execute("rollback to savepoint inner_one")
        app.execute("release savepoint inner_one")
        assert column(app, "select user_id from my_principal()") == [1]


def test_rolling_back_to_a_savepoint_takes_its_principal_back(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        with app.transaction(force_rollback=True):
            begin_as(app, "t1", 2, None, ["public"])
        assert_nobody(app)
        begin_as(app, "t1", 1, None, ["public"])
        assert column(app, "select user_id from my_principal()") == [1]


# --- malformed variables: SECURITY.md I1 to I5 ----------------------------------------------------


def test_a_valid_context_sees_something_everywhere(service: psycopg.Connection) -> None:
    """But for what only analysts have; so that the zeros of the tests below say something."""
    with service.transaction(force_rollback=True):
        set_variables(service, signed(role_of(service), {"app.project_id": "*"}))
        counts = rows_everywhere(service)
    assert {name for name, count in counts.items() if count == 0} == {"my_listed_documents()"}
    assert set(counts) == SERVICE_READS


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_variables_that_were_never_set_are_nobody(world: Deployment, role: str) -> None:
    with world.connect(role) as connection:
        assert_nobody(connection)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_was_never_set_beside_all_others_is_nobody(world: Deployment, role: str, name: str) -> None:
    with world.connect(role) as connection, connection.transaction():
        set_variables(connection, {other: value for other, value in signed(role).items() if other != name})
        # The project may be absent; the signature was made for another one.
        assert_nobody(connection)


def readings(tags: str) -> list[list[str]]:
    """What a careless reader could take a text for; the service is made to sign each."""
    found = [["public"], [], [tags]]
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(tags)
        members = parsed if isinstance(parsed, list) else []
        # A lone surrogate cannot be signed.
        found.append([str(member).encode(errors="replace").decode() for member in members])
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}: {case}")
        for name, cases in MALFORMED.items()
        for case, value in cases.items()
    ],
)
def test_a_malformed_variable_is_nobody_though_the_service_signed_it(
    service: psycopg.Connection, name: str, value: str
) -> None:
    role = role_of(service)
    with service.transaction(force_rollback=True):
        for tags in readings(value) if name == "app.tags" else [["public"]]:
            set_variables(service, signed(role, {name: value}, tags=tags))
            assert principals(service) == []
        assert_nobody(service)


@pytest.mark.parametrize(
    ("tags", "held"),
    [
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
        set_variables(service, signed(role_of(service), {"app.tags": tags}, tags=held))
        assert column(service, "select tags from my_principal()") == [held]


@pytest.mark.parametrize("tags", ["[]", " [ ] "])
def test_no_tags_are_the_tag_public(service: psycopg.Connection, tags: str) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, signed(role_of(service), {"app.tags": tags}, tags=[]))
        assert column(service, "select tags from my_principal()") == [["public"]]


def test_a_comma_inside_a_tag_does_not_make_two(service: psycopg.Connection) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, signed(role_of(service), {"app.tags": '["public,hr"]'}, tags=["public,hr"]))
        assert column(service, "select my_access_ids()") == [[]]
        assert len(principals(service)) == 1


LONGEST_TAGS = [f"{number:064d}" for number in range(256)]


@pytest.mark.parametrize(
    ("name", "value", "tags"),
    [
        ("app.tenant_id", "t" * 128, ["public"]),
        ("app.user_id", "999999999999999999", ["public"]),
        ("app.project_id", "p" * 128, ["public"]),
        ("app.tags", json.dumps(LONGEST_TAGS), LONGEST_TAGS),
    ],
)
def test_the_longest_values_are_still_somebody(
    service: psycopg.Connection, name: str, value: str, tags: list[str]
) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, signed(role_of(service), {name: value}, tags=tags))
        assert len(principals(service)) == 1


def expected_of_partial(present: set[str]) -> set[int]:
    """Classes that a partial context sees: nothing without tenant, user and tags; the project may be absent."""
    if not present >= {"app.tenant_id", "app.user_id", "app.tags"}:
        return set()
    return {1, 3, 6} if "app.project_id" in present else {1, 3}


def partial(role: str, present: set[str]) -> dict[str, str]:
    """The variables that are present, signed as if the others had been meant to be empty."""
    values = {name: VALID[name] if name in present else "" for name in VARIABLES[:4]}
    tags = ["public"] if "app.tags" in present else []
    return signed(role, values, tags=tags)


SUBSETS = [
    {name for name, chosen in zip(VARIABLES[:4], choice, strict=True) if chosen}
    for choice in product((False, True), repeat=4)
]


@pytest.mark.parametrize("present", SUBSETS, ids=lambda present: "+".join(sorted(present)) or "nothing")
def test_partial_contexts_with_the_others_empty(service: psycopg.Connection, present: set[str]) -> None:
    with service.transaction(force_rollback=True):
        set_variables(service, partial(role_of(service), present))
        for source in ("rag_documents", "rag_chunks", "my_documents()", "my_chunks()", "my_classes()"):
            assert set(column(service, f"select access_id from {source}")) == expected_of_partial(present)
        assert set(column(service, "select unnest(my_access_ids())")) == expected_of_partial(present)


@pytest.mark.parametrize("present", SUBSETS, ids=lambda present: "+".join(sorted(present)) or "nothing")
def test_partial_contexts_with_the_others_never_set(world: Deployment, present: set[str]) -> None:
    with world.connect() as connection, connection.transaction():
        values = partial("rag_app", present)
        set_variables(connection, {name: values[name] for name in (*present, "app.signature")})
        assert set(column(connection, "select access_id from rag_documents")) == expected_of_partial(present)
        assert set(column(connection, "select access_id from my_documents()")) == expected_of_partial(present)


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
        listed = app.execute("select access_id, may_write from my_classes()").fetchall()
    named = (me.tenant_id, me.user_id, me.project_id, list(me.tags))
    assert sorted(listed) == [(access_id, access_id in reach.writes) for access_id in sorted(reach.reads)]
    assert sorted(rows) == [(*named, *row) for row in sorted(listed) or [(None, None)]]


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
        set_variables(service, signed(role_of(service), {"app.user_id": "0", "app.project_id": "*"}))
        assert principals(service) == [("t1", None, "*", ["public"])]
        assert column(service, "select access_id from rag_chunks") == [1]
        once = ("rag_documents", "rag_chunks", "v_documents", "v_chunks", "v_stale_documents", "v_source_usage")
        once += (
            "my_principal()",
            "whoami()",
            "my_classes()",
            "my_documents()",
            "my_chunks()",
            "my_prompt()",
            "my_limits()",
            "my_synchronisations()",
        )
        assert rows_everywhere(service) == dict.fromkeys(SERVICE_READS, 0) | dict.fromkeys(once, 1)


def test_sharing_a_project_opens_it_and_ending_it_closes_it(deployment: Deployment, store: Store) -> None:
    owner = Principal(tenant_id="t1", user_id=2, project_id="*")
    member = Principal(tenant_id="t1", user_id=1, project_id="gamma")
    namesake = Principal(tenant_id="t2", user_id=1, project_id="gamma")
    stored = store(owner, "the ferry sails at noon", scope="project", project_id="gamma")
    store(owner, "the ferry sails at dawn", scope="project", project_id="other")

    def documents_of(principal: Principal) -> list[UUID]:
        with deployment.transaction(principal) as connection:
            found = column(connection, "select id from my_documents()")
            assert column(connection, "select id from rag_documents") == found
            return found

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
    with deployment.transaction(owner) as connection:
        connection.execute("select share_project('gamma', 1, false)")
    assert documents_of(member) == [stored]
    assert documents_of(namesake) == []
    with deployment.transaction(owner) as connection:
        assert column(connection, "select unshare_project('gamma', 1)") == [True]
    assert documents_of(member) == []


def test_a_member_may_write_once_owner_or_operator_says_so(deployment: Deployment, store: Store) -> None:
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
        operator.execute("update rag_project_members set may_write = false")
    with deployment.transaction(Principal(tenant_id="t1", user_id=2)) as connection:
        connection.execute("select share_project('gamma', 1, true)")
    with deployment.transaction(member) as connection:
        assert column(connection, claim) == [granted]


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
            "select tenant_id, scope, user_id, project_id, tags from my_classes() where access_id = %s",
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
def test_a_class_that_makes_no_sense_cannot_be_made(
    app: psycopg.Connection, superuser: psycopg.Connection, arguments: tuple[object, ...]
) -> None:
    with speaking(app, Principal(tenant_id="t1", user_id=1, project_id="*")):
        with pytest.raises((CheckViolation, InsufficientPrivilege)), app.transaction():
            app.execute("select access_class(%s, %s, %s, %s)", arguments)
        assert column(app, "select count(*) from my_classes()") == [6]
    assert column(superuser, "select count(*) from rag_access_classes") == [13]


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
    for role in ("rag_app", "postgres"):
        with superuser.transaction(force_rollback=True):
            set_variables(superuser, signed(role))
            superuser.execute("set local role rag_app")
            assert_nobody(superuser)


@pytest.mark.parametrize("role", ["rag_app", "rag_migrator", "rag_owner"])
def test_the_owner_is_nobody(world: Deployment, role: str) -> None:
    """Row security binds it as well, and the functions that read have other owners."""
    with world.connect("rag_migrator") as connection, connection.transaction(force_rollback=True):
        set_variables(connection, signed(role))
        connection.execute("set local role rag_owner")
        tables = protected_tables(connection)
        assert [column(connection, f"select count(*) from {table}") for table in tables] == [[0]] * len(tables)
        for statement in ("select * from my_principal()", "select * from my_documents()", "select * from v_chunks"):
            assert refused_with(connection, statement) == "42501"


@pytest.mark.parametrize("role", ["rag_app", "rag_operator"])
def test_the_operator_may_not_even_ask(operator: psycopg.Connection, role: str) -> None:
    with operator.transaction(force_rollback=True):
        set_variables(operator, signed(role))
        for statement in (
            "select * from my_principal()",
            "select my_access_ids()",
            "select * from whoami()",
            "select * from search('palisade')",
            "select count(*) from rag_documents",
            "select count(*) from rag_chunks",
            "select count(*) from v_chunks",
            "select * from my_documents()",
            "select * from my_chunks()",
            "select * from my_queries()",
            "select begin_as('t1', 1, null, '{public}', '')",
            "select signature_holds('{}', '')",
            "select * from load_service_keys('')",
        ):
            assert refused_with(operator, statement) == "42501", statement


OTHER_ROLES = (
    *("rag_owner", "rag_search", "rag_principal", "rag_steward", "rag_embedder", "rag_analyst"),
    *("rag_migrator", "rag_publisher", "rag_app", "rag_operator", "rag_queue", "rag_worker"),
)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator"])
def test_the_service_and_operators_cannot_become_another_role(world: Deployment, role: str) -> None:
    with world.connect(role) as connection:
        for other in ("postgres", *OTHER_ROLES):
            if other != role:
                assert refused_with(connection, f"set role {other}") in ("42501", "22023"), other


# What search_vector and question_lexemes are made of.
VECTORS = ("text_vector", "prepared_vector", "unspaced_vector", "unspaced_letters", "unspaced_unit")
READING = {
    *("my_principal", "my_tenant_id", "my_user_id", "my_access_ids", "my_classes", "whoami", "my_documents"),
    *("my_listed_documents", "my_chunks", "my_document", "search_mode", "my_queries", "my_query_chunks"),
    *("my_feedback", "text_search_config", "search", "explain"),
}
SERVING = READING | {
    *("begin_as", "my_writable_access_ids", "access_class", "class_reads", "load_service_keys"),
    *("my_document_chunks", "my_documents_among", "my_sources_among", "find_source", "bury_source", "my_members"),
    *("my_min_similarity", "give_feedback", "my_tag_owner", "my_prompt"),
    *("my_synchronisations", "note_synchronisation"),
    *("post_message", "claim_messages", "my_messages", "my_summaries"),
    *("derived_documents", "retraction_of", "close_sources", "reopen_sources"),
    *("take_token", "take_token_as", "charge_quota", "my_limits"),
    *("active_model", "check_model", "compare_models"),
    *("enqueue_job", "record_request", "my_request", "my_job", "my_waiting_job", "cancel_my_job"),
    *("queue_depth", "my_origin"),
    *("claim_source", "claim_source_as", "renew_claim", "release_claim", "look_at_source", "open_source"),
    *("share_project", "unshare_project", "lexeme_total", "tenant_lock", "search_vector", *VECTORS),
}
WORKING = {
    *("claimed_messages", "add_summary"),
    *("take_job", "return_job", "recover_jobs", "expire_jobs", "queue_depth", "settle_job", "holds_job"),
    *("claim_source", "claim_source_as", "renew_claim", "release_claim", "look_at_source", "open_source"),
    *("my_origin", "bury_source", "note_synchronisation"),
    *("charge_quota", "my_limits", "active_model", "check_model"),
    *("begin_as", "my_principal", "my_tenant_id", "my_user_id", "my_access_ids", "my_writable_access_ids"),
    *("my_classes", "access_class", "class_reads", "tenant_lock", "find_source", "retraction_of"),
    *("my_document", "my_document_chunks", "text_search_config", "search_vector", "lexeme_total", *VECTORS),
}
OPERATING = {
    *("list_jobs", "resubmit_jobs", "cancel_jobs", "expire_jobs"),
    *("add_signing_key", "list_signing_keys", "retire_signing_key"),
    *(
        "forget",
        "count_traces",
        "expire_logs",
        "count_expired",
        "expire_batch",
        "explain_access",
        "embeds_with",
        "vector_share",
    ),
    *("class_indexes", "class_sizes", "measure_class", "set_class_ready", "demote_class"),
    *("usage_drift", "recount_usage"),
    *("active_model", "list_models"),
}
FOR_SEARCH = {
    *("signature_holds", "classes_of", "my_tenant_id", "tenant_lock", "class_indexes"),
    *("text_search_config", "lexeme_query", "question_lexemes", *VECTORS),
    *("candidate_query", "limits_of", "refilled_tokens"),
}
FOR_PRINCIPAL = {
    *("my_principal", "my_tenant_id", "my_user_id", "i_am_analyst", "my_access_ids", "my_writable_access_ids"),
    *(
        "narrowed_access_ids",
        "my_classes",
        "tenant_lock",
        "thread_lock",
        "source_digest",
        "erasure_digest",
        "keyword_candidates",
    ),
    "provenance_digest",
    *("text_search_config", "lexeme_query", "question_lexemes", *VECTORS),
    *("class_contents", "indexed_among", "nearest_indexed", "vector_share", "fuse_candidates"),
    *("my_tags", "feedback_support", "push_job", "drop_queued"),
}


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("rag_app", SERVING),
        ("rag_publisher", SERVING | {"settle_job", "holds_job"}),
        ("rag_worker", WORKING),
        ("rag_queue", {"proof_holds"}),
        ("rag_analyst", READING),
        ("rag_operator", OPERATING),
        ("rag_migrator", set()),
        ("rag_search", FOR_SEARCH),
        ("rag_principal", FOR_PRINCIPAL),
        (
            "rag_steward",
            {
                "tenant_lock",
                "erasure_digest",
                "erasure_kind",
                "expired_questions",
                "expired_assertions",
                "expired_messages",
                "drop_queued",
            },
        ),
        ("rag_embedder", {"class_indexes"}),
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


@pytest.mark.parametrize(
    "role", ["rag_app", "rag_publisher", "rag_worker", "rag_operator", "rag_migrator", "rag_analyst"]
)
def test_the_login_roles_own_nothing(superuser: psycopg.Connection, role: str) -> None:
    assert column(
        superuser,
        "select count(*) from pg_shdepend where refobjid = %s::regrole and deptype = 'o'",
        (role,),
    ) == [0]


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_worker", "rag_operator", "rag_migrator"])
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


@pytest.mark.parametrize(
    ("role", "refused"),
    [
        (
            "rag_search",
            (
                *("select chunk_text from rag_chunks", "select section from rag_chunks"),
                *(f"select {name} from rag_documents" for name in ("title", "body", "source_id", "source_uri")),
                *("select metadata from rag_documents", "select source_hash from rag_documents"),
                *("select count(*) from rag_query_logs", "select count(*) from rag_assertions"),
                "select count(*) from rag_retractions",
                *("update rag_access_classes set tags = '{public}'", "delete from rag_access_classes"),
                *("insert into rag_signing_keys values ('x', '', '')", "delete from rag_signing_keys"),
                "update rag_analysts set tenant_id = 't2'",
                *("select second_embedding from rag_chunks", "select count(*) from rag_models"),
            ),
        ),
        (
            "rag_embedder",
            (
                *("select embedding from rag_chunks", "select tsv from rag_chunks", "delete from rag_chunks"),
                *("update rag_chunks set embedding = null", "update rag_chunks set chunk_text = ''"),
                *(
                    f"select {name} from rag_documents"
                    for name in ("body", "source_id", "source_uri", "metadata", "tags")
                ),
                *("select scope from rag_access_classes", "select tags from rag_access_classes"),
                *("select count(*) from rag_query_logs", "select count(*) from rag_signing_keys"),
                *("update rag_documents set title = ''", "update rag_class_indexes set ready = true"),
            ),
        ),
        (
            "rag_principal",
            (
                *("select count(*) from rag_signing_keys", "select count(*) from rag_analysts"),
                *("select count(*) from rag_service_keys", "select count(*) from rag_assertions"),
                "select count(*) from rag_retractions",
                *("select count(*) from rag_access_classes", "select kind from rag_erasures"),
                *("select rows_removed from rag_erasures", "delete from rag_documents", "delete from rag_chunks"),
                *("update rag_documents set title = ''", "delete from rag_tombstones"),
                "select signature_holds('{}', '')",
            ),
        ),
        (
            "rag_steward",
            (
                *(
                    "select chunk_text from rag_chunks",
                    "select tsv from rag_chunks",
                    "select embedding from rag_chunks",
                ),
                *(f"select {name} from rag_documents" for name in ("title", "body", "source_uri", "metadata", "tags")),
                *("select query_text from rag_query_logs", "select query_hash from rag_query_logs"),
                *("select inner_pad from rag_signing_keys", "select outer_pad from rag_signing_keys"),
                *("select secret_sha256 from rag_service_keys", "select tags from rag_assertions"),
                *("select reason from rag_retractions", "select cascade_id from rag_tombstones"),
                *("update rag_documents set title = ''", "insert into rag_access_classes default values"),
                *("update rag_project_members set may_write = true", "insert into rag_analysts default values"),
            ),
        ),
    ],
)
def test_the_definers_owners_may_create_nothing_and_read_no_more_than_they_need(
    superuser: psycopg.Connection, role: str, refused: tuple[str, ...]
) -> None:
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"set local role {role}")
        for statement in ("create table rag.mine (id int)", "create temp table mine (id int)", *refused):
            assert refused_with(superuser, statement) == "42501", statement


def test_unknown_scopes_are_an_error_and_not_everything(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        for scope in ("", "PUBLIC", "all", "public ", "tenant"):
            assert refused_with(app, "select search_mode(null, %s, null)", (scope,)) == "22023"
            assert refused_with(app, "select from search('palisade', scope => %s)", (scope,)) == "22023"


def test_no_message_of_a_refusal_names_a_tenant_or_a_user(app: psycopg.Connection) -> None:
    with app.transaction(force_rollback=True):
        begin_as(app, "t1", 1, None, ["public"])
        for statement in (
            "select begin_as('t2', 777, null, '{public}', 'test.1.00')",
            "select begin_as('t1', 1, null, '{public}', 'test.777.00')",
            "select access_class('user', 777, null, '{public}')",
            "select bury_source(777, 'text', 't2', 'why')",
            "select close_sources('{777}', '{t2}', '{null}', array[null]::uuid[], 'why')",
            "select load_service_keys('test.777.00')",
        ):
            with pytest.raises((InsufficientPrivilege, InvalidAuthorizationSpecification)) as caught, app.transaction():
                app.execute(statement)
            told = (caught.value.diag.message_primary, caught.value.diag.message_detail, caught.value.diag.message_hint)
            assert "777" not in str(told)
            assert "t2" not in str(told)
