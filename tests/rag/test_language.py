"""Language detection answers or stays silent; stop words follow the language."""

import sys

import pytest

from rag import language

GERMAN = "Der Urlaub wird bei der Teamleitung beantragt und spätestens zwei Wochen vor dem ersten Tag bestätigt."
ENGLISH = "Leave is requested from the team lead and confirmed at least two weeks before the first day."
RUSSIAN = "Отпуск согласуется с руководителем и подтверждается не позднее чем за две недели до первого дня."


@pytest.fixture
def fresh_detector():
    language._identifier.cache_clear()
    yield
    language._identifier.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((GERMAN, "de"), (ENGLISH, "en"), (RUSSIAN, "ru")),
        ("年次休暇は二週間前までに上司に申請してください。", "ja"),
        ("휴가는 이 주일 전에 팀장에게 신청합니다.", "ko"),
        ("ต้องยื่นขอลาพักร้อนล่วงหน้าสองสัปดาห์", "th"),
        ("这份文件说明了员工如何申请年假，以及需要提前多少天通知部门主管。", "zh"),
    ],
)
def test_a_sentence_is_recognised(text, expected):
    pytest.importorskip("py3langid", reason="the extra `lang` is not installed")
    assert language.detect(text) == expected


@pytest.mark.parametrize(
    "text", ["", "   \n ", "Hallo Welt", "휴가를 신청", "年休", "Leave is requested from the team lead." + " " * 50]
)
def test_a_short_text_has_no_language(text):
    assert language.detect(text) is None


@pytest.mark.parametrize(
    "text",
    ["0123456789 " * 20, "x1 = y2 + z3; a[b] = c(d, e) ; q <<= 0x7f " * 3, "\x01" * 100, "ß∂ƒ©˙∆˚¬ " * 10],
)
def test_what_is_no_language_gives_a_code_of_two_letters_or_none(text):
    answer = language.detect(text)
    assert answer is None or (len(answer) == 2 and answer.isalpha())


def test_digits_have_no_language():
    assert language.detect("0123456789 " * 20) is None


def test_without_the_extra_nothing_is_detected(monkeypatch, fresh_detector):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    assert language.detect(GERMAN) is None


def test_english_stop_words_are_those_of_the_specification():
    words = language.stop_words("en")
    # the words of its twelve lines: 10 + 9 + 8 + 10 + 7 + 7 + 9 + 9 + 10 + 8 + 9 + 10
    assert len(words) == 106
    assert {"the", "dare", "myself", "them"} <= words
    assert words.isdisjoint({"their", "about", "database"})


@pytest.mark.parametrize(
    ("code", "inside", "outside"),
    [
        ("de", "nicht", "urlaub"),
        ("ru", "который", "отпуск"),
        ("no", "ikke", "ferie"),
        ("nb", "ikke", "ferie"),
    ],
)
def test_other_languages_have_their_own_stop_words(code, inside, outside):
    words = language.stop_words(code)
    assert inside in words
    assert outside not in words


@pytest.mark.parametrize("code", [None, "", "xx", "german", "zxx"])
def test_an_unknown_language_has_no_stop_words(code):
    assert language.stop_words(code) == frozenset()


def test_stop_words_are_single_lower_case_words():
    for code in language.LANGUAGE_MAPPING:
        for word in language.stop_words(code):
            assert word == word.lower()
            assert word.split() == [word]
            assert not set(word) & set('",#'), (code, word)
