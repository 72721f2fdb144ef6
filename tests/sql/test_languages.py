"""sql/schema/38_languages.sql: text to lexemes in any script, and from ingest to search by keywords alone."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rag.embed import Embedder
from rag.ingest import Source, ingest
from rag.principal import Principal
from rag.retrieve import retrieve
from rag.settings import Settings
from rag.store import destination_of
from tests.conftest import Deployment
from tests.sql.world import column

SCHEMA = Path(__file__).resolve().parents[2] / "sql" / "schema"
MARA = Principal(tenant_id="acme", user_id=7)
# As the table's constraint has it.
MAX_BYTES = 32_768


@pytest.fixture(scope="module")
def emptied(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        yield clone


@pytest.fixture
def deployment(emptied: Deployment) -> Iterator[Deployment]:
    """One database for all tests of this file, empty for each: a clone takes longer than most of them."""
    yield emptied
    with emptied.cluster.superuser(emptied.name) as connection:
        connection.execute("delete from rag.rag_documents")
        connection.execute("delete from rag.rag_access_classes")


@pytest.fixture(scope="module")
def superuser(emptied: Deployment) -> Iterator[psycopg.Connection]:
    with emptied.cluster.superuser(emptied.name) as connection:
        connection.execute("set search_path = rag, pg_temp")
        yield connection


def vector(connection: psycopg.Connection, language: str | None, content: str) -> dict[str, list[int]]:
    """The lexemes of a text with their places."""
    return dict(
        connection.execute(
            "select lexeme, positions::integer[] from unnest(search_vector(%s, %s))", (language, content)
        ).fetchall()
    )


def lexemes(connection: psycopg.Connection, language: str | None, content: str) -> list[str]:
    """The lexemes of a text in the order in which they are first met."""
    found = vector(connection, language, content)
    return sorted(found, key=lambda lexeme: (found[lexeme][0], lexeme))


def asked(connection: psycopg.Connection, language: str | None, question: str) -> list[tuple[str, int, int]]:
    return connection.execute(
        "select lexeme, weight, place from question_lexemes(%s, %s) order by place", (language, question)
    ).fetchall()


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "content", "expected"),
    [
        ("en", "Ferries are leaving", ["ferri", "leav"]),
        ("de", "Die „Häuser“ – am »Hafen«…", ["haus", "haf"]),
        ("ru", "«Паромы»—и причалы…", ["паром", "причал"]),
        ("fr", "l’hiver\u00a0:\u202f«\u00a0voilà\u00a0»", ["hiv", "voilà"]),
        ("en", "the harbour’s “ferries”—don’t👍go", ["harbour", "ferri", "go"]),
        (None, "Palisade™ 20\u00a0€ ¿qué?", ["palisade", "20", "qué"]),
        (None, "शब्द। अगला॥", ["शब्द", "अगला"]),
        (None, "كلمة، أخرى؟", ["كلمة", "أخرى"]),
        (None, "בית־ספר", ["בית", "ספר"]),
        (None, "བོད་སྐད།", ["བོད", "སྐད"]),
        (None, "one\uf0b7two", ["one", "two"]),
    ],
)
def test_words_end_at_the_punctuation_of_every_script(
    superuser: psycopg.Connection, language: str | None, content: str, expected: list[str]
) -> None:
    assert lexemes(superuser, language, content) == expected


PUNCTUATION = [
    code
    for block in (
        (0x80, 0x6FF),
        (0x2000, 0x206F),
        (0x2190, 0x2BFF),
        (0x3000, 0x303F),
        (0xFE10, 0xFE6F),
        (0xFF00, 0xFFEF),
    )
    for code in range(block[0], block[1] + 1)
    if unicodedata.category(chr(code)) in {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Zs", "Zl", "Zp", "Sm", "Sc", "So"}
]


def test_no_punctuation_or_symbol_of_the_great_blocks_joins_words(superuser: psycopg.Connection) -> None:
    assert len(PUNCTUATION) > 2000
    joining = column(
        superuser,
        """
        select to_hex(code) from unnest(%s::integer[]) as code
        where search_vector(null, 'one' || chr(code) || 'two') <> 'one:1 two:2'::tsvector
        """,
        (PUNCTUATION,),
    )
    assert joining == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("H\u00e4user", "Ha\u0308user"),
        ("\u0439", "\u0438\u0306"),
        ("file", "ﬁle"),
        ("abc123", "ＡＢＣ１２３"),
        ("テスト", "ﾃｽﾄ"),
        ("가", "\u1100\u1161"),
        ("Wasserstand", "Wasser\u00adstand"),
        ("می‌خواهم", "میخواهم"),
        ("葛城", "葛\U000e0100城"),
        ("ភាសាខ្មែរ", "ភាសា\u200bខ្មែរ"),
        ("น้ำ", "น้ํา"),
        ("福", "\ufa1b"),
    ],
)
def test_what_is_written_differently_and_looks_alike_is_alike(
    superuser: psycopg.Connection, one: str, other: str
) -> None:
    assert lexemes(superuser, None, one) == lexemes(superuser, None, other) != []


# Upper case beyond ASCII is left out: the locale C does not know that Я and я are one letter.
LOCALE_TEXTS = [
    "die „häuser“ am »hafen«",
    "«паромы»—и причалы… 5\u00a0км",
    "fastapi 的数据库连接。茶",
    "データベース・テスト",
    "ฐานข้อมูลส่วนบุคคล",
    "데이터베이스에 연결",
    "မြန်မာဘာသာ ភាសាខ្មែរ ພາສາລາວ",
]


def test_the_locale_of_the_database_does_not_change_lexemes(
    superuser: psycopg.Connection, deployment: Deployment
) -> None:
    with deployment.cluster.superuser("postgres") as server:
        known = column(
            server, "select collname from pg_collation where collprovider = 'c' and collencoding in (-1, 6) order by 1"
        )
        here = ["C", *(name for name in ("C.utf8", "en_US.utf8", "de_DE.utf8", "tr_TR.utf8") if name in known)]
        found = []
        for number, locale in enumerate(here):
            name = f"{deployment.name}_{number}"
            server.execute(
                f"create database {name} template template0 encoding 'UTF8' locale_provider libc locale '{locale}'"
            )
            try:
                with deployment.cluster.superuser(name) as other:
                    other.execute("create schema rag")
                    other.execute("set search_path = rag, pg_temp")
                    other.execute((SCHEMA / "38_languages.sql").read_text(encoding="utf-8"))
                    found.append([vector(other, None, text) for text in LOCALE_TEXTS])
            finally:
                server.execute(f"drop database {name}")
    expected = [vector(superuser, None, text) for text in LOCALE_TEXTS]
    assert found == [expected] * len(here)


@pytest.mark.parametrize("language", ["en", "de", "ru", "zh", None])
@pytest.mark.parametrize(
    "content",
    ["Ferries at https://example.org/a-b?c=1, state-of-the-art", "Häuser über Straßen", "Паромы и причалы", "الماء"],
)
def test_text_that_needs_no_preparation_is_the_same_with_it(
    superuser: psycopg.Connection, language: str | None, content: str
) -> None:
    (same,) = column(
        superuser,
        """
        select array[search_vector(%(language)s, %(content)s)]
            = array[prepared_vector(text_search_config(%(language)s), %(content)s, false)]
            and search_vector(%(language)s, %(content)s) = to_tsvector(text_search_config(%(language)s), %(content)s)
        """,
        {"language": language, "content": content},
    )
    assert same


def test_every_letter_that_is_taken_for_plain_needs_no_preparation(superuser: psycopg.Connection) -> None:
    """What text_vector lets through untouched must come out of the preparation untouched."""
    differing = column(
        superuser,
        """
        select to_hex(code) from generate_series(128, 65535) as code
        where code not between 55296 and 57343
            and text_vector('en', 'x' || chr(code) || 'y ' || chr(code), false)
            <> prepared_vector('pg_catalog.english', 'x' || chr(code) || 'y ' || chr(code), false)
        """,
    )
    assert differing == []


# --- scripts without spaces -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "content", "expected"),
    [
        ("zh", "数据库", ["数据", "据库", "库"]),
        ("zh", "数据。库", ["数据", "据", "库"]),
        ("zh", "茶", ["茶"]),
        ("ja", "日本語のテスト", ["日本", "本語", "語の", "のテ", "テス", "スト", "ト"]),
        ("ja", "コーヒー・人々", ["コー", "ーヒ", "ヒー", "ー", "人々", "々"]),
        ("ko", "물에 가다", ["물에", "에", "가다", "다"]),
        # Tone marks and vowels above or below belong to their consonant, vowels before it too.
        ("th", "เก็บที่", ["เก็บ", "บที่", "ที่"]),
        ("th", "เด็กๆ", ["เด็ก", "ก"]),
        ("lo", "ເກັບ", ["ເກັບ", "ບ"]),
        ("my", "မြန်မာ", ["မြန်", "န်မာ", "မာ"]),
        ("zh", "\U00020bb7野家", ["\U00020bb7野", "野家", "家"]),
    ],
)
def test_a_script_without_spaces_gives_pairs_of_letters_and_the_last_one(
    superuser: psycopg.Connection, language: str, content: str, expected: list[str]
) -> None:
    assert lexemes(superuser, language, content) == expected


def test_a_text_of_two_scripts_has_the_words_of_one_and_the_pairs_of_the_other(superuser: psycopg.Connection) -> None:
    text = "Using FastAPI使用数据库connections"
    assert lexemes(superuser, "en", text) == ["use", "fastapi", "connect", "使用", "用数", "数据", "据库", "库"]


def test_occurrences_are_counted_and_every_letter_begins_one_lexeme(superuser: psycopg.Connection) -> None:
    """Seven letters: 茶水 at 1 and 3, 水茶 at 2, 水 at the end of the first run, 喝茶 once, 茶 at the end."""
    found = vector(superuser, "zh", "茶水茶水,喝茶,")
    assert {lexeme: len(places) for lexeme, places in found.items()} == {
        **{"茶水": 2, "水茶": 1, "水": 1},
        **{"喝茶": 1, "茶": 1},
    }
    statement = (
        "select ts_rank_cd('{1, 1, 1, 1}', search_vector('zh', %s), lexeme_query(lexeme))"
        " from unnest(array['茶水', '茶']) with ordinality as entry (lexeme, place) order by place"
    )
    # 茶 alone asks for every pair that begins with it: 茶水 twice, and 茶 itself.
    assert column(superuser, statement, ("茶水茶水,喝茶,",)) == [2, 3]


@pytest.mark.parametrize(
    ("language", "question", "expected"),
    [
        ("en", "ferry, ferries and a harbour", [("ferri", 2, 1), ("harbour", 1, 2)]),
        ("zh", "数据库", [("数据", 1, 1), ("据库", 1, 2)]),
        ("zh", "茶", [("茶", 1, 1)]),
        ("zh", "茶 数据 数据", [("茶", 1, 1), ("数据", 2, 2)]),
        ("zh", "数据库 FastAPI?", [("fastapi", 1, 1), ("数据", 1, 2), ("据库", 1, 3)]),
        ("de", "„Häuser“", [("haus", 1, 1)]),
        ("en", "the of", []),
        (None, "", []),
    ],
)
def test_a_question_asks_for_pairs_and_for_a_letter_only_where_it_stands_alone(
    superuser: psycopg.Connection, language: str | None, question: str, expected: list[tuple[str, int, int]]
) -> None:
    assert asked(superuser, language, question) == expected


def test_a_question_has_at_most_64_lexemes_and_they_are_its_first(superuser: psycopg.Connection) -> None:
    assert [lexeme for lexeme, _, _ in asked(superuser, None, " ".join(f"w{n}" for n in range(200)))] == [
        f"w{n}" for n in range(64)
    ]
    letters = "".join(chr(0x4E00 + n) for n in range(200))
    assert [lexeme for lexeme, _, _ in asked(superuser, "zh", letters)] == [letters[n : n + 2] for n in range(64)]


@pytest.mark.parametrize(
    ("lexeme", "query"),
    [
        ("茶", "'茶':*"),
        ("数据", "'数据'"),
        ("가", "'가':*"),
        ("เก็", "'เก็':*"),
        ("กา", "'กา'"),
        ("a", "'a'"),
        ("я", "'я'"),
        ("茶a", "'茶a'"),
    ],
)
def test_only_a_single_letter_of_a_script_without_spaces_is_asked_for_as_a_beginning(
    superuser: psycopg.Connection, lexeme: str, query: str
) -> None:
    assert column(superuser, "select lexeme_query(%s)::text", (lexeme,)) == [query]


# --- any text -------------------------------------------------------------------------------------

FULL = {
    "as many Chinese characters as there are": "".join(chr(0x4E00 + n) for n in range(MAX_BYTES // 3)),
    "one Chinese character": "茶" * (MAX_BYTES // 3),
    "rare Chinese characters": "".join(chr(0x20000 + n) for n in range(MAX_BYTES // 4)),
    "Chinese and English by turns": "".join(chr(0x4E00 + n) + f"w{n} " for n in range(MAX_BYTES // 9)),
    "one Thai letter with marks without end": "ก" + "่" * (MAX_BYTES // 3 - 1),
    "vowels that wait for a consonant": "เ" * (MAX_BYTES // 3),
    "a ligature of 18 letters": "ﷺ" * (MAX_BYTES // 3),
    "words in one character": "㌖㌈㌔" * (MAX_BYTES // 9),
    "jamo": "\u1100\u1161\u11a8" * (MAX_BYTES // 9),
    "accents without letters": "\u0301" * (MAX_BYTES // 2),
    "pictures": "👩‍👩‍👧‍👦" * (MAX_BYTES // 25),
    "hyphens": "ab-" * (MAX_BYTES // 3),
    "one word": "ж" * (MAX_BYTES // 2),
    "quotation marks": "'\\" * (MAX_BYTES // 2),
    "every character once": "".join(
        chr(code) for code in range(1, 0x2FFF) if unicodedata.category(chr(code)) not in {"Cs", "Cn"}
    ),
}


@pytest.mark.parametrize("name", FULL)
def test_a_chunk_that_is_as_long_as_can_be_has_a_vector(superuser: psycopg.Connection, name: str) -> None:
    content = FULL[name]
    assert len(content.encode()) <= MAX_BYTES + 4096
    statement = "select lexeme_total(search_vector('en', %s)), (select count(*) from question_lexemes('en', %s))"
    total, terms = superuser.execute(statement, (content, content)).fetchone() or (-1, -1)
    assert total >= 0
    assert 0 <= terms <= 64


def test_every_character_of_a_full_chunk_is_counted(superuser: psycopg.Connection) -> None:
    content = FULL["as many Chinese characters as there are"]
    assert column(superuser, "select lexeme_total(search_vector('zh', %s))", (content,)) == [10_922]
    # Postgres keeps 256 places of a lexeme; the last character by itself is one more.
    content = FULL["one Chinese character"]
    assert column(superuser, "select lexeme_total(search_vector('zh', %s))", (content,)) == [257]


def characters() -> st.SearchStrategy[str]:
    """Any character that Postgres stores, those of the scripts that are treated apart more often than chance."""
    return st.one_of(
        st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
        st.sampled_from(
            "茶数据库のテスト々ー가나\u1100\u1161กขเ่็ำๆກັມြ\u1039ខ្ម\u17d2𠮷 　。、"
            "'\\:*|&!()<->\u200b\u00ad\u0301👍\U000e0100"
        ),
    )


@examples(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.text(characters(), max_size=60),
    language=st.sampled_from([None, "en", "de", "ru", "tr", "zh", "th", "xx"]),
)
def test_any_text_finds_itself_word_by_word(superuser: psycopg.Connection, content: str, language: str | None) -> None:
    missed = column(
        superuser,
        """
        select lexeme from question_lexemes(%(language)s, %(content)s)
        where not search_vector(%(language)s, %(content)s) @@ lexeme_query(lexeme)
        """,
        {"language": language, "content": content},
    )
    assert missed == []


@examples(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.text("茶数据库的テスト", max_size=6),
    sought=st.text("茶数据库的テスト", min_size=1, max_size=4),
    after=st.text("茶数据库的テスト", max_size=6),
)
def test_any_part_of_a_text_without_spaces_is_found(
    superuser: psycopg.Connection, before: str, sought: str, after: str
) -> None:
    missed = column(
        superuser,
        "select lexeme from question_lexemes('zh', %s) where not search_vector('zh', %s) @@ lexeme_query(lexeme)",
        (sought, before + sought + after),
    )
    assert missed == []


def test_no_text_has_no_vector(superuser: psycopg.Connection) -> None:
    assert column(superuser, "select search_vector('en', null) is null") == [True]
    assert column(superuser, "select search_vector('zh', '') = ''::tsvector") == [True]


# --- from ingest to search, by keywords alone -----------------------------------------------------

# Three notes in each language, and for each a question in other forms of its words.
NOTES: dict[str, list[tuple[str, str]]] = {
    "zh": [
        ("数据库的备份在每天凌晨两点自动进行，备份文件会保存三十五天，之后由系统自动删除。", "备份保存多少天?"),
        ("员工申请年假时，必须提前两周向部门主管提出，并且在人事系统中填写请假单，说明休假的原因。", "年假怎么申请？"),
        (
            "渡轮每隔一小时从码头出发，在星期日和节假日停航，我们建议乘客提前购买船票，这样就不会错过。",
            "星期日有渡轮吗?",
        ),
    ],
    "ja": [
        ("データベースは毎晩二時に自動でバックアップされ、三十五日間保存されます。", "何日間保存されますか?"),
        ("年次休暇は二週間前までに上司に申請し、人事システムに登録してください。", "休暇の申請はいつまで?"),
        ("フェリーは一時間ごとに港を出発しますが、日曜日と祝日は運休します。", "日曜日にフェリーはありますか?"),
    ],
    "ko": [
        (
            "데이터베이스는 매일 새벽 두 시에 자동으로 백업되며 백업 파일은 35일 동안 보관됩니다.",
            "백업을 며칠 보관하나요?",
        ),
        ("연차 휴가는 이 주일 전에 팀장에게 신청하고 인사 시스템에 등록해야 합니다.", "휴가를 신청하려면?"),
        (
            "여객선은 한 시간마다 항구를 출발하지만 일요일과 공휴일에는 운항하지 않습니다.",
            "일요일에도 여객선이 있나요?",
        ),
    ],
    "th": [
        ("ฐานข้อมูลจะถูกสำรองโดยอัตโนมัติทุกคืน และไฟล์สำรองจะถูกเก็บไว้สามสิบห้าวัน", "สำรองข้อมูลเก็บไว้กี่วัน"),
        ("พนักงานต้องยื่นขอลาพักร้อนกับหัวหน้างานล่วงหน้าสองสัปดาห์ และบันทึกในระบบ", "ขอลาพักร้อนอย่างไร"),
        ("เรือข้ามฟากออกจากท่าเรือทุกชั่วโมง แต่หยุดให้บริการในวันอาทิตย์", "วันอาทิตย์มีเรือไหม"),
    ],
    "ru": [
        (
            "Резервные копии базы данных создаются каждую ночь и хранятся тридцать пять дней.",
            "хранение резервной копии",
        ),
        ("Отпуск согласуется с руководителем не позднее чем за две недели до первого дня.", "Как согласовать отпуска?"),
        ("Паромы отходят от причала «Северный» каждый час, кроме воскресенья и праздников.", "северного парома"),
    ],
    "de": [
        (
            "Die Datenbanken werden jede Nacht gesichert, und die Kopien bleiben 35 Tage lang erhalten.",
            "Datenbank Kopie",
        ),
        ("Der „Jahresurlaub“ wird zwei Wochen vor dem ersten Tag bei der Teamleitung beantragt.", "Jahresurlaube"),
        ("Die Fähren verlassen die Häfen jede Stunde, nur an Sonntagen und Feiertagen nicht.", "Fähre am Sonntag"),
    ],
}


@pytest.mark.parametrize("language", NOTES)
async def test_what_is_ingested_in_a_language_is_found_by_its_words_alone(
    deployment: Deployment, embedder: Embedder, settings: Settings, language: str
) -> None:
    pytest.importorskip("py3langid", reason="the extra `lang` is not installed")
    async with deployment.pools() as database:
        ids = [
            await ingest(
                Source(content=text, name=f"{number}.txt", source_id=f"{number}"),
                principal=MARA,
                destination=destination_of(MARA, scope="user", tags=None),
                database=database,
                embedder=embedder,
                max_bytes=100_000,
            )
            for number, (text, _) in enumerate(NOTES[language])
        ]
        found = []
        for _, question in NOTES[language]:
            passages, mode, _ = await retrieve(
                question,
                None,
                principal=MARA,
                database=database,
                settings=settings,
                embedding_model=embedder.model_id,
                min_similarity=None,
                model_min_similarity=0,
                top_k=3,
                budget_tokens=None,
            )
            assert mode == "keyword"
            found.append((passages[0].document_id, passages[0].language))
    assert found == [(ingested.document_id, language) for ingested in ids]


@pytest.mark.parametrize("text", ["茶是一种饮料", "我喜欢喝茶的人", "我喜欢喝茶", "喝 茶", "茶"])
def test_a_question_of_one_character_finds_it_wherever_it_stands(
    deployment: Deployment, store: Callable[..., UUID], text: str
) -> None:
    sought = store(MARA, text, language="zh")
    store(MARA, "咖啡与牛奶", language="zh")
    with deployment.transaction(MARA) as connection:
        found = column(connection, "select document_id from rag.search('茶')")
    assert found == [sought]
