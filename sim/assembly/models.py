"""The models of a scenario: its target, and the draft that its algorithm needs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.errors import ConfigError
from ...core.model_shape import (
    ModelShape,
    UnknownModel,
    brings_block_drafter,
    built_in_config,
    family_of_type,
    known_models,
    language_model,
    lookup_model,
    modelopt_config,
    prediction_layers,
    read_block_head,
    read_head,
    read_model_shape,
    read_own_block,
)
from ...core.model_shape.block_heads import USUAL_PARTS
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from ..cost.draft import (
    EAGLE,
    MULTI_LAYER_EAGLE,
    P_EAGLE,
    DraftShape,
    block_drafter,
    eagle3_head,
    eagle_head,
    host_draft,
    multi_layer_eagle,
    own_block_drafter,
    own_head,
    own_layer,
    parallel_eagle,
    standalone,
)
from ..cost.measured.database import shape_of_text
from ..cost.measured.model_files import find_model_files
from ..scenario import Scenario
from ..scenario_file import SCENARIO


def model_shape(name: str, key: str) -> ModelShape:
    """Return a model by its name, built in or known elsewhere, or by the path of its configuration
    (`sim/cost/measured/model_files.py`). Raises a ForedraftError; `key` is the scenario's key in it."""
    try:
        found = _config(name)
        if found is None:
            return lookup_model(name)
        config, source, shown = found
        return shape_of_text(json.dumps(config), source, shown)
    except UnknownModel as error:
        raise ConfigError.of(SCENARIO, key, str(error)) from None


def _config(name: str) -> tuple[dict[str, Any], str, str] | None:
    """Return the configuration of a model that has a file, the path of that file, and what reports call the model; None
    for a built-in model, and for an unknown one."""
    files = find_model_files(name)
    if files is None:
        return None
    config = read_json_object(str(files.config), read_text, of_checkpoint=True)
    if config.get("quantization_config") is None and files.quantization.is_file():
        source = str(files.quantization)
        config["quantization_config"] = modelopt_config(read_json_object(source, read_text, of_checkpoint=True), source)
    return config | dict(files.differs), str(files.config), files.name


def draft_shape(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, max_steps: int) -> DraftShape | None:
    """Return the draft of `algorithm` for rounds of up to `max_steps`; None if it drafts nothing.

    Raises ConfigError if the scenario has to name a draft model.
    """
    match algorithm.drafter:
        case Drafter.NONE:
            return None
        case Drafter.MODEL:
            given = scenario.model.draft
            draft = _usual_draft(target) if given is None else model_shape(given, "model.draft")
            return standalone(draft, target, algorithm.draft_form)
        case Drafter.LOOKUP:
            return host_draft(algorithm.name, algorithm.draft_time_share)
        case Drafter.HEAD | Drafter.HEADS | Drafter.BLOCK:
            head = _head(scenario, algorithm, target, max_steps)
            if not algorithm.has_look_ups:
                return head
            share = scenario.acceptance.look_up_share
            return replace(head, verify_share=algorithm.draft_time_share, look_up_share=share)


def _head(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, max_steps: int) -> DraftShape:
    """Return the head that the scenario names, if its configuration is known, or else one of the target's sizes."""
    given, heads = scenario.model.draft, scenario.speculation.heads or max(max_steps, 1)
    form = MULTI_LAYER_EAGLE if algorithm.drafter is Drafter.HEADS else algorithm.draft_form
    found = None if given is None else _head_config(given)
    if (
        form in (EAGLE, MULTI_LAYER_EAGLE)
        and prediction_layers(target)
        and (found is None or _is_own_layer(*found, target))
    ):
        return replace(
            own_layer(target, form, heads if form == MULTI_LAYER_EAGLE else 1), unknown=None if found else given
        )
    is_target = given in (None, scenario.model.target) or (found is not None and brings_block_drafter(found[0]))
    if form == "DSPARK" and is_target and (own := read_own_block(target)) is not None:
        return own_block_drafter(*own, target, form)
    if found is not None and form in USUAL_PARTS:
        return own_block_drafter(*read_block_head(*found, target, form), target, form)
    if found is not None:
        head = read_head(*found, target, form, is_single=algorithm.drafter is Drafter.HEAD)
        return own_head(head, target, form, scenario.speculation.heads or heads)
    if form in USUAL_PARTS:
        usual = block_drafter(target, form)
    elif form == P_EAGLE:
        usual = parallel_eagle(target, scenario.model.draft_vocab)
    elif form == MULTI_LAYER_EAGLE:
        usual = multi_layer_eagle(target, heads)
    else:
        usual = eagle_head(target) if form == EAGLE else eagle3_head(target, scenario.model.draft_vocab)
    return replace(usual, unknown=given)


def _is_own_layer(config: dict[str, Any], source: str, name: str, target: ModelShape) -> bool:
    """Return whether a draft's configuration is that of a model with such layers, as checkpoints of the layer alone
    have it. Raises ConfigError for those of another model than the target."""
    if family_of_type(language_model(config, source).get("model_type")) != target.family:
        return False
    draft = read_model_shape(config, source, name, is_whole=False)
    if not prediction_layers(draft):
        return False
    for key, own, expected in (("hidden_size", draft.hidden, target.hidden), ("vocab_size", draft.vocab, target.vocab)):
        if own != expected:
            message = f"is {own}, that of {target.name} is {expected}: a prediction layer drafts for its own model"
            raise ConfigError.of(source, key, message)
    return True


def _head_config(name: str) -> tuple[dict[str, Any], str, str] | None:
    """Return what `_config` does, also for a built-in model, and None for a draft whose file is not here."""
    found = _config(name)
    if found is None and (built_in := built_in_config(name)) is not None:
        found = dict(built_in[1]), f"config.json of {built_in[1]['_name_or_path']}", built_in[0]
    return found


def _usual_draft(target: ModelShape) -> ModelShape:
    """Return the smallest built-in model with the target's vocabulary.
    Raises ConfigError if none is smaller than the target."""
    built_in = map(lookup_model, known_models())
    fitting = [model for model in built_in if model.vocab == target.vocab and model.parameters < target.parameters]
    if not fitting:
        message = (
            f"is not given, and no built-in model smaller than {target.name} has its vocabulary of {target.vocab} tokens; "
            "give the config.json of one that has"
        )
        raise ConfigError.of(SCENARIO, "model.draft", message)
    return min(fitting, key=lambda model: model.parameters)
