"""labkit's caches inside transformers' own `generate`.

    model = AutoModelForCausalLM.from_pretrained(...)
    model.generate(**inputs, past_key_values=LabCache(model, "int8"))     any name of labkit.cache.CACHES, or a maker

transformers' caches return whole keys and values, which a packed or evicted cache does not have. So `LabCache` marks what
it is given, and an attention of its own ("labkit", registered with transformers and set on the model) appends and
attends through the cache's contract; visibility is decided by positions, not by transformers' masks. Left padding, as
transformers does it, becomes rows of their own length. Beam search (reorder), assisted decoding (crop) and chunked
prefill work. It loses on speed against transformers' own cache where nothing is gained in memory: short contexts.
Architectures for which this cannot be right are refused by name: see `why_not`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from labkit.cache import KVCache, cache_maker
from labkit.errors import BadRequest
from labkit.plan.memory import KVShape, LayerKV

NAME = "labkit"


def why_not(model) -> str | None:
    """None where a LabCache gives this model's own answers, else one sentence that names the architecture."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    facts = (
        (model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False), "attends to an encoder"),
        (not getattr(model, "_supports_attention_backend", False), "does not let its attention be replaced"),
        (bool(kinds), f"has layers of another kind ({', '.join(sorted(kinds))})"),
        (hasattr(config, "layers_block_type") or hasattr(config, "ssm_cfg"), "mixes attention with state-space layers"),
        (getattr(config, "kv_lora_rank", None), "caches latents (MLA)"),
        (getattr(config, "attn_logit_softcapping", None), "caps its attention scores"),
        (sinks, "has a learned sink in each head"),
        (getattr(config, "alibi", False), "biases scores by distance (ALiBi)"),
        (getattr(config, "num_kv_shared_layers", 0), "shares caches between layers"),
        (getattr(config, "use_bidirectional_attention", False), "attends to the future"),
    )
    reason = next((words for wrong, words in facts if wrong), None)
    if reason is None:
        return None
    return f"{config.model_type} {reason}, so labkit's caches would change its answers; use transformers' own cache."


def kv_shape(model) -> KVShape:
    """What each layer of a transformers model stores."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = bool(window) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    return KVShape(tuple(LayerKV(kv_heads, head_dim, window if kind == "sliding_attention" else None) for kind in kinds))


class LabCache(Cache):
    """A labkit cache as transformers calls it. `kind`: a name of `labkit.cache.CACHES` but "none", or a maker of caches.

    Making one sets the model's attention to "labkit"; `model.set_attn_implementation("sdpa")` takes it back."""

    is_compileable = False

    def __init__(self, model, kind: str | Callable[..., KVCache] = "contiguous", capacity: int | None = None):
        if not isinstance(model, transformers.PreTrainedModel):
            raise BadRequest(f"A {type(model).__name__} was given; a LabCache serves a model of transformers.")
        reason, self.maker = why_not(model), cache_maker(kind)
        if reason is None and self.maker is None:
            reason = 'The cache "none" caches nothing; pass use_cache=False to generate instead.'
        if reason is not None:
            raise BadRequest(reason)
        model.set_attn_implementation(NAME)
        self.shape, self.capacity = kv_shape(model), capacity
        self.cache: KVCache | None = None  # made with the first tokens, whose batch, dtype and device it takes
        self.seen, self.pads = 0, None  # columns so far, and how many of each row are padding on the left
        self._unread: int | None = None  # the layer that stored its keys and has not attended to them yet
        super().__init__(layers=[_Layer(self) for _ in self.shape.layers])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self._unread is not None:
            raise BadRequest(f"Layer {self._unread} did not attend through this cache: it was made for another model, or the "
                             f'attention was changed since; make a LabCache of this model, whose attention is then "{NAME}".')
        self._unread = layer_idx
        key_states.labkit = (self, layer_idx)  # found again by `attention`, which gets this very object
        return key_states, value_states

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale) -> Tensor:
        """Append and attend: [B, H, T, D] in transformers' order of columns, left padding included."""
        self._unread, spec = None, self.shape.layers[layer]
        came, wanted = (keys.shape[0], *keys.shape[1::2]), (spec.num_kv_heads, spec.head_dim)
        if came[1:] != wanted or (self.cache is not None and came[0] != self.cache.batch):
            rows = came[0] if self.cache is None else self.cache.batch
            raise BadRequest(f"Layer {layer} brought {came[0]} rows of {came[1]} KV heads of {came[2]} numbers to a cache of {rows} "
                             f"rows of {wanted[0]} heads of {wanted[1]}; reset the cache, or use transformers' own.")
        if layer == 0:
            self._begin(keys, mask)
        first = self.seen == queries.shape[2] and any(self.pads)
        if first:
            queries, keys, values = (self._shift(t, 1) for t in (queries, keys, values))
        self.cache.append(layer, keys, values)
        out = self.cache.attend(layer, queries, scale)
        return self._shift(out, -1) if first else out

    def _begin(self, keys: Tensor, mask: Tensor | None) -> None:
        B, _, T, _ = keys.shape
        if self.cache is None:
            self.cache = self.maker(self.shape, batch=B, capacity=self.capacity, dtype=keys.dtype, device=keys.device)
        if self.seen == 0:
            self.pads = [0] * B if mask is None else (mask[:, :T].long().cumsum(1) == 0).sum(1).tolist()
        real = mask is None or all(row[pad:].all() for row, pad in zip(mask[:, : self.seen + T].bool(), self.pads))
        if not real or max(self.pads) >= T + self.seen:
            raise BadRequest("The attention mask hides tokens in the middle, on the right, or a whole row; pad on the left.")
        counts = [T - pad for pad in self.pads] if self.seen == 0 and any(self.pads) else None
        self.cache.advance(T, counts)
        self.seen += T

    def _shift(self, heads: Tensor, sign: int) -> Tensor:
        """Each row [N, T, D] moved left by its padding (1), or back (-1); what falls in is of no meaning."""
        return torch.stack([row.roll(-sign * pad, 1) for row, pad in zip(heads, self.pads)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # older: the positions themselves
        return self.seen + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, length: int) -> None:
        """Zero or less: remove so many tokens, at most all. More: keep so many (what older versions mean by it)."""
        keep = max(self.seen + length, 0) if length <= 0 else min(length, self.seen)
        if self.cache is not None and keep < self.seen:
            self.cache.rewind([max(keep - pad, 0) for pad in self.pads])
            self._unread = None
            self.seen = keep

    def reset(self) -> None:
        self.cache, self.seen, self.pads, self._unread = None, 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            rows = indices.tolist()
            self.cache.select(rows)
            self.pads = [self.pads[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.batch_select_indices(torch.arange(self.cache.batch).repeat_interleave(repeats))


class _Layer(CacheLayerMixin):
    """What transformers asks a layer for; all of it is answered by the whole cache."""

    is_sliding, is_compileable, is_croppable = False, False, True

    def __init__(self, whole: LabCache):
        super().__init__()
        self.whole, self.is_initialized = whole, True

    def lazy_initialization(self, *args) -> None:
        """Nothing: the cache is made by its first tokens."""

    def update(self, *args, **kwargs):
        raise NotImplementedError("LabCache.update answers for all layers")

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.whole.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.whole.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **rest):
    """transformers' attention interface: queries [B, H, T, D] -> ([B, T, H, D], no weights)."""
    marked = getattr(key, "labkit", None)
    if marked is None:
        raise BadRequest('This model attends by "labkit" without a LabCache; pass past_key_values=LabCache(model), or '
                         'model.set_attn_implementation("sdpa").')  # fmt: skip
    if softcap is not None or s_aux is not None:
        raise BadRequest(f"{type(module).__name__} caps scores or has learned sinks, which labkit's caches do not compute.")
    cache, layer = marked
    return cache.attend(layer, query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def padding_mask(batch_size=None, q_length=None, kv_length=None, attention_mask=None, **rest) -> Tensor | None:
    """The two-dimensional mask as it was given: which columns are padding. Who sees whom is the cache's business."""
    return attention_mask


transformers.AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
