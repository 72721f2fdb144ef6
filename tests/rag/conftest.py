"""A test that a specification names is not skipped."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.rag.specified_mutants import specified

SPECIFIED = frozenset(specified())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(item, pytest.Function) and item.originalname in SPECIFIED:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is named by a specification and must not be skipped: {report.longrepr}"
    return report
