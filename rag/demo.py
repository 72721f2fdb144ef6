"""`rag demo`: a sample corpus, several people, the same questions."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from rich.markup import escape

from rag import deployment, screen
from rag.answer import RAGService
from rag.exchange import RAGRequest
from rag.generate import EXTRACTIVE
from rag.ingest import Source, ingest
from rag.principal import Principal
from rag.resources import sample_folder
from rag.settings import Settings
from rag.store import destination_of

NEXT = """\
[bold]Next[/bold]
  {rag} query "When is the deploy window?" --user 7 --project orion
  {rag} query "When is the deploy window?" --user 7 --project orion --explain
  {rag} ingest PATH… --scope user --user 7
  {rag} db psql --user 7 --project orion -- -c "select title, scope, tags from v_documents"
  {rag} serve     [dim]or make serve: the API on loopback, with a token[/dim]
  make test       [dim]all that is claimed here, as tests[/dim]"""


async def run(settings: Settings) -> int:
    """Returns the exit code: 0 when each question got the source that the manifest expects for each person."""
    manifest = yaml.safe_load((sample_folder() / "corpus.yaml").read_text(encoding="utf-8"))
    with _step("database"):
        place = deployment.locate(settings)
    if place.server is None:
        screen.out.print("  the one that RAG_DATABASE_URL names")
    else:
        screen.out.print(
            f"  PostgreSQL {place.server.major} with pgvector, private, on port {place.server.port}; "
            f"tenant `{manifest['tenant']}`"
        )
    with _step("embedding model"):
        service = RAGService(settings, place.open(settings))
    screen.out.print(f"  {service.embedder.model_id}")
    async with service.database as database, service:
        await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
        with _step("ingesting the sample corpus"):
            said, ids = await _ingest(manifest, service)
        screen.out.print(f"  {said}")
        model = await service.generator.choose(None)
        screen.out.print(
            f"  answers quote their sources: no Ollama with the model answers at {escape(settings.ollama_base_url)}"
            if model == EXTRACTIVE
            else f"  answers are written by {escape(model)}"
        )
        with _step("questions"):
            missed = await _ask(manifest, ids, service)
    screen.out.print()
    if missed:
        screen.out.print(f"[red]{missed} questions did not find the source that they should.[/red]")
        return 1
    screen.out.print("One database, one question, different sources: row-level security decided, not the application.")
    screen.out.print()
    screen.out.print(NEXT.format(rag=_command()))
    return 0


async def _ingest(manifest: dict[str, Any], service: RAGService) -> tuple[str, dict[str, UUID]]:
    """What was done, in words, and the id of each document by its path."""
    ids: dict[str, UUID] = {}
    documents = manifest["documents"]
    counts: dict[str, int] = {}
    chunks = 0
    with screen.counting(len(documents), "ingesting") as counter:
        for entry in documents:
            counter.note(entry["path"])
            principal = Principal(
                tenant_id=manifest["tenant"],
                user_id=entry.get("user"),
                project_id=entry.get("project"),
                tags=tuple(entry["tags"]),
            )
            ingested = await ingest(
                Source(
                    name=entry["path"],
                    source_id=f"kittiwake/{entry['path']}",
                    content=(sample_folder() / entry["path"]).read_bytes(),
                ),
                principal=principal,
                destination=destination_of(principal, scope=entry["scope"]),
                database=service.database,
                embedder=service.embedder,
                max_bytes=service.settings.rag_max_document_bytes,
                chunking=service.settings.rag_chunking,
            )
            counts[ingested.status] = counts.get(ingested.status, 0) + 1
            chunks += ingested.embedded
            ids[entry["path"]] = ingested.document_id
            counter.step()
    said = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    return f"{len(documents)} documents: {said}; {chunks} chunks embedded", ids


async def _ask(manifest: dict[str, Any], ids: dict[str, UUID], service: RAGService) -> int:
    """Ask everything as everybody; returns how often another source than expected came first."""
    missed = 0
    for question in manifest["questions"]:
        screen.out.print(f"\n[bold]{escape(question['ask'])}[/bold]")
        for person in manifest["principals"]:
            principal = Principal(
                tenant_id=manifest["tenant"],
                user_id=person["user"],
                project_id=person["project"],
                tags=tuple(person["tags"]),
            )
            response = await service.generate(RAGRequest(query=question["ask"]), principal=principal)
            screen.out.print(f"  [cyan]{escape(person['name'])}[/cyan]")
            screen.print_answer(response, indent="  ")
            for passage in response.passages[:3]:
                cosine = "–" if passage.cosine is None else f"{passage.cosine:.2f}"
                screen.out.print(
                    f"    [dim]{passage.rank}. {escape(passage.document_name)}: fused {passage.score:.3f}, "
                    f"BM25 {passage.keyword_score:.2f}, cosine {cosine}, {passage.scope}[/dim]"
                )
            expected = question["expect"][person["key"]]
            first = response.passages[0].document_id if response.passages else None
            missed += first != (None if expected is None else ids[expected])
    return missed


def _command() -> str:
    """What to type for this very program: its name when the shell finds it, else its path."""
    program = Path(sys.argv[0])
    if shutil.which(program.name) is not None:
        return program.name
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program)


@contextmanager
def _step(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    screen.out.print(f"[green]✓[/green] {name} [dim]{time.perf_counter() - started:.1f} s[/dim]")
