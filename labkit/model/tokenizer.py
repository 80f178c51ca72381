"""Convert text to token ids and back.

The `tokenizers` library does the merging. This module adds four rules:

- BOS: `encode` adds a BOS token if the checkpoint does and the text does not start with
  one. tokenizer_config.json says whether the checkpoint does; if it does not say, the
  post-processor in tokenizer.json decides. `chat` applies the same rule to the output of
  the template, which may start with a BOS token itself.
- Special tokens: `encode` converts special tokens in a text ("<|im_end|>" becomes one
  token). Prompts that are written by hand need this. `chat` reads the messages as plain
  text, so a user cannot end their turn and speak as the system.
- Bytes: a token stands for bytes, and these may be part of a character. `decode` joins the
  bytes and reads them as UTF-8. Bytes that are not UTF-8 become U+FFFD. `StreamDecoder`
  returns only complete characters. Its pieces, joined, equal the result of `decode`.
- Chat templates come with a checkpoint and are not trusted. They run in Jinja's sandbox,
  without access to Python objects or changes to their input.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer as Backend

from labkit.errors import BadRequest
from labkit.files import read_json_object


class Tokenizer:
    """A tokenizer, its special tokens and its chat template.

    `named` maps names of special tokens (bos_token, eos_token, ...) to their text. Raises
    BadRequest if `add_bos` is set without a `bos_id`, or if labkit cannot decode this kind
    of tokenizer.
    """

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
            raise BadRequest("The tokenizer adds a BOS token but has none; give its bos_id.")
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._special = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._to_bytes, self.drops_first_space = _byte_reader(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(
        cls, folder: str | Path, eos_ids: Sequence[int] = (), bos_id: int | None = None
    ) -> Tokenizer:
        """Read the tokenizer of a checkpoint from its folder.

        `eos_ids` and `bos_id` come from the model's config. A BOS token that
        tokenizer_config.json names replaces `bos_id`; an EOS token that it names is used if
        `eos_ids` is empty. Raises BadRequest if tokenizer.json is missing or damaged.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            backend = Backend.from_file(str(path))
        except Exception as reason:  # the Rust library raises no narrower class
            raise BadRequest(
                f"{path} cannot be read as a tokenizer ({reason}); fetch it again."
            ) from reason
        path = path.with_name("tokenizer_config.json")
        settings = read_json_object(path) if path.is_file() else {}
        named = {
            key: value["content"] if isinstance(value, Mapping) else value
            for key, value in settings.items()
            if re.fullmatch("[a-z]+_token", key)
        }
        bos, eos = named.get("bos_token"), named.get("eos_token")
        if bos is not None:
            bos_id = backend.token_to_id(bos)
        if not eos_ids and eos is not None and (eos_id := backend.token_to_id(eos)) is not None:
            eos_ids = (eos_id,)
        add_bos = settings.get("add_bos_token")
        if add_bos is None:  # the post-processor decides
            add_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
        path, template = path.with_name("chat_template.jinja"), settings.get("chat_template")
        if path.is_file():
            template = path.read_text(encoding="utf-8")
        if isinstance(template, list):  # several templates with names
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

        add_bos: whether to add a BOS token (None: as the checkpoint does).
        special: False reads special tokens such as "<|im_end|>" as plain text.

        Raises BadRequest if a BOS token is to be added and the checkpoint has none.
        """
        return self._with_bos(self._ids(text, special), add_bos)

    def chat(
        self, messages: str | Sequence[Mapping], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation in the checkpoint's chat template.

        `messages` may be a text: one message of the user. Raises BadRequest if the
        checkpoint has no chat template or its template raises an error.
        """
        if self.chat_template is None:
            raise BadRequest("This checkpoint has no chat template; give plain text (`--raw`).")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        # Put a mark, a character that occurs nowhere, into each special token of the messages.
        # Special tokens without a mark in the rendered text are then the template's own.
        inputs = [self.chat_template, *map(dict, messages)]
        everything = json.dumps(inputs, ensure_ascii=False, default=str)
        mark = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in everything)

        def marked(message: Mapping) -> Mapping:
            content = message.get("content")
            if not isinstance(content, str):
                return message
            add = lambda hit: hit[0][0] + mark + hit[0][1:]  # noqa: E731
            return {**message, "content": self._special_pattern.sub(add, content)}

        messages = [marked(message) for message in messages]
        text = render_chat(self.chat_template, messages, add_generation_prompt, self.named)
        if mark not in text:
            return self._with_bos(self._ids(text))
        ids = []
        for piece in self._special_pattern.split(
            text
        ):  # the text between special tokens, and these
            if piece in self._special:
                ids.append(self._special[piece])
            elif piece:
                ids += self._ids(piece.replace(mark, ""), special=False)
        return self._with_bos(ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """Return the text of token ids.

        skip_special: leave special tokens out.
        continues: whether the ids continue a text. SentencePiece drops a space at the start
            of a text only.
        """
        decoder = StreamDecoder(self, skip_special, continues)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; no bytes for an id that only pads the vocabulary."""
        if id not in self._bytes:
            if id in self._added:
                self._bytes[id] = self._added[id]
            else:
                token = self.backend.id_to_token(id)
                self._bytes[id] = b"" if token is None else self._to_bytes(token)
        return self._bytes[id]

    def byte_counts(self, ids: Iterable[int]) -> list[int]:
        """Return the number of bytes that each token adds to the text; special tokens add 0.

        The text starts with the first id, as in `decode`. Unlike the decoded text, the counts
        are right where the ids start or end within a character.
        """
        decoder = StreamDecoder(self)
        return [len(decoder.data(id)) for id in ids]

    @cached_property
    def _special_pattern(self) -> re.Pattern:
        longest_first = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _ids(self, text: str, special: bool = True) -> list[int]:
        self.backend.encode_special_tokens = not special
        return self.backend.encode(text, add_special_tokens=False).ids

    def _with_bos(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise BadRequest("This checkpoint has no BOS token; pass add_bos=False.")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]


class StreamDecoder:
    """Decode token by token.

    `push` takes a token id and returns the characters that are complete now. `finish`
    returns the rest.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = tokenizer.drops_first_space and not continues

    def data(self, id: int) -> bytes:
        """Return the bytes that the next token adds."""
        if self.skip_special and id in self.tokenizer.special_ids:
            return b""
        data = self.tokenizer.token_bytes(id)
        if self._first and data:
            data, self._first = data.removeprefix(b" "), False
        return data

    def push(self, id: int) -> str:
        return self._utf8.decode(self.data(id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _byte_reader(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """Return how the bytes of a token are written, and whether decoding drops a first space."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    parts = {part["type"]: part for part in state.get("decoders", [state])}
    if "ByteLevel" in parts:
        # GPT-2's alphabet: a printable character for each byte.
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        values = {chr(byte): byte for byte in shown}
        values |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
        return lambda token: bytes(values[character] for character in token), False
    if "Metaspace" in parts:
        return _sentencepiece_bytes, parts["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in parts:
        return _sentencepiece_bytes, "Strip" in parts
    raise BadRequest(
        f"The tokenizer decodes by {', '.join(parts)}; labkit reads byte-level BPE and "
        "SentencePiece BPE. Run other models with labkit.lab.hf."
    )


def _sentencepiece_bytes(token: str) -> bytes:
    """Read "▁" as a space, and "<0x0A>" as one byte."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def render_chat(
    template: str,
    messages: Sequence[Mapping],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
) -> str:
    """Return the text of a conversation.

    `tokens` are special tokens that the template may name, such as bos_token. Raises
    BadRequest if the template is not valid Jinja or raises an error.
    """
    from jinja2 import TemplateError

    try:
        return _compiled(template).render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            **tokens,
        )
    except (TemplateError, TypeError, OverflowError, ValueError) as reason:
        raise BadRequest(f"The chat template raised an error: {reason}.") from reason


@lru_cache(maxsize=8)
def _compiled(template: str):
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(template)
    except TemplateError as reason:
        raise BadRequest(f"The chat template is not valid Jinja: {reason}.") from reason
