"""What the command of a server has behind the model and the devices, and what servers of all kinds have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....core.adaptive.config import AdaptiveConfig, load_adaptive_config
from ....core.errors import ForedraftError
from ....sim.assembly import Assembly
from ....sim.scenario import Scenario
from ...grid import NO_SPECULATION
from ..declared import values_to_write, words_of
from ..files import METHODS
from ..own_layers import WITH_DRAFT, WITH_OWN_LAYERS, own_layers

TABLES = ("model", "hardware", "engine", "front_end")
HF_CONFIG = "config.json of "


@dataclass
class Arguments:
    """The arguments of a command.

    Attributes:
        words: Those of every server.
        of_role: Further ones of the servers that prefill and of those that decode, by role; empty where they start
            alike.
        files: The texts of the files that the words name, by name.
        environment: The variables that the command needs.
        notes: What is to be added or to be known.
    """

    words: list[str] = field(default_factory=list)
    of_role: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def give_keys(self, scenario: Scenario, server: str, computed: Mapping[str, Any]) -> None:
        """Add the arguments that are written as their keys declare. `computed`: of other keys, what follows from the
        whole run."""
        values, notes = values_to_write(scenario, server, *TABLES, computed=computed)
        self.words += words_of(values)
        self.notes += notes

    def pages_of(self, run: Assembly, name: str, usual: int) -> int | None:
        """Return the tokens of a KV page for servers that have no pages of one token; None, with a note, for their
        own."""
        size = run.scenario.engine.page_size
        if size > 1:
            return size
        text = f"{name} is left to the server ({usual}), and KV was counted by single tokens (engine.page_size = 1)"
        self.notes.append(f"{text}: set engine.page_size = {usual} to plan with its pages")
        return None

    def note_weights(self, run: Assembly, *formats: str) -> None:
        """Note that the checkpoint has to have the scenario's format of weights, if the server does not make it.
        formats: those that it makes."""
        given = run.scenario.model.weight_dtype
        if given not in (None, *formats):
            self.notes.append(f"take a checkpoint of {model_name(run)} whose weights are {given}")

    def note_rule(self, run: Assembly) -> None:
        """Note that the server has no argument for the rule by which drafts stay."""
        rule = run.scenario.speculation.accept_rule
        self.notes.append(f"speculation.accept_rule is {rule}, for which the server has no argument")

    def note_head(self, run: Assembly, where: str) -> None:
        """Note that the path of a draft is missing, if the scenario has none and the model has no layers to draft
        with."""
        algorithm = run.scenario.speculation.algorithm
        is_named = run.scenario.model.draft is not None
        if (
            not is_named
            and algorithm in WITH_DRAFT
            and (algorithm not in WITH_OWN_LAYERS or not own_layers(model_name(run)))
        ):
            self.notes.append(f"add the path of the {algorithm} draft as {where}")


def model_name(run: Assembly) -> str:
    """Return the model as a server takes it: the checkpoint of a built-in name, else the name that was given."""
    target, source = run.scenario.model.target, run.target.source
    is_name = "/" not in target and source.startswith(HF_CONFIG)
    return source.removeprefix(HF_CONFIG).partition(" ")[0].rstrip(",;") if is_name else target


def step_tokens(scenario: Scenario) -> int | None:
    """Return the most tokens of a step, for servers whose chunks and verified tokens share one limit."""
    return scenario.engine.max_step_tokens or scenario.engine.chunk_size


def method_of(run: Assembly, server: str, *, trees: bool = False, choices: bool = False) -> str | None:
    """Return the server's name of the scenario's algorithm; None without speculation.

    server: "SGLang", "vLLM" or "TensorRT-LLM". trees, choices: it takes draft trees, and several numbers of steps for a
    batch size. Raises ForedraftError for speculation that the server has no arguments for.
    """
    table, slots = run.scenario.speculation, run.spec.adaptive.slots
    if table.algorithm == NO_SPECULATION:
        return None
    names = dict(zip(("SGLang", "vLLM", "TensorRT-LLM"), METHODS.get(table.algorithm, ("", "", "")), strict=True))
    if table.algorithm == "EAGLE" and own_layers(model_name(run)):
        names = {"SGLang": "EAGLE", "vLLM": "mtp", "TensorRT-LLM": "MTP"}
    reason = None
    if not names[server]:
        reason = f"it has no {table.algorithm}"
    elif run.spec.topk > 1 and not trees:
        reason = f"the configuration has trees (top-{run.spec.topk}), and it drafts chains"
    elif table.policy == "goodput":
        reason = "it has no policy goodput: tune a table of steps, or plan with --try speculation.steps=0..7"
    elif table.policy == "confidence" and not (server == "vLLM" or (server == "SGLang" and names[server] == "DSPARK")):
        reason = "only vLLM verifies by confidences, and SGLang those of DSPARK"
    elif table.policy == "confidence" and len(run.spec.adaptive.candidate_steps) > 1:
        reason = "it verifies by confidences with one number of draft steps: give speculation.steps"
    elif not choices and any(len(slot.candidate_steps) > 1 for slot in slots):
        reason = "it takes one number of draft steps for each batch size: `foredraft tune` finds such a schedule"
    if reason is not None:
        raise ForedraftError(f"{server} has no arguments for this configuration: {reason}")
    return names[server]


def table_of(run: Assembly) -> AdaptiveConfig:
    """Return the scenario's table of steps, without what a run adds to it."""
    given = run.scenario.speculation.adaptive
    return load_adaptive_config(given if given is not None else "default")
