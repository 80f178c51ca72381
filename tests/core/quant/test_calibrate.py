"""Statistics of inputs: padding never counted, the first token always, whatever the batch."""

import pytest
import torch

from fakes import ByteTokenizer
from labkit.errors import BadRequest
from labkit.lab.texts import calibration_text
from labkit.lab.texts.calibration import library_calibration
from labkit.model.tiny import tiny_model
from labkit.quant.calibrate import Calibration, InputStatistics, collect, split

NAMES = ["layers.0.attention.qkv", "layers.1.mlp.down", "head"]


def sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


def test_padding_is_never_counted():
    model = tiny_model()
    ragged = sequences([3, 11, 7, 20, 5])
    together = collect(model, NAMES, Calibration(ragged, batch=5))
    alone = collect(model, NAMES, Calibration(ragged, batch=1))
    for name in NAMES:
        assert together[name].tokens == alone[name].tokens == 46
        torch.testing.assert_close(
            together[name].hessian, alone[name].hessian, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            together[name].mean_abs, alone[name].mean_abs, rtol=1e-4, atol=1e-5
        )


def test_the_statistics_are_those_of_the_inputs():
    model, seen = tiny_model(), []
    model.layers[1].mlp.down.register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    found = collect(model, NAMES[1:2], Calibration(sequences([9, 9]), batch=1))[NAMES[1]]
    x = torch.cat(seen)
    torch.testing.assert_close(found.hessian, x.T @ x / 18)
    torch.testing.assert_close(found.mean_abs, x.abs().mean(0))


def test_the_first_token_is_in_unless_left_out_on_purpose():
    model = tiny_model()
    with_first = collect(model, NAMES[:1], Calibration(sequences([8, 8])))[NAMES[0]]
    without = collect(model, NAMES[:1], Calibration(sequences([8, 8]), include_first=False))[
        NAMES[0]
    ]
    assert (with_first.tokens, without.tokens) == (16, 14)


def test_hooks_are_gone_even_after_a_failure():
    model = tiny_model()

    def fail(model, tokens, counts):
        model(tokens)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        collect(model, NAMES, Calibration([[1, 2]]), fail)
    with pytest.raises(BadRequest, match="token 9999, but the model has 96"):
        collect(model, NAMES, Calibration([[1, 2, 9999]]))
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("odd", [[[1.5]], [["a"]], "abc", [[-1]], [[True]], [[1, None]]])
def test_what_is_no_token_id_is_refused_when_the_calibration_is_made(odd):
    with pytest.raises(BadRequest, match="which is not a token id"):
        Calibration(odd)


def test_batches_are_whole_numbers_and_tensors_of_tokens_are_sequences():
    for batch in (0, -1, 1.5, None):
        with pytest.raises(BadRequest, match="batch is"):
            Calibration([[1]], batch=batch)
    assert Calibration([torch.tensor([1, 2])]).sequences == [[1, 2]]


def test_empty_calibration_is_refused():
    for empty in ([], [[]], [[1, 2], []]):
        with pytest.raises(BadRequest, match="calibration is empty"):
            Calibration(empty)

    with pytest.raises(BadRequest, match="fewer than one sequence of 256"):
        Calibration.from_text("too short", ByteTokenizer())
    made = Calibration.from_text("x" * 1000, ByteTokenizer(), length=100, sequences=4)
    assert [len(s) for s in made.sequences] == [100] * 4
    both = Calibration.from_text(["a" * 1000, "b" * 1000], ByteTokenizer(), length=100, sequences=5)
    assert [s[0] for s in both.sequences] == [
        97,
        97,
        97,
        98,
        98,
    ]  # neither text crowds the other out
    uneven = Calibration.from_text(
        ["a" * 1000, "b" * 1000], ByteTokenizer(), length=100, sequences=5, shares=(3, 1)
    )
    assert [s[0] for s in uneven.sequences] == [97, 97, 97, 97, 98]
    library = [
        library_calibration(ByteTokenizer(), length=100, sequences=8, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert library[0] == library[1] != library[2] and len(library[2].sequences) == 8
    code = calibration_text("code", 0, 2000).encode()
    assert [bytes(s) for s in library[0].sequences[:6]] == [
        code[i : i + 100] for i in range(0, 600, 100)
    ]
    prose = calibration_text("prose", 0, 2000).encode()
    assert bytes(library[0].sequences[6]) == prose[:100]


def test_more_sequences_than_the_library_has_are_refused(monkeypatch):
    import labkit.lab.texts.calibration

    monkeypatch.setattr(
        labkit.lab.texts.calibration, "calibration_text", lambda kind, seed, characters: "a" * 100
    )
    assert len(library_calibration(ByteTokenizer(), 10, 12).sequences) == 12
    with pytest.raises(
        BadRequest,
        match="text for 13 sequences, not 14",
    ):
        library_calibration(ByteTokenizer(), 10, 14)  # eleven of code, of which there are ten


def test_a_running_mean_over_many_batches():
    x = torch.randn(1000, 6, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics.empty(6)
    for piece in x.split([1, 99, 500, 0, 400]):
        statistics.add(piece)
    torch.testing.assert_close(statistics.hessian, x.T @ x / 1000)
    scale = torch.rand(6) + 0.5
    other = InputStatistics.empty(6)
    other.add(x / scale)
    torch.testing.assert_close(statistics.scaled(scale).hessian, other.hessian)


def test_a_number_is_split_without_loss():
    for total in range(1, 30):
        for shares in ((1,), (1, 1), (3, 1), (2, 0, 5)):
            parts = split(total, shares)
            assert sum(parts) == total and min(parts) >= 0
            assert all(
                abs(part - total * share / sum(shares)) < 1 for part, share in zip(parts, shares)
            )
    assert split(96, (3, 1)) == [72, 24]
