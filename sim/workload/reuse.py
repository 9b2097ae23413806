"""How many prompt tokens a prefix cache finds again, if prompts alone are kept and the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.prompt import Prompt


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """Prompt tokens that were in a cache when their request came, as shares of all prompt tokens.

    Attributes:
        infinite: The share found by a cache that forgets nothing: what no cache exceeds.
        caches: By size in tokens, the share found.
        requests: The share of requests that find anything in the infinite cache.
        distinct_tokens: Tokens in the infinite cache at the end.
    """

    infinite: float
    caches: Mapping[int, float]
    requests: float
    distinct_tokens: int


class ReuseMeter:
    """Feeds prompts to an infinite cache and to caches of given sizes, one after the other, as if each were computed at once."""

    def __init__(self, cache_tokens: Sequence[int] = ()) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # (node before it, hash id) -> node
        self._lens: list[int] = []  # longest stretch that was seen of each node
        self._caches = {size: _LeastRecentlyUsed(size) for size in cache_tokens}
        self._found = dict.fromkeys(cache_tokens, 0)
        self._found_infinite = self._num_requests = self._num_hits = self._tokens = 0
        self._unknown = False

    def add(self, prompt: Prompt) -> None:
        if prompt.hash_ids is None:
            self._unknown = True
            return
        path, hit, whole = [], 0, True
        before = -1
        for hash_id, length in _pieces(prompt):
            node = self._nodes.setdefault((before, hash_id), len(self._lens))
            seen = 0
            if node == len(self._lens):
                self._lens.append(length)
            else:
                seen = min(self._lens[node], length)
                self._lens[node] = max(self._lens[node], length)
            if whole:
                hit += seen
                whole = seen == length
            path.append((node, length))
            before = node
        most = prompt.length - 1  # the last token is computed in any case: its output is the first one emitted
        self._num_requests += 1
        self._tokens += prompt.length
        self._found_infinite += min(hit, most)
        self._num_hits += hit > 0
        for size, cache in self._caches.items():
            self._found[size] += min(cache.look_up(path), most)

    def read(self) -> PrefixReuse | None:
        """Return what was found; None if some prompt did not say what it contains."""
        if self._unknown or not self._tokens:
            return None
        shares = {size: found / self._tokens for size, found in self._found.items()}
        requests = self._num_hits / self._num_requests
        return PrefixReuse(self._found_infinite / self._tokens, shares, requests, sum(self._lens))


def _pieces(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Yield the hash id and the length of each block or segment of a prompt."""
    if prompt.segment_lens is not None:
        yield from zip(prompt.hash_ids, prompt.segment_lens, strict=True)
        return
    left = prompt.length
    for hash_id in prompt.hash_ids:
        yield hash_id, min(left, prompt.block_size)
        left -= prompt.block_size


class _LeastRecentlyUsed:
    """A cache of so many tokens, piece by piece."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = 0
        self._lens: OrderedDict[int, int] = OrderedDict()  # node -> tokens; the next to go first

    def look_up(self, path: Sequence[tuple[int, int]]) -> int:
        """Return how many leading tokens of a prompt are there, and keep all of it. path: (node, tokens) from the prompt's start on."""
        lens = self._lens
        hit = 0
        for node, length in path:
            seen = min(lens.get(node, 0), length)
            hit += seen
            if seen < length:
                break
        for node, length in reversed(path):  # the beginning goes last: without it the rest cannot be found
            held = lens.pop(node, 0)
            lens[node] = max(held, length)
            self._held += lens[node] - held
        while self._held > self._size:
            self._held -= lens.popitem(last=False)[1]
        return hit
