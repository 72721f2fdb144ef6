"""That the tests which specs 001 and 000 name are there, and that each notices a mistake in what it is about."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.rag.specified_mutants import LIST, MISTAKES, specified

CHECKOUT = Path(__file__).resolve().parents[2]
# 21 unit tests and 7 integration tests of spec 001, 7 and 5 of spec 000; two names are in both.
COUNT = 21 + 7 + 7 + 5 - 2
TIMEOUT_S = 600


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_each_name_is_listed_once_and_has_its_mistake() -> None:
    names = [name for _, name in (line.split() for line in LIST.read_text().splitlines() if line[:1] not in ("", "#"))]
    assert len(names) == len(set(names)) == COUNT
    assert set(names) == set(MISTAKES)


def test_each_name_is_a_test_that_is_collected() -> None:
    listed = specified()
    collected = run("--collect-only", *sorted(set(listed.values())))
    assert collected.returncode == 0, collected.stdout + collected.stderr
    found = re.findall(r"^([\w/.]+)::(\w+)(?:\[.*\])?$", collected.stdout, re.MULTILINE)
    assert {(file, name) for name, file in listed.items()} <= set(found)


def test_one_that_is_skipped_fails(tmp_path: Path) -> None:
    """In a copy of the folder's own rule."""
    (tmp_path / "conftest.py").write_text("from tests.rag.conftest import pytest_runtest_makereport\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n"
        "def test_health_check():\n    pytest.skip('no server')\n\n"
        "@pytest.mark.skip\ndef test_model_override():\n    pass\n\n"
        "@pytest.mark.skip\ndef test_else():\n    pass\n"
    )
    ran = run("--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path))
    # One is skipped while it runs, the other before.
    assert "1 failed, 1 skipped, 1 error" in ran.stdout, ran.stdout + ran.stderr


def test_each_notices_its_mistake(scaled: Callable[..., int], figure: Callable[[str], None]) -> None:
    """At every scale those that wait for nothing; with a server and a database for the others it takes a minute."""
    everything = scaled(test=0, ci=1, prove=1)
    chosen = [
        f"{file}::{name}"
        for name, file in specified().items()
        if everything or f"\nasync def {name}(" not in (CHECKOUT / file).read_text(encoding="utf-8")
    ]
    ran = run("-p", "tests.rag.specified_mutants", *chosen)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(chosen)} passed" in ran.stdout
    figure(f"{len(chosen)} tests named by the specifications, each with a mistake in the source: all notice it")
