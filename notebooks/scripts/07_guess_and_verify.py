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
# # 07 · Guess and verify
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/07_guess_and_verify.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/07_guess_and_verify.py)
# <!-- /badges -->
#
# **The question.** A model writes one token at a time and reads all of its weights for
# each. Can something cheaper guess the next few, so that one reading serves them all,
# without changing a single word?
#
# **You will be able to**
#
# - state the rule that keeps or refuses a guess, and prove that it changes nothing;
# - tell acceptance (alpha) from yield, and predict a speed-up from alpha and two costs;
# - choose a drafter and a draft length for a kind of text;
# - say beforehand when guessing makes things slower.
#
# | | |
# |---|---|
# | Time | 35 minutes reading, 2 minutes running at `quick`, 30 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 01: prefill, decode and the KV cache |

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
from copy import copy

import torch

from labkit import BadRequest, load_model
from labkit.generate import Draft, Sampling, generate
from labkit.generate.row import Row
from labkit.generate.sampling import draw, probabilities
from labkit.generate.speculative import speculate
from labkit.generate.verify import acceptance, residual, verify_row
from labkit.lab.bench.speculate import FIXED, rounds, seconds_per_token, total
from labkit.lab.bench.speculation_costs import measure_costs
from labkit.lab.measure.clock import median_ratio
from labkit.lab.stack.open import open_drafter
from labkit.lab.texts.prompt_kinds import prompts
from labkit.model.native.decoder import accelerate, unsupported_reason
from labkit.model.tiny import tiny_model

# %%
from labkit.plan.time import best_draft_length, break_even_alpha, speculative_speedup
from labkit.speculate import (
    DraftModel,
    LookupFirst,
    SelfQuantized,
)
from labkit_course.checks import guess_and_verify as exercises
from labkit_course.experiments.goodness import goodness_of_fit
from labkit_course.experiments.predicted_speculation import predict_and_measure
from labkit_course.experiments.recipes import batch_steps
from labkit_course.show.closing import Closing
from labkit_course.show.draft_plots import pass_plot, show_coloured
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import band_plot, prediction_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
# prompts a half, new tokens, rounds; draws for the chi-square
SIZES = {
    "quick": (2, 32, 1, 1000),
    "standard": (4, 64, 2, 5000),
    "full": (8, 128, 3, 20000),
}
count, new_tokens, repeats, draws = SIZES[scale]
exact = load_model(model, device=device)
packed = device == "cpu" and unsupported_reason(exact.config, "bf16") is None
target = accelerate(exact, "bf16") if packed else exact
tokenizer = target.tokenizer
print(f"{target.name}, {'bf16, native kernels' if packed else 'float32, PyTorch'}")

# %% [markdown]
# ## Cheaper to check than to make
#
# To *make* five tokens, a decoder reads its weights five times: each token depends on
# the one before. To *check* five tokens that somebody else proposes, it reads them
# once: all five are there, and one pass gives the model's opinion at every place. How
# much dearer is a pass over several tokens? We time it, and two cheap proposers beside
# it: the same model in four bits, and a look-up that reads no weights at all.

# %%
TASKS = ("copy", "edit", "humaneval", "chat")
int4 = SelfQuantized(target)
NAMES = ("lookup", "trimmed", "layer_skip")
drafters = {"self_quantized": int4, "lookup_first": LookupFirst(copy(int4))}
drafters |= {name: open_drafter(name, target) for name in NAMES}
by_bytes = drafters["trimmed"].cost / int4.cost  # used further down
for name in ("draft", "lookup_draft"):  # trained for the default model: notebook 08
    try:
        drafters[name] = open_drafter(name, target)
    except BadRequest as reason:
        print(f"without {name}: {reason}")
probe = prompts("humaneval")[-1].ids(tokenizer)
costs = measure_costs(target, drafters, probe, repeats=5)
for name, drafter in drafters.items():
    drafter.cost = costs.of(name).draft
print(f"one plain step: {1000 * costs.plain_s:.1f} ms")
table(
    [
        {"drafter": name, "what it is": drafter.name, "c": drafter.cost}
        for name, drafter in drafters.items()
    ]
)

# %%
fig, ax = canvas(height=3.3)
sizes = list(range(1, len(costs.verify) + 1))
band_plot(
    ax,
    sizes,
    {"one pass over all (check)": costs.verify, "one by one (make)": sizes},
    xlabel="tokens",
    ylabel="plain steps",
)
figure(
    fig,
    "check_or_make",
    alt="Cost in plain steps over the number of tokens: a straight diagonal for making "
    "tokens one by one, and a far flatter curve for checking all of them in one pass.",
    caption=f"Median of n = 5 timings a point; {target.name}, batch 1.",
)

# %% [markdown]
# *c* is the cost of one drafted token in plain steps. The difference of the two lines
# is all that guessing can gain; what the guesses cost, and how often they are wrong,
# decides how much of it is left.

# %% [markdown]
# ## The rule, by hand
#
# Greedy decoding is easy: keep guesses as long as they are the target's own choice, and
# put the target's choice after the last kept one. Sampling needs more care. The target
# would say *x* with probability *p(x)*; the draft drew it with *q(x)*.
#
# 1. Keep *x* with probability min(1, *p(x)* / *q(x)*).
# 2. Otherwise draw from what the draft leaves uncovered, max(*p − q*, 0), made to sum
#    to 1, and throw away whatever was drafted after it.
# 3. If all were kept, draw one more from the target: the *bonus*.
#
# So every pass gives one token or more. Three words are enough to see it:

# %%
WORDS = ("yes", "no", "perhaps")
p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
table(
    [
        {
            "word": word,
            "target p": float(p[i]),
            "draft q": float(q[i]),
            "kept": acceptance(p, q, i),
            "left by a refusal": str([round(float(v), 2) for v in residual(p, q, i)]),
        }
        for i, word in enumerate(WORDS)
    ]
)

# %% [markdown]
# "no" is drafted too often (0.5, where the target says it with 0.3), so it is kept in
# 60 % of the cases; what was refused goes to "yes", which came too rarely.
#
# **Exactly the same text?** No experiment needed: add up every draft and every verdict.


# %%
def comes_out(p, drawn_from, scored_as):
    """The distribution of the next word, over all drafts and verdicts."""
    out = torch.zeros_like(p)
    for word, weight in enumerate(drawn_from):
        keep = acceptance(p, scored_as, word) if weight else 0.0
        left = residual(p, scored_as, word)
        out[word] += weight * keep
        out += weight * (1 - keep) * left / left.sum()
    return [round(float(value), 3) for value in out]


greedy = torch.tensor([0.0, 1.0, 0.0])  # the draft's likeliest word, always
cases = (
    ("drawn from q", "q", comes_out(p, q, q)),
    ("always 'no'", "certain", comes_out(p, greedy, None)),
    ("always 'no'", "q (wrong)", comes_out(p, greedy, q)),
)
table(
    [
        {"draft": draft, "scored as": score, "comes out": str(out)}
        for draft, score, out in cases
    ]
)

# %% [markdown]
# The first two give *p* back. The third is the classic mistake of real programs: take
# the draft's likeliest token, and score it with the probabilities that it was *not*
# drawn from. A token that is looked up or an argmax is a certainty: *q(x)* = 1.
#
# The same two functions decide in every loop of this lab:

# %%
source = inspect.getsource(verify_row)
print(source[source.index("    for i, token") : source.index("    n = len")])

# %% [markdown]
# And this is the whole loop: draft, verify, keep, rewind. `watch` only takes the time.

# %%
print(inspect.getsource(speculate))

# %% [markdown]
# ### On the model itself
#
# Its own distribution at a place where it is unsure, 49,152 words wide, cut by top-k.
# We let the code draw, and ask a chi-square whether the words come as often as they
# should. A right rule fails at 1 % once in a hundred; a wrong one should fail always.

# %%
story = tokenizer.chat("Tell a story that begins with a train that never stops.")
settings, none = Sampling(temperature=1.2, top_k=12), frozenset()
text = torch.tensor([story], device=device)
logits = target(text)[0, -1].float().cpu()
other = int4.model(text)[0, -1].float().cpu()
p, q = (probabilities(x, settings) for x in (logits, other))
print(f"words possible: {int((p > 0).sum())}; likeliest: {float(p.max()):.2f}")


# %%
def verdicts(draft, scored_as):
    row, counts = Row(0, tuple(story), 1, torch.Generator().manual_seed(7)), p * 0
    both = logits.repeat(2, 1)
    for _ in range(draws):
        guess = Draft([draft(row.generator)], scored_as)
        tokens, _ = verify_row(both, guess, row, settings, none)
        counts[tokens[0]] += 1
    return goodness_of_fit(counts.tolist(), p.tolist())


def likeliest(generator):
    return int(q.argmax())


right = verdicts(lambda generator: draw(q, generator), q[None])
certain, wrong = verdicts(likeliest, None), verdicts(likeliest, q[None])
print("drawn, scored as drawn:    ", right)
print("likeliest, scored certain: ", certain)
print("likeliest, scored as drawn:", wrong)

# %% [markdown]
# ## Watch it
#
# A function with a parameter to rename: most of the answer stands in the question. Blue
# and underlined tokens were drafted and kept; yellow ones are the target's own.

# %%
edit = prompts("edit")[1].ids(tokenizer)
watched = generate(
    target,
    edit,
    drafter=drafters["lookup"],
    draft_length=8,
    max_new_tokens=2 * new_tokens,
)
pieces = [tokenizer.decode([token], skip_special=False) for token in watched.tokens]
show_coloured(pieces, watched.drafted_tokens, "Looked up")

# %%
fig, ax = canvas(height=3.0)
pass_plot(ax, watched.tally.passes)
figure(
    fig,
    "passes",
    alt="One bar for each target pass, stacked from drafted tokens that were kept, one "
    "token of the target's own, and drafted tokens that were refused.",
    caption=f"n = {watched.tally.target_passes} target passes for "
    f"{len(watched.tokens) - 1} tokens after the first; look-up, at most 8 a pass.",
)

# %% [markdown]
# Four numbers describe such a run, and are often confused:
#
# - **alpha**, the acceptance rate: kept / *examined*. A pass examines up to the first
#   refused token; nobody looks at those behind it.
# - **yield**: kept / *drafted*. It counts the tokens behind a refusal as well, so it is
#   lower and falls with the draft length. It is not the alpha of the formulas.
# - **accepted length**: tokens a target pass gives, its own included.
# - **c**: a draft step / a plain step.

# %%
table(
    [
        {
            **watched.counts(),
            "alpha": watched.alpha,
            "yield": watched.draft_yield,
            "accepted length": watched.accepted_length,
        }
    ]
)

# %% [markdown]
# ### The same text, token by token
#
# Greedy, in float32, with the plain PyTorch decoder: one run by single steps, one with
# each drafter. They must be equal, not similar.

# %%
short = min((prompt.ids(tokenizer) for prompt in prompts("json")), key=len)
by_steps = generate(exact, short, max_new_tokens=24).tokens
same_text = {}
for name, drafter in (
    ("lookup", drafters["lookup"]),
    ("self_quantized", int4),
    ("layer_skip", open_drafter("layer_skip", exact)),
):
    done = generate(exact, short, drafter=drafter, draft_length=3, max_new_tokens=24)
    same_text[name] = done.tokens == by_steps
    print(f"{name}: equal to plain decoding: {same_text[name]}")

# %% [markdown]
# ## The formula
#
# If each drafted token is kept with probability α, a pass that drafts γ gives
#
# $$E = 1 + \alpha + \alpha^2 + \dots + \alpha^\gamma =
# \frac{1 - \alpha^{\gamma + 1}}{1 - \alpha}$$
#
# tokens, for the price of γ drafts and one pass over γ + 1 tokens:
#
# $$\text{speed-up} = \frac{E}{\gamma\, c + v(\gamma + 1)}$$
#
# *v* is the curve of the first figure. (Papers often set *v* = 1; here it is measured.)
# We take α from one half of the HumanEval prompts at one length, predict all lengths,
# and then measure them on the other half.

# %%
GAMMAS = (1, 3, 5, 8)
code = [prompt.ids(tokenizer) for prompt in prompts("humaneval")[: 4 * count]]
own = {"self_quantized": int4}
learnt = total(
    [
        generate(target, ids, drafter=int4, draft_length=4, max_new_tokens=new_tokens)
        for ids in code[0::2]
    ]
)
curve = [
    speculative_speedup(learnt.alpha, gamma, costs.of("self_quantized"))
    for gamma in GAMMAS
]

# %%
measured, there = [], []
for gamma in GAMMAS:
    runs = rounds(target, own, code[1::4], new_tokens, repeats, costs, gamma)
    there.append(total(runs["self_quantized"][-1]).alpha)
    spent = {name: [seconds_per_token(one) for one in runs[name]] for name in runs}
    pairs = zip(spent["plain"], spent["self_quantized"])
    measured.append(median_ratio([a / b for a, b in pairs]))
afterwards = [
    speculative_speedup(alpha, gamma, costs.of("self_quantized"))
    for alpha, gamma in zip(there, GAMMAS)
]
best = best_draft_length(learnt.alpha, costs.of("self_quantized"), max(GAMMAS))
print(
    f"alpha there {learnt.alpha:.2f}, here {sum(there) / len(there):.2f}; "
    f"predicted best length {best}"
)

# %%
fig, ax = canvas(height=3.4)
band_plot(
    ax,
    GAMMAS,
    {"INT4 draft": [(r.value, r.low, r.high) for r in measured]},
    {"INT4 draft": curve, "with the alpha found here": afterwards},
    xlabel="tokens drafted a pass (γ)",
    ylabel="times plain decoding",
)
ax.axhline(1.0, color="#888888", linewidth=0.9, linestyle=":")
figure(
    fig,
    "draft_length",
    alt="Speed-up over draft length for the target's own INT4 copy as drafter: two "
    "predicted lines rise to a flat maximum and fall; measured points lie beside them.",
    caption=f"HumanEval: alpha from n = {2 * count} prompts, time of {count} others, "
    f"{repeats} round(s), up to {new_tokens} tokens each; {target.name}.",
)

# %% [markdown]
# The two lines part where the prompts that were timed are easier, or harder, than those
# that α came from. The costs are known well; how predictable a text is, is not.
#
# **The draft reads the target's own cache.** The INT4 copy has the same layers, so what
# the target has computed for every earlier token serves the draft too, and better than
# its own numbers would: it has no prompt to read, no cache to keep, and agrees more
# often (on the default model, chat: 0.82 instead of 0.73). What it writes for the
# tokens it guesses, the target overwrites when it checks them.
#
# **This model's own grid.** The default checkpoint was published with 4-bit weights.
# `int4_g32_zp` lies off its grid and loses for real. The format `int4_g32_min` is the
# grid itself:

# %%
on_grid = SelfQuantized(target, "int4_g32_min")
agreed = total(
    [
        generate(
            target, ids, drafter=on_grid, draft_length=4, max_new_tokens=new_tokens
        )
        for ids in code[0::2]
    ]
)
print(f"int4_g32_zp: alpha {learnt.alpha:.2f}; int4_g32_min: alpha {agreed.alpha:.2f}")

# %% [markdown]
# It agrees almost always, because it *is* the target. That is a property of this
# checkpoint and not counted below.

# %% [markdown]
# ## Every drafter on four kinds of text
#
# - `lookup`: what followed the same 2 to 8 tokens before. Costs nothing.
# - `self_quantized`: the target in INT4, reading the target's cache.
# - `trimmed`: the same with a head of 8,192 frequent tokens; on a small model the head
#   is a large part of a step.
# - `layer_skip`: the target without a third of its layers, untrained.
# - `lookup_first`: look up, and ask the INT4 copy where nothing is found.
# - `draft`: one trained layer on the target's hidden states (notebook 08), and
#   `lookup_draft` with the look-up before it.
#
# Before you run the cell: which is best for copying, which for chat? α and the costs
# come from one half of the prompts, the speed is measured on the other.

# %%
trials = predict_and_measure(
    target, drafters, TASKS, costs, count=count, new_tokens=new_tokens, repeats=repeats
)
table(
    [
        {
            "drafter": trial.drafter,
            "text": trial.task,
            "γ": trial.length,
            "alpha": trial.alpha,
            "yield": trial.draft_yield,
            "tokens a pass": trial.accepted_length,
            "c": trial.c,
            "predicted": trial.predicted,
            "measured": trial.measured.value,
        }
        for trial in trials
    ],
    units={"predicted": "x", "measured": "x"},
)

# %%
fig, ax = canvas(height=4.2)
prediction_plot(
    ax,
    {
        task: [(t.predicted, t.measured.value) for t in trials if t.task == task]
        for task in TASKS
    },
    unit="times plain",
    tolerance=0.12,
)
figure(
    fig,
    "predicted_and_measured",
    alt="Measured against predicted speed-ups, one point for each drafter and kind of "
    "text, around the diagonal, with a band of twelve per cent.",
    caption=f"n = {count} prompts a half and point, {repeats} round(s); alpha from one "
    "half, time from the other.",
)
near = sum(abs(trial.error) <= 0.12 for trial in trials)
print(
    f"within 12 %: {near} of {len(trials)}; same tokens as plain decoding: "
    f"{all(trial.same_tokens for trial in trials)}"
)

# %% [markdown]
# With two prompts a half, much of the scatter is one text being more predictable than
# another: what a look-up finds depends on the very text. `standard` reads more.
#
# A trimmed head saves rows of one matrix. The share of bytes says by how much *c*
# should fall:

# %%
part = drafters["trimmed"]
print(
    f"c of the trimmed draft / c of the whole: predicted from bytes {by_bytes:.2f}, "
    f"measured {part.cost / int4.cost:.2f}"
)

# %% [markdown]
# ## When does it lose?
#
# The formula says it beforehand. Drafting γ tokens pays above the α where
# *E* = γ *c* + *v*(γ + 1):

# %%
even_rows = []
for name in ("lookup", "trimmed", "self_quantized", "layer_skip"):
    cost = costs.of(name)
    row = {"drafter": name, "c": cost.draft}
    for gamma in (1, 3, 6):
        alpha = break_even_alpha(gamma, cost)
        row[f"γ = {gamma}"] = "never" if alpha is None else f"α > {alpha:.2f}"
    even_rows.append(row)
table(even_rows)

# %% [markdown]
# **Low acceptance.** `layer_skip` costs most of a step and is right in fewer than half
# of the cases: predicted and measured at half the speed in the table above.
#
# **A target that is cheap already.** Against an INT4 target an INT4 draft costs a whole
# step (*c* = 1): "never".
#
# **Short answers.** A separate draft model must read the prompt first. For an answer of
# a few tokens that is never earned back. We use the target's own weights as a separate
# model without a shared cache, in INT4:

# %%
apart = DraftModel(int4.model)
apart_costs = measure_costs(target, {"apart": apart}, probe, repeats=3)
short_rows = []
for tokens in (4, new_tokens):
    runs = rounds(target, {"apart": apart}, code[1::4], tokens, 1, costs, FIXED)
    spent = {name: seconds_per_token(runs[name][0]) for name in runs}
    given = total(runs["apart"][0])
    each = (len(given.tokens) - 1) / count
    guess = (
        each
        * apart_costs.plain_s
        / apart_costs.predicted_s("apart", learnt.alpha, FIXED, each)
    )
    short_rows.append(
        {
            "new tokens": tokens,
            "predicted": guess,
            "measured": spent["plain"] / spent["apart"],
        }
    )
table(short_rows, units={"predicted": "x", "measured": "x"})

# %% [markdown]
# **Large batches.** In a batch the weights are shared already: every row gets its token
# from one reading. A pass that checks 4 tokens in each of 16 rows is a pass over 64
# tokens, and arithmetic has its price. What does the check cost then?

# %%
batch_rows = []
batches = (1, 4, 16)
steps = batch_steps(
    {"target": target}, [*batches, *(4 * b for b in batches)], repeats=3, steps=1
)["target"]
for i, batch in enumerate(batches):
    check = steps[len(batches) + i].median_s / steps[i].median_s
    alpha = learnt.alpha
    gain = (1 + alpha + alpha**2 + alpha**3) / (3 * int4.cost + check)
    batch_rows.append(
        {"batch": batch, "pass over 4 a row": check, "speed-up at this alpha": gain}
    )
table(batch_rows, units={"pass over 4 a row": "steps"})

# %% [markdown]
# (The draft's cost is left at its value for one row.) From a few rows on, it loses.
#
# **Another tokenizer.** Draft and target must read the same ids, or the same numbers
# mean different words. That is refused, not slow:


# %%
class OtherTokenizer:
    class backend:
        get_vocab = staticmethod(lambda: {"another": 0, "vocabulary": 1})


stranger = tiny_model(vocab_size=target.config.vocab_size)
stranger.tokenizer = OtherTokenizer()
try:
    generate(target, short, drafter=DraftModel(stranger))
except BadRequest as reason:
    print(reason)

# %% [markdown]
# ## Lengths that adapt
#
# One length does not fit all texts, and where drafts fail the right length is 0.
# `draft_length="auto"` follows the running alpha and the measured costs, drafts nothing
# where nothing pays, and tries again now and then. Eight kinds of text, look-up first:

# %%
MORE = ("copy", "edit", "humaneval", "chat", "summary", "list", "story", "maths")
auto_rows = []
for kind in MORE:
    ids = [prompt.ids(tokenizer) for prompt in prompts(kind)[2 : 2 + count // 2]]
    runs = rounds(
        target, {"auto": drafters["lookup_first"]}, ids, new_tokens, repeats, costs
    )
    spent = {name: [seconds_per_token(one) for one in runs[name]] for name in runs}
    ratio = median_ratio([a / b for a, b in zip(spent["plain"], spent["auto"])])
    done = total(runs["auto"][-1])
    auto_rows.append(
        {
            "text": kind,
            "yield": done.draft_yield,
            "tokens a pass": done.accepted_length,
            "measured": ratio.value,
        }
    )
table(auto_rows, units={"measured": "x"})

# %% [markdown]
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. Keep or refuse
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# Three words, *p* = 0.5, 0.3, 0.2 and *q* = 0.2, 0.2, 0.6. The third was drafted and
# refused. From which distribution is the next word drawn?

# %% tags=["exercise"]
after_refusal = ...
exercises.check_refused(after_refusal)

# %% [markdown]
# <details><summary>Solution</summary>
#
# max(*p − q*, 0) = 0.3, 0.1, 0; divided by 0.4:
#
# ```python
# after_refusal = [0.75, 0.25, 0.0]
# ```
#
# </details>
#
# ### 2. Tokens a pass
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# α = 0.8 and three drafted tokens. How many tokens does a target pass give on average?

# %% tags=["exercise"]
tokens_a_pass = ...
exercises.check_tokens_a_pass(tokens_a_pass)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 1 + 0.8 + 0.64 + 0.512 = 2.952.
#
# </details>
#
# ### 3. Worth it?
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# A drafted token costs 0.3 plain steps, a target pass over two tokens 1.1. Above which
# α does drafting *one* token pay?

# %% tags=["exercise"]
pays_above = ...
exercises.check_break_even(pays_above)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 1 + α tokens for 0.3 + 1.1 = 1.4 steps: above α = 0.4.
#
# </details>
#
# ### 4. How far to draft
#
# | difficulty | minutes |
# |---|---|
# | medium | 5 |
#
# The same costs, a pass over three tokens 1.2 steps, and α = 0.5. Is it best to draft
# 0, 1 or 2 tokens?

# %% tags=["exercise"]
best_length = ...
exercises.check_best_length(best_length)

# %% [markdown]
# <details><summary>Solution</summary>
#
# 1 token: 1.5 / 1.4 = 1.07. 2 tokens: 1.75 / 1.8 = 0.97. So 1.
#
# </details>
#
# ### 5. A drafter of your own
#
# | difficulty | minutes |
# |---|---|
# | harder | 10 |
#
# Write a look-up: what followed the last token where it last stood before, at most
# `limit` tokens; nothing where it stands nowhere else. (As a class with this in its
# `propose`, it runs in the loop: see `labkit/speculate/lookup.py`.)


# %% tags=["exercise"]
def look_up(text, limit):
    return ...


exercises.check_own_drafter(look_up)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def look_up(text, limit):
#     for place in range(len(text) - 1, 0, -1):
#         if text[place - 1] == text[-1]:
#             return text[place : place + limit]
#     return []
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
dtype = "bfloat16" if packed else "float32"
closing = Closing.of(target, dtype, device)
for trial in trials:
    name, n = f"{trial.drafter}, {trial.task}", count * repeats
    closing.add(name, "x", trial.predicted, trial.measured, n=n)
closing.add("c, trimmed / whole", "x", by_bytes, part.cost / int4.cost)
closing.add("alpha, int4_g32_min (own grid)", "share", None, agreed.alpha)
closing.add("p, right rule", "p", None, right.p, n=draws)
closing.add("p, wrong rule", "p", None, wrong.p, n=draws)
closing.add("equal to plain, float32", "share", 1.0, sum(same_text.values()) / 3, n=3)
slowest = min(row["measured"] for row in auto_rows)
closing.add("slowest of eight kinds, auto", "x", None, slowest, n=count // 2 * repeats)
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Notebook 08 trains a draft. On your own prompts: `labkit generate --prompt
# "..." --drafter lookup_first --draft-length auto`, and `labkit bench speculate` for
# the table above.
