"""Model servers of both protocols, under one handle: what holds of one client has to hold of the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rag.chat import ChatClient, ChatRequest
from rag.ollama import OllamaClient
from rag.openai_chat import OpenAIClient
from rag.settings import Settings
from tests.fakes import Exchange
from tests.fakes.chat import Dialect, speak
from tests.fakes.ollama import FakeOllama, OllamaDialect, fake_ollama
from tests.fakes.openai_chat import FakeOpenAIChat, OpenAIDialect, fake_openai_chat

PROVIDERS = ("ollama", "openai")
CHAT_PATHS = ("/api/chat", "/v1/chat/completions")

QUESTION = ({"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Is it so?"})
# Long enough for a loaded machine; no test that succeeds waits for it.
PATIENCE_S = 20.0


@dataclass
class ModelServer:
    """A fake server, whose fields a test changes, and the ways to talk to it."""

    provider: str
    fake: FakeOllama | FakeOpenAIChat

    @property
    def dialect(self) -> Dialect:
        return OllamaDialect("llama3.2") if self.provider == "ollama" else OpenAIDialect("llama3.2")

    @property
    def chats(self) -> list[dict[str, Any]]:
        """What was asked in chats, oldest first."""
        return [request.body for request in self.fake.requests if request.path in CHAT_PATHS]

    def client(self, *, timeout_s: float = PATIENCE_S) -> ChatClient:
        return client_of(self.provider, self.fake.base_url, timeout_s=timeout_s)

    def settings(self, **changes: Any) -> Settings:
        return settings_of(self.provider, self.fake.base_url, **changes)

    def allot(self, window: int, *, response_tokens: int) -> None:
        """Make a prompt of `window` tokens the first that is too long, whoever decides about windows."""
        if isinstance(self.fake, FakeOpenAIChat):
            self.fake.window = window - 1 + response_tokens

    def plays(self, stream: Callable[[Exchange], None]) -> None:
        """Let a test write the answers to chats, byte by byte; lists are answered as ever."""

        def answer(exchange: Exchange) -> None:
            if exchange.path in CHAT_PATHS:
                stream(exchange)
            else:
                self.fake.serve(exchange)

        self.fake.server.answer_with = answer

    def fails(self, fault: str | None) -> None:
        """Have a fault in chats alone, or none; what is asked about models is answered as ever."""

        self.plays(partial(self.fake.serve_with, fault))

    def says(self, pieces: Sequence[str], *, reason: str = "stop") -> None:
        """Answer with these pieces, a frame each."""
        self.plays(lambda exchange: speak(exchange, self.dialect, pieces, reason=reason, fault=None))


@contextmanager
def model_server(provider: str, **options: Any) -> Iterator[ModelServer]:
    """Run the fake server of a protocol until the block ends."""
    with fake_ollama(**options) if provider == "ollama" else fake_openai_chat(**options) as fake:
        yield ModelServer(provider, fake)


def client_of(provider: str, base_url: str, *, timeout_s: float = PATIENCE_S) -> ChatClient:
    if provider == "ollama":
        return OllamaClient(base_url, timeout_s=timeout_s)
    return OpenAIClient(base_url, api_key="sk-test", timeout_s=timeout_s)


def settings_of(provider: str, base_url: str, **changes: Any) -> Settings:
    url = {"ollama_base_url": base_url} if provider == "ollama" else {"openai_base_url": base_url}
    given = {"rag_llm_provider": provider, "openai_api_key": "sk-test", "chat_model": "llama3.2"} | url | changes
    return Settings(_env_file=None, **given)


def question(**changes: Any) -> ChatRequest:
    given = {"model": "llama3.2", "window_tokens": 8192, "response_tokens": 100, "temperature": 0.1}
    return ChatRequest(**({"messages": QUESTION} | given | changes))


class Listener:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.heard = threading.Event()

    async def __call__(self, piece: str) -> None:
        self.pieces.append(piece)
        self.heard.set()

    @property
    def text(self) -> str:
        return "".join(self.pieces)
