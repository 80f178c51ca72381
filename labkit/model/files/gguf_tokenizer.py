"""Rebuild the tokenizer of a GGUF file for the `tokenizers` library.

There are two kinds of tokenizer:

- "gpt2" is byte-level BPE. The file lists its merges and names the rule that splits a text
  before merging. The rules here are those of the hub's tokenizers of the same names.
- "llama" is SentencePiece BPE. The file lists a score per token and no merges. SentencePiece
  first merges the pair of neighbours that forms the token with the best score. This module
  lists every split of a token into two tokens as a merge, sorted by the score of the
  result. This gives the same order.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from labkit.errors import BadRequest
from labkit.model.files.gguf import GGUFFile
from labkit.model.tokenizer import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SMOLLM, _LLAMA3 = (r"\p{N}", _GPT2), (_WORDS % "{1,3}",)
PRE_TOKENIZERS = {  # name in the file -> patterns that split a text, applied in this order
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": (_WORDS % "",),
    "deepseek-r1-qwen": (_WORDS % "",),
    # llama.cpp's rule for a file that names none
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens in the file
_NAMES = {"bos": "bos", "eos": "eos", "eot": "eot", "unknown": "unk", "padding": "pad"}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Return the file's tokenizer with its special tokens, BOS rule and chat template.

    Raises BadRequest if labkit cannot rebuild this kind of tokenizer.
    """
    kind = file.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise BadRequest(
            f"{file.path.name} has a tokenizer of kind {kind!r}; labkit reads {', '.join(builders)}."
        )
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", [])
    backend, adds_bos = builders[kind](file, tokens)
    for kind_of_token, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, type in zip(tokens, types) if type == kind_of_token]
        backend.add_tokens([AddedToken(one, special=special, normalized=False) for one in chosen])
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id") for key, name in _NAMES.items()}
    ids = {name: id for name, id in found.items() if id is not None}
    named = {f"{name}_token": tokens[id] for name, id in ids.items() if id < len(tokens)}
    adds_bos = bool(file.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos" in ids
    if adds_bos:  # for other readers of tokenizer.json; `Tokenizer` uses `add_bos`
        bos = named["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    return Tokenizer(
        backend,
        bos_id=ids.get("bos"),
        eos_ids=[*dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids)],
        add_bos=adds_bos,
        chat_template=file.get("tokenizer.chat_template"),
        named=named,
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Backend, bool]:
    """Return the tokenizer, and whether it adds a BOS token if the file does not say."""
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise BadRequest(
            f"{file.path.name} splits text by the rule {name!r}; labkit knows "
            f"{', '.join(PRE_TOKENIZERS)}. Load the checkpoint's safetensors folder."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    llama3 = PRE_TOKENIZERS[name] is _LLAMA3
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=llama3))
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    if "qwen" in name:
        backend.normalizer = normalizers.NFC()
    return backend, llama3


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tuple[Backend, bool]:
    """Return the tokenizer, and True: it adds a BOS token if the file does not say."""
    scores = file.get("tokenizer.ggml.scores")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    before: list = [normalizers.Replace(" ", "▁")]
    after: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    # Like the first releases of these models, add a space at the start of the text and after
    # each special token.
    if file.get("tokenizer.ggml.add_space_prefix", True):
        before.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(before)
    backend.decoder = decoders.Sequence(after)
    return backend, True
