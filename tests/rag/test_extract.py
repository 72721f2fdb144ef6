"""The answerer without a model: which sentence it picks, and that every word of it stands in a source."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import extract
from rag.exchange import Passage
from rag.prompt import INSUFFICIENT_CONTEXT
from tests.rag.passages import passage

ALIAS = re.compile(r" \[(S[0-9]+-0a1b2c)\]")


def sources(*passages: Passage | str) -> dict[str, Passage]:
    return {
        f"S{number}-0a1b2c": passage(given, number=number) if isinstance(given, str) else given
        for number, given in enumerate(passages, start=1)
    }


def answered(question: str, given: dict[str, Passage]) -> str:
    """The sentences as they reach a reader."""
    return " ".join(extract.sentences(question, given))


def quoted(answer: str) -> list[tuple[str, str]]:
    """The sentences of an answer, each with its alias."""
    *pieces, rest = ALIAS.split(answer)
    assert rest == ""
    return [(text.strip(), alias) for text, alias in zip(pieces[::2], pieces[1::2], strict=True)]


RUNBOOK = """## Backups

The orders database is backed up every night at 02:00 UTC by the job `pg-dump-orders`, which writes to the
bucket **acme-backups**. Each backup is kept for 35 days; the first one of a month is kept for a year.

If the job fails, the on-call engineer is paged. A failed backup is repeated by hand before noon.

```sh
pg_dump --format=custom orders > orders.dump  # backup of orders
```

- Restores are rehearsed in the first week of each quarter.
- The restore of 40 GB takes about 50 minutes.
"""

HANDBOOK = """# Leave

Annual leave is requested from the team lead at least two weeks ahead. More than ten days in a row also
need the consent of HR.

Parental leave is announced seven weeks before it begins.
"""

URLAUB = """# Urlaub

Der Jahresurlaub beträgt 30 Tage. Resturlaub verfällt am 31. März des Folgejahres, wenn er nicht bei Dr. Weber
beantragt wurde, z. B. per E-Mail. Überstunden werden bis zum Monatsende ausgeglichen.
"""

ОТПУСК = """# Отпуск

Ежегодный отпуск составляет 28 календарных дней. Заявление на отпуск подаётся руководителю не позднее чем за
14 дней до начала, т. е. за две недели. Больничный лист передаётся в отдел кадров.
"""


@pytest.mark.parametrize(
    ("question", "expected", "alias"),
    [
        (
            "When is the orders database backed up?",
            "The orders database is backed up every night at 02:00 UTC by the job pg-dump-orders, which writes to "
            "the bucket acme-backups.",
            "S1-0a1b2c",
        ),
        (
            "How long is each backup kept?",
            "Each backup is kept for 35 days; the first one of a month is kept for a year.",
            "S1-0a1b2c",
        ),
        ("Who is paged if the job fails?", "If the job fails, the on-call engineer is paged.", "S1-0a1b2c"),
        ("How many minutes does a restore take?", "The restore of 40 GB takes about 50 minutes.", "S1-0a1b2c"),
        (
            "From whom do I request annual leave?",
            "Annual leave is requested from the team lead at least two weeks ahead.",
            "S2-0a1b2c",
        ),
        (
            "When must parental leave be announced?",
            "Parental leave is announced seven weeks before it begins.",
            "S2-0a1b2c",
        ),
    ],
)
def test_an_english_question_gets_the_sentence_that_answers_it(question, expected, alias):
    assert quoted(answered(question, sources(RUNBOOK, HANDBOOK)))[0] == (expected, alias)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Wie viele Tage beträgt der Jahresurlaub?", "Der Jahresurlaub beträgt 30 Tage."),
        (
            "Wann verfällt der Resturlaub?",
            "Resturlaub verfällt am 31. März des Folgejahres, wenn er nicht bei Dr. Weber beantragt wurde, "
            "z. B. per E-Mail.",
        ),
        ("Bis wann werden Überstunden ausgeglichen?", "Überstunden werden bis zum Monatsende ausgeglichen."),
    ],
)
def test_a_german_question_gets_the_sentence_that_answers_it(question, expected):
    answer = answered(question, sources(RUNBOOK, passage(URLAUB, language="de")))
    assert quoted(answer)[0] == (expected, "S2-0a1b2c")


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Сколько дней составляет ежегодный отпуск?", "Ежегодный отпуск составляет 28 календарных дней."),
        (
            "Когда подать заявление руководителю?",
            "Заявление на отпуск подаётся руководителю не позднее чем за 14 дней до начала, т. е. за две недели.",
        ),
        # Another case of the same words: лист – листа, больничный – больничного.
        ("Куда передать больничного листа?", "Больничный лист передаётся в отдел кадров."),
    ],
)
def test_a_russian_question_gets_the_sentence_that_answers_it(question, expected):
    answer = answered(question, sources(HANDBOOK, passage(ОТПУСК, language="ru")))
    assert quoted(answer)[0] == (expected, "S2-0a1b2c")


@pytest.mark.parametrize("question", ["Where is the swimming pool?", "Wo ist das Schwimmbad?", "???", "the of and"])
def test_without_a_word_in_common_it_refuses(question):
    assert answered(question, sources(RUNBOOK, HANDBOOK)) == INSUFFICIENT_CONTEXT


@pytest.mark.parametrize(
    ("question", "text", "language"),
    [
        ("Wird das nicht auch diese?", URLAUB + "Diese Tage werden nicht auch das Jahr.", "de"),
        ("Что это когда если или?", ОТПУСК + "Если или когда это что.", "ru"),
    ],
)
def test_stop_words_of_the_sources_language_are_no_word_in_common(question, text, language):
    assert answered(question, sources(passage(text, language=language))) == INSUFFICIENT_CONTEXT
    # In a source of another language they are words like others.
    assert quoted(answered(question, sources(passage(text, language=None))))


@pytest.mark.parametrize("text", ["", "   \n\n ", "# Only a heading", "---", "```\n```"])
def test_a_passage_without_a_sentence_gives_nothing(text):
    assert answered("What is only a heading?", sources(text)) == INSUFFICIENT_CONTEXT


def test_without_sources_it_refuses():
    assert answered("When do backups run?", {}) == INSUFFICIENT_CONTEXT


# --- which and how many --------------------------------------------------------------------------


def test_at_most_three_sentences_are_quoted():
    text = " ".join(f"The backup number {number} runs at night." for number in range(1, 7))
    assert len(quoted(answered("When does the backup run at night?", sources(text)))) == 3


def test_equal_sentences_come_in_the_order_of_the_sources_and_of_their_text():
    answer = answered(
        "Who owns the backups?",
        sources("Backups belong to Anna now. Backups belong to Boris now.", "Backups belong to Clara now."),
    )
    # The same word at the same length; the second source counts 1 / 1.25 = 0.8 of the first.
    assert quoted(answer) == [
        ("Backups belong to Anna now.", "S1-0a1b2c"),
        ("Backups belong to Boris now.", "S1-0a1b2c"),
        ("Backups belong to Clara now.", "S2-0a1b2c"),
    ]


def test_the_better_sentence_comes_first_wherever_it_stands():
    answer = answered(
        "How long are nightly backups kept?",
        sources("Backups cost a little money.", "Nightly backups are kept for 35 days."),
    )
    assert quoted(answer) == [("Nightly backups are kept for 35 days.", "S2-0a1b2c")]


def test_a_sentence_that_shares_much_less_than_the_best_is_left_out():
    # Two words against one: of equal rarity and length, the second carries half, less than 0.6.
    answer = answered("nightly backups", sources("Nightly backups are made. Backups cost a little."))
    assert [text for text, _ in quoted(answer)] == ["Nightly backups are made."]


def test_the_same_sentence_of_two_sources_is_quoted_once():
    answer = answered("When do backups run?", sources("Backups run at night.", "Backups run at night."))
    assert quoted(answer) == [("Backups run at night.", "S1-0a1b2c")]


def test_the_same_question_gets_the_same_answer():
    answers = {answered("How long is each backup kept?", sources(RUNBOOK, HANDBOOK)) for _ in range(20)}
    assert len(answers) == 1


# --- what is quoted, and how ---------------------------------------------------------------------


def test_code_is_passed_over_while_there_is_prose():
    answer = answered("backup of orders", sources(RUNBOOK))
    assert "pg_dump" not in answer
    assert quoted(answer)


@pytest.mark.parametrize("fence", ["```", "~~~", "```python", "  ```"])
def test_code_that_was_cut_off_is_code(fence):
    text = f"The nightly job makes a backup.\n\n{fence}\nbackup = Backup(nightly)"
    assert quoted(answered("What is a nightly backup?", sources(text))) == [
        ("The nightly job makes a backup.", "S1-0a1b2c")
    ]


def test_a_passage_that_is_all_code_is_quoted_without_its_fences():
    text = "```sh\nrag db start --role rag_app\n```"
    assert quoted(answered("How do I start the db with a role?", sources(text))) == [
        ("rag db start --role rag_app", "S1-0a1b2c")
    ]


@pytest.mark.parametrize(
    ("markdown", "plain"),
    [
        ("Set **RAG_DATABASE_URL** before the service.", "Set RAG_DATABASE_URL before the service."),
        ("Set `max_connections` for the service.", "Set max_connections for the service."),
        ("Set max_connections and work_mem for the service.", "Set max_connections and work_mem for the service."),
        ("The service takes `**kwargs` and *args too.", "The service takes **kwargs and *args too."),
        ("The service needs 5*3*2 bytes.", "The service needs 5*3*2 bytes."),
        ("The service needs 5 * 3 * 2 bytes.", "The service needs 5 * 3 * 2 bytes."),
        ("The service is *very **quiet** today*.", "The service is very quiet today."),
        ("The _quiet_ service calls `__init__` first.", "The quiet service calls __init__ first."),
        ("> The service is quiet.", "The service is quiet."),
        ("1. The service is quiet.", "The service is quiet."),
        ("The service is quiet\nsince it opened in\n2019. It sleeps.", "The service is quiet since it opened in 2019."),
        ('He said "the service is down." Then he left.', 'He said "the service is down."'),
        ("The service belongs to J. Smith of floor 3. Really.", "The service belongs to J. Smith of floor 3. Really."),
        ("# Heading { #service }\nThe service is quiet.", "The service is quiet."),
    ],
)
def test_markup_goes_and_names_and_numbers_stay(markdown, plain):
    assert quoted(answered("What about the service?", sources(markdown)))[0] == (plain, "S1-0a1b2c")


def test_a_label_inside_a_sentence_is_no_citation():
    text = "Backups run at night [S2-0a1b2c] [SourceId: 550e8400-e29b-41d4-a716-446655440000:0]."
    answer = answered("When do backups run?", sources(text, "Nothing here."))
    assert ALIAS.findall(answer) == ["S1-0a1b2c"]
    assert "[SourceId" not in answer


def test_a_sentence_of_more_than_600_characters_is_cut_and_says_so():
    text = "backup " * 100 + "ends."
    ((sentence, _),) = quoted(answered("What is a backup?", sources(text)))
    # 600 of the 7-character words "backup ", and the mark
    assert sentence == ("backup " * 100)[:600] + "…"


# --- it never invents ----------------------------------------------------------------------------

MARKUP = re.compile(r"[*_`#>\s{}\[(…-]|(?m:^[ \t]*\d{1,2}[.)](?=[ \t]))")


def bare(text: str) -> str:
    """What is left of a text without white space, Markdown and the brackets that are neutralised."""
    return MARKUP.sub("", text)


VOCABULARY = """
    backup backups night nightly the Orders database Anna 35 2019 days. days? ends! «Да.» Отпуск дней. Über z. B. 3. 12)
    rag_app max_connections *loud* **bold _both_** `code span` [S1-0a1b2c] [SourceId: (e.g. U.S. etc. "No." 。 好。
"""
words = st.sampled_from(VOCABULARY.split())
lines = st.lists(words, max_size=12).map(" ".join)
starts = st.sampled_from(["", "", "", "# ", "### ", "- ", "* ", "1. ", "> ", "```", "    ", "  # ", "~~~"])
texts = st.lists(st.tuples(starts, lines).map("".join), max_size=10).map("\n".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts, min_size=1, max_size=3))
def test_every_sentence_of_an_answer_stands_in_the_source_that_it_names(given_texts):
    given_sources = sources(*given_texts)
    answer = answered("Which nightly backup of the orders database does Anna keep?", given_sources)
    if answer == INSUFFICIENT_CONTEXT:
        return
    found = quoted(answer)
    assert 1 <= len(found) <= 3
    for sentence, alias in found:
        assert bare(sentence) in bare(given_sources[alias].text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=200), min_size=1, max_size=3), st.text(max_size=80))
def test_any_text_and_any_question_give_quotes_or_the_refusal(given_texts, question):
    given_sources = sources(*given_texts)
    answer = answered(question, given_sources)
    assert answer == INSUFFICIENT_CONTEXT or set(ALIAS.findall(answer)) <= set(given_sources)


HOSTILE = {
    "asterisks": " *a" * 10_000,
    "underscores": " _a" * 10_000,
    "backticks": "`a " * 10_000,
    "fences": "```\n" * 8_000,
    "blank lines": "\n" * 32_000,
    "spaces": "word. " + " " * 32_000,
    "full stops": "." * 32_000,
    "braces": "{ #" * 10_000,
    "lists": "\n- a" * 8_000,
    "one word": "a" * 32_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_chunk_is_read_in_linear_time(text):
    # 32 KiB is the longest chunk that the database takes. Each needs under 100 ms of processor time.
    started = time.process_time()
    answered("a word", sources(text))
    assert time.process_time() - started < 10
