"""POST /rag/webhooks/github: a push is checked, understood, and put into the queue.

Who sends it proves that with a secret of its repository: over every byte of the body (X-Hub-Signature-256), or in a
token that names the body's digest. Nothing of a body is read for its meaning before that holds, and no more of it is
kept in memory than a small one has.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Literal, TypeVar

import jwt
import structlog
import yaml
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.tokens import LEEWAY_S
from rag.database import Database
from rag.errors import DatabaseTimeout, InvalidInput, Unauthenticated
from rag.push import Push, announce, concerned, load_followed
from rag.settings import Settings

log = structlog.get_logger(__name__)

# RFC 7518, 3.2: a key for HS256 has at least 256 bits. `openssl rand -hex 32` writes 64 characters.
MIN_SECRET_BYTES = 32
# Each is tried on every byte: with 100, 16 MiB take about a second of a processor.
MAX_SECRETS = 100
MAX_FILE_BYTES = 1024 * 1024
# Most pushes are smaller; what is larger waits on the disk until it is known to be genuine.
IN_MEMORY_BYTES = 256 * 1024
# So many larger ones at once, so that strangers do not fill the disk.
LARGE_AT_ONCE = 8
# GitHub gives up after 10 s, and whoever sends a body more slowly is not GitHub.
BODY_WITHIN_S = 10.0
# What is to be written takes milliseconds. Two seconds for an answer, less what the network takes.
QUEUED_WITHIN_S = 1.5
# A token is made for one request.
MAX_TOKEN_AGE_S = 600
MAX_TOKEN_LENGTH = 8192
# GitHub lists no more; whether there were more is not said.
MAX_COMMITS = 2048

PROBLEM_CODES = (400, 401, 408, 413, 415, 429, 503, 504)

_SIGNATURE = re.compile(r"sha256=([0-9a-f]{64})", re.ASCII)
_TOKEN = re.compile(r"([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_EVENT = re.compile(r"[a-z_]{1,64}", re.ASCII)
_DELIVERY = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}(/[A-Za-z0-9._-]{1,100})?", re.ASCII)

Answer = Literal["queued", "duplicate", "ignored", "pong"]
STATUS: Mapping[Answer, int] = {"queued": 202, "duplicate": 200, "ignored": 202, "pong": 200}

Read = TypeVar("Read")


# --- files that are read again when they change ---------------------------------------------------


class Kept(Generic[Read]):
    """What a file says, read again whenever its bytes are others. Raises InvalidInput when made, for a bad file."""

    def __init__(self, path: Path, load: Callable[[Path], Read]) -> None:
        self._path = path
        self._load = load
        self._bytes = self._contents()
        self._read = load(path)

    def now(self) -> Read:
        """As the file is now. Raises InvalidInput: what it said before does not hold any more."""
        found = self._contents()
        if found != self._bytes:
            self._read = self._load(self._path)
            self._bytes = found
        return self._read

    def _contents(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What signs the pushes of a repository, or of all repositories of an owner: `owner/name` or `owner`."""

    value: bytes
    of: str

    def covers(self, repository: str) -> bool:
        """Whether it may sign for this repository; GitHub's names have no case."""
        return repository.lower() in (self.of, f"{self.of}/{repository.lower().partition('/')[2]}")


def load_secrets(path: Path) -> tuple[Secret, ...]:
    """The secrets of a YAML file: repositories or owners, and for each a secret or a list. Raises InvalidInput."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # The cause would quote it.
        raise _unusable(f"{path} cannot be read") from (error if isinstance(error, OSError) else None)
    if not isinstance(read, dict) or not read:
        raise _unusable(f"{path} names no repository")
    secrets: list[Secret] = []
    for name, given in read.items():
        if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
            raise _unusable(f"{path} has an entry that is neither owner/name nor owner")
        values = given if isinstance(given, list) else [given]
        if not values:
            raise _unusable(f"{path} has no secret for {name}")
        for value in values:
            if not isinstance(value, str) or len(value.encode("utf-8", "replace")) < MIN_SECRET_BYTES:
                raise _unusable(f"{path}: a secret for {name} is no text of {MIN_SECRET_BYTES} bytes or more")
            secrets.append(Secret(value=value.encode(), of=name.lower()))
    if len(secrets) > MAX_SECRETS:
        raise _unusable(f"{path} has more than {MAX_SECRETS} secrets")
    return tuple(secrets)


def _unusable(why: str) -> InvalidInput:
    return InvalidInput(f"RAG_WEBHOOK_SECRETS: {why}", field="RAG_WEBHOOK_SECRETS")


# --- who sends it ---------------------------------------------------------------------------------


class Signature:
    """X-Hub-Signature-256: an HMAC over the body as it comes in."""

    def __init__(self, given: str, secrets: Sequence[Secret]) -> None:
        self._given = bytes.fromhex(given)
        self._secrets = secrets
        self._codes = [hmac.new(secret.value, digestmod="sha256") for secret in secrets]
        self._body = hashlib.sha256()

    def update(self, part: bytes) -> None:
        """Take in more of the body."""
        self._body.update(part)
        for code in self._codes:
            code.update(part)

    def signers(self) -> list[Secret]:
        """The secrets with which the body was signed; all are compared, whichever fits."""
        fits = [hmac.compare_digest(code.digest(), self._given) for code in self._codes]
        return [secret for secret, fit in zip(self._secrets, fits, strict=True) if fit]

    def delivery(self) -> bytes:
        """What tells this delivery again: all that was signed."""
        return self._body.digest()


class Token:
    """A JWT (HS256) of at most ten minutes whose claim `body_sha256` is the digest of the body."""

    def __init__(self, given: str, secrets: Sequence[Secret]) -> None:
        shaped = _TOKEN.fullmatch(given) if len(given) <= MAX_TOKEN_LENGTH else None
        if shaped is None:
            raise Unauthenticated
        # Without its signature, which can be spelled in several ways.
        self._signed = shaped[1].encode()
        self._signers = [(secret, digest) for secret in secrets if (digest := _body_digest(given, secret)) is not None]
        if not self._signers:
            raise Unauthenticated
        self._body = hashlib.sha256()

    def update(self, part: bytes) -> None:
        """Take in more of the body."""
        self._body.update(part)

    def signers(self) -> list[Secret]:
        """The secrets with which the token was signed, when it is about this body."""
        body = self._body.digest()
        return [secret for secret, digest in self._signers if hmac.compare_digest(digest, body)]

    def delivery(self) -> bytes:
        """What tells this delivery again. Two bodies may be the same: the same commits pushed again, and again back."""
        return hashlib.sha256(b"token\0" + self._signed).digest()


def _body_digest(token: str, secret: Secret) -> bytes | None:
    """What a token that this secret signed says of its body; None when it did not, or when the token does not hold."""
    try:
        read = jwt.decode_complete(
            token, secret.value, algorithms=["HS256"], options={"require": ["exp", "iat"]}, leeway=LEEWAY_S
        )
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None
    head, claims = read["header"], read["payload"]
    if not set(head) <= {"alg", "typ", "kid"} or str(head.get("typ", "JWT")).upper() != "JWT":
        return None
    begins, ends, digest = claims["iat"], claims["exp"], claims.get("body_sha256")
    if not all(isinstance(time, int | float) and not isinstance(time, bool) for time in (begins, ends)):
        return None
    if not 0 < ends - begins <= MAX_TOKEN_AGE_S or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        return None
    return bytes.fromhex(digest)


def _proof(request: Request, secrets: Sequence[Secret]) -> Signature | Token:
    """What is to be checked, of the headers alone. Raises Unauthenticated for what cannot hold."""
    signatures = request.headers.getlist("x-hub-signature-256")
    credentials = request.headers.getlist("authorization")
    if len(signatures) + len(credentials) != 1:
        raise Unauthenticated
    if signatures:
        given = _SIGNATURE.fullmatch(signatures[0])
        if given is None:
            raise Unauthenticated
        return Signature(given[1], secrets)
    scheme, _, token = credentials[0].partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated
    return Token(token, secrets)


# --- what it says ---------------------------------------------------------------------------------


class _Repository(BaseModel):
    model_config = ConfigDict(strict=True)

    full_name: str
    default_branch: str | None = None


class _Moved(BaseModel):
    """The event `push`, of which the rest is passed over without being kept."""

    model_config = ConfigDict(strict=True)

    ref: str
    repository: _Repository
    deleted: bool = False
    forced: bool = False

    def paths(self) -> set[str] | None:
        return None


class _Commit(BaseModel):
    model_config = ConfigDict(strict=True)

    # Absent in the events that workflows get.
    added: list[str] | None = None
    modified: list[str] | None = None
    removed: list[str] | None = None


class _MovedBy(_Moved):
    """The same with what its commits touch."""

    commits: list[_Commit] = []

    def paths(self) -> set[str] | None:
        if self.forced or not 0 < len(self.commits) < MAX_COMMITS:
            # Commits that are no longer there have touched something as well.
            return None
        found: set[str] = set()
        for commit in self.commits:
            if commit.added is None or commit.modified is None or commit.removed is None:
                return None
            found.update(commit.added, commit.modified, commit.removed)
        return found or None


def _understood(body: bytes) -> Push:
    """Raises HTTPException (400) for what is no push."""
    shape = _Moved if len(body) > IN_MEMORY_BYTES else _MovedBy
    try:
        event = shape.model_validate_json(body)
    except ValidationError as error:
        # Its message would quote the body.
        raise HTTPException(400, "The body is not the JSON of a push event") from error
    return Push(
        repository=event.repository.full_name,
        ref=event.ref,
        default_branch=event.repository.default_branch,
        deleted=event.deleted,
        paths=event.paths(),
    )


# --- the route ------------------------------------------------------------------------------------


class Hook:
    """Takes in what GitHub sends. Raises InvalidInput when made, for settings or files that cannot be used."""

    def __init__(self, settings: Settings, database: Database) -> None:
        assert settings.rag_webhook_secrets is not None
        if settings.rag_sources is None:
            raise _unusable("RAG_SOURCES must say which sources are meant")
        self._database = database
        self._max_bytes = settings.rag_webhook_max_bytes
        self._max_waiting = settings.rag_queue_max_size
        self._secrets = Kept(settings.rag_webhook_secrets, load_secrets)
        self._sources = Kept(settings.rag_sources, load_followed)
        self._large = 0

    async def receive(self, request: Request) -> Answer:
        """What came of a request.

        Raises Unauthenticated for everything that is not signed as it should be, HTTPException for what no genuine
        sender sends, QueueFull, DatabaseError.
        """
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:19]) > self._max_bytes:
            raise self._too_large()
        secrets = self._now(self._secrets)
        proof = _proof(request, secrets)
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "The body must not be compressed")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "The content type of the webhook must be application/json")
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as spool, self._room() as room:
            await self._take_in(request, proof, spool, room)
            signers = proof.signers()
            if not signers:
                raise Unauthenticated
            event = _header(request, "x-github-event", _EVENT)
            delivery = _header(request, "x-github-delivery", _DELIVERY)
            answer, effects = await self._carry_out(event, spool, signers, proof.delivery())
        log.info("webhook", delivery=delivery, github_event=event, answer=answer, sources=effects)
        return answer

    @contextmanager
    def _room(self) -> Iterator[Callable[[], None]]:
        """What takes a place among the large ones, which is free again at the end; raises when there is none."""
        taken = False

        def take() -> None:
            nonlocal taken
            if not taken and self._large >= LARGE_AT_ONCE:
                raise HTTPException(503, "Too many large deliveries at once")
            self._large += not taken
            taken = True

        try:
            yield take
        finally:
            self._large -= taken

    async def _take_in(
        self, request: Request, proof: Signature | Token, spool: IO[bytes], room: Callable[[], None]
    ) -> None:
        """Read the body to its end, as far as it may go."""
        size = 0
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if size > IN_MEMORY_BYTES:
                        room()
                    proof.update(part)
                    spool.write(part)
        except TimeoutError:
            raise HTTPException(408, "The body took too long") from None
        except ClientDisconnect as error:
            raise HTTPException(400, "The body was cut off") from error
        except OSError as error:
            log.error("webhook_not_spooled", cause=type(error).__name__)
            raise HTTPException(503, "There is no room for the body") from error

    async def _carry_out(
        self, event: str, spool: IO[bytes], signers: Sequence[Secret], delivery: bytes
    ) -> tuple[Answer, dict[str, str]]:
        if event == "ping":
            return "pong", {}
        if event != "push":
            return "ignored", {}
        spool.seek(0)
        push = _understood(spool.read())
        if not any(secret.covers(push.repository) for secret in signers):
            # Genuine, and of another repository.
            raise Unauthenticated
        specs = self._now(self._sources)
        found = await asyncio.to_thread(concerned, push, specs)
        if not found:
            return "ignored", {}
        try:
            async with asyncio.timeout(QUEUED_WITHIN_S):
                effects = await announce(self._database, found, delivery=delivery, max_waiting=self._max_waiting)
        except TimeoutError as error:
            raise DatabaseTimeout() from error
        return "queued" if "queued" in effects.values() else "duplicate", dict(effects)

    def _now(self, kept: Kept[Read]) -> Read:
        try:
            return kept.now()
        except InvalidInput as error:
            # What a stranger gets does not say what is wrong with a file of ours.
            log.error("webhook_not_configured", reason=error.message)
            raise HTTPException(503, "The webhook is not available") from error

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"The body is larger than {self._max_bytes} bytes")


def _header(request: Request, name: str, shape: re.Pattern[str]) -> str:
    given = request.headers.getlist(name)
    if len(given) != 1 or not shape.fullmatch(given[0]):
        raise HTTPException(400, f"{name} must be there once, as GitHub sends it")
    return given[0]


def webhook(settings: Settings, database: Database, *, problems: Mapping[int | str, dict[str, Any]]) -> APIRouter:
    """The route. Raises InvalidInput for settings or files that cannot be used."""
    hook = Hook(settings, database)
    router = APIRouter(prefix="/rag/webhooks", tags=["webhooks"])

    @router.post(
        "/github",
        summary="A push to a repository brings its sources up to date",
        description=(
            "Signed with a secret of the repository: `X-Hub-Signature-256` over the body, or `Authorization: Bearer` "
            "with an HS256 token whose claim `body_sha256` is the digest of the body. `202` `queued`; `200` "
            "`duplicate` when the same was sent before; `202` `ignored` for what concerns no source."
        ),
        status_code=202,
        responses=dict.fromkeys(PROBLEM_CODES, problems[400]),
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
        },
    )
    async def github(request: Request) -> JSONResponse:
        answer = await hook.receive(request)
        return JSONResponse({"status": answer}, status_code=STATUS[answer])

    return router
