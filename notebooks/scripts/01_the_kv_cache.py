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
# # 01 · The KV cache
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/01_the_kv_cache.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/01_the_kv_cache.py)
# <!-- /badges -->
#
# **The question.** A language model writes one token at a time, and each token depends
# on all tokens before it. Must it read the whole text again for every token?
#
# **You will be able to**
#
# - say what the cache stores, and why nothing stored ever changes;
# - predict its bytes from four numbers of a configuration, and avoid the two formulas
#   that go wrong on today's models;
# - predict what it saves in seconds, and name the cases where it saves nothing.
#
# | | |
# |---|---|
# | Time | 20 minutes reading, 2 minutes running at `quick`, 30 minutes of exercises |
# | Memory | 2 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | nothing; notebook 00 explains prefill and decode in more depth |

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

# %%
import inspect
from textwrap import dedent

import torch

from labkit import load_model
from labkit.cache import ContiguousCache
from labkit.generate import generate
from labkit.lab.bench.operators import Sizes, measure_operators
from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.measure.clock import ratio
from labkit.lab.plan.known_models import known_config
from labkit.lab.plan.memory import resolve
from labkit.plan.hub_config import kv_shape
from labkit.plan.kv import KVShape, kv_bytes
from labkit_course.checks import kv_cache as exercises
from labkit_course.experiments import cache_or_not as bench
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import band_plot, bar_plot
from labkit_course.show.tables import table
from labkit_course.show.widgets import slider

# %%
if threads:
    torch.set_num_threads(threads)
decoder = load_model(model, device=device)
config = decoder.config
print(f"{decoder.name}: {config.num_layers} layers, {config.num_heads} query heads,")
print(f"{config.num_kv_heads} KV heads, head_dim {config.head_dim}, float32")

# %% [markdown]
# ## The idea
#
# In each layer, every token makes three vectors per head: a query, a key and a value.
# The query of the newest token is compared with the keys of all tokens so far, and the
# result weighs their values. Attention is *causal*: a token sees only what stands
# before it. So the key and the value of token 7 do not depend on token 8. Once
# computed, they stay what they are.
#
# Queries are used once and forgotten. Keys and values are needed again by every later
# token. Keeping them is the KV cache; the rest of this notebook is what that costs and
# what it saves.

# %% [markdown]
# ## The mechanism
#
# These are the two functions of labkit's plainest cache. `append` writes the new keys
# and values behind the old ones. `attend` reads everything written so far.

# %%
for function in (ContiguousCache.append, ContiguousCache.attend):
    print(dedent(inspect.getsource(function)))

# %% [markdown]
# Now step by step. The first pass takes the whole prompt (*prefill*); each later pass
# takes one token (*decode*). Watch what goes in, and what the cache holds afterwards.

# %%
prompt = decoder.tokenizer.encode("The capital of France is")
cache = decoder.new_cache(capacity=32)
given = torch.tensor([prompt], device=device)
steps = []
for _ in range(4):
    logits = decoder(given, cache, last_only=True)  # [1, 1, V]
    newest = logits[:, -1].argmax(-1, keepdim=True)  # [1, 1]
    steps.append(
        {
            "pass": "prefill" if not steps else f"decode {len(steps)}",
            "tokens in": given.shape[1],
            "cache length": cache.length,
            "bytes used": cache.nbytes_used(),
            "token out": repr(decoder.tokenizer.decode(newest[0].tolist())),
        }
    )
    given = newest  # the cache holds the rest
table(steps, units={"bytes used": "bytes"})

# %% [markdown]
# Four passes gave four tokens, and the last of them is not in the cache: it has
# not been fed back yet. A text of *P* prompt tokens and *N* new ones costs
# *P* + *N* − 1 positions with the cache. Without it, each pass computes everything
# again.

# %% [markdown]
# ## Same answer?
#
# The cache stores what would have been computed anyway, so the greedy tokens must be
# *equal*, not similar. In float32 they are. `cache="none"` is the same loop without a
# memory.

# %%
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 2, 4, 8, 16,",
)
different = 0
for text in PROMPTS:
    kept = generate(decoder, text, max_new_tokens=16, cache="contiguous")
    fresh = generate(decoder, text, max_new_tokens=16, cache="none")
    different += sum(a != b for a, b in zip(kept.tokens, fresh.tokens))
    print(f"{len(kept.tokens)} tokens: {text!r} → {kept.text[:40]!r}")
assert different == 0

# %% [markdown]
# In bf16 or fp16, two orders of the same additions round differently, and a near-tie
# between two tokens may then tip the other way. That is rounding, not the cache. Claims
# of equality in this lab are therefore made in float32.

# %% [markdown]
# ## How many bytes?
#
# Each layer keeps one key and one value, for each of its KV heads, for each token:
#
# $$\text{bytes per token} = 2 \cdot L \cdot K \cdot D \cdot b$$
#
# with *L* layers, *K* KV heads, *D* = `head_dim`, *b* bytes a number, and the 2 for
# keys *and* values. Four numbers from `config.json`; the size of the vocabulary, the
# feed-forward layers and the number of *query* heads do not enter. We predict first and
# then count the bytes of the tensors.

# %%
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
byte_rows = []
for batch, capacity, dtype in ((1, 256, torch.float32), (4, 1000, torch.bfloat16)):
    made = ContiguousCache(config.kv_shape, batch, capacity, dtype)
    made.advance(capacity)  # announce that many tokens: the tensors grow to their size
    byte_rows.append(
        {
            "model": "this model",
            "batch": batch,
            "tokens": capacity,
            "dtype": FORMATS[dtype],
            "predicted": kv_bytes(config.kv_shape, capacity, batch, FORMATS[dtype]),
            "measured": tensor_bytes(made.keys, made.values),
        }
    )
assert all(row["predicted"] == row["measured"] for row in byte_rows)
BOTH = ("predicted", "measured")
table(byte_rows, units=dict.fromkeys(BOTH, "bytes"))

# %% [markdown]
# The two columns are equal to the byte. The same holds for other shapes: all query
# heads with keys of their own (*multi-head attention*, MHA), several query heads
# sharing one KV head (*grouped-query*, GQA), and one KV head for all (*multi-query*,
# MQA).

# %%
HEADS = {"MHA: 32 KV heads": 32, "GQA: 8 KV heads": 8, "MQA: 1 KV head": 1}
shape_rows = []
for name, kv_heads in HEADS.items():
    shape = KVShape.uniform(num_layers=4, num_kv_heads=kv_heads, head_dim=128)
    made = ContiguousCache(shape, capacity=256, dtype=torch.bfloat16)
    predicted = kv_bytes(shape, 256, kv_format="bf16")
    counted = tensor_bytes(made.keys, made.values)
    assert predicted == counted
    shape_rows.append({"shape": name, "predicted": predicted, "measured": counted})
table(shape_rows, units=dict.fromkeys(BOTH, "bytes"))

# %% [markdown]
# ### Ten models you may have heard of
#
# The same formula, fed from their published configurations. Two models bend the line:
# Mistral 7B v0.1 and most layers of Gemma 3 attend to a *window* of recent tokens only,
# so their cache stops growing there. DeepSeek-V3 stores one compressed vector a token
# instead of heads (*multi-head latent attention*, MLA).

# %%
TEN = (
    "smollm2-135m qwen3-0.6b gemma-3-1b qwen3-4b llama-2-7b qwen2.5-7b "
    "mistral-7b-v0.1 llama-3.1-8b llama-3.1-70b deepseek-v3"
).split()
shapes = {name: kv_shape(known_config(name)) for name in TEN}
ten_rows = []
for name, shape in shapes.items():
    first = shape.layers[0]
    ten_rows.append(
        {
            "model": name,
            "layers": shape.num_layers,
            "query heads": known_config(name)["num_attention_heads"],
            "KV heads": None if first.latent_dim else first.num_kv_heads,
            "head_dim": None if first.latent_dim else first.head_dim,
            "first token": kv_bytes(shape, 1),
            "4,096 tokens": kv_bytes(shape, 4096),
            "32,768 tokens": kv_bytes(shape, 32768),
        }
    )
table(ten_rows, units={key: "bytes" for key in ten_rows[0] if "token" in key})

# %% [markdown]
# Read three rows against each other. Llama 2 7B and Llama 3.1 8B have the same layers,
# query heads and `head_dim`; the newer one takes a quarter, because four query heads
# share each KV head. And DeepSeek-V3, with 671 billion weights, takes less than Llama 2
# 7B.


# %%
def draw_ten(tokens):
    fig, ax = canvas(height=3.9)
    sizes = {name: kv_bytes(shape, tokens) / 2**30 for name, shape in shapes.items()}
    bar_plot(
        ax,
        sizes,
        xlabel="KV cache of one sequence in bf16 [GiB]",
        title=f"{tokens:,} tokens",
    )
    return fig


slider(
    draw_ten,
    [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
    start=8192,
    label="tokens",
    name="kv_ten_models",
    alt="Bars of the KV cache of ten models at 8,192 tokens in bf16. Llama 2 7B takes "
    "4 GiB, Llama 3.1 70B 2.5 GiB, Llama 3.1 8B 1 GiB, the smallest ones far less.",
    caption="Computed from the published configurations, for one sequence; where a "
    "model was not made for this length, the formula does not know.",
)

# %% [markdown]
# ## "A 4,000-token context with 32 layers in FP16 takes several GB per user"
#
# You will meet this sentence. Is it true? It names layers, tokens and bytes a number,
# and leaves out the two that decide: KV heads and `head_dim`. Let us fill them in. The
# last two columns are shortcuts seen in blogs and calculators:
#
# - *hidden size*: `hidden_size` in place of KV heads × `head_dim`;
# - *derived*: `hidden_size / num_attention_heads` in place of a stated `head_dim`.


# %%
def shortcut_row(name, label):
    fields, shape = known_config(name), shapes[name]
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    layers, kv_heads = shape.num_layers, shape.layers[0].num_kv_heads
    widths = (hidden, kv_heads * (hidden // heads))
    wrong = [2 * layers * width * 2 * 4000 for width in widths]
    return {
        "model": label,
        "layers": layers,
        "right": kv_bytes(shape, 4000, kv_format="fp16"),
        "hidden size": wrong[0],
        "derived": wrong[1],
    }


worked = [
    shortcut_row("llama-2-7b", "Llama 2 7B (MHA, 32 × 128)"),
    shortcut_row("llama-3.1-8b", "Llama 3.1 8B (GQA, 8 × 128)"),
    shortcut_row("qwen3-4b", "Qwen3 4B (GQA, 8 × 128 stated)"),
    shortcut_row("qwen3-0.6b", "Qwen3 0.6B (GQA, 8 × 128 stated)"),
]
table(worked, units={"right": "bytes", "hidden size": "bytes", "derived": "bytes"})

# %% [markdown]
# - **MHA, as in Llama 2 7B:** 2 × 32 layers × 32 heads × 128 × 2 B = 524,288 B a token,
#   times 4,000 = 2.10 GB (2,000 MiB). The sentence holds, with "about two" for
#   "several".
# - **GQA, as in Llama 3.1 8B:** same layers and `head_dim`, 8 KV heads: 131,072 B a
#   token, 500 MiB in all. The sentence is four times too high. It would still be if you
#   wrote `hidden_size` = 4096 into the formula: that counts one key and value for each
#   *query* head.
# - **A stated `head_dim`, as in Qwen3:** 2560 / 32 = 80, but the configuration says
#   128. The derived value gives 92,160 B a token instead of 147,456. On Qwen3 0.6B,
#   `hidden_size` happens to give the right number (8 × 128 = 1024), which is worse than
#   a wrong one: it teaches a formula that fails on the next model.
#
# The rule: count the vectors that are *stored*. That is `num_key_value_heads` ×
# `head_dim`, both as stated; where the first is absent it equals the query heads, where
# the second is absent it is hidden size over query heads.

# %% [markdown]
# ## How fast?
#
# First the prediction.
#
# - *Without a cache*, the step at length *S* is a pass over all *S* tokens. Its
#   arithmetic grows with *S*, so the seconds of a whole answer grow with the *square*
#   of its length.
# - *With a cache*, the step is a pass over one token. It reads every weight once, and
#   the cache. At these lengths the cache is small beside the weights, so a step costs
#   nearly the same wherever it stands, and an answer grows *linearly*.
#
# To turn that into seconds, we time the operators a layer is made of, on random
# matrices of this model's shapes, and add them up. The model itself is not run, so the
# prediction can be wrong. Notebook 00 takes it apart.

# %%
SIZES = {"quick": (512, 3, 80), "standard": (1024, 7, 160), "full": (4096, 9, 512)}
longest, repeats, new_tokens = SIZES[scale]
lengths = [2**power for power in range(4, 13) if 2**power <= longest]  # 16, 32, …

WITH, WITHOUT = bench.WITH, bench.WITHOUT  # the names of the two arms
plan_shape = resolve(config)
sizes = Sizes.up_to(rows=longest, batch=1)
times = measure_operators(plan_shape, device=device, sizes=sizes)
expected_steps = bench.predicted_steps(plan_shape, times, lengths)

# %% [markdown]
# Now the measurement: one step at each length, then one answer from its first token to
# its last. Both arms take turns in one loop, so that a busy moment of the machine hits
# both.

# %%
measured_steps = bench.step_times(decoder, lengths, repeats=repeats)
prompt_tokens, answers = 16, max(1, repeats // 3)
measured_clock = bench.growth(decoder, prompt_tokens, new_tokens, repeats=answers)
expected_clock = bench.predicted_clock(plan_shape, times, prompt_tokens, new_tokens)

# %%
fig, (left, right) = canvas(2)
band_plot(
    left,
    lengths,
    measured_steps,
    expected_steps,
    scale=1e3,
    xlabel="tokens in the text",
    ylabel="one step [ms]",
    title="One step",
)
shown = slice(None, None, max(1, new_tokens // 12))
band_plot(
    right,
    list(range(prompt_tokens, prompt_tokens + new_tokens))[shown],
    {arm: points[shown] for arm, points in measured_clock.items()},
    {arm: points[shown] for arm, points in expected_clock.items()},
    xlabel="tokens in the text",
    ylabel="since the start [s]",
    title="One answer",
)

# %%
figure(
    fig,
    "kv_cache_time",
    alt="Two plots. Left: one decoding step grows in proportion to the text without "
    "a cache and stays almost flat with one. Right: the time since the start of an "
    "answer bends upwards without a cache and is a straight line with one.",
    caption=f"Measured (left: median of n = {repeats}, bars: the interval; right: "
    f"n = {answers}, bars: the range) and predicted; {decoder.name}, float32, "
    f"threads: {torch.get_num_threads()}, {device}.",
)

# %%
step_rows = []
for i, S in enumerate(lengths):
    gain = ratio(measured_steps[WITH][i], measured_steps[WITHOUT][i])
    step_rows.append(
        {
            "tokens in the text": str(S),
            "no cache": measured_steps[WITHOUT][i].median_s,
            "cache": measured_steps[WITH][i].median_s,
            "times faster": f"{gain.value:.1f} [{gain.low:.1f}, {gain.high:.1f}]",
            "predicted": expected_steps[WITHOUT][i] / expected_steps[WITH][i],
        }
    )
table(step_rows, units={"no cache": "ms", "cache": "ms"})

# %% [markdown]
# The ratio is not one number: it grows with the text. "The KV cache makes decoding *n*
# times faster" means nothing without a length.

# %% [markdown]
# ## When does it lose?
#
# We compute the cases before we measure them. The cache avoids computing positions
# twice. Where no position would be computed twice, it has nothing to give:
#
# - **prefill**: all positions of the prompt are new. Same work with and without.
# - **an answer of one token** (a yes/no question, a class, a score): the answer comes
#   with the prefill. Nothing is ever read from the cache.
# - **short texts**: the weights must be read for one token as for a few, so computing a
#   short text again costs little.
#
# What it always costs is memory.

# %%
CASES = ((32, 1), (128, 1), (4, 4), (16, 16), (128, 4))
case_rows = []
for P, N in CASES:
    expected = bench.predicted_clock(plan_shape, times, P, N)
    arms = bench.answer_times(decoder, P, N, repeats=repeats)
    gain = ratio(arms[WITH], arms[WITHOUT])
    case_rows.append(
        {
            "prompt + answer": f"{P} + {N}",
            "predicted": expected[WITHOUT][-1] / expected[WITH][-1],
            "measured": gain.value,
            "interval": f"[{gain.low:.2f}, {gain.high:.2f}]",
            "cache memory": kv_bytes(config.kv_shape, P + N - 1, kv_format="fp32"),
        }
    )
units = {"predicted": "x", "measured": "x", "cache memory": "bytes"}
table(case_rows, units=units)

# %% [markdown]
# Read the first two rows: the ratio stays near 1, and the memory is taken for nothing. A
# server that only scores or classifies can do without a cache. At the other end the
# memory is what runs out: the cache grows with every token of every user, while the
# weights are there once.

# %% [markdown]
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook. Replace the `...`, run
# the cell, and read what the check says.
#
# ### 1. Count the positions
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# A prompt has 500 tokens, the answer 100. How many token positions does the model
# compute in all, without a cache and with one?

# %% tags=["exercise"]
without_cache = ...
with_cache = ...
exercises.check_positions(without_cache, with_cache)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Without: step *i* computes 500 + *i* positions, for *i* from 0 to 99: 100 · 500 +
# 4,950 = 54,950. With: 500 for the prompt, which also gives the first token, then 99
# steps of one: 599. The last token is never fed back.
#
# </details>
#
# ### 2. Bytes per token, for any configuration
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# Write the formula as a function of a `config.json`, in bf16. The keys:
# `num_hidden_layers`, `hidden_size`, `num_attention_heads`, and, not in every file,
# `num_key_value_heads` and `head_dim`.


# %% tags=["exercise"]
def bytes_per_token(config):
    return ...


exercises.check_bytes_per_token(bytes_per_token)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def bytes_per_token(config):
#     heads = config["num_attention_heads"]
#     kv_heads = config.get("num_key_value_heads") or heads
#     head_dim = config.get("head_dim") or config["hidden_size"] // heads
#     return 2 * config["num_hidden_layers"] * kv_heads * head_dim * 2
# ```
#
# </details>
#
# ### 3. What fits
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# A GPU has 16 GiB. A model has 8,000,000,000 weights in bf16, 32 layers, 32 query
# heads, 8 KV heads, `head_dim` 128. Leave everything else aside: how many tokens can
# one sequence hold, with its cache in bf16?

# %% tags=["exercise"]
tokens_that_fit = ...
exercises.check_what_fits(tokens_that_fit)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 16 · 2³⁰ − 16,000,000,000 = 1,179,869,184 bytes are left. A token takes 2 · 32 · 8 ·
# 128 · 2 = 131,072 bytes. 9,001 tokens fit. (Read "16 GB" as decimal, and nothing is
# left.)
#
# </details>
#
# ### 4. One prompt, two answers
#
# | difficulty | minutes |
# |---|---|
# | harder | 10 |
#
# Two questions about the same long text: its keys and values are needed twice but need
# computing once. `cache.rewind(length)` keeps the first `length` tokens and forgets the
# rest. Write a function that answers both greedily. All arguments but the model and the
# number are lists of token ids; return two lists of `new_tokens` ids.


# %% tags=["exercise"]
def two_answers(model, prompt, first, second, new_tokens):
    return ...


exercises.check_two_answers(two_answers)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def two_answers(model, prompt, first, second, new_tokens):
#     cache = model.new_cache()
#     model(torch.tensor([prompt]), cache)
#     answers = []
#     for question in (first, second):
#         cache.rewind(len(prompt))
#         logits = model(torch.tensor([question]), cache)
#         answer = [int(logits[0, -1].argmax())]
#         while len(answer) < new_tokens:
#             logits = model(torch.tensor([answer[-1:]]), cache)
#             answer.append(int(logits[0, -1].argmax()))
#         answers.append(answer)
#     return answers
# ```
#
# Servers do this for every shared beginning, and call it *prefix caching*.
#
# </details>

# %% [markdown]
# ## What you have seen
#
# Each line was predicted first, then measured on this machine. The same lines go into
# the result file of this run, with machine, versions and date.

# %%
cached, fresh = measured_steps[WITH][-1], measured_steps[WITHOUT][-1]
at = f"at {lengths[-1]} tokens"
closing = Closing.of(decoder, "float32", device)
closing.add("greedy tokens that differ", "tokens", 0, different, n=len(PROMPTS))
closing.add("KV cache of 256 tokens", "B", *(byte_rows[0][k] for k in BOTH))
closing.add(f"one step {at}, cache", "s", expected_steps[WITH][-1], cached)
closing.add(f"one step {at}, no cache", "s", expected_steps[WITHOUT][-1], fresh)
closing.add(
    f"times faster {at}",
    "x",
    step_rows[-1]["predicted"],
    ratio(cached, fresh),
    n=repeats,
)
closing.add(
    "times faster, answer of one token",
    "x",
    *(case_rows[0][k] for k in BOTH),
    n=repeats,
)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Change the parameters: `scale = "standard"` for longer texts, another
# `model`, or `device = "cuda"`. Ask what your own model needs: `labkit plan --model
# qwen3-8b --tokens 32768 --sequences 8 --budget 24GiB`.
