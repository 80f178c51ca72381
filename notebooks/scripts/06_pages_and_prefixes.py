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
# # 06 · Pages and prefixes
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/06_pages_and_prefixes.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/06_pages_and_prefixes.py)
# <!-- /badges -->
#
# **The question.** Many conversations share one memory. How is none of it
# wasted, and why should a text that ten users send be computed ten times?
#
# **You will be able to**
#
# - say what a reservation wastes, and foretell what pages waste;
# - follow a block table through a fork and a copy-on-write;
# - measure when attention through tables is faster than over padding, and when not;
# - foretell and measure what a prefix hit does to the time to first token.
#
# | | |
# |---|---|
# | Time | 20 minutes reading, 2 minutes running at `quick`, 25 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 01: what a KV cache is, and its bytes per token |

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

import torch

from labkit import load_model
from labkit.cache import PagedCache
from labkit.cache.paged.blocks import Blocks
from labkit.cache.paged.pool import PagePool
from labkit.generate import generate
from labkit.lab.measure.clock import ratio
from labkit.model.fingerprint import fingerprint
from labkit.plan.kv import KVShape, kv_bytes_per_token
from labkit_course.checks import pages as exercises
from labkit_course.experiments import paging as bench
from labkit_course.experiments import prefixes
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import band_plot, bar_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
decoder = load_model(model, device=device)
L = decoder.config.num_layers
# repeats of a step, rounds of a TTFT, new tokens where answers are compared
SIZES = {"quick": (7, 4, 12), "standard": (15, 9, 32), "full": (31, 21, 64)}
repeats, rounds, new_tokens = SIZES[scale]
context = decoder.config.max_positions
per_token = kv_bytes_per_token(decoder.config.kv_shape, "fp32")
print(f"{decoder.name}: context {context}; float32: {per_token / 1024:.0f} KiB a token")

# %% [markdown]
# ## The waste of a reservation
#
# A contiguous cache needs its memory in one piece, and nobody knows beforehand how long
# a conversation will become. So one reserves: the whole context for each row, or as
# much as the longest row has. How long are conversations? Many are short and a few are
# long; a log-normal distribution has that shape. This one is made up, with a seed.

# %%
lengths = bench.conversation_lengths(64)
mean = sum(lengths) / len(lengths)
slots = bench.slots_allocated(lengths, context)
print(
    f"{len(lengths)} conversations of {min(lengths)} to {max(lengths)} tokens, "
    f"mean {mean:.0f}: {sorted(lengths)[::8]} ..."
)
table(
    [
        {
            "memory": way,
            "slots": held,
            "bytes": held * per_token,
            "wasted": 1 - sum(lengths) / held,
        }
        for way, held in slots.items()
    ],
    units={"bytes": "bytes", "wasted": "%"},
)

# %% [markdown]
# *Pages* (Kwon et al., PagedAttention, 2023) cut the memory into blocks of 16 tokens. A
# row is a table of block numbers: token *s* lies in block `table[s // 16]`, slot
# `s % 16`. A row takes a block when it needs one, from anywhere. What can be wasted is
# the rest of each row's last block, half a block on average:
#
# $$\mathrm{waste}(P) \approx \frac{(P-1)/2}{\mathrm{mean} + (P-1)/2}$$
#
# We foretell the waste for several block sizes, and then ask real caches.

# %%
sizes = [1, 4, 16, 64, 256]
foretold = [bench.expected_waste(mean, size) for size in sizes]
wasted = [bench.measured_waste(lengths, size) for size in sizes]
table(
    [
        {"block": size, "predicted": p, "measured": m}
        for size, p, m in zip(sizes, foretold, wasted)
    ],
    units={"block": "tokens", "predicted": "%", "measured": "%"},
)

# %%
fig, axes = canvas(2, height=3.4)
bar_plot(
    axes[0],
    {way: 1 - sum(lengths) / held for way, held in slots.items()},
    xlabel="wasted [%]",
    scale=100,
    title="a way to hold 64 rows",
)
band_plot(
    axes[1],
    sizes,
    {"waste": wasted},
    {"waste": foretold},
    xlabel="tokens a block",
    ylabel="wasted [%]",
    scale=100,
    title="block size",
)

# %%
figure(
    fig,
    "waste",
    alt="Left, bars of wasted memory: most of a reservation for the context, less "
    "for padding and doubling, under two per cent for pages. Right, waste over block "
    "size, measured points on the predicted line.",
    caption=f"n = {len(lengths)} lengths, log-normal, median 350; computed.",
)

# %% [markdown]
# A small block wastes less. It also costs: an integer a block, and reads in short
# pieces. 16 is where most engines stand. What the saved memory buys is *more rows*:

# %%
memory = slots["reserved for the context"] // 4
arriving = bench.conversation_lengths(2000, seed=1)
fit = {
    "reserved": bench.rows_that_fit(arriving, memory, lambda n: context),
    "pages of 16": bench.rows_that_fit(arriving, memory, lambda n: -(-n // 16) * 16),
}
predicted_rows = memory / (sum(arriving) / len(arriving) + 7.5)
print(
    f"{memory * per_token / 2**30:.1f} GiB hold {fit}; predicted for pages: "
    f"{predicted_rows:.0f}"
)

# %% [markdown]
# ## The mechanism
#
# The bookkeeping is apart from the tensors and needs no model: which blocks are free,
# and how many tables hold each of the others. All of the taking and giving back:

# %%
print(inspect.getsource(Blocks.allocate))
print(inspect.getsource(Blocks.release))

# %% [markdown]
# Because holders are counted, a block can stand in several tables. A *fork* copies a
# list of integers. Whoever then writes into a shared block takes a fresh one and copies
# it first: *copy-on-write*. Two answers to one question of six tokens, blocks of four:

# %%
pool = PagePool(KVShape.uniform(1, 1, 4), blocks=8, size=4)


def write(cache, number):
    cache.advance(1)
    cache.append(0, *(torch.full((1, 1, 1, 4), float(number)) for _ in "kv"))


first = PagedCache.over(pool)
for number in range(6):
    write(first, number)
second = first.fork()
print("forked:  ", first.tables, second.tables, "owned", pool.owned)
write(first, 70)
print("one wrote:", first.tables, second.tables, "owned", pool.owned)
write(second, 80)
print("both:    ", first.tables, second.tables, "owned", pool.owned)
for cache in (first, second):
    print([int(n) for n in cache.dense(0)[0][0, 0, :, 0]])

# %% [markdown]
# The first to write left the shared block with a copy. The second was then alone in it
# and wrote in place. A pool that is full says so before anything is computed:

# %%
try:
    first.advance(30)
except ValueError as refused:
    print(refused)
print("nothing has changed:", first.lengths, "owned", pool.owned)

# %% [markdown]
# ## Same answer?
#
# In float32, on this model, greedy: one prompt after the other in a contiguous cache,
# against an unequal batch on pages, against forks of one prompt, against a prefix that
# was found, and one that was not.

# %%
SYSTEM = (
    "You are a librarian who knows many books by heart. Answer in one short "
    "sentence, and say so when you do not know. "
)
QUESTIONS = ["Who wrote Hamlet?", "What is the capital of Norway, and why there?"]
prompts = [decoder.tokenizer.encode(SYSTEM + question) for question in QUESTIONS]
options = {"max_new_tokens": new_tokens, "end_ids": ()}
alone = [generate(decoder, prompt, **options).tokens for prompt in prompts]
answers = {"pages, batch": generate(decoder, prompts, cache="paged", **options)}
base = PagedCache.over(prefixes.make_store(decoder, 2048).pool)
generate(decoder, prompts[0][:16], cache=base, max_new_tokens=1)  # holds 16 tokens now
forks = [base.fork() for _ in prompts]
shared = next(i for i, (a, b) in enumerate(zip(*prompts)) if a != b)
for fork in forks:
    fork.rewind(min(shared, fork.length))
answers["forks"] = [
    generate(decoder, p, cache=fork, **options) for p, fork in zip(prompts, forks)
]

# %%
print_of = fingerprint(decoder)
store = prefixes.make_store(decoder, 2048)
view = store.open("me", "", print_of)
for what in ("prefix, missed", "prefix, found"):
    answers[what] = generate(decoder, prompts, prefixes=view, **options)
same = {what: [one.tokens for one in found] == alone for what, found in answers.items()}
print(same, store)
assert all(same.values())
print(answers["prefix, found"][0].text)

# %% [markdown]
# ## Seconds: tables against padding
#
# Padded rows are read to the longest row's end; through tables each row costs its own
# length. Tables have a price: blocks lie in pieces of memory, and each read looks up
# where. We measure *one layer's* attention in each case and *one* whole step (padded,
# equal rows). All else in a step does not depend on the cache, so the other steps are
# foretold before they are measured.

# %%
KINDS = list(bench.KINDS)
layer = bench.layer_times(decoder, KINDS, bench.DECODE_LENGTHS, repeats=3 * repeats)
steps = {
    "equal": bench.step_times(
        decoder, KINDS, bench.DECODE_LENGTHS["equal"], repeats=repeats
    )
}
rest = steps["equal"]["padded"].median_s - L * layer["padded", "equal"].median_s
expected = {key: rest + L * timing.median_s for key, timing in layer.items()}
steps["unequal"] = bench.step_times(
    decoder, KINDS, bench.DECODE_LENGTHS["unequal"], repeats=repeats
)

# %%
table(
    [
        {
            "rows": rows,
            "cache": kind,
            "predicted": expected[kind, rows],
            "measured": steps[rows][kind].median_s,
            "tok/s to padded": str(ratio(steps[rows][kind], steps[rows]["padded"])),
        }
        for rows in steps
        for kind in KINDS
    ],
    units={"predicted": "ms", "measured": "ms"},
)

# %%
fig, axes = canvas(2, height=2.9)
for ax, rows in zip(axes, steps):
    bar_plot(
        ax,
        steps[rows],
        xlabel="a step of 8 rows [ms]",
        scale=1e3,
        title=f"{rows} rows, {sum(bench.DECODE_LENGTHS[rows]):,} tokens",
    )
figure(
    fig,
    "steps",
    alt="Bars of the time of a decode step over a padded cache, pages and INT8 pages. "
    "With equal rows the three are close; with unequal rows padding takes longest.",
    caption=f"Batch 8, float32, n = {repeats} steps each, 95 % intervals.",
)

# %% [markdown]
# The weights of a step are read whatever the cache is, and in float32 they are most of
# it. In bfloat16 the cache is a larger share of a step, and the same comparison on the
# machine of these outputs gave 0.98 [0.89, 1.03] for equal rows and 1.44 [1.25, 1.57]
# for unequal ones (n = 7).
#
# ## A prefix that is found
#
# A system prompt of 512 tokens stands before every question of 32. Its keys and values
# are the same each time. A *prefix store* keeps the blocks of the last prompt; the next
# request forks them and computes only what is new. Whose request may find what is the
# subject of notebook 10; here we time three askers: the same tenant (a hit), another
# tenant, and anyone when nothing is held.
#
# Foretold from prefills of 32 and 128 tokens: a hit costs a prefill of the question, a
# miss 544 / 128 prefills of 128. (Neither counts attention over a long text, which a
# hit has to do as well; so it will take somewhat longer than foretold.)

# %%
short = prefixes.prefill_times(decoder, (32, 128))
HIT, OTHER, NOBODY = prefixes.HIT, prefixes.OTHER, prefixes.NOBODY
miss = short[128] * 544 / 128
expected_ttft = {HIT: short[32], OTHER: miss, NOBODY: miss}
askers = prefixes.ttft_by_asker(decoder, print_of, 512, 32, repeats=rounds)
hit_to_miss = ratio(askers.times[NOBODY], askers.times[HIT])
other_to_miss = ratio(askers.times[NOBODY], askers.times[OTHER])
table(
    [
        {
            "asker": name,
            "computed": askers.computed[name],
            "predicted": expected_ttft[name],
            "measured": timing.median_s,
        }
        for name, timing in askers.times.items()
    ],
    units={"computed": "tokens", "predicted": "ms", "measured": "ms"},
)

# %%
print(f"TTFT of a hit / of a miss: {hit_to_miss}")
print(f"TTFT of another tenant / of a miss: {other_to_miss}")
fig, ax = canvas(height=2.4)
bar_plot(ax, askers.times, xlabel="time to first token [ms]", scale=1e3)
figure(
    fig,
    "prefix_hit",
    alt="Bars of the time to first token: a hit takes a small part of the time of a "
    "miss; another tenant waits as long as if nothing were held.",
    caption=f"System prompt 512, question 32 tokens; n = {rounds} rounds.",
)

# %% [markdown]
# Memory follows: ten users with one declared system prompt hold its 32 blocks once.

# %%
for size in (1, 10):
    mib = [n * 16 * per_token / 2**20 for n in (32 + size * 2, size * 34)]
    print(f"{size:>2} users: {mib[0]:.0f} MiB; each apart: {mib[1]:.0f} MiB")

# %% [markdown]
# ## When does it lose?
#
# - **Equal rows that share nothing**: the table above. Pages read the same bytes
#   through a detour.
# - **Large blocks**: at 256 tokens a block these rows waste what the plot shows.
# - **Prompts that differ early.** One token more at the front, a date for example, and
#   nothing behind it matches: keys know what came before them. Put what changes last.

# %%
prompt = prompts[0]
dated = decoder.tokenizer.encode("Today is Tuesday. ") + prompt
for what, tokens in (("as before", prompt), ("a date in front", dated)):
    lease = view.lookup(tokens)
    print(f"{what:>16}: {lease.length} of {len(tokens)} tokens found")

# %% [markdown]
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. Waste
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# The share of slots in the blocks held that hold no token.


# %% tags=["exercise"]
def waste(lengths, size):
    return ...


exercises.check_waste(waste)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def waste(lengths, size):
#     held = sum(-(-n // size) * size for n in lengths)
#     return 1 - sum(lengths) / held
#
#
# ```
#
# </details>
#
# ### 2. Eight answers
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# A prompt of 100 tokens is forked into 8 answers of 30 tokens each, and then its own
# table is released, before anyone writes. How many blocks of 16 are held at the end?

# %% tags=["exercise"]
blocks_held = ...
exercises.check_blocks_of_forks(blocks_held)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 30. Six full blocks are shared. The seventh holds 4 tokens and is written by all; an
# answer ends at token 130, in its ninth block: 6 + 8 × 3. The last to write the seventh
# is alone in it, so no old copy remains.
#
# </details>
#
# ### 3. Copy-on-write
#
# | difficulty | minutes |
# |---|---|
# | harder | 15 |
#
# Return the block into which a row's next token goes. `table` is the row's list of
# blocks, `length` its tokens, `size` the tokens a block, `holders` how many tables hold
# each block, `free` the free blocks (take by `free.pop()`). Change them as needed.


# %% tags=["exercise"]
def place(table, length, size, holders, free):
    return ...


exercises.check_copy_on_write(place)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def place(table, length, size, holders, free):
#     if length % size == 0:
#         table.append(free.pop())
#         holders[table[-1]] = 1
#     elif holders[table[-1]] > 1:
#         holders[table[-1]] -= 1
#         table[-1] = free.pop()
#         holders[table[-1]] = 1
#     return table[-1]
#
#
# ```
#
# </details>

# %% [markdown]
# ## What you have seen
#
# The same lines go into the result file of this run, with machine, versions and date.

# %%
closing = Closing.of(decoder, "float32", device)
for way, held in slots.items():
    predicted = bench.expected_waste(mean, 16) if "pages" in way else None
    share = 1 - sum(lengths) / held
    closing.add(f"wasted, {way}", "share", predicted, share, n=len(lengths))
name, fitting = "rows in a quarter of the memory, pages", fit["pages of 16"]
closing.add(name, "rows", predicted_rows, fitting, n=len(arriving))
for rows in steps:
    for kind in KINDS[1:]:
        faster = expected["padded", rows] / expected[kind, rows]
        gain = ratio(steps[rows][kind], steps[rows]["padded"])
        closing.add(f"tok/s, {kind}/padded, {rows}", "x", faster, gain, n=repeats)
sooner = expected_ttft[HIT] / expected_ttft[NOBODY]
gain = ratio(askers.times[NOBODY], askers.times[HIT])
closing.add("TTFT, hit/miss", "x", sooner, gain, n=rounds)
closing.add("TTFT, another tenant/miss", "x", 1.0, other_to_miss, n=rounds)
for name, timing in askers.times.items():
    closing.add(f"TTFT, {name}", "s", expected_ttft[name], timing)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Who may find whose prefix, and what a hit tells to somebody with a watch:
# notebook 10.
