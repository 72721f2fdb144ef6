"""Examines a deployment for a DBA: what would let somebody past the barrier, and the SQL that mends it.

From the catalog, which every login may read; by a canary, as each login that it is given; and from what is
stored, as far as a superuser's URL allows. Nothing that it writes stays.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row

from rag import canary, deployment, maintain, manifest, screen
from rag.active_model import close_models, open_models
from rag.database import Session, check_schema, translated_errors
from rag.errors import DatabaseUnavailable, EmbeddingError, InvalidInput, RAGServiceError, SchemaMismatch
from rag.finding import SEVERITIES, Finding, Severity, worst_first
from rag.settings import Settings
from rag.sign import Signer

# By severity: 0 for a note or nothing, so that a script can go on.
EXIT_CODES: dict[Severity, int] = {"error": 2, "warning": 1, "note": 0}
COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """The URLs and the key that the settings name; those of the embedded database all at once."""

    app: str | None
    publisher: str | None
    operator: str | None
    administrator: str | None
    signing_key: str | None


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found, what was looked at, and what could not be."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def add(self, *findings: Finding) -> None:
        """Add what was not found before, from another login."""
        self.findings += [finding for finding in dict.fromkeys(findings) if finding not in self.findings]

    @property
    def exit_code(self) -> int:
        return max((EXIT_CODES[finding.severity] for finding in self.findings), default=0)

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> str:
        return json.dumps(
            {
                "findings": [asdict(finding) for finding in worst_first(self.findings)],
                "checked": self.checked,
                "unchecked": self.unchecked,
            },
            ensure_ascii=False,
        )

    def print(self) -> None:
        """A script for psql: a comment for each finding, below it the SQL; then what was looked at."""
        for finding in worst_first(self.findings):
            colour = COLOURS[finding.severity]
            screen.out.print(f"[{colour}]-- {finding.severity:<8} {_comment(str(finding))}[/{colour}]")
            if finding.mend is not None:
                # As it is: spaces before a line of a function's body would be part of the function.
                screen.out.print(screen.shown(finding.mend))
        for line in self.checked:
            screen.out.print(f"[dim]-- checked: {_comment(line)}[/dim]")
        for line in self.unchecked:
            screen.out.print(f"[dim]-- not checked: {_comment(line)}[/dim]")
        counts = {severity: sum(finding.severity == severity for finding in self.findings) for severity in SEVERITIES}
        said = [f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count]
        screen.out.print(f"-- {', '.join(said) or 'nothing to mend'}")


def _comment(text: str) -> str:
    """One line, whatever somebody has called an object: what follows a line feed would be run."""
    return screen.shown(" ".join(text.split()))


def run(settings: Settings, *, as_json: bool) -> int:
    """Examine, print, and return the exit code."""
    report = Report()
    try:
        asyncio.run(examine(report, settings, locate(settings)))
    except RAGServiceError as error:
        report.add(Finding(severity="error", object="database", message=error.message))
    if as_json:
        screen.print_json(report.as_json())
    else:
        report.print()
    return report.exit_code


def locate(settings: Settings) -> Logins:
    """The databases that the settings name, else the embedded one, which is not made here.

    Raises EmbeddedUnavailable, SchemaMismatch, DatabaseUnavailable.
    """
    named = [
        settings.rag_database_url,
        settings.rag_publisher_database_url,
        settings.rag_operator_database_url,
        settings.rag_admin_database_url,
    ]
    if any(url is not None for url in named):
        app, publisher, operator, administrator = (None if url is None else url.get_secret_value() for url in named)
        key = settings.rag_signing_key
        return Logins(
            app=app,
            publisher=publisher,
            operator=operator,
            administrator=administrator,
            signing_key=None if key is None else key.get_secret_value(),
        )
    if not settings.rag_home.exists():
        home = settings.rag_home.absolute()
        raise DatabaseUnavailable(f"there is no embedded database in {home}; `rag db start` makes one, or set RAG_HOME")
    place = deployment.locate(settings)
    assert place.server is not None
    return Logins(
        app=place.app_url,
        publisher=place.publisher_url,
        operator=place.server.url("rag_operator"),
        administrator=place.server.url("postgres"),
        signing_key=place.server.signing_key(),
    )


async def examine(report: Report, settings: Settings, logins: Logins) -> None:
    """Look at everything that can be looked at from these logins."""
    signer = None
    if logins.signing_key is not None:
        try:
            signer = Signer.parse(logins.signing_key)
        except InvalidInput as error:
            report.add(Finding(severity="error", object="RAG_SIGNING_KEY", message=error.message))
    widest = next(url for url in (logins.administrator, logins.operator, logins.app, logins.publisher) if url)
    async with _connected(widest) as connection:
        migrated = await _examine_catalog(report, connection, settings)
    if not migrated:
        report.unchecked.append("the catalog, reading and writing: the schema is not that of this version")
        return
    await _examine_service(report, logins, settings, signer)
    await _examine_as_operator(report, logins, signer)
    await _examine_as_superuser(report, logins, settings)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[AsyncConnection[DictRow]]:
    with translated_errors():
        connection = await AsyncConnection.connect(
            url, row_factory=dict_row, autocommit=True, prepare_threshold=None, connect_timeout=10
        )
        async with connection:
            yield connection


async def _examine_catalog(report: Report, connection: AsyncConnection[DictRow], settings: Settings) -> bool:
    """Whether the schema is that of this version, so that there is something to compare it with."""
    session = Session(connection)
    found = await session.row("check_barrier", {})
    assert found is not None
    try:
        await check_schema(connection, found, dimensions=settings.embedding_widths)
    except SchemaMismatch as error:
        report.add(Finding(severity="error", object="schema rag", message=error.message))
        return False
    report.add(*await manifest.differences(session, dimensions=found["embedding_dimensions"]))
    report.checked.append(f"the catalog, {len(manifest.expected())} facts")
    report.add(*(Finding(**row) for row in await session.rows("doctor_queue", {})))
    report.checked.append("the queue of jobs: owners and rights")
    return True


async def _examine_service(report: Report, logins: Logins, settings: Settings, signer: Signer | None) -> None:
    """As the service does when it starts, and then with everybody who might come."""
    if logins.app is None:
        report.unchecked.append("reading and writing as the service: set RAG_DATABASE_URL")
        return
    if logins.signing_key is None:
        unset = "is not set, and the database takes no identity that is not signed; `rag keys sign` makes a key"
        report.add(Finding(severity="error", object="RAG_SIGNING_KEY", message=unset))
    if signer is None:
        return
    place = deployment.Deployment(app_url=logins.app, publisher_url=logins.publisher, signer=signer, server=None)
    if logins.publisher is None:
        report.unchecked.append("reading and writing as rag_publisher: set RAG_PUBLISHER_DATABASE_URL")
    dimensions = settings.embedding_widths
    refused: RAGServiceError | None = None
    async with place.open(settings) as database:
        try:
            for warning in await database.check_barrier(dimensions=dimensions, strict=False):
                report.add(Finding(severity="warning", object="server", message=warning))
        except RAGServiceError as error:
            refused = error
        try:
            report.add(*await database.examine(dimensions=dimensions, thorough=True))
            report.checked.append("reading and writing as the service, by a canary")
        except RAGServiceError as error:
            refused = refused or error
    # What the catalog shows as well has been said, with the SQL that mends it.
    if refused is not None and not report.has_errors:
        report.add(Finding(severity="error", object="start of the service", message=refused.message))


async def _examine_as_operator(report: Report, logins: Logins, signer: Signer | None) -> None:
    """Signing keys, analysts, and indexes of large classes."""
    url = logins.operator or logins.administrator
    if url is None:
        report.unchecked.append("signing keys, analysts and large classes: set RAG_OPERATOR_DATABASE_URL")
        return
    try:
        async with _connected(url) as connection:
            session = Session(connection)
            keys = {row["key_id"] for row in await session.rows("list_signing_keys", {})}
            problems = await session.rows("doctor_analysts", {})
            limits = maintain.Limits()
            sizes = await session.rows("list_class_sizes", {"at_least": limits.least_chunks})
            indexes = await session.rows("list_class_indexes", {})
            drifted = await session.rows("usage_drift", {})
    except RAGServiceError:
        report.unchecked.append(
            "signing keys, analysts and large classes: RAG_OPERATOR_DATABASE_URL does not log in as rag_operator"
        )
        return
    report.checked.append("signing keys and analysts")
    report.checked.append("indexes of large access classes")
    report.checked.append("what tenants have stored against what was counted")
    if drifted:
        message = (
            f"of {len(drifted)} tenants are not as many or as large as was counted, as after changes by hand: quotas "
            "count wrongly until `rag limits recount`"
        )
        report.add(Finding(severity="warning", object="documents", message=message))
    report.add(*_findings_of_large_classes(maintain.Survey.of_rows(sizes, indexes), limits))
    if not keys:
        missing = "there is none, so nobody is let in; `rag keys sign` makes one"
        report.add(Finding(severity="error", object="signing keys", message=missing))
    elif signer is not None and signer.key_id not in keys:
        unknown = "is not one of the keys of this database; `rag keys sign` makes one"
        report.add(Finding(severity="error", object="RAG_SIGNING_KEY", message=unknown))
    for row in problems:
        report.add(
            Finding(severity="warning", object=f"analyst {row['name']}", message=row["message"], mend=row["mend"])
        )


def _findings_of_large_classes(found: maintain.Survey, limits: maintain.Limits) -> list[Finding]:
    """What `rag maintain` would do beyond counting words; one that is at work is not waited for."""
    wanted = maintain.plan(found, limits)
    lacking = {step.access_id for step in wanted.steps if step.action == "ready"}
    findings = []
    if lacking:
        message = (
            f"{len(lacking)} of more than {limits.threshold} chunks are without indexes of their own, so that searches "
            "read all of them: run `rag maintain`"
        )
        findings.append(Finding(severity="warning", object="large access classes", message=message))
    if wanted.left_out:
        message = (
            f"{len(wanted.left_out)} of more than {limits.threshold} chunks have no room among the "
            f"{limits.most_classes} that have indexes of their own"
        )
        findings.append(Finding(severity="warning", object="further large access classes", message=message))
    findings += [
        Finding(
            severity="warning",
            object=f"index {step.index_name} on rag_chunks",
            message="is of no use to any class, and is written all the same: run `rag maintain`",
            mend=f"{step.statement};",
        )
        for step in wanted.steps
        if step.action == "drop"
    ]
    return findings


async def _examine_as_superuser(report: Report, logins: Logins, settings: Settings) -> None:
    """All logins in one transaction, and what is stored."""
    needing = (
        "reading as an analyst and as rag_operator, and what is stored: set RAG_ADMIN_DATABASE_URL to a superuser's"
    )
    if logins.administrator is None:
        report.unchecked.append(needing)
        return
    async with _connected(logins.administrator) as connection:
        session = Session(connection)
        asking = await session.row("doctor_database", {})
        assert asking is not None
        if not asking["is_superuser"]:
            report.unchecked.append(needing)
            return
        barrier = await session.row("check_barrier", {})
        assert barrier is not None
        report.add(
            *await canary.findings_of_all_logins(
                session,
                connection.execute,
                now=asking["seconds"],
                dimensions=barrier["embedding_dimensions"],
            )
        )
        report.checked.append("reading and writing as every login, by a canary")
        stored = await session.row("doctor_documents", {})
        places = await session.rows("list_models", {})
        models = {row["embedding_model"]: row["chunks"] for row in await session.rows("doctor_models", {})}
    assert stored is not None
    report.checked.append("documents against their access classes")
    if stored["documents"]:
        message = f"{stored['documents']} show another scope, owner or tags than their access class has"
        report.add(Finding(severity="warning", object="documents", message=message, mend=stored["mend"]))
    try:
        opened = open_models(settings)
    except EmbeddingError as error:
        report.unchecked.append(f"the embedding model: {error.message}")
        return
    await close_models(opened)
    named = [model.id for model in opened]
    report.checked.append("the embedding model")
    declared = next((row["model_id"] for row in places if row["place"] == "active"), None)
    if declared is not None and declared not in named:
        message = f"{declared} is searched, and the settings name {' and '.join(named)}: the service answers nothing"
        report.add(Finding(severity="error", object="the embedding model", message=message))
    searched = declared or named[0]
    for model, chunks in models.items():
        if model != searched:
            message = (
                f"{chunks} were embedded by {model} and are found by words alone, since questions are embedded by "
                f"{searched}: ingest them again"
            )
            report.add(Finding(severity="warning", object="chunks", message=message))
    for row in places:
        if row["place"] == "second":
            kind = "former, and kept for a way back until `rag models drop`" if row["is_former"] else "being added"
            message = f"{row['model_id']} is {kind}; each chunk takes the room of two vectors"
            report.add(Finding(severity="note", object="the second embedding model", message=message))
