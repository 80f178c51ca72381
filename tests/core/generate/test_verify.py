"""The accept rule against enumeration: every draft, every verdict, no sampling error."""

from itertools import product

import pytest
import torch

from labkit.generate import InvalidLogits, Sampling
from labkit.generate.drafter import Draft
from labkit.generate.row import Row
from labkit.generate.sampling import Past, process
from labkit.generate.verify import InvalidDraft, acceptance, residual, verify_greedy, verify_row

P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
NO_ENDS = frozenset()


def row(history=(1, 2), num_prompt=None, seed=0):
    made = Row(
        0, tuple(history[: num_prompt or len(history)]), 99, torch.Generator().manual_seed(seed)
    )
    made.history = list(history)
    return made


def emitted(p, drawn_from, scored_as):
    """The distribution of the token that comes out where drafts come from one distribution and are scored as another."""
    out = torch.zeros_like(p)
    for token, weight in enumerate(drawn_from.tolist()):
        if weight:
            keep = acceptance(p, scored_as, token)
            out[token] += weight * keep
            if keep < 1:
                left = residual(p, scored_as, token)
                out += weight * (1 - keep) * left / left.sum()
    return out


def one_hot(token, size):
    return torch.zeros(size).index_fill_(0, torch.tensor(token), 1.0)


# --- one token -----------------------------------------------------------------------------------------------------


def test_the_result_has_the_targets_distribution():
    torch.testing.assert_close(emitted(P, Q, Q), P)


def test_a_greedy_draft_is_a_point_mass_and_scoring_it_as_sampled_is_wrong():
    greedy = one_hot(1, 3)
    torch.testing.assert_close(emitted(P, greedy, None), P)
    torch.testing.assert_close(
        emitted(P, greedy, Q), torch.tensor([0.4, 0.6, 0.0])
    )  # the classic mistake


def test_probabilities_are_those_after_top_k():
    raw, p = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.5, 0.5, 0.0, 0.0])
    q = torch.tensor([4 / 7, 3 / 7, 0.0, 0.0])
    torch.testing.assert_close(emitted(p, q, q), p)
    torch.testing.assert_close(
        emitted(p, q, raw), torch.tensor([0.5714, 0.4286, 0, 0]), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("seed", range(5))
def test_any_pair_of_distributions(seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(7, generator=generator, dtype=torch.float64) ** 4 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    torch.testing.assert_close(emitted(p, q, q), p)
    for token in range(7):
        torch.testing.assert_close(emitted(p, one_hot(token, 7).double(), None), p)


# --- a run of tokens -----------------------------------------------------------------------------------------------


def test_a_whole_run_is_as_likely_as_without_drafting():
    """Two drafted tokens and the bonus over three words, both sides depending on what was said before."""
    generator = torch.Generator().manual_seed(3)

    def random():
        return (lambda x: x / x.sum())(torch.rand(3, generator=generator, dtype=torch.float64))

    words = [text for n in range(3) for text in product(range(3), repeat=n)]
    p, q = {text: random() for text in words}, {text: random() for text in words}
    found = {text: 0.0 for text in product(range(3), repeat=3)}

    def spread(text, weight):
        """What is still missing comes from the target, one by one, in later passes."""
        if len(text) == 3:
            found[text] += weight
        else:
            for token in range(3):
                spread((*text, token), weight * float(p[text][token]))

    for draft in product(range(3), repeat=2):
        weight = float(q[()][draft[0]] * q[draft[:1]][draft[1]])
        for i in range(2):
            text = draft[:i]
            keep = acceptance(p[text], q[text], draft[i])
            left = residual(p[text], q[text], draft[i])
            for token in range(3):
                if keep < 1:
                    spread((*text, token), weight * (1 - keep) * float(left[token] / left.sum()))
            weight *= keep
        spread(draft, weight)
    for (a, b, c), weight in found.items():
        assert weight == pytest.approx(float(p[()][a] * p[(a,)][b] * p[a, b][c]), abs=1e-12)


@pytest.mark.parametrize("scored", ["right", "wrong"])
def test_the_code_that_draws_does_what_was_enumerated(scored):
    """4,000 verdicts of one drafted token; a chi-square that the wrong rule fails by far."""
    sampling, n = Sampling(temperature=1.0), 4000
    logits, counts = torch.stack([P.log(), P.log()]), torch.zeros(3)
    here = row()
    draws = torch.multinomial(
        Q, n, replacement=True, generator=torch.Generator().manual_seed(1)
    ).tolist()
    for drafted in (
        draws if scored == "right" else [1] * n
    ):  # the wrong one drafts its likeliest and says that it drew it
        tokens, kept = verify_row(logits, Draft([drafted], Q[None]), here, sampling, NO_ENDS)
        assert len(tokens) == kept + 1 and tokens[:kept] == [drafted][:kept]
        counts[tokens[0]] += 1
    chi_square = float(((counts - n * P) ** 2 / (n * P)).sum())
    assert (chi_square < 9.2) == (scored == "right"), (
        chi_square
    )  # 1 % of chi-square with 2 degrees of freedom


def test_one_generator_is_used_on_and_never_reseeded():
    sampling, here = Sampling(temperature=1.0), row(seed=5)
    logits = torch.zeros(2, 50)
    said = [verify_row(logits, Draft([0]), here, sampling, NO_ENDS)[0][0] for _ in range(40)]
    assert len(set(said)) > 15
    again = row(seed=5)
    assert said == [
        verify_row(logits, Draft([0]), again, sampling, NO_ENDS)[0][0] for _ in range(40)
    ]


def test_greedy_keeps_up_to_the_first_difference():
    wanted = [3, 1, 4, 1, 5]
    logits = torch.stack([one_hot(token, 6) for token in wanted])
    for wrong in range(4):
        drafted = [0 if i == wrong else token for i, token in enumerate(wanted[:4])]
        expected = (wanted[: wrong + 1], wrong)
        assert verify_greedy(logits[None], [Draft(drafted)]) == [expected]
        assert verify_row(logits, Draft(drafted), row(), Sampling(), NO_ENDS) == expected
    assert verify_greedy(logits[None], [Draft(wanted[:4])]) == [(wanted, 4)]
    assert verify_greedy(logits[None, :1], [Draft()]) == [([3], 0)]


def test_the_first_drafted_token_is_checked_too():
    logits = torch.stack([one_hot(2, 6), one_hot(0, 6)])
    assert verify_greedy(logits[None], [Draft([1])]) == [([2], 0)]


def test_rows_keep_different_counts():
    logits = torch.stack(
        [torch.stack([one_hot(t, 6) for t in tokens]) for tokens in ([1, 2, 3], [4, 5, 0])]
    )
    assert verify_greedy(logits, [Draft([1, 2]), Draft([0])]) == [([1, 2, 3], 2), ([4], 0)]


def test_among_equal_logits_the_lowest_id():
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0]]).repeat(2, 1)
    assert verify_greedy(logits[None], [Draft([1])]) == [([1, 1], 1)]
    assert verify_greedy(logits[None], [Draft([2])]) == [([1], 0)]
    assert verify_row(logits, Draft([2]), row(), Sampling(), NO_ENDS) == ([1], 0)


# --- penalties and counters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"frequency_penalty": 3.0},
        {"presence_penalty": 4.0},
        {"repetition_penalty": 2.0},
        {"min_new_tokens": 4},
        {"bad_words": [[3, 1]]},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_penalties_count_every_token_of_a_run(settings, temperature):
    """The pass is judged as single steps would be: the second drafted token already knows the first."""
    sampling = Sampling(temperature=temperature, **settings)
    logits = torch.tensor(
        [[0.0, 4, 3, 6, 1, 2], [0, 5, 3, 6, 1, 2], [0, 4, 3, 5.9, 1, 5], [0, 1, 2, 3, 4, 5]]
    )
    steps, here = [], row((1, 2), num_prompt=1)
    for scores in logits:
        steps.append(int(process(scores, sampling, Past(here.history, 1, (3,))).argmax()))
        here.history.append(steps[-1])
    tokens, kept = verify_row(
        logits, Draft(steps[:3]), row((1, 2), num_prompt=1), Sampling(**settings), frozenset((3,))
    )
    assert (tokens, kept) == (steps, 3)
    fixed = row((1, 2), num_prompt=1)
    assert fixed.history == [1, 2]  # the row is not touched


# --- nothing left, and nothing at all ------------------------------------------------------------------------------


def test_equal_distributions_always_keep_and_leave_a_valid_token():
    for q in (P.clone(), P * (1 + 1e-7)):
        for token in range(3):
            assert acceptance(P, q, token) == pytest.approx(1.0, abs=1e-6)
            assert float(residual(P, q, token).sum()) > 0


def test_a_sure_target_keeps_its_token_and_rejects_others():
    sure = one_hot(1, 3)
    assert acceptance(sure, None, 1) == 1 and acceptance(sure, None, 0) == 0
    assert acceptance(sure, Q, 1) == 1 and residual(sure, Q, 0).argmax() == 1
    assert torch.equal(
        residual(sure, None, 1), sure
    )  # cannot be asked for, and is still a distribution


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_a_typed_error(bad, temperature):
    logits = torch.full((2, 4), bad)
    with pytest.raises(InvalidLogits):
        verify_row(logits, Draft([1]), row(), Sampling(temperature=temperature), NO_ENDS)
    with pytest.raises(InvalidLogits):
        verify_greedy(logits[None], [Draft([1])])


def test_logits_after_a_rejection_are_not_examined():
    logits = torch.stack([one_hot(2, 4), torch.full((4,), float("nan"))])
    assert verify_greedy(logits[None], [Draft([1])]) == [([2], 0)]
    assert verify_row(logits, Draft([1]), row(), Sampling(), NO_ENDS) == ([2], 0)


@pytest.mark.parametrize("q", [[float("nan")] * 3, [0.0, 0.5, 0.5], [float("inf"), 0, 0]])
def test_a_draft_that_cannot_have_been_drawn_is_a_typed_error(q):
    with pytest.raises(InvalidDraft):
        verify_row(
            P.log().repeat(2, 1),
            Draft([0], torch.tensor([q])),
            row(),
            Sampling(temperature=1.0),
            NO_ENDS,
        )


def test_nan_beside_the_drafted_token_is_a_typed_error():
    q = torch.tensor([0.99, float("nan"), 0.01])
    with pytest.raises(InvalidDraft):
        residual(P, q, 0)
