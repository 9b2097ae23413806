"""The suite of the engine contract."""

from dataclasses import replace

from ..harness.suite import Suite
from . import operations as ops
from .contract import EngineCapabilities, ServingConfig
from .trial import EngineTrial
from .vocabulary import draw_config, simpler_configs, vocabulary


def twin_config(kind: str, config: ServingConfig) -> ServingConfig | None:
    """The other configuration of an invariant over two runs; None if this one has none."""
    # A twin has none of the optional features, so that whatever they change shows, and against a plain run.
    bare = {"block_rounds": 1, "prefix_cache": False}
    match kind:
        case "with the other pipeline depth":
            # Two steps in flight reserve twice as much, and one request must fit.
            more = -(-config.round_slots // config.page_size)
            return replace(config, **bare, overlap=not config.overlap, num_pages=config.num_pages + more)
        case "without the prefix cache":
            return replace(config, **bare) if config.prefix_cache else None
        case "round by round":
            return replace(config, **bare) if config.block_rounds > 1 else None
        case "one at a time, in a large pool":
            slots = max(4 * config.num_slots, config.page_size + 1)
            alone = {"max_running": 1, "page_size": 1, "num_pages": slots, "chunk_size": config.context_len}
            return replace(config, **bare, **alone, step_tokens=0, preempt=False, mixed=False)
        case "with another model":
            # With a cache, which texts are equal decides what is shared: there the tokens do matter.
            return None if config.prefix_cache else replace(config, model=config.model + 1)
        case "without speculation":
            return replace(config, algorithm="none") if config.candidates == (0,) and _is_plain(config) else None
    raise AssertionError(f"nobody knows a twin {kind}")


def _is_plain(config: ServingConfig) -> bool:
    # A cache whose keys look one token ahead caches one position less.
    return config.algorithm == "draft" or (config.algorithm == "head" and not config.prefix_cache)


SUITE = Suite(
    name="engine",
    config=ServingConfig,
    capabilities=EngineCapabilities,
    operations=ops.OPERATIONS,
    trial=EngineTrial,
    draw_config=draw_config,
    vocabulary=vocabulary,
    subjects=("foretoken.checks.adapters.core_engine:make", "foretoken.properties.engine.plain:make"),
    quick=80_000,
    simpler_configs=simpler_configs,
    twin_config=twin_config,
    run_length=100,
    limit_s=10.0,
    probes={
        "ENGINE-08": (ops.SubmitImpossible,),
        "ENGINE-12": (ops.SubmitAgain,),
        "RELAY-07": (ops.CommitAgain, ops.CommitEarly),
    },
)
