"""Three lanes of the same tests, and the figures that they print.

`--scale test` (the default) runs every claim at a small count, `ci` at the one that has to hold on every
commit. `prove` runs the claims that have a count, at the full one, and no other test. `--figures FILE` keeps
the printed figures in a Markdown table, in which a run replaces the rows of its own tests.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

LANES = ("test", "ci", "prove")
_FIGURE = "figure"


class Lanes:
    """The pytest plugin behind the options `--scale` and `--figures`."""

    def __init__(self) -> None:
        self._figures: list[tuple[str, str]] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """At full count, run what has a count: the other tests are the same in every lane."""
        if config.getoption("--scale") != "prove":
            return
        counted = [item for item in items if "scaled" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in counted])
        items[:] = counted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # With xdist, reports are what reaches the process that prints.
        if report.when == "call" and report.passed:
            self._figures += [(report.nodeid, str(value)) for name, value in report.user_properties if name == _FIGURE]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self._figures:
            return
        lane = config.getoption("--scale")
        terminalreporter.section(f"figures, lane {lane}")
        for _, figure in self._figures:
            terminalreporter.line(figure)
        target = config.getoption("--figures")
        if target:
            _write(Path(target), lane, self._figures)


def _write(page: Path, lane: str, figures: list[tuple[str, str]]) -> None:
    """Put the figures of this run in the place of older ones of the same tests; what did not run keeps its own."""
    heading = f"Lane `{lane}`. A figure is of the last run of its test."
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    ran = {f"| `{test}` |" for test, _ in figures}
    kept = [
        line
        for line in text.splitlines()
        if text.startswith(heading) and line.startswith("| `") and not any(line.startswith(test) for test in ran)
    ]
    today = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}"
    rows = kept + [f"| `{test}` | {figure} | {today} |" for test, figure in figures]
    lines = [heading, "", "| Test | Figure | When |", "|---|---|---|", *sorted(rows)]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--scale", choices=LANES, default="test", help="how many cases the large suites run")
    parser.addoption("--figures", default=None, help="file for the figures: a Markdown table, updated")


@pytest.fixture(scope="session")
def scaled(request: pytest.FixtureRequest) -> Callable[..., int]:
    """`scaled(test=50, ci=500, prove=5000)` is the count of this run's lane."""
    lane = request.config.getoption("--scale")

    def count(*, test: int, ci: int, prove: int) -> int:
        return {"test": test, "ci": ci, "prove": prove}[lane]

    return count


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`figure("2,000 cases: 0 leaks")` prints a line at the end of the run, when the test has passed."""
    return lambda text: record_property(_FIGURE, text)
