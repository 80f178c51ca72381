"""Chat templates: the few lines of Jinja by which a checkpoint says how a conversation becomes text.

They come with the checkpoint, that is from strangers, so they run in Jinja's sandbox: no attributes of Python objects,
no changes to what they are given. What a template raises is the user's to read (some refuse a system role).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from labkit.errors import BadRequest


def render(template: str, messages: Sequence[Mapping], add_generation_prompt: bool, tokens: Mapping[str, str]) -> str:
    """The text of a conversation; `tokens` are the special tokens that templates name (bos_token, eos_token, ...)."""
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, tools=None, **tokens
        )
    except (TemplateError, TypeError, OverflowError, ValueError) as reason:
        raise BadRequest(f"the chat template of this checkpoint refused the conversation: {reason}.") from reason


@lru_cache(maxsize=8)
def _compiled(template: str):
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(template)
    except TemplateError as reason:
        raise BadRequest(f"the chat template of this checkpoint is not valid Jinja: {reason}.") from reason
