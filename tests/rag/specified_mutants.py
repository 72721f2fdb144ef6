"""For each test that specs 001 and 000 name: a mistake in the source that it has to notice.

As a plugin of pytest (`-p tests.rag.specified_mutants`) this makes each test's mistake while the test runs, in memory
or in its own database, and turns its outcome around: a test that goes on passing fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from tests.barrier.oracle_planting import rewritten

LIST = Path(__file__).with_name("specified_tests.txt")


def specified() -> dict[str, str]:
    """The tests that the specs name, each with its file, from the root of the checkout."""
    lines = (line.split("#")[0].split() for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name: file for file, name in filter(None, lines)}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A text of a module, which is there once, inside of functions, and another one in its place."""

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class SQLMistake:
    """The same in a function of the database of the test."""

    function: str
    old: str
    new: str


MISTAKES: dict[str, Mistake | SQLMistake] = {
    # Spec 001.
    "test_build_context_with_source_ids": Mistake(
        "rag.exchange", '{self.document_id}:{self.chunk_index}"', '{self.document_id}-{self.chunk_index}"'
    ),
    "test_extract_citations_valid": Mistake("rag.cite", "cited[passage.source_id] = passage", "pass"),
    "test_extract_citations_invalid_format": Mistake(
        "rag.cite", "_ALIAS.findall(match.group(1))", "_ALIAS.findall(match.group(1)) or list(sources)"
    ),
    "test_extract_citations_unknown_id": Mistake("rag.conclude", "count=resolved.refused", "count=0"),
    "test_get_route_target_with_owner": Mistake("rag.route", "fallback=False", "fallback=True"),
    "test_get_route_target_no_owner": Mistake("rag.route", "if owner is None:", "if owner is not None:"),
    "test_get_route_target_empty_context": Mistake("rag.route", "if not passages:", "if passages:"),
    "test_calculate_coverage": Mistake("rag.confidence", " and word not in ignored", ""),
    "test_calculate_coverage_empty_answer": Mistake(
        "rag.confidence", "if not terms:\n        return 0.0", "if not terms:\n        return 1.0"
    ),
    "test_calculate_confidence_zero_results": Mistake(
        "rag.confidence",
        "if not passages:\n        return ConfidenceScore",
        "if False:\n        return ConfidenceScore",
    ),
    "test_calculate_confidence_hybrid": Mistake(
        "rag.confidence", "coverage_score * COVERAGE_WEIGHT", "coverage_score * RETRIEVAL_WEIGHT"
    ),
    "test_truncate_history_overflow": Mistake(
        "rag.budget",
        "if total + tokens > budget:\n            break",
        "if total + tokens > budget:\n            continue",
    ),
    "test_truncate_history_keeps_recent": Mistake(
        "rag.budget", "for message in reversed(history)", "for message in history"
    ),
    "test_token_budget_exceeded": Mistake("rag.budget", "if available < 0:", "if available < -1:"),
    "test_deduplicate_chunks": SQLMistake("fuse_candidates", "and capped.duplicate_of is null", ""),
    "test_deduplicate_respects_cap": SQLMistake(
        "fuse_candidates", "ordered.place <= fuse_candidates.duplicate_candidates", "true"
    ),
    "test_limit_per_document": SQLMistake(
        "fuse_candidates", "and capped.place_in_document <= fuse_candidates.max_per_document", ""
    ),
    # Spec 001's own mistake: of another size, but of the same name.
    "test_validate_model_allowed": Mistake(
        "rag.generate",
        "self._client.same_model(model, offered) for",
        'model.split(":")[0] == offered.split(":")[0] for',
    ),
    "test_validate_model_not_allowed": Mistake(
        "rag.generate",
        "name, _ = _allowed(model, self._settings)",
        "name = next(iter(self._settings.rag_model_limits))",
    ),
    "test_grounded_true_with_citations": Mistake(
        "rag.conclude",
        "grounded=bool(citations),\n            query_id",
        'grounded=action == "CITE",\n            query_id',
    ),
    "test_grounded_false_no_citations": Mistake(
        "rag.conclude", "grounded=bool(citations),\n            query_id", "grounded=True,\n            query_id"
    ),
    "test_generate_full_pipeline": Mistake("rag.conclude", "citations=citations,", "citations=[],"),
    "test_generate_zero_context": Mistake(
        "rag.answer", "Written(text=INSUFFICIENT_CONTEXT, model=model)", 'Written(text="", model=model)'
    ),
    "test_generate_low_confidence_routes": Mistake(
        "rag.confidence", "if not grounded or score.overall < threshold", "if not grounded"
    ),
    "test_generate_token_budget": Mistake(
        "rag.budget", "room = min(limits.history, available // 3)", "room = available // 3"
    ),
    "test_health_check": Mistake("rag.answer", '"healthy": model is not None', '"healthy": True'),
    "test_model_override": Mistake(
        "rag.answer",
        'from documents only", field="direct")\n        model = await self.generator.choose(request.model)',
        'from documents only", field="direct")\n        model = await self.generator.choose(None)',
    ),
    "test_tenant_isolation": Mistake(
        "rag.retrieve",
        "filters or Filters()\n    async with database.transaction(principal,",
        'filters or Filters()\n    async with database.transaction(Principal(tenant_id="acme", user_id=1),',
    ),
    # Spec 000.
    "test_route_query_retrieve": Mistake("rag.direct", 'if text == "DIRECT"', 'if "DIRECT" in text'),
    "test_route_query_direct": Mistake("rag.direct", '== {"way": "DIRECT"}', '== {"route": "DIRECT"}'),
    "test_generate_direct": Mistake("rag.answer", "if request.direct and await", "if not request.direct and await"),
    "test_build_context": Mistake("rag.prompt", "passage.section or 'N/A'", "passage.section or ''"),
    "test_build_chat_history": Mistake(
        "rag.prompt", "{message.role}: {disarm(message.content)}", "{disarm(message.content)}"
    ),
    "test_format_citations": Mistake(
        "rag.cite", "_cut(passage.text, SNIPPET_LENGTH)", "_cut(passage.text, SNIPPET_LENGTH - 1)"
    ),
    "test_determine_action_cite": Mistake("rag.confidence", "score.overall < threshold", "score.overall <= threshold"),
    "test_determine_action_route": Mistake(
        "rag.conclude", 'return "ROUTE", await route.find_target(', 'return "CITE", await route.find_target('
    ),
    "test_generate_with_context": Mistake("rag.prompt", "{disarm(passage.text)}", "{passage.token_count}"),
    "test_generate_low_confidence": Mistake("rag.answer", "score=round(100 * probable)", "score=100"),
}


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    """Run a module's functions with the mistake in them, wherever they have been imported to."""
    module = importlib.import_module(mistake.module)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    found = source.count(mistake.old)
    assert found == 1, f"{mistake.module} has {mistake.old!r} {found} times"
    before = codes(compile(source, module.__file__, "exec"))
    after = codes(compile(source.replace(mistake.old, mistake.new), module.__file__, "exec"))
    originals = {
        function: function.__code__
        for function in functions(module)
        if before.get(function.__code__.co_qualname) != after.get(function.__code__.co_qualname)
    }
    assert originals, f"{mistake.old!r} is not inside of a function of {mistake.module}"
    for function in originals:
        function.__code__ = after[function.__code__.co_qualname]
    try:
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


def codes(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= {constant.co_qualname: constant} | codes(constant)
    return found


def functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    for value in vars(module).values():
        members = [value, *(vars(value).values() if isinstance(value, type) else ())]
        for member in members:
            function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


@contextmanager
def mistaken(test: pytest.Function) -> Iterator[None]:
    mistake = MISTAKES[test.originalname]
    if isinstance(mistake, SQLMistake):
        deployment = test.funcargs["deployment"]
        with deployment.cluster.superuser(deployment.name) as superuser:
            rewritten(mistake.function, mistake.old, mistake.new)(superuser)
        yield
    else:
        with made(mistake):
            yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    with mistaken(pyfuncitem):
        try:
            yield
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it is, it was noticed
            return True
    pytest.fail(f"{pyfuncitem.name} passes although there is {MISTAKES[pyfuncitem.originalname]}")
