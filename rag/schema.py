"""Judges a caller's JSON Schema, and what a model writes by it.

A schema is a program of its caller's that runs here: so it has no regular expressions (one can be written that never
ends), no recursion, no references to elsewhere, and a size that bounds the work. What it says beyond that is honoured
or refused; nothing in it is passed over in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import extend

from rag.errors import InvalidInput

MAX_SCHEMA_BYTES = 32 * 1024
# References count as what they refer to.
MAX_SCHEMA_DEPTH = 24
MAX_SUBSCHEMAS = 1000
# Of a model's answer; the longest that is allowed has 4,096 tokens, about 20 KiB.
MAX_OUTPUT_DEPTH = 64
# Of judging it, where a step is a keyword at a place: about 2 s. Nested unevaluatedProperties would take for ever, and
# a list of thousands against a thousand alternatives minutes.
MAX_STEPS = 200_000

# Beyond a float, which is what most readers will take it for.
MAX_NUMBER = 1e300

# So many are told to the model that is to mend them.
MAX_FAULTS = 10
MAX_FAULT_LENGTH = 200

_FIELD = "schema"

_DIALECTS = ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema")
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)
_CHECKS = frozenset(
    (
        "type",
        "enum",
        "const",
        "multipleOf",
        "maximum",
        "exclusiveMaximum",
        "minimum",
        "exclusiveMinimum",
        "maxLength",
        "minLength",
        "maxItems",
        "minItems",
        "uniqueItems",
        "maxContains",
        "minContains",
        "maxProperties",
        "minProperties",
        "required",
        "dependentRequired",
        "format",
        "$ref",
    )
)
_ONE = frozenset(
    (
        "items",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedProperties",
        "unevaluatedItems",
    )
)
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "dependentSchemas"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_REASONS = {
    "pattern": "regular expressions are not taken: use enum, format or maxLength",
    "patternProperties": "regular expressions are not taken: name the properties",
    "$id": "a schema has no address here",
    "$anchor": "a $ref is a pointer to a definition, such as #/$defs/name",
    "nullable": 'say "type": ["string", "null"]',
    "dependencies": "say dependentRequired or dependentSchemas",
    "additionalItems": "say prefixItems and items",
}

_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:Z|[+-][0-9]{2}:[0-9]{2})"
_RFC3339_TIME = re.compile(_TIME, re.IGNORECASE)
_RFC3339 = re.compile(rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}T{_TIME}", re.IGNORECASE)

_FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@_FORMATS.checks("date-time", raises=ValueError)
def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or bool(_RFC3339.fullmatch(value) and datetime.fromisoformat(_cut(value)))


@_FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return bool(_RFC3339_TIME.fullmatch(value)) and time.fromisoformat(_cut(value)) is not None


def _cut(value: str) -> str:
    """RFC 3339 as the standard library reads it: microseconds are its finest."""
    return re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", value.upper())


@dataclass(frozen=True)
class OutputSchema:
    """A schema that is honoured as a whole."""

    schema: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """As a model reads it."""
        return json.dumps(self.schema, ensure_ascii=False)

    def faults(self, value: object) -> list[str]:
        """What does not fit, each with its place as a JSON Pointer; the first `MAX_FAULTS` in the order of places."""
        unfit = list(unstorable(value))
        if unfit:
            return unfit[:MAX_FAULTS]
        validator = _counting()(dict(self.schema), format_checker=_FORMATS)
        found = []
        try:
            for number, error in enumerate(validator.iter_errors(value), start=1):
                found.append(f"{pointer(error.absolute_path)}: {error.message}"[:MAX_FAULT_LENGTH])
                if number == MAX_FAULTS:
                    break
        except _TooMuchError:
            found.append("/: is too much to be checked against this schema: be briefer")
        return found

    def placed(self, root: str) -> Mapping[str, Any]:
        """The schema for a place in a larger one, where `root` is the pointer to that place."""
        placed = _moved(self.schema, root)
        assert isinstance(placed, dict)
        return placed


class _TooMuchError(Exception):
    """There are more steps than are taken."""


def _counting() -> Any:
    """A validator that raises _TooMuchError after `MAX_STEPS`."""
    left = MAX_STEPS

    def counted(keyword: str, check: Callable[..., Any]) -> Callable[..., Any]:
        def step(validator: Any, said: Any, value: Any, schema: Any) -> Any:
            nonlocal left
            left -= _steps(keyword, said, value)
            if left < 0:
                raise _TooMuchError
            return check(validator, said, value, schema)

        return step

    checks = Draft202012Validator.VALIDATORS
    counting = {keyword: counted(keyword, check) for keyword, check in checks.items()}
    return extend(Draft202012Validator, counting)  # type: ignore[no-untyped-call, unused-ignore]


def _steps(keyword: str, said: Any, value: Any) -> int:
    """What the work of a keyword comes to, apart from that of the schemas in it."""
    if keyword == "enum":
        return 1 + len(said) // 10
    # Texts can be sorted; all else may have to be compared with all else.
    if keyword == "uniqueItems" and isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return 1 + len(value) ** 2
    return 1


def check_schema(schema: object) -> OutputSchema:
    """Take a caller's schema. Raises InvalidInput that names the place of what cannot be honoured."""
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput("the schema must be JSON", field=_FIELD) from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput(f"the schema must be at most {MAX_SCHEMA_BYTES} bytes", field=_FIELD)
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise InvalidInput("the schema is nested too deeply", field=_FIELD) from error
    if not isinstance(parsed, dict):
        raise InvalidInput("the schema must be an object", field=_FIELD)
    dialect = parsed.get("$schema")
    if dialect is not None and (not isinstance(dialect, str) or dialect.removesuffix("#") not in _DIALECTS):
        raise _refused((), "$schema", "the schema must be of draft 2020-12, or of draft 7 as far as they agree")
    _Reading(parsed).size(parsed, (), depth=1)
    if parsed.get("type") != "object":
        raise _refused((), "type", 'the answer is one object: say "type": "object"')
    _check_definitions(parsed)
    try:
        Draft202012Validator.check_schema(parsed)
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path))
        raise InvalidInput(error.message[:MAX_FAULT_LENGTH], field=f"{_FIELD}.{place}".rstrip(".")) from error
    return OutputSchema({name: value for name, value in parsed.items() if name != "$schema"})


def pointer(path: Any) -> str:
    """A JSON Pointer (RFC 6901); the whole value is `/`, since an empty one would read like a mistake."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path) or "/"


Path = tuple[str | int, ...]


class _Reading:
    """Walks a schema with its references followed, and counts what there is to check."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._sizes: dict[int, int] = {}
        self._under_way: set[int] = set()

    def size(self, schema: Any, path: Path, *, depth: int) -> int:
        """How many subschemas it comes to. Raises InvalidInput at the first that cannot be honoured."""
        if isinstance(schema, bool):
            return 1
        if not isinstance(schema, dict):
            raise _refused(path, None, "a schema must be an object or a boolean")
        if depth > MAX_SCHEMA_DEPTH:
            raise _refused(path, None, f"the schema is deeper than {MAX_SCHEMA_DEPTH}")
        if id(schema) in self._under_way:
            raise _refused(path, None, "the schema refers to itself, and recursion is not taken")
        if id(schema) not in self._sizes:
            self._under_way.add(id(schema))
            self._sizes[id(schema)] = 1 + sum(
                self.size(inner, place, depth=depth + 1) for inner, place in self._inner(schema, path)
            )
            self._under_way.remove(id(schema))
        if self._sizes[id(schema)] > MAX_SUBSCHEMAS:
            raise _refused(path, None, f"the schema comes to more than {MAX_SUBSCHEMAS} subschemas")
        return self._sizes[id(schema)]

    def _inner(self, schema: Mapping[str, Any], path: Path) -> Iterator[tuple[Any, Path]]:
        for name, value in schema.items():
            place = (*path, name)
            if name in _ONE:
                yield value, place
            elif name in _MANY:
                if not isinstance(value, list):
                    raise _refused(path, name, "must be a list of schemas")
                yield from ((inner, (*place, number)) for number, inner in enumerate(value))
            elif name in _NAMED:
                if not isinstance(value, dict):
                    raise _refused(path, name, "must be an object of schemas")
                yield from ((inner, (*place, inner_name)) for inner_name, inner in value.items())
            elif name == "$ref":
                yield self._referred(value, path), place
            elif name == "$schema" and path:
                raise _refused(path, name, "the draft is said at the root")
            elif name == "multipleOf" and isinstance(value, int) and value > MAX_NUMBER:
                raise _refused(path, name, "is too large a number")
            elif name == "format":
                if not isinstance(value, str) or value not in _FORMATS.checkers:
                    raise _refused(path, name, f"the formats are {', '.join(sorted(_FORMATS.checkers))}")
            elif name in _DEFINITIONS:
                if path:
                    raise _refused(path, name, "definitions stand at the root")
            elif name not in _CHECKS and name not in _NOTES:
                raise _refused(path, name, _REASONS.get(name, "this keyword is not known, and would not be honoured"))

    def _referred(self, reference: Any, path: Path) -> Any:
        _, root, name = (
            reference.split("/") if isinstance(reference, str) and reference.count("/") == 2 else ("", "", "")
        )
        # What is encoded as in an address would be decoded later on, and lead to another definition.
        if root not in _DEFINITIONS or not str(reference).startswith("#/") or "%" in name:
            raise _refused(path, "$ref", "a reference must be a pointer to a definition, such as #/$defs/name")
        definitions = self._root.get(root)
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(definitions, dict) or name not in definitions:
            raise _refused(path, "$ref", "the reference leads nowhere")
        return definitions[name]


def _check_definitions(schema: Mapping[str, Any]) -> None:
    """What nobody refers to has to be a schema as well, since a model reads it."""
    reading = _Reading(schema)
    for name in _DEFINITIONS & schema.keys():
        if not isinstance(schema[name], dict):
            raise _refused((), name, "must be an object of schemas")
        for inner_name, inner in schema[name].items():
            reading.size(inner, (name, inner_name), depth=1)


def _refused(path: Path, keyword: str | None, message: str) -> InvalidInput:
    return InvalidInput(message, field=".".join(map(str, (_FIELD, *path, *([keyword] if keyword else [])))))


def _moved(schema: Any, root: str) -> Any:
    """A copy whose references begin at `root`; a property may be called $ref, so only schemas are touched."""
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref":
            moved[name] = root + value[1:]
        elif name in _ONE:
            moved[name] = _moved(value, root)
        elif name in _MANY:
            moved[name] = [_moved(inner, root) for inner in value]
        elif name in _NAMED or name in _DEFINITIONS:
            moved[name] = {inner_name: _moved(inner, root) for inner_name, inner in value.items()}
        else:
            moved[name] = value
    return moved


def unstorable(value: object, path: Path = ()) -> Iterator[str]:
    """What JSON could say and no reader could be sent: infinities, halves of characters, bottomless nesting."""
    if len(path) > MAX_OUTPUT_DEPTH:
        yield f"{pointer(path)}: is nested too deeply"
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        yield f"{pointer(path)}: is no finite number, or too large a one"
    elif isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            yield f"{pointer(path)}: has a character that is none"
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from unstorable(inner, (*path, number))
    elif isinstance(value, dict):
        for name, inner in value.items():
            if list(unstorable(name)):
                yield f"{pointer(path)}: has a name with a character that is none"
            else:
                yield from unstorable(inner, (*path, name))
