"""Use labkit's caches inside transformers' own `generate`.

    model = AutoModelForCausalLM.from_pretrained(...)
    model.generate(**inputs, past_key_values=LabCache(model, "int8"))

The second argument is a name in `labkit.cache.CACHES` or a cache maker.

transformers' caches return whole keys and values, which a packed or evicted cache does
not have. So `LabCache.update` only marks the keys. The attention function "labkit",
which is registered with transformers and set on the model, appends them and attends
through labkit's cache. Positions decide what is visible, not transformers' masks. Left
padding is removed, so rows may have different lengths. Beam search (reorder), assisted
decoding (crop) and chunked prefill work. `unsupported_reason` names the architectures
whose answers a LabCache would change.

When it loses: at short contexts it is slower than transformers' own cache and saves
little memory.
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
from labkit.plan import hub_config
from labkit.plan.kv import KVShape

NAME = "labkit"


def unsupported_reason(model) -> str | None:
    """Return why a LabCache would change this model's answers, or None."""
    config = model.config.get_text_config(decoder=True)

    def has(*names: str) -> bool:
        return any(getattr(config, name, None) for name in names)

    kinds = {*(getattr(config, "layer_types", None) or ())}
    kinds -= {"full_attention", "sliding_attention"}
    reasons = {
        "attends to an encoder": model.config.is_encoder_decoder or has("add_cross_attention"),
        "has a fixed attention": not getattr(model, "_supports_attention_backend", False),
        f"has layers of another kind ({', '.join(sorted(kinds))})": kinds,
        "mixes attention with state-space layers": has("layers_block_type", "ssm_cfg"),
        "caches latents (MLA)": has("kv_lora_rank"),
        "caps its attention scores": has("attn_logit_softcapping"),
        "has learned sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        "biases scores by distance (ALiBi)": has("alibi"),
        "shares caches between layers": has("num_kv_shared_layers"),
        "attends to the future": has("use_bidirectional_attention"),
    }
    for reason, applies in reasons.items():
        if applies:
            return f"{config.model_type} {reason}; use transformers' own cache for it."
    return None


def kv_shape(model) -> KVShape:
    """Return what each layer of a transformers model caches."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return hub_config.kv_shape(hub_config.HubConfig(config, known=False))


class LabCache(Cache):
    """A labkit cache with the interface of transformers.

    `kind`: a name in `labkit.cache.CACHES` except "none", or a cache maker. Making a
    LabCache sets the model's attention to "labkit";
    `model.set_attn_implementation("sdpa")` resets it. Raises BadRequest for models that
    it cannot serve (`unsupported_reason`).
    """

    is_compileable = False

    def __init__(
        self, model, kind: str | Callable[..., KVCache] = "contiguous", capacity: int | None = None
    ):
        if not isinstance(model, transformers.PreTrainedModel):
            raise BadRequest(f"A {type(model).__name__} is not a model of transformers; give one.")
        reason, self.maker = unsupported_reason(model), cache_maker(kind)
        if reason is None and self.maker is None:
            reason = 'The cache "none" stores nothing; pass use_cache=False to generate instead.'
        if reason is not None:
            raise BadRequest(reason)
        model.set_attn_implementation(NAME)
        self.shape, self.capacity = kv_shape(model), capacity
        self.reset()
        super().__init__(layers=[_Layer(self) for _ in self.shape.layers])

    def reset(self) -> None:
        self.cache: KVCache | None = None  # made by the first tokens, in their dtype and device
        self.seen = 0  # columns so far
        self.pads: list[int] = []  # of each row: the number of padded columns on the left
        self._unread: int | None = None  # the layer whose keys are marked but not yet cached

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Mark the keys; `attention` receives the same tensor and finds the cache on it."""
        if self._unread is not None:
            what = f"Layer {self._unread} did not attend through this cache"
            raise BadRequest(f"{what}; make a new LabCache of the model that generates.")
        self._unread = layer_idx
        key_states.labkit = (self, layer_idx)
        return key_states, value_states

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale
    ) -> Tensor:
        """Append keys and values; return the output [B, H, T, D], left padding included."""
        self._unread, spec = None, self.shape.layers[layer]
        B, K, T, D = keys.shape
        rows = B if self.cache is None else self.cache.batch
        if (B, K, D) != (rows, spec.num_kv_heads, spec.head_dim):
            cached = (rows, spec.num_kv_heads, spec.head_dim)
            shapes = f"{(B, K, D)} for a cache of {cached} rows, KV heads and head_dim"
            raise BadRequest(f"Layer {layer} has keys of shape {shapes}; reset the cache.")
        if layer == 0:
            self._begin(keys, mask)
        first = self.seen == T and any(self.pads)
        if first:
            queries, keys, values = (self._shift(t, 1) for t in (queries, keys, values))
        self.cache.append(layer, keys, values)
        out = self.cache.attend(layer, queries, scale)
        return self._shift(out, -1) if first else out

    def _begin(self, keys: Tensor, mask: Tensor | None) -> None:
        """Count the new columns and the padding; make the cache for the first ones."""
        B, _, T, _ = keys.shape
        if self.cache is None:
            options = {"capacity": self.capacity, "dtype": keys.dtype, "device": keys.device}
            self.cache = self.maker(self.shape, batch=B, **options)
        if mask is None:
            mask = torch.ones(B, self.seen + T)
        mask = mask[:, : self.seen + T].bool()
        if self.seen == 0:
            self.pads = (mask.long().cumsum(1) == 0).sum(1).tolist()
        real = all(row[pad:].all() for row, pad in zip(mask, self.pads))
        if not real or max(self.pads) >= T + self.seen:
            raise BadRequest("The mask hides more than left padding; pad on the left only.")
        counts = [T - pad for pad in self.pads] if self.seen == 0 and any(self.pads) else None
        self.cache.advance(T, counts)
        self.seen += T

    def _shift(self, heads: Tensor, sign: int) -> Tensor:
        """Move each row [N, T, D] left by its padding (1) or back (-1)."""
        return torch.stack([row.roll(-sign * pad, 1) for row, pad in zip(heads, self.pads)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length, layer_idx: int = 0) -> tuple[int, int]:
        # Older versions of transformers give the positions themselves.
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.seen + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, length: int) -> None:
        """Remove -length tokens if `length` is at most 0, else keep `length` tokens."""
        keep = max(self.seen + length, 0) if length <= 0 else min(length, self.seen)
        if self.cache is not None and keep < self.seen:
            self.cache.rewind([max(keep - pad, 0) for pad in self.pads])
            self._unread = None
            self.seen = keep

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            rows = indices.tolist()
            self.cache.select(rows)
            self.pads = [self.pads[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.cache.batch if self.cache else 0)
        self.batch_select_indices(rows.repeat_interleave(repeats))


class _Layer(CacheLayerMixin):
    """One layer of a LabCache for transformers; it forwards every call to the LabCache."""

    is_sliding, is_compileable, is_croppable = False, False, True

    def __init__(self, whole: LabCache):
        super().__init__()
        self.whole, self.is_initialized = whole, True

    def lazy_initialization(self, *args) -> None:
        """Do nothing; the LabCache makes the cache when it gets the first tokens."""

    def update(self, *args, **kwargs):
        raise NotImplementedError("A layer has no update; call LabCache.update.")

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.whole.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.whole.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **rest
):
    """Attend for transformers: queries [B, H, T, D] -> ([B, T, H, D], no weights)."""
    cache, layer = getattr(key, "labkit", (None, None))
    if cache is None:
        fix = 'pass past_key_values=LabCache(model), or call model.set_attn_implementation("sdpa")'
        raise BadRequest(f'The attention "{NAME}" needs a LabCache; {fix}.')
    if softcap is not None or s_aux is not None:
        name = type(module).__name__
        raise BadRequest(f"{name} caps scores or has sinks; use transformers' own cache.")
    out = cache.attend(layer, query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size=None, q_length=None, kv_length=None, attention_mask=None, **rest
) -> Tensor | None:
    """Return the two-dimensional mask unchanged; it marks the columns of padding."""
    return attention_mask


transformers.AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
