"""How well the drafts foresee the target: accept lengths of greedy chains on texts that were not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models.decoder import Decoder
from .budget import while_they_fit
from .drafting import Draft, aux_layers_of, propose, teach

ROWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Measured on the target's own greedy texts."""

    agreement: float  # how often the first proposal is the target's token
    accept_lengths: dict[int, float]  # steps → tokens per round, the target's own included


@torch.no_grad()
def measure_drafts(
    target: Decoder,
    drafts: Mapping[str, tuple[Draft, tuple[int, ...]]],
    texts: Tensor,
    prompt_len: int,
    seconds: float = math.inf,
) -> tuple[dict[str, DraftQuality], int]:
    """Measure drafts, each with its lengths of chains, by name, and return how many texts were used: the first ones, as many as fit.

    `texts` int64 [n, t] are prompts of `prompt_len` tokens with the target's greedy continuations.
    """
    matches: dict[str, list[Tensor]] = {name: [] for name in drafts}
    num_used = 0
    for rows in while_they_fit(texts.split(ROWS_AT_ONCE), seconds):
        num_used += len(rows)
        for name, (draft, chains) in drafts.items():
            matches[name].append(_matches(target, draft, rows, max(chains)))
    found = {name: torch.cat(pieces, 1)[:, :, prompt_len:].cpu().numpy() for name, pieces in matches.items()}
    return {
        name: DraftQuality(
            float(found[name][0].mean()), {steps: accept_length(found[name][:steps]) for steps in chains}
        )
        for name, (_, chains) in drafts.items()
    }, num_used


def _matches(target: Decoder, draft: Draft, texts: Tensor, num_steps: int) -> Tensor:
    """Return whether step s, begun at the right place, proposes token i of each text: bool [steps, n, t]."""
    _, captured = teach(target, texts, aux_layers_of(draft))
    matches = torch.zeros(num_steps, *texts.shape, dtype=torch.bool, device=texts.device)
    for step, proposals in enumerate(propose(draft, texts, captured, num_steps)):
        best = proposals.logits.argmax(-1)
        if not isinstance(draft, Decoder):
            best = draft.to_target_ids(best)
        matches[step, :, proposals.first :] = best == texts[:, proposals.first :]
    return matches


def accept_length(matches: np.ndarray) -> float:
    """Return the tokens per round of greedy chains; matches bool [steps, n, t], [s, i, j]: step s proposes token j of text i.

    A round that is to emit token j accepts as long as step s proposes token j + s, and emits one token more than it accepted. Texts end
    where a whole chain no longer fits.
    """
    num_steps, _, length = matches.shape
    whole = length - num_steps
    assert whole > 0, f"texts of {length} tokens are too short for chains of {num_steps}"
    alive = np.ones(matches[0, :, :whole].shape, bool)
    runs = np.zeros(alive.shape, np.int64)
    for step in range(num_steps):
        alive &= matches[step, :, step : step + whole]
        runs += alive
    rounds = tokens = 0
    for row in runs:
        place = 0
        while place < whole:
            rounds += 1
            tokens += int(row[place]) + 1
            place += int(row[place]) + 1
    return tokens / rounds
