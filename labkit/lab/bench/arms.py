"""The arms of `bench decode` and `bench prefill`: labkit in each recipe, and peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from labkit.errors import Whole, check_fields
from labkit.formats import DTYPES, get_recipe, torch_dtype
from labkit.generate import generate
from labkit.lab.bench import peers
from labkit.lab.bench.explain import budget
from labkit.lab.bench.harness import Arm, Progress, Run, check_arms, compare, silent
from labkit.lab.bench.operators import Sizes, measure_operators
from labkit.lab.measure.bandwidth import read_bandwidth, using_threads
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import predict
from labkit.lab.stack.open import open_model
from labkit.model.native.decoder import NativeDecoder
from labkit.plan.time import step_cost

TEXT = (
    "The quick answer to a slow question is often a measurement. Before the engineers changed a single line, "
    "they wrote down what they expected to see, and why; then they ran it twice, in turns, on the same machine. "
)


@dataclass(frozen=True)
class Load:
    """The settings of one bench: its arms, its tokens, and how often each arm runs.

    If `predicted` is true, operators are timed first, and each arm's times are
    predicted from them. Raises BadRequest for no arms, arms named twice, counts below
    1, unknown recipes, and peers that are not installed.
    """

    formats: Sequence[str] = ("fp32", "bf16")
    peers: Sequence[str] = ()
    model: str = "default"
    prompt_tokens: int = 128
    new_tokens: int = 128
    repeats: int = 3
    threads: int | None = None
    device: str = "cpu"
    kernels: str = "auto"
    predicted: bool = True

    def __post_init__(self):
        check_fields(self, prompt_tokens=Whole(1), new_tokens=Whole(1), repeats=Whole(1))
        check_arms([*self.formats, *self.peers])
        for name in self.formats:
            get_recipe(name)
        peers.check(self.peers)


@dataclass(frozen=True)
class Measured:
    """The arms of a load, their runs, and the prompt and settings that they share."""

    arms: list[Arm]
    runs: dict[str, list[Run]]
    prompt: list[int]
    bandwidth: float  # bytes per second
    facts: dict  # the settings and the machine, as keys of the result


def measure(load: Load, on_progress: Progress = silent) -> Measured:
    """Load all arms and run them interleaved on one prompt."""
    with using_threads(load.threads) as threads:
        bandwidth = read_bandwidth(load.device, threads)
        arms, prompt = build(load, threads, on_progress)

        def on_round(i: int) -> None:
            on_progress(f"round {i} of {load.repeats}")

        counts = (load.new_tokens, load.repeats)
        runs = compare(arms, prompt, *counts, load.device, on_round)
    facts = asdict(load) | {"threads": threads, "bandwidth_gb_s": bandwidth / 1e9}
    return Measured(arms, runs, prompt, bandwidth, facts)


def build(load: Load, threads: int, on_progress: Progress) -> tuple[list[Arm], list[int]]:
    """Return all arms, with their models loaded, and the prompt that every arm gets."""
    arms: list[Arm] = []
    for name in load.formats:
        on_progress(f"loading {name}")
        model = open_model(load.model, name, device=load.device, kernels=load.kernels)
        arms.append(labkit_arm(model, name, load, threads))
    if not arms:  # the prompt needs a tokenizer
        model = open_model(load.model, "bf16", device=load.device, kernels="torch")
    prompt = prompt_ids(model, load.prompt_tokens)
    for name in load.peers:
        on_progress(f"loading {name}")
        context = load.prompt_tokens + load.new_tokens
        arms.append(peers.peer_arm(name, load.model, context, threads, load.device))
    return arms, prompt


def prompt_ids(model, count: int) -> list[int]:
    """Return `count` token ids of plain prose; without a tokenizer, consecutive ids."""
    if model.tokenizer is None:
        return [i % model.config.vocab_size for i in range(count)]
    ids = model.tokenizer.encode(TEXT)
    return (ids * (count // len(ids) + 1))[:count]


def labkit_arm(model, recipe: str, load: Load, threads: int | None = None) -> Arm:
    """Return the arm of labkit's own loop.

    Its times are predicted from operators if the model runs on PyTorch in fp32, bf16 or
    fp16, and is not a mixture of experts.
    """
    shape, name = resolve(model.config), get_recipe(recipe).name
    kv_format = name if name in DTYPES else "bf16"  # packed weights go with a bf16 cache
    past = load.prompt_tokens + load.new_tokens // 2
    cost = step_cost(shape, 1, 1, past, recipe, kv_format)
    native = isinstance(model, NativeDecoder)
    ttft_ms = tpot_ms = None
    if load.predicted and name in DTYPES and not native and not shape.num_experts:
        sizes = Sizes.up_to(load.prompt_tokens, 1)
        where = {"device": load.device, "threads": threads}
        times = measure_operators(shape, torch_dtype(name), sizes=sizes, **where)
        tokens = {"prompt_tokens": load.prompt_tokens, "new_tokens": max(load.new_tokens, 2)}
        prediction = predict(shape, times, **tokens)
        ttft_ms, tpot_ms = 1000 * prediction.ttft_s, 1000 * prediction.tpot_s
    note = f"native kernels, {model.instruction_set}" if native else "PyTorch's operators"
    explain = partial(budget, model, recipe, shape, kv_format=kv_format)
    return Arm(recipe, generate_run(model), cost.bytes, ttft_ms, tpot_ms, note, explain)


def generate_run(model):
    """Return an arm's `run` that generates with labkit and never stops early."""

    def run(prompt: Sequence[int], count: int) -> Run:
        done = generate(model, list(prompt), max_new_tokens=count, end_ids=())
        return Run(done.tokens, done.token_times_s)

    return run
