"""What `labkit eval` scores: a model in a recipe, read through a KV format, in an arithmetic; loaded once for all tasks.

Weights are quantised and unpacked again, so that only their numbers differ; arithmetic is then float32, or the native
kernels' bfloat16 weights and float32 activations, which are about five times as fast and round every recipe alike. KL is
measured in float32, where rounding to bfloat16 is not part of it, unless asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from labkit.cli.answer import Steps, say
from labkit.errors import BadRequest

DTYPES = ("fp32", "bf16")


def load_reference(source: str, device: str = "cpu", reads_text: bool = True):
    """In float32: what is measured is the weights' change, not that of the arithmetic."""
    import torch

    from labkit.model.load import load_model

    loaded = load_model(source, dtype=torch.float32, device=device)
    if loaded.tokenizer is None and reads_text:
        raise BadRequest(f"model {source!r} has no tokenizer, so it cannot read a text; give a folder that has one")
    return loaded


@dataclass
class Subject:
    """The model that one command scores, as its options name it; loaded when first asked for."""

    source: str
    recipe: str | None
    method: str | None
    kv_format: str | None
    peer: str | None
    dtype: str | None
    device: str
    seed: int
    name: str | None = None
    _models: dict = field(default_factory=dict)
    _plain: object = None

    def check(self, tasks: list[str]) -> None:
        """Refuse what cannot be, before anything is loaded."""
        if self.method and not self.recipe:
            raise BadRequest(f"--method {self.method} quantises by a recipe and none was given; add for example --recipe int4_g64_zp")
        if self.peer and (self.recipe or self.kv_format):
            raise BadRequest(f"--peer {self.peer} is another library's model and takes no --recipe or --kv-format; leave those out")
        if self.peer and tasks != ["text"]:
            raise BadRequest(f"--peer {self.peer} is scored on text and not on {', '.join(tasks)}; ask for `labkit eval text`")
        if self.dtype not in (None, *DTYPES):
            raise BadRequest(f"--dtype {self.dtype!r} is unknown; choose from {', '.join(DTYPES)}")
        from labkit.plan.kv_formats import get_kv_format
        from labkit.quant.recipe import Recipe

        if self.recipe:
            Recipe.named(self.recipe)
        if self.kv_format:
            get_kv_format(self.kv_format)
        if self.peer:
            from labkit.bench import peers, quantized_peers

            peers.check([self.peer], quantized_peers.PACKAGES)

    @property
    def kv_name(self) -> str | None:
        if self.kv_format is None:
            return None
        from labkit.plan.kv_formats import get_kv_format

        return get_kv_format(self.kv_format).name

    def arithmetic(self, task: str) -> str:
        """fp32 or bf16. Without the native kernels, and on another device, float32: it is the exact one."""
        if self.dtype is not None or task == "text":
            return self.dtype or "fp32"
        from labkit.model.native_decoder import why_not

        return "bf16" if self.device == "cpu" and why_not(self.plain().config, "bf16") is None else "fp32"

    def settings(self, task: str) -> dict:
        """What a result file says of a run; another one's file is refused."""
        return {"recipe": self.recipe, "method": self.method, "kv_format": self.kv_name, "peer": self.peer,
                "dtype": self.arithmetic(task), "device": self.device}  # fmt: skip

    def plain(self):
        """The model as it is, in float32; a quantised file's numbers too are multiplied so."""
        if self._plain is None:
            from labkit.quant.unpack import unpack_model

            self._plain = unpack_model(load_reference(self.source, self.device))
            self.name = self._plain.name
        return self._plain

    def model(self, task: str):
        """What a task is scored on."""
        kind = self.arithmetic(task)
        if kind not in self._models:
            self._models[kind] = self._made(kind)
        return self._models[kind]

    def _made(self, kind: str):
        loaded = self.plain()
        if self.peer:
            from labkit.bench import peers, quantized_peers

            return quantized_peers.quantized_peer(self.peer, peers.folder_of(self.source), self.device)
        if self.recipe:
            from labkit.cli.judge import quantize_in_place
            from labkit.quant.recipe import Recipe
            from labkit.quant.unpack import unpack_model

            loaded = load_reference(self.source, self.device)  # in place, in a model loaded once more: the reference keeps its own weights
            quantize_in_place(loaded, Recipe.named(self.recipe), self.method, self.seed)
            loaded = unpack_model(loaded)
        return self._in_arithmetic(loaded, kind)

    def _in_arithmetic(self, loaded, kind: str):
        if kind == "fp32":
            return loaded
        from labkit.model.native_decoder import accelerate, why_not

        reason = why_not(loaded.config, "bf16") if self.device == "cpu" else f"The native kernels do not run on {self.device}."
        if reason is None:
            return accelerate(loaded, "bf16")
        import torch

        say(f"bf16 in PyTorch: {reason}")
        return (load_reference(self.source, self.device) if loaded is self._plain else loaded).to(torch.bfloat16)

    def reader(self) -> dict:
        """How tasks read a prompt through the KV format: in chunks of 16, as generation would have."""
        from labkit.evals.through_cache import ThroughCache

        how = ThroughCache(self.kv_format)
        return {"make_cache": how.maker(self.plain()), "chunk": how.chunk}

    def text_task(self, limit: int | None, slices: tuple[str, ...]):
        """`text`, with the unchanged model as reference where something is changed."""
        from labkit.evals import through_cache
        from labkit.evals.reading import Remembered
        from labkit.evals.text_task import Text, TextThroughCache

        changed = self.recipe or self.peer
        plain = self.plain()
        if self.kv_format:
            how = through_cache.ThroughCache.up_to(self.kv_format, limit)
            passages = through_cache.passages(plain.tokenizer, limit, how.length, slices)
            return TextThroughCache(how, passages, Remembered(plain, passages, Steps()) if changed else None)
        passages = Text(plain.tokenizer, limit, slices).items()
        say(f"{len(passages)} passages, {sum(len(passage.tokens) for passage in passages):,} tokens")
        if not changed:
            return Text(plain.tokenizer, limit, slices)
        reference = self._in_arithmetic(plain, self.arithmetic("text"))  # so that only the weights differ
        return Text(plain.tokenizer, limit, slices, reference=Remembered(reference, passages, Steps()))
