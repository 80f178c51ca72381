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
# # 10 · The cache as an information boundary
#
# <!-- badges -->
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/labkit-lab/labkit/blob/main/notebooks/10_the_cache_as_an_information_boundary.ipynb) [Source](https://github.com/labkit-lab/labkit/blob/main/notebooks/scripts/10_the_cache_as_an_information_boundary.py)
# <!-- /badges -->
#
# **The question.** A prefix cache puts one user's private text next to another's. What
# must be true so that a cache hit is only a matter of speed?
#
# **You will be able to**
#
# - name all that must be equal before one request may use what another has computed;
# - learn another user's text from a stopwatch, and close that channel;
# - make a cache forget: a document, a right, a user, an age, on every tier;
# - read a checklist for a cache that holds other people's words.
#
# | | |
# |---|---|
# | Time | 20 minutes reading, 2 minutes running at `quick`, 25 minutes of exercises |
# | Memory | 3 GiB |
# | Hardware | two CPU cores are enough; a GPU works with `device = "cuda"` |
# | Before | notebook 06: pages, forks and prefix hits |

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
import json
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from labkit import load_model
from labkit.cache import PagedCache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.disk import DiskTier
from labkit.cache.prefix.entry import Identity
from labkit.cache.prefix.store import PrefixStore
from labkit.generate import generate
from labkit.lab.measure.clock import ratio
from labkit.model.fingerprint import fingerprint
from labkit_course.checks import boundary as exercises
from labkit_course.experiments import prefixes as bench
from labkit_course.show.closing import Closing
from labkit_course.show.figures import canvas, figure, run_folder
from labkit_course.show.plots import bar_plot
from labkit_course.show.tables import table

# %%
if threads:
    torch.set_num_threads(threads)
decoder = load_model(model, device=device)
encode = decoder.tokenizer.encode
this_model = fingerprint(decoder)
# rounds of askers, guesses, tokens of a secret memo
SIZES = {"quick": (5, 6, 128), "standard": (11, 12, 256), "full": (31, 24, 256)}
rounds, guesses, memo_tokens = SIZES[scale]
print(f"{decoder.name}; weights {this_model.weights[:12]}...")

# %% [markdown]
# ## What a key must say
#
# The keys and values of a token follow from the tokens before it *and from the model*.
# So an entry may serve a request if all of this is equal:
#
# | part | because |
# |---|---|
# | exact tokens, compared one by one | a hash can be made to collide |
# | weights, adapters, formats, RoPE settings | they decide the numbers |
# | tenant | a hit is an event that can be timed |
# | authorization scope | rights differ inside one company, and change |
#
# The first two make a hit *right*. The last two make it *harmless*, and no test of
# answers would ever miss them. In labkit each part is a field of its own:

# %%
me = Identity("acme", "reports:read", this_model)
others = {
    "the same": replace(me),
    "another tenant": replace(me, tenant="zeta"),
    "another scope": replace(me, scope="reports:write"),
    "an adapter": replace(me, model=replace(this_model, adapters=("acme",))),
    "other weights": replace(me, model=replace(this_model, weights="0")),
    "words moved": replace(me, tenant="acmereports:", scope="read"),
}
print({name: other == me for name, other in others.items()})
print("what a log shows:", me)

# %% [markdown]
# "Words moved" is a real fault: where a key is one text put together from its parts,
# `"acme" + "reports:read"` and `"acmereports:" + "read"` are one key; and a tenant's
# salt `X` met an adapter named `X`. Weak hashes are a second one. Two prompts of four
# tokens that a polynomial hash in base 31 cannot tell apart:


# %%
def weak_hash(tokens):
    total = 0
    for token in tokens:
        total = total * 31 + token
    return total


one, two = [100, 200, 300, 400], [100, 201, 269, 400]
print(weak_hash(one) == weak_hash(two), one == two)

# %% [markdown]
# ## Two tenants
#
# The *server* opens a view for each tenant, from what its login says. A request gets
# the view and cannot name another; whatever its text claims is only text. Acme asks
# twice, Zeta asks the same, and asks again claiming to be Acme.

# %%
memo = encode("Memo to the board of Acme. " + "We plan to buy the company Zeta. " * 12)
store = bench.make_store(decoder, 4096)
acme = store.open("acme", "board", this_model)
zeta = store.open("zeta", "board", this_model)
claim = encode("I am Acme. ")
seen = []
for who, view, tokens in (
    ("Acme", acme, memo),
    ("Acme again", acme, memo),
    ("Zeta", zeta, memo),
    ("Zeta, claiming", zeta, claim + memo),
):
    before = store.counters.tokens_found
    generate(decoder, tokens, prefixes=view, max_new_tokens=1)
    found = store.counters.tokens_found - before
    seen.append(
        {
            "asks": who,
            "tokens": len(tokens),
            "found": found,
            "computed": len(tokens) - found,
        }
    )
table(seen)

# %% [markdown]
# Both sides matter. A store that never hits passes every test of secrecy; so the second
# row must hit, *and* the third must miss. And where everything is held, one token is
# computed again: without it there are no logits to choose the next token from.
#
# ## The stopwatch
#
# Why keep tenants apart at all, if only equal texts meet? Because the attacker chooses
# the text. She asks with a guess, and a fast answer says: *somebody has asked this*.
#
# A victim has sent one of six memos, which differ in a company's name at the beginning.
# The attacker sends all six, once each, and takes the fastest. First without a salt
# (all requests under one tenant), then with tenants apart. Foretold: without a salt,
# the right memo's time is that of its question, and she is always right; with it, all
# six take equally long, and she is right one time in six.

# %%
COMPANIES = ("Zeta", "Borealis", "Kestrel", "Quarry", "Tamarind", "Union")
body = encode(" is the company that we plan to buy. Nobody must hear of it. " * 24)
memos = [(encode(f"Secret. {name}") + body)[:memo_tokens] for name in COMPANIES]
question = encode(" When do we sign?")
short = bench.prefill_times(decoder, (len(question) + 1, memo_tokens))
attacks = {
    salted: [
        bench.guess(
            decoder, this_model, memos, question, turn % len(memos), salted=salted
        )
        for turn in range(guesses)
    ]
    for salted in (False, True)
}
right = {salted: sum(a.right for a in made) for salted, made in attacks.items()}
print(f"right without a salt: {right[False]} of {guesses}; with: {right[True]}")

# %%
fig, axes = canvas(2, height=3.0)
for ax, (salted, made) in zip(axes, attacks.items()):
    shown = made[0]
    bar_plot(
        ax,
        dict(zip(COMPANIES, shown.seconds)),
        scale=1e3,
        xlabel="time to first token [ms]",
        title="tenants apart" if salted else "no salt",
    )
figure(
    fig,
    "stopwatch",
    alt="Bars of the time to first token for six guessed companies. Without a salt the "
    "first, which the victim asked about, is several times faster; with tenants apart "
    "all six take about equally long.",
    caption=f"One attack each way (the truth: {COMPANIES[0]}); n = 1 request a bar.",
)

# %% [markdown]
# One request was enough. In practice there is noise from the network and from other
# users, and the attacker asks more often; noise makes it slower, not impossible
# (arXiv 2409.20002 and 2502.07776 did it to real services). With tenants apart the
# channel is gone, and the price is that tenants do not share. What *should* be shared,
# a public system prompt, is declared by the server:

# %%
public = encode("You are a helpful assistant of the city library. " * 6)
lease = acme.lookup(public)
generate(decoder, public, cache=lease.cache, max_new_tokens=1)
declared = store.declare_public(this_model, public, lease.cache)
lease.cache.rewind(0)
for who, view in (("Acme", acme), ("Zeta", zeta)):
    lease = view.lookup(public + question)
    print(f"{who} finds {lease.length} of {len(public)} public tokens")

# %% [markdown]
# Is "as long as if nothing were held" really true? Three askers, 256 + 32 tokens, in
# turns: the tenant itself, another tenant, and anyone when nothing is held.

# %%
askers = bench.ttft_by_asker(decoder, this_model, 256, 32, repeats=rounds)
apart = ratio(askers.times[bench.NOBODY], askers.times[bench.OTHER])
gain = ratio(askers.times[bench.NOBODY], askers.times[bench.HIT])
table(
    [
        {
            "asker": name,
            "computed": askers.computed[name],
            "TTFT": timing.median_s,
            "low": timing.low_s,
            "high": timing.high_s,
        }
        for name, timing in askers.times.items()
    ],
    units={"computed": "tokens", "TTFT": "ms", "low": "ms", "high": "ms"},
)

# %%
print(f"another tenant / nobody's: {apart}    hit / nobody's: {gain}")

# %% [markdown]
# ## When a document or a right changes
#
# A prompt was built on a report, from token 40 on. The report is withdrawn. Everything
# that could be influenced by it goes, in the entry itself and in whatever was computed
# behind it; what lies before stays, in whole blocks. A scope goes with all it holds.

# %%
store = bench.make_store(decoder, 4096)
reader = store.open("acme", "reports:read", this_model)
base = encode("You answer questions about reports. " * 8)[:40]
report = encode("Report 7: sales have fallen by a third since the spring. " * 4)
first = base + report + question
generate(
    decoder, first, prefixes=reader, max_new_tokens=1, documents={"report-7": len(base)}
)
second = base + report + encode(" And what did the board say about it? " * 3)
generate(decoder, second, prefixes=reader, max_new_tokens=1)  # names no document


def found_now(view=reader):
    return [view.lookup(tokens).length for tokens in (first, second)]


print("before:", found_now())
running = reader.lookup(first)  # a request that is under way
print("withdrawn:", store.revoke("report-7"), "entries; now found:", found_now())
kept = reader.keep(running, running.cache, 0, first)
print("the running request may finish; kept of what it computed:", kept)
running.cache.rewind(0)

# %% [markdown]
# The second prompt did not name the report. It had found its beginning in the first
# one's blocks, and so inherited what they were built on. And a request that was under
# way when the report was withdrawn may not put it back: what was computed *before*
# something was forgotten is not kept after it.
#
# ## Retention
#
# Age is counted from the computation, and a hit does not make an entry younger. The
# clock is handed in, so that a test need not wait. A second tier on disk keeps what
# does not fit into memory: under the same checks, in private files.

# %%
now = [1000.0]
folder = Path(tempfile.mkdtemp()) / "prefixes"
pool = PagePool(decoder.config.kv_shape, 64, dtype=decoder.dtype, device=device)


def opened(pool):
    return PrefixStore(
        pool,
        12 * pool.block_bytes,
        ttl_s=3600,
        clock=lambda: now[0],
        disk=DiskTier(folder),
    )


store = opened(pool)
acme = store.open("acme", "", this_model)
for text in (memos[0], memos[1]):
    generate(decoder, text + question, prefixes=acme, max_new_tokens=1)
print(store, store.shelf.disk)
for path in folder.iterdir():
    print(path.name[:20], stat.filemode(path.stat().st_mode), path.stat().st_size)

# %%
data = next(folder.iterdir()).read_bytes()
header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
about = json.loads(header["__metadata__"]["labkit_prefix"])
tokens_inside = about["tokens"] == memos[0][: len(about["tokens"])]
print("the file names its owner and holds the tokens in the clear:", tokens_inside)


def again():
    """A new process: another pool, the same folder."""
    return opened(PagePool(decoder.config.kv_shape, 64, dtype=decoder.dtype))


for who in ("acme", "zeta"):
    view = again().open(who, "", this_model)
    print(who, "finds", view.lookup(memos[0] + question).length, "after a restart")

# %% [markdown]
# The tokens must be in the file, or they could not be compared. So the disk belongs to
# the boundary: private permissions, an encrypted volume, and deletion that reaches it.


# %%
def tiers(store):
    return len(store.entries()), len(list(folder.iterdir()))


store = again()
print("entries, files:", tiers(store))
now[0] += 3600
print("expired:", store.sweep(), "-> entries, files:", tiers(store))
view = store.open("acme", "", this_model)
for text in (memos[0], memos[1]):
    generate(decoder, text + question, prefixes=view, max_new_tokens=1)
print("asked again:", tiers(store))
forgotten = store.forget(tenant="acme")
print("tenant forgotten:", forgotten, "-> entries, files:", tiers(store))

# %% [markdown]
# And a file that is no longer what was written is a miss, never a wrong hit:

# %%
for text in (memos[0], memos[1]):
    generate(decoder, text + question, prefixes=view, max_new_tokens=1)
path = next(folder.iterdir())
damaged = bytearray(path.read_bytes())
damaged[-1] ^= 1
path.write_bytes(bytes(damaged))
print(
    "found:",
    view.lookup(memos[0] + question).length,
    "refused:",
    store.counters.untrusted,
    "file left:",
    path.exists(),
)
target = folder / ("0" * 64 + ".safetensors")
target.symlink_to("/etc/hostname")
try:
    again()
except ValueError as refused:
    print(refused)
target.unlink()

# %% [markdown]
# ## What a crash dump would have held
#
# A block that is free is not yet empty. We look for one of the victim's keys in the
# bytes of the pool, as somebody with a dump would: while it is held, after it was freed
# as most caches do (the number of holders goes to zero, the bytes stay), and freed by a
# pool that wipes, which a prefix store always switches on.


# %%
def left_behind(wipe):
    pool = PagePool(decoder.config.kv_shape, 32, dtype=decoder.dtype, device=device)
    pool.wipe = wipe
    cache = decoder.new_cache(1, 256, lambda *a, **k: PagedCache.over(pool))
    generate(decoder, memos[0], cache=cache, max_new_tokens=1)
    needle = pool.read(0, 0, torch.tensor(cache.tables), 20)[0, 0, 19].cpu().numpy()
    dump = lambda: pool.layers[0][0]["numbers"].cpu().numpy().tobytes()  # noqa: E731
    held = needle.tobytes() in dump()
    cache.rewind(0)
    return {"wipes": wipe, "while held": held, "after": needle.tobytes() in dump()}


dumps = [left_behind(wipe) for wipe in (False, True)]
table(dumps)

# %% [markdown]
# Can a key be turned back into text? Yes: with the model at hand one tries tokens until
# the key comes out. Keys and values are the text in another encoding. What a log may
# show are sizes:

# %%
print(store, view, view.lookup(memos[0] + question), store.pool, sep="\n")

# %% [markdown]
# ## When does it lose?
#
# Every wall costs hits. If *n* tenants send one and the same prompt that nobody has
# declared public, each computes it once: *n* misses instead of one. Foretold and
# counted for four tenants:

# %%
store = bench.make_store(decoder, 8192)
shared_prompt = public + question
misses = {}
for salted in (False, True):
    store.forget(scope="")
    before = store.counters.misses
    for tenant in ("a", "b", "c", "d"):
        view = store.open(tenant if salted else "all", "", this_model)
        generate(decoder, shared_prompt, prefixes=view, max_new_tokens=1)
    misses[salted] = store.counters.misses - before
print("misses without walls:", misses[False], "with:", misses[True])

# %% [markdown]
# ## A checklist
#
# 1. Are tenant and scope set by the server, from the login, never from the request?
# 2. Is each part of the key a field of its own, and are tokens compared, not hashes?
# 3. Does the key hold weights, adapters, formats and RoPE settings?
# 4. Is there a test in which a hit must hit, beside each in which a miss must miss?
# 5. Is everything that is shared across tenants declared, and by whom?
# 6. What is dropped when a document, a right or a user goes? Also on disk? Also what a
#    running request would put back?
# 7. How old may an entry become, and what happens while nobody asks?
# 8. What do logs, errors, metrics and dumps show? Are freed blocks wiped?
# 9. Are files private, whole or absent, and checked when they are read?
#
# What this store does *not* do: hide from somebody who reads the process's memory, wipe
# the disk's own blocks, or make a hit as slow as a miss.
#
# ## Exercises
#
# An exercise that you leave alone does not stop the notebook.
#
# ### 1. Who computes what?
#
# | difficulty | minutes |
# |---|---|
# | easy | 5 |
#
# Blocks of 16. Tenant A has sent a system prompt of 512 tokens and a question of 32.
# How many tokens are computed for each of these, in order? A sends the system prompt
# with another question of 32; B sends just that; A sends the first prompt again; A
# sends it with an adapter.

# %% tags=["exercise"]
computed = ...
exercises.check_computed(computed)

# %% [markdown]
# <details><summary>Solution</summary>
#
# `(32, 544, 1, 544)`
#
# </details>
#
# ### 2. May it share?
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# `entry` and `request` are dictionaries with `tenant`, `scope`, `weights`, `adapters`,
# `tokens` (lists of numbers) and `text`. May the request use the entry, all of it?


# %% tags=["exercise"]
def may_share(entry, request):
    return ...


exercises.check_may_share(may_share)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def may_share(entry, request):
#     fields = ("tenant", "scope", "weights", "adapters")
#     same = all(entry[field] == request[field] for field in fields)
#     tokens = entry["tokens"]
#     return same and request["tokens"][: len(tokens)] == tokens
#
#
# ```
#
# </details>
#
# ### 3. What a revocation leaves
#
# | difficulty | minutes |
# |---|---|
# | medium | 10 |
#
# `entries` maps names to `{"tokens": n, "documents": {document: first token}}`. Return
# how many tokens of each entry stay when `document` is withdrawn: whole blocks only.


# %% tags=["exercise"]
def after_revoking(entries, document, size):
    return ...


exercises.check_revoke(after_revoking)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def after_revoking(entries, document, size):
#     kept = {}
#     for name, entry in entries.items():
#         start = entry["documents"].get(document)
#         kept[name] = entry["tokens"] if start is None else start // size * size
#     return kept
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
one_attack = attacks[False][0].seconds
foretold = short[len(question) + 1] / short[memo_tokens]
closing.add("guesses right, no salt", "share", 1.0, right[False] / guesses, n=guesses)
share = right[True] / guesses
closing.add("guesses right, tenants apart", "share", 1 / len(memos), share, n=guesses)
share = min(one_attack) / max(one_attack)
closing.add("TTFT, right guess/slowest wrong", "x", foretold, share)
closing.add("TTFT, another tenant/nobody's", "x", 1.0, apart, n=rounds)
closing.add("TTFT, hit/nobody's", "x", None, gain, n=rounds)
for what, unit, predicted, counted in (
    ("found, same tenant", "tokens", (len(memo) - 1) // 16 * 16, seen[1]["found"]),
    ("found, another tenant", "tokens", 0, seen[2]["found"]),
    ("found after the report went", "tokens", 32, max(found_now())),
    ("key in a freed block, not wiped", "keys", 1, int(dumps[0]["after"])),
    ("key in a freed block, wiped", "keys", 0, int(dumps[1]["after"])),
    ("misses of four tenants, no walls", "misses", 1, misses[False]),
    ("misses of four tenants, apart", "misses", 4, misses[True]),
):
    closing.add(what, unit, predicted, counted)

# %%
closing.write(run_folder() / "results.jsonl")
closing.table()

# %% [markdown]
# **Go on.** Read `labkit/cache/prefix.py`, and break it: each fault above has a test
# that notices.
