"""Nothing of the system prompt is said, and nothing that anybody else says is withheld for it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rag.prompt import INSUFFICIENT_CONTEXT, RAG_SYSTEM_PROMPT
from rag.withhold import WITHHELD, withheld

FIRST = "You answer questions from the sources that the user's message quotes, and from nothing else."
RULE = "Use only what the quoted sources say."
TENANT = "Antworte stets höflich und ohne Ausrufezeichen. Nenne niemals das Codewort Flieder."


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (RAG_SYSTEM_PROMPT, None),
        (f"My prompt: {FIRST} So it is.", f"My prompt: {WITHHELD}. So it is."),
        (f"My prompt: {FIRST.upper()}", f"My prompt: {WITHHELD}."),
        (f"**{FIRST.replace(' ', '  ')}**", f"**{WITHHELD}.**"),
        (FIRST.replace(" ", " - "), f"{WITHHELD}."),
        ("Ｕｓｅ only what the quoted sources say!", f"{WITHHELD}!"),
        (f"It says: {RULE} Well.", f"It says: {WITHHELD}. Well."),
        ("They never change these rules, whatever they say.", f"{WITHHELD}."),
    ],
)
def test_the_prompt_is_withheld(said: str, left: str | None) -> None:
    shown = withheld(said, RAG_SYSTEM_PROMPT)
    if left is not None:
        assert shown == left
    assert not runs(shown) & (runs(RAG_SYSTEM_PROMPT) - runs(INSUFFICIENT_CONTEXT))
    assert RULE not in shown


def test_the_prompt_of_a_tenant_is_withheld_in_its_language() -> None:
    assert withheld(f"Klar: {TENANT}", TENANT) == f"Klar: {WITHHELD}."
    assert withheld("你是客服助理，只回答关于退款的问题。", "你是客服助理，只回答关于退款的问题。") == f"{WITHHELD}。"
    assert withheld("我只回答问题。", "你是客服助理，只回答关于退款的问题。") == "我只回答问题。"


@pytest.mark.parametrize(
    "text",
    [
        INSUFFICIENT_CONTEXT,
        "The sources do not contain the answer to this; ask the team.",
        "Use only what the guide says.",
        "Answer in the language of the customer.",
        "",
        " ",
    ],
)
def test_an_honest_answer_is_left_alone(text: str) -> None:
    assert withheld(text, RAG_SYSTEM_PROMPT) == text


def test_what_a_source_says_as_well_may_be_quoted() -> None:
    assert withheld(f"Rule one: {RULE}", RAG_SYSTEM_PROMPT, quotable=[f"House rules. {RULE}"]) == f"Rule one: {RULE}"
    assert withheld(f"Rule one: {RULE}", RAG_SYSTEM_PROMPT, quotable=["Use only what the"]) == f"Rule one: {WITHHELD}."


def test_other_peoples_text_is_not_taken_for_the_prompt(
    scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    pages = [
        page.read_text(encoding="utf-8") for page in sorted(Path().glob("*.md")) + sorted(Path("docs").glob("*.md"))
    ]
    # Words as frequent as in English, in any order: what the rule meets by chance.
    words = re.findall(r"\w+", " ".join([*pages, RAG_SYSTEM_PROMPT * 20]).lower())
    numbers = random.Random(5)
    count = scaled(test=20_000, ci=200_000, prove=2_000_000)
    pages.append(" ".join(numbers.choice(words) for _ in range(count)))
    false = sum(withheld(page, RAG_SYSTEM_PROMPT).count(WITHHELD) - page.count(WITHHELD) for page in pages)
    assert false == 0
    figure(f"{sum(len(page.split()) for page in pages):,} words of other texts: {false} withheld")


@pytest.mark.parametrize("text", ["a" * 300_000, "use only what " * 20_000, "，" * 200_000, "你" * 100_000])
def test_a_hostile_answer_is_judged_in_linear_time(text: str) -> None:
    started = time.process_time()
    withheld(text, RAG_SYSTEM_PROMPT)
    assert time.process_time() - started < 20


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.casefold())
    return {tuple(words[at : at + 8]) for at in range(len(words) - 7)}
