"""Generate text: sampling, stopping, streaming, and decoding with or without a drafter.

    generate(model, "Once upon a time", max_new_tokens=64).text
    generate(model, prompts, drafter=Lookup())
    for token in stream(model, "Once upon a time"): print(token.text, end="")

Drafters are in `labkit.speculate`. `python -m labkit.generate` compares decoding without
a cache, with a cache, and with a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Continue one prompt, or each prompt of a list.

    A prompt is a text or token ids. One prompt gives one completion, and a list gives a
    list.

    drafter       proposes tokens that the model checks; greedy text stays the same, and
                  sampled text keeps its distribution
    draft_length  tokens drafted per pass; 0: plain decoding; "auto": as many as pay
    prefixes      a view of a prefix store, or one view per prompt; cached beginnings of
                  prompts are reused
    options       the fields of `Options`: max_new_tokens, sampling, end_ids, stop, ...

    Raises BadRequest before any work.
    """
    options |= {"drafter": drafter, "draft_length": draft_length, "prefixes": prefixes}
    request, watch, tokens = _start(model, prompts, **options)
    with closing(tokens):
        for _ in tokens:
            pass
    name = None if drafter is None else drafter.name
    pairs = zip(request.rows, watch.tallies)
    completions = [row.completion(model.tokenizer, name, tally) for row, tally in pairs]
    return completions[0] if request.single else completions


def stream(model: Decoder, prompts: Prompts, **arguments) -> Tokens:
    """Yield each `Token` of `generate` as soon as it is known.

    The arguments are those of `generate`, and they are checked at once. The texts of all
    tokens of a row together are the text of its completion.
    """
    return _start(model, prompts, texts=True, **arguments)[2]


def _start(
    model, prompts, texts=False, drafter=None, draft_length=4, prefixes=None, **options
) -> tuple[Request, Watch, Tokens]:
    """Check all arguments; return the request, its watch and the generator of tokens."""
    known = [field.name for field in fields(Options)]
    for name in set(options) - set(known):
        raise BadRequest(f"There is no option {name!r}; the options are {', '.join(known)}.")
    checked = Options(**options)
    request = prepare(model, prompts, checked, texts or checked.on_token is not None)
    watch, decoder = Watch(len(request.rows)), decode
    if drafter is not None:
        if not isinstance(drafter, Drafter):
            raise BadRequest(
                f'drafter is {drafter!r}; give a Drafter, such as make_drafter("lookup", model).'
            )
        drafter.check(model)
        longest = LONGEST
        if draft_length == "auto":
            drafter = adaptive(drafter)
        else:
            longest = whole_number(draft_length, 'draft_length (which may also be "auto")', 0)
        decoder = partial(speculate, drafter=drafter, longest=longest, watch=watch)
    tokens = decoder(request) if prefixes is None else with_prefixes(request, prefixes, decoder)
    return request, watch, _calling(checked.on_token, tokens) if checked.on_token else tokens


def _calling(on_token: Callable[[Token], object], tokens: Tokens) -> Tokens:
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
