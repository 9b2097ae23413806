"""The models of a scenario: its target, and the draft that its algorithm needs."""

from __future__ import annotations

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.errors import ConfigError, ForedraftError
from ...core.model_shape import ModelShape, known_models, lookup_model, modelopt_config, read_model_shape
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from ..cost.draft import EAGLE, DraftShape, eagle3_head, eagle_head, host_draft, multi_layer_eagle, standalone
from ..cost.measured.model_files import find_model_files
from ..scenario import Scenario
from ..scenario_file import SCENARIO


def model_shape(name: str, key: str) -> ModelShape:
    """Return a model by its name, built in or known elsewhere, or by the path of its configuration
    (`sim/cost/measured/model_files.py`). Raises a ForedraftError; `key` is the scenario's key in it."""
    files = find_model_files(name)
    if files is None:
        try:
            return lookup_model(name)
        except ForedraftError as error:
            raise ConfigError.of(SCENARIO, key, str(error)) from None
    config = read_json_object(str(files.config), read_text, of_checkpoint=True)
    if config.get("quantization_config") is None and files.quantization.is_file():
        source = str(files.quantization)
        config["quantization_config"] = modelopt_config(read_json_object(source, read_text, of_checkpoint=True), source)
    return read_model_shape(config | dict(files.differs), str(files.config), files.name)


def draft_shape(scenario: Scenario, algorithm: SpecAlgorithm, target: ModelShape, max_steps: int) -> DraftShape | None:
    """Return the draft of `algorithm` for rounds of up to `max_steps`; None if it drafts nothing.

    Raises ConfigError if the scenario has to name a draft model.
    """
    match algorithm.drafter:
        case Drafter.NONE:
            return None
        case Drafter.MODEL:
            given = scenario.model.draft
            return standalone(_usual_draft(target) if given is None else model_shape(given, "model.draft"), target)
        case Drafter.HEADS:
            return multi_layer_eagle(target, scenario.speculation.heads or max(max_steps, 1))
        case Drafter.LOOKUP:
            return host_draft(algorithm.name, algorithm.draft_time_share)
        case Drafter.HEAD:
            return (
                eagle_head(target) if algorithm.draft_form == EAGLE else eagle3_head(target, scenario.model.draft_vocab)
            )


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
