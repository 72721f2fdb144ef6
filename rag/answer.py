"""The answer line: choose a model → embed → search → fit → write → grade → conclude, told as events.

No model is called while a transaction is open: the search has one, `rag.conclude` has another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

from rag import budget, cite, confidence, direct, prompt
from rag.active_model import close_models, find_active, open_models
from rag.budget import Allocation, Limits
from rag.conclude import REVOKED as REVOKED
from rag.conclude import Asked, Written, conclude
from rag.database import Database
from rag.domain import FOUND_BY_DOMAIN, enhance_query, layered, load_packs, marked, pack_of
from rag.embed import Embedder, asked_vector
from rag.enrich import RELEVANT, Enrichment, block, labelled
from rag.errors import (
    ContextOverflowError,
    EmbeddingError,
    InvalidInput,
    LLMError,
    ModelNotActive,
    ModelUnavailableError,
    OutputInvalidError,
    PrincipalMismatch,
    TokenBudgetExceededError,
)
from rag.events import Citations, Confidence, Decision, Done, Event, Retracted, Route, Sources, Token
from rag.exchange import (
    FUSIONS,
    MODES,
    NARROWINGS,
    Found,
    Passage,
    RAGRequest,
    RAGResponse,
    Stage,
    check_filters,
    check_question,
)
from rag.feedback import keep_feedback
from rag.generate import EXTRACTIVE, Draft, Generator, open_generator
from rag.grade import Grade, grade
from rag.history import MEMORY_CUT, check_history, memory_of
from rag.principal import Principal, check_tags
from rag.prompt import Prompt
from rag.recheck import CitationState, CitedSource, recheck
from rag.rerank import Reranker, build_fallback_confidence, compute_candidate_k, open_reranker, rerank
from rag.retrieve import explain, retrieve
from rag.schema import check_schema
from rag.scope import resolve_scope_ids
from rag.settings import Settings
from rag.show import Showing, show
from rag.skill import Filled, SkillResponse, fill, respond, skill_prompt
from rag.tenant_prompts import system_prompt
from rag.tokens import TokenCounter, open_counter

INSUFFICIENT_CONTEXT = (
    "I don't have enough information in the available documents to answer this question. "
    "Please contact the relevant team for assistance."
)

NO_EMBEDDING = "the question could not be embedded, so only keywords were searched"
OTHER_MODEL = "no document is embedded with the configured model, so only keywords were searched"
SOME_OTHER_MODEL = "some documents are embedded with another model and were found by keywords only"
NO_ROOM = "none of the sources fits into what the prompt may hold"
SHRUNK = "the model's window was smaller than expected, so fewer sources were read"
FORGOTTEN = "the model's window was smaller than expected, so the earlier messages were left out"
TRUNCATED = "the model reached its limit, and the answer is cut"

# Of an answer that nothing was searched for.
NOTHING_FOUND = Found(passages=[], dropped=[], mode="none", degraded=[], retrieval_ms=0.0)

# Where many answers end at once they wait here for each other, and not in the pool, whose queue refuses the last ones:
# an answer that is written shall not be lost.
CONCLUDING = 16

Tell = Callable[[Event], None]


T = TypeVar("T")


class RAGService:
    """Answers questions from the documents that the asker may read. Stateless; use it with `async with`.

    Without further arguments it opens what the settings name, and closes it again.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        embedder: Embedder | None = None,
        generator: Generator | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.settings = settings
        self.database = database
        # Two while the model is being changed; the first until the database says otherwise.
        self._models = open_models(settings, embedder)
        self.embedder = self._models[0].embedder
        self.generator = generator or open_generator(settings)
        self.reranker = reranker or open_reranker(settings)
        self.domains = load_packs(settings.rag_domain_packs_dir)
        self._concluding: set[asyncio.Task[RAGResponse]] = set()
        self._turns = asyncio.Semaphore(CONCLUDING)
        # A chat model's own tokenizer is not at hand; its server has the last word, see `_write`.
        self._count = open_counter(TokenCounter(self.embedder.token_counter, self.embedder.count_tokens)).count

    async def __aenter__(self) -> RAGService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._concluding:
            await asyncio.wait(self._concluding)
        await self.generator.close()
        if self.reranker is not None:
            await self.reranker.close()
        await close_models(self._models)

    async def notice_model(self) -> bool:
        """Go over to the embedding model that the database is searched with; False when it was that already.

        Raises ModelNotActive when the settings do not name it, and the DatabaseError family.
        """
        active = await find_active(self._models, self.database)
        changed = active.embedder is not self.embedder
        self.embedder = active.embedder
        return changed

    async def with_active_model(self, work: Callable[[Embedder], Awaitable[T]]) -> T:
        """Do something with the embedding model; again with the other one when that became active in the meantime."""
        try:
            return await work(self.embedder)
        except ModelNotActive:
            await self.notice_model()
        # Not because of `changed`: another request may have noticed first.
        return await work(self.embedder)

    async def generate(self, request: RAGRequest, *, principal: Principal) -> RAGResponse:
        """Answer a question for a principal.

        Raises InvalidInput, PrincipalMismatch, DocumentNotFound, TokenBudgetExceededError, the LLMError
        and the DatabaseError family. An embedding provider that is down degrades the search to keywords.
        """
        return await self._answer(self._asked(request, principal), tell=None)

    async def stream(self, request: RAGRequest, *, principal: Principal) -> AsyncGenerator[Event]:
        """The same answer while it is written. Close it (`aclosing`) to stop: then the model stops as well.

        Raises as `generate` does, in the place of the event that is missing; only what ends with `done` is whole.
        A reader who is slow holds up nobody: events wait for it here.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(self._asked(request, principal), tell=events.put_nowait))
        answering.add_done_callback(lambda _: events.put_nowait(None))
        answering.add_done_callback(_heard)
        try:
            while (event := await events.get()) is not None:
                yield event
            await answering
        finally:
            answering.cancel()
            await asyncio.wait([answering])

    async def skill(self, request: RAGRequest, *, schema: Mapping[str, object], principal: Principal) -> SkillResponse:
        """A structured answer: JSON that fits a JSON Schema, from the sources alone, each value with its source.

        Raises as `generate` does, InvalidInput with the place of what in the schema cannot be honoured,
        ModelUnavailableError where no model writes, and OutputInvalidError when what the model wrote does not fit,
        and did not after one correction.
        """
        asked = self._asked(request, principal)
        check_request(request, principal)
        if request.direct:
            raise InvalidInput("a structured answer is from documents only", field="direct")
        form = await asyncio.to_thread(check_schema, schema)
        model = await self.generator.choose(request.model)
        if model == EXTRACTIVE:
            raise ModelUnavailableError("a structured answer needs a model, and here answers quote their sources")
        found = await self.search(request, principal=principal, deadline=asked.deadline)
        filled = Filled(written=_nothing_to_quote(model))
        if found.passages:
            filled = await fill(
                asked,
                found.passages,
                form,
                system=skill_prompt(pack_of(self.domains, request.domain)),
                generator=self.generator,
                model=model,
                count=self._count,
            )
        response = await conclude(
            asked,
            found,
            filled.written,
            grade=filled.grade,
            database=self.database,
            settings=self.settings,
            embedding_model=None if NO_EMBEDDING in found.degraded else found.embedding_model,
        )
        if filled.faults:
            places = ", ".join(dict.fromkeys(fault.partition(": ")[0] for fault in filled.faults))
            raise OutputInvalidError(f"the model's answer did not fit the schema, nor did a second one: see {places}")
        return respond(filled, response, threshold=self.settings.rag_confidence_threshold)

    async def enrich(self, request: RAGRequest, *, principal: Principal) -> Enrichment:
        """A block of context with its sources for the message in `query`, which is not changed; empty for none.

        No model is asked. Raises as `search` does.
        """
        asked = self._asked(request, principal)
        found = await self.search(request, principal=principal, deadline=asked.deadline)
        sure = confidence.answerable(request.query, found.passages, embedding_model=found.embedding_model)
        sources = labelled(found.passages if sure >= RELEVANT else [])
        tokens = sum(passage.token_count for passage in sources.values())
        written = Written(
            text=" ".join(f"[{alias}]" for alias in sources), model="none", sources=sources, context_tokens=tokens
        )
        # What was revoked since is left out, and that it was read is written down.
        response = await self._conclude(asked, found, written, round(100 * sure))
        kept = {citation.source_id for citation in response.citations}
        passages = [passage for passage in sources.values() if passage.source_id in kept]
        return Enrichment(
            query_id=response.query_id,
            context=block(passages),
            citations=response.citations,
            context_tokens=sum(passage.token_count for passage in passages),
            retrieval_ms=found.retrieval_ms,
            degraded=response.degraded,
        )

    async def search(
        self,
        request: RAGRequest,
        *,
        principal: Principal,
        include_dropped: bool = False,
        deadline: float | None = None,
    ) -> Found:
        """The passages for a question, without an answer; with `include_dropped` those that fell out as well.

        `deadline` is a moment of the event loop's clock, beyond which no reranker is waited for. Raises as
        `generate` does, but for what concerns the model.
        """
        return await self.with_active_model(
            lambda embedder: self._search(
                request, embedder, principal=principal, include_dropped=include_dropped, deadline=deadline
            )
        )

    async def _search(
        self,
        request: RAGRequest,
        embedder: Embedder,
        *,
        principal: Principal,
        include_dropped: bool,
        deadline: float | None,
    ) -> Found:
        started = time.perf_counter()
        check_request(request, principal)
        if request.filters is not None:
            check_filters(request.filters, metadata_keys=self.settings.rag_metadata_filter_keys)
        document_ids = None
        if request.document_ids is not None:
            document_ids = (await resolve_scope_ids(self.database, [principal], request.document_ids)).document_ids
        pack = pack_of(self.domains, request.domain)
        question = enhance_query(request.query, pack)
        vector, degraded = await self._embedded(request, question, embedder)
        top_k = request.max_context_chunks or self.settings.rag_total_context_chunks
        budget_tokens = request.max_context_tokens or self.settings.rag_max_context_tokens
        pool = None if self.reranker is None else compute_candidate_k(top_k, self.reranker.max_candidates)
        ask = functools.partial(
            retrieve,
            principal=principal,
            database=self.database,
            settings=self.settings,
            embedding_model=embedder.model_id,
            min_similarity=self._min_similarity(request),
            model_min_similarity=embedder.min_similarity,
            top_k=top_k if pool is None else pool.candidate_k,
            # The reranker chooses from all of them, and the budget is for what it chose.
            budget_tokens=budget_tokens if pool is None else None,
            scope=request.scope,
            document_ids=document_ids,
            include_dropped=include_dropped,
            fusion=request.fusion,
            filters=request.filters,
        )
        passages, mode, tenant_prompt = await ask(question, vector, mode=request.mode)
        if vector is not None and mode == "keyword":
            degraded.append(OTHER_MODEL)
        elif mode == "partial":
            degraded.append(SOME_OTHER_MODEL)
        if mode != "none" and pack is not None and pack.fallback_terms and not _kept(passages):
            others, arms, told = await ask(" ".join(pack.fallback_terms), None, mode="keyword")
            if _kept(others):
                passages, mode, tenant_prompt = marked(others), arms, told
                degraded.append(FOUND_BY_DOMAIN)
        kept = _kept(passages)
        dropped = [passage for passage in passages if passage.rank is None]
        if self.reranker is None or pool is None:
            metrics = build_fallback_confidence(len(kept), len(kept), truncated=False, skip_reason="disabled")
        else:
            reranked = await rerank(
                self.reranker,
                request.query,
                kept,
                top_k=top_k,
                budget_tokens=budget_tokens,
                truncated=pool.truncated,
                deadline=deadline or asyncio.get_running_loop().time() + self.settings.answer_timeout_seconds,
            )
            kept, metrics = reranked.passages, reranked.metrics
            dropped = [*(reranked.dropped if include_dropped else []), *dropped]
            degraded += reranked.degraded
        return Found(
            passages=kept,
            dropped=dropped,
            mode=mode,
            degraded=degraded,
            retrieval_ms=_ms_since(started),
            metrics=metrics,
            tenant_prompt=tenant_prompt,
            embedding_model=embedder.model_id,
        )

    async def feedback(
        self,
        query_id: str,
        *,
        principal: Principal,
        source_id: str | None = None,
        rating: int | None = None,
        clicked: bool = False,
    ) -> None:
        """Keep what the principal made of a question of their own: of one of its sources, or of the answer.

        The last rating holds, a click stays. Raises InvalidInput, QueryNotFound and the DatabaseError family.
        """
        await keep_feedback(
            self.database,
            principal,
            query_id,
            source_id=source_id,
            rating=rating,
            clicked=clicked,
        )

    async def recheck(self, cited: Sequence[CitedSource], *, principal: Principal) -> list[CitationState]:
        """Whether the sources of a stored message still say what they said: `current`, `stale` or `gone` each.

        Raises InvalidInput and the DatabaseError family.
        """
        return await recheck(self.database, principal, cited)

    async def health_check(self) -> dict[str, Any]:
        """`{"healthy", "model", "latency_ms"}`: whether an answer could be written now, and by what."""
        started = time.perf_counter()
        try:
            model: str | None = await self.generator.choose(None)
        except LLMError:
            model = None
        return {"healthy": model is not None, "model": model, "latency_ms": _ms_since(started)}

    async def explain(
        self, request: RAGRequest, document_id: UUID, chunk_index: int | None = None, *, principal: Principal
    ) -> list[Stage]:
        """Why a chunk, or the best one of a document, is among what `search` returns or not; filters and a reranker do
        not count.

        Empty for a document that the principal may not read, as for one that does not exist. Raises as `search`.
        """
        return await self.with_active_model(
            lambda embedder: self._explain(request, embedder, document_id, chunk_index, principal)
        )

    async def _explain(
        self,
        request: RAGRequest,
        embedder: Embedder,
        document_id: UUID,
        chunk_index: int | None,
        principal: Principal,
    ) -> list[Stage]:
        check_request(request, principal)
        question = enhance_query(request.query, pack_of(self.domains, request.domain))
        vector, _ = await self._embedded(request, question, embedder)
        return await explain(
            question,
            vector,
            document_id=document_id,
            chunk_index=chunk_index,
            principal=principal,
            database=self.database,
            settings=self.settings,
            embedding_model=embedder.model_id,
            min_similarity=self._min_similarity(request),
            model_min_similarity=embedder.min_similarity,
            top_k=request.max_context_chunks or self.settings.rag_total_context_chunks,
            budget_tokens=request.max_context_tokens or self.settings.rag_max_context_tokens,
            scope=request.scope,
            mode=request.mode,
            fusion=request.fusion,
        )

    async def _embedded(
        self, request: RAGRequest, question: str, embedder: Embedder
    ) -> tuple[Sequence[float] | None, list[str]]:
        """The vector of a question, as it is searched, and what has to be said when there is none."""
        if request.embedding_model not in (None, embedder.model_id):
            raise InvalidInput(f"the documents are embedded with {embedder.model_id}", field="embedding_model")
        given = None
        if request.embedding is not None:
            (width,) = (model.settings.rag_embedding_dimensions for model in self._models if model.embedder is embedder)
            given = asked_vector(request.embedding, width=width)
        if request.mode == "keyword":
            return None, []
        if given is not None:
            return given, []
        try:
            (vector,) = await embedder.embed([question], purpose="query")
        except EmbeddingError:
            # Without a vector there is nothing that the vectors alone could find.
            if request.mode == "vector":
                raise
            return None, [NO_EMBEDDING]
        return vector, []

    def _min_similarity(self, request: RAGRequest) -> float | None:
        """What somebody said; else None, and it is what was calibrated, or the model's."""
        return self.settings.rag_min_similarity_score if request.min_similarity is None else request.min_similarity

    def _asked(self, request: RAGRequest, principal: Principal) -> Asked:
        deadline = asyncio.get_running_loop().time() + self.settings.answer_timeout_seconds
        return Asked(request=request, principal=principal, deadline=deadline)

    async def _answer(self, asked: Asked, *, tell: Tell | None) -> RAGResponse:
        """The line itself; `tell` hears what happens on the way."""
        request, principal = asked.request, asked.principal
        check_request(request, principal)
        if request.direct and not self.settings.rag_allow_direct:
            raise InvalidInput("this service answers from documents only", field="direct")
        model = await self.generator.choose(request.model)
        reader = None if tell is None else _Reader(asked, model, tell)
        found = NOTHING_FOUND
        try:
            if request.direct and await self._is_direct(asked, model):
                written = await self._write_directly(asked, model, reader)
            else:
                found = await self.search(request, principal=principal, deadline=asked.deadline)
                written = _nothing_to_quote(model)
                if found.passages:
                    written = await self._write(asked, found, model, self._system(request, found), reader)
                elif reader is not None:
                    reader.begin(None)
            judged = await self._grade(asked, written)
        except (asyncio.CancelledError, LLMError):
            # Somebody has read the beginning.
            if reader is not None and reader.shown:
                await self._conclude(asked, found, reader.begun, 0)
            raise
        if judged.degraded is not None:
            written = dataclasses.replace(written, degraded=[*written.degraded, judged.degraded])
        response = await self._conclude(asked, found, written, judged.score)
        if reader is not None:
            reader.close(response)
        return response

    async def _conclude(self, asked: Asked, found: Found, written: Written, score: int) -> RAGResponse:
        """Close an answer, and go on with that when nobody waits for it any more: who has read it is written down."""

        async def in_turn() -> RAGResponse:
            async with self._turns:
                return await conclude(
                    asked,
                    found,
                    written,
                    grade=score,
                    database=self.database,
                    settings=self.settings,
                    embedding_model=None if written.direct or NO_EMBEDDING in found.degraded else found.embedding_model,
                )

        concluding = asyncio.create_task(in_turn())
        self._concluding.add(concluding)
        concluding.add_done_callback(self._concluding.discard)
        concluding.add_done_callback(_heard)
        return await asyncio.shield(concluding)

    async def _is_direct(self, asked: Asked, model: str) -> bool:
        way = await direct.route_query(asked.request, generator=self.generator, model=model, deadline=asked.deadline)
        return way == "DIRECT"

    async def _write_directly(self, asked: Asked, model: str, reader: _Reader | None) -> Written:
        """An answer from no source. One that the window is too small for is asked without the history, once."""
        request = asked.request
        fitted = budget.allocate(
            system_prompt=direct.DIRECT_SYSTEM_PROMPT,
            question=request.query,
            history=request.chat_history or [],
            passages=(),
            limits=self.generator.limits(model),
            count=self._count,
            memory=memory_of(request),
        )
        started = time.perf_counter()
        degraded = [direct.DIRECT]
        laid_out = direct.lay_out(request.query, fitted.history, fitted.memory)
        try:
            draft = await self._draft(asked, laid_out, model, reader)
        except ContextOverflowError:
            if not (request.chat_history or request.key_facts or request.history_summary):
                raise
            laid_out = direct.lay_out(request.query, ())
            draft = await self._draft(asked, laid_out, model, reader)
            degraded.append(FORGOTTEN)
        if draft.truncated:
            degraded.append(TRUNCATED)
        return Written(
            text=draft.text,
            model=draft.model,
            system=laid_out.system,
            nonce=laid_out.nonce,
            shown=_shown(draft, laid_out, reader),
            direct=True,
            generation_ms=_ms_since(started),
            degraded=degraded,
        )

    async def _grade(self, asked: Asked, written: Written) -> Grade:
        """How well the answer is supported; where no model writes, how probable it is that the sources answer."""
        if written.model == EXTRACTIVE:
            probable = confidence.answerable(
                asked.request.query, written.passages, embedding_model=self.embedder.model_id
            )
            return Grade(score=round(100 * probable))
        shown = written.shown
        if shown is None or prompt.INSUFFICIENT_CONTEXT in shown.text:
            return Grade(score=0)
        return await grade(
            asked.request.query,
            shown.text,
            shown.cited,
            generator=self.generator,
            model=written.model,
            deadline=asked.deadline,
        )

    async def _write(self, asked: Asked, found: Found, model: str, system: str, reader: _Reader | None) -> Written:
        """Fit, lay out and generate. A server that counts more tokens than we did gets a shorter prompt, once."""
        request, passages = asked.request, found.passages
        limits = self.generator.limits(model)
        if request.max_context_tokens is not None:
            limits = dataclasses.replace(limits, context=request.max_context_tokens)
        started = time.perf_counter()
        fitted, laid_out = self._fit(request, passages, limits, system)
        if not fitted.passages:
            if reader is not None:
                reader.begin(None)
            return dataclasses.replace(_nothing_to_quote(model), degraded=[NO_ROOM])
        degraded = []
        try:
            draft = await self._draft(asked, laid_out, model, reader)
        except ContextOverflowError as overflow:
            ours = self._count(laid_out.system) + self._count(laid_out.user)
            try:
                fitted, laid_out = self._fit(request, passages, budget.shrink(limits, ours, overflow), system)
            except TokenBudgetExceededError:
                raise overflow from None
            if not fitted.passages:
                raise
            draft = await self._draft(asked, laid_out, model, reader)
            degraded.append(SHRUNK)
        if draft.truncated:
            degraded.append(TRUNCATED)
        if fitted.memory != memory_of(request):
            degraded.append(MEMORY_CUT)
        return Written(
            text=draft.text,
            model=draft.model,
            sources=laid_out.sources,
            system=laid_out.system,
            nonce=laid_out.nonce,
            shown=_shown(draft, laid_out, reader),
            context_tokens=fitted.context_tokens,
            generation_ms=_ms_since(started),
            degraded=degraded,
        )

    async def _draft(self, asked: Asked, laid_out: Prompt, model: str, reader: _Reader | None) -> Draft:
        if reader is not None:
            reader.begin(laid_out)
        draft = await self.generator.write(laid_out, model=model, sink=reader, deadline=asked.deadline)
        if reader is not None:
            reader.finish()
        return draft

    def _system(self, request: RAGRequest, found: Found) -> str:
        """The system's message: what the tenant says and what the request's pack says, and our rules after both."""
        system = system_prompt(found.tenant_prompt)
        pack = pack_of(self.domains, request.domain)
        return system if pack is None else layered(system, pack.chat_prompt)

    def _fit(
        self, request: RAGRequest, passages: Sequence[Passage], limits: Limits, system: str
    ) -> tuple[Allocation, Prompt]:
        fitted = budget.allocate(
            system_prompt=system,
            question=request.query,
            history=request.chat_history or [],
            passages=passages,
            limits=limits,
            count=self._count,
            memory=memory_of(request),
        )
        return fitted, prompt.build(request.query, fitted.passages, fitted.history, system=system, memory=fitted.memory)


class _Reader:
    """Somebody who reads an answer while it is written."""

    def __init__(self, asked: Asked, model: str, tell: Tell) -> None:
        self._asked = asked
        self._model = model
        self._tell = tell
        self._showing: Showing | None = None
        self._laid_out: Prompt | None = None
        self._since = 0.0
        self._said: list[str] = []
        self.shown: list[str] = []

    def begin(self, laid_out: Prompt | None) -> None:
        """Tell which sources the model is given; None when there are none and it is not asked."""
        passages = () if laid_out is None else tuple(laid_out.sources.values())
        self._tell(Sources(query_id=str(self._asked.query_id), model=self._model, passages=passages))
        self._laid_out = laid_out
        self._since = time.perf_counter()
        if laid_out is not None:
            self._showing = Showing(
                laid_out.sources, system=laid_out.system, question=laid_out.question, nonce=laid_out.nonce
            )

    async def __call__(self, piece: str) -> None:
        assert self._showing is not None
        self._said.append(piece)
        self._show(self._showing.feed(piece))

    def finish(self) -> None:
        """The draft is whole."""
        assert self._showing is not None
        self._show(self._showing.finish())

    @property
    def begun(self) -> Written:
        """What has been written, for an answer that breaks off."""
        assert self._laid_out is not None
        return Written(
            text="".join(self._said),
            model=self._model,
            sources=self._laid_out.sources,
            system=self._laid_out.system,
            nonce=self._laid_out.nonce,
            context_tokens=sum(passage.token_count for passage in self._laid_out.sources.values()),
            generation_ms=_ms_since(self._since),
            direct=not self._laid_out.sources,
        )

    @property
    def resolved(self) -> cite.Resolved:
        """What has been shown."""
        assert self._showing is not None
        return self._showing.resolved("".join(self.shown))

    def close(self, response: RAGResponse) -> None:
        """Tell the rest, now that the answer is concluded."""
        shown = "".join(self.shown)
        if not shown:
            self._show(response.answer)
        elif shown != response.answer:
            self._tell(Retracted(text=response.answer, reason=REVOKED))
        self._tell(Citations(citations=tuple(response.citations)))
        self._tell(Confidence(confidence=response.confidence))
        self._tell(Decision(action=response.action, grounded=response.grounded))
        if response.route_to is not None:
            self._tell(Route(route_to=response.route_to))
        self._tell(Done(response=response))

    def _show(self, text: str) -> None:
        if text:
            self.shown.append(text)
            self._tell(Token(text=text))


def check_request(request: RAGRequest, principal: Principal) -> None:
    """Raise InvalidInput for a malformed request, PrincipalMismatch for one that speaks for somebody else."""
    check_question(request.query)
    if request.tenant_id is not None and request.tenant_id != principal.tenant_id:
        raise PrincipalMismatch(field="tenant_id")
    if request.user_tags is not None and check_tags(request.user_tags, field="user_tags") != principal.tags:
        raise PrincipalMismatch(field="user_tags")
    for name, low, high in (("max_context_chunks", 1, 100), ("max_context_tokens", 1, 1_000_000)):
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise InvalidInput(f"{name} must be a whole number from {low} to {high}", field=name)
    if request.min_similarity is not None and not -1 <= request.min_similarity <= 1:
        raise InvalidInput("min_similarity must be from -1 to 1", field="min_similarity")
    if request.scope is not None and request.scope not in NARROWINGS:
        raise InvalidInput(f"scope must be one of {', '.join(NARROWINGS)}", field="scope")
    if request.mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}", field="mode")
    if request.fusion not in FUSIONS:
        raise InvalidInput(f"fusion must be one of {', '.join(FUSIONS)}", field="fusion")
    if (request.embedding is None) != (request.embedding_model is None):
        raise InvalidInput("embedding and embedding_model go together", field="embedding_model")
    if (request.scope == "documents") != (request.document_ids is not None):
        raise InvalidInput("scope documents and document_ids go together", field="document_ids")
    if request.scope == "project" and principal.project_id in (None, "*"):
        raise InvalidInput("scope project needs a project_id", field="project_id")
    if request.scope == "user" and principal.user_id is None:
        raise InvalidInput("scope user needs a user_id", field="user_id")
    check_history(request)


def _kept(passages: Sequence[Passage]) -> list[Passage]:
    return [passage for passage in passages if passage.rank is not None]


def _nothing_to_quote(model: str) -> Written:
    """Spec 001, "Zero-Context Handling": no model is asked."""
    return Written(text=INSUFFICIENT_CONTEXT, model=model)


def _shown(draft: Draft, laid_out: Prompt, reader: _Reader | None) -> cite.Resolved:
    """What is shown of a draft, the same to those who read along and to those who wait."""
    if reader is not None:
        return reader.resolved
    return show(draft.text, laid_out.sources, system=laid_out.system, question=laid_out.question, nonce=laid_out.nonce)


def _heard(task: asyncio.Task[Any]) -> None:
    """Nobody may be left who waits for the task and gets its error."""
    if not task.cancelled():
        task.exception()


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
