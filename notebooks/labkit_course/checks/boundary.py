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
    """Check how many tokens each of four requests computes.

    The system prompt has 512 tokens, a question 32, and a block 16. Tenant A has asked
    once. Then come: A with another question, B with that question, A with the first
    prompt again, and A with the first prompt and another adapter.
    """
    right = (32, 544, 1, 544)
    given = answers[0] if len(answers) == 1 else answers
    if len(given) != 4:
        return "give four numbers, one per request."
    named = {
        (0, 512): "The first: the question is new and must be computed.",
        (1, 32): (
            "The second: another tenant never finds A's system prompt, even if the tokens are equal."
        ),
        (2, 0): (
            "The third: one token must be computed again, because its logits give the next token."
        ),
        (2, 32): (
            "The third: the whole prompt is stored, with the question; all but one token are found."
        ),
        (2, 16): "The third: its 544 tokens are 34 whole blocks; all but one token are found.",
        (3, 32): (
            "The fourth: an adapter changes keys and values; entries without it cannot be used."
        ),
        (3, 1): (
            "The fourth: an adapter changes keys and values; entries without it cannot be used."
        ),
    }
    for place, (value, should) in enumerate(zip(given, right)):
        if value != should:
            return named.get(
                (place, value),
                f"number {place + 1} is {value}, which is wrong; count the tokens that are found, "
                "then subtract them from 544.",
            )
    return None


@check("May it share?")
def check_may_share(function) -> str | None:
    """Check `function(entry, request) -> bool`.

    Both are dictionaries with tenant, scope, weights, adapters, tokens and text.
    """
    cases = [
        ({}, True, "the same request again must hit"),
        (
            {"text": "tenant: zz"},
            True,
            "the text of a request does not identify the tenant; do not read it",
        ),
        (
            {"tokens": [100, 200, 300, 400, 7]},
            True,
            "the request begins with the entry's tokens, so it is a prefix hit",
        ),
        (
            {"tenant": "zz", "text": "tenant: ab"},
            False,
            "another tenant, who writes the right name into the text",
        ),
        (
            {"tenant": "a", "scope": "bc"},
            False,
            "tenant and scope are equal only if joined into one text; compare each field",
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
            "the request is shorter than the entry, so the entry is not a prefix of it",
        ),
    ]
    for change, right, why in cases:
        request = {**ENTRY, **change}
        if bool(attempt(function, dict(ENTRY), request)) != right:
            return f"{'it should share' if right else 'it must not share'}: {why}."
    return None


@check("What a revocation leaves")
def check_revoke(function) -> str | None:
    """Check `function(entries, document, size) -> {name: number of tokens that stay}`.

    An entry is {"tokens": n, "documents": {name: start}}.
    """
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
        return "an entry that begins with the document must be removed completely."
    if found.get("behind the system prompt") == 40:
        return "blocks are kept whole: of the 40 tokens before the document, 32 fill whole blocks."
    if found.get("behind the system prompt") == 64:
        return "the tokens after the document were computed from it; remove them too."
    if "other document" not in found or "unrelated" not in found:
        return "entries without this document must not change."
    if "behind the system prompt" not in found:
        return "the tokens before the document do not depend on it; their whole blocks may stay."
    return f"you keep {found}; compare each entry's start of the document with its whole blocks."
