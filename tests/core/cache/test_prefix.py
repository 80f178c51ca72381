"""The prefix store: hits for the owner, misses for others, and nothing after it was forgotten."""

import pickle
from dataclasses import replace

import pytest

from labkit.cache.paged.cache import PagedCache
from labkit.cache.paged.pool import PagePool
from labkit.cache.prefix.entry import Fingerprint, Identity, common
from labkit.cache.prefix.store import PrefixStore
from labkit.errors import BadRequest
from labkit.plan.kv import KVShape

SHAPE = KVShape.uniform(2, 2, 8)
MODEL = Fingerprint("weights", ("adapter",), "formats", "settings")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make(blocks=64, budget=32, **options):
    pool = PagePool(SHAPE, blocks, 4, kv_format=options.pop("kv_format", None))
    return PrefixStore(pool, budget * pool.block_bytes, **options)


TOKENS = [100, 200, 300, 400, 5, 6, 7, 8, 9, 10]


def test_a_repeated_request_hits_and_leaves_one_token_to_compute(compute):
    view = make().open("a", "read", MODEL)
    assert compute(view, TOKENS) == 0
    assert compute(view, TOKENS) == 8
    assert compute(view, TOKENS[:8]) == 7  # all are stored: the last one is computed again
    assert compute(view, [*TOKENS, 11]) == 8
    assert (
        compute(view, [*TOKENS[:6], 99, 98]) == 6
    )  # not whole blocks: the last one is copied before it is written
    assert compute(view, [*TOKENS[:3], 99, 98]) == 0  # less than a block is not reused
    assert compute(view, TOKENS) == 8  # shared blocks did not change


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"scope": "write"},
        {"model": replace(MODEL, weights="other")},
        {"model": replace(MODEL, adapters=())},
        {"model": replace(MODEL, adapters=("adapter", "second"))},
        {"model": replace(MODEL, formats="int4")},
        {"model": replace(MODEL, settings="theta 1e6")},
    ],
)
def test_another_tenant_scope_or_model_misses_and_computes_everything(other, compute):
    store, mine = make(), {"tenant": "a", "scope": "read", "model": MODEL}
    assert compute(store.open(**mine), TOKENS) == 0
    assert compute(store.open(**mine | other), TOKENS) == 0
    assert compute(store.open(**mine), TOKENS) == 8
    assert compute(store.open(**mine | other), TOKENS) == 8  # its own entry


def test_equal_texts_in_different_fields_do_not_match(compute):
    """A tenant "X" and an adapter "X" are different keys, because each part is a separate field."""
    bare = replace(MODEL, adapters=())
    keys = [
        ("X", "", bare),
        ("", "X", bare),
        ("t", "", replace(bare, adapters=("X",))),
        ("tX", "", bare),
        ("t", "X", bare),
        ("t", "", replace(bare, formats="X")),
        ("t", "", replace(bare, settings="X")),
        ("t", "", replace(bare, adapters=("X", ""))),
        ("t", "", replace(bare, weights="X")),
        ("t", "", replace(bare, adapters=('X", "',))),
    ]
    keys = [key for key in keys if key[0]]
    store = make(200, 200)
    for key in keys:
        assert compute(store.open(*key), TOKENS) == 0, key
    for key in keys:
        assert compute(store.open(*key), TOKENS) == 8, key
    assert len({Identity(*key).to_json() for key in keys}) == len(keys)
    assert all(Identity.from_json(Identity(*key).to_json()) == Identity(*key) for key in keys)


def weak(tokens, upwards=False):
    total = 0
    for token in tokens if not upwards else reversed(tokens):
        total = 31 * total + token
    return total


COLLIDING = [
    [100, 231, 299, 400],
    [100, 201, 269, 400],
]  # same weak hash as the first four tokens, in one order or the other


@pytest.mark.parametrize("other", [*COLLIDING, [400, 300, 200, 100]])
def test_prefixes_with_equal_hashes_do_not_match(other, compute):
    if other in COLLIDING:
        assert any(weak(other, upwards) == weak(TOKENS[:4], upwards) for upwards in (False, True))
    view = make().open("a", "", MODEL)
    compute(view, [*TOKENS[:4], 1])
    assert compute(view, [*other, 1]) == 0
    assert compute(view, [*TOKENS[:4], 2]) == 4


def test_the_server_declares_public_prefixes_for_one_model(compute, numbers):
    store = make()
    view = store.open("a", "", MODEL)
    lease = view.lookup(TOKENS)
    lease.cache.advance(8)
    for layer in range(2):
        lease.cache.append(layer, numbers(TOKENS[:8]), -numbers(TOKENS[:8]))
    assert not hasattr(view, "declare_public")
    assert store.declare_public(MODEL, TOKENS[:8], lease.cache) == 8
    assert compute(store.open("b", "x", MODEL), TOKENS) == 8
    assert compute(store.open("b", "x", replace(MODEL, weights="other")), TOKENS) == 0
    store.forget(tenant="b")
    assert compute(store.open("c", "", MODEL), TOKENS) == 8
    store.forget(prefix=TOKENS[:8])
    assert compute(store.open("d", "", MODEL), TOKENS) == 0
    for nobody in (None, "", 3):
        with pytest.raises(BadRequest):
            store.open(nobody, "", MODEL)


def test_forget_drops_only_the_entries_that_match(compute):
    store = make()
    views = {(t, s): store.open(t, s, MODEL) for t in "ab" for s in "rw"}
    for view in views.values():
        compute(view, TOKENS)
        compute(view, [1, 2, 3, 4, 5])

    def hits(tokens):
        return {key for key, view in views.items() if view.lookup(tokens).length}

    assert store.forget(tenant="a", scope="r") == 2 and hits(TOKENS) == {
        ("a", "w"),
        ("b", "r"),
        ("b", "w"),
    }
    assert (
        store.forget(prefix=[1, 2, 3]) == 3
        and hits([1, 2, 3, 4, 5]) == set()
        and len(hits(TOKENS)) == 3
    )
    assert store.forget(tenant="b") == 2 and hits(TOKENS) == {("a", "w")}
    with pytest.raises(BadRequest, match="Nothing to forget"):
        store.forget()
    assert store.forget(scope="w") == 1 and hits(TOKENS) == set()
    assert store.pool.free == store.pool.total


def test_revoking_a_document_drops_what_was_built_on_it(compute):
    store = make()
    a, b = store.open("a", "", MODEL), store.open("b", "", MODEL)
    compute(a, TOKENS, {"report": 5})
    compute(
        a, [*TOKENS[:8], 50, 51, 52, 53, 54]
    )  # its beginning was found there, so it is built on the report, too
    compute(a, [*TOKENS[:4], 60, 61, 62, 63, 64])  # shares only tokens before the report
    compute(b, TOKENS)
    assert store.revoke("report") == 2
    assert a.lookup(TOKENS).length == 4
    assert a.lookup([*TOKENS[:8], 50, 51, 52, 53, 54]).length == 4
    assert a.lookup([*TOKENS[:4], 60, 61, 62, 63, 64]).length == 8
    assert b.lookup(TOKENS).length == 8
    assert store.revoke("report") == 0
    assert store.pool.owned == 4  # one before the report, one of the third prompt, two of b


def test_a_document_named_later_is_added_to_the_entry(compute):
    store = make()
    view = store.open("a", "", MODEL)
    compute(view, TOKENS)
    compute(view, TOKENS, ["report"])
    assert store.revoke("report") == 1 and view.lookup(TOKENS).length == 0


def test_a_result_from_before_a_revocation_is_not_stored(compute):
    store = make()
    view = store.open("a", "", MODEL)
    compute(view, TOKENS, ["report"])
    lease = view.lookup(TOKENS)  # a request that runs during the revocation
    lease.cache.advance(2)
    store.revoke("report")
    assert content(lease) == TOKENS[:8]  # it keeps its own blocks
    assert view.keep(lease, lease.cache, 0, TOKENS) == 0
    assert view.lookup(TOKENS).length == 0 and store.counters.stale == 1


def content(lease):
    return [int(n) % 1000 for n in lease.cache.dense(1)[0][0, 0, : lease.length, 0]]


def test_entries_expire_by_age_and_when_the_clock_moves_back(compute):
    clock = Clock()
    store = make(ttl_s=60, clock=clock)
    view = store.open("a", "", MODEL)
    compute(view, TOKENS)
    clock.now += 59
    assert compute(view, TOKENS) == 8  # a hit does not reset the age
    clock.now += 1
    assert view.lookup(TOKENS).length == 0 and store.pool.free == store.pool.total
    compute(view, TOKENS)
    clock.now -= 10
    assert store.sweep() == 1 and store.counters.expired == 2


def test_the_least_recently_used_goes_first_and_shared_blocks_count_once(compute):
    store = make(budget=6)
    view = store.open("a", "", MODEL)
    prompts = [[*TOKENS[:8], 30 + i, 1, 2, 3, 4] for i in range(3)]
    for tokens in prompts:
        compute(view, tokens)
    assert store.nbytes() == 5 * store.pool.block_bytes  # two shared blocks and one each
    assert view.lookup(prompts[0]).length == 12
    compute(view, [7, 7, 7, 7, 1])
    compute(view, [8, 8, 8, 8, 1])
    assert [view.lookup(tokens).length for tokens in prompts] == [12, 8, 12]
    assert store.nbytes() == 6 * store.pool.block_bytes  # the budget


def test_an_entry_larger_than_the_budget_is_not_stored(compute):
    store = make(budget=1)
    view = store.open("a", "", MODEL)
    assert compute(view, TOKENS) == 0 and compute(view, TOKENS) == 0
    assert store.entries() == [] and store.pool.free == store.pool.total
    with pytest.raises(BadRequest):
        make(budget=0)


def test_entries_make_room_for_running_requests_if_that_is_enough(compute):
    store = make(blocks=4, budget=4)
    view = store.open("a", "", MODEL)
    compute(view, TOKENS)
    cache = PagedCache.over(store.pool)
    with pytest.raises(BadRequest, match="full"):
        cache.advance(17)
    assert view.lookup(TOKENS).length == 8 and cache.lengths == (
        0,
    )  # no entry was evicted for a request that cannot run
    cache.advance(12)
    assert store.entries() == [] and store.counters.evictions == 1


def test_freed_blocks_are_zeros(compute):
    store = make()
    view = store.open("a", "", MODEL)
    compute(view, TOKENS)
    assert any(tensor.any() for tensor in store.pool.tensors())
    store.forget(tenant="a")
    assert not any(tensor.any() for tensor in store.pool.tensors())


def test_reprs_and_errors_show_no_content(compute):
    store = make()
    view = store.open("tenant-7", "scope-7", MODEL)
    compute(view, [424242] * 9, {"document-7": 0})
    lease = view.lookup([424242] * 9)
    shown = repr(
        [
            store,
            view,
            lease,
            lease.cache,
            store.entries(),
            store.pool,
            store.counters,
            view._identity,
        ]
    )
    for secret in ("424242", "tenant-7", "scope-7", "document-7", "weights"):
        assert secret not in shown, secret
    with pytest.raises(BadRequest) as error:
        view.keep(lease, lease.cache, 5, [424242])
    assert "424242" not in str(error.value)
    with pytest.raises(BadRequest, match="cannot be pickled"):
        pickle.dumps(store)


def test_counters_count_hits_misses_and_tokens(compute):
    store = make()
    view = store.open("a", "", MODEL)
    for _ in range(3):
        compute(view, TOKENS)
    c = store.counters
    assert (c.hits, c.misses, c.tokens_found) == (2, 1, 16)


def test_bad_requests_change_nothing():
    store = make()
    view = store.open("a", "", MODEL)
    foreign = PagedCache(SHAPE, 1)
    lease = view.lookup(TOKENS)
    for call in (
        lambda: view.lookup([]),
        lambda: view.lookup(["x"]),
        lambda: view.keep(lease, foreign, 0, TOKENS),
        lambda: view.keep(lease, lease.cache, 1, TOKENS),
        lambda: view.keep(lease, lease.cache, 0, TOKENS, "name"),
        lambda: view.keep(lease, lease.cache, 0, TOKENS, {"name": -1}),
        lambda: PrefixStore(store.pool, 10**6),
        lambda: make(ttl_s=0),
        lambda: Identity("a", None, MODEL),
        lambda: Fingerprint(""),
    ):
        with pytest.raises(BadRequest):
            call()
    assert store.entries() == [] and store.pool.free == store.pool.total


def test_common_is_the_number_of_equal_first_tokens():
    for a, b, n in [
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 5, 3), 1),
        ((), (1,), 0),
        ((2,), (1,), 0),
    ]:
        assert common(a, b) == common(b, a) == n
