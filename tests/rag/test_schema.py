"""A caller's schema: what is honoured, what is refused and where, and that no schema makes work without end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rag.errors import InvalidInput
from rag.schema import MAX_FAULTS, MAX_SCHEMA_DEPTH, check_schema, pointer


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


INVOICE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "An invoice",
    "type": "object",
    "properties": {
        "number": {"type": "string", "minLength": 1, "maxLength": 20},
        "amount": {"type": ["number", "null"], "minimum": 0},
        "currency": {"enum": ["EUR", "USD"]},
        "due": {"type": "string", "format": "date"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 3},
        "$ref": {"type": "string", "description": "a property that is called so"},
    },
    "required": ["number", "amount"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}},
}


# --- what is honoured ------------------------------------------------------------------------------


def test_a_value_that_fits_has_no_faults():
    value = {"number": "7", "amount": None, "currency": "EUR", "due": "2026-11-22", "lines": [{"text": "a"}]}
    assert check_schema(INVOICE).faults(value) == []


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"amount": 1}, "/"),
        ({"number": "", "amount": 1}, "/number"),
        ({"number": "7", "amount": "1"}, "/amount"),
        ({"number": "7", "amount": -1}, "/amount"),
        ({"number": "7", "amount": 1, "currency": "GBP"}, "/currency"),
        ({"number": "7", "amount": 1, "due": "22.11.2026"}, "/due"),
        ({"number": "7", "amount": 1, "due": "2026-02-30"}, "/due"),
        ({"number": "7", "amount": 1, "lines": [{"text": "a"}, {}]}, "/lines/1"),
        ({"number": "7", "amount": 1, "other": 1}, "/"),
        ([], "/"),
        (None, "/"),
    ],
)
def test_a_fault_is_told_with_its_place(value: object, place: str):
    faults = check_schema(INVOICE).faults(value)
    assert [fault.partition(": ")[0] for fault in faults] == [place]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2028-02-29", "2027-02-29"),
        ("date-time", "2026-11-22T10:00:00Z", "2026-11-22 10:00"),
        ("date-time", "2026-11-22t10:00:00.1234567+01:00", "2026-11-22T25:00:00Z"),
        ("time", "10:00:00Z", "10:00"),
        ("time", "23:59:59.5+02:00", "24:00:01Z"),
        ("email", "a@b.example", "a"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", "1"),
        ("uuid", "550e8400-e29b-41d4-a716-446655440000", "550e8400"),
    ],
)
def test_formats_are_checked(name: str, good: str, bad: str):
    schema = check_schema(of(x={"type": "string", "format": name}))
    assert schema.faults({"x": good}) == []
    assert len(schema.faults({"x": bad})) == 1


@pytest.mark.parametrize(
    "value",
    [
        {"x": float("inf")},
        {"x": float("nan")},
        {"x": "a\0b"},
        {"x": "\ud83d"},
        {"\udfff": 1},
        {"x": [[{"y": "\ud800"}]]},
    ],
)
def test_what_no_reader_could_be_sent_is_a_fault(value: object):
    assert len(check_schema({"type": "object"}).faults(value)) == 1


def test_an_answer_without_a_bottom_is_a_fault():
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    (fault,) = check_schema({"type": "object"}).faults({"x": deep})
    assert "nested too deeply" in fault


def test_only_so_many_faults_are_told_and_none_at_length():
    schema = check_schema({"type": "object", "additionalProperties": {"type": "integer"}})
    faults = schema.faults({f"x{n}": "long " * 1000 for n in range(100)})
    assert len(faults) == MAX_FAULTS
    assert max(map(len, faults)) <= 200


def test_a_pointer_escapes_what_pointers_mean():
    assert pointer(["a/b", "c~d", 0]) == "/a~1b/c~0d/0"


def test_a_schema_of_draft_7_is_taken_as_far_as_the_drafts_agree():
    schema = check_schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {"$ref": "#/definitions/b"}},
            "definitions": {"b": {"type": "integer"}},
        }
    )
    assert schema.faults({"a": 1}) == []
    assert schema.faults({"a": "1"}) != []


def test_in_another_schema_its_references_still_lead_to_its_definitions():
    schema = check_schema(INVOICE)
    around = {
        "type": "object",
        "properties": {"data": {"$ref": "#/$defs/answer"}},
        "$defs": {"answer": schema.placed("#/$defs/answer")},
    }
    Draft202012Validator.check_schema(around)
    whole = Draft202012Validator(around)
    assert whole.is_valid({"data": {"number": "7", "amount": 1, "lines": [{"text": "a"}]}})
    assert not whole.is_valid({"data": {"number": "7", "amount": 1, "lines": [{"text": 1}]}})
    # The property of that name is no reference.
    assert schema.placed("#/x")["properties"]["$ref"]["type"] == "string"


# --- what is refused -------------------------------------------------------------------------------

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(MAX_SCHEMA_DEPTH):
    DEEP = of(x=DEEP)


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (None, "schema"),
        ([], "schema"),
        (True, "schema"),
        ({1, 2}, "schema"),
        ({"type": "object", "const": float("nan")}, "schema"),
        ({"type": "object", "title": "\ud800"}, "schema"),
        ({"type": "object", "title": "x" * 40_000}, "schema"),
        ({}, "schema.type"),
        ({"type": "array"}, "schema.type"),
        ({"type": ["object", "null"]}, "schema.type"),
        ({"type": "object", "$schema": "http://json-schema.org/draft-04/schema#"}, "schema.$schema"),
        ({"type": "object", "$schema": 7}, "schema.$schema"),
        ({"type": "object", "$id": "https://example.com/x"}, "schema.$id"),
        (of(x={"$ref": "https://example.com/x.json"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "file:///etc/passwd"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "other.json#/a"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "#anchor"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "#"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "#/$defs/none"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "#/properties/x"}), "schema.properties.x.$ref"),
        (of(x={"$ref": "x/$defs/a"}) | {"$defs": {"a": {}}}, "schema.properties.x.$ref"),
        (of(x={"$ref": 7}), "schema.properties.x.$ref"),
        (of(x={"$dynamicRef": "#x"}), "schema.properties.x.$dynamicRef"),
        (of(x={"pattern": "(a+)+$"}), "schema.properties.x.pattern"),
        ({"type": "object", "patternProperties": {"(a+)+$": {}}}, "schema.patternProperties"),
        (of(x={"format": "uri"}), "schema.properties.x.format"),
        (of(x={"format": "regex"}), "schema.properties.x.format"),
        (of(x={"format": ["date"]}), "schema.properties.x.format"),
        (of(x={"nullable": True}), "schema.properties.x.nullable"),
        (of(x={"requierd": ["y"]}), "schema.properties.x.requierd"),
        (of(x={"anyOf": [{"type": "string"}, {"pattern": "a"}]}), "schema.properties.x.anyOf.1.pattern"),
        (of(x={"items": [{"type": "string"}]}), "schema.properties.x.items"),
        (of(x="string"), "schema.properties.x"),
        ({"type": "object", "properties": ["x"]}, "schema.properties"),
        ({"type": "object", "required": "x"}, "schema.required"),
        (of(x={"type": "text"}), "schema.properties.x.type"),
        (of(x={"maximum": "9"}), "schema.properties.x.maximum"),
        (of(x={"enum": "a"}), "schema.properties.x.enum"),
        ({"type": "object", "$defs": {"a": {"pattern": "x"}}}, "schema.$defs.a.pattern"),
        ({"type": "object", "$defs": []}, "schema.$defs"),
        (of(x={"$defs": {}}), "schema.properties.x.$defs"),
        (of(x={"$schema": "http://json-schema.org/draft-04/schema#"}), "schema.properties.x.$schema"),
        (of(x={"multipleOf": 10**400}), "schema.properties.x.multipleOf"),
        (of(x={"$ref": "#/$defs/%61"}) | {"$defs": {"%61": {}}}, "schema.properties.x.$ref"),
        (
            of(x={"$ref": "#/$defs/a"}) | {"$defs": {"a": {"not": {"$ref": "#/$defs/%61"}}, "%61": {}}},
            "schema.properties.x.$ref.not.$ref",
        ),
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_its_place(schema: object, field: str):
    with pytest.raises(InvalidInput) as refused:
        check_schema(schema)
    assert refused.value.field == field


def test_a_schema_may_only_be_so_deep():
    with pytest.raises(InvalidInput, match="deeper"):
        check_schema(DEEP)
    check_schema(DEEP["properties"]["x"])


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        {"a": of(x={"$ref": "#/$defs/a"})},
        {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}},
    ],
)
def test_recursion_is_refused(definitions: dict[str, Any]):
    with pytest.raises(InvalidInput, match="refers to itself"):
        check_schema(of(x={"$ref": "#/$defs/a"}) | {"$defs": definitions})


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_a_schema_that_multiplies_is_refused_before_it_runs(keyword: str):
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, 7):
        definitions[f"d{level}"] = {keyword: [{"$ref": f"#/$defs/d{level - 1}"}] * 4}
    started = time.perf_counter()
    with pytest.raises(InvalidInput, match="more than 1000 subschemas"):
        check_schema(of(x={"$ref": "#/$defs/d6"}) | {"$defs": definitions})
    assert time.perf_counter() - started < 1


def test_a_chain_of_a_thousand_references_is_refused_and_not_followed_to_its_end():
    definitions = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(900)} | {"d900": True}
    with pytest.raises(InvalidInput, match="deeper"):
        check_schema({"type": "object", "$defs": definitions, "properties": {"x": {"$ref": "#/$defs/d0"}}})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": True}
    return schema | {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (nested(MAX_SCHEMA_DEPTH - 1), {}),
        (of(x={"items": {"anyOf": [{"const": number} for number in range(900)]}}), {"x": [899] * 2000}),
        (of(x={"items": {"enum": [1] * 9000 + [2]}}), {"x": [2] * 2000}),
        (of(x={"uniqueItems": True}), {"x": [{"a": number} for number in range(2000)]}),
    ],
    ids=["unevaluated", "anyOf", "enum", "uniqueItems"],
)
def test_what_would_take_minutes_to_judge_is_given_up(schema: dict[str, Any], value: object):
    taken = check_schema(schema)
    started = time.process_time()
    assert taken.faults(value)[-1] == "/: is too much to be checked against this schema: be briefer"
    assert time.process_time() - started < 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "$ref", "$defs", "enum", "anyOf", "not", "required", "format", "if", "pattern"]
)
SCHEMAS = st.recursive(
    JSON | st.sampled_from(["object", "string", "#/$defs/a", "date"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.sampled_from("ab"), inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(KEYWORDS, SCHEMAS, max_size=5), JSON)
def test_any_schema_is_taken_or_refused_and_any_value_judged(schema: dict[str, Any], value: object):
    try:
        taken = check_schema(schema | {"type": "object"})
    except InvalidInput as refused:
        place = refused.field
    else:
        place = "schema"
        assert json.loads(taken.text) == taken.schema
        assert isinstance(taken.faults(value), list)
        taken.placed("#/$defs/answer")
    assert str(place).startswith("schema")
