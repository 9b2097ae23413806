"""Planted defects of block managers, each in the plain one."""

from __future__ import annotations

from ...properties.harness.mutants import Mutant
from .plain import PlainManager


class FindsAllOfIt(PlainManager):
    """A prompt that is cached to its end leaves no token to compute."""

    def lookup(self, tokens, namespace):
        return super().lookup([*tokens, -1], namespace)


class ForgetsTheNamespace(PlainManager):
    """Requests of different adapters share their pages."""

    def key(self, tokens, namespace, end):
        return "", tuple(tokens[:end])


class KeysTheBlockAlone(PlainManager):
    """A block is found by its own tokens, whatever stands before it."""

    def key(self, tokens, namespace, end):
        return namespace, tuple(tokens[end - self.size : end])


class FindsHalfAPage(PlainManager):
    """A match ends in the middle of a page."""

    def admit(self, request, tokens, namespace, num_tokens):
        length = super().admit(request, tokens, namespace, num_tokens)
        return length - 1 if length and self.size > 1 else length


class LosesTheLastPage(PlainManager):
    """A release keeps the page that is not full."""

    def release(self, request):
        if self.lengths.get(request, 0) % self.size and len(self.tables[request]) > 1:
            self.tables[request].pop()
        super().release(request)


class FreesWhatOthersHold(PlainManager):
    """A release frees shared pages, too."""

    def release(self, request):
        for page in self.tables.get(request, ()):
            if self.count[page] > 1:
                self.count[page] = 1
        super().release(request)


class SharesThePageThatGrows(PlainManager):
    """A request that enters takes the unfinished page of another one with the same text."""

    def lookup(self, tokens, namespace):
        found = super().lookup(tokens, namespace)
        for name, table in self.tables.items():
            end = self.lengths[name]
            if (
                self.names[name] == namespace
                and table[:-1] == found
                and end % self.size
                and len(tokens) > len(table) * self.size
            ):
                return [*found, table[-1]]
        return found


class HoldsWhatItFoundBeforeItRefuses(PlainManager):
    """A refused request keeps its references to the cached prefix."""

    def admit(self, request, tokens, namespace, num_tokens):
        length = super().admit(request, tokens, namespace, num_tokens)
        if length is None:
            for page in self.lookup(tokens, namespace):
                self.hold(page)
        return length


class KeepsOnePageBack(PlainManager):
    """The last page is never handed out."""

    def admit(self, request, tokens, namespace, num_tokens):
        return super().admit(request, tokens, namespace, num_tokens) if len(self.free) > 1 else None


class ForgetsAtTheEnd(PlainManager):
    """The pages of a request that ends are not found again."""

    def release(self, request):
        for page in self.tables.get(request, ()):
            if self.count[page] == 1:
                self.keys.pop(page, None)
        super().release(request)


class ReturnsThePagesInTheOrderOfTheirNumbers(PlainManager):
    """Slots come sorted, not in the order of positions."""

    def slots_of(self, request):
        return sorted(super().slots_of(request), reverse=True)


class ForgetsTheSampledToken(PlainManager):
    """A page is missing where a token is the first of a new one."""

    def grow(self, request, tokens, num_tokens):
        if num_tokens == 1 and self.lengths.get(request, 1) % self.size == 0 and self.size > 1:
            return True
        return super().grow(request, tokens, num_tokens)


class AdmitsANameTwice(PlainManager):
    """A second request of a name takes the first one's place."""

    def admit(self, request, tokens, namespace, num_tokens):
        if request in self.tables:
            self.release(request)
        return super().admit(request, tokens, namespace, num_tokens)


_DEFECTS = (
    (FindsAllOfIt, ("BLOCKS-01",)),
    (ForgetsTheNamespace, ("BLOCKS-01",)),
    (KeysTheBlockAlone, ("BLOCKS-01",)),
    (FindsHalfAPage, ("BLOCKS-01", "BLOCKS-03")),
    (LosesTheLastPage, ("BLOCKS-02",)),
    (FreesWhatOthersHold, ("BLOCKS-02", "BLOCKS-03")),
    (SharesThePageThatGrows, ("BLOCKS-01", "BLOCKS-03")),
    (HoldsWhatItFoundBeforeItRefuses, ("BLOCKS-04", "BLOCKS-02")),
    (KeepsOnePageBack, ("BLOCKS-04",)),
    (ForgetsAtTheEnd, ("BLOCKS-05",)),
    (ReturnsThePagesInTheOrderOfTheirNumbers, ("BLOCKS-06",)),
    (ForgetsTheSampledToken, ("BLOCKS-06",)),
    (AdmitsANameTwice, ("BLOCKS-07",)),
)
"""(class, the invariants of which one must catch it)."""

MUTANTS = tuple(Mutant(kind.__name__, kind.__doc__, "block-manager", kind, caught_by) for kind, caught_by in _DEFECTS)
