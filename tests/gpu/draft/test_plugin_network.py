"""A plugin's network: the head that docs/plugins.md shows, loaded from files, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foredraft.core.algorithm.builtin import Eagle
from foredraft.core.algorithm.host_drafts import PluginError
from foredraft.core.algorithm.registry import register_algorithm
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.shapes import meta_models
from foredraft.gpu.models.checkpoint import load_draft, load_target, new_head, save_draft
from foredraft.gpu.models.eagle import DraftHead, EagleHead
from foredraft.gpu.models.heads.config import EAGLE, HeadConfig
from foredraft.gpu.models.stored.tensor_files import CheckpointError
from foredraft.gpu.session.devices import ops_for
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.session import DecodeSession
from small_checkpoint import write_head, write_target

pytestmark = pytest.mark.usefixtures("forget")
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A target and an EAGLE head for it."""
    place = tmp_path_factory.mktemp("files")
    return write_target(place / "target"), write_head(place / "eagle", EAGLE)


@pytest.fixture
def gated() -> type[EagleHead]:
    """The class that the document shows; its algorithm is registered as GATED."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.S) if "GatedHead" in b)
    names: dict[str, type] = {}
    exec(block, names)
    register_algorithm("GATED")(names["Gated"])
    return names["GatedHead"]


def write_gated(gated: type[EagleHead], files: tuple[Path, Path], directory: Path, gate: float) -> Path:
    """Write the weights of the EAGLE head with a gate of one value."""
    target = load_target(files[0], ops_for("cpu"))
    head = load_draft(files[1], EAGLE, target)
    assert isinstance(head, DraftHead)
    own = new_head(replace(head.config, network=gated), target)
    for name, weight in own.named_parameters():
        weight.data = torch.full_like(weight, gate) if name == "gate" else head.get_parameter(name).data.clone()
    save_draft(own, directory)
    return directory


def decoded(target: Path, draft: Path | None, algorithm: str, steps: int | None = 3) -> tuple[list[list[int]], float]:
    options = SessionOptions(
        target, draft=draft, algorithm=algorithm, steps=steps, dtype="float64", device="cpu", debug=True, threads=1
    )
    session = DecodeSession.open(options)
    texts = [session.tokenizer.encode(text) for text in ("def add(a, b):", "for i in range", "x")]
    outputs = session.run([Request(str(i), Prompt.of_tokens(text), 24) for i, text in enumerate(texts)])
    return [list(map(int, outputs[str(i)].tokens)) for i in range(len(texts))], session.stats().accept_length


def test_its_network_drafts_and_changes_no_token(gated, files, tmp_path):
    """An open gate is EAGLE itself; a closed one drafts from other numbers."""
    target, eagle = files
    plain, _ = decoded(target, None, "NONE", None)
    open_gate = decoded(target, write_gated(gated, files, tmp_path / "open", 50.0), "GATED")
    closed = decoded(target, write_gated(gated, files, tmp_path / "closed", -50.0), "GATED")
    assert open_gate == decoded(target, eagle, EAGLE)
    assert open_gate[0] == closed[0] == plain


def test_a_checkpoint_without_its_tensor_is_refused_by_name(gated, files):
    with pytest.raises(CheckpointError, match=r"gate\.weight: is missing"):
        decoded(files[0], files[1], "GATED")


def test_its_class_reads_keys_of_its_own(files, tmp_path):
    class Keyed(EagleHead):
        def __init__(self, config: HeadConfig, target, **parts) -> None:
            super().__init__(config, target, **parts)
            self.strength = config.settings["strength"]

    config = files[1] / "config.json"
    (tmp_path / "config.json").write_text(config.read_text("utf-8").replace("{", '{"strength": 7,', 1), "utf-8")
    for tensors in files[1].glob("*.safetensors"):
        (tmp_path / tensors.name).symlink_to(tensors)
    head = load_draft(tmp_path, EAGLE, load_target(files[0], ops_for("cpu")), Keyed)
    assert isinstance(head, Keyed) and head.strength == 7


def test_a_benchmark_takes_it_with_random_weights(gated, files):
    shape = str(files[0] / "config.json")
    plan = plan_bench(
        BenchOptions(random_weights=shape, algorithm="GATED", steps="2", context_lengths="64", device="cpu")
    )
    _, head = meta_models(plan.target, plan.draft, plan.dtype)
    assert isinstance(head, gated)


class Unfinished(DraftHead):
    """Has no `forward`."""


def fails() -> type:
    raise ImportError("no such package")


@pytest.mark.parametrize(
    ("base", "answer", "message"),
    [
        (Eagle, lambda: torch.nn.Linear, "gave .*Linear.*, expected a subclass of DraftHead"),
        (Eagle, lambda: 3, "gave 3, expected a subclass of DraftHead"),
        (Eagle, lambda: Unfinished, "gave .*Unfinished.*, which lacks forward"),
        (Eagle, fails, "raised ImportError: no such package"),
    ],
)
def test_what_is_no_network_is_refused(base, answer, message, files):
    register_algorithm("BROKEN")(type("Broken", (base,), {"draft_network": lambda self: answer()}))
    with pytest.raises(PluginError, match=rf"BROKEN\.draft_network {message}"):
        decoded(files[0], files[1], "BROKEN")
