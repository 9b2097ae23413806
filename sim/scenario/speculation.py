"""The tables of a scenario about drafts: `[speculation]` and `[acceptance]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.acceptance.block import REJECTED_RATIO
from ...core.adaptive.interchange import TRTLLM_SCHEDULE, VLLM_SCHEDULE, table_schema
from . import conditions as when
from .flags import sglang, trtllm, vllm
from .refusals import (
    acceptance_is_given,
    budgets_are_of_the_head,
    chains_alone_are_drawn,
    rule_does_not_follow,
    too_deep_for_trees,
)
from .table import Count, NoEffect, RefusedIf, ScenarioTable, Share

Rule = Literal["target", "rejection", "block"]


class Speculation(ScenarioTable):
    algorithm: Annotated[
        str,
        sglang("speculative-algorithm N", "enable-multi-layer-eagle", by="speculation"),
        vllm("speculative-config|sc.method N", "spec-method N", by="speculation"),
        trtllm("speculative-config.decoding_type N", by="speculation"),
    ] = Field(
        default="EAGLE3",
        description="NONE, STANDALONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, NGRAM, P_EAGLE, PARD, DFLASH, DFLASH2, DSPARK, "
        "SUFFIX, HYBRID, or a plugin",
    )
    policy: Annotated[
        Literal["fixed", "ema", "goodput", "confidence"],
        NoEffect(when.not_speculative, says="fixed"),
        NoEffect(when.nothing_to_choose),
        sglang("speculative-adaptive", by="speculation"),
    ] = Field(
        default="ema",
        description="rule that chooses the number of draft steps; confidence also chooses how many drafts of each row "
        "are verified (chains that a model drafts)",
    )
    steps: Annotated[
        Annotated[int, Field(ge=0)] | None,
        NoEffect(when.not_speculative, says=0),
        sglang(
            "speculative-num-steps N",
            "speculative-dflash-block-size N",
            "speculative-dspark-block-size N",
            by="speculation",
        ),
        vllm("speculative-config.num_speculative_tokens N", "spec-tokens N", by="speculation"),
        trtllm("speculative-config.max_draft_len N", "speculative-config.num_nextn_predict_layers N", by="speculation"),
    ] = Field(
        default=None,
        description="fixed: draft steps; ema, goodput: the first steps; confidence: the steps of every round",
    )
    topk: Annotated[
        Count,
        NoEffect(when.not_speculative, says=1),
        NoEffect(when.zero_steps, says=1),
        sglang("speculative-eagle-topk N", "speculative-ngram-max-bfs-breadth N", by="speculation"),
    ] = Field(default=1, description="branches per draft step; 1 is a chain")
    num_draft_tokens: Annotated[
        Annotated[int, Field(ge=1)] | dict[str, int] | None,
        NoEffect(when.not_speculative),
        NoEffect(when.zero_steps, says=1),
        sglang("speculative-num-draft-tokens N", by="speculation"),
    ] = Field(
        default=None,
        description="nodes of a verify tree, root included: one number, or a table by steps such as {1 = 5, 3 = 16}; "
        "default: as many as the steps can fill, up to 16",
    )
    adaptive: Annotated[
        str | dict[str, Any] | None,
        NoEffect(when.not_speculative),
        NoEffect(when.policy_is_fixed),
        RefusedIf(too_deep_for_trees, "spec"),
        sglang("speculative-adaptive-config N", by="speculation"),
        vllm(f"speculative-config.{VLLM_SCHEDULE} N", by="speculation"),
        trtllm(f"speculative-config.{TRTLLM_SCHEDULE} N", "speculative-config.max_concurrency N", by="speculation"),
    ] = Field(
        default=None,
        description="ema, goodput and confidence: the table of steps, as a preset (default, with-zero, zero-to-seven), a JSON "
        "file, or the table itself; default: the preset default for ema, else zero-to-seven (confidence: unless there are steps)",
        json_schema_extra=lambda schema: schema.update(anyOf=[{"type": "string"}, table_schema(), {"type": "null"}]),
    )
    probe_backoff: Annotated[bool | None, NoEffect(when.policy_is_not_ema)] = Field(
        default=None,
        description="ema: whether each failed try of drafts after 0 steps doubles the wait for the next, up to 32 "
        "decisions; false: every decision tries (SGLang); for tables that do not say; default: as in the server",
    )
    round_times: Annotated[
        str | dict[str, Any] | None,
        NoEffect(when.not_speculative),
        NoEffect(when.policy_is_not_confidence),
        NoEffect(when.zero_steps),
        sglang("speculative-dspark-sps-table-path N", by="speculation"),
    ] = Field(
        default=None,
        description="confidence with steps: the times of rounds by which drafts are chosen, as SGLang's file of steps per "
        "second or of a sum of two functions, or what is in it; the device keeps its own times; default: the simulator's",
    )
    confidence_temperatures: Annotated[
        str | dict[str, Any] | None,
        NoEffect(when.not_speculative),
        NoEffect(when.policy_is_not_confidence),
        NoEffect(when.zero_steps),
        sglang("speculative-dspark-confidence-sts-path N", by="speculation"),
    ] = Field(
        default=None,
        description="confidence: temperatures of the drafts' confidences by position, as SGLang's file, or what is in it; "
        "default: slope and biases are learned",
    )
    verify: Annotated[
        Literal["all", "remaining"],
        NoEffect(when.not_speculative, says="all"),
        NoEffect(when.zero_steps, says="all"),
        NoEffect(when.only_chains_are_shortened, says="all"),
        NoEffect(when.rounds_were_measured, says="all"),
    ] = Field(
        default="all",
        description="nodes that a row verifies: all of the round, or no more than tokens it may still emit (chains)",
    )
    accept_rule: Annotated[
        Rule,
        NoEffect(when.not_speculative, says="target"),
        NoEffect(when.zero_steps, says="target"),
        NoEffect(when.look_ups_are_not_drawn, says="target"),
        RefusedIf(chains_alone_are_drawn, "spec"),
        sglang("speculative-use-rejection-sampling", "speculative-use-block-verification", by="speculation"),
        vllm(
            "speculative-config.draft_sample_method N",
            "speculative-config.rejection_sample_method N",
            by="speculation",
        ),
    ] = Field(
        default="target",
        description="rule by which drafts of requests that sample stay (docs/frontier.md); without acceptance.of_rule "
        "the acceptance is taken to be that of this rule",
    )
    heads: Annotated[Count | None, NoEffect(when.not_speculative), NoEffect(when.no_heads)] = Field(
        default=None, description="MULTI_LAYER_EAGLE: heads of the draft; default: the greatest candidate"
    )


class Regimes(ScenarioTable):
    stretch_len: Count = Field(default=64, description="output tokens of a stretch; each stretch draws a level")
    shifts: list[float] = Field(default=[0.0], description="the levels, in standard deviations of quality")
    weights: list[Annotated[float, Field(ge=0)]] = Field(
        default=[1.0], description="weight with which each level is drawn"
    )


class Acceptance(ScenarioTable):
    preset: Annotated[str | None, RefusedIf(acceptance_is_given)] = Field(
        default=None, description="kind of text (chat, code, math, edit) or preset; default: chat (NGRAM: code)"
    )
    conditional: Annotated[list[Share] | None, RefusedIf(acceptance_is_given)] = Field(
        default=None, description="acceptance of draft position 1, 2, … if all earlier ones are accepted"
    )
    mean_length: Annotated[
        Annotated[float, Field(ge=1)] | None,
        RefusedIf(acceptance_is_given),
        NoEffect(when.rounds_are_too_short, outcome="is not reached"),
    ] = Field(
        default=None,
        description="mean accept length, bonus included, of rounds with the most steps; the preset gives the rest",
    )
    recorded: Annotated[str | None, RefusedIf(acceptance_is_given)] = Field(
        default=None, description="file of recorded longest runs per output position (CSV or JSONL)"
    )
    request_share: Annotated[Share | None, NoEffect(when.recording_decides)] = Field(
        default=None, description="variance between requests, as a share; default: the preset's"
    )
    field_share: Annotated[Share | None, NoEffect(when.recording_decides)] = Field(
        default=None, description="variance that neighbouring positions share, as a share; default: the preset's"
    )
    correlation_len: Annotated[Count | None, NoEffect(when.recording_decides)] = Field(
        default=None, description="tokens over which rounds correlate; default: the preset's"
    )
    of_rule: Annotated[Rule | None, RefusedIf(rule_does_not_follow), NoEffect(when.look_ups_are_not_drawn)] = Field(
        default=None,
        description="rule by which drafts stayed where the acceptance was measured; rejection says what block would "
        "keep; default: speculation.accept_rule",
    )
    rejected_ratio: Annotated[
        Annotated[float, Field(ge=0, lt=1)],
        NoEffect(when.look_ups_are_not_drawn),
        NoEffect(when.acceptance_is_of_the_rule),
    ] = Field(
        default=REJECTED_RATIO,
        description="block from rejection: how likely the target finds a draft that rejection may drop, over how "
        "likely the draft finds it (an assumption); 0: block keeps no more",
    )
    look_up_share: Annotated[
        Share, NoEffect(when.look_ups_are_alone_or_none, says=0.0), RefusedIf(budgets_are_of_the_head)
    ] = Field(
        default=0.0,
        description="HYBRID: share of the rows that draft by look-up in a round; the head rests where all do; 0: all "
        "rows draft by the head",
    )
    look_up_conditional: Annotated[
        Annotated[list[Share], Field(min_length=1)] | None,
        NoEffect(when.look_ups_are_alone_or_none),
        NoEffect(when.nothing_is_looked_up),
        NoEffect(when.recording_decides),
    ] = Field(
        default=None,
        description="HYBRID: as conditional, of drafts by look-up; default: the preset ngram-edit (an assumption)",
    )
    rank_ratio: Annotated[Share, NoEffect(when.ranks_are_unused)] = Field(
        default=0.6, description="trees: how slowly acceptance falls with rank (an assumption); 0: only rank 1 counts"
    )
    drift_per_1k_tokens: Annotated[float, NoEffect(when.recording_decides)] = Field(
        default=0.0, description="gain of quality per 1000 output tokens, in standard deviations"
    )
    day_amplitude: Annotated[float, NoEffect(when.recording_decides)] = Field(
        default=0.0, description="daily sine wave of quality, in standard deviations"
    )
    regimes: Annotated[Regimes | None, NoEffect(when.recording_decides)] = Field(
        default=None, description="levels of quality that alternate along a request's output"
    )
