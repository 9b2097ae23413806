"""The catalogue of GPUs: lookup, typed errors, a source for every number."""

import dataclasses
import re

import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.scheduler.config import EngineRole
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.hardware import MIB, UnknownGPU, UnsupportedDtype, known_gpus, lookup_gpu
from foredraft.sim.scenario_file import check_names, load_scenario, scenario_with


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
    with pytest.raises(UnknownGPU, match=r"unknown GPU 'A10G'; known.*hardware.custom takes the numbers of another"):
        lookup_gpu("A10G")  # another GPU, not a misspelt A10


@pytest.mark.parametrize("spelling, name", [
    ("H20", "H20"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("GeForce RTX 5090", "RTX 5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"), ("DGX Spark", "GB10"), ("a10", "A10"),
    ("rtx-pro-6000-blackwell-server-edition", "RTX PRO 6000 Server"), ("AMD Instinct MI355X", "MI355X"), ("L40", "L40"),
])  # fmt: skip
def test_names_as_drivers_print_them(spelling, name):
    assert lookup_gpu(spelling).name == name


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
    assert 16e9 < gpu.memory_bytes < 310e9
    assert 0.2e12 < gpu.memory_bandwidth_bytes_per_s < 10e12
    # A sparse rate taken for a dense one would show as more than twice the ratio of most of these devices. H20 has few
    # units beside its memory.
    assert 70 < gpu.peak_flops["bf16"] / gpu.memory_bandwidth_bytes_per_s < 460 or name == "H20"
    assert 1 < gpu.power_w / gpu.sm_count < 10
    assert 10e9 < gpu.interconnect.bandwidth_bytes_per_s <= 900e9
    if "fp8" in gpu.peak_flops:
        assert gpu.peak_flops["fp8"] == pytest.approx(2 * gpu.peak_flops["bf16"], rel=0.02)


GIVEN = {"memory_gb": 24, "bandwidth_gb_per_s": 936, "bf16_tflops": 71, "link_gb_per_s": 32}


def _settings(changed):
    return [f"hardware.custom.{key}={value}" for key, value in (GIVEN | changed).items() if value is not None]


def test_numbers_of_a_user_make_a_gpu():
    scenario, _ = load_scenario(None, _settings({"fp8_tflops": 142, "power_w": 350}))
    gpu = scenario.hardware.device
    assert (gpu.name, gpu.memory_bytes, gpu.memory_bandwidth_bytes_per_s) == ("custom", 24_000_000_000, 936e9)
    assert gpu.peak_flops == {"bf16": 71e12, "fp16": 71e12, "fp8": 142e12}
    assert gpu.interconnect.bandwidth_bytes_per_s == 32e9
    assert all(source for *_, source in gpu.explain())
    again = scenario_with(scenario.model_dump(mode="json"), {"hardware.custom.memory_gb": 48})
    assert again.hardware.device.memory_bytes == 48_000_000_000


def test_the_numbers_of_an_entry_give_its_times():
    """A GPU of the same numbers costs what the catalogue's costs."""
    small = ("model.weight_dtype=int4", "workload.num_requests=20", "hardware.kernels=roofline")
    given = _settings({"memory_gb": 46_068 * MIB / 1e9, "bandwidth_gb_per_s": 864, "bf16_tflops": 119.5,
                       "fp8_tflops": 239, "multiprocessors": 92})  # fmt: skip
    runs = [assemble(load_scenario(None, [*small, *more])[0]) for more in (["hardware.gpu=L20"], given)]
    assert [run.memory.slots for run in runs] == [runs[0].memory.slots] * 2
    assert runs[0].cost.decode_parts(4, RoundShape.chain(3), 2000) == runs[1].cost.decode_parts(
        4, RoundShape.chain(3), 2000
    )


def test_a_named_gpu_is_not_replaced_by_given_numbers():
    scenario, _ = load_scenario(None, [*_settings({}), "hardware.gpu=L40S", "hardware.prefill.gpu=custom"])
    assert scenario.hardware.device.name == "L40S"
    assert scenario.hardware.of_role(EngineRole.PREFILL).device.name == "custom"
    with pytest.raises(ConfigError, match=r"hardware.gpu: custom is the GPU of the table hardware.custom"):
        check_names(load_scenario(None, ["hardware.gpu=custom"])[0])


@pytest.mark.parametrize("changed, message", [
    ({"memory_gb": None}, "hardware.custom.memory_gb: is missing: expected gigabytes"),
    ({"link_gb_per_s": None}, "hardware.custom.link_gb_per_s: is missing: expected gigabytes per second"),
    ({"memory_gb": 24e9}, "memory_gb: expected gigabytes, from 1 to 4,000, got 24000000000"),
    ({"memory_gb": 24_576}, "memory_gb: expected gigabytes"),
    ({"bandwidth_gb_per_s": 0.936}, "bandwidth_gb_per_s: expected gigabytes per second"),
    ({"bandwidth_gb_per_s": 936e9}, "bandwidth_gb_per_s: expected gigabytes per second"),
    ({"bf16_tflops": 71e12}, "bf16_tflops: expected dense TFLOP/s"),
    ({"bf16_tflops": 0.071}, "bf16_tflops: expected dense TFLOP/s"),
    ({"bf16_tflops": 71_000}, "FLOP for each byte of memory traffic; expected 5 to 2500: are these TFLOP/s and GB/s"),
    ({"bandwidth_gb_per_s": 8000, "bf16_tflops": 2.25}, "FLOP for each byte of memory traffic"),
    ({"fp8_tflops": 4.5, "bf16_tflops": 2250}, "fp8_tflops is 4.5, and bf16_tflops 2250"),
    ({"link_gb_per_s": 32e9}, "link_gb_per_s: expected gigabytes per second and direction"),
    ({"power_w": 0.35}, "power_w: expected watts"),
])  # fmt: skip
def test_a_wrong_magnitude_is_refused_with_what_is_expected(changed, message):
    with pytest.raises(ConfigError, match=f"--set: .*{re.escape(message)}"):
        load_scenario(None, _settings(changed))
