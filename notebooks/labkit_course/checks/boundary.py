"""Notebook 10, the cache as an information boundary: tokens computed, sharing, revocation."""

from __future__ import annotations

from labkit_course.checks.check import attempt, check

ENTRY = {
    "tenant": "ab",
    "scope": "c",
    "weights": "w",
    "adapters": ["X"],
    "tokens": [100, 200, 300, 400],
    "text": "tenant: ab",
}


@check("Tokens computed")
def check_computed(*answers) -> str | None:
    """System prompt 512, question 32, blocks of 16, asked once by A. Then: A with another question; B with that one; A with
    the first prompt again; A with it under another adapter."""
    right = (32, 544, 1, 544)
    given = answers[0] if len(answers) == 1 else answers
    if len(given) != 4:
        return "four numbers are asked for, one a request."
    named = {
        (0, 512): "The first: the question is new and must be computed.",
        (1, 32): (
            "The second: another tenant does not find A's system prompt, however equal the tokens."
        ),
        (2, 0): (
            "The third: with nothing left to compute there are no logits to choose a "
            "token from. One is computed again."
        ),
        (2, 32): (
            "The third: the whole prompt is held, the question too; all but one token are found."
        ),
        (2, 16): "The third: its 544 tokens are 34 whole blocks; all but one token are found.",
        (3, 32): (
            "The fourth: an adapter changes keys and values; nothing computed without it may serve."
        ),
        (3, 1): (
            "The fourth: an adapter changes keys and values; nothing computed without it may serve."
        ),
    }
    for place, (value, should) in enumerate(zip(given, right)):
        if value != should:
            return named.get(
                (place, value),
                f"number {place + 1} is {value}, which is not it; think of what is found, "
                "then subtract it from 544.",
            )
    return None


@check("May it share?")
def check_may_share(function) -> str | None:
    """`function(entry, request) -> bool`, both dictionaries with tenant, scope, weights, adapters, tokens and text."""
    cases = [
        ({}, True, "the same request again must hit"),
        (
            {"text": "tenant: zz"},
            True,
            "the text of a request says nothing about who asks: do not read it",
        ),
        (
            {"tokens": [100, 200, 300, 400, 7]},
            True,
            "the entry's tokens begin the request's: that is a prefix hit",
        ),
        (
            {"tenant": "zz", "text": "tenant: ab"},
            False,
            "another tenant, who merely *writes* the right name into the text",
        ),
        (
            {"tenant": "a", "scope": "bc"},
            False,
            "tenant and scope joined into one text look alike: compare field by field",
        ),
        ({"tenant": "X", "adapters": ["ab"]}, False, "the same words in other fields"),
        ({"adapters": []}, False, "another set of adapters"),
        ({"weights": "v"}, False, "other weights"),
        ({"scope": "d"}, False, "another scope"),
        (
            {"tokens": [100, 231, 299, 400]},
            False,
            "other tokens with the same sum of powers of 31, a weak hash",
        ),
        ({"tokens": [400, 300, 200, 100]}, False, "the same tokens in another order"),
        (
            {"tokens": [100, 200, 300]},
            False,
            "the request is shorter than what is stored: not all of it is its beginning",
        ),
    ]
    for change, right, why in cases:
        request = {**ENTRY, **change}
        if bool(attempt(function, dict(ENTRY), request)) != right:
            return f"{'it should share' if right else 'it must not share'}: {why}."
    return None


@check("What a revocation leaves")
def check_revoke(function) -> str | None:
    """`function(entries, document, size) -> {name: tokens kept}`; an entry is {"tokens": n, "documents": {name: start}}."""
    entries = {
        "unrelated": {"tokens": 64, "documents": {}},
        "other document": {"tokens": 64, "documents": {"memo": 16}},
        "from the start": {"tokens": 64, "documents": {"report": 0}},
        "behind the system prompt": {"tokens": 64, "documents": {"report": 40, "memo": 16}},
        "at a block's edge": {"tokens": 64, "documents": {"report": 48}},
    }
    right = {
        "unrelated": 64,
        "other document": 64,
        "behind the system prompt": 32,
        "at a block's edge": 48,
    }
    found = attempt(
        function,
        {
            name: {"tokens": e["tokens"], "documents": dict(e["documents"])}
            for name, e in entries.items()
        },
        "report",
        16,
    )
    found = {name: kept for name, kept in found.items() if kept}
    if found == right:
        return None
    if "from the start" in found:
        return "an entry that was built on the document from its first token goes altogether."
    if found.get("behind the system prompt") == 40:
        return "blocks are kept whole: of the 40 tokens before the document, 32 fill whole blocks."
    if found.get("behind the system prompt") == 64:
        return "an entry built on the document still holds what came behind it."
    if "other document" not in found or "unrelated" not in found:
        return "entries that were not built on this document are not touched."
    if "behind the system prompt" not in found:
        return "what lies before the document was computed without it and may stay: whole blocks of it."
    return f"you keep {found}; compare each entry's start of the document with its whole blocks."
