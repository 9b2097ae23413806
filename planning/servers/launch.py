"""Reads a launch command of SGLang, vLLM or TensorRT-LLM as keys of a scenario, and lists its arguments that are not
simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import ForedraftError, Problem
from ...core.model_shape.quantization import main_format
from ...sim.assembly.models import model_shape
from ...sim.cost.deployments.evidence import about_releases
from ...sim.cost.hardware import GPU, lookup_gpu
from ...sim.cost.memory.rules import rules_of
from ...sim.cost.server import nearest_profile, server_profile
from . import sglang, trtllm, vllm
from .arguments import read_arguments
from .command import Given, ServerArguments

READERS = {
    name: (module.SERVER, module.read) for name, module in (("sglang", sglang), ("vllm", vllm), ("trtllm", trtllm))
}

SPECULATION = "speculation."


@dataclass(frozen=True)
class LaunchCommand:
    """What a command says.

    Attributes:
        settings: Dotted keys of a scenario with their values; the table `speculation` as a whole, for the command says
            all of it.
        without_effect: Arguments on which neither the time of a pass nor the schedule depends.
        not_modelled: Arguments that a run does not follow, each with the reason.
        assumed: Sentences about what the server does where the command is silent.
    """

    settings: Mapping[str, Any]
    without_effect: list[str]
    not_modelled: dict[str, str]
    assumed: list[str]

    def notes(self) -> list[str]:
        """Return lines that say how the command's arguments were read."""
        lines = list(self.assumed)
        if self.without_effect:
            lines.append(f"without effect on timing: {', '.join(self.without_effect)}")
        return [*lines, *(f"not modelled: {argument}: {reason}" for argument, reason in self.not_modelled.items())]


NO_MODEL = "the command names none; give --model, or model.target in the scenario or by --set"


def read_launch(
    server: str, command: str, source: str, gpu: str | GPU, *, has_model: bool = False, release: str | None = None
) -> LaunchCommand:
    """Read a command of "sglang", "vllm" or "trtllm", as text or the path of a file; defaults follow from its GPU
    `gpu`, or from that of the catalogue with this name. `has_model`: whether the model is known if the command names
    none. `release`: that of the scenario, if the command names none.

    Raises ConfigError with every argument that is unknown or cannot be read.
    """
    known, read = READERS[server]
    given = read_arguments(known, command, source)
    given.known_release = given.release or release
    read(given, lookup_gpu(gpu) if isinstance(gpu, str) else gpu)
    given.multiply()
    _leave_formats_to_files(given)
    if "model.target" not in given.settings and not has_model:
        given.problems.append(Problem("model", NO_MODEL))
    given.check()
    settings, (without_effect, reasons) = given.settings, _others(known, given)
    profile = settings["hardware.server"]
    if given.release is not None and len(server_profile(profile).memory) > 1:
        settings["hardware.release"] = given.release
        if given.has_image and rules_of(given.release, server_profile(profile).memory).flashinfer_bytes is not None:
            settings["hardware.flashinfer_sampler"] = True  # images have it
    given.assumed.append(_about_release(profile, given.release))
    whole = {key: value for key, value in settings.items() if not key.startswith(SPECULATION)}
    spoken = {key.removeprefix(SPECULATION): value for key, value in settings.items() if key.startswith(SPECULATION)}
    return LaunchCommand(
        {**whole, "speculation": spoken}, without_effect, {**reasons, **given.not_modelled}, given.assumed
    )


def _leave_formats_to_files(given: Given) -> None:
    """Drop a format of weights that the command names where the model's files say their own, as servers do; another one
    is named."""
    key, target = "model.weight_dtype", given.settings.get("model.target")
    wanted = given.settings.get(key)
    if wanted is None or target is None:
        return
    try:
        shape = model_shape(str(target), "model.target")
    except ForedraftError:
        return  # refused where the scenario is read
    formats = (shape.weight_dtype, shape.attention_dtype, shape.mlp_dtype)
    is_plain = all(one in (None, "bf16", "fp16") for one in formats)
    if is_plain or all(one in (None, wanted) for one in formats):
        return
    del given.settings[key]
    if "quantization" in given.values and not any(one and one.startswith(wanted) for one in formats):
        own = main_format(shape.weight_dtype)
        given.not_modelled["--quantization"] = f"the checkpoint's own format is taken, {own}, not {wanted}"


def _about_release(profile: str, release: str | None) -> str:
    """Say whose timing is taken for a release, None if the command names none, and which profile is nearer to it."""
    named = "no release" if release is None else f"release {release}"
    about = f", and {releases}" if (releases := about_releases(profile)) else ""
    text = f"the command names {named}: the timing is that of {profile}{about}"
    nearest = profile if release is None else nearest_profile(f"{profile.partition('-')[0]}-{release}")
    return text if nearest in (profile, None) else f"{text}; {nearest} is nearer: set hardware.server"


def _others(server: ServerArguments, given: Given) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without effect, and the reason for each argument that is not modelled."""
    without_effect, reasons = [], {}
    for name, value in given.values.items():
        reason = server.known[name].reason
        if reason is None:
            without_effect.append(f"--{name}")
        elif reason and value is not False:
            reasons[f"--{name}"] = reason
    return without_effect, reasons
