"""The read oracle: what random sessions read, each way, is what the model says; and the oracle finds leaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.barrier.oracle_model import (
    AccessClass,
    Analyst,
    BeginAs,
    Corpus,
    Identity,
    LoggedQuestion,
    Membership,
    analyst_learns,
    analyst_reads,
    identify,
    may_read,
    may_write,
    parse_tags,
    sight_of,
    sign,
)
from tests.barrier.oracle_planting import Plant, altered, rewritten
from tests.barrier.oracle_reading import PATHS, read_oracle
from tests.barrier.oracle_world import (
    MODELS,
    PLAN_MODES,
    WORDS,
    Keys,
    Names,
    Speaker,
    begin,
    plant,
    random_corpus,
    seed_of_run,
    vector,
)
from tests.conftest import Deployment

NewDeployment = Callable[[], AbstractContextManager[Deployment]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The full count runs in four parts, side by side.

    The first part has the seed that RAG_TEST_SEED gives, and so repeats what any of them found.
    """
    if "part" in metafunc.fixturenames:
        parts = 4 if metafunc.config.getoption("--scale") == "prove" else 1
        metafunc.parametrize(("part", "parts"), [(part, parts) for part in range(parts)])


def test_random_sessions_read_what_the_model_says(
    new_deployment: NewDeployment, scaled: Callable[..., int], figure: Callable[[str], None], part: int, parts: int
) -> None:
    triples = scaled(test=600, ci=10_000, prove=1_000_000) // parts
    corpora = scaled(test=8, ci=60, prove=2_000) // parts
    with new_deployment() as deployment, read_oracle(deployment, seed=seed_of_run() + part) as oracle:
        report = oracle.run(triples=triples, corpora=corpora, large=True)
    assert report.is_clean, str(report)
    assert report.checks == triples
    # Where there is nothing to see, nothing leaks.
    assert oracle.answered > triples / 4
    if triples >= 10_000:
        ways = {(path.name, mode, prepared) for path in PATHS for mode in PLAN_MODES for prepared in (False, True)}
        assert set(oracle.asked) == ways
    figure(
        f"read oracle, seed {oracle.seed}: {triples:,} triples on {corpora} corpora, {oracle.answered:,} of them with"
        f" rows: 0 leaks, 0 wrongly hidden, 0 errors"
    )


# --- the oracle is believed because it finds what is there to be found -------------------------------


PLANTS = {
    "a second permissive policy on documents": Plant(
        make=altered("create policy extra on rag_documents for select to rag_app, rag_publisher using (true)"),
        path="keys of rag_documents",
    ),
    "a permissive policy for the reading functions on chunks": Plant(
        make=altered("create policy extra on rag_chunks for select to rag_principal using (true)"), path="my_chunks"
    ),
    "no tenant belt on documents": Plant(
        make=altered("drop policy own_tenant_select on rag_documents"), path="keys of rag_documents"
    ),
    "no tenant belt for the reading functions": Plant(
        make=altered("drop policy own_tenant_reading_select on rag_documents"), path="my_documents"
    ),
    "no row security on chunks": Plant(
        make=altered("alter table rag_chunks disable row level security"), path="keys of rag_chunks"
    ),
    "a policy that lets members see all sharing": Plant(
        seed=2,
        make=altered("create policy extra on rag_project_members for select to rag_principal using (true)"),
        path="my_members",
    ),
    "a reading function of a superuser": Plant(
        make=altered("alter function my_documents() owner to current_user"), path="v_documents"
    ),
    "a function of the caller's that counts as leakproof": Plant(
        seed=2,
        make=altered(
            "alter function eavesdrop.heard(text, uuid) leakproof",
            "alter function eavesdrop.heard(text, bigint) leakproof",
            # A scan of the table comes by the rows of others; one along an index of tenant and class does not.
            """
            do $$
            begin
                execute format('alter role rag_app in database %I set enable_indexscan = off', current_database());
                execute format('alter role rag_app in database %I set enable_indexonlyscan = off', current_database());
                execute format('alter role rag_app in database %I set enable_bitmapscan = off', current_database());
            end
            $$
            """,
        ),
        path="eavesdropper, ",
    ),
    "an immutable identity": Plant(make=altered("alter function my_access_ids() immutable")),
    "an immutable tenant": Plant(
        seed=7, make=altered("alter function my_tenant_id() immutable"), kind="hidden", path="keys of rag_chunks"
    ),
    "an identity that outlives its transaction": Plant(
        seed=5, make=rewritten("begin_as", "set local app.", "set app.", times=5), path="whoami"
    ),
    "the tags of a public class not compared": Plant(
        seed=2,
        make=rewritten("classes_of", "class.scope = 'public' and class.tags && me.tags", "class.scope = 'public'"),
        path="my_documents",
    ),
    "tags contained instead of overlapping": Plant(
        seed=7,
        make=rewritten(
            "classes_of",
            "class.user_id = me.user_id and class.tags && me.tags",
            "class.user_id = me.user_id and class.tags <@ me.tags",
        ),
        kind="hidden",
        path="my_documents",
    ),
    "the owner of a user class not compared": Plant(
        seed=3,
        make=rewritten("classes_of", "class.scope = 'user' and class.user_id = me.user_id", "class.scope = 'user'"),
        path="hybrid search",
    ),
    "the name of a project not compared": Plant(
        seed=5,
        make=rewritten("classes_of", "me.project_id = '*' or class.project_id = me.project_id", "true"),
        path="count of rag_documents by class",
    ),
    "a project shared with somebody shared with everybody": Plant(
        seed=5, make=rewritten("classes_of", "and membership.member_user_id = me.user_id", ""), path="v_chunks"
    ),
    "classes of others listed": Plant(
        make=rewritten("my_classes", "and class.access_id = any((select classes_of(me))::bigint[])", ""),
        path="my_classes",
    ),
    "a user's documents shown to analysts": Plant(
        make=rewritten("classes_of", "when 'user' then me.user_scope = 'text'", "when 'user' then true"),
        path="v_chunks",
    ),
    "the scope of a search ignored": Plant(
        seed=5,
        make=rewritten("narrowed_access_ids", "when 'public' then class.scope = 'public'", "when 'public' then true"),
        path="search by keywords",
    ),
    "a signature not verified": Plant(
        seed=6, make=rewritten("signature_holds", "code = piece[3]", "true"), session="a key of one's own"
    ),
    "no signature needed": Plant(
        make=rewritten("my_principal", "if signature_holds(", "if true or signature_holds("),
        session="signature",
    ),
    "an expiry not looked at": Plant(
        seed=5,
        make=rewritten("signature_holds", "- extract(epoch from now()) not between 0 and 43200", "is null"),
        session="expired",
    ),
    "a signature good for any login": Plant(
        seed=3,
        make=rewritten(
            "my_principal",
            "if signature_holds(",
            """
            if signature_holds(
                array['rag_app', tenant, users, project] || tags, current_setting('app.signature', true)
            ) or signature_holds(
                array['rag_publisher', tenant, users, project] || tags, current_setting('app.signature', true)
            ) or signature_holds(
            """,
        ),
        session="signed for the other login",
    ),
    "a key that is never retired": Plant(
        seed=4,
        make=altered("create rule stay as on delete to rag_signing_keys do instead nothing"),
        session="a retired key",
    ),
    "a user number read leniently": Plant(
        seed=3,
        make=rewritten("my_principal", "'^(0|[1-9][0-9]{0,17})$'", r"'^\s*[+-]?[0-9]{1,18}\s*$'"),
        session="malformed app.user_id",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_oracle_finds_a_planted_leak(new_deployment: NewDeployment, name: str) -> None:
    leak = PLANTS[name]
    with (
        new_deployment() as deployment,
        read_oracle(deployment, seed=leak.seed, only_prepared=True, spoil=leak.make) as oracle,
    ):
        # Most are found among the first hundreds; what takes chance has as many as a commit's own search.
        report = oracle.run(triples=10_000, corpora=100, until=leak.noticed)
    assert leak.noticed(report), str(report)


# --- what cannot be seen changes nothing -------------------------------------------------------------


def told(connection: psycopg.Connection, questions: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The answers, whole rows; without an order where there is none."""
    answers: list[Any] = []
    for statement, parameters in questions:
        rows = connection.execute(statement.encode(), parameters).fetchall()
        answers.append(rows if " rag.search(" in statement else sorted(map(repr, rows)))
    return answers


def questions_about(random: Random, corpus: Corpus) -> list[tuple[str, dict[str, Any]]]:
    questions: list[tuple[str, dict[str, Any]]] = [
        (f"select * from {source}", {})
        for source in (
            *("rag.my_documents()", "rag.my_chunks()", "rag.my_classes()", "rag.whoami()", "rag.my_members()"),
            *("rag.my_queries()", "rag.my_query_chunks()", "rag.v_documents", "rag.v_chunks", "rag.v_query_latency"),
            *("rag.v_empty_results", "rag.v_source_usage"),
        )
    ]
    for _ in range(6):
        # Sums of two terms do not depend on the order of the rows.
        words = random.sample(WORDS, random.randint(0, 2))
        with_vector = not words or random.random() < 0.5
        questions.append(
            (
                """
                select * from rag.search(
                    %(question)s, cast(%(embedding)s as rag.halfvec), %(model)s, top_k => %(top_k)s,
                    include_dropped => %(dropped)s, budget_tokens => %(budget)s
                )
                """,
                {
                    "question": " ".join(words),
                    "embedding": vector([1.0, *(float(random.randint(-9, 9)) for _ in range(3))])
                    if with_vector
                    else None,
                    "model": random.choice(MODELS) if with_vector else None,
                    "top_k": random.choice((1, 3, 50)),
                    "dropped": random.random() < 0.5,
                    "budget": random.choice((None, 5)),
                },
            )
        )
    for _ in range(6):
        chosen = random.choice(corpus.documents)
        questions += [
            (f"select * from rag.{function}(%(id)s)", {"id": chosen.id})
            for function in ("my_document", "my_document_chunks")
        ]
        questions += [
            ("select * from rag.my_documents_among(array[%(id)s])", {"id": chosen.id}),
            ("select * from rag.my_sources_among(array[%(id)s])", {"id": chosen.source_id}),
        ]
        source = {
            "access": chosen.access.access_id,
            "scope": chosen.access.scope,
            "owner": chosen.access.owner,
            "project": chosen.access.project,
            "type": chosen.source_type,
            "source": chosen.source_id,
        }
        named = "%(access)s, %(scope)s, %(owner)s, %(project)s, %(type)s, %(source)s"
        questions += [
            (f"select * from rag.find_source({named})", source),
            (f"select * from rag.look_at_source({named}, %(source)s)", source),
        ]
    return questions


def only_seen(corpus: Corpus, identity: Identity) -> Corpus:
    sight = sight_of(corpus, identity, login="rag_app")
    return Corpus(
        classes=tuple(access for access, _ in sight.classes),
        documents=sight.documents,
        memberships=sight.memberships,
        questions=sight.questions,
    )


def compare_with_and_without(deployment: Deployment, *, principals: int, seed: int) -> list[str]:
    """What each of some principals is told of a corpus, and of the part of it that they see: the differences."""
    differences = []
    with deployment.cluster.superuser(deployment.name) as superuser, deployment.connect() as connection:
        keys = Keys.made(superuser)
        for number in range(principals):
            random = Random(f"{seed} interference {number}")
            names = Names.chosen(random)
            corpus = random_corpus(random, names)
            speaker = Speaker(random=random, names=names, keys=keys, login="rag_app")
            person = speaker.person()
            identity = Identity(
                tenant=person.tenant, user=person.user, project=person.project, tags=person.tags or ("public",)
            )
            questions = questions_about(random, corpus)
            answers = []
            for version in (corpus, only_seen(corpus, identity)):
                plant(superuser, version)
                with connection.transaction(force_rollback=True):
                    begin(connection, speaker.signed(person))
                    answers.append(told(connection, questions))
            differences += [
                f"principal {number}, {person}: {question} tells {whole!r} and {part!r}; RAG_TEST_SEED={seed}"
                for question, whole, part in zip(questions, *answers, strict=True)
                if whole != part
            ]
    return differences


def test_what_a_principal_is_told_does_not_depend_on_what_it_cannot_see(
    new_deployment: NewDeployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    principals = scaled(test=20, ci=100, prove=2_000)
    seed = seed_of_run()
    with new_deployment() as deployment:
        differences = compare_with_and_without(deployment, principals=principals, seed=seed)
    assert not differences, "\n".join(differences[:5])
    figure(f"same answers with foreign rows and without, seed {seed}: {principals:,} principals, 0 differences")


def test_a_document_frequency_of_foreign_rows_is_found(new_deployment: NewDeployment) -> None:
    spoil = rewritten(
        "keyword_candidates",
        "and chunk.access_id = any($2) offset 0",
        "offset 0",
    )
    with new_deployment() as deployment:
        with deployment.cluster.superuser(deployment.name) as superuser:
            spoil(superuser)
        assert compare_with_and_without(deployment, principals=5, seed=1)


# --- the model itself, by hand -----------------------------------------------------------------------

ALICE = Identity(tenant="acme", user=1, project="*", tags=("public", "hr"))


def access(scope: str, owner: int | None, project: str | None, *tags: str, tenant: str = "acme") -> AccessClass:
    return AccessClass(tenant=tenant, access_id=1, scope=scope, owner=owner, project=project, tags=tags)


MEMBERS = (
    Membership(tenant="acme", owner=2, project="gamma", member=1, may_write=False),
    Membership(tenant="acme", owner=2, project="delta", member=1, may_write=True),
    Membership(tenant="umbrella", owner=2, project="alpha", member=1, may_write=True),
)


@pytest.mark.parametrize(
    ("who", "what", "reads", "writes"),
    [
        (ALICE, access("public", None, None, "hr"), True, False),
        (ALICE, access("public", None, None, "hr", tenant="Acme"), False, False),
        (ALICE, access("public", None, None, "HR", "hr "), False, False),
        (ALICE, access("user", 1, None, "public"), True, True),
        (ALICE, access("user", 1, None, "finance"), False, False),
        (ALICE, access("user", 2, None, "public"), False, False),
        (ALICE, access("project", 1, "alpha", "public"), True, True),
        (ALICE, access("project", 2, "alpha", "public"), False, False),
        (ALICE, access("project", 2, "gamma", "public"), True, False),
        (ALICE, access("project", 2, "delta", "public"), True, True),
        (ALICE, access("project", 2, "alpha", "public", tenant="umbrella"), False, False),
        (replace(ALICE, project="alpha"), access("project", 1, "alpha", "hr"), True, True),
        (replace(ALICE, project="alpha"), access("project", 1, "beta", "hr"), False, False),
        (replace(ALICE, project="alpha"), access("project", 2, "delta", "hr"), False, False),
        (replace(ALICE, project=None), access("project", 1, "alpha", "hr"), False, False),
        (replace(ALICE, project=None), access("user", 1, None, "hr"), True, True),
        (replace(ALICE, user=None), access("public", None, None, "hr"), True, False),
        (replace(ALICE, user=None), access("user", 1, None, "hr"), False, False),
        (None, access("public", None, None, "public"), False, False),
    ],
)
def test_the_model_by_hand(who: Identity | None, what: AccessClass, reads: bool, writes: bool) -> None:
    assert may_read(who, what, MEMBERS) is reads
    assert may_write(who, what, MEMBERS, login="rag_app") is writes
    assert may_write(who, what, MEMBERS, login="rag_publisher") is (writes or (reads and what.scope == "public"))


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("[]", ()),
        (' [ "hr" ,\t"a\\/b"\n] ', ("hr", "a/b")),
        ('["hr,finance"]', ("hr,finance",)),
        ('["\\"","\\\\"]', ('"', "\\")),
        ('["\\\\n"]', ("\\n",)),
        (None, None),
        ("", None),
        ('["\\n"]', None),
        ('["\\u0061"]', None),
        ("[1]", None),
        ('"hr"', None),
        ('\x0b["hr"]', None),
    ],
)
def test_the_model_reads_tags_by_hand(text: str | None, tags: tuple[str, ...] | None) -> None:
    assert parse_tags(text) == tags


def test_the_model_verifies_signatures_by_hand() -> None:
    # printf '["rag_app","acme","1","","1000","hr"]' | openssl dgst -sha256 -mac HMAC -macopt hexkey:6b6579
    signature = "k1.1000.a8e47bea6891cafa6099e2ac0b6fa963ac1cef43a260a2574189c3de28bd9019"
    variables = BeginAs(tenant="acme", user=1, project=None, tags=("hr",), signature=signature).variables()
    how: dict[str, Any] = {"login": "rag_app", "keys": {"k1": b"key"}}
    assert sign(b"key", ("rag_app", "acme", "1", "", "hr"), key_id="k1", expires="1000") == signature
    assert identify(variables, began_at=1000.0, **how) == Identity(tenant="acme", user=1, project=None, tags=("hr",))
    assert identify(variables, began_at=1000.5, **how) is None
    assert identify(variables, began_at=1000.0 - 43_200.5, **how) is None
    assert identify(variables, began_at=1000.0, login="rag_publisher", keys=how["keys"]) is None
    assert identify(variables | {"app.user_id": "2"}, began_at=1000.0, **how) is None


def test_the_model_of_analysts_by_hand() -> None:
    analyst = Analyst(role="ann", tenant="acme", tags=("hr",), projects=("alpha",), user_scope="metadata")
    assert analyst_reads(analyst, access("public", None, None, "hr", "it")) == "text"
    assert analyst_reads(analyst, access("public", None, None, "it")) == "none"
    assert analyst_reads(analyst, access("public", None, None, "hr", tenant="umbrella")) == "none"
    assert analyst_reads(analyst, access("project", 7, "alpha", "hr")) == "text"
    assert analyst_reads(analyst, access("project", 7, "beta", "hr")) == "none"
    assert analyst_reads(replace(analyst, projects=("*",)), access("project", 7, "beta", "hr")) == "text"
    assert analyst_reads(analyst, access("user", 7, None, "hr")) == "metadata"
    assert analyst_reads(replace(analyst, user_scope="text"), access("user", 7, None, "hr")) == "text"
    assert analyst_reads(replace(analyst, user_scope="none"), access("user", 7, None, "hr")) == "none"
    question = LoggedQuestion(tenant="acme", id=UUID(int=1), user=7, project="beta", text="who?", hits=())
    assert analyst_learns(analyst, question) == replace(question, project=None, text=None)
    assert analyst_learns(replace(analyst, user_scope="none", projects=("*",)), question) == replace(
        question, user=None, text=None
    )
    assert analyst_learns(replace(analyst, user_scope="text", projects=("beta",)), question) == question
