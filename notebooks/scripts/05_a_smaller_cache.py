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
# # 05 · A smaller cache
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/05_a_smaller_cache.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/05_a_smaller_cache.py)
# <!-- /badges -->
#
# **The question.** The KV cache decides how many users and how much text fit into
# memory. Which part of it can go: bits, old tokens, or unimportant ones? And what does
# the model then no longer know?
#
# **You will be able to**
#
# - say why keys want one scale per channel and values one per token, and show it on a
#   model's own keys;
# - count the bytes of a quantised cache all-in, and read its loss *through* the cache;
# - name what a window forgets, what its sinks save, and what they do not;
# - predict when a smaller cache is slower.
#
# | | |
# |---|---|
# | Time | 25 minutes reading, 2 minutes running at `quick`, 25 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 01 (what the cache is); 02 explains scales and KL in more depth |

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
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from labkit import load_model
from labkit.cache import CACHES, eviction, make_cache, quantized_cache, windowed_cache
from labkit.lab.evals.passages import Remembered
from labkit.lab.evals.report import results
from labkit.lab.evals.text import Text
from labkit.lab.evals.through_cache import ThroughCache
from labkit.lab.measure.bandwidth import read_bandwidth
from labkit.lab.measure.clock import median_interval, ratio
from labkit.plan.kv import kv_bytes
from labkit.plan.kv_formats import Part, get_kv_format
from labkit_course.checks import smaller_cache as exercises
from labkit_course.experiments import kv_errors, kv_steps, recall
from labkit_course.show.cache_plots import attention_plot, channels_plot
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.loss_plots import bits_loss_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
SIZES = {
    "quick": (640, 640, 1024, 7),
    "standard": (1024, 1024, 2048, 15),
    "full": (8192, 1024, 4096, 25),
}
limit, length, long_context, repeats = SIZES[scale]
quick = scale == "quick"
slices = ("prose",) if quick else ("code", "prose")
decoder = load_model(model, device=device)
config, shape = decoder.config, decoder.config.kv_shape
print(
    f"{decoder.name}: {config.num_layers} layers,",
    f"{config.num_kv_heads} KV heads of {config.head_dim};",
    f"{kv_bytes(shape, 1, kv_format='bf16'):,} bytes a token in bf16",
)

# %% [markdown]
# ## The keys of a real model
#
# We read a page of prose and look at what the cache then holds. Each token left, in
# each layer and KV head, a key and a value of `head_dim` numbers. Below is one head,
# the one where channels differ most: a row is a token, a column a channel, dark is
# large.

# %%
through = ThroughCache("int8", length=length)
passages = Text(decoder.tokenizer, limit, slices, through=through).items()
page = passages[-1].tokens[:512]
keys, values = kv_errors.keys_and_values(decoder, page)
layer, head = kv_errors.loudest(keys)
fig, (left, right) = canvas(2, height=3.6)
for ax, side, name in ((left, keys, "keys"), (right, values, "values")):
    sizes = side[layer][head, :96].abs()
    channels_plot(
        ax,
        sizes.tolist(),
        most=float(sizes.quantile(0.97)),
        title=f"{name}, layer {layer}, head {head}",
    )
figure(
    fig,
    "keys_and_values",
    alt="Two grey maps of 96 tokens by head_dim channels. The map of keys has dark "
    "vertical stripes: a few channels are large in every token. The map of values "
    "is more even.",
    caption="Sizes of keys and values as cached, n = 96 tokens of prose; in each map "
    "the largest 3 % of its numbers are black.",
)

# %% [markdown]
# The keys have stripes: the same few channels are large in *every* token. The values
# have far less of that. As a number: the largest channel over the median channel, in
# the middle one of all layers and heads.

# %%
stripes = {"keys": kv_errors.spread(keys), "values": kv_errors.spread(values)}
for name, times in stripes.items():
    print(f"{name}: the largest channel is {times:.1f} times the median channel")

# %% [markdown]
# ## Who should share a scale?
#
# Four bits are 16 steps between a minimum and a maximum. Whoever shares them shares the
# width of a step, and the largest decides it:
#
# $$\text{value} = \text{minimum} + \text{code} \cdot \text{step}, \qquad
# \text{error} \approx \text{step} / \sqrt{12}$$
#
# If the numbers of one *token* share, a loud channel makes the step wide for all its
# quiet neighbours. If 32 tokens of one *channel* share, the loud channel keeps its
# noise to itself. For numbers without stripes it should make little difference. The
# formula needs only minima and maxima, so it predicts; then we quantise and measure.
# Both as a share of the numbers' own size.

# %%
TOKEN, CHANNEL = Part(4, "token", None, 16, 16), Part(4, "channel", 32, 16, 16)
TENSOR = Part(4, "tensor", 32, 16, 16)
share_rows = []
for name, side in (("keys", keys), ("values", values)):
    for who, part in (
        ("a token", TOKEN),
        ("a channel, 32 tokens", CHANNEL),
        ("everything, 32 tokens", TENSOR),
    ):
        expected, found = kv_errors.relative_errors(side, part)
        share_rows.append(
            {"4-bit": name, "shared by": who, "predicted": expected, "measured": found}
        )
table(share_rows, units={"predicted": "%", "measured": "%"})

# %% [markdown]
# Keys: per channel. Values: both do, and per token is simpler, since it needs no
# waiting for 32 tokens. That is the format of the KIVI paper, here called `int4`.
# (The queries weigh the channels, so the error of *scores* is not quite the error of
# keys. What it does to the text, we measure below.)
#
# ## The mechanism
#
# A scale per channel needs 32 tokens at once, and decode brings one. So the newest
# tokens wait in full precision, the *residual tail*: at most 64. Where one more would
# not fit, the oldest 32 of them are packed, once and for good. Formats are data:

# %%
for name in ("int8", "int4"):
    form = get_kv_format(name)
    print(f"{name}: {form.name}, block {form.block}, tail at most {form.tail}")
    print(f"   keys   {form.keys}\n   values {form.values}")
cache = make_cache("int4", shape, capacity=256, device=device)
tail_rows = []
for piece in torch.tensor([page[:130]], device=device).split([64, 1, 31, 1, 33], 1):
    decoder.hidden_states(piece, cache)
    packed = cache.bulks[0].tokens
    tail_rows.append(
        {
            "tokens in": piece.shape[1],
            "held": cache.length,
            "packed": packed,
            "in the tail": cache.length - packed,
        }
    )
table(tail_rows)

# %% [markdown]
# After the first packing the tail holds 33 to 64 tokens, never none. Attention reads the
# packed blocks where they lie. No full-precision copy of the cache exists at any time.
#
# ## How many bytes?
#
# "4-bit cache: a quarter of 16 bits" leaves out the scales, and the tail. All-in:
#
# - `int8`: a token of a head has 8 bits a number, and a bf16 scale *and* a bf16 minimum
#   (32 bits together);
# - `int4`: keys the same 32 bits for each channel and 32 tokens, values for each token;
#   and the tail in 16 bits.

# %%
FORMATS = ("bf16", "int8", "fp8", "int4", "nvfp4", "int2")
tokens = 1024
byte_rows = []
for name in FORMATS:
    kind = "contiguous" if name == "bf16" else name
    maker = kind if kind in CACHES else quantized_cache(name)
    made = make_cache(maker, shape, capacity=tokens, dtype=torch.bfloat16)
    made.advance(tokens)  # announce that many: the tensors grow to their size
    byte_rows.append(
        {
            "format": name,
            "bits of a code": 16 if name == "bf16" else get_kv_format(name).keys.bits,
            "predicted": kv_bytes(shape, tokens, kv_format=name),
            "measured": made.nbytes(),
        }
    )
    assert byte_rows[-1]["predicted"] == byte_rows[-1]["measured"]

# %%
for row in byte_rows:
    row["of bf16"] = row["measured"] / byte_rows[0]["measured"]
for name in ("int4", "int2"):
    share = kv_bytes(shape, 2**20, kv_format=name) / kv_bytes(shape, 2**20)
    print(f"{name} of a million tokens: {share:.1%} of bf16")
BOTH = ("predicted", "measured")
print(f"{tokens:,} tokens")
table(byte_rows, units=dict.fromkeys(BOTH, "bytes") | {"of bf16": "%"})

# %% [markdown]
# Equal to the byte. The longer the text, the less the tail shows: the shares fall to
# those of a million tokens, but never to 25 % and 12.5 %. Scales are not free.
#
# ## Same answer?
#
# No. How different, in nats (KL, notebook 02), and how often the same token comes
# first? There is a trap here: if the prompt is read at once in full precision and the
# cache is quantised afterwards, the test reads nothing that was rounded. So the text
# passes in chunks of 16, each reading what the cache holds, and only tokens behind 512
# others are scored. Then nine in ten of the keys read are quantised ones.

# %%
unchanged = Remembered(decoder, passages)


def lost(name, kv_format, cache=None):
    how = ThroughCache(kv_format, length=length, cache=cache)
    task = Text(None, reference=unchanged, through=how)
    rows = results(task.metrics, "text", list(task.score(decoder, passages)))
    found = {(row["slice"], row["metric"]): row["value"] for row in rows}
    each = {} if quick else {f"KL, {part}": found[part, "kl"] for part in slices}
    return {
        "cache": name,
        **each,
        "KL": found["all", "kl"],
        "same first token": found["all", "top1"],
    }


# %%
scored = sum(len(passage.tokens) - 512 for passage in passages)
NAMES = {
    "int8": "int8",
    "int4": "int4: keys per channel",
    "int4_token": "int4: keys per token",
    "int2": "int2: keys per channel",
}
if not quick:
    NAMES |= {"int4_tensor": "int4: keys share one"}
    NAMES |= {
        "fp8": "fp8",
        "nvfp4": "nvfp4",
        "int2_token": "int2: keys per token",
        "int4_prerope": "int4: keys before RoPE",
    }
loss_rows = [lost(words, name) for name, words in NAMES.items()]
for row, name in zip(loss_rows, NAMES):
    row["bits"] = 16 * kv_bytes(shape, length, kv_format=name) / kv_bytes(shape, length)
print(f"n = {scored} scored tokens of {' and '.join(slices)}")
table(loss_rows, units={"same first token": "%"})

# %% [markdown]
# In nats a token: 0.01 is hard to notice. The rows of `int4` have codes of the same
# size and almost the same bytes; only who shares a scale differs. That is the picture
# with the stripes, in numbers. One page gives no interval: at `quick`, trust
# differences of several times, not of a few per cent. `standard` has longer pages, of
# prose and of code.

# %%
fig, ax = canvas(height=3.3)
by_name = dict(zip(NAMES, loss_rows))
series = {
    "keys per channel (int8: per token)": ("int8", "int4", "int2"),
    "keys per token": ("int4_token",),
}
if not quick:
    series["keys share one scale"] = ("int4_tensor",)
at = {n: (by_name[n]["bits"], (by_name[n]["KL"],) * 3) for n in by_name}
bits_loss_plot(
    ax,
    {words: [at[n] for n in names] for words, names in series.items()},
    xlabel=f"bits a number, all-in, at {length:,} tokens",
)
spoken = ", ".join(f"{row['cache']} {row['KL']:.2g}" for row in loss_rows)
figure(
    fig,
    "kv_bits_and_loss",
    alt="KL over bits a number, on a logarithmic axis. In nats: " + spoken,
    caption=f"Read through the cache, n = {scored} tokens of {' and '.join(slices)}; "
    f"{decoder.name}, {length} tokens a passage.",
)

# %% [markdown]
# ## The tail, on and off
#
# The tail costs bytes. Does it save anything but the waiting? With keys per channel, 31
# tokens is the least that a tail can be; with keys per token, none is needed at all
# (`standard` measures that, too). *Prediction:* the newest tokens get much of the
# attention, so a longer tail loses less.

# %%
TAILS = {"int4": (31, 64)}
if not quick:
    TAILS |= {"int4_token": (0, 64), "int2": (31, 64, 128)}
tail_loss = []
for name, tails in TAILS.items():
    for tail in tails:
        form = replace(get_kv_format(name), tail=tail)
        row = by_name[name] if tail == 64 else lost(name, form)
        size = 16 * kv_bytes(shape, length, kv_format=form) / kv_bytes(shape, length)
        tail_loss.append(
            {
                "format": f"{name}, tail {tail}",
                "bits all-in": size,
                "KL": row["KL"],
                "same first token": row["same first token"],
            }
        )
print(f"n = {scored} scored tokens")
table(tail_loss, units={"same first token": "%"})

# %% [markdown]
# KL over a whole text says little about any one thing in it. Two questions that a user
# would notice follow.
#
# ## Who said what
#
# Forty lines by four speakers, who speak one after the other; then a line is quoted and
# its speaker asked for:

# %%
said = recall.who_said_what(decoder.tokenizer, questions=24)
text = decoder.tokenizer.decode(said.tokens)
print("\n".join(text.splitlines()[:3]), "\n…")
print("asked:", said.questions[2].text, "→", said.questions[2].options)
print(f"{len(said.tokens)} tokens, {len(said.questions)} questions; chance 25 %")

# %% [markdown]
# The model is small, so it need not write the answer. We compare the log-probabilities
# of the four names, each less its mean over all questions (a model likes some names
# whatever was said). The *margin* is that of the right name less the best wrong one's,
# in nats, right where above 0. The text is read once; all questions share the cache.
#
# Is a model of this size good at it at all? In full precision, on more than one text:

# %%
OTHERS = (1,) if quick else (1, 2, 3, 4)
full, seen = recall.ask(decoder, said, CACHES["contiguous"])
shares = [recall.share_right(full)]
for seed in OTHERS:
    other = recall.who_said_what(decoder.tokenizer, questions=24, seed=seed)
    answers, _ = recall.ask(decoder, other, CACHES["contiguous"])
    shares.append(recall.share_right(answers))
found = ", ".join(f"{share:.0%}" for share in shares)
luck = 200 * (0.25 / len(full)) ** 0.5
print(f"right, by text: {found}; chance 25 %")
print(f"one share of {len(full)} may be off by {luck:.0f} points by luck alone")

# %% [markdown]
# So the share right is too coarse to compare caches with. What we can do: put the *same*
# question to two caches and see how its margin moves. That is paired, and how hard a
# question is drops out. Below, the median move over the questions with its 95 %
# interval; where the interval holds 0, these questions leave it **undecided**. (The
# interval is over the questions of this one text, and knows nothing of other texts.)
#
# Besides bits, there are two other ways to a smaller cache. A **window** keeps the newest
# 256 tokens, here with 4 **sinks**, the first tokens of the text. **Eviction** keeps 256
# tokens too, but chooses: those that got the most attention so far. *Prediction:*
# `int8` moves nothing; a window moves the older lines and not the newest.

# %%
KEPT = 256
ARMS = {
    "int8": CACHES["int8"],
    "int4": CACHES["int4"],
    "int2": CACHES["int2"],
    "window 256 + 4 sinks": windowed_cache(KEPT, sinks=4),
    "evicting to 256": partial(CACHES["observed"], budget=KEPT),
}
if not quick:
    ARMS["window 256"] = windowed_cache(KEPT)
newest = [q.place > len(said.tokens) - KEPT + 16 for q in said.questions]


def moved(answers, others, which=None):
    by = [a.margin - b.margin for a, b in zip(answers, others)]
    if which is not None:
        by = [move for move, chosen in zip(by, which) if chosen]
    low, high, _ = median_interval(by)
    word = "worse" if high < 0 else "better" if low > 0 else "undecided"
    return f"{median(by):+.2f} [{low:+.2f}, {high:+.2f}] {word}"


# %%
watched, told = {"fp32": seen}, {"fp32": full}
for name, maker in ARMS.items():
    told[name], watched[name] = recall.ask(decoder, said, maker)
older = [not n for n in newest]
said_rows = [
    {
        "cache": name,
        "right": recall.share_right(answers),
        "margin": recall.mean_margin(answers),
        "newest lines": None if answers is full else moved(answers, full, newest),
        "older lines": None if answers is full else moved(answers, full, older),
    }
    for name, answers in told.items()
]
near = sum(newest)
print(
    f"n = {len(full)} questions; {near} about the newest 240 tokens,",
    f"{len(full) - near} about older lines; moves against fp32 in nats",
)
table(said_rows, units={"right": "%"})
moves = [row[side] for row in said_rows[1:] for side in ("newest lines", "older lines")]
undecided = sum("undecided" in move for move in moves)
print(f"{undecided} of {len(moves)} moves are undecided")

# %% [markdown]
# Read the last two columns, and only where they decide. An *undecided* move with a
# narrow interval says: if there is harm, it is smaller than that. One with a wide
# interval says nothing, and then neither does the share right beside it: it may look
# much worse, or better, by luck. A window **cannot** know a line that it no longer
# holds, whatever the model; but a model that hardly knew it before has little to lose.
#
# ### Where the model looks
#
# The same in a picture. Of all heads we take the one that looks hardest at the right
# lines in full precision (picked on these questions, so its own number flatters it),
# and see where the last token of each question looks, before and after. The squares
# mark where the answers stand.

# %%
layer, head = recall.best_head(said, watched["fp32"])
SHOWN = ("fp32", "int4", "int2", "window 256 + 4 sinks")
where = [said.lines[question.place] for question in said.questions]
on_lines, look_rows = {}, []
for name in SHOWN:
    weights, positions = watched[name].weights(layer)
    on_lines[name] = recall.by_line(said, weights[:, head], positions)
    hit = [float(on_lines[name][i, line]) for i, line in enumerate(where)]
    near_hit = sum(h for h, new in zip(hit, newest) if new) / near
    old_hit = (sum(hit) - near * near_hit) / (len(hit) - near)
    look_rows.append({"cache": name, "newest lines": near_hit, "older lines": old_hit})
most = float(on_lines["fp32"].quantile(0.995))
fig, axes = canvas(4, width=11, height=3.6)
for ax, name in zip(axes, SHOWN):
    attention_plot(ax, on_lines[name].tolist(), where, most=most, title=name)

# %%
figure(
    fig,
    "who_said_what",
    alt="Four maps of attention, questions by lines of the text, with squares where "
    "the answers stand. Mean attention on the answer's line, if old: "
    + ", ".join(f"{row['cache']} {row['older lines']:.2f}" for row in look_rows)
    + ". With a window, lines that left it are white, except the first with its sinks.",
    caption=f"Attention of layer {layer}, head {head} from the last token of each "
    f"question, n = {len(where)} questions; black: {most:.2f} and more of it.",
)
print("mean attention on the answer's line")
table(look_rows)

# %% [markdown]
# Older lines are not all white with a window: the first holds the sinks, and a few are
# still inside its edge. What the others got goes to the lines that are left, the right
# ones and the wrong ones.
#
# ## The first clause of a contract
#
# A contract with five facts among its clauses: the first is clause 1, the last stands
# near the end. Each is asked for at the end. The last row asks without the contract
# (after its last words only): what the model would say of *any* contract.

# %%
deed = recall.contract(decoder.tokenizer)
text = decoder.tokenizer.decode(deed.tokens)
print("\n".join(text.splitlines()[:3]), "\n…")
READ = ("int4", "window 256 + 4 sinks", "evicting to 256") if quick else tuple(ARMS)
makers = {"fp32": CACHES["contiguous"], **ARMS}
asked = {name: recall.ask(decoder, deed, makers[name])[0] for name in ("fp32", *READ)}
blank = replace(deed, tokens=deed.tokens[-8:], lines=deed.lines[-8:])
asked["contract not read"] = recall.ask(decoder, blank, CACHES["contiguous"])[0]
clause_rows = []
for name, answers in asked.items():
    row = {"cache": name, "right": f"{sum(a.right for a in answers)} of {len(answers)}"}
    for answer in answers:
        row[f"at {answer.question.place / len(deed.tokens):.0%}"] = answer.margin
    clause_rows.append(row)
kept_from = 1 - KEPT / len(deed.tokens)
print(f"{len(deed.tokens)} tokens; margin in nats by where the fact stands")
print(f"a window of {KEPT} holds what stands behind {kept_from:.0%}")
table(clause_rows)

# %% [markdown]
# Read the columns, and compare each with the last row. Of clauses inside it a window
# still knows; of those before, it can only guess, and a guess may be right. Nothing
# warns you; the answer is as fluent as before. Eviction kept what the *text* attended
# to. The question came afterwards, and whether clause 1 was still there was luck. Five
# facts show the mechanism; they are too few to rank methods.
#
# ## What sinks save, and what they do not
#
# "With sinks a window loses nothing" is measured on the next token of running text. Here
# is that measurement:

# %%
window_rows = []
for name, sinks in (("window 256", 0), ("window 256 + 4 sinks", 4)):
    window_rows.append(lost(name, "fp32", windowed_cache(KEPT, sinks=sinks)))
print(f"n = {scored} scored tokens, each behind 512 others or more")
print(f"4 sinks: KL falls by {window_rows[0]['KL'] / window_rows[1]['KL']:.0f} times")
table(window_rows, units={"same first token": "%"})

# %% [markdown]
# Heads that have nothing to look at look at the first token. Take it away, and they
# must look at something: that is what sinks repair, for four tokens' memory. What left
# the window stays forgotten, sinks or not, and so are the clauses above.
#
# A model *trained* with windows (Mistral, most layers of Gemma 3) never sees more, and
# for it the windowed cache is exact. So is a window that is longer than the text,
# whatever the chunks in which it came:

# %%
whole = decoder.new_cache(1, 640)
banded = windowed_cache(length)(shape, capacity=640, device=device)  # window ≥ text
ids = torch.tensor([page[:96]], device=device)
in_one = decoder(ids, whole)
in_chunks = torch.cat([decoder(piece, banded) for piece in ids.split(7, 1)], 1)
different = int((in_one.argmax(-1) != in_chunks.argmax(-1)).sum())
print(f"window ≥ text, in chunks of 7: {different} of {ids.shape[1]} tokens differ")
assert different == 0

# %% [markdown]
# ## Add your own
#
# Eviction is one function: what is a token worth? This is the whole of the two methods
# that labkit has as examples. The mechanism (sinks and the newest always stay, each
# layer chooses for itself) is in `EvictingCache`.

# %%
print(inspect.getsource(eviction.KeyNorm))
print(inspect.getsource(eviction.Observed))


# %%
class AnyTokens(eviction.EvictingCache):
    """The null hypothesis: which tokens stay is drawn once a token."""

    def score(self, layer, queries, scale):
        notes = self.notes[layer]  # a note stays with its token; new ones are 0
        self.notes[layer] = torch.where(notes == 0, torch.rand_like(notes), notes)
        return self.notes[layer]


# %%
torch.manual_seed(0)
any_tokens, _ = recall.ask(decoder, said, partial(AnyTokens, budget=KEPT))
own = {"any tokens": any_tokens, "observed": told["evicting to 256"]}
if not quick:
    own["key norm"], _ = recall.ask(
        decoder, said, partial(CACHES["key_norm"], budget=KEPT)
    )
table(
    [
        {
            "keeps": name,
            "right": recall.share_right(answers),
            "margin": recall.mean_margin(answers),
            "against any tokens": None
            if name == "any tokens"
            else moved(answers, any_tokens),
        }
        for name, answers in own.items()
    ],
    units={"right": "%"},
)

# %% [markdown]
# A method that does not beat *any tokens* has found nothing, at least on this text; and
# *undecided* is not a victory. With one line in
# `labkit.cache.CACHES` yours has a name, and the tests of all caches run on it.
#
# ## When is it slower?
#
# A decode step reads weights and cache. Fewer bits are fewer bytes, so it should be
# faster. *First prediction*, from bytes alone: the cache's share of what a step reads.

# %%
fast = load_model(model, dtype=torch.bfloat16, device=device)
bandwidth, weights = read_bandwidth(device), sum(p.nbytes for p in fast.parameters())
KV = ("bf16", "int8", "int4")
by_bytes = {
    name: (weights + kv_bytes(shape, long_context, kv_format=name)) / bandwidth
    for name in KV
}
print(f"{long_context:,} tokens; bandwidth {bandwidth / 1e9:.1f} GB/s")
print(
    f"weights {weights / 1e6:.0f} MB, cache in bf16",
    f"{kv_bytes(shape, long_context) / 1e6:.0f} MB",
)

# %% [markdown]
# *Second prediction*: codes must become numbers before they can be multiplied. We time
# one layer's attention alone, on made-up keys, and a step behind 64 tokens for the
# rest. Then the whole step at the long context, which the prediction has not seen.

# %%
L = config.num_layers
near_layer = kv_steps.layer_times(shape, config.num_heads, ["bf16"], 64, device=device)
near_step = kv_steps.step_times(fast, ["bf16"], 64, repeats=repeats)["bf16"]
rest = kv_steps.rest_of_step(near_step, L, near_layer["bf16"])
far_layer = kv_steps.layer_times(
    shape, config.num_heads, KV, long_context, device=device
)
expected = {name: kv_steps.predicted(rest, L, far_layer[name]) for name in KV}
measured = kv_steps.step_times(fast, KV, long_context, repeats=repeats)

# %%
gains = {name: ratio(measured[name], measured["bf16"]) for name in KV}
for name in KV[1:]:
    low, high = gains[name].low, gains[name].high
    word = (
        "faster than" if low > 1 else "slower than" if high < 1 else "undecided against"
    )
    print(f"{name}: {word} bf16")
step_rows = [
    {
        "KV": name,
        "one layer": far_layer[name].median_s,
        "step, predicted": expected[name],
        "step, measured": measured[name].median_s,
        "× by bytes": f"{by_bytes['bf16'] / by_bytes[name]:.2f}",
        "× predicted": f"{expected['bf16'] / expected[name]:.2f}",
        "× measured": str(gains[name]),
    }
    for name in KV
]
print(f"n = {repeats}; ×: times as fast as bf16 keys and values")
table(
    step_rows,
    units={"one layer": "ms", "step, predicted": "ms", "step, measured": "ms"},
)

# %% [markdown]
# By bytes alone, fewer bits win. But the codes must be unpacked: `int8` has a kernel
# that turns codes into floats inside the core's own cache, `int4` per channel is decoded
# by ordinary operators, and the lines above say what came of it on this machine. What a
# smaller cache buys everywhere is *room*: more users, or a longer text. It buys speed
# where attention waits for memory: long contexts, many rows, and kernels made for it.

# %%
room_rows = []
for name in KV:
    each = kv_bytes(shape, 8192, kv_format=name)
    room_rows.append(
        {
            "KV": name,
            "one sequence": each,
            "sequences in 4 GiB": (4 * 2**30 - weights) // each,
        }
    )
print("8,192 tokens a sequence, weights in bf16 beside them")
table(room_rows, units={"one sequence": "bytes"})

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
# A model has `head_dim` 128. Its cache holds `int8` per token: each token and head has
# a scale and a minimum in bf16. How many bits does a number take?

# %% tags=["exercise"]
kv_bits = ...
exercises.check_kv_bits(kv_bits)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 8 + 32 / 128 = 8.25. (Keys and values are held alike, so it is the same for both.)
#
# </details>
#
# ### 2. A scale per channel
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# Hold the keys [T, D] of one head in `bits` bits, each *channel* with a minimum and a
# step of its own, and return what they are afterwards. Mind a channel that never
# changes.


# %% tags=["exercise"]
def hold_per_channel(keys, bits):
    return ...


exercises.check_per_channel(hold_per_channel)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def hold_per_channel(keys, bits):
#     low, high = keys.amin(0, keepdim=True), keys.amax(0, keepdim=True)
#     step = ((high - low) / (2**bits - 1)).clamp(min=1e-30)
#     return ((keys - low) / step).round() * step + low
#
#
# ```
#
# </details>
#
# ### 3. What a window keeps
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# A text has `length` tokens. Which positions may its newest token see, with a window
# and sinks? The window counts the newest token itself; sinks stay beside it.


# %% tags=["exercise"]
def kept(length, window, sinks):
    return ...


exercises.check_window(kept)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def kept(length, window, sinks):
#     newest = range(max(0, length - window), length)
#     first = range(min(sinks, length))
#     return sorted(set(first) | set(newest))
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
for row in byte_rows:
    name = f"cache of {tokens:,} tokens, {row['format']}"
    closing.add(name, "B", *(row[column] for column in BOTH))
for row in share_rows:
    name = f"4-bit error of {row['4-bit']}, shared by {row['shared by']}"
    closing.add(name, "of their size", *(row[column] for column in BOTH))
for row in loss_rows:
    closing.add(f"KL, {row['cache']}", "nats", None, row["KL"], n=scored)
for row in said_rows:
    name, n = f"who said what, margin, {row['cache']}", len(said.questions)
    closing.add(name, "nats", None, row["margin"], n=n)
for row in window_rows:
    closing.add(f"KL, {row['cache']}", "nats", None, row["KL"], n=scored)
closing.add("window ≥ text, tokens that differ", "tokens", 0, different)
for name in KV[1:]:
    line = f"decode at {long_context:,} tokens, {name}/bf16 KV"
    faster = expected["bf16"] / expected[name]
    closing.add(line, "x", faster, gains[name], n=repeats)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Your own model's numbers: `labkit plan --model qwen3-8b --tokens 32768
# --sequences 8 --kv-format int4`, and `labkit eval text --kv-format int4`. In
# `transformers`, `labkit.lab.hf` brings these caches as `past_key_values`.
