"""Domain packs: what an operator adds for a field of work, in files; its prompts, its words, and where to look last.

A pack adds and never takes away: our rules for sources and citations stand after its prompt, and a question that names
no pack, or one that is not installed, is answered as if there were none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rag.errors import DomainPackInvalid
from rag.exchange import MAX_QUESTION_BYTES, Passage
from rag.prompt import RULES, RULES_STAND

# With its words, a pack is a page or two; what is larger is another file.
MAX_PACK_BYTES = 256 * 1024
# Some 1,000 tokens: twice what RAG_SYSTEM_PROMPT_TOKENS reserves, and an eighth of the smallest window of spec 001.
MAX_PROMPT_LENGTH = 4000
# Of one question. Each word that is added takes weight from those that were asked.
MAX_ADDED = 12

FOUND_BY_DOMAIN = "nothing was found for the question itself, so the terms of its domain were searched"
DOMAIN_TERMS = "domain_terms"

_Term = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100, pattern=r"^[^\x00-\x1f]+$")
]
_Prompt = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_PROMPT_LENGTH, pattern=r"^[^\x00]*$")]


class DomainPack(BaseModel):
    """One pack."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    """What the field `domain` of a question names."""
    chat_prompt: _Prompt = ""
    """For answers."""
    skill_prompt: _Prompt = ""
    """For structured answers."""
    expansions: Annotated[
        dict[_Term, Annotated[list[_Term], Field(min_length=1, max_length=10)]], Field(max_length=500)
    ] = {}
    """A word or a phrase of a question, and what is searched beside it."""
    fallback_terms: Annotated[list[_Term], Field(max_length=50)] = []
    """Searched by keyword where a question found nothing."""


def load_packs(folder: Path | None) -> Mapping[str, DomainPack]:
    """The packs of a folder by their keys: its files `*.yaml` and `*.yml`, one a pack. None has none.

    Raises DomainPackInvalid, which names the file and what is wrong with it.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise DomainPackInvalid(f"RAG_DOMAIN_PACKS_DIR={folder} is not a folder")
    packs: dict[str, DomainPack] = {}
    files: dict[str, str] = {}
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")):
        pack = _load(file)
        if pack.key in packs:
            raise DomainPackInvalid(f"{file.name} has the key {pack.key} of {files[pack.key]}")
        packs[pack.key] = pack
        files[pack.key] = file.name
    return packs


def _load(file: Path) -> DomainPack:
    try:
        content = file.read_bytes()
        if len(content) > MAX_PACK_BYTES:
            raise DomainPackInvalid(f"{file.name} is larger than {MAX_PACK_BYTES} bytes")
        parsed = yaml.safe_load(content)
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        raise DomainPackInvalid(f"{file.name} cannot be read as YAML") from error
    if not isinstance(parsed, dict):
        raise DomainPackInvalid(f"{file.name} is no mapping with a key")
    try:
        return DomainPack.model_validate(parsed)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise DomainPackInvalid(f"{file.name}: {place}: {first['msg']}") from error


def pack_of(packs: Mapping[str, DomainPack], domain: object) -> DomainPack | None:
    """The pack that a request names, None for any other key."""
    return packs.get(domain) if isinstance(domain, str) else None


def layered(system: str, told: str) -> str:
    """A system prompt with a domain's text in it: before our rules, which come last whatever stands above them."""
    if not told:
        return system
    before = system.removesuffix(RULES).rstrip().removesuffix(RULES_STAND).rstrip()
    return f"{before}\n\n{told}\n\n{RULES_STAND}\n\n{RULES}"


def enhance_query(question: str, pack: DomainPack | None) -> str:
    """The question and the words that its pack has for those in it, for the search alone; the model gets the question.

    Upper and lower case are one, and only whole words count. At most `MAX_ADDED` are added, in the pack's order.
    """
    if pack is None:
        return question
    asked = question.casefold()
    added: list[str] = []
    for term, others in pack.expansions.items():
        if _stands_in(term, asked):
            added += [other for other in others if other not in added and not _stands_in(other, asked)]
    enhanced = question
    for other in added[:MAX_ADDED]:
        longer = f"{enhanced} {other}"
        if len(longer.encode()) > MAX_QUESTION_BYTES:
            break
        enhanced = longer
    return enhanced


def _stands_in(term: str, folded: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(term.casefold())}(?!\w)", folded) is not None


def marked(passages: Iterable[Passage]) -> list[Passage]:
    """Passages that were found by the terms of a domain, for what they are.

    How much of the terms they have says nothing of the question, so it lifts no confidence.
    """
    return [
        dataclasses.replace(
            passage, keyword_share=0.0, reason=DOMAIN_TERMS if passage.rank is not None else passage.reason
        )
        for passage in passages
    ]
