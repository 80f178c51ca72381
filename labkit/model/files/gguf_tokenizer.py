"""Rebuild the tokenizer inside a GGUF file for the `tokenizers` library. There are two kinds.

"gpt2": byte-level BPE. Its merges are listed, and so is the name of the rule that cuts text
into pieces before merging; the rules are those of the hub's tokenizers of the same names.

"llama": SentencePiece BPE. Pieces have scores and no merges are listed: of all neighbours,
the pair that forms the piece with the best score merges first. Every split of a piece into
two pieces is such a merge, so merges listed by the score of their result give the same order.
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
PRE_TOKENIZERS = {  # name in the file -> cuts, one after the other
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": (_WORDS % "",),
    "deepseek-r1-qwen": (_WORDS % "",),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),  # llama.cpp's, where none is named
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The file's tokenizer with its special tokens, BOS rule and chat template; other kinds are refused by name."""
    kind = file.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise BadRequest(
            f"{file.path.name} holds a tokenizer of kind {kind!r}: labkit reads {', '.join(builders)}."
        )
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    types = types or [_NORMAL] * len(tokens)
    backend, adds_bos = builders[kind](file, tokens)
    for kind_of_token, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, type in zip(tokens, types) if type == kind_of_token]
        backend.add_tokens(
            [AddedToken(token, special=special, normalized=False) for token in chosen]
        )
    ids = {
        n: file.get(f"tokenizer.ggml.{n}_token_id")
        for n in ("bos", "eos", "eot", "unknown", "padding")
    }
    named = {
        f"{name}_token": tokens[id]
        for name, id in ids.items()
        if id is not None and id < len(tokens)
    }
    named = {
        {"unknown_token": "unk_token", "padding_token": "pad_token"}.get(n, n): t
        for n, t in named.items()
    }
    adds_bos = bool(file.get("tokenizer.ggml.add_bos_token", adds_bos)) and ids["bos"] is not None
    if adds_bos:  # for other readers of the tokenizer.json; ours asks `add_bos`
        bos = named["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_ids=[*dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None)],
        add_bos=adds_bos,
        chat_template=file.get("tokenizer.chat_template"),
        named=named,
    )


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Backend, bool]:
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise BadRequest(
            f"{file.path.name} cuts text by the rule {name!r}: labkit knows {', '.join(PRE_TOKENIZERS)}; "
            "take the checkpoint's safetensors folder, whose tokenizer.json states its rule."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    llama3 = PRE_TOKENIZERS[name] is _LLAMA3
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=llama3))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    if "qwen" in name:
        backend.normalizer = normalizers.NFC()
    return backend, llama3


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tuple[Backend, bool]:
    scores = file.get("tokenizer.ggml.scores")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [
        (scores[id], token[:cut], token[cut:])
        for token, id in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: -merge[0])
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [(left, right) for _, left, right in merges]
    backend = Backend(
        models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    # As the first releases of these models did: a space before the text, and before what follows a special token.
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True
