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
# # 14 · The last mile
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/14_the_last_mile.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/14_the_last_mile.py)
# <!-- /badges -->
#
# **The question.** A decode step must read every weight once. How near to that can a
# program come, and what is in the way?
#
# **You will be able to**
#
# - say how many seconds a product must take, before it is written;
# - read a kernel for packed weights, and pack a line of them by hand;
# - explain why one model has different speeds on different machines, and why one file
#   format of a well-known program is almost twice as fast as its sister;
# - find in the budget of a step what is worth working on, and what no kernel repairs.
#
# | | |
# |---|---|
# | Time | 35 minutes reading, 1 minute running at `quick`, 25 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores and a C++ compiler (without: no native rows) |
# | Before | notebooks 00 (the roofline) and 02 (formats, bits all-in) |

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
import torch
from IPython.display import display

from labkit import load_model
from labkit.formats import round_to_nearest
from labkit.kernels.native import build as native
from labkit.kernels.native.packed import NativePack
from labkit.lab.bench.arms import prompt_ids
from labkit.lab.bench.explain import budget
from labkit.lab.measure.bandwidth import read_bandwidth
from labkit.lab.measure.clock import interleave, ratio
from labkit.lab.plan.memory import resolve
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.plan.time import step_cost
from labkit_course.checks import last_mile as exercises
from labkit_course.experiments.kernel_ladder import climb, ladder, on_instruction_sets
from labkit_course.experiments.kv_steps import step_times
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import bar_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
torch.set_grad_enabled(False)
used = torch.get_num_threads()
plain = load_model(model)
shape = resolve(plain.config)
bandwidth = read_bandwidth(device, used)
fast_here = unsupported_reason(plain.config) is None
print(f"{plain.name}; {used} threads read {bandwidth / 1e9:.1f} GB/s")
print(unsupported_reason(plain.config) or f"native kernels: {native.chosen()}")
if device != "cpu":
    print("The kernels of this notebook are for CPUs; labkit/bench/gpu.sh is for GPUs.")

# %% [markdown]
# The bandwidth is the roof of everything below: measured on this machine, reading only,
# from a buffer far larger than the last-level cache.
#
# ## One product
#
# A step of a decoder with one row is a list of products *y = W x*. Each weight is read,
# used once, and not needed again until the next token. We take one matrix, gate and up
# of a middle layer, and multiply by it in several ways. All use the same numbers: those
# that four bits in groups of 32 can hold.
#
# **Predict.** Bytes over bandwidth. If memory is the limit, four bits are 32/5 times as
# fast as float32 (the scales count: 5 bits a weight all-in).

# %%
middle = plain.config.num_layers // 2
weight = plain.layers[middle].mlp.gate_up.weight.detach()
FORMAT = "int4_g32_min"
rungs = ladder(weight, FORMAT)
for name, rung in rungs.items():
    print(
        f"{name:9} {8 * rung.nbytes / weight.numel():5.1f} bits a weight,"
        f" {len(rung.copies)} copies, together larger than any cache"
    )

# %% [markdown]
# ### Same answer?
#
# `native` rounds each 32 activations to 255 steps, so that products of whole numbers
# can be added up exactly. `packed` rounds activations and scales to bfloat16. The error
# is relative to the size of the terms that were added.

# %%
source = torch.Generator().manual_seed(1)
x = torch.randn(3, weight.shape[1], generator=source)
exact = x.double() @ round_to_nearest(weight, FORMAT).dequantize().double().T
terms = x.double().abs() @ weight.double().abs().T
errors = {}
for name, rung in rungs.items():
    y = rung.copies[0](x.to(rung.dtype)).double()
    errors[name] = float(((y - exact).abs() / terms).max())
assert errors["float32"] < 1e-6 and max(errors.values()) < 1e-2
table(
    [
        {"way": name, "largest error, of the terms": error}
        for name, error in errors.items()
    ]
)

# %% [markdown]
# ### Seconds

# %%
times = climb(rungs, rows=1, repeats=5)
fastest = {name: timing.median_s for name, timing in times.items()}
table(
    [
        {
            "way": name,
            "bytes": rungs[name].nbytes,
            "predicted": rungs[name].nbytes / bandwidth,
            "measured": seconds,
            "of bandwidth": rungs[name].nbytes / seconds / bandwidth,
            "times float32": fastest["float32"] / seconds,
        }
        for name, seconds in fastest.items()
    ],
    units={
        "bytes": "bytes",
        "predicted": "us",
        "measured": "us",
        "of bandwidth": "%",
        "times float32": "x",
    },
)

# %%
fig, ax = canvas(height=2.9)
bar_plot(
    ax,
    {
        name: rungs[name].nbytes / seconds / bandwidth
        for name, seconds in fastest.items()
    },
    scale=100,
    xlabel="share of this machine's read bandwidth [%]",
)
figure(
    fig,
    "ladder",
    alt="Bars of the share of memory bandwidth that each way of multiplying reaches. "
    "Unpacking the whole matrix on every call reaches almost nothing.",
    caption=f"gate_up of layer {middle}, {weight.shape[0]} x {weight.shape[1]}, one "
    f"row, {used} threads, weights from memory; medians, n = 5 rounds.",
)

# %% [markdown]
# Read the ladder from above:
#
# - **float32 and bfloat16** are limited by memory, if the library is good for one row.
# - **unpacked** has the fewest bytes *in memory* and is the slowest: it writes every
#   weight as a float and reads it again. This is the first complaint about quantised
#   models that are slower.
# - **packed** unpacks inside of a register. It saves the bytes, but pays some ten
#   instructions for each handful of weights.
# - **native** chose its byte order so that hardly anything is left to do per weight.
#
# ## The kernel
#
# The fastest instruction for this multiplies bytes: `dot4` takes 64 bytes of weights
# and four activations, and adds four products into each of 16 sums. So we lay weights
# out for it: **16 rows side by side, four columns each**, 64 bytes. The four
# activations are the same for all rows. No number is moved between lanes, and no sum
# runs across a register.

# %%
codes = ((torch.arange(16)[:, None] + torch.arange(32) // 2) % 16).float()
block = NativePack(round_to_nearest(codes, FORMAT)).blocks[64:].view(4, 16, 4)
print("line 0 of a block: row by row, the low four bits of four bytes")
for row in (0, 1, 15):
    print(
        f"  row {row:2}: columns 0..3 ",
        (block[0, row] & 15).tolist(),
        " high bits: columns 16..19 ",
        (block[0, row] >> 4).tolist(),
    )

# %% [markdown]
# One mask gives 16 rows x 4 columns, one shift and the same mask the next. Here is the
# arithmetic of a group of 32 columns by hand: whole numbers inside, one scale for the
# activations, a scale and a minimum for the weights.
#
# $$y = \sum_g s_g\, a_g \sum_c w_{gc}\, x_{gc} \;+\; m_g\, a_g \sum_c x_{gc}$$
#
# with codes *w* in 0..15, codes *x* in -127..127, *a* the activations' scale, *s* and
# *m* scale and minimum.

# %%
held = round_to_nearest(weight[:16], FORMAT)
groups = held.codes.double().unflatten(1, (-1, 32))  # [16, G, 32]
vector = x[0].double().unflatten(0, (-1, 32))  # [G, 32]
a = vector.abs().amax(-1, keepdim=True) / 127
steps = (vector / a).round()
inner = (groups * steps).sum(-1)
scale_, minimum = held.scale.double(), held.offset.double()
by_hand = (scale_ * a.T * inner + minimum * a.T * steps.sum(-1)).sum(-1)
if fast_here:
    kernel = NativePack(held).matmul(x[:1])[0].double()
    print(f"largest difference to the kernel: {(by_hand - kernel).abs().max():.1e}")

# %% [markdown]
# And this is the kernel itself. `NT` tokens share each register of weights while it is
# there, which is why five rows cost less than five steps. `vf` and `vi` are registers
# of floats and integers.

# %%
text = (native.FOLDER / "native.cpp").read_text()
start = text.index("template <int KIND, int NT> static void tile")
print(text[start : text.index("typedef void (*Tile)")])

# %% [markdown]
# ### Where it loses: many rows
#
# Each row more costs arithmetic and no bytes. **Predict:** five rows cost as much as
# one while memory is the limit, and five times as much when arithmetic is.

# %%
ROWS = (1, 2, 5, 16) if scale == "quick" else (1, 2, 4, 5, 8, 16, 32)
kept = {n: rungs[n] for n in ("bfloat16", "packed", "native") if n in rungs}
by_rows = {rows: climb(kept, rows, repeats=5) for rows in ROWS}
table(
    [
        {"rows": str(rows)}
        | {
            f"{name}, of one row": timing[name].median_s / by_rows[1][name].median_s
            for name in kept
        }
        for rows, timing in by_rows.items()
    ]
)

# %% [markdown]
# Four bits are so few bytes that arithmetic shows first. A draft of four tokens that is
# verified in one pass (speculative decoding) lives from this table.
#
# On a rented machine run this cell again after a while. Two "processors" may at times be
# two threads of one core: memory is then read as fast, but arithmetic hardly doubles.
# Where these outputs come from, five rows of a whole INT4 step took 1.3 times as long
# as one row at some moments and 1.9 times at others, with the same program.
#
# ## One file, many machines
#
# The packed bytes are the same everywhere, but not every processor has `dot4`.
# `LABKIT_NATIVE` chooses an instruction set that this machine has, so we can be another
# machine for a moment.

# %%
here = native.instruction_sets() if fast_here else ()
sets = [n for n in here if n in (native.chosen(), "portable")]
if scale != "quick":
    sets = list(here)
machines = on_instruction_sets(weight, sets, FORMAT) if fast_here else {}
if machines:
    best = min(timing.median_s for timing in machines.values())
    display(
        table(
            [
                {
                    "instruction set": name,
                    "measured": timing.median_s,
                    "of the best": timing.median_s / best,
                }
                for name, timing in machines.items()
            ],
            units={"measured": "us", "of the best": "x"},
        )
    )

# %% [markdown]
# The same model, the same file, the same bandwidth; the portable path needs many
# instructions where the best one needs one. Two more reasons why two machines differ
# with equal memory: how many threads it takes to fill the memory channels, and the
# pages. With pages of 4 KiB the processor looks up an address every 64 lines, and its
# own fetching ahead stops at the page's end; one core of the machine on which this was
# written read 21 GB/s so, and 33 GB/s from pages of 2 MiB.
#
# ### Q4_1 and Q4_0
#
# llama.cpp reads both. Q4_1 has a scale and a minimum for 32 weights (5 bits), Q4_0 a
# scale alone (4.5 bits). **Predict** from the bytes: 5/4.5 = 1.11 times as fast.
# Runs say far more: 1.4 to 1.9 times, by machine and threads. Both formats in *our*
# kernel:

# %%
if fast_here:
    pair = {"as Q4_1": "int4_g32_min", "as Q4_0": "int4_g32_sym"}
    both = {}
    for name, other in pair.items():
        both[name] = ladder(weight, other)["native"]
    sisters = climb(both, repeats=15)
    ours = ratio(sisters["as Q4_0"], sisters["as Q4_1"])
    print("Q4_0 is stored here with its zero point as a number beside the scale, so")
    print(f"bytes are equal, and so should seconds be. Measured: {ours} times as fast")

# %% [markdown]
# So the difference is not in the format. llama.cpp rearranges Q4_0 when it loads the
# file, rows side by side as above, and has a kernel for that order on several kinds of
# processor. Q4_1 is read as it lies in the file, one row at a time. A format is as fast
# as the code that someone wrote for it: look for the path that was tuned before you
# choose a format for its bits.
#
# ## From one product to a step
#
# A step of this model is 120 such products, and more. With 30 layers of operators
# called one by one, calling takes as long as computing; so the whole stack is one call,
# in which a team of threads meets at barriers. The **budget** of one step: predicted
# from bytes, measured by the clock inside.

# %%
prompt = prompt_ids(plain, 128)
arms = {"fp32": (plain, "fp32")}
if fast_here:
    arms["int4"] = (accelerate(plain, "int4"), "bf16")
budgets = {
    name: budget(decoder, name, shape, prompt, bandwidth, kv, steps=12)
    for name, (decoder, kv) in arms.items()
}
for name, parts in budgets.items():
    print(f"{name}: one step behind {len(prompt)} tokens")
    display(
        table(
            [
                {
                    "part": part,
                    "MiB": entry["bytes"] / 2**20,
                    "predicted": entry["predicted_ms"] / 1e3,
                    "measured": entry["measured_ms"] / 1e3,
                }
                for part, entry in parts.items()
            ],
            units={"predicted": "ms", "measured": "ms"},
        )
    )

# %%
shares = budgets["int4" if fast_here else "fp32"]
total = sum(entry["measured_ms"] for entry in shares.values())
fig, ax = canvas(height=3.2)
bar_plot(
    ax,
    {part: entry["measured_ms"] / total for part, entry in shares.items()},
    scale=100,
    xlabel="share of a step [%]",
)
figure(
    fig,
    "budget",
    alt="Bars of the share that each part has in one decode step. Weights and head are "
    "the largest; attention, sampling and dispatch follow.",
    caption=f"{'int4, native' if fast_here else 'fp32'}, 128 tokens in the cache, "
    f"{used} threads, n = 12 steps, {total:.2f} ms together.",
)

# %% [markdown]
# Work goes to the longest bar. And note what happened to the bars of the plain decoder:
# norms and rotations read nothing to speak of, yet took milliseconds, because each was
# an operator of its own. Fused, they are hardly visible.
#
# ## What no kernel can repair
#
# **Bytes that must be read.** A cache of 4,096 tokens in bfloat16 has as many bytes as
# all weights in four bits. **Predict:** a step then takes the bytes' ratio as long. The
# way out is fewer bytes, not better code: an INT8 cache, a window, fewer heads.

# %%
lengths = (128, 1024, 4096) if scale == "quick" else (128, 512, 1024, 2048, 4096, 8000)
runner, kvs = (arms["int4"][0], ("bf16", "int8")) if fast_here else (plain, ("fp32",))
recipe = "int4" if fast_here else "fp32"
grown, bytes_of = {}, {}
for length in lengths:
    for kv, timing in step_times(runner, kvs, length, repeats=5).items():
        grown[kv, length] = timing
        bytes_of[kv, length] = step_cost(shape, 1, 1, length, recipe, kv).bytes
first = (kvs[0], lengths[0])
table(
    [
        {"tokens in the cache": str(length)}
        | {
            key: value
            for kv in kvs
            for key, value in (
                (f"{kv}, bytes", bytes_of[kv, length] / bytes_of[first]),
                (f"{kv}, seconds", grown[kv, length].median_s / grown[first].median_s),
            )
        }
        for length in lengths
    ]
)

# %% [markdown]
# Relative to the first row's first cache: what the bytes say, and what the clock says.
# Where seconds grow faster than bytes, that cache's attention is limited by arithmetic
# (unpacking), not by memory.
#
# **Arithmetic that must be done.** A prompt of 512 tokens uses each weight 512 times:
# packed or not, the limit is multiplications. **The rest of the loop.** If products
# take half of a step, making them free makes it twice as fast and no more (Amdahl).
# **And the model itself:** half the weights are half the time, on every machine.


# %%
def prefill(decoder):
    ids = torch.tensor([prompt_ids(plain, 256)])
    return lambda: decoder(ids, last_only=True)


speed = interleave({name: prefill(d) for name, (d, _) in arms.items()}, repeats=3)
table(
    [
        {"recipe": name, "prefill": 256 / timing.median_s}
        for name, timing in speed.items()
    ],
    units={"prefill": "tok/s"},
)

# %% [markdown]
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. The limit of memory
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# A model of 1.5 billion weights, 5 bits each all-in, on a machine that reads 32 GB/s.
# How many tokens a second at most, at one row and a short context?

# %% tags=["exercise"]
tokens_per_s = ...
exercises.check_memory_limit(tokens_per_s)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 32e9 / (1.5e9 x 5 / 8) = 34.1 tok/s.
#
# </details>
#
# ### 2. A line of packed codes
#
# | difficulty | minutes |
# |---|---|
# | medium | 15 |
#
# `codes` are 16 rows of 32 codes (0..15). Return the 64 bytes of line `i` (0..3): for
# each row, four bytes; byte *c* holds column 4i + c in its low four bits and column
# 16 + 4i + c in its high ones.


# %% tags=["exercise"]
def packed_line(codes, i):
    return ...


exercises.check_packed_line(packed_line)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def packed_line(codes, i):
#     return [
#         row[4 * i + c] | row[16 + 4 * i + c] << 4 for row in codes for c in range(4)
#     ]
#
#
# ```
#
# </details>
#
# ### 3. A part for free
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# A step takes 2.4 ms, of which products are 1.2 ms. You make products 2.5 times as
# fast. How many times as fast is the step?

# %% tags=["exercise"]
times_as_fast = ...
exercises.check_part_for_free(times_as_fast)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 2.4 / (1.2 + 1.2 / 2.5) = 1.43. Only 2.0 would be left if products were free.
#
# </details>

# %% [markdown]
# ## What you have seen
#
# The same lines go into the result file of this run, with machine, versions and date.

# %%
closing = Closing.of(plain, "int4 and float32", device)
for name in rungs:
    closing.add(f"product, {name}", "s", rungs[name].nbytes / bandwidth, times[name])
for name in kept:
    share = ratio(by_rows[1][name], by_rows[5][name])
    closing.add(f"five rows over one, {name}", "x", 1.0, share, n=5)
if fast_here:
    slowest = max(timing.median_s for timing in machines.values())
    closing.add("portable over the best, product", "x", None, slowest / best)
    closing.add("Q4_0 over Q4_1 in our kernel", "x", 1.0, ours, n=15)
for (kv, length), timing in grown.items():
    name = f"step, {recipe}, cache {kv}, {length} tokens"
    closing.add(name, "s", bytes_of[kv, length] / bandwidth, timing)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** `labkit bench decode --explain` prints the budget for your model;
# `--peers transformers,llama.cpp` puts others beside it. `labkit bench kernels` times
# the products of every format. On a GPU the same questions have other numbers:
# `labkit/bench/gpu.sh`.
