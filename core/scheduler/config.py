"""The settings that an engine gets at its start, and the sizes and the KV store that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

from ..adaptive import AdaptiveController
from ..algorithm.algorithm import DraftKV, SpecAlgorithm
from ..contract.step import PLAIN_ROUND, RoundShape
from ..errors import ConfigError, Problem, nearest
from ..kv.counting import CountingStore
from ..kv.groups import GroupSizes, KVGroup, StoreSizes
from ..kv.host_tier import HostTier
from ..kv.radix import RadixCache
from ..kv.request_table import ceil_to_page, get_alloc_len_per_decode, request_table_width, reserve_per_decode
from ..kv.store import KVStore
from .rules import OurRules, ServerRules, rules_to_json

VERIFY_ALL, VERIFY_REMAINING = "all", "remaining"
VERIFY_LENGTHS = (VERIFY_ALL, VERIFY_REMAINING)
"""Rows verify all nodes of the round's shape, or no more than tokens they may still emit."""


class EngineRole(StrEnum):
    """The part of a request that an engine computes: all of it, only its prompt, or everything but its prompt."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts; their KV and first tokens go to a decode worker
    DECODE = "decode"  # requests arrive with their prompt's KV; only retracted requests are computed again here


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. Sizes are in tokens (= KV slots) unless they say otherwise."""

    num_pages: int  # KV pages, the padding page not counted
    context_len: int  # positions that the model can see
    page_size: int = 1
    overlap: bool = True  # pipeline depth 2, else 1
    mode_reason: str = ""  # the reason, as `choose_mode` gives it
    max_running: int = 256  # requests in a batch
    max_queue: int | None = None  # waiting requests; None: no bound
    chunk_size: int = 8192  # prefill tokens of one step
    max_step_tokens: int | None = None  # prefill and verify tokens of one step; None: no bound beside chunk_size
    mixed: bool = True  # prefill chunks and decode rounds in one step; else prefill goes first, alone
    prefix_cache: bool = True
    host_pages: int = 0  # pages of host memory behind the prefix cache; the executor must copy them (`Join.num_loaded`)
    eviction_policy: str = "lru"
    rules: ServerRules = field(default_factory=OurRules)  # those in which servers differ
    multi_step_rounds: int = 32  # most rounds of one step; 1: single rounds
    preempt: bool = False  # retract a strictly lower priority to let a greater one in
    ageing_bound: int = 256  # how often a request may be overtaken by later ones of greater priority
    groups: tuple[KVGroup, ...] = ()  # layers that keep less of a request than all its tokens
    verify: str = VERIFY_ALL  # how many nodes of its chain each row verifies: one of VERIFY_LENGTHS
    track_tokens: bool = False  # keep the executor's tokens for the output, retraction and the prefix cache
    role: EngineRole = EngineRole.BOTH  # the role at the start; an empty engine may change it

    def __post_init__(self) -> None:
        # A configuration that was read from a file has the role's name; `problems` reports an unknown one.
        if not isinstance(self.role, EngineRole) and self.role in list(EngineRole):
            object.__setattr__(self, "role", EngineRole(self.role))

    @property
    def num_rows(self) -> int:
        """Rows of the request table."""
        return self.rules.num_rows(self.max_running)

    @property
    def mode(self) -> str:
        return "overlap" if self.overlap else "synchronous"

    @property
    def group_sizes(self) -> GroupSizes:
        """What a request takes beside the slots of its tokens."""
        return GroupSizes(self.groups, self.page_size)

    @property
    def chunk_ahead(self) -> int:
        """The prompt tokens behind the committed ones for which a row has slots: those of launched chunks."""
        return self.chunk_size * self.rules.chunks_ahead(self.overlap)

    def num_fitting(self, length: float) -> int:
        """Return how many requests of `length` tokens the pool holds at once."""
        return int(self.group_sizes.most_of(self.num_pages * self.page_size, length))

    def problems(self) -> list[Problem]:
        """Return the problems of each value by itself."""
        problems = []
        least = {
            "num_pages": 1,
            "context_len": 2,
            "page_size": 1,
            "max_running": 1,
            "chunk_size": 1,
            "multi_step_rounds": 1,
            "ageing_bound": 1,
        }
        for key, minimum in least.items():
            if getattr(self, key) < minimum:
                problems.append(Problem(key, f"must be at least {minimum}, got {getattr(self, key)}"))
        if self.max_queue is not None and self.max_queue < 1:
            problems.append(Problem("max_queue", f"must be at least 1 (or absent: no bound), got {self.max_queue}"))
        if not isinstance(self.role, EngineRole):
            problems.append(Problem("role", f"{self.role!r} is none of {', '.join(EngineRole)}"))
        for i, group in enumerate(self.groups):
            problems += group.problems(f"groups[{i}]")
        if self.verify not in VERIFY_LENGTHS:
            problems.append(Problem("verify", f"{self.verify!r} is none of {', '.join(VERIFY_LENGTHS)}"))
        if self.host_pages < 0:
            problems.append(Problem("host_pages", f"must be at least 0, got {self.host_pages}"))
        if self.host_pages and not self.prefix_cache:
            problems.append(Problem("host_pages", "is host memory behind the prefix cache, and prefix_cache is false"))
        if self.host_pages and self.role is not EngineRole.BOTH:
            problems.append(Problem("host_pages", "is for engines that do not hand requests over"))
        return problems + self.rules.problems(self.preempt)

    def to_json(self) -> dict[str, Any]:
        """Return all settings, those of the rules among them, without those of `OMITTED` that have the value there."""
        values: dict[str, Any] = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            values |= rules_to_json(value) if setting.name == "rules" else {setting.name: value}
        values["role"], values["groups"] = str(self.role), [asdict(group) for group in self.groups]
        return {name: value for name, value in values.items() if name not in OMITTED or value != OMITTED[name]}


OMITTED: dict[str, Any] = {"host_pages": 0, "groups": [], "verify": VERIFY_ALL}
"""Settings that a description of an engine leaves out, with the value that they then have."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes that follow from the settings. Everything that is reserved once has the size of the largest adaptive
    candidate (D1-D4).

    ```
    row   [0, committed) · [committed, committed + reserve) may be written by launched rounds · … · row_width
    ```

    Prompt and output may fill the context, with speculation as without it. Nodes of a round past the last position use
    the row's reserve, and the finish rule drops their predictions.
    """

    max_steps: int
    max_draft_tokens: int  # nodes of the largest verify tree
    alloc_len: int  # L: slots past the committed length that one decode round may write
    reserve: int  # R: 2L in overlap mode, L in synchronous mode; and the lookahead
    row_width: int  # slots of a request-table row
    longest_in_pool: int  # slots of tokens, page aligned, that one request may have at most
    ahead: int  # slots behind its committed tokens that a row may have, those of multi-steps apart
    lookahead: int = 0  # slots for drafts behind the launched tokens, where rows have no more than launched rounds need

    @classmethod
    def resolve(cls, config: EngineConfig, algorithm: SpecAlgorithm, controller: AdaptiveController) -> EngineSizes:
        """Compute the sizes.

        Raises ConfigError with every contradiction between configuration, algorithm and candidates.
        """
        problems = config.problems()
        if problems:
            raise ConfigError("engine", problems)
        max_steps, topk, max_nd = controller.max_steps, controller.topk, controller.max_num_draft_tokens
        if not algorithm.is_speculative and max_steps > 0:
            problems.append(Problem("steps", f"{algorithm.name} drafts nothing, so steps must be 0, got {max_steps}"))
        speculates = algorithm.is_speculative and max_nd > 1
        has_draft_kv = algorithm.draft_kv is not DraftKV.NONE
        largest = RoundShape(max_steps, topk, max_nd) if speculates else PLAIN_ROUND
        alloc_len = get_alloc_len_per_decode(largest, config.page_size, has_draft_kv)
        lookahead = config.rules.lookahead(max_steps) if speculates and has_draft_kv else 0
        reserve = reserve_per_decode(alloc_len, config.overlap) + lookahead
        smallest = config.group_sizes.total(ceil_to_page(2 + reserve, config.page_size), 2 + reserve)
        if config.num_pages * config.page_size < smallest:
            problems.append(
                Problem(
                    "num_pages",
                    f"{config.num_pages} pages of {config.page_size} hold no request: {smallest} slots needed",
                )
            )
        widest = config.max_running * max_nd
        if config.max_step_tokens is not None and config.mixed and config.max_step_tokens <= widest:
            problems.append(
                Problem(
                    "max_step_tokens",
                    f"{config.max_step_tokens} leaves no room for prefill beside {config.max_running} rows of {max_nd} tokens: "
                    f"expected more than {widest}",
                )
            )
        if problems:
            raise ConfigError("engine", problems)
        row_width = request_table_width(config.context_len, reserve, config.page_size)
        ahead = max(config.chunk_ahead + config.rules.padding(max_nd) + lookahead, reserve) + config.page_size
        longest = config.group_sizes.longest_in(config.num_pages * config.page_size, ahead)
        return cls(max_steps, max_nd, alloc_len, reserve, row_width, longest, ahead, lookahead)

    def max_tokens(
        self,
        config: EngineConfig,
        prompt_len: int,
        asked: int,
        role: EngineRole = EngineRole.BOTH,
        prefill_len: int = 0,
    ) -> int:
        """Return the output length, at most `asked`, that context and pool allow a request alone. Below 1 it can never
        run.

        `prefill_len`: the number of prompt and output tokens that a prefill worker computes, if it computes more than
        the prompt.
        """
        if role is EngineRole.PREFILL:
            # The decode worker checks whether the output fits; here it takes no slots.
            missing = max(prompt_len, prefill_len) - self.longest_in_pool
            return min(asked, config.context_len - prompt_len) if missing <= 0 else -missing
        return min(asked, config.context_len - prompt_len, self.pool_limit(config) - prompt_len)

    def pool_limit(self, config: EngineConfig) -> int:
        """Return how many prompt and output tokens of one request the pool holds beside the reserve of a round."""
        return self.longest_in_pool - ceil_to_page(self.reserve, config.page_size) - (config.page_size - 1)

    def cause_of_limit(self, config: EngineConfig, prompt_len: int, asked: int, allowed: int) -> str:
        """Return the reason why a request is `allowed` fewer tokens than it asked for; an empty text if it gets all of
        them.
        """
        if allowed >= asked:
            return ""
        if prompt_len + allowed == config.context_len:
            return f"the context of {config.context_len} tokens is full"
        pool = config.num_pages * config.page_size
        return (
            f"the KV pool ended it at {allowed} of {asked} tokens: it has {pool} slots, {self.reserve} of them for the drafts of a "
            "round; a larger pool or fewer draft tokens let it go on"
        )


def make_store(config: EngineConfig, sizes: EngineSizes, algorithm: SpecAlgorithm, named_slots: bool) -> KVStore:
    """Make the empty KV store of an engine. Without `named_slots` it only counts slots."""
    held = StoreSizes(config.num_rows, sizes.row_width, config.num_pages, config.page_size, config.group_sizes)
    at_once = config.rules.frees_at_departure
    if not named_slots:
        return CountingStore(held, at_once)
    if not config.prefix_cache:
        return KVStore(held, at_once=at_once)
    key_kind = algorithm.prefix_key_kind()
    host = HostTier(config.host_pages, config.page_size, key_kind) if config.host_pages else None
    return KVStore(held, RadixCache(config.page_size, key_kind, config.eviction_policy), host, at_once)


Mode = Literal["overlap", "synchronous"]
MODES: tuple[Mode, ...] = ("overlap", "synchronous")


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The scheduling mode of an engine, and the reason for it."""

    mode: Mode
    reason: str


def choose_mode(
    asked_for: Mode | None,
    *,
    page_size: int,
    topk: int,
    backend: str,
    backend_supports_paged_trees: bool,
    algorithm: str,
    algorithm_supports_overlap: bool,
    device_is_host: bool = False,
) -> ModeChoice:
    """Choose the mode. `asked_for` None means the user left the choice; `topk` 1 stands for chains and no speculation.

    Overlap is chosen unless synchronous mode was asked for, the algorithm has no overlap, or trees (topk > 1) with
    pages (page_size > 1) need a page layout of draft branches that the backend does not declare. If `device_is_host`,
    one CPU plans and computes, so synchronous mode is the default. Raises `ConfigError` for wrong arguments.
    """
    problems = []
    if asked_for is not None and asked_for not in MODES:
        problems.append(Problem("mode", f"{asked_for!r} is neither of {', '.join(MODES)}{nearest(asked_for, MODES)}"))
    if page_size < 1:
        problems.append(Problem("page_size", f"{page_size} is less than 1"))
    if topk < 1:
        problems.append(Problem("topk", f"{topk} is less than 1"))
    if problems:
        raise ConfigError("<arguments>", problems)

    if asked_for == "synchronous":
        return ModeChoice("synchronous", "synchronous mode was asked for")
    if asked_for is None and device_is_host:
        return ModeChoice("synchronous", "a CPU computes where the host would plan ahead")
    if not algorithm_supports_overlap:
        return ModeChoice("synchronous", f"algorithm {algorithm} does not support overlap mode")
    if page_size > 1 and topk > 1 and not backend_supports_paged_trees:
        trees = f"trees (topk = {topk}) with pages (page_size = {page_size})"
        return ModeChoice("synchronous", f"backend {backend} does not support {trees} in overlap mode")
    return ModeChoice("overlap", "overlap mode was asked for" if asked_for else "overlap mode is the default")
