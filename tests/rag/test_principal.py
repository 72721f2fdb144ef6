"""Who can be a principal: names, numbers and tags at their limits and beyond them."""

from __future__ import annotations

import dataclasses

import pytest

from rag.errors import InvalidInput
from rag.principal import Principal, check_name, check_tags, check_user_id


def test_a_principal_needs_a_tenant_and_nothing_else():
    assert Principal(tenant_id="acme") == Principal(tenant_id="acme", user_id=None, project_id=None, tags=("public",))


def test_a_principal_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Principal(tenant_id="acme").tenant_id = "other"  # type: ignore[misc]


def test_tags_are_sorted_and_distinct():
    assert Principal(tenant_id="acme", tags=("ops", "hr", "ops")).tags == ("hr", "ops")


def test_no_tags_means_public():
    assert Principal(tenant_id="acme", tags=()).tags == ("public",)


MALFORMED_NAMES = {
    "empty": "",
    "long": "x" * 129,
    "nul": "a\0b",
    "line": "a\nb",
    "escape": "a\x1bb",
    "delete": "a\x7fb",
    "c1 control": "a\x85b",
    "surrogate": "a\ud800",
    "undecodable byte": "a\udcff",
    "space in front": " a",
    "space behind": "a ",
    "only a space": " ",
    "wide space behind": "a\u3000",
}


@pytest.mark.parametrize("name", MALFORMED_NAMES.values(), ids=MALFORMED_NAMES)
@pytest.mark.parametrize("field", ["tenant_id", "project_id"])
def test_a_malformed_name_is_refused_by_its_field(field: str, name: str):
    with pytest.raises(InvalidInput) as refused:
        Principal(**{"tenant_id": "acme", field: name})
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize("name", ["a", "x" * 128, "Ærø", "数据", "a b", "a'b\"c\\d", "*", "🚢", "a\u200db"])
def test_a_name_may_be_anything_that_can_be_read(name: str):
    assert Principal(tenant_id=name, project_id=name).tenant_id == name


def test_a_name_comes_back_as_it_was():
    assert check_name("Ærø", field="x", max_length=3) == "Ærø"
    with pytest.raises(InvalidInput, match="x must be 1 to 2 characters"):
        check_name("Ærø", field="x", max_length=2)


@pytest.mark.parametrize(("given", "number"), [(1, 1), ("1", 1), ("9" * 18, 10**18 - 1), (10**18 - 1, 10**18 - 1)])
def test_a_user_id_is_a_positive_number_or_its_decimal_string(given: object, number: int):
    assert check_user_id(given) == number


NUMBERS_THAT_ARE_NO_USER_ID = [0, -1, 10**18, 1.0, True, None, [1]]
TEXTS_THAT_ARE_NO_USER_ID = [
    "0",
    "-1",
    "+1",
    "01",
    "1.0",
    "1e3",
    "",
    " 1",
    "1\n",
    "abc",
    "0x1",
    "１",
    "٣",
    "1_0",
    "1" * 19,
]


@pytest.mark.parametrize("given", NUMBERS_THAT_ARE_NO_USER_ID + TEXTS_THAT_ARE_NO_USER_ID, ids=repr)
def test_any_other_user_id_is_refused(given: object):
    with pytest.raises(InvalidInput) as refused:
        check_user_id(given)
    assert refused.value.field == "user_id"


@pytest.mark.parametrize("user_id", [0, -1, 10**18, True])
def test_a_principal_has_no_malformed_user_id(user_id: int):
    with pytest.raises(InvalidInput) as refused:
        Principal(tenant_id="acme", user_id=user_id)
    assert refused.value.field == "user_id"


def test_tags_may_be_many_and_long():
    many = [f"{number:064}" for number in range(256)]
    assert check_tags(many) == tuple(many)


MALFORMED_TAGS: dict[str, object] = {
    "too many": [str(number) for number in range(257)],
    "too long": ["x" * 65],
    "empty": [""],
    "control": ["a\tb"],
    "surrogate": ["\ud800"],
    "number": [1],
    "null": [None],
    "nested": [["a"]],
    "string": "hr",
    "mapping": {"hr": 1},
    "nothing": None,
}


@pytest.mark.parametrize("tags", MALFORMED_TAGS.values(), ids=MALFORMED_TAGS)
def test_malformed_tags_are_refused(tags: object):
    with pytest.raises(InvalidInput) as refused:
        check_tags(tags)
    assert refused.value.field == "tags"
    with pytest.raises(InvalidInput):
        Principal(tenant_id="acme", tags=tags)  # type: ignore[arg-type]
