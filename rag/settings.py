"""Settings, read once from the environment (and `.env`) and passed in from there.

The names of specs 000 and 001 are kept. Where the two name one thing twice, 001's name wins and
000's is an alias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class ModelLimits(BaseModel):
    """What a chat model can take, in tokens."""

    model_config = ConfigDict(frozen=True)

    context_window: Annotated[int, Field(gt=0)]
    max_response: Annotated[int, Field(gt=0)]


# Spec 001, "Allowlist Configuration".
DEFAULT_MODEL_LIMITS = {
    "llama3.2": ModelLimits(context_window=8192, max_response=1024),
    "qwen3:8b": ModelLimits(context_window=32768, max_response=2048),
    "deepseek-r1:32b": ModelLimits(context_window=65536, max_response=4096),
}


SignatureAlgorithm = Literal["EdDSA", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]


def _checked_key_set_url(url: str) -> str:
    # Whoever can answer for this address can let anybody in.
    parts = urlsplit(url)
    own = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (own or parts.scheme == "https"):
        raise ValueError("must be an https address; http only on this machine")
    return url


class Settings(BaseSettings):
    """All settings. Environment variables are the upper-case field names."""

    model_config = SettingsConfigDict(env_file=".env", extra="ignore", frozen=True, populate_by_name=True)

    # Databases. None = the embedded one, which lives in `rag_home`.
    rag_database_url: SecretStr | None = None
    """Logs in as rag_app; for `rag worker` as rag_worker."""
    rag_publisher_database_url: SecretStr | None = None
    """Logs in as rag_publisher, the only role that may write scope public."""
    rag_migration_database_url: SecretStr | None = None
    """Logs in as rag_migrator."""
    rag_operator_database_url: SecretStr | None = None
    """Logs in as rag_operator: for the commands of people who operate it, never in the service."""
    rag_admin_database_url: SecretStr | None = None
    """Logs in as a role that may make others: for `rag analyst` alone."""
    rag_signing_key: SecretStr | None = None
    """Signs the identity of every transaction: name and secret of a key of the database, from `rag keys sign`.
    The embedded database keeps its own."""
    rag_home: Path = Path(".palisade")
    """Where the embedded database keeps its state, relative to the working directory."""
    rag_pool_size: Annotated[int, Field(ge=1, le=1000)] = 5
    rag_pool_timeout_seconds: Annotated[float, Field(gt=0)] = 5.0
    rag_prepared_statements: bool = False
    """Let the server keep statements that are asked often, which a pooler in the path has to keep track of. What it
    saves a search is less than runs differ from each other (docs/operating.md). The embedded database always does."""
    rag_strict: bool = False
    """Warnings of the start-up check become refusals."""

    # Embeddings.
    rag_embedding_provider: Literal["local", "openai", "ollama"] = "local"
    rag_embedding_model: str | None = None
    """None = the provider's default: all-MiniLM-L6-v2, text-embedding-3-small, nomic-embed-text."""
    rag_embedding_dimensions: Annotated[int, Field(ge=8, le=3800)] = 512
    """Width of the column. Spec 002 says 512; shorter vectors are zero-padded. 3,800 still fit into a page."""
    rag_embedding_max_input_tokens: Annotated[int, Field(ge=32)] | None = None
    """The embedding model's own input limit, when the provider's default is not the model's."""
    rag_embedding_next_model: str | None = None
    """The model of the second column, while the model is being changed: `rag models` fills it, and services go over to
    it by themselves. None = none. Once it is active for good it becomes RAG_EMBEDDING_MODEL."""
    rag_embedding_next_provider: Literal["local", "openai", "ollama"] | None = None
    """None = RAG_EMBEDDING_PROVIDER."""
    rag_embedding_next_dimensions: Annotated[int, Field(ge=8, le=3780)] | None = None
    """None = RAG_EMBEDDING_DIMENSIONS. Both widths together are at most 3,790, so that a row fits into a page."""
    rag_embedding_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    openai_base_url: str = "https://api.openai.com/v1"
    openai_api_key: SecretStr | None = None

    # Generation (specs 000 and 001).
    rag_llm_provider: Literal["ollama", "openai", "extractive"] | None = None
    """None = Ollama when it answers with the model installed, else extractive."""
    ollama_base_url: str = "http://localhost:11434"
    chat_model: str = "llama3.2"
    rag_model_limits: dict[str, ModelLimits] = DEFAULT_MODEL_LIMITS
    rag_temperature: Annotated[float, Field(ge=0, le=2)] = 0.1
    rag_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    """For one response of a model, once it is its turn."""
    rag_answer_timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    """For a whole answer, from the question to its end: searching, waiting for the model, a second try, a grade.
    None = twice RAG_TIMEOUT_SECONDS, so that a slow first response leaves room for the rest."""
    rag_llm_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Responses that each process lets the model server write at once. None = 1 for Ollama, which by default
    writes one after the other and lets the time of the others run out meanwhile; 8 for `openai`."""
    rag_llm_queue: Annotated[int, Field(ge=0)] = 16
    """So many more wait for their turn, each process's own; who comes then is told to try again shortly. At 3 s a
    response that is what an Ollama can serve before they time out."""
    rag_confidence_threshold: Annotated[int, Field(ge=0, le=100)] = 60
    rag_admin_email: str = "admin@company.com"
    rag_expose_owner_email: bool = True
    """Name the address of a tag's owner to askers who hold the tag; otherwise their user id alone."""
    rag_allow_direct: bool = False
    """Requests may ask for answers from no document, where a model finds that none is needed (spec 000)."""

    # Token budget (spec 001).
    rag_max_context_tokens: Annotated[int, Field(ge=1)] = 3000
    rag_max_history_tokens: Annotated[int, Field(ge=0)] = 1000
    rag_max_response_tokens: Annotated[int, Field(ge=1)] = Field(
        default=1024, validation_alias=AliasChoices("RAG_MAX_RESPONSE_TOKENS", "RAG_MAX_TOKENS")
    )
    rag_system_prompt_tokens: Annotated[int, Field(ge=0)] = 500

    # Retrieval quality (spec 001).
    rag_min_similarity_score: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Cosine. None = what was calibrated for the tenant, else measured of the embedding model (`rag/embed.py`)."""
    rag_max_chunks_per_doc: Annotated[int, Field(ge=1)] = 3
    rag_total_context_chunks: Annotated[int, Field(ge=1, le=100)] = Field(
        default=5, validation_alias=AliasChoices("RAG_TOTAL_CONTEXT_CHUNKS", "RAG_CONTEXT_CHUNKS")
    )
    rag_dedup_candidates_cap: Annotated[int, Field(ge=1, le=100)] = 15
    rag_metadata_filter_keys: frozenset[str] = frozenset()
    """Top-level keys of a document's metadata that a question may filter by; a JSON list."""
    rag_feedback_boost: Annotated[float, Field(ge=0, le=1)] = 0.0
    """By what share of its score the feedback of readers lifts or lowers a document at most. 0 = it does not count;
    what it is worth: bench/results/feedback.md."""
    rag_chunk_overlap_threshold: Annotated[float, Field(gt=0, le=1)] = 0.9

    # Domain packs (spec 004).
    rag_domain_packs_dir: Path | None = None
    """A folder of YAML files, one a pack: prompts and words for a field of work (docs/answers.md)."""

    # Reranking (spec 004): a second look at the best of the search, by a cross-encoder.
    rag_rerank_provider: Literal["none", "local", "http"] = "none"
    """`local` runs one in this process (the extra `rerank`), `http` asks a server, which gets the passages' text."""
    rag_rerank_model: str | None = None
    """A folder or a name on the model hub; None = cross-encoder/ms-marco-MiniLM-L6-v2. With `http` what it asks for."""
    rag_rerank_url: Annotated[str, Field(min_length=1)] | None = None
    """The whole address that is posted to, such as http://localhost:8080/rerank."""
    rag_rerank_shape: Literal["tei", "cohere"] = "tei"
    """The body: of text-embeddings-inference, or of Cohere, Jina, vLLM and others."""
    rag_rerank_api_key: SecretStr | None = None
    rag_rerank_max_candidates: Annotated[int, Field(ge=1, le=100)] | None = None
    """Passages that it takes at once; None = 32, or 100 of the shape `cohere`."""
    rag_rerank_timeout_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Then the answer is written from the order of the search, and says so."""

    # Ingestion.
    rag_max_document_bytes: Annotated[int, Field(ge=1)] = 8 * 1024 * 1024
    """A larger file is refused. 8 MiB holds a 4,000-page book as text."""
    rag_max_file_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """The same for texts and tables of `rag ingest`, `rag sync` and `rag reconcile`, which take in what is larger than
    a document in parts."""
    rag_ingest_async_bytes: Annotated[int, Field(ge=0)] = 256 * 1024
    """A document that is sent to POST /rag/ingest and larger is answered with 202 and taken in by a worker. The local
    model reads 256 KiB in about half a minute, as long as clients and proxies wait."""
    rag_queue_max_size: Annotated[int, Field(ge=1)] = 1000
    """Jobs of one tenant that may wait or be under way; more are refused with 429 until some have ended."""
    rag_sources: Path | None = None
    """A YAML file of the sources that `rag reconcile`, and after a push a worker, keeps in step (docs/sources.md)."""
    rag_webhook_secrets: Path | None = None
    """A YAML file of the secrets with which pushes are signed, by repository; read again when it changes. None = there
    is no webhook (docs/webhook.md)."""
    rag_webhook_max_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024 * 1024
    """A larger delivery is refused. A genuine one takes memory for twice its length at most, for a moment;
    GitHub's largest are 25 MB."""
    rag_chunking: Literal["rules", "fixed", "sentence", "semantic"] = "rules"
    """How documents are cut: spec 002's rules by source type and heading, or a strategy of spec 003. Another one makes
    every document anew when it is next ingested. `semantic` also embeds each sentence by itself, which takes about
    as long again (docs/sources.md)."""

    # Conversations (spec 002).
    rag_summarise_after_tokens: Annotated[int, Field(ge=0)] = 2000
    """A thread with so many tokens that no summary has is summed up by a job; 0 = tokens do not count. A prompt has
    room for some 6,000 with the defaults, and the summary has at most 512."""
    rag_summarise_after_characters: Annotated[int, Field(ge=0)] = 0
    """The same in characters; 0 = they do not count. Whichever is reached first; with both 0 nothing is summed up."""
    rag_message_retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    """Days after which `rag maintain --retention` removes messages of conversations; their summaries stay. None =
    never."""

    # Logging.
    rag_log_query_text: bool = False
    """Store the text of questions in rag_query_logs; otherwise their hash and length only."""
    rag_log_retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    """Days after which `rag maintain --retention` removes questions, with what they got back. None = never."""
    rag_audit_retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    """The same for the record of for whom trusted services spoke."""

    # Who may call, beside the holder of the token that `rag serve` prints on loopback.
    rag_service_keys: bool = False
    """Trusted services, by the keys in rag_service_keys."""
    rag_jwt_issuer: Annotated[str, Field(min_length=1)] | None = None
    """End users, by tokens with this `iss`; audience and key set must be set as well."""
    rag_jwt_audience: Annotated[str, Field(min_length=1)] | None = None
    rag_jwt_jwks_url: Annotated[str, AfterValidator(_checked_key_set_url)] | None = None
    """Where the issuer publishes its keys; https, unless it is this machine."""
    rag_jwt_algorithms: Annotated[frozenset[SignatureAlgorithm], Field(min_length=1)] = frozenset(
        {"EdDSA", "RS256", "ES256"}
    )
    """None with a shared secret: the public key of another algorithm would be one."""
    rag_jwt_tenant_claim: Annotated[str, Field(min_length=1)] = "tenant_id"
    rag_jwt_user_claim: Annotated[str, Field(min_length=1)] = "sub"
    """A positive whole number or its decimal string."""
    rag_jwt_projects_claim: Annotated[str, Field(min_length=1)] = "projects"
    """A list. In a token that has it, no other project can be named."""
    rag_jwt_tags_claim: Annotated[str, Field(min_length=1)] = "tags"
    """A list; public in a token without it."""
    rag_jwt_roles_claim: Annotated[str, Field(min_length=1)] = "roles"
    """A list, or words in one text as in `scope`."""
    rag_jwt_publisher_role: Annotated[str, Field(min_length=1)] | None = None
    """The role that may write scope public. None = nobody."""

    @property
    def answer_timeout_seconds(self) -> float:
        return self.rag_answer_timeout_seconds or 2 * self.rag_timeout_seconds

    @property
    def llm_concurrency(self) -> int:
        return self.rag_llm_concurrency or (8 if self.rag_llm_provider == "openai" else 1)

    @property
    def next_model(self) -> Settings | None:
        """The settings as they are with the model that is to come; None when there is none."""
        if self.rag_embedding_next_model is None:
            return None
        changes = {
            "rag_embedding_provider": self.rag_embedding_next_provider or self.rag_embedding_provider,
            "rag_embedding_model": self.rag_embedding_next_model,
            "rag_embedding_dimensions": self.rag_embedding_next_dimensions or self.rag_embedding_dimensions,
            # It is of the other model.
            "rag_embedding_max_input_tokens": None,
            "rag_embedding_next_model": None,
        }
        return self.model_copy(update=changes)

    @property
    def embedding_widths(self) -> tuple[int, ...]:
        """The widths that the column may have: of the model, and of the one that is to come."""
        coming = self.next_model
        widths = [self.rag_embedding_dimensions, *([] if coming is None else [coming.rag_embedding_dimensions])]
        return tuple(dict.fromkeys(widths))

    @property
    def embedding_model(self) -> str:
        defaults = {
            "local": "all-MiniLM-L6-v2",
            "openai": "text-embedding-3-small",
            "ollama": "nomic-embed-text",
        }
        return self.rag_embedding_model or defaults[self.rag_embedding_provider]
