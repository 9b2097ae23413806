"""Planted defects of block managers, each a subclass of the plain one."""

from ...properties.block_manager.contract import STATE
from ...properties.block_manager.plain import GONE, PlainBlockManager
from .planting import Defects


def _cache_to(manager, request, group, tokens, num_pages):
    """Cache the first pages of a request's group that are not cached yet."""
    for number, page in enumerate(manager.tables[request][group][:num_pages], 1):
        if page != GONE and page not in manager.keys:
            manager.cache(page, group, tokens, manager.names[request], number * manager.size)


MANAGER = Defects("block-manager", PlainBlockManager)


@MANAGER.breaks("BLOCKS-01")
class FindsAllOfIt(PlainBlockManager):
    """A prompt that is cached to its end leaves no token to compute."""

    def lookup(self, tokens, namespace):
        return super().lookup([*tokens, -1], namespace)


@MANAGER.breaks("BLOCKS-01", "BLOCKS-08")
class SharesAmongNamespaces(PlainBlockManager):
    """Requests of different adapters share their pages."""

    def key(self, group, tokens, namespace, end):
        return group, "", tuple(tokens[:end])


@MANAGER.breaks("BLOCKS-01", "BLOCKS-08")
class KeysTheBlockAlone(PlainBlockManager):
    """A block is found by its own tokens, whatever stands before it."""

    def key(self, group, tokens, namespace, end):
        return group, namespace, tuple(tokens[end - self.size : end])


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03")
class FindsHalfAPage(PlainBlockManager):
    """A match ends in the middle of a page."""

    def admit(self, request, tokens, namespace, num_tokens):
        length = super().admit(request, tokens, namespace, num_tokens)
        return length - 1 if length and self.size > 1 else length


@MANAGER.breaks("BLOCKS-02")
class KeepsThePageThatIsNotFull(PlainBlockManager):
    """A release keeps the page that is not full."""

    def release(self, request):
        if self.lengths.get(request, 0) % self.size and len(self.tables[request][0]) > 1:
            self.tables[request][0].pop()
        super().release(request)


@MANAGER.breaks("BLOCKS-02", "BLOCKS-03")
class FreesWhatOthersHold(PlainBlockManager):
    """A release frees shared pages, too."""

    def give_back(self, page):
        if page != GONE:
            self.count[page] = 1
        super().give_back(page)


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03")
class SharesThePageThatGrows(PlainBlockManager):
    """A request that enters takes the unfinished page of another one with the same text."""

    def lookup(self, tokens, namespace):
        found = super().lookup(tokens, namespace)
        for name, tables in self.tables.items():
            grows = self.lengths[name] % self.size and len(tokens) > len(tables[0]) * self.size
            if self.names[name] == namespace and [table[:-1] for table in tables] == found and grows:
                return tables
        return found


@MANAGER.breaks("BLOCKS-04", "BLOCKS-02")
class HoldsWhatItFoundBeforeItRefuses(PlainBlockManager):
    """A refused request keeps its references to the cached prefix."""

    def admit(self, request, tokens, namespace, num_tokens):
        length = super().admit(request, tokens, namespace, num_tokens)
        if length is None:
            for page in filter(None, self.lookup(tokens, namespace)[0]):
                self.hold(page)
        return length


@MANAGER.breaks("BLOCKS-04")
class KeepsOnePageBack(PlainBlockManager):
    """The last page is never handed out."""

    def admit(self, request, tokens, namespace, num_tokens):
        return super().admit(request, tokens, namespace, num_tokens) if len(self.free) > 1 else None


@MANAGER.breaks("BLOCKS-05")
class ForgetsAtTheEnd(PlainBlockManager):
    """The pages of a request that ends are not found again."""

    def give_back(self, page):
        super().give_back(page)
        if page != GONE and not self.count[page]:
            self.uncache(page)


@MANAGER.breaks("BLOCKS-06")
class ReturnsThePagesInTheOrderOfTheirNumbers(PlainBlockManager):
    """Slots come sorted, not in the order of positions."""

    def tables_of(self, request):
        return [sorted(slots, reverse=True) for slots in super().tables_of(request)]


@MANAGER.breaks("BLOCKS-06")
class ForgetsTheSampledToken(PlainBlockManager):
    """A page is missing where a token is the first of a new one."""

    def grow(self, request, tokens, num_tokens):
        if num_tokens == 1 and self.lengths.get(request, 1) % self.size == 0 and self.size > 1:
            return True
        return super().grow(request, tokens, num_tokens)


@MANAGER.breaks("BLOCKS-03")
class ForgetsAPageThatIsSeen(PlainBlockManager):
    """A window of layers gives back the page in which it begins."""

    def first_seen(self, length, window):
        first = super().first_seen(length, window)
        return first + 1 if window and (first + 1) * self.size < length else first


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03", "BLOCKS-08")
class OneKeyForAllGroups(PlainBlockManager):
    """A page of one group of layers is found for another one."""

    def key(self, group, tokens, namespace, end):
        return 0, namespace, tuple(tokens[:end])


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03", "BLOCKS-08")
class CachesDrafts(PlainBlockManager):
    """A page that drafts have filled is found by the next request."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for group in range(len(self.windows)):
            _cache_to(self, request, group, tokens, self.config.pages_to(group, length))


@MANAGER.breaks("BLOCKS-06")
class ForgetsTheDrafts(PlainBlockManager):
    """A step has no slots for drafts where they begin a page."""

    def lacks(self, request, tables, length):
        return super().lacks(request, tables, length - self.lookahead)


@MANAGER.breaks("BLOCKS-02")
class HandsOutWhatAWindowGaveBack(PlainBlockManager):
    """A page that a window gave back stays in the table of its request."""

    def forget(self, request):
        before = [list(pages) for pages in self.tables[request]]
        super().forget(request)
        for pages, all_pages in zip(self.tables[request], before, strict=True):
            pages[:] = all_pages


@MANAGER.breaks("BLOCKS-01")
class MovesBackAPage(PlainBlockManager):
    """A match gives the pages of a window one place too early."""

    def lookup(self, tokens, namespace):
        found = super().lookup(tokens, namespace)
        return [pages[1:] + pages[:1] if pages[:1] == [GONE] else pages for pages in found]


@MANAGER.breaks("BLOCKS-08")
class TellsOfNoEviction(PlainBlockManager):
    """A cached page that is handed out leaves the cache without an event."""

    def uncache(self, page):
        return self.keys.pop(page, None)


@MANAGER.breaks("BLOCKS-08")
class TellsOfEqualPagesOnce(PlainBlockManager):
    """Of equal pages only the first one enters the cache by an event, and each leaves it by one."""

    def cache(self, page, group, tokens, namespace, end):
        known = self.key(group, tokens, namespace, end) in self.keys.values()
        super().cache(page, group, tokens, namespace, end)
        if known:
            self.published.pop()


@MANAGER.breaks("BLOCKS-08")
class NamesThePageAlone(PlainBlockManager):
    """The event of a page names its own tokens, whatever stands before them."""

    def cache(self, page, group, tokens, namespace, end):
        super().cache(page, group, tokens, namespace, end)
        event = self.published[-1]
        self.published[-1] = event._replace(names=[(group, namespace, tuple(event.tokens))])


@MANAGER.breaks("BLOCKS-08")
class TellsOfAPageBehindTheWrongOne(PlainBlockManager):
    """The event of a page names the text two pages before it."""

    def cache(self, page, group, tokens, namespace, end):
        super().cache(page, group, tokens, namespace, end)
        start = max(end - 2 * self.size, 0) if self.windows[group] != STATE else 0
        parent = self.key(group, tokens, namespace, start) if start else None
        self.published[-1] = self.published[-1]._replace(parent=parent, tokens=tokens[end - self.size : end])


@MANAGER.breaks("BLOCKS-01", "BLOCKS-06")
class GoesOnFromAnOlderState(PlainBlockManager):
    """A match is as long as attention has pages, with the last state that was kept before."""

    def lookup(self, tokens, namespace):
        if self.windows != (0, STATE):
            return super().lookup(tokens, namespace)
        self.windows = (0,)
        (pages,) = super().lookup(tokens, namespace)
        self.windows = (0, STATE)
        where = {key: page for page, key in self.keys.items()}
        states = [where.get(self.key(1, tokens, namespace, end * self.size), GONE) for end in range(1, len(pages) + 1)]
        kept = [page for page in states if page != GONE]
        return [pages, [GONE] * (len(pages) - 1) + kept[-1:]] if kept else [[], []]


@MANAGER.breaks("BLOCKS-01", "BLOCKS-06", "BLOCKS-08")
class KeepsTheStateOfAPageThatWasPassed(PlainBlockManager):
    """A state is found at the end of the page before its own."""

    def cache(self, page, group, tokens, namespace, end):
        before = end - self.size if self.windows[group] == STATE else end
        super().cache(page, group, tokens, namespace, max(before, self.size))


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03", "BLOCKS-08")
class CachesAStateWithinAPage(PlainBlockManager):
    """A state is found at the end of its page while the text still fills it."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for group, window in enumerate(self.windows):
            if window == STATE:
                _cache_to(self, request, group, tokens, -(-length // self.size))


@MANAGER.breaks("BLOCKS-01", "BLOCKS-03", "BLOCKS-08")
class WritesTheStateThatItFound(PlainBlockManager):
    """A request that starts from a cached state updates it in place."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            last = (length - 1) // self.size
            before = [number for number, page in enumerate(pages[:last]) if page != GONE]
            if window == STATE and before:
                self.give_back(pages[last])
                self.keys.pop(pages[last], None)
                pages[last] = pages[before[-1]]


@MANAGER.breaks("BLOCKS-03", "BLOCKS-01")
class SharesAStateThatIsWritten(PlainBlockManager):
    """A request takes the state of one that runs with the same text, not a copy of it."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for name, tables in self.tables.items():
            for window, mine, theirs in zip(self.windows, self.tables[request], tables, strict=True):
                is_equal = self.names[name] == self.names[request] and self.lengths[name] == length and name != request
                last = (length - 1) // self.size
                if window == STATE and is_equal and length % self.size and mine[last] not in theirs:
                    self.give_back(mine[last])
                    mine[last] = theirs[last]
                    self.hold(mine[last])


@MANAGER.breaks("BLOCKS-06", "BLOCKS-03")
class GivesBackTheStateThatItReads(PlainBlockManager):
    """The page of the state from which a step goes on is free before the step ends."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            for number in range((length - 1) // self.size) if window == STATE else ():
                self.give_back(pages[number])
                pages[number] = GONE


@MANAGER.breaks("BLOCKS-02")
class LosesTheStateBefore(PlainBlockManager):
    """A state that no later step reads leaves the table, and its page is not free."""

    def forget(self, request):
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            if window == STATE:
                number = self.first_seen(self.lengths[request], window)
                pages[:number] = [GONE] * number
        super().forget(request)


@MANAGER.breaks("BLOCKS-02", "BLOCKS-06")
class OwnsTheNullPage(PlainBlockManager):
    """The places of states that were passed over have the slots of the null page."""

    def tables_of(self, request):
        tables = super().tables_of(request)
        if STATE not in self.windows:
            return tables
        offsets = range(self.size)
        return [[page * self.size + offset for page in pages for offset in offsets] for pages in self.tables[request]]


@MANAGER.breaks("BLOCKS-06")
class GivesDraftsNoStates(PlainBlockManager):
    """The states after drafts have no pages."""

    def extend(self, request, tokens, length):
        super().extend(request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            while window == STATE and len(pages) > -(-length // self.size):
                self.give_back(pages.pop())


@MANAGER.breaks("BLOCKS-07")
class AdmitsANameTwice(PlainBlockManager):
    """A second request of a name takes the first one's place."""

    def admit(self, request, tokens, namespace, num_tokens):
        if request in self.tables:
            self.release(request)
        return super().admit(request, tokens, namespace, num_tokens)


@MANAGER.breaks("BLOCKS-09")
class HandsOutTheNewest(PlainBlockManager):
    """What was released last is handed out first."""

    def give_back(self, page):
        super().give_back(page)
        if page in self.free:
            self.free.remove(page)
            self.free.insert(0, page)


@MANAGER.breaks("BLOCKS-09")
class ReadsACoarseClock(PlainBlockManager):
    """The time of the last use is counted in hundreds: of pages used within the same hundred the lowest goes first,
    whatever the order was."""

    def __init__(self, config):
        super().__init__(config)
        self.now, self.used = 0, dict.fromkeys(self.free, 0)

    def give_back(self, page):
        super().give_back(page)
        self.now += 1
        self.used[page] = self.now // 100
        self.free.sort(key=lambda free: (self.used[free], free))


@MANAGER.breaks("BLOCKS-09")
class CountsNoHitAsAUse(PlainBlockManager):
    """A page that is found keeps its place in the order in which pages are handed out."""

    def __init__(self, config):
        super().__init__(config)
        self.computed = {}

    def cache(self, page, *key):
        self.computed[page] = len(self.computed)
        super().cache(page, *key)

    def give_back(self, page):
        super().give_back(page)
        self.free.sort(key=lambda free: self.computed.get(free, -1))


MUTANTS = tuple(MANAGER.mutants)
