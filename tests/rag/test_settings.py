"""Settings: the names and defaults of the specs, their aliases, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from rag.settings import Settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine, and no `.env`."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    for alias in ("RAG_MAX_TOKENS", "RAG_CONTEXT_CHUNKS"):
        monkeypatch.delenv(alias, raising=False)
    monkeypatch.chdir(tmp_path)


# Read off the tables of specs 000 and 001 by hand. Where they differ (RAG_MAX_TOKENS 2048), 001's holds.
SPECIFIED = {
    "OLLAMA_BASE_URL": "http://localhost:11434",
    "CHAT_MODEL": "llama3.2",
    "RAG_TEMPERATURE": 0.1,
    "RAG_TIMEOUT_SECONDS": 30,
    "RAG_CONFIDENCE_THRESHOLD": 60,
    "RAG_ADMIN_EMAIL": "admin@company.com",
    "RAG_MAX_CONTEXT_TOKENS": 3000,
    "RAG_MAX_HISTORY_TOKENS": 1000,
    "RAG_MAX_RESPONSE_TOKENS": 1024,
    "RAG_SYSTEM_PROMPT_TOKENS": 500,
    "RAG_MAX_CHUNKS_PER_DOC": 3,
    "RAG_TOTAL_CONTEXT_CHUNKS": 5,
    "RAG_DEDUP_CANDIDATES_CAP": 15,
    "RAG_CHUNK_OVERLAP_THRESHOLD": 0.9,
    # Spec 002: vector(512).
    "RAG_EMBEDDING_DIMENSIONS": 512,
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_a_default_is_the_one_of_the_specification(name: str):
    assert getattr(Settings(), name.lower()) == SPECIFIED[name]


def test_the_models_that_may_be_asked_are_those_of_the_specification():
    limits = {name: (limit.context_window, limit.max_response) for name, limit in Settings().rag_model_limits.items()}
    assert limits == {"llama3.2": (8192, 1024), "qwen3:8b": (32768, 2048), "deepseek-r1:32b": (65536, 4096)}


def test_the_minimum_similarity_is_the_models_own_unless_it_is_set(monkeypatch: pytest.MonkeyPatch):
    assert Settings().rag_min_similarity_score is None
    monkeypatch.setenv("RAG_MIN_SIMILARITY_SCORE", "0.3")
    assert Settings().rag_min_similarity_score == 0.3


def test_nothing_that_opens_a_door_is_on_by_default():
    settings = Settings()
    assert settings.rag_database_url is None
    assert settings.rag_publisher_database_url is None
    assert settings.rag_service_keys is False
    assert settings.rag_jwt_issuer is None
    assert settings.rag_jwt_audience is None
    assert settings.rag_jwt_jwks_url is None
    assert settings.rag_jwt_publisher_role is None
    assert settings.rag_jwt_algorithms == {"EdDSA", "RS256", "ES256"}
    assert settings.rag_log_query_text is False


@pytest.mark.parametrize(
    ("name", "alias", "field"),
    [
        ("RAG_MAX_RESPONSE_TOKENS", "RAG_MAX_TOKENS", "rag_max_response_tokens"),
        ("RAG_TOTAL_CONTEXT_CHUNKS", "RAG_CONTEXT_CHUNKS", "rag_total_context_chunks"),
    ],
)
def test_where_the_specs_have_two_names_both_work_and_the_name_of_001_wins(
    monkeypatch: pytest.MonkeyPatch, name: str, alias: str, field: str
):
    monkeypatch.setenv(alias, "7")
    assert getattr(Settings(), field) == 7
    monkeypatch.setenv(name, "9")
    assert getattr(Settings(), field) == 9
    monkeypatch.delenv(alias)
    assert getattr(Settings(), field) == 9


def test_every_setting_is_read_from_the_environment_by_its_name(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, tuple[str, Any]] = {
        "RAG_HOME": ("/somewhere", Path("/somewhere")),
        "RAG_STRICT": ("1", True),
        "RAG_EMBEDDING_PROVIDER": ("ollama", "ollama"),
        "RAG_LLM_PROVIDER": ("extractive", "extractive"),
        "RAG_SERVICE_KEYS": ("1", True),
        "RAG_JWT_ALGORITHMS": ('["RS256", "PS512"]', {"RS256", "PS512"}),
        "RAG_JWT_JWKS_URL": ("https://id.example/keys.json", "https://id.example/keys.json"),
        "RAG_JWT_PUBLISHER_ROLE": ("editor", "editor"),
        "CHAT_MODEL": ("qwen3:8b", "qwen3:8b"),
    }
    for name, (text, _) in given.items():
        monkeypatch.setenv(name, text)
    settings = Settings()
    assert {name: getattr(settings, name.lower()) for name in given} == {
        name: value for name, (_, value) in given.items()
    }


def test_a_file_of_settings_counts_less_than_the_environment(monkeypatch: pytest.MonkeyPatch):
    Path(".env").write_text("CHAT_MODEL=from-file\nRAG_ADMIN_EMAIL=file@example.org\nUNRELATED=1\n", encoding="utf-8")
    monkeypatch.setenv("CHAT_MODEL", "from-environment")
    assert Settings().chat_model == "from-environment"
    assert Settings().rag_admin_email == "file@example.org"


def test_the_limits_of_models_are_a_table_in_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_MODEL_LIMITS", '{"tiny": {"context_window": 2048, "max_response": 256}}')
    assert Settings().rag_model_limits["tiny"].context_window == 2048


@pytest.mark.parametrize(
    ("provider", "model"),
    [("local", "all-MiniLM-L6-v2"), ("openai", "text-embedding-3-small"), ("ollama", "nomic-embed-text")],
)
def test_each_embedding_provider_has_a_model_of_its_own(provider: str, model: str):
    assert Settings(rag_embedding_provider=provider).embedding_model == model
    assert Settings(rag_embedding_provider=provider, rag_embedding_model="x").embedding_model == "x"


NO_KEY_SET_URLS = [
    "",
    "keys.json",
    "id.example/keys.json",
    "https:///keys.json",
    "http://id.example/keys.json",
    "http://127.0.0.1.id.example/keys.json",
    "http://127.0.0.1@id.example/keys.json",
    "http://10.0.0.1/keys.json",
    "ftp://127.0.0.1/keys.json",
    "file:///etc/keys.json",
    "https://[::1",
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAG_POOL_SIZE", "0"),
        ("RAG_POOL_SIZE", "many"),
        ("RAG_POOL_TIMEOUT_SECONDS", "0"),
        ("RAG_STRICT", "perhaps"),
        ("RAG_EMBEDDING_PROVIDER", "cohere"),
        ("RAG_EMBEDDING_DIMENSIONS", "7"),
        ("RAG_EMBEDDING_DIMENSIONS", "4001"),
        ("RAG_EMBEDDING_TIMEOUT_SECONDS", "-1"),
        ("RAG_LLM_PROVIDER", "anthropic"),
        ("RAG_TEMPERATURE", "3"),
        ("RAG_TIMEOUT_SECONDS", "0"),
        ("RAG_ANSWER_TIMEOUT_SECONDS", "0"),
        ("RAG_LLM_CONCURRENCY", "0"),
        ("RAG_LLM_QUEUE", "-1"),
        ("RAG_CONFIDENCE_THRESHOLD", "101"),
        ("RAG_MAX_RESPONSE_TOKENS", "0"),
        ("RAG_MAX_CONTEXT_TOKENS", "0"),
        ("RAG_MAX_HISTORY_TOKENS", "-1"),
        ("RAG_TOTAL_CONTEXT_CHUNKS", "101"),
        ("RAG_MIN_SIMILARITY_SCORE", "1.1"),
        ("RAG_CHUNK_OVERLAP_THRESHOLD", "0"),
        ("RAG_MAX_DOCUMENT_BYTES", "0"),
        ("RAG_SERVICE_KEYS", "some"),
        # With a shared secret, whoever can check a token can make one; and a public key would be a secret.
        *(
            ("RAG_JWT_ALGORITHMS", f'["RS256", "{name}"]')
            for name in ("HS256", "HS384", "HS512", "none", "None", "rs256")
        ),
        ("RAG_JWT_ALGORITHMS", "[]"),
        *(("RAG_JWT_JWKS_URL", url) for url in NO_KEY_SET_URLS),
        *((f"RAG_JWT_{name}", "") for name in ("ISSUER", "AUDIENCE", "TENANT_CLAIM", "USER_CLAIM", "PUBLISHER_ROLE")),
        ("RAG_MODEL_LIMITS", '{"tiny": {"context_window": 0, "max_response": 256}}'),
    ],
)
def test_a_malformed_value_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert str(refused.value.errors()[0]["loc"][0]).upper() == name


@pytest.mark.parametrize(
    "url", ["https://id.example/keys", "http://127.0.0.1:8080/k", "http://localhost/k", "http://[::1]/k"]
)
def test_keys_of_an_issuer_come_over_tls_or_from_this_machine(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv("RAG_JWT_JWKS_URL", url)
    assert Settings().rag_jwt_jwks_url == url


@pytest.mark.parametrize("name", ["RAG_JWT_ALGORITHMS", "RAG_MODEL_LIMITS"])
def test_a_list_or_table_that_is_no_json_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "hr,ops")
    with pytest.raises(SettingsError, match=name.lower()):
        Settings()


def test_no_secret_is_in_what_is_printed_of_the_settings():
    settings = Settings(
        rag_database_url="postgresql://rag_app:hunter2@db/x",
        rag_publisher_database_url="postgresql://rag_publisher:hunter2@db/x",
        rag_migration_database_url="postgresql://rag_migrator:hunter2@db/x",
        openai_api_key="hunter2",
    )
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()
