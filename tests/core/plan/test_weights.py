"""Compare bytes of weights with a real GGUF file, the gguf package and published sizes."""

import pytest

from labkit.errors import BadRequest
from labkit.lab.plan.memory import resolve
from labkit.plan.shapes import Matrix
from labkit.plan.units import format_bytes, parse_bytes
from labkit.plan.weights import GGUF_BITS, bits_per_weight, gguf_bytes, weight_bytes


def test_pure_types_are_the_bits_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for name in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
        weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert GGUF_BITS[name] == 8 * size / weights


def test_the_default_models_own_file_is_estimated_within_a_percent():
    assert weight_bytes(resolve("default"), "Q4_1") == pytest.approx(
        96_576_768, rel=0.01
    )  # its tensors


@pytest.mark.parametrize(
    "name, gigabytes",
    [
        ("Q2_K", 3.18),
        ("Q3_K_M", 4.02),
        ("Q4_K_S", 4.69),
        ("Q4_K_M", 4.92),
        ("Q5_K_M", 5.73),
        ("Q6_K", 6.60),
        ("Q8_0", 8.54),
    ],
)
def test_published_file_sizes_of_llama_3_1_8b(name, gigabytes):
    # The files contain about 8 MB of vocabulary in addition to the tensors.
    assert (gguf_bytes(resolve("llama-3.1-8b"), name) + 8e6) / 1e9 == pytest.approx(
        gigabytes, rel=0.01
    )


def test_sixteen_bits_are_two_bytes_per_weight():
    for name in ("smollm2-135m", "mixtral-8x7b", "deepseek-v3"):
        model = resolve(name)
        assert weight_bytes(model, "bf16") == 2 * model.parameters
        assert weight_bytes(model, "fp32") == 2 * weight_bytes(model, "bfloat16")


def test_the_bytes_of_a_format_include_its_scales():
    model = resolve("llama-3.1-8b")
    blocks = sum(m.parameters for m in model.part("blocks"))
    with_blocks = weight_bytes(model, "int4_g128_zp") - weight_bytes(model, "int8_channel")
    # Compared with int8 blocks (8 bits, and a float32 per row); the rest of the two recipes is equal.
    rows = sum(m.rows * m.count for m in model.part("blocks"))
    assert with_blocks == pytest.approx(blocks * (4.15625 - 8) / 8 - 4 * rows, rel=1e-3)
    matrix = Matrix("q", "blocks", 4096, 4096, 0)
    from labkit.formats import get_format

    assert 8 * get_format("nvfp4").nbytes((4096, 4096)) == 4.5 * matrix.parameters + 32


def test_bits_per_weight_of_named_recipes_on_the_default_model():
    model = resolve("default")
    assert 8 < bits_per_weight(model, "int8") < 8.1
    assert bits_per_weight(model, "int4") == pytest.approx(
        5 + 3 * model.vocab_size * 576 / model.parameters, abs=0.03
    )


def test_gguf_types_with_more_bits_are_larger():
    model = resolve("llama-3.1-8b")
    sizes = {name: gguf_bytes(model, name) for name in GGUF_BITS}
    order = [
        "Q2_K",
        "Q3_K_S",
        "Q3_K_M",
        "Q3_K_L",
        "Q4_K_S",
        "Q4_K_M",
        "Q5_K_S",
        "Q5_K_M",
        "Q6_K",
        "Q8_0",
        "F16",
        "F32",
    ]
    assert [sizes[name] for name in order] == sorted(sizes[name] for name in order)


@pytest.mark.parametrize(
    "text, count",
    [
        ("16GiB", 16 * 2**30),
        ("16 GB", 16 * 10**9),
        ("1.5mib", 1.5 * 2**20),
        ("4096", 4096),
        (4096, 4096),
        ("512B", 512),
    ],
)
def test_units_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["16G", "", "GiB", "-1GiB", "1e3GiB", "16 giblets", float("nan"), float("inf")]
)
def test_ambiguous_or_unknown_units_raise(text):
    with pytest.raises(BadRequest, match="amount of memory"):
        parse_bytes(text)


def test_units_are_written():
    assert [format_bytes(n) for n in (512, 2048, 7_569_408_000)] == [
        "512 B",
        "2.00 KiB",
        "7.05 GiB",
    ]
