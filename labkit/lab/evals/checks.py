"""Checks on what a model wrote: JSON by a schema, exact arguments, required words, refusals.

    {"kind": "json", "schema": {...}, "equals": {...}}   valid JSON, the right form, the right values
    {"kind": "exact"}                                    equal to the reference, both stripped
    {"kind": "contains", "all": ["1947", "Lyon"]}        every word, in any case; also "none": [...]
    {"kind": "matches", "pattern": "..."}                a regular expression matches a part
    {"kind": "refuses"}                                  the model declines
    {"kind": "answers"}                                  the model writes something else

JSON may stand in a fence or after a sentence. The first complete value counts, or the first one of
the type (object or array) that the check asks for. Refusals are
recognized by English phrases in the first 200 characters. A model that declines in other words
counts as answering, so read the answers before you trust a count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import BadRequest

FIELDS = {"json": {"schema", "equals"}, "exact": set(), "contains": {"all", "none"}}
FIELDS |= {"matches": {"pattern"}, "refuses": set(), "answers": set()}
REFUSAL = re.compile(
    r"\b(i(?:'m| am) sorry|i can(?:'t|not)|i(?:'m| am) (?:not able|unable)|i won't|i will not|i must decline|cannot (?:help|assist|"
    r"provide)|can't (?:help|assist|provide)|not (?:appropriate|ethical)|against (?:the law|my)|is illegal|as an ai\b)",
    re.IGNORECASE,
)
MISSING = object()
_OPENING = re.compile(r"[\[{]")
_BRACKET_OR_STRING = re.compile(r'[\[{\]}]|"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Check:
    """How an answer is judged. FIELDS lists the fields that each `kind` uses."""

    kind: str
    schema: Mapping | None = None
    equals: Any = None
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    pattern: str | None = None

    @classmethod
    def from_entry(cls, entry: object) -> Check:
        """Return a check from plain data.

        Raises BadRequest if a field is not valid, such as a schema or a pattern.
        """
        if not isinstance(entry, Mapping) or entry.get("kind") not in FIELDS:
            kinds = ", ".join(FIELDS)
            raise BadRequest(f"its check is {entry!r}; give an object with a kind ({kinds}).")
        kind, rest = entry["kind"], {key: value for key, value in entry.items() if key != "kind"}
        for name in sorted(set(rest) - FIELDS[kind]):
            allowed = ", ".join(sorted(FIELDS[kind])) or "no other field"
            raise BadRequest(f"its check of kind {kind} has a field {name!r}; allowed: {allowed}.")
        if "schema" in rest:
            import jsonschema

            try:
                jsonschema.validators.validator_for(rest["schema"]).check_schema(rest["schema"])
            except jsonschema.SchemaError as error:
                raise BadRequest(f"its schema is invalid; fix it ({error.message}).") from None
        if kind == "matches":
            try:
                re.compile(rest["pattern"])
            except (KeyError, TypeError, re.error) as error:
                raise BadRequest(f"its pattern is invalid; fix it ({error}).") from None
        for name in ("all", "none"):
            words = rest.get(name, [])
            if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
                raise BadRequest(f"its {name} is {words!r}; give a list of words.")
            rest[name] = tuple(words)
        if kind == "contains" and not rest["all"] + rest["none"]:
            raise BadRequest('its check names no word; give "all" or "none".')
        return cls(kind, **rest)


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    hits: `right`, and for JSON also `valid_json`, `schema_valid` and `exact`.
    fault: the reason why the text is not right.
    """

    hits: dict[str, bool]
    fault: str | None = None


def judge(text: str, check: Check | None, reference: str | None = None) -> Verdict:
    """Judge a text by a check; without a check, compare it with the reference."""
    kind, written = "exact" if check is None else check.kind, text.strip()
    if kind == "json":
        return _judge_json(written, check)
    fault = None
    if not written:
        fault = "nothing written"
    elif kind == "exact":
        if reference is None:
            raise BadRequest("A check of kind exact compares with a reference; give one.")
        fault = None if written == reference.strip() else "another text"
    elif kind == "contains":
        low = written.casefold()
        if not all(word.casefold() in low for word in check.all):
            fault = "a word is missing"
        elif any(word.casefold() in low for word in check.none):
            fault = "a word too many"
    elif kind == "matches":
        fault = None if re.search(check.pattern, written) else "no match"
    elif bool(REFUSAL.search(written[:200])) != (kind == "refuses"):
        fault = "refused" if kind == "answers" else "did not refuse"
    return Verdict({"right": fault is None}, fault)


def json_hits(check: Check) -> dict[str, bool]:
    """Return the hits of a check of kind json next to `right`, all False."""
    hits = {"valid_json": True, "schema_valid": check.schema, "exact": check.equals}
    return {name: False for name, value in hits.items() if value is not None}


def _judge_json(text: str, check: Check) -> Verdict:
    type_name = check.schema.get("type") if isinstance(check.schema, Mapping) else None
    kind = {"object": dict, "array": list}.get(str(type_name), type(check.equals))
    hits, value = json_hits(check), first_json(text, kind)
    if value is MISSING:
        return Verdict({"right": False, **hits}, "no valid JSON" if text else "nothing written")
    fault, hits["valid_json"] = None, True
    if check.schema is not None:
        import jsonschema

        validator = jsonschema.validators.validator_for(check.schema)(check.schema)
        error = next(validator.iter_errors(value), None)
        hits["schema_valid"] = error is None
        fault = None if error is None else f"schema: {error.validator}"
    if check.equals is not None:
        hits["exact"] = same(value, check.equals)
        fault = fault or (None if hits["exact"] else "other values")
    return Verdict({"right": fault is None, **hits}, fault)


def first_json(text: str, kind: type = object) -> Any:
    """Return the first object or array in a text, or MISSING.

    One of the type `kind` comes before others. Brackets that hold no JSON, such as
    "[thinking]", are passed over whole. An object with a repeated key and a value NaN are
    not valid.
    """

    def pairs(items):
        if len(dict(items)) < len(items):
            raise ValueError("a key is repeated")
        return dict(items)

    def constant(name):
        raise ValueError(f"{name} is not JSON")

    decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant)
    first, opening = MISSING, _OPENING.search(text)
    while opening:
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            end = _closing(text, opening.start())
        else:
            if isinstance(value, kind):
                return value
            first = value if first is MISSING else first
        opening = _OPENING.search(text, end)
    return first


def _closing(text: str, start: int) -> int:
    """Return the place after the bracket that closes the one at `start`, or the text's end."""
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, start):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
    return len(text)


def same(a: Any, b: Any) -> bool:
    """Return True if two values are equal as JSON.

    true differs from 1. Texts are stripped on both sides.
    """
    if isinstance(a, str) and isinstance(b, str):
        return a.strip() == b.strip()
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)
