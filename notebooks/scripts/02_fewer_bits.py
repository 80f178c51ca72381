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
# # 02 · Fewer bits
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/02_fewer_bits.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/02_fewer_bits.py)
# <!-- /badges -->
#
# **The question.** A weight of 32 bits can be held in 4. What does that save, what does
# it cost, and when does it not pay?
#
# **You will be able to**
#
# - say which numbers a format can hold, and what a shared scale does to them;
# - count bits a weight *all-in*, and predict a model's bytes exactly;
# - predict what fewer bits give decode, prefill and batches, and where that ends;
# - read "4× smaller, no loss" in a tutorial, and check it.
#
# | | |
# |---|---|
# | Time | 25 minutes reading, 2 minutes running at `quick`, 30 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 00: why decode waits for bytes and prefill for arithmetic |

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
from functools import partial

import torch

from labkit import load_model, open_model
from labkit.formats import get_format, round_to_nearest
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text
from labkit.lab.measure.bandwidth import flops, read_bandwidth
from labkit.lab.measure.bytes import tensor_bytes
from labkit.lab.measure.clock import interleave, ratio
from labkit.lab.plan.memory import resolve
from labkit.model.native.decoder import unsupported_reason
from labkit.plan.time import compute_bound_batch
from labkit.plan.weights import weight_bytes
from labkit.quant import QuantizedLinear
from labkit.quant.rtn import error, expected_error

# %%
from labkit_course.checks import fewer_bits as exercises
from labkit_course.experiments import published
from labkit_course.experiments import recipes as bench
from labkit_course.experiments.representable import representable
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.number_plots import number_line_plot, rounding_plot
from labkit_course.show.plots import band_plot, bar_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
SIZES = {
    "quick": (256, 12, 5, 3),
    "standard": (2048, 64, 9, 7),
    "full": (8192, 128, 15, 9),
}
text_tokens, new_tokens, rounds, few_rounds = SIZES[scale]
decoder = load_model(model, device=device)
shape = resolve(decoder.config)
print(f"{decoder.name}: {shape.parameters:,} weights in float32")

# %% [markdown]
# ## What a format can hold
#
# Four bits are sixteen codes, whatever they stand for. A format says which sixteen
# numbers. Integers lie evenly; small floats lie densely near zero. None of them can
# hold a weight by itself: a *scale*, shared by many weights, stretches the values until
# the largest weight just fits.

# %%
DRAWN = {
    "int8": "int8_channel",
    "int4": "int4_channel",
    "int3": "int3_channel",
    "fp8 e4m3": "fp8_e4m3",
    "nvfp4 (e2m1)": "nvfp4",
}
fig, ax = canvas(height=3.4)
number_line_plot(
    ax,
    {words: representable(name) for words, name in DRAWN.items()},
    xlabel="value, the largest weight of the group being 1",
)
figure(
    fig,
    "number_formats",
    alt="Number lines from minus one to one. int8 has 255 evenly spaced values, int4 "
    "15, int3 7. The two float formats are dense near zero and sparse at the ends.",
    caption="Computed: every value that a group can hold whose largest weight is 1.",
)

# %% [markdown]
# The scale costs bits too, and so does an offset. A bare "4 bits" hides up to a
# quarter. All-in, for one matrix of this model:

# %%
weight = decoder.layers[decoder.config.num_layers // 2].mlp.down.weight.detach()
FORMATS = (
    "fp32 bf16 fp8_e4m3 int8_channel int4_channel int4_g128_zp int4_g64_zp "
    "int4_g32_sym int4_g32_min nvfp4 int3_g64_zp"
).split()
bits_rows = []
for name in FORMATS:
    held = round_to_nearest(weight, name)
    predicted = get_format(name).nbytes(tuple(weight.shape))
    assert predicted == held.nbytes
    bits_rows.append(
        {
            "format": name,
            "bits a code": get_format(name).bits,
            "all-in": f"{8 * predicted / weight.numel():.3f}",
            "predicted": predicted,
            "measured": held.nbytes,
        }
    )
BOTH = ("predicted", "measured")
print(f"one matrix of {weight.shape[0]} x {weight.shape[1]}")
table(bits_rows, units=dict.fromkeys(BOTH, "bytes"))

# %% [markdown]
# Names say everything: `int4_g64_zp` is 4 bits in groups of 64 along the input, each
# group with a scale and a *zero point* (the code that stands for 0); `_sym` has a scale
# only; `_min` a scale and the group's smallest weight; `_channel` one scale a row.

# %% [markdown]
# ## Who shares a scale?
#
# One scale for the tensor, for each row (*channel*), or for each group of a row. The
# step between two values is the scale. If weights lay anywhere between two values, the
# mean squared error would be
#
# $$\text{error} = \frac{\text{scale}^2}{12}$$
#
# That needs only the scales, so it is a prediction. Below as a share of the weights'
# own size (root mean square).

# %%
size = float(weight.square().mean().sqrt())
share_rows = []
SHARED = (
    "int4_tensor",
    "int4_channel",
    "int4_g64_sym",
    "int4_g32_sym",
    "int4_g32_zp",
    "int4_g32_min",
)
for name in SHARED:
    held = round_to_nearest(weight, name)
    share_rows.append(
        {
            "format": name,
            "bits": f"{8 * held.nbytes / weight.numel():.2f}",
            "predicted": expected_error(held) ** 0.5 / size,
            "measured": error(weight, held) ** 0.5 / size,
        }
    )
table(share_rows, units=dict.fromkeys(BOTH, "%"))

# %% [markdown]
# The smaller the circle that shares a scale, the smaller the error, and the more bits.
#
# Read the last row twice. The prediction says that `int4_g32_min` loses about as much
# as its neighbours, and it loses nothing. **That is this checkpoint, not the format.**
# The default model was published on exactly such a grid (GGUF's Q4_1: groups of 32, a
# float minimum), so its weights *are* such values. No other model gives itself back
# like that. Wherever a number in this lab depends on it, the text says so.

# %% [markdown]
# ## One outlier
#
# A scale follows the largest weight. What does one large weight do to its neighbours?
# We take 32 weights of a row and make one of them 12 times the largest.

# %%
group = weight[0, :32].clone()
struck = group.clone()
struck[20] = 12 * group.abs().max()
others = [i for i in range(32) if i != 20]
cases = {"as it is": group, "one outlier among them": struck}

# %%
fig, axes = canvas(2, height=3.3)
for ax, (title, numbers) in zip(axes, cases.items()):
    held = round_to_nearest(numbers[None], "int4_g32_sym")
    reach = 7 * float(held.scale)
    values = representable("int4_channel", -reach, reach)
    rounding_plot(
        ax,
        numbers[others].tolist(),
        held.dequantize()[0][others].tolist(),
        values,
        title=title,
    )
    ax.set_ylim(-2 * group.abs().max(), 2 * group.abs().max())
figure(
    fig,
    "one_outlier",
    alt="Two plots of 31 weights: where they lie and where they are held. Left, fifteen"
    " values are spread over them and each moves a little. Right, with one outlier in "
    "the group, three values are left in reach and most weights become zero.",
    caption="One group of the matrix above, n = 31 weights; the outlier itself is not "
    "drawn. Lines: values of int4_g32_sym.",
)

# %% [markdown]
# The outlier is held well; the others pay. How many weights pay depends on who shares
# the scale. Prediction: all of the matrix, or one row of it, or one group.

# %%
spoiled = weight.clone()
spoiled[0, 20] = 12 * weight.abs().max()
rows, columns = weight.shape
PAY = {
    "int4_tensor": 1.0,
    "int4_channel": 1 / rows,
    "int4_g32_sym": 32 / weight.numel(),
}
outlier_rows = []
for name, predicted in PAY.items():
    as_it_was = round_to_nearest(weight, name).dequantize()
    paying = (round_to_nearest(spoiled, name).dequantize() != as_it_was).float().mean()
    outlier_rows.append(
        {
            "format": name,
            "predicted": f"at most {predicted:.4%}",
            "weights that moved": f"{paying:.4%}",
        }
    )
table(outlier_rows)

# %% [markdown]
# ## How many bytes?
#
# Three recipes have short names. `bf16` holds everything in 16 bits. `int8` is
# `int8_channel` everywhere. `int4` is `int4_g32_min` in the layers, and `int8_channel`
# for the table of the vocabulary, which is a fifth of this model; what is not a matrix
# is bf16 in both. We predict from the shapes, then count the bytes of the tensors.

# %%
RECIPES = ("fp32", "bf16", "int8", "int4")
models, byte_rows = {}, []
for name in RECIPES:
    models[name] = open_model(model, name, device=device, kernels="torch")
    predicted, held = weight_bytes(shape, name), tensor_bytes(models[name])
    byte_rows.append({"recipe": name, "predicted": predicted, "measured": held})
    assert predicted == held
for row in byte_rows:
    row["of float32"] = row["measured"] / byte_rows[0]["measured"]
table(byte_rows, units=dict.fromkeys(BOTH, "bytes") | {"of float32": "%"})

# %% [markdown]
# ## Same answer?
#
# No: rounding changes weights. How much does the *output* change? For every token of a
# text the model gives a distribution over the vocabulary. We compare it with the
# unchanged model's, and take the mean over tokens:
#
# $$\mathrm{KL} = \sum_v p_v (\log p_v - \log q_v)$$
#
# in nats: 0 is equal; 0.01 is hard to notice; at 1 it is another model. Beside it: how
# often both put the same token first. Code is HumanEval with its solutions, prose is
# documentation.

# %%
texts = ("code", "prose")
task = Text(decoder.tokenizer, text_tokens, texts, length=128, overlap=0)
passages, task = task.items(), task.against(decoder)


def lost(name, changed):
    rows = results(task.metrics, "text", run(task, changed))
    found = {(row["slice"], row["metric"]): row for row in rows}
    cell = {"recipe": name}
    for text in texts:
        kl = found[text, "kl"]
        few = kl["low"] is None  # an interval needs at least six passages
        cell[f"KL, {text}"] = kl["value"]
        cell[f"interval, {text}"] = (
            "too few passages" if few else f"{kl['low']:.4f} – {kl['high']:.4f}"
        )
    return cell | {"same first token": found["all", "top1"]["value"]}


scored = sum(len(passage.tokens) - 1 for passage in passages)
loss_rows = [lost(name, models[name]) for name in RECIPES[1:]]
print(f"n = {scored} tokens in {len(passages)} passages")
table(loss_rows, units={"same first token": "%"})

# %% [markdown]
# `int4` loses no more than `int8` here **only because this checkpoint sits on that
# grid** (above). On other models 4 bits lose visibly, and notebook 03 is about losing
# less. Speed does not depend on it: bits are bits.
#
# ## How fast? Decode
#
# A decode step reads every weight once. *First prediction:* its bytes over this
# machine's read bandwidth. No step can be faster. *Second prediction:* the products,
# each timed by itself in the recipe's own kernel, on made-up weights of the same
# shapes, plus everything between them. The kernels read the packed bits and unpack
# them in registers; a "4-bit" model without such a kernel unpacks in memory and is
# *slower* than float32.

# %%
bandwidth = read_bandwidth(device)
operators = bench.all_operators(
    shape, RECIPES, device=device, max_rows=256, max_batch=32
)
expected = {
    name: bench.predicted_steps(shape, operators[name], [1])[0] for name in RECIPES
}

# %% [markdown]
# **Two kernels for each recipe.** PyTorch's packed operators are what the recipes run
# on above. labkit also has its own in C++, compiled on first use: one call a step,
# instead of hundreds of operators, and a layout of its own. For these the prediction is
# the bytes alone. Where no compiler or no suitable processor is found, the cell says
# so, and the table is shorter.

# %%
native = {}
for name in RECIPES[1:]:
    reason = (
        "They run on CPUs."
        if device != "cpu"
        else unsupported_reason(decoder.config, name)
    )
    if reason:
        print(f"{name}: no native kernels. {reason}")
    else:
        native[f"{name}, native"] = open_model(model, name, kernels="native")
measured = bench.decode_times(
    models | native, prompt_tokens=32, new_tokens=new_tokens, repeats=rounds
)
native.clear()  # their copies of the weights are not needed below

# %%
speed_rows = []
for arm in measured:
    name, by_operators = arm.split(",")[0], expected.get(arm)
    gain = ratio(measured[arm], measured["fp32"])
    speed_rows.append(
        {
            "recipe": arm,
            "bytes alone": bench.roofline_s(shape, name, bandwidth),
            "operators": by_operators,
            "measured": measured[arm].median_s,
            "predicted ×": f"{expected['fp32'] / by_operators:.2f}"
            if by_operators
            else "",
            "measured ×": str(gain),
            "tokens": 1 / measured[arm].median_s,
        }
    )
print(f"read-only bandwidth: {bandwidth / 1e9:.1f} GB/s; TPOT, n = {rounds} rounds;")
print("×: times as fast as float32, with the interval")
table(
    speed_rows,
    units={"bytes alone": "ms", "operators": "ms", "measured": "ms", "tokens": "tok/s"},
)

# %%
fig, ax = canvas(height=2.6)
bar_plot(
    ax,
    {
        name: [1 / t for t in (m.median_s, m.high_s, m.low_s)]
        for name, m in measured.items()
    },
    xlabel="decode [tok/s]",
)
figure(
    fig,
    "decode_by_recipe",
    alt="Bars of decoding speed: float32 is slowest, then bf16, int8 and int4 on "
    "PyTorch's operators; the same three on native kernels are several times faster.",
    caption=f"Median and interval of n = {rounds}, in turns; {decoder.name}, batch 1, "
    f"threads: {torch.get_num_threads()}, {device}.",
)

# %% [markdown]
# Bits fall eight times from `fp32` to the layers of `int4`, bytes about six times, and
# speed less again: scales, the vocabulary's table, attention, and what Python and the
# small operators take do not shrink. The fewer bytes are left, the more the rest shows.
# The native rows show how large that rest is: same weights, same bits, and most of what
# PyTorch's rows take beyond their bytes is gone. (Where they come out *below* the bytes
# alone, the processor's cache keeps part of the weights from one step to the next.)
#
# Everything below uses PyTorch's operators again: they run on every machine.
#
# ## What prefill does not gain
#
# A prefill uses each weight for all its tokens. It waits for arithmetic, and the
# arithmetic is the same: packed weights are unpacked first, then multiplied in bf16.
# So the prediction: whatever bf16 gives on this machine, and a little less.

# %%
PREFILL = 256
fills = bench.prefill_times(models, PREFILL, repeats=few_rounds)
fill_rows = []
for name in RECIPES:
    gain = ratio(fills[name], fills["fp32"])
    guess = {n: bench.predicted_prefill(shape, operators[n], PREFILL) for n in RECIPES}
    fill_rows.append(
        {
            "recipe": name,
            "predicted": guess[name],
            "measured": fills[name].median_s,
            "predicted ×": f"{guess['fp32'] / guess[name]:.2f}",
            "measured ×": str(gain),
        }
    )
print(f"prefill of {PREFILL} tokens, n = {few_rounds} rounds")
table(fill_rows, units=dict.fromkeys(BOTH, "ms"))

# %% [markdown]
# ## The batch at which INT4 stops paying
#
# Between one row and a prefill of hundreds lie batches. The weights are read once for
# all rows; each row adds arithmetic. Two predictions, before anything is run:
#
# - *from the roofline*: the batch from which an `int4` step waits for arithmetic. There
#   its advantage begins to shrink;
# - *from the operators*: the batch at which an `int4` step takes as long as another
#   recipe's.

# %%
BATCHES = (1, 4, 16, 24, 32) if scale == "quick" else (1, 2, 4, 8, 16, 20, 24, 32)
arithmetic = flops("bfloat16", device)
shrinks_from = compute_bound_batch(shape, bandwidth, arithmetic, 64, "int4", "bf16")
print(f"roofline: from batch {shrinks_from} on, int4 waits for arithmetic")
curves = {
    name: bench.predicted_steps(shape, operators[name], BATCHES) for name in RECIPES
}
AGAINST = ("fp32", "bf16", "int8")
ends = {
    name: bench.break_even(BATCHES, curves["int4"], curves[name]) for name in AGAINST
}
for name, batch in ends.items():
    print(
        f"operators: int4 against {name}:",
        f"no longer faster from batch {batch}"
        if batch
        else f"faster up to batch {BATCHES[-1]} at least",
    )

# %%
steps = bench.batch_steps(
    models, BATCHES, repeats=few_rounds, steps=1 if scale == "quick" else 3
)
found = {
    name: bench.break_even(
        BATCHES, [t.median_s for t in steps["int4"]], [t.median_s for t in steps[name]]
    )
    for name in AGAINST
}
beyond = f"> {BATCHES[-1]}"
table(
    [
        {
            "int4 against": name,
            "predicted": ends[name] or beyond,
            "measured": found[name] or beyond,
        }
        for name in AGAINST
    ]
)

# %%
fig, ax = canvas(height=3.8)
rate = {
    name: [
        tuple(b / t for t in (m.median_s, m.high_s, m.low_s))
        for b, m in zip(BATCHES, steps[name])
    ]
    for name in RECIPES
}
guess = {name: [b / s for b, s in zip(BATCHES, curves[name])] for name in RECIPES}
band_plot(ax, BATCHES, rate, guess, xlabel="batch", ylabel="tokens out [tok/s]")
ax.axvline(16.5, color="#888888", linewidth=0.9, linestyle=":")
figure(
    fig,
    "batch_by_recipe",
    alt="Tokens per second over the batch for four recipes, measured and predicted. At "
    "batch 1 int4 leads. After batch 16, a dotted line, int4 and int8 fall behind.",
    caption=f"Measured: median and interval of n = {few_rounds}. Dotted: more than 16 "
    f"rows leave the packed kernels. Past 64 tokens; threads: "
    f"{torch.get_num_threads()}, {device}.",
)

# %% [markdown]
# Two things end the gain. Slowly: arithmetic, which a 4-bit weight does not save. And
# at once, at 17 rows: PyTorch's packed operators are made for few rows, so labkit
# unpacks the whole weight there, in every step. For a prefill of hundreds of tokens
# that is cheap; for a batch of 24 it is not. A server that always runs full batches
# should ask this question first.
#
# ## Exhibit: the three-line recipe
#
# You will find these lines in many tutorials, with "4× smaller and faster, in three
# lines":
#
# ```python
# model_int8 = torch.quantization.quantize_dynamic(
#     model, {torch.nn.Linear}, dtype=torch.qint8
# )
# ```
#
# Predict first. It turns linear layers to int8, and never touches the embedding. In
# this model the head *is* the embedding's table; the recipe makes an int8 copy for the
# head and keeps the table in float32 beside it.

# %%
reason = published.why_not() or (None if device == "cpu" else "It runs on CPUs only.")
linear = sum(
    m.weight.numel() for m in decoder.modules() if isinstance(m, torch.nn.Linear)
)
embedding = 4 * decoder.embed_tokens.weight.numel()
before = weight_bytes(shape, "fp32")
print(f"linear layers: {linear:,} B in int8; embedding: {embedding:,} B in float32")
print(f"predicted: {before / (linear + embedding):.2f} times smaller, not 4")
three_lines = None if reason else published.quantize_dynamic(decoder)
if reason:
    print(reason)

# %%
exhibit = {}
if three_lines is not None:
    parts = published.published_bytes(three_lines)
    print({part: f"{size / 2**20:.1f} MiB" for part, size in parts.items()})
    exhibit = bench.decode_times(
        {"three lines": three_lines, "int8": models["int8"], "fp32": models["fp32"]},
        new_tokens=new_tokens,
        repeats=rounds,
    )

# %%
published_rows = []
if exhibit:
    both = (
        ("three lines", sum(parts.values()), lost("three lines", three_lines)),
        ("int8", byte_rows[2]["measured"], loss_rows[1]),
    )
    for name, size_now, loss in both:
        gain = ratio(exhibit[name], exhibit["fp32"])
        published_rows.append(
            {
                "recipe": name,
                "bytes": size_now,
                "times smaller": before / size_now,
                "decode ×": str(gain),
                "KL, code": loss["KL, code"],
                "KL, prose": loss["KL, prose"],
                "same first token": loss["same first token"],
            }
        )
table(
    published_rows or [{"recipe": "three lines", "result": reason}],
    units={"bytes": "bytes", "same first token": "%"} if published_rows else None,
)

# %% [markdown]
# The speed is real: here is a kernel for exactly this. The size is not: the claim
# counts the linear layers and forgets the rest. And the text is another model's: one
# scale for a whole matrix (see *Who shares a scale?*) and rounded activations cost
# hundreds of times the KL of one scale a row. A tutorial that shows size and speed
# and no text cannot tell.
#
# "4×" is right for a model whose embedding is small beside its layers; on small models
# with large vocabularies it never is. PyTorch has since declared these lines obsolete.

# %% [markdown]
# ## When does it lose?
#
# You have seen two cases: prefill, and batches beyond the kernels. The third is the
# usual complaint, "my quantised model is slower": *a format without a kernel*. Three
# bits are fewer than four, but nobody wrote the operator here. Each call unpacks the
# matrix: it writes the float32 matrix and reads it again, besides the codes.
# Prediction: slower than float32, although it reads a tenth of the bytes.

# %%
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says so, which is the point of this cell
    no_kernel = QuantizedLinear(round_to_nearest(weight, "int3_g64_zp"))
packed = QuantizedLinear(round_to_nearest(weight, "int4_g64_zp"))
plain = torch.nn.Linear(columns, rows, bias=False, device=device)
plain.weight.data = weight
x = torch.randn(1, columns, device=device)

# %%
layers = {"fp32": plain, "int4_g64_zp": packed, "int3_g64_zp": no_kernel}
with torch.inference_mode():
    calls = {name: partial(layer, x) for name, layer in layers.items()}
    one = interleave(calls, repeats=20, device=device)
products = [
    {
        "one product in": name,
        "time": timing.median_s,
        "times float32": str(ratio(timing, one["fp32"])),
    }
    for name, timing in one.items()
]
table(products, units={"time": "us"})

# %% [markdown]
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. All-in
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# How many bits does a weight take in INT4, groups of 128, each group with a float16
# scale and a 4-bit zero point?

# %% tags=["exercise"]
bits_all_in = ...
exercises.check_bits_all_in(bits_all_in)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 4 + (16 + 4) / 128 = 4.15625.
#
# </details>
#
# ### 2. Round to nearest
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# Hold a list of weights as symmetric integers of `bits` bits with one scale, and return
# what they are afterwards. Mind a group of zeros.


# %% tags=["exercise"]
def hold(weights, bits):
    return ...


exercises.check_round_trip(hold)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def hold(weights, bits):
#     scale = max(abs(w) for w in weights) / (2 ** (bits - 1) - 1)
#     if scale == 0:
#         return weights
#     return [round(w / scale) * scale for w in weights]
#
#
# ```
#
# </details>
#
# ### 3. The most that fewer bits give
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# A model has 8,000,000,000 weights in bf16. You hold 7 of the 8 billion in 4.5 bits
# all-in; the vocabulary's table stays as it is. Decode waits for bytes only. How many
# times faster can it become?

# %% tags=["exercise"]
most_speedup = ...
exercises.check_most_speedup(most_speedup)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 16 GB before; 7·10⁹ · 4.5 / 8 + 10⁹ · 2 = 5.94 GB after: 2.69 times.
#
# </details>
#
# ### 4. Where it stops
#
# | difficulty | minutes |
# |---|---|
# | harder | 10 |
#
# An accelerator reads 300 GB/s and computes 60 TFLOP/s in bf16. Compare weights of 4
# bits with weights of 16, both multiplied in bf16; leave cache and scales aside. From
# which batch does the advantage shrink, and from which is none left?

# %% tags=["exercise"]
shrinks, gone = ..., ...
exercises.check_where_it_stops(shrinks, gone)

# %% [markdown]
# <details><summary>Solution</summary>
#
# A step of *B* rows takes 2 *B* operations a weight. With half a byte a weight,
# arithmetic takes over at 2 *B* / 60·10¹² = 0.5 / 300·10⁹: *B* = 50. With two bytes it
# does at *B* = 200, and from there both take the same time.
#
# </details>

# %% [markdown]
# ## What you have seen
#
# The same lines go into the result file of this run, with machine, versions and date.

# %%
closing = Closing.of(decoder, "float32", device)
for row in byte_rows:
    closing.add(f"weights, {row['recipe']}", "B", row["predicted"], row["measured"])
for arm in measured:
    closing.add(f"TPOT, {arm}", "s", expected.get(arm), measured[arm])
for name in RECIPES[1:]:
    faster = expected["fp32"] / expected[name]
    gain = ratio(measured[name], measured["fp32"])
    closing.add(f"decode, {name}/fp32", "x", faster, gain, n=rounds)
    filled = {
        arm: bench.predicted_prefill(shape, operators[arm], PREFILL)
        for arm in ("fp32", name)
    }
    faster, gain = filled["fp32"] / filled[name], ratio(fills[name], fills["fp32"])
    closing.add(f"prefill, {name}/fp32", "x", faster, gain, n=few_rounds)
for row in loss_rows:
    closing.add(f"KL on code, {row['recipe']}", "nats", None, row["KL, code"], n=scored)
if published_rows:
    smaller = published_rows[0]["times smaller"]
    predicted = before / (linear + embedding)
    closing.add("three lines, times smaller", "x", predicted, smaller)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on** with notebook 03: which 4 bits, so that less is lost. The same numbers on
# the command line: `labkit bench decode --formats fp32,bf16,int8,int4`, and
# `labkit eval text --recipe int4_g64_zp`.
