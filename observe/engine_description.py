"""All that makes an engine decide as it does, as plain data: who writes a log puts it into the header, who replays builds an equal engine.

Not a tokenizer: where text ended a request, the log's results say at which token (see `encoding`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..core.adaptive import AdaptiveConfig, AdaptiveController, CostTable, SlotConfig, build_controller
from ..core.adaptive.config import load_adaptive_config
from ..core.algorithm.algorithm import Drafter, SpecAlgorithm
from ..core.algorithm.registry import get_algorithm
from ..core.contract.events import EventSink
from ..core.contract.request import TextDecoder
from ..core.errors import ConfigError, ForetokenError, Problem, nearest
from ..core.scheduler.config import EngineConfig
from ..core.scheduler.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The arguments of an engine and of its controller. `adaptive` of a fixed policy has one candidate."""

    config: EngineConfig
    algorithm: str
    policy: str
    adaptive: AdaptiveConfig
    initial_steps: int | None = None
    topk: int = 1
    num_draft_tokens: int | None = None  # of trees; None: chains
    cost_table: CostTable | None = None  # of the goodput policy
    graph_sizes: tuple[int, ...] | None = None  # captured batch sizes, which the controller routes by; None: no graphs
    decodes_text: bool = False  # the engine had a tokenizer, so it takes requests with stop strings

    def make_algorithm(self) -> SpecAlgorithm:
        return get_algorithm(self.algorithm)

    def make_controller(self) -> AdaptiveController:
        """Return a fresh controller. Raises ConfigError or another ForetokenError for what cannot be."""
        controller = build_controller(
            self.policy,
            self.adaptive,
            initial_steps=self.initial_steps,
            cost_table=self.cost_table,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
            depth_limited=self.make_algorithm().drafter is not Drafter.LOOKUP,
        )
        controller.init_states(self.graph_sizes)
        return controller

    def make_engine(
        self,
        events: EventSink | None = None,
        text_decoder: TextDecoder | None = None,
    ) -> Engine:
        """A fresh engine. Without a `text_decoder` one that was described as decoding text takes the log's word for it."""
        if text_decoder is None and self.decodes_text:
            text_decoder = TextUnseen()
        controller = self.make_controller()
        return Engine(self.config, self.make_algorithm(), controller, events=events, text_decoder=text_decoder)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        slots = zip(self.adaptive.bounds, self.adaptive.slots, strict=True)
        return {
            "config": self.config.to_json(),
            "algorithm": self.algorithm,
            "policy": self.policy,
            "adaptive": {str(bound): _plain(asdict(slot)) for bound, slot in slots},
            "initial_steps": self.initial_steps,
            "topk": self.topk,
            "num_draft_tokens": self.num_draft_tokens,
            "cost_table": None if self.cost_table is None else json.loads(self.cost_table.to_json()),
            "graph_sizes": None if self.graph_sizes is None else list(self.graph_sizes),
            "decodes_text": self.decodes_text,
        }

    @classmethod
    def from_json(cls, value: Any, source: str) -> EngineDescription:
        """What `to_json` wrote. ConfigError with `source` and what does not fit."""
        known = tuple(field.name for field in fields(cls))
        _check_keys(value, known, "engine", source)
        config = value["config"]
        _check_keys(config, tuple(field.name for field in fields(EngineConfig)), "engine.config", source)
        try:
            table = value["cost_table"]
            sizes = value["graph_sizes"]
            described = cls(
                EngineConfig(**config),
                value["algorithm"],
                value["policy"],
                load_adaptive_config(value["adaptive"], source),
                value["initial_steps"],
                value["topk"],
                value["num_draft_tokens"],
                None if table is None else CostTable.from_json(json.dumps(table), source),
                None if sizes is None else tuple(sizes),
                bool(value["decodes_text"]),
            )
            described.make_engine()  # whatever contradicts itself is found now
        except ForetokenError as error:
            raise ConfigError(source, [Problem("engine", str(error))]) from error
        except (TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError(source, [Problem("engine", f"describes no engine: {error}")]) from error
        return described


class TextUnseen:
    """A text decoder for engines whose results say where text ended a request: it never finds anything itself."""

    def decode(self, tokens: object) -> str:
        return ""


def _plain(slot: Mapping[str, Any]) -> dict[str, Any]:
    assert slot.keys() == {field.name for field in fields(SlotConfig)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in slot.items()}


def _check_keys(value: Any, known: tuple[str, ...], key: str, source: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(source, [Problem(key, f"is {value!r}; expected an object")])
    problems = [
        Problem(f"{key}.{name}", f"is not known{nearest(str(name), known)}") for name in value if name not in known
    ]
    problems += [Problem(f"{key}.{name}", "is missing") for name in known if name not in value]
    if problems:
        raise ConfigError(source, problems)
