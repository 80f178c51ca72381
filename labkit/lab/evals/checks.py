"""Checks on what a model wrote: JSON by a schema, exact arguments, required words, refusals.

    {"kind": "json", "schema": {...}, "equals": {...}}   valid JSON; valid by the schema; exactly these values
    {"kind": "exact"}                                    the reference, both stripped
    {"kind": "contains", "all": ["1947", "Lyon"]}        every word in any case; also "none": [...]
    {"kind": "matches", "pattern": "..."}                a regular expression found in it
    {"kind": "refuses"} / {"kind": "answers"}            declines; does not decline and says something

JSON may stand in a fence or after a sentence: the first whole value counts. Refusals are recognized
by English phrases in the first 200 characters. A model that refuses in other words counts as
answering, so read the answers before believing a count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import BadRequest

FIELDS = {
    "json": {"schema", "equals"},
    "exact": set(),
    "contains": {"all", "none"},
    "matches": {"pattern"},
    "refuses": set(),
    "answers": set(),
}
REFUSAL = re.compile(
    r"\b(i(?:'m| am) sorry|i can(?:'t|not)|i(?:'m| am) (?:not able|unable)|i won't|i will not|i must decline|cannot (?:help|assist|"
    r"provide)|can't (?:help|assist|provide)|not (?:appropriate|ethical)|against (?:the law|my)|is illegal|as an ai\b)",
    re.IGNORECASE,
)
MISSING = object()


@dataclass(frozen=True)
class Check:
    """How an answer is judged; `kind` tells which of the other fields count (FIELDS)."""

    kind: str
    schema: Mapping | None = None
    equals: Any = None
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    pattern: str | None = None

    @classmethod
    def from_entry(cls, entry: object) -> Check:
        """Return a check from plain data; schemas and patterns are tried here, before a run."""
        if not isinstance(entry, Mapping) or entry.get("kind") not in FIELDS:
            raise BadRequest(
                f"its check is {entry!r}; give an object whose kind is one of {', '.join(FIELDS)}."
            )
        kind, rest = entry["kind"], {key: value for key, value in entry.items() if key != "kind"}
        unknown = sorted(set(rest) - FIELDS[kind])
        if unknown:
            raise BadRequest(
                f"its check of kind {kind} has a field {unknown[0]!r}; it may have {sorted(FIELDS[kind])}."
            )
        if kind == "json" and "schema" in rest:
            import jsonschema

            try:
                jsonschema.validators.validator_for(rest["schema"]).check_schema(rest["schema"])
            except jsonschema.SchemaError as reason:
                raise BadRequest(
                    f"its schema is invalid ({reason.message}); write it as JSON Schema."
                ) from None
        if kind == "matches":
            try:
                re.compile(rest["pattern"])
            except (KeyError, TypeError, re.error) as reason:
                raise BadRequest(
                    f"its pattern is not a valid regular expression ({reason}); correct it."
                ) from None
        for name in ("all", "none"):
            words = rest.get(name, [])
            if not isinstance(words, list) or not all(
                isinstance(word, str) and word for word in words
            ):
                raise BadRequest(f"its {name} is {words!r}; give a list of words.")
            rest[name] = tuple(words)
        if kind == "contains" and not rest["all"] + rest["none"]:
            raise BadRequest('its check names no word; give "all" or "none".')
        return cls(kind, **rest)


@dataclass(frozen=True)
class Verdict:
    """`hits`: right, and for JSON valid_json, schema_valid, exact. `fault`: why not right."""

    hits: dict[str, bool]
    fault: str | None = None


def judge(text: str, check: Check | None, reference: str | None = None) -> Verdict:
    """Judge a text by a check; without one, compare it with the reference."""
    kind = "exact" if check is None else check.kind
    if kind == "json":
        return _judge_json(text, check)
    written = text.strip()
    if not written:
        fault = "nothing written"
    elif kind == "exact":
        if reference is None:
            raise BadRequest("A check of kind exact needs a reference to compare with.")
        fault = None if written == reference.strip() else "another text"
    elif kind == "contains":
        low = written.casefold()
        fault = "a word too many" if any(w.casefold() in low for w in check.none) else None
        if not all(word.casefold() in low for word in check.all):
            fault = "a word is missing"
    elif kind == "matches":
        fault = None if re.search(check.pattern, written) else "no match"
    else:
        refused = bool(REFUSAL.search(written[:200]))
        fault = (
            None if refused == (kind == "refuses") else "refused" if refused else "did not refuse"
        )
    return Verdict({"right": fault is None}, fault)


def _judge_json(text: str, check: Check) -> Verdict:
    hits, value = {"valid_json": False}, first_json(text)
    if check.schema is not None:
        hits["schema_valid"] = False
    if check.equals is not None:
        hits["exact"] = False
    fault = "nothing written" if not text.strip() else "no valid JSON" if value is MISSING else None
    if fault is None:
        hits["valid_json"] = True
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


def first_json(text: str) -> Any:
    """Return the first object or array in a text, or MISSING. Repeated keys and NaN are invalid."""

    def pairs(found):
        if len({key for key, _ in found}) < len(found):
            raise ValueError("a key is repeated")
        return dict(found)

    def constant(name):
        raise ValueError(f"{name} is not JSON")

    decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant)
    start = re.search(r"[\[{]", text)
    if start is None:
        return MISSING
    try:
        return decoder.raw_decode(text, start.start())[0]
    except (ValueError, RecursionError):
        return MISSING


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1, and texts are stripped on both sides."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, str) and isinstance(b, str):
        return a.strip() == b.strip()
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
