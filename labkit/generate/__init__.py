"""Generate text: sampling, stopping, streaming, and decoding with or without a drafter.

generate(model, "Once upon a time", max_new_tokens=64).text
generate(model, prompts, drafter=Lookup())               drafters are in `labkit.speculate`
for token in stream(model, "Once upon a time"): print(token.text, end="")
python -m labkit.generate                                plain, cached and speculative, compared
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial

from labkit.cache.prefix.store import PrefixView
from labkit.errors import BadRequest, whole_number
from labkit.generate.adaptive import LONGEST, adaptive
from labkit.generate.drafter import Draft, Drafter
from labkit.generate.loop import decode
from labkit.generate.prefixes import with_prefixes
from labkit.generate.request import Options, Prompts, Request, prepare
from labkit.generate.row import Completion, Tally, Token, Tokens
from labkit.generate.sampling import InvalidLogits, Sampling
from labkit.generate.speculative import DrafterFailed, Watch, speculate
from labkit.model.decoder import Decoder


def generate(
    model: Decoder,
    prompts: Prompts,
    *,
    drafter: Drafter | None = None,
    draft_length: int | str = 4,
    prefixes: PrefixView | Sequence[PrefixView] | None = None,
    **options,
) -> Completion | list[Completion]:
    """Continue one prompt (text or token ids) or a list of them.

    A list in gives a list out.

    drafter       proposes tokens that the model checks; the text stays what it is without
    draft_length  tokens drafted per pass; 0: plain decoding; "auto": as many as pay
    prefixes      a view of a prefix store, or one per prompt, whose cached beginnings are reused
    options       the fields of `Options`: max_new_tokens, sampling, end_ids, stop, cache, on_token ...

    Raises BadRequest before any work.
    """
    given = {"drafter": drafter, "draft_length": draft_length, "prefixes": prefixes}
    request, watch, tokens = _start(model, prompts, **given, **options)
    with closing(tokens):
        for _ in tokens:
            pass
    name = None if drafter is None else drafter.name
    pairs = zip(request.rows, watch.tallies)
    completions = [row.completion(model.tokenizer, name, tally) for row, tally in pairs]
    return completions[0] if request.single else completions


def stream(model: Decoder, prompts: Prompts, **arguments) -> Tokens:
    """Do the same token by token; the texts together are the completion's text.

    The arguments are those of `generate`. They are checked at the call, before the
    first token.
    """
    return _start(model, prompts, texts=True, **arguments)[2]


def _start(
    model, prompts, texts=False, drafter=None, draft_length=4, prefixes=None, **options
) -> tuple[Request, Watch, Tokens]:
    """Check everything; return the request and the tokens to come."""
    known = [field.name for field in fields(Options)]
    for name in set(options) - set(known):
        raise BadRequest(f"There is no option {name!r}; the options are {', '.join(known)}.")
    asked = Options(**options)
    request = prepare(model, prompts, asked, texts or asked.on_token is not None)
    watch, decoder = Watch(len(request.rows)), decode
    if drafter is not None:
        decoder = partial(speculate, watch=watch, **_checked(drafter, draft_length, model))
    tokens = decoder(request) if prefixes is None else with_prefixes(request, prefixes, decoder)
    return request, watch, tokens if asked.on_token is None else _handed_on(tokens, asked.on_token)


def _checked(drafter: object, draft_length: int | str, target: Decoder) -> dict:
    if not isinstance(drafter, Drafter):
        raise BadRequest(
            f"drafter is {drafter!r}; give a Drafter, such as "
            'labkit.speculate.make_drafter("lookup", model).'
        )
    drafter.check(target)
    if draft_length == "auto":
        return {"drafter": adaptive(drafter), "longest": LONGEST}
    longest = whole_number(draft_length, 'draft_length (which may also be "auto")', 0)
    return {"drafter": drafter, "longest": longest}


def _handed_on(tokens: Tokens, on_token) -> Tokens:
    with closing(tokens):
        for token in tokens:
            on_token(token)
            yield token


__all__ = [
    "Completion",
    "Draft",
    "Drafter",
    "DrafterFailed",
    "InvalidLogits",
    "Options",
    "Sampling",
    "Tally",
    "Token",
    "generate",
    "stream",
]
