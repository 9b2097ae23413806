"""The catalogue of GPUs: lookup, typed errors, a source for every number."""

import dataclasses

import pytest
from foredraft.core.errors import ForedraftError
from foredraft.sim.cost.hardware import UnknownGPU, UnsupportedDtype, known_gpus, lookup_gpu


@pytest.mark.parametrize("spelling", ["H100", "h100", "NVIDIA H100", "h100-sxm5", "H100 80GB"])
def test_spellings_find_one_device(spelling):
    assert lookup_gpu(spelling) is lookup_gpu("H100")


def test_a_capacity_in_the_name_selects_the_smaller_a100():
    small, large = lookup_gpu("a100-40g"), lookup_gpu("A100 80GB")
    assert small.memory_bytes < large.memory_bytes
    assert small.memory_bandwidth_bytes_per_s == 1555e9
    assert large.memory_bandwidth_bytes_per_s == 2039e9


def test_unknown_names_the_nearest():
    with pytest.raises(UnknownGPU, match=r"did you mean 'H100'.*known: .*MI300X") as caught:
        lookup_gpu("H1000")
    assert isinstance(caught.value, ForedraftError)
    with pytest.raises(UnknownGPU, match="unknown GPU 'H20'; known"):
        lookup_gpu("H20")  # another GPU, not a misspelt H200


def test_missing_dtype_is_named():
    with pytest.raises(UnsupportedDtype, match="A100 has no tensor-core rate for 'fp8'; it has bf16, fp16"):
        lookup_gpu("a100").flops("fp8")


@pytest.mark.parametrize("name", known_gpus())
def test_every_number_has_a_source(name):
    gpu = lookup_gpu(name)
    numeric = {field.name for field in dataclasses.fields(gpu)} - {"name", "sources"}
    assert numeric <= set(gpu.sources)
    assert all(source for *_, source in gpu.explain())


@pytest.mark.parametrize("name", known_gpus())
def test_numbers_are_in_their_units(name):
    gpu = lookup_gpu(name)
    assert 16e9 < gpu.memory_bytes < 300e9
    assert 0.2e12 < gpu.memory_bandwidth_bytes_per_s < 10e12
    # A sparse rate taken for a dense one would show as more than twice the ratio of any of these devices.
    assert 100 < gpu.peak_flops["bf16"] / gpu.memory_bandwidth_bytes_per_s < 450
    assert 10e9 < gpu.interconnect.bandwidth_bytes_per_s <= 900e9
    if "fp8" in gpu.peak_flops:
        assert gpu.peak_flops["fp8"] == pytest.approx(2 * gpu.peak_flops["bf16"], rel=0.02)
