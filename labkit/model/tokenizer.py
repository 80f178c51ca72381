"""Text to token ids and back, with exactly one BOS token if the checkpoint adds one.

The `tokenizers` library merges. This file makes the decisions around it:

- BOS: `encode` adds one if the checkpoint does (its tokenizer_config, else the
  post-processor of its tokenizer.json) and the text does not begin with it already. `chat`
  does the same after the template, which may have written one itself.
- Special tokens: `encode` reads them in the text ("<|im_end|>" becomes the token), as
  prompts written by hand need. In `chat`, a message never becomes a control token: a user
  cannot end their own turn and speak as the system.
- Bytes: a token is some bytes, not always whole characters. `decode` joins the bytes and
  reads them as UTF-8, with U+FFFD for what is not UTF-8. `StreamDecoder` returns only whole
  characters, and its pieces join to what `decode` returns.
- Chat templates come with the checkpoint, that is from strangers, so they run in Jinja's
  sandbox: no attributes of Python objects, no changes to what they are given.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Backend

from labkit.errors import BadRequest
from labkit.files import read_json_object


class Tokenizer:
    """A tokenizer and its special tokens; `named` maps bos_token, eos_token, ... to their text."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        named: Mapping[str, str | None] | None = None,
    ):
        self.backend, self.bos_id, self.eos_ids = backend, bos_id, tuple(eos_ids)
        self.add_bos, self.chat_template = add_bos, chat_template
        self.named = {name: text for name, text in (named or {}).items() if text is not None}
        if add_bos and bos_id is None:
            raise BadRequest(
                "the tokenizer is to add a BOS token but none is named: say which, or do not add one."
            )
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._special = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._style = _byte_style(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(
        cls, folder: str | Path, eos_ids: Sequence[int] = (), bos_id: int | None = None
    ) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json; `bos_id`, `eos_ids`: of the model's config."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise BadRequest(
                f"{folder} has no tokenizer.json: save the tokenizer in that form (transformers does)."
            )
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as reason:  # the Rust library raises nothing narrower
            raise BadRequest(
                f"{folder / 'tokenizer.json'} is not a whole tokenizer ({reason}): fetch it again."
            ) from reason
        path = folder / "tokenizer_config.json"
        settings = read_json_object(path) if path.is_file() else {}
        named = {
            key: _content(value)
            for key, value in settings.items()
            if re.fullmatch("[a-z]+_token", key)
        }
        bos, eos = named.get("bos_token"), named.get("eos_token")
        if bos is not None:
            bos_id = backend.token_to_id(bos)
        if not eos_ids and eos is not None and (eos_id := backend.token_to_id(eos)) is not None:
            eos_ids = (eos_id,)
        add_bos = settings.get("add_bos_token")
        if add_bos is None:  # not said, so what the post-processor does
            add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
        path, template = folder / "chat_template.jinja", settings.get("chat_template")
        if path.is_file():
            template = path.read_text(encoding="utf-8")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=eos_ids,
            add_bos=bool(add_bos),
            chat_template=template,
            named=named,
        )

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        add_bos: None does as the checkpoint states.
        special: False reads special tokens such as "<|im_end|>" as plain text.
        """
        return self._with_bos(self._ids(text, special), add_bos)

    def chat(
        self, messages: str | Sequence[Mapping], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation (or one user message) in the checkpoint's chat template."""
        if self.chat_template is None:
            raise BadRequest(
                "this checkpoint has no chat template: pass the text itself (`--raw`)."
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not self._forged(messages):
            return self._with_bos(
                self._ids(
                    render_chat(self.chat_template, messages, add_generation_prompt, self.named)
                )
            )
        # Break the special tokens in the messages with a character that occurs nowhere. Those
        # that are left in the rendered text are the template's own: cut there, and read the
        # broken ones as plain text.
        said = json.dumps([dict(m) for m in messages], ensure_ascii=False)
        mark = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in said)
        broken = [
            {
                **m,
                "content": self._special_pattern.sub(
                    lambda hit: hit[0][0] + mark + hit[0][1:], m["content"]
                ),
            }
            if isinstance(m.get("content"), str)
            else m
            for m in messages
        ]
        text, ids, start = (
            render_chat(self.chat_template, broken, add_generation_prompt, self.named),
            [],
            0,
        )
        for hit in [*self._special_pattern.finditer(text), None]:
            piece = text[start : hit.start() if hit else None].replace(mark, "")
            ids += self._ids(piece, special=False) if piece else []
            if hit:
                ids.append(self._special[hit[0]])
                start = hit.end()
        return self._with_bos(ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """Return the text of the ids.

        continues: the ids follow others, so a leading space is kept (SentencePiece drops it
        at the start of a text).
        """
        decoder = StreamDecoder(self, skip_special, continues)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; an id of the model's padding, which no token has, has none."""
        if id not in self._bytes:
            if id in self._added:
                self._bytes[id] = self._added[id]
            else:
                token = self.backend.id_to_token(id)
                self._bytes[id] = b"" if token is None else self._style.bytes(token)
        return self._bytes[id]

    @property
    def drops_first_space(self) -> bool:
        return self._style.drops_first_space

    @cached_property
    def _special_pattern(self) -> re.Pattern:
        return re.compile(
            "|".join(re.escape(s) for s in sorted(self._special, key=len, reverse=True)) or r"(?!)"
        )

    def _forged(self, messages: Sequence[Mapping]) -> bool:
        return any(
            isinstance(m.get("content"), str) and self._special_pattern.search(m["content"])
            for m in messages
        )

    def _ids(self, text: str, special: bool = True) -> list[int]:
        self.backend.encode_special_tokens = not special
        return self.backend.encode(text, add_special_tokens=False).ids

    def _with_bos(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise BadRequest(
                "this checkpoint names no BOS token: leave add_bos out, or pass add_bos=False."
            )
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]


class StreamDecoder:
    """Decode token by token: `push` returns the characters that are now whole, `finish` the rest."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = tokenizer.drops_first_space and not continues

    def push(self, id: int) -> str:
        if self.skip_special and id in self.tokenizer.special_ids:
            return ""
        data = self.tokenizer.token_bytes(id)
        if self._first and data:
            data, self._first = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteLevel:
    """GPT-2's alphabet: every byte has a printable stand-in, which keeps vocabularies readable."""

    drops_first_space = False

    def __init__(self):
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [b for b in range(256) if b not in shown]
        self._byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}

    def bytes(self, token: str) -> bytes:
        return bytes(self._byte[c] for c in token)


class _SentencePiece:
    """Spaces are written "▁"; characters outside the vocabulary are byte tokens such as "<0x0A>"."""

    def __init__(self, drops_first_space: bool):
        self.drops_first_space = drops_first_space

    def bytes(self, token: str) -> bytes:
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_style(backend: Backend) -> _ByteLevel | _SentencePiece:
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    parts = {part["type"]: part for part in state.get("decoders", [state])}
    if "ByteLevel" in parts:
        return _ByteLevel()
    if "Metaspace" in parts:
        return _SentencePiece(parts["Metaspace"].get("prepend_scheme", "always") != "never")
    if "ByteFallback" in parts:
        return _SentencePiece("Strip" in parts)
    raise BadRequest(
        f"the tokenizer decodes by {', '.join(parts)}: labkit reads byte-level BPE and SentencePiece BPE, "
        "so take a checkpoint of one of those; labkit.lab.hf runs the others through transformers."
    )


def _content(token: str | Mapping | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def render_chat(
    template: str,
    messages: Sequence[Mapping],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
) -> str:
    """Return the text of a conversation; `tokens`: the special tokens that templates name."""
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            **tokens,
        )
    except (TemplateError, TypeError, OverflowError, ValueError) as reason:
        raise BadRequest(
            f"the chat template of this checkpoint rejected the conversation: {reason}."
        ) from reason


@lru_cache(maxsize=8)
def _compiled(template: str):
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(template)
    except TemplateError as reason:
        raise BadRequest(
            f"the chat template of this checkpoint is not valid Jinja: {reason}."
        ) from reason
