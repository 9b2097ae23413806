"""Acceptance processes to start from, by algorithm, model family and kind of text, each fitted to published statistics
of real requests.

For EAGLE, these were published: probabilities of *rounds* of 5 steps, the correlation of successive rounds, the spread
of requests, and mean accept lengths at several step counts. For n-gram drafting on code, the first two were published.
The shares were chosen to meet correlation and spread, the probabilities of positions by `fit.calibrate` for outputs of
300 tokens. The mean accept lengths at 1, 3 and 7 steps were not fitted. They come out within 2 %, which supports the
mechanism.

For the other algorithms only mean accept lengths were published, of chains and of some trees.
`benchmarks/acceptance_presets.py` fits the probabilities to them, with the shares of EAGLE on the same kind of text
(n-gram: on code), which is an assumption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..draws import Purpose, hash64, request_key
from ..errors import ConfigError, Problem, nearest
from .process import AcceptanceProcess, GaussianAcceptance
from .tree import MAX_DEPTH


@dataclass(frozen=True, slots=True, eq=False)
class TraceAcceptance(AcceptanceProcess):
    """Replays recorded runs. Make one with `of_runs`.

    runs:     int16 [total], the runs of all requests one after the other
    starts:   int64 [n + 1], where each request's begin
    keys:     uint64 [n], `request_key` of the recorded ids, ascending
    Each request replays a recording that is drawn by (seed, its key), so any number of them can be played.
    If a request is longer than its recording, the recording starts again.
    """

    runs: np.ndarray
    starts: np.ndarray
    keys: np.ndarray
    seed: int = 0
    max_depth: int = field(init=False)

    def __post_init__(self) -> None:
        problems = []
        if len(self.keys) == 0 or len(self.starts) != len(self.keys) + 1 or (np.diff(self.starts) < 1).any():
            problems.append(Problem("runs", "expected at least one request, each with at least one position"))
        elif self.runs.min() < 0 or self.runs.max() > MAX_DEPTH:
            problems.append(Problem("runs", f"expected runs of 0 ... {MAX_DEPTH}"))
        if problems:
            raise ConfigError("<acceptance trace>", problems)
        object.__setattr__(self, "max_depth", max(1, int(self.runs.max())))

    @classmethod
    def of_runs(cls, recorded: Mapping[str, Sequence[int]], seed: int = 0) -> TraceAcceptance:
        """Make one from runs by request id. Runs deeper than `MAX_DEPTH` are cut to it. Errors: ConfigError."""
        by_key = sorted((request_key(request), runs) for request, runs in recorded.items())
        lens = np.array([len(runs) for _, runs in by_key], np.int64)
        columns = [np.minimum(np.asarray(runs, np.int64), MAX_DEPTH).astype(np.int16) for _, runs in by_key]
        return cls(
            np.concatenate([np.empty(0, np.int16), *columns]),
            np.concatenate([[0], np.cumsum(lens)]).astype(np.int64),
            np.array([key for key, _ in by_key], np.uint64),
            seed,
        )

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """See `AcceptanceProcess`; `shifts` are ignored."""
        keys = np.atleast_1d(np.asarray(request_keys, np.uint64))
        which = (hash64(self.seed, Purpose.ACCEPTANCE, keys, 0) % np.uint64(len(self.keys))).astype(np.int64)
        starts = self.starts[which]
        where = np.atleast_1d(np.asarray(positions, np.int64)) % (self.starts[which + 1] - starts)
        runs: np.ndarray = self.runs[starts + where]
        return runs.astype(np.int32)


ANY_FAMILY = "any"
"""The family of presets that do not depend on the model, because a look-up drafts from the text."""

OWN_LAYER = "MTP"
"""The algorithm of presets of layers that a model's own checkpoint has to draft for it (multi-token prediction)."""

UNKNOWN_FAMILY = "not stated"
"""The family of presets whose source does not name its model."""


@dataclass(frozen=True, slots=True)
class AcceptancePreset:
    """A named process.

    algorithm, family, text: what was measured. The algorithm of layers of the target's own checkpoint is `OWN_LAYER`. A
    `family` is that of a model shape, with or without what follows a "_" (qwen3_moe is qwen3)
    source:                  the measurement
    conditional:             averages over positions
    draft_confidence:        see `GaussianAcceptance`; None where no trees were published
    """

    name: str
    algorithm: str
    family: str
    text: str
    source: str
    conditional: tuple[float, ...]
    request_share: float
    field_share: float
    correlation_len: int
    draft_confidence: float | None = None

    def process(self, seed: int = 0) -> GaussianAcceptance:
        return GaussianAcceptance(
            self.conditional,
            seed,
            self.request_share,
            self.field_share,
            self.correlation_len,
            draft_confidence=self.draft_confidence,
        )


@dataclass(frozen=True, slots=True)
class PresetChoice:
    """A preset, and in which of ("algorithm", "family", "text") it differs from what was asked for."""

    preset: AcceptancePreset
    differs: tuple[str, ...] = ()


_CHAT, _CODE, _MATH, _LOOKUP = (
    (0.08, 0.28, 8),
    (0.08, 0.43, 8),
    (0.02, 0.10, 8),
    (0.10, 0.80, 16),
)  # shares, correlation
_EAGLE = "published acceptance traces: 1,410 requests, EAGLE on Llama-3.1-8B, 5 steps; {}"
_SPECBUNDLE = "SpecForge, SpecBundle: EAGLE-3 on {}, chains and trees"
_MULTI_LAYER = "vLLM pull 48892: multi-layer MTP of a model that is not named, GSM8K, 1 and 8 steps"
_BLOCKS = "published with DFlash2: block drafters of Qwen3.5-4B, GSM8K, blocks of 8 (7 drafts)"
_SPEED_BENCH = "llama.cpp pull 27342: {}, SPEED-Bench"
_CODING = "SemiAnalysisAI/InferenceX: {}, SPEED-Bench coding, {}"
_STANDALONE = "devquasar.com: Llama-3-70B with an 8B draft, four mixed prompts, 8 and 10 steps"


def _own_layer_presets() -> Iterator[AcceptancePreset]:
    make = AcceptancePreset
    yield make(
        "mtp-deepseek3-chat", OWN_LAYER, "deepseek_v3", "chat",
        "vLLM pull 12755, DeepSeek-R1, 1 step; nebius/MTP-DeepSeek-V3-0324, MT-Bench, HumanEval and GSM8K, 7 steps",
        (0.8327, 0.7583, 0.7054, 0.6640, 0.6301, 0.6014, 0.5765, 0.5546), *_CHAT,
    )  # fmt: skip
    yield make(
        "mtp-deepseek4-code", OWN_LAYER, "deepseek_v4", "code", _CODING.format("DeepSeek-V4-Pro", "thinking, 1 … 5 steps"),
        (0.8283, 0.6689, 0.5484, 0.4583, 0.3900, 0.3371, 0.2953, 0.2617), *_CODE,
    )  # fmt: skip
    yield make(
        "mtp-glm4-chat", OWN_LAYER, "glm4_moe", "chat", "SGLang pull 14457: GLM-4.6, one request, 3 steps",
        (0.6323, 0.5760, 0.5420, 0.5177, 0.4987, 0.4832, 0.4701, 0.4588), *_CHAT,
    )  # fmt: skip
    yield make(
        "mtp-glm5-code", OWN_LAYER, "glm_moe_dsa", "code", _CODING.format("GLM-5.2", "thinking, 3 … 5 steps"),
        (0.8595, 0.8424, 0.8316, 0.8236, 0.8172, 0.8119, 0.8073, 0.8032), *_CODE,
    )  # fmt: skip
    yield make(
        "mtp-glm5-math", OWN_LAYER, "glm_moe_dsa", "math", "vLLM pull 34385: GLM-5, GSM8K, 1 step",
        (0.9495, 0.9370, 0.9283, 0.9215, 0.9159, 0.9110, 0.9066, 0.9027), *_MATH,
    )  # fmt: skip
    yield make(
        "mtp-qwen3.5-chat", OWN_LAYER, "qwen3_5", "chat", "bradrlaw/ai-server pull 12: Qwen3.6-27B, technical prose, 2 and 5 steps",
        (0.8025, 0.7769, 0.7609, 0.7490, 0.7396, 0.7317, 0.7249, 0.7189), *_CHAT,
    )  # fmt: skip
    yield make(
        "mtp-qwen3.5-code", OWN_LAYER, "qwen3_5", "code", _CODING.format("Qwen3.8-27B", "without thinking, 1 … 4 steps"),
        (0.9107, 0.8870, 0.8708, 0.8581, 0.8475, 0.8384, 0.8304, 0.8232), *_CODE,
    )  # fmt: skip
    yield make(
        "mtp-qwen3-next-math", OWN_LAYER, "qwen3_next", "math", "ROCm/ATOM pull 239: Qwen3-Next-80B-A3B, GSM8K, 1 step",
        (0.9293, 0.9122, 0.9005, 0.8914, 0.8838, 0.8773, 0.8715, 0.8664), *_MATH,
    )  # fmt: skip


def _presets() -> Iterator[AcceptancePreset]:
    make = AcceptancePreset
    yield make(
        "eagle-llama-chat", "EAGLE", "llama", "chat", _EAGLE.format("chat"),
        (0.6829, 0.6467, 0.6849, 0.7210, 0.7496), *_CHAT,
    )  # fmt: skip
    yield make(
        "eagle-llama-code", "EAGLE", "llama", "code", _EAGLE.format("code edits"),
        (0.7218, 0.7105, 0.7412, 0.7846, 0.7985), *_CODE,
    )  # fmt: skip
    yield make(
        "eagle-llama-math", "EAGLE", "llama", "math", _EAGLE.format("mathematics"),
        (0.6756, 0.6639, 0.6622, 0.6610, 0.6582), *_MATH,
    )  # fmt: skip
    yield make(
        "eagle3-llama-chat", "EAGLE3", "llama", "chat", "vLLM issue 20780: EAGLE-3 on Llama-3.1-8B, MT-Bench, 2 … 7 steps",
        (0.8051, 0.7937, 0.7869, 0.7819, 0.7779, 0.7747, 0.7719, 0.7695), *_CHAT,
    )  # fmt: skip
    yield make(
        "eagle3-llama-code", "EAGLE3", "llama", "code", _SPECBUNDLE.format("Llama-3.1-8B, HumanEval"),
        (0.9188, 0.8984, 0.8845, 0.8737, 0.8647, 0.8570, 0.8501, 0.8440), *_CODE, draft_confidence=0.5,
    )  # fmt: skip
    yield make(
        "eagle3-llama-math", "EAGLE3", "llama", "math", _SPECBUNDLE.format("Llama-3.1-8B, MATH-500"),
        (0.9228, 0.8989, 0.8821, 0.8688, 0.8575, 0.8478, 0.8391, 0.8313), *_MATH, draft_confidence=0.66,
    )  # fmt: skip
    yield make(
        "eagle3-qwen3-chat", "EAGLE3", "qwen3", "chat", "SpecForge issue 339: EAGLE-3 on Qwen3-30B-A3B, MT-Bench, a chain and trees",
        (0.5511,), *_CHAT,
    )  # fmt: skip
    yield make(
        "eagle3-qwen3-code", "EAGLE3", "qwen3", "code", _SPECBUNDLE.format("Qwen3-30B-A3B, HumanEval"),
        (0.9103, 0.9055, 0.9025, 0.9004, 0.8987, 0.8973, 0.8961, 0.8950), *_CODE, draft_confidence=0.66,
    )  # fmt: skip
    yield make(
        "eagle3-qwen3-math", "EAGLE3", "qwen3", "math", _SPECBUNDLE.format("Qwen3-30B-A3B, MATH-500"),
        (0.9050, 0.8888, 0.8782, 0.8702, 0.8637, 0.8582, 0.8533, 0.8491), *_MATH, draft_confidence=0.66,
    )  # fmt: skip
    yield make(
        "multi-layer-eagle-math", "MULTI_LAYER_EAGLE", UNKNOWN_FAMILY, "math", _MULTI_LAYER,
        (0.8307, 0.8254, 0.8223, 0.8200, 0.8183, 0.8168, 0.8156, 0.8145), *_MATH,
    )  # fmt: skip
    yield from _of_block_drafters()
    yield from _own_layer_presets()
    yield make(
        "standalone-llama-chat", "STANDALONE", "llama", "chat", _STANDALONE,
        (0.8489, 0.9001, 0.9223, 0.9352, 0.9438, 0.9501, 0.9548, 0.9586), *_CHAT,
    )  # fmt: skip
    yield make(
        "ngram-code", "NGRAM", ANY_FAMILY, "code", "published acceptance traces: n-gram drafting on code for Llama-3.1-8B",
        (0.5936, 0.9440, 0.9411, 0.9372, 0.9308), *_LOOKUP,
    )  # fmt: skip
    yield make(
        "ngram-chat", "NGRAM", ANY_FAMILY, "chat", "Spec-Bench: prompt look-up on Vicuna-7B, six kinds of text",
        (0.3631, 0.9440, 0.9411, 0.9372, 0.9308), *_LOOKUP,
    )  # fmt: skip
    yield make(
        "ngram-edit", "NGRAM", ANY_FAMILY, "edit", "vLLM pull 24344: n-gram drafting while editing files of 5,000 characters",
        (0.7586, 0.9140, 0.9460, 0.9710, 0.9710), *_LOOKUP,
    )  # fmt: skip


def _of_block_drafters() -> Iterator[AcceptancePreset]:
    for algorithm, family, text, source, rate in (
        ("DFLASH", "qwen3", "math", _BLOCKS, 0.8660),
        (
            "DFLASH",
            "muse",
            "chat",
            _SPEED_BENCH.format("DFlash on Muse-Glimmer-30B, all categories, 15 drafts"),
            0.7801,
        ),
        ("DFLASH", "muse", "code", _SPEED_BENCH.format("DFlash on Muse-Glimmer-30B, coding, 15 drafts"), 0.8176),
        ("DFLASH2", "qwen3", "math", _BLOCKS, 0.9296),
        ("DFLASH2", "qwen3", "chat", _SPEED_BENCH.format("DFlash2 on Qwen3.8-27B, all categories, 7 drafts"), 0.7959),
        ("DFLASH2", "qwen3", "code", _SPEED_BENCH.format("DFlash2 on Qwen3.8-27B, coding, 7 drafts"), 0.8330),
        ("DSPARK", "qwen3", "math", _BLOCKS, 0.9053),
    ):
        shares = {"chat": _CHAT, "code": _CODE, "math": _MATH}[text]
        yield AcceptancePreset(
            f"{algorithm.lower()}-{family}-{text}", algorithm, family, text, source, (rate,), *shares
        )


PRESETS = {preset.name: preset for preset in _presets()}
TEXTS = tuple(dict.fromkeys(preset.text for preset in PRESETS.values()))
PRESET_NAMES = (*TEXTS, *PRESETS)
"""The valid names: kinds of text, and single presets."""


def choose_preset(name: str, algorithm: str = "EAGLE", family: str = "llama", like: str = "EAGLE") -> PresetChoice:
    """Return the preset called `name`, or of that kind of text the one nearest to an algorithm and a model's family.

    An algorithm without presets gets those of the algorithm `like`. Among the presets of an algorithm, a matching text
    counts first, then the family, then the order of the presets. Raises ConfigError with the nearest known name.
    """
    if name in PRESETS:
        return PresetChoice(PRESETS[name])
    if name not in TEXTS:
        message = f"{name!r}: expected {', '.join(PRESET_NAMES)}{nearest(name, PRESET_NAMES)}"
        raise ConfigError.of("<acceptance>", "preset", message)
    of = algorithm if any(preset.algorithm == algorithm for preset in PRESETS.values()) else like

    def distance(preset: AcceptancePreset) -> tuple[bool, bool]:
        is_own = preset.family == ANY_FAMILY or f"{family}_".startswith(f"{preset.family}_")
        return preset.text != name, not is_own

    best = min((preset for preset in PRESETS.values() if preset.algorithm == of), key=distance)
    other_text, other_family = distance(best)
    differs = {"algorithm": of != algorithm, "family": other_family, "text": other_text}
    return PresetChoice(best, tuple(part for part, is_other in differs.items() if is_other))


def usual_preset(algorithm: str, family: str, usual: str, text: str | None = None) -> PresetChoice:
    """Return what stands for an algorithm's acceptance on a model family.

    `usual`: the algorithm's own preset or kind of text (`SpecAlgorithm.usual_acceptance`). `text`: a name that the user
    gave instead.
    """
    like = PRESETS[usual].algorithm if usual in PRESETS else "EAGLE"
    default = PRESETS[usual].text if usual in PRESETS else usual
    return choose_preset(default if text is None else text, algorithm, family, like)


def presets_like(choice: PresetChoice) -> list[AcceptancePreset]:
    """Return the presets between which the acceptance of a draft is taken to be that has none of its own: those of the
    algorithm on the same kind of text, or on all where there are fewer than two; of all models that draft where the
    algorithm has one preset alone."""
    own = choice.preset
    same = [preset for preset in PRESETS.values() if preset.algorithm == own.algorithm]
    if len(same) < 2:
        return [preset for preset in PRESETS.values() if preset.family != ANY_FAMILY]
    on_text = [preset for preset in same if preset.text == own.text]
    return on_text if len(on_text) > 1 and "text" not in choice.differs else same
