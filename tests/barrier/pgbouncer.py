"""A real PgBouncer in front of one test database: Debian's, or the one that RAG_TEST_PGBOUNCER names."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.conftest import LOGINS, Deployment

HOST = "127.0.0.1"
ADMIN = "pgbouncer_admin"
PATIENCE_S = 20.0
# PgBouncer refuses to run as root, and this account owns nothing anywhere.
NOBODY = 65534
# The first release that keeps track of the prepared statements of its clients.
PREPARES_SINCE = (1, 21)


@dataclass(frozen=True, slots=True, kw_only=True)
class PgBouncer:
    """A running PgBouncer. Its clients log in as they would at the database itself."""

    deployment: Deployment
    folder: Path
    port: int
    admin_password: str

    def url(self, role: str) -> str:
        password = self.deployment.cluster.password
        return f"postgresql://{role}:{password}@{HOST}:{self.port}/{self.deployment.name}?sslmode=disable"

    def connect(self, role: str = "rag_app") -> psycopg.Connection:
        """An autocommit connection that prepares nothing."""
        return psycopg.connect(self.url(role), autocommit=True, prepare_threshold=None)

    def command(self, text: str) -> None:
        """Run a command of the administration console, as its administrator."""
        url = f"postgresql://{ADMIN}:{self.admin_password}@{HOST}:{self.port}/pgbouncer?sslmode=disable"
        with psycopg.connect(url, autocommit=True, prepare_threshold=None) as console:
            console.execute(text.encode())

    def configure(self, **settings: object) -> None:
        """Change settings while it runs."""
        file = self.folder / "pgbouncer.ini"
        text = file.read_text()
        for name, value in settings.items():
            text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
            assert found == 1, f"{name} was not set at the start"
        file.write_text(text)
        self.command("RELOAD")


def binary() -> str:
    """Where PgBouncer is; the test is skipped when it is nowhere."""
    # Debian puts it where an ordinary account's PATH does not look.
    found = shutil.which(os.environ.get("RAG_TEST_PGBOUNCER", "pgbouncer"), path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip("pgbouncer is not installed")
    return found


def version() -> tuple[int, int]:
    said = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"PgBouncer (\d+)\.(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


@contextmanager
def running(
    deployment: Deployment,
    *,
    pool_mode: str = "transaction",
    pool_size: int = 3,
    server_role: str | None = None,
    of_the_database: str = "",
    settings: Mapping[str, object] | None = None,
) -> Iterator[PgBouncer]:
    """A PgBouncer for the length of a block.

    pool_size: connections to the server, for each role that logs in; server_role: the one role as which
    every client reaches the server, None: each as itself; of_the_database, settings: more of pgbouncer.ini, in
    the line of the database and below.
    """
    program = binary()
    folder = Path(tempfile.mkdtemp(prefix="palisade-pgbouncer-"))
    pooler = PgBouncer(deployment=deployment, folder=folder, port=_free_port(), admin_password=secrets.token_hex(8))
    server = urlsplit(deployment.cluster.superuser_url)
    forced = "" if server_role is None else f" user={server_role} password={deployment.cluster.password}"
    configuration = {
        "listen_addr": HOST,
        "listen_port": pooler.port,
        "unix_socket_dir": "",
        "auth_type": "scram-sha-256",
        "auth_file": folder / "userlist.txt",
        "admin_users": ADMIN,
        "pool_mode": pool_mode,
        "default_pool_size": pool_size,
        # After a login that failed, be it for RECONNECT in its middle, nobody gets a connection for so long.
        "server_login_retry": 0.1,
        "logfile": folder / "pgbouncer.log",
        **(settings or {}),
    }
    place = f"host={server.hostname} port={server.port or 5432}{forced} {of_the_database}"
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{deployment.name} = {place}\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in configuration.items())
    )
    # Plain passwords, since PgBouncer has to log in with them too.
    accounts = dict.fromkeys(LOGINS, deployment.cluster.password) | {ADMIN: pooler.admin_password}
    (folder / "userlist.txt").write_text("".join(f'"{name}" "{word}"\n' for name, word in accounts.items()))
    owner = None
    if os.geteuid() == 0:
        owner = NOBODY
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner)
    process = subprocess.Popen(
        [program, "-q", folder / "pgbouncer.ini"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=owner,
        group=owner,
        extra_groups=None if owner is None else [],
    )
    try:
        _wait_until_it_listens(process, pooler)
        yield pooler
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_it_listens(process: subprocess.Popen[bytes], pooler: PgBouncer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((HOST, pooler.port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    pytest.fail(f"PgBouncer does not listen:\n{(pooler.folder / 'pgbouncer.log').read_text()}")
