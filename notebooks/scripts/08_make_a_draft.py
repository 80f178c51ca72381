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
# # 08 · Make a draft
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/08_make_a_draft.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/08_make_a_draft.py)
# <!-- /badges -->
#
# **The question.** A draft need not be good, it must *agree*. How does one make a
# small model that agrees with a large one, and what else is it good for?
#
# **You will be able to**
#
# - measure which layers of a model matter, and cut the others out;
# - train a drafter on a model's own answers, and read its training curve;
# - say what a better alpha is worth before training for it;
# - judge a cut, distilled or sparse model as a *replacement* for the whole one.
#
# | | |
# |---|---|
# | Time | 30 minutes reading, 2 minutes running at `quick`, 25 minutes of exercises |
# | Memory | 4 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 07: drafters, alpha, accepted length, c |

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
import copy
import warnings

import torch

from labkit import load_model
from labkit.formats import get_format
from labkit.generate import generate
from labkit.lab.bench.speculation_costs import measure_costs
from labkit.lab.distill.corpus import Job, generate_corpus
from labkit.lab.distill.distill import said_most
from labkit.lab.distill.loss import acceptance, chain_loss
from labkit.lab.distill.medusa_loss import head_agreement, medusa_loss
from labkit.lab.distill.start import fitted_start
from labkit.lab.distill.train import Training, fit
from labkit.lab.evals.report import results
from labkit.lab.evals.task import run
from labkit.lab.evals.text import Text
from labkit.lab.measure.clock import interleave, ratio
from labkit.lab.texts import calibration_text
from labkit.lab.texts.prompt_kinds import prompts
from labkit.lab.texts.training_prompts import training_prompts
from labkit.model.native.decoder import accelerate, unsupported_reason

# %%
from labkit.plan import time as formula
from labkit.quant import quantize_model
from labkit.speculate import LookupFirst, shipped
from labkit.speculate.hidden_state import HiddenState
from labkit.speculate.layer_skip import without_layers
from labkit.speculate.medusa import MedusaNet
from labkit.speculate.trained import about_shipped
from labkit_course.checks import make_a_draft as exercises
from labkit_course.experiments import prune
from labkit_course.experiments.sparse import packed_bits, pruned_weights
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import band_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
# answers, tokens of each, steps of training, tokens scored, prompts a kind, new tokens
SIZES = {
    "quick": (24, 48, 8, 160, 1, 40),
    "standard": (256, 96, 60, 1024, 4, 64),
    "full": (2304, 128, 1000, 4096, 16, 64),
}
answers, length, steps, scored, count, new_tokens = SIZES[scale]
target = load_model(model, device=device)
tokenizer, L = target.tokenizer, target.config.num_layers
total = sum(p.numel() for p in target.parameters())
print(f"{target.name}: {L} layers, {total:,} weights")

# %% [markdown]
# **What `quick` cuts.** Training here is a demonstration: a few steps on a few dozen
# answers. What an hour makes of the same functions is shipped with labkit, with
# its record, and that draft is what the speeds below use.
#
# ## Which layers matter?
#
# Each layer adds something to one running vector. A layer that hardly turns that vector
# says little. Its *influence* is 1 minus the cosine between the vector before and
# after, a mean over tokens (Men et al. 2024).

# %%
sample = tokenizer.encode(calibration_text("code", characters=2400))[:384]
sample += tokenizer.encode(calibration_text("prose", characters=2400))[:384]
pieces = [torch.tensor(sample[at : at + 128]) for at in range(0, len(sample), 128)]
turned = prune.influence(target, pieces)
order = sorted(range(L), key=lambda i: turned[i])
fig, ax = canvas(height=2.9)
band_plot(
    ax, list(range(L)), {"influence": turned}, xlabel="layer", ylabel="1 - cosine"
)
figure(
    fig,
    "influence",
    alt="Influence of each layer by its place. The first and the last layers turn the "
    "vector most; those in between much less.",
    caption=f"n = {len(sample)} tokens of calibration text, half code, half prose.",
)

# %% [markdown]
# **Predict:** leaving out the least influential layers should cost little at first, and
# less than leaving out as many at random. **Measure:** bits a byte on held-out text,
# and how often the cut model names the same next token as the whole one. That second
# number is the alpha it would have as a drafter.

# %%
task = Text(tokenizer, scored, ("code", "prose"), length=160, overlap=0).against(target)
tokens_scored = sum(len(one.tokens) - 1 for one in task.items())


def judge(candidate):
    rows = results(task.metrics, "text", run(task, candidate))
    return {row["metric"]: row["value"] for row in rows if row["slice"] == "all"}


whole = judge(target)
shuffled = torch.randperm(L, generator=torch.Generator().manual_seed(0)).tolist()
cut_rows = [{"left out": "nothing", **whole}]
for n in (2, 8) if scale == "quick" else (1, 2, 4, 8):
    for name, chosen in (("least influence", order[:n]), ("at random", shuffled[:n])):
        cut_rows.append(
            {"left out": f"{n}, {name}", **judge(without_layers(target, chosen))}
        )
table(cut_rows, units={"kl": "nats", "top1": "%"})

# %% [markdown]
# Of two layers left out, those of least influence cost about what two at random cost;
# of eight, far less. And still the loss grows fast: nobody trained this model to do
# without them. As a drafter it would agree often and save little,
# since it costs the share of layers that is left. A cheap draft must be *trained*, and
# the question is on what.
#
# ## What a draft should learn
#
# Not the truth. A draft is right when it says what *this* target says, mistakes
# included. So its text is the target's own answers, and at each token its teacher is
# the target's whole distribution. Answers are cheap here: a batch of prompts on the
# fast kernels. What is dear is *variety*. labkit composes prompts from wordings and
# topics; no task that is scored, and no wording of one, is among them.

# %%
for kind in ("chat", "code", "edit"):
    print(f"--- {kind}\n{training_prompts(kind, 3, seed=5)[2].text[:180]}")

# %%
jobs = []
for kind, part in (("chat", 2), ("code", 3), ("edit", 6)):
    for i, prompt in enumerate(training_prompts(kind, answers // part + 4, seed=3)):
        encode = tokenizer.chat if prompt.chat else tokenizer.encode
        ids = encode(prompt.text)
        temperature = 0.0 if i < 4 or i % 5 < 3 else 0.8
        jobs.append(Job(kind, tuple(ids[:256]), length, temperature, i))
fast = target
if unsupported_reason(target.config, "int8") is None and device == "cpu":
    fast = accelerate(target, "int8")
corpus = generate_corpus(fast, jobs, run_folder() / "answers")
held, taught, place = [], [], {}
for text in corpus:  # the first four of each kind are held out
    place[text.kind] = place.get(text.kind, 0) + 1
    (held if place[text.kind] <= 4 else taught).append(text)
learnt = sum(len(text.tokens) - text.start for text in taught)
print(f"{len(taught)} answers to learn from, {learnt:,} tokens; {len(held)} held out")
print(tokenizer.decode(held[0].tokens[held[0].start :].tolist()))

# %% [markdown]
# ## A drafter that reads the target's mind
#
# Before the target says token *i + 1* it has computed a vector *h* that nearly decides
# it. The hidden-state drafter gets that vector and the token that came of it, and
# guesses the *next* vector with one layer:
#
# $$x_i = W\,[\,h_i\,;\,e(t_{i+1})\,] \qquad
# \hat h_{i+1} = \mathrm{norm}(\mathrm{layer}(x_0 \ldots x_i))$$
#
# Logits come from rows of the target's own head: only the 12,288 tokens that the target
# says most, since on a small model the head is most of a draft's cost. Where to start?
# The target's last layer did nearly this job already. What *W* must give to it is a
# linear regression, solved in one go.

# %%
ids = said_most(taught, 12_288, target.config.vocab_size)
net = fitted_start(target, ids, [text.tokens for text in taught[:24]])
untrained = acceptance(net, held)
weights = sum(p.numel() for p in net.parameters())
print(f"{weights:,} weights to train; embedding and head are the target's")
print("alpha before any training:", {k: round(v, 2) for k, v in untrained.items()})

# %% [markdown]
# It agrees with the target before its first step of training. Now train it as it will
# be used: the second guess rests on a guessed vector, the third on two, so each token
# starts a *chain* of three guesses and the loss looks at all of them.

# %%
curve = []
training = Training(
    steps=steps, tokens=600, warmup=2, learning_rate=1e-3, every=steps, averaging=0.9
)
fit(
    net,
    taught,
    lambda some: chain_loss(net, some),
    training,
    on_progress=lambda p: curve.append((p.step, p.loss, p.seconds)),
)
trained_here = acceptance(net, held)
for step, loss, seconds in curve[:: max(1, len(curve) // 8)]:
    print(f"step {step:4}: loss {loss:.2f}, {seconds:.0f} s")
print("alpha on held-out answers:", {k: round(v, 2) for k, v in trained_here.items()})

# %% [markdown]
# A few steps on a few answers teach little: this was to see the parts move. Below is
# the record of the draft that labkit ships, made by the same functions
# (`labkit distill draft.safetensors`). Its score is alpha on held-out prompts.

# %%
about = about_shipped()
history = about["history"]
print(
    ", ".join(f"{n} {kind}" for kind, n in about["prompts"].items()),
    "texts,",
    f"{about['answer_tokens']:,} tokens of answers",
)
fig, ax = canvas(height=3.4)
curves = {kind: [entry[kind] for entry in history] for kind in ("code", "edit", "chat")}
band_plot(
    ax,
    [entry["step"] for entry in history],
    curves,
    xlabel="step of training",
    ylabel="alpha, held out",
)
figure(
    fig,
    "training_record",
    alt="Alpha on held-out prompts over the steps of training, for code, edits and "
    "chat. Code is highest, chat lowest; all rise and flatten.",
    caption=f"The shipped draft; n = {about['held_out_texts']} held-out texts, drafts "
    "of four tokens.",
)

# %% [markdown]
# Chat stays lowest. There the target itself is less sure: of many possible next tokens
# it says one, and a small difference changes which. Code and edits are more bound.
#
# ## What alignment is worth
#
# Notebook 07's formula: with acceptance α and γ drafted tokens, a pass of the target
# gives (1 − α^(γ+1)) / (1 − α) tokens. We compare the net trained here for a moment,
# the shipped one, and that one behind look-up, on prompts that no training saw.

# %%
draft = shipped(target)
drafters = {
    "hidden state, trained here": HiddenState(net, target),
    "hidden state, shipped": draft,
    "look-up, then shipped": LookupFirst(draft),
}
KINDS = ("humaneval", "chat", "edit")
asked = {kind: [p.ids(tokenizer) for p in prompts(kind)[:count]] for kind in KINDS}


# %%
def measure(drafter, gamma=3):
    row = {}
    how = {"draft_length": gamma, "max_new_tokens": new_tokens}
    for kind in KINDS:
        done = [generate(target, ids, drafter=drafter, **how) for ids in asked[kind]]
        sums = {
            key: sum(getattr(one.tally, key) for one in done)
            for key in ("accepted", "examined", "target_passes")
        }
        said = sum(len(one.tokens) - 1 for one in done)
        alpha = sums["accepted"] / max(1, sums["examined"])
        row[kind] = (alpha, said / sums["target_passes"])
    return row


# %%
found = {name: measure(drafter) for name, drafter in drafters.items()}
table(
    [
        {
            "drafter": name,
            "c, by bytes": drafters[name].cost,
            **{f"α, {kind}": found[name][kind][0] for kind in KINDS},
            **{f"tokens a pass, {kind}": found[name][kind][1] for kind in KINDS},
        }
        for name in drafters
    ]
)

# %% [markdown]
# Now the formula against the count, for the shipped draft, and what it means in time.
# What a pass over four tokens and a drafted token cost, in plain steps, is this
# machine's own and timed first. From that follows how much alpha a draft must have to
# pay at all.

# %%
settings = {"length": 3, "repeats": 5, "sizes": (1, 2, 3, 4)}
costs = measure_costs(target, {"shipped": draft}, asked["chat"][0], **settings)
costs = costs.of("shipped")
passes = ", ".join(f"{ratio:.2f}" for ratio in costs.verify)
print(f"c = {costs.draft:.2f}; a pass over 1 to 4 tokens: {passes} plain steps")
worth = []
for kind in KINDS:
    alpha, tokens = found["hidden state, shipped"][kind]
    expected = formula.expected_accepted_length(alpha, 3)
    worth.append(
        {
            "prompts": kind,
            "α": alpha,
            "tokens a pass, predicted": expected,
            "tokens a pass, measured": tokens,
            "times plain, predicted": formula.speculative_speedup(alpha, 3, costs),
        }
    )
least = formula.break_even_alpha(3, costs)
print(f"break-even alpha of three drafted tokens: {least:.2f}")
table(worth)

# %% [markdown]
# One or two prompts a kind are a sample, not a measurement. The table of the shipped
# draft, from its record: 16 prompts a kind, 64 new tokens each, four drafted tokens
# alone and eight behind look-up.

# %%
shown = ("drafter", "kind", "draft_length", "tokens", "alpha", "tokens_a_pass")
table([{key: row[key] for key in shown} for row in about["acceptance"]])

# %% [markdown]
# ## Medusa: heads instead of a chain
#
# Another use of the same vector: head *k* guesses the token *k + 1* places on, all at
# once, from *h* alone. One product drafts three tokens. But the second guess does not
# know the first, and none knows the token that the target has just added.

# %%
heads = MedusaNet(target.config, said_most(taught, 12_288, target.config.vocab_size))
heads = heads.bind(target)
fit(
    heads,
    taught,
    lambda some: medusa_loss(heads, some),
    Training(
        steps=2 * steps,
        tokens=600,
        warmup=2,
        learning_rate=2e-3,
        every=2 * steps,
        averaging=0.9,
    ),
)
here, full = head_agreement(heads, held), about["others"]["medusa"]
table(
    [
        {"head": name, "α, trained here": here[name], "α, reference run": full[name]}
        for name in here
    ]
)

# %% [markdown]
# Each head's alpha is counted where the heads before it were right. In the reference
# run (2,304 of the shipped draft's answers, 150 steps, a small part of the chain's
# training) the heads stay below the chain,
# which looks at the token just said. But their draft costs one step where a chain costs
# three: they pay where c is large.
#
# ## Cut and distil: a draft that is a model
#
# The four layers of most influence, trained on the same answers. This draft needs no
# hidden states, it reads text as any model does, and so it can also stand alone.

# %%
small = prune.Pruned(prune.pruned(target, 4, turned), heads.ids.long())
before = prune.pruned_agreement(small, held)
cut_score = judge(small.whole["draft"])
how = {"steps": steps, "every": steps, "learning_rate": 1e-3}
training = Training(**how, tokens=600, warmup=2, averaging=0.9)
fit(small, taught, lambda some: prune.pruned_loss(small, some), training)
after = prune.pruned_agreement(small, held)
full = about["others"]["pruned"]
table(
    [
        {"four layers": name, "α, held out": value["all"]}
        for name, value in (
            ("cut", before),
            ("trained here", after),
            ("reference run", full["agreement"]),
        )
    ]
)

# %% [markdown]
# Cut, it says nothing of use; trained, it becomes a fair draft. It reads four layers of
# thirty and the rows of its head, three times what the hidden-state drafter reads: what
# the target already thought is worth some layers.
#
# ## The other use: a replacement
#
# A draft may be wrong, the target repairs it. A *replacement* may not: nobody looks
# after it. So the same four layers go through the evaluation of notebooks 02 and 03,
# beside other ways to make the model smaller. Two of them set half of all weights to
# zero: *magnitude* (the smallest half of a matrix) and *2:4* (the two smallest of every
# four neighbours).
#
# **Predict** from bytes: which of these is the smallest, and which should be fastest?


# %%
def megabytes(bits, share=1.0):
    blocks = sum(p.numel() for layer in target.layers for p in layer.parameters())
    return share * blocks * bits / 8 / 1e6


# %%
rows = [{"blocks": "whole, bf16", "MB": megabytes(16), **whole}]
small_score = judge(small.whole["draft"])
rows.append({"blocks": "4 layers, cut", "MB": megabytes(16, 4 / L), **cut_score})
rows.append(
    {"blocks": "4 layers, trained here", "MB": megabytes(16, 4 / L), **small_score}
)
for kind in ("magnitude", "2:4"):
    with pruned_weights(target, kind) as zeros:
        rows.append(
            {
                "blocks": f"half zeros, {kind}",
                "MB": megabytes(packed_bits(kind)),
                **judge(target),
            }
        )
four_bits = copy.deepcopy(target)
quantize_model(four_bits, "int4_g64_zp")
rows.append(
    {
        "blocks": "int4_g64_zp",
        "MB": megabytes(get_format("int4_g64_zp").bits_per_weight()),
        **judge(four_bits),
    }
)
table(rows, units={"kl": "nats", "top1": "%"})

# %% [markdown]
# Four bits lose least, by far, *and* hold fewest bytes of all that still speak: rounding
# every weight a little hurts less than dropping half of them. (This checkpoint's own
# grid is 4-bit, but not this one; see notebook 03.) The four trained layers are the
# smallest, and as a replacement they are another, poorer model: their KL is the
# price of what a draft may leave to its target. In the reference run of 150 steps it
# came down to the number below. Distilling a good *replacement* takes millions of
# answers, not thousands.

# %%
print({name: round(value, 3) for name, value in full["text"].items()})

# %% [markdown]
# ### Zeros are not speed
#
# The MB of the sparse rows above are those of a *packed* format. Nothing here uses one:
# the zeros are stored, read and multiplied as any number is. So predict a ratio of 1
# for the dense product with zeros. And a general sparse format, with an index for each
# number? Its bytes for half the weights, 16 + 32 bits each, are *more* than dense.

# %%
weight = target.layers[0].mlp.gate_up.weight.detach().float()
with pruned_weights(target, "2:4"):
    zeros = target.layers[0].mlp.gate_up.weight.detach().float().clone()
warnings.filterwarnings("ignore", "Sparse CSR")  # "in beta state"
sparse = zeros.to_sparse_csr()
x = torch.randn(weight.shape[1], 1, generator=torch.Generator().manual_seed(0))
arms = {
    "dense": lambda: weight @ x,
    "dense, half zeros": lambda: zeros @ x,
    "sparse, half zeros": lambda: sparse @ x,
}
times = interleave(
    {name: (lambda f=f: [f() for _ in range(20)]) for name, f in arms.items()},
    repeats=15,
)
zero_ratio = ratio(times["dense, half zeros"], times["dense"])
sparse_ratio = ratio(times["sparse, half zeros"], times["dense"])
print(f"speed of half zeros, stored:  {zero_ratio} times dense (predicted 1)")
print(f"speed of half zeros, indexed: {sparse_ratio} times dense")

# %% [markdown]
# GPUs from NVIDIA's Ampere on have a product for 2:4 that reads the packed form; with
# it 9/16 of the bytes give at most 1.78 times the speed of a product bound by memory.
# INT4 reads a quarter of bfloat16's, on any machine that has a kernel for it.
# *(GPU, when measured: unmeasured.)*
#
# ## When does it lose?
#
# Where text is unlike what the draft was taught. Prediction: an alpha below break-even,
# and so a slowdown, for text that the target itself hardly knows.

# %%
STRANGE = {
    "German": "Warum ist der Himmel blau? Erkläre es einem Kind.",
    "random digits": "Continue this list: 8271, 3306, 9147, 5520, 1839,",
    "a secret code": "Write ten words of a language that nobody has ever spoken.",
}
lost = []
for name, text in STRANGE.items():
    one = generate(
        target,
        tokenizer.chat(text),
        drafter=draft,
        draft_length=3,
        max_new_tokens=new_tokens,
    )
    lost.append(
        {
            "text": name,
            "α": one.alpha,
            "tokens a pass": one.accepted_length,
            "times plain, predicted": one.accepted_length / costs.pass_cost(3),
        }
    )
table(lost)

# %% [markdown]
# Below break-even it loses: always in a language that the draft was never taught. Digits
# and made-up words look as strange and are easier, since they go on as they began. The
# text is the target's in every row; only time is lost, and a draft length that adapts
# (notebook 07) takes most of that back. And a draft loses by *itself* wherever its
# making costs more than it saves: three quarters of an hour are repaid after hours of
# generating, so for one afternoon's use, look-up is the better drafter.
#
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. A layer's influence
#
# | difficulty | minutes |
# |---|---|
# | easy | 10 |
#
# `before` and `after` are the vectors of a text before and after a layer, [T, E].
# Return the layer's influence.


# %% tags=["exercise"]
def layer_influence(before, after):
    return ...


exercises.check_influence(layer_influence)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def layer_influence(before, after):
#     dot = (before * after).sum(-1)
#     cosine = dot / (before.norm(dim=-1) * after.norm(dim=-1))
#     return 1 - cosine.mean()
#
#
# ```
#
# </details>
#
# ### 2. What a better draft is worth
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# A drafter has α = 0.6 and c = 0.1. It drafts three tokens, and the target's pass over
# four tokens costs 1.2 plain steps. How many times as fast as plain decoding is it?

# %% tags=["exercise"]
times_plain = ...
exercises.check_draft_worth(times_plain)

# %% [markdown]
# <details><summary>Solution</summary>
#
# (1 + 0.6 + 0.36 + 0.216) / (3 · 0.1 + 1.2) = 1.45.
#
# </details>
#
# ### 3. Two of four
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# `weights` is a list whose length is a multiple of four. Set the two smallest of every
# four neighbours to zero.


# %% tags=["exercise"]
def two_of_four(weights):
    return ...


exercises.check_two_of_four(two_of_four)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def two_of_four(weights):
#     out = []
#     for at in range(0, len(weights), 4):
#         four = weights[at : at + 4]
#         kept = sorted(range(4), key=lambda i: -abs(four[i]))[:2]
#         out += [w if i in kept else 0.0 for i, w in enumerate(four)]
#     return out
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
closing = Closing.of(target, "float32", device)
for kind in KINDS:
    alpha, tokens = found["hidden state, shipped"][kind]
    expected = formula.expected_accepted_length(alpha, 3)
    closing.add(f"tokens a pass, shipped, {kind}", "tokens", expected, tokens, n=count)
    tokens = found["look-up, then shipped"][kind][1]
    closing.add(
        f"tokens a pass, look-up first, {kind}", "tokens", None, tokens, n=count
    )
n = len(held)
closing.add("alpha before training", "share", None, untrained["all"], n=n)
closing.add("alpha after training here", "share", None, trained_here["all"], n=n)
closing.add("alpha, four layers trained here", "share", None, after["all"], n=n)
for row in rows[1:]:
    closing.add(f"KL, {row['blocks']}", "nats", None, row["kl"], n=tokens_scored)
closing.add("speed, half zeros stored", "x", 1.0, zero_ratio, n=15)
closing.add("speed, half zeros indexed", "x", None, sparse_ratio, n=15)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Train a draft of your own model: `labkit distill draft.safetensors --model
# MODEL`, then `labkit generate --drafter draft.safetensors --prompt …`. A run that is
# stopped goes on where it stood.
