"""The model that an evaluation scores, with its recipe, KV format and arithmetic.

    subject = ModelUnderTest("default", recipe="int4_g64_zp")
    task = subject.task("text", limit=2048)             with the unchanged model as its reference
    scores = run(task, subject.model("text"))

Weights are quantized and unpacked again, so that only their numbers differ. The arithmetic is
fp32, or bf16: the native kernels with bfloat16 weights and float32 activations. They are about five
times as fast and round every recipe alike. KL is measured in fp32 unless `dtype` is bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import labkit.lab.stack.open as opening
from labkit.errors import BadRequest, OneOf, OrNone, check_fields
from labkit.files import say
from labkit.lab.evals import make_task
from labkit.lab.stack.quantize import quantize_in_place
from labkit.plan.kv_formats import get_kv_format
from labkit.quant.linear import unpack_model
from labkit.quant.recipe import Recipe


@dataclass
class ModelUnderTest:
    """The model to evaluate, described by the options of `labkit eval`.

    It is loaded on first use.

    peer: another library's quantized model.
    dtype: fp32 or bf16. None means fp32 for the task text. For other tasks it means bf16 if
        the native kernels run here, else fp32.
    seed: chooses the calibration text.
    """

    source: str = "default"
    recipe: str | None = None
    method: str | None = None
    kv_format: str | None = None
    peer: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    seed: int = 0
    progress: Callable[[str], object] = lambda line: None
    _models: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        check_fields(self, dtype=OrNone(OneOf("fp32", "bf16")))
        if self.method and not self.recipe:
            raise BadRequest(f"--method {self.method} needs a recipe; add --recipe int4_g64_zp.")
        if self.peer and (self.recipe or self.kv_format):
            raise BadRequest(f"--peer {self.peer} takes no --recipe and no --kv-format.")
        if self.recipe:
            Recipe.named(self.recipe)
        if self.kv_format:
            self.kv_format = get_kv_format(self.kv_format).name

    def arithmetic(self, task: str) -> str:
        """Return fp32 or bf16, the arithmetic of a task."""
        if self.dtype is not None or task == "text":
            return self.dtype or "fp32"
        return "fp32" if self._not_native(self.plain) else "bf16"

    def settings(self, task: str) -> dict[str, str | None]:
        """Return the settings of a run that a result file records."""
        names = ("recipe", "method", "kv_format", "peer", "device")
        return {name: getattr(self, name) for name in names} | {"dtype": self.arithmetic(task)}

    @cached_property
    def plain(self):
        """The unchanged model in float32. The weights of a quantized file are unpacked."""
        return unpack_model(self._load())

    def model(self, task: str):
        """Return the model that a task is scored on."""
        kind = self.arithmetic(task)
        if kind not in self._models:
            self._models[kind] = self._make(kind)
        return self._models[kind]

    def task(self, name: str, limit: int | None = None, **options):
        """Return a task for this model.

        `text` gets the unchanged model as its reference if the weights or the KV format change.
        Other tasks read their prompts through the KV format in chunks, as generation does.
        """
        from labkit.lab.evals.through_cache import ThroughCache

        if name != "text":
            if self.kv_format:
                how = ThroughCache(self.kv_format)
                options["reader"] = {"make_cache": how.maker(self.plain), "chunk": how.chunk}
            return make_task(name, self.model(name), limit, **options)
        through = ThroughCache.up_to(self.kv_format, limit) if self.kv_format else None
        task = make_task("text", self.plain, limit, through=through, **options)
        if not (self.recipe or self.peer):
            return task
        reference = self.plain
        if through is None:  # use the same arithmetic, so that only the weights differ
            reference = self._in_arithmetic(self.plain, self.arithmetic("text"))
        return task.against(reference, self.progress)

    def _load(self):
        """Load the model in float32, so that only the change of its weights is measured."""
        model = opening.load_model(self.source, device=self.device)
        if model.tokenizer is None:
            raise BadRequest(f"Model {self.source!r} has no tokenizer; give a folder with one.")
        return model

    def _make(self, kind: str):
        if self.peer:
            from labkit.lab.bench import peers

            return peers.quantized_peer(self.peer, peers.folder_of(self.source), self.device)
        if not self.recipe:
            return self._in_arithmetic(self.plain, kind)
        model = self._load()  # `plain` keeps its own weights
        recipe = Recipe.named(self.recipe)
        # PyTorch's int4 kernel would round the scales of the format to bf16; "plain" does not.
        options = {"kernel": "plain", "progress": self.progress}
        quantize_in_place(model, recipe, self.method, seed=self.seed, **options)
        return self._in_arithmetic(unpack_model(model), kind)

    def _in_arithmetic(self, model, kind: str):
        if kind == "fp32":
            return model
        from labkit.model.native.decoder import accelerate

        reason = self._not_native(model)
        if reason is None:
            return accelerate(model, "bf16")
        say(f"bf16 in PyTorch: {reason}")
        return (copy.deepcopy(model) if model is self.plain else model).to(torch.bfloat16)

    def _not_native(self, model) -> str | None:
        """Return why the native kernels do not run this model, or None if they do."""
        from labkit.model.native.decoder import unsupported_reason

        if self.device != "cpu":
            return f"The native kernels do not run on {self.device}."
        return unsupported_reason(model.config, "bf16")
