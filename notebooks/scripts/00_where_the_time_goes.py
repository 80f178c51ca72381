# ---
# jupyter:
#   jupytext:
#     formats: notebooks//ipynb,notebooks/scripts//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Where the time goes
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/00_where_the_time_goes.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/00_where_the_time_goes.py)
# <!-- /badges -->
#
# **The question.** Between your question and the last word of the answer, what does the
# machine do, and what keeps it from doing it faster?
#
# **You will be able to**
#
# - tell prefill from decode, and say what limits each on your machine;
# - place a model under a roofline, and say from which batch on it changes sides;
# - predict the time to the first token and the time per token after it, and check them;
# - turn seconds into money.
#
# | | |
# |---|---|
# | Time | 20 minutes reading, 2 minutes running at `quick`, 25 minutes of exercises |
# | Memory | 2 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | nothing |

# %% tags=["bootstrap"]
# The same first cell in every notebook: installs labkit if it is missing.
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import gettempdir

if not (find_spec("labkit") and find_spec("labkit_course")):
    folders = [Path.cwd(), *Path.cwd().parents]
    found = [str(p) for p in folders if (p / "labkit/__init__.py").exists()][:1]
    source = ["-e", *found] if found else ["git+https://github.com/labkit-lab/labkit"]
    sys.path[:0] = [*found, *(f"{f}/notebooks" for f in found)]
    keep = {"torch", "torchvision", "numpy"}  # as they are: they may be in use
    have = {d.metadata["Name"]: d.version for d in distributions()}
    pins = Path(gettempdir(), "labkit-constraints.txt")
    pins.write_text("".join(f"{n}=={v}\n" for n, v in have.items() if n in keep))
    command = [sys.executable, "-m", "pip", "install", "-c", str(pins), *source]
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True) as pip:
        for line in pip.stdout:
            print(line, end="")
    assert pip.returncode == 0, "pip failed; its message above says why"
from labkit_course.start import begin

begin()

# %% tags=["parameters"]
scale: str = "quick"  # quick | standard | full
model: str = "default"  # a name, a hub id or a folder
device: str = "cpu"  # cpu | cuda
threads: int = 0  # 0: as many as torch takes by itself
price_per_hour: float = 0.10  # of this machine, in any currency

# %%
import torch

from labkit import load_model, stream
from labkit.generate import generate
from labkit.lab.bench.operators import Sizes, measure_operators
from labkit.lab.measure.bandwidth import flops, read_bandwidth
from labkit.lab.plan.memory import resolve
from labkit.lab.plan.operator_times import predict
from labkit.plan.time import compute_bound_batch, money_per_million_tokens, step_cost
from labkit_course.checks import where_time_goes as exercises
from labkit_course.experiments.serving_grid import Setting, serve
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import bar_plot, prediction_plot, roofline_plot
from labkit_course.show.tables import table
from labkit_course.show.widgets import slider

# %%
if threads:
    torch.set_num_threads(threads)
decoder = load_model(model, device=device)
shape = resolve(decoder.config)
print(f"{decoder.name}: {shape.parameters:,} weights in float32")

# %% [markdown]
# ## Two phases
#
# The model reads the prompt in one pass and gives the first token: *prefill*. Then it
# gives one token a pass, each fed back in: *decode*. Two times describe what a user
# feels:
#
# - **TTFT**, time to first token: how long nothing happens;
# - **TPOT**, time per output token: how fast the text then flows.

# %%
question = decoder.tokenizer.chat("Why is the sky blue? Answer in one sentence.")
print("".join(token.text for token in stream(decoder, question, max_new_tokens=40)))

# %%
answer = generate(decoder, question, max_new_tokens=40)
gaps = [
    later - earlier
    for earlier, later in zip(answer.token_times_s, answer.token_times_s[1:])
]
print(f"prompt of {len(question)} tokens, TTFT {answer.ttft_s * 1000:.0f} ms")
print(
    f"{len(answer.tokens)} tokens, TPOT {answer.tpot_s * 1000:.0f} ms, "
    f"each between {min(gaps) * 1000:.0f} and {max(gaps) * 1000:.0f} ms"
)
print(
    f"prefill went through {len(question) / answer.ttft_s:.0f} tokens a second, "
    f"decode through {1 / answer.tpot_s:.0f}"
)

# %% [markdown]
# Prefill goes through its tokens several times faster than decode, on the same machine
# with the same weights. Why?
#
# ## Memory and arithmetic
#
# A pass does two things: it *reads* bytes (all weights, and the cache), and it
# *computes* with them. For each weight and token it does one multiplication and one
# addition. So:
#
# - decode reads each weight, 4 bytes in float32, for 2 operations;
# - a prefill of *T* tokens reads each weight once, too, but has 2 · *T* operations for
#   it.
#
# Operations per byte are the *arithmetic intensity*. We count them from the shapes.


# %%
def cost(batch=1, tokens=1, past=0):
    return step_cost(shape, batch, tokens, past, recipe="fp32", kv_format="fp32")


PASSES = {
    "decode, batch 1": cost(past=64),
    "decode, batch 4": cost(batch=4, past=64),
    "decode, batch 16": cost(batch=16, past=64),
    "prefill, 256 tokens": cost(tokens=256),
}
table(
    [
        {
            "pass": name,
            "weights read": c.weight_bytes,
            "cache moved": c.kv_bytes,
            "operations [GFLOP]": c.operations / 1e9,
            "intensity [FLOP/B]": c.intensity,
        }
        for name, c in PASSES.items()
    ],
    units={"weights read": "bytes", "cache moved": "bytes"},
)

# %% [markdown]
# The weights read are nearly the same in all four rows. What differs is how much is
# done with them.
#
# ## This machine
#
# How fast can it read, and how fast can it compute? Both are measured here: reading,
# with a buffer much larger than the processor's caches; arithmetic, with a large matrix
# product.

# %%
bandwidth = read_bandwidth(device)
arithmetic = flops("float32", device)
ridge = arithmetic / bandwidth
turns_at = compute_bound_batch(shape, bandwidth, arithmetic, 64, "fp32", "fp32")
print(f"reads {bandwidth / 1e9:.1f} GB/s, computes {arithmetic / 1e9:.0f} GFLOP/s")
print(f"ridge: {ridge:.1f} FLOP/B. Arithmetic limits decode from batch {turns_at} on.")

# %% [markdown]
# Below the ridge, memory is the limit: the arithmetic units wait for bytes. Above it,
# arithmetic is. That is the *roofline*: no pass can be faster than
#
# $$\text{seconds} \ge \max\left(\frac{\text{bytes}}{\text{bandwidth}},
# \frac{\text{operations}}{\text{FLOP/s}}\right)$$

# %% [markdown]
# ## Predict, then measure
#
# The roofline is a bound. For a prediction we also need how well each operator does at
# its size. `measure_operators` times them one by one on random matrices of this model's
# shapes: the matrix products, attention, the small operators between, the product with
# the vocabulary. The model is not run.

# %%
ONE, MANY = ((1, 16), (1, 64), (1, 256)), ((4, 64), (16, 16))
LARGER = ((1, 1024), (4, 256), (16, 64))
SIZES = {
    "quick": (ONE + MANY, 3, 12),
    "standard": (ONE + MANY + LARGER, 5, 24),
    "full": (ONE + MANY + LARGER + ((32, 128), (64, 64)), 9, 64),
}
pairs, repeats, new_tokens = SIZES[scale]
settings = [Setting(batch, prompt_tokens) for batch, prompt_tokens in pairs]
times = measure_operators(
    shape,
    device=device,
    sizes=Sizes.up_to(
        rows=max(batch * prompt_tokens for batch, prompt_tokens in pairs),
        batch=max(batch for batch, _ in pairs),
    ),
)
expected = predict(shape, times, prompt_tokens=64, new_tokens=new_tokens)
print(
    f"predicted for one prompt of 64 tokens: TTFT {expected.ttft_s * 1000:.0f} ms, "
    f"TPOT {expected.tpot_s * 1000:.1f} ms"
)

# %%
PARTS = {
    "products": "products of the layers",
    "head": "product with the vocabulary",
    "attention": "attention",
    "glue": "norms, rotation, …",
    "step": "the rest",
}
fig, ax = canvas(height=2.6)
bar_plot(
    ax,
    {words: expected.parts_s[part] * 1000 for part, words in PARTS.items()},
    xlabel="predicted time in one decode step [ms]",
)
figure(
    fig,
    "decode_parts",
    alt="Bars of the predicted time of one decode step by kind of operator. The matrix "
    "products of the layers take most of it; the product with the vocabulary follows.",
    caption=f"Computed from operator times; {decoder.name}, float32, batch 1, "
    f"64 tokens in the cache, threads: {torch.get_num_threads()}, {device}.",
)

# %% [markdown]
# Now the model itself: several batches and prompt lengths, in turns.

# %%
served = serve(decoder, shape, times, settings, new_tokens=new_tokens, repeats=repeats)
rows = [
    {
        "batch × prompt": str(one.setting),
        "TTFT predicted": one.predicted.ttft_s,
        "TTFT measured": one.ttft.median_s,
        "TPOT predicted": one.predicted.tpot_s,
        "TPOT measured": one.tpot.median_s,
        "tokens out": one.setting.batch / one.tpot.median_s,
    }
    for one in served
]
units = {key: "ms" for key in rows[0] if "T" in key}
table(rows, units={**units, "tokens out": "tok/s"})

# %%
fig, ax = canvas(width=5.2, height=4.2)
prediction_plot(
    ax,
    {
        "TTFT": [(one.predicted.ttft_s, one.ttft.median_s) for one in served],
        "TPOT": [(one.predicted.tpot_s, one.tpot.median_s) for one in served],
    },
    unit="ms",
    scale=1e3,
)
figure(
    fig,
    "predicted_measured",
    alt="Measured over predicted times, on logarithmic axes, for time to first token "
    "and time per output token of several settings, beside the diagonal of perfect "
    "guesses.",
    caption=f"Median of n = {repeats} each, float32; the grey band is 15 % either way.",
)

# %% [markdown]
# Points above the band took longer than predicted. The usual reasons: another program
# used the memory meanwhile, the processor slowed down when warm, or a pass is so short
# that Python's own share shows. Run the cell again before you believe any of them.
#
# ## The roofline, with the model on it


# %%
def reached(one, phase):
    batch, tokens = one.setting.batch, one.setting.prompt_tokens
    if phase == "prefill":
        c = cost(batch, tokens)
        return c.intensity, c.operations / one.ttft.median_s
    c = cost(batch, past=tokens + new_tokens // 2)
    return c.intensity, c.operations / one.tpot.median_s


by_setting = {(one.setting.batch, one.setting.prompt_tokens): one for one in served}
dots = {
    "decode, batch 1": reached(by_setting[1, 64], "decode"),
    "decode, batch 4": reached(by_setting[4, 64], "decode"),
    "decode, batch 16": reached(by_setting[16, 16], "decode"),
    "prefill, 256 tokens": reached(by_setting[1, 256], "prefill"),
}

# %%
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def draw_roofline(batch):
    fig, ax = canvas(height=4.0)
    c = cost(batch, past=64)
    seconds = c.roofline_s(bandwidth, arithmetic)
    bound = {f"bound, batch {batch}": (c.intensity, c.operations / seconds)}
    roofline_plot(
        ax,
        bandwidth,
        arithmetic,
        dots,
        bounds=bound,
        title=f"at most {batch / seconds:,.0f} tok/s at batch {batch}",
    )
    return fig


# %%
slider(
    draw_roofline,
    BATCHES,
    start=8,
    label="batch",
    name="roofline",
    alt="A roofline: attainable arithmetic rises with intensity, then is flat. Decode "
    "at batch 1 lies far to the left under the slope; larger batches move right and "
    "up; the prefill lies under the flat roof.",
    caption=f"Dots: measured, n = {repeats}. Cross: the bound at the chosen batch. "
    f"{decoder.name}, float32, threads: {torch.get_num_threads()}, {device}.",
)

# %% [markdown]
# Decode of one sequence uses a small part of what the processor can compute, however
# good the code is: the bytes do not arrive faster. Three ways lead out:
# *fewer bytes* (quantization), *more tokens for the same bytes*
# (batching), *several tokens a pass* (speculative decoding). Prefill lies under the
# flat roof, where fewer bytes do not help.
#
# ## What a request costs
#
# A machine is paid by the hour. While it serves a batch, its seconds are shared by the
# sequences in it.

# %%
ANSWER = 200  # tokens of an answer
money_rows = []
for one in served:
    batch = one.setting.batch
    thousand = price_per_hour / 3600 / batch * 1000  # requests
    rate = batch / one.tpot.median_s
    money_rows.append(
        {
            "batch × prompt": str(one.setting),
            "1,000 requests, predicted": thousand * one.predicted_request_s(ANSWER),
            "measured": thousand * one.request_s(ANSWER),
            "1,000,000 tokens": money_per_million_tokens(price_per_hour, rate),
            "a user waits": one.request_s(ANSWER),
        }
    )
print(f"at {price_per_hour} an hour, answers of {ANSWER} tokens")
table(money_rows, units={"a user waits": "s"})

# %% [markdown]
# ## When does it lose?
#
# Batching makes tokens cheaper, and each user wait longer. And the price above holds
# for a machine that is *always busy*. One that has work for a tenth of the time costs
# ten times as much per token, and no optimisation in this lab changes that.

# %%
alone, together = by_setting[1, 16], by_setting[16, 16]
slower = together.tpot.median_s / alone.tpot.median_s
print(f"batch 16 against batch 1: {16 / slower:.1f} times the tokens a second,")
print(f"but each of the 16 users gets a token {slower:.1f} times more slowly")

# %% [markdown]
# ## Exercises
#
# All with the same made-up accelerator: 300 GB/s, 60 TFLOP/s; and a model of
# 8,000,000,000 weights in bf16. Cache and attention are left aside. An exercise that
# you leave alone does not stop the notebook.
#
# ### 1. The fastest decoding
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# How many tokens a second can one sequence get at most?

# %% tags=["exercise"]
tokens_per_second = ...
exercises.check_decode_limit(tokens_per_second)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Each token reads 16 GB: 300 / 16 = 18.75 tok/s. The arithmetic could do 3,750.
#
# </details>
#
# ### 2. The first token
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# A prompt has 1,000 tokens. How many seconds pass at least before the first token?

# %% tags=["exercise"]
first_token_s = ...
exercises.check_first_token(first_token_s)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 2 · 8·10⁹ · 1,000 operations at 60·10¹² a second: 0.267 s. Reading the weights once
# takes 0.053 s, which is less, so the arithmetic decides.
#
# </details>
#
# ### 3. The batch at the ridge
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# At which batch does a decode step take as long for its arithmetic as for its weights?

# %% tags=["exercise"]
batch_at_ridge = ...
exercises.check_ridge_batch(batch_at_ridge)

# %% [markdown]
# <details><summary>Solution</summary>
#
# A weight takes 2 bytes, and 2 operations for each row. So *B* = 60·10¹² / 300·10⁹ =
# 200. Below that, another sequence in the batch costs almost no time.
#
# </details>
#
# ### 4. The price of a million tokens
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# Write it as a function of the price of an hour, the batch, and the TPOT in seconds,
# for a machine that is always busy.


# %% tags=["exercise"]
def price_of_a_million(price_per_hour, batch, tpot_s):
    return ...


exercises.check_price(price_of_a_million)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def price_of_a_million(price_per_hour, batch, tpot_s):
#     return price_per_hour / 3600 * tpot_s / batch * 1_000_000
# ```
#
# </details>

# %% [markdown]
# ## What you have seen
#
# The same lines go into the result file of this run, with machine, versions and date.

# %%
closing = Closing.of(decoder, "float32", device)
closing.add("read bandwidth", "GB/s", None, bandwidth / 1e9)
closing.add("arithmetic", "GFLOP/s", None, arithmetic / 1e9)
for one in served:
    closing.add(f"TTFT, {one.setting}", "s", one.predicted.ttft_s, one.ttft)
    closing.add(f"TPOT, {one.setting}", "s", one.predicted.tpot_s, one.tpot)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on** with notebook 01, the cache that makes decode one token a pass. Or ask for
# the same numbers on the command line: `labkit bench decode`, `labkit bench prefill`.
