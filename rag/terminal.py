"""psql for people: on the embedded database or the one that the settings name, speaking for a principal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from rag import deployment, embedded
from rag.errors import InvalidInput
from rag.principal import Principal
from rag.settings import Settings
from rag.sign import SITTING_S, Signer


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where psql goes, without a password in the command line."""

    program: str
    conninfo: str
    password: str | None = field(repr=False)
    signer: Signer
    default_tenant: str | None


def reach(settings: Settings, role: str) -> Place:
    """The database for a login. Raises InvalidInput for a role that the settings have no URL for."""
    if settings.rag_database_url is None:
        server = embedded.start(settings.rag_home)
        signer = deployment.prepare(server, settings)
        return Place(
            program=str(server.binary("psql")),
            conninfo=server.conninfo(role),
            password=None,
            signer=signer,
            default_tenant=deployment.EMBEDDED_TENANT,
        )
    place = deployment.locate(settings)
    program = shutil.which("psql")
    if program is None:
        raise InvalidInput("psql is not installed; it comes with PostgreSQL's client programs")
    try:
        parts = conninfo_to_dict(_url(settings, role).get_secret_value())
    except ProgrammingError as error:
        raise InvalidInput(f"the URL of {role} cannot be read") from error
    password = parts.pop("password", None)
    return Place(
        program=program,
        conninfo=make_conninfo("", **parts),
        password=None if password is None else str(password),
        signer=place.signer,
        default_tenant=None,
    )


def _url(settings: Settings, role: str) -> SecretStr:
    urls = {
        "rag_app": ("RAG_DATABASE_URL", settings.rag_database_url),
        "rag_publisher": ("RAG_PUBLISHER_DATABASE_URL", settings.rag_publisher_database_url),
        "rag_migrator": ("RAG_MIGRATION_DATABASE_URL", settings.rag_migration_database_url),
        "rag_operator": ("RAG_OPERATOR_DATABASE_URL", settings.rag_operator_database_url),
    }
    if role not in urls:
        raise InvalidInput(f"role must be one of {', '.join(urls)}", field="role")
    name, url = urls[role]
    if url is None:
        raise InvalidInput(f"{name} must be set to log in as {role}", field=name)
    return url


def run(place: Place, principal: Principal, role: str, arguments: Sequence[str]) -> int:
    """psql's exit code, at the end of a session in which the principal stays set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment["PGOPTIONS"] = _options(principal, place.signer.sign(principal, role=role, valid_s=SITTING_S))
    if place.password is not None:
        environment["PGPASSWORD"] = place.password
    command = [place.program, place.conninfo, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603


def _options(principal: Principal, signature: str) -> str:
    """The variables of a principal for a whole session, as libpq's `options` wants them escaped."""
    values = {
        "app.tenant_id": principal.tenant_id,
        "app.user_id": str(principal.user_id or 0),
        "app.project_id": principal.project_id or "",
        "app.tags": json.dumps(list(principal.tags), ensure_ascii=False),
        "app.signature": signature,
    }
    return " ".join(
        "-c " + f"{name}={value}".replace("\\", r"\\").replace(" ", r"\ ") for name, value in values.items()
    )
