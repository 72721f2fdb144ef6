"""What a tenant tells the model. Operators say it, each search reads it anew, and our rules always stand after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg.rows import DictRow

from rag.database import Database
from rag.errors import InvalidInput
from rag.exchange import TenantPrompt
from rag.principal import Principal, check_name
from rag.prompt import INTRODUCTION, RAG_SYSTEM_PROMPT, RULES, RULES_STAND

if TYPE_CHECKING:
    from rag.operate import Session

# As the table has it: some 2,000 tokens, a quarter of the smallest window of spec 001.
MAX_PROMPT_BYTES = 8 * 1024


def system_prompt(told: TenantPrompt | None) -> str:
    """The system's message: the tenant's text after our introduction or instead of it, and always our rules.

    The text is taken as it is: braces, labels and the like mean nothing in it.
    """
    if told is None:
        return RAG_SYSTEM_PROMPT
    introduction = told.prompt.strip() if told.replaces else f"{INTRODUCTION}\n\n{told.prompt.strip()}"
    return f"{introduction}\n\n{RULES_STAND}\n\n{RULES}"


async def read_prompt(database: Database, principal: Principal) -> TenantPrompt | None:
    """What the principal's tenant says, for an answer that searches nothing; a search brings it along."""
    async with database.transaction(principal, read_only=True) as session:
        row = await session.row("my_prompt", {})
    return None if row is None else TenantPrompt(**row)


def set_prompt(session: Session, *, tenant_id: str, prompt: str, replaces: bool) -> int:
    """Set the prompt of a tenant; which generation it is. As rag_operator. The next question has it already."""
    check_name(tenant_id, field="tenant_id")
    _check_prompt(prompt)
    row = session.row("set_prompt", {"tenant_id": tenant_id, "prompt": prompt, "replaces": replaces})
    assert row is not None
    return int(row["generation"])


def list_prompts(session: Session, tenant_id: str | None) -> list[DictRow]:
    """The prompts of one tenant or of all, by tenant. As rag_operator."""
    return session.rows("list_prompts", {"tenant_id": tenant_id})


def remove_prompt(session: Session, tenant_id: str) -> None:
    """Go back to what is shipped. Raises InvalidInput when the tenant has no prompt. As rag_operator."""
    if session.row("remove_prompt", {"tenant_id": tenant_id}) is None:
        raise InvalidInput("this tenant has no prompt: `rag prompts list` has all of them", field="tenant_id")


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidInput("the prompt must not be empty", field="prompt")
    try:
        size = len(prompt.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput("the prompt contains a lone surrogate, which is no character", field="prompt") from error
    if size > MAX_PROMPT_BYTES:
        raise InvalidInput(f"the prompt has {size} bytes, and {MAX_PROMPT_BYTES} are permitted", field="prompt")
    if "\0" in prompt:
        raise InvalidInput("the prompt contains a NUL character", field="prompt")
