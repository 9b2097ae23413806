"""Planted defects of block managers, each in the plain one."""

from ...properties.block_manager.plain import PlainBlockManager
from .planting import defects, lookup

MANAGER = """
FindsAllOfIt (BLOCKS-01): A prompt that is cached to its end leaves no token to compute.
    PlainBlockManager.lookup = good(self, [*tokens, -1], namespace)

ForgetsTheNamespace (BLOCKS-01, BLOCKS-08): Requests of different adapters share their pages.
    PlainBlockManager.key = group, "", tuple(tokens[:end])

KeysTheBlockAlone (BLOCKS-01, BLOCKS-08): A block is found by its own tokens, whatever stands before it.
    PlainBlockManager.key = group, namespace, tuple(tokens[end - self.size : end])

FindsHalfAPage (BLOCKS-01, BLOCKS-03): A match ends in the middle of a page.
    PlainBlockManager.admit:
        length = good(self, request, tokens, namespace, num_tokens)
        return length - 1 if length and self.size > 1 else length

LosesTheLastPage (BLOCKS-02): A release keeps the page that is not full.
    PlainBlockManager.release:
        if self.lengths.get(request, 0) % self.size and len(self.tables[request][0]) > 1:
            self.tables[request][0].pop()
        good(self, request)

FreesWhatOthersHold (BLOCKS-02, BLOCKS-03): A release frees shared pages, too.
    PlainBlockManager.give_back
        - self.count[page] -= 1
        + self.count[page] = 0

SharesThePageThatGrows (BLOCKS-01, BLOCKS-03): A request that enters takes the unfinished page of another one with the same text.
    PlainBlockManager.lookup:
        found = good(self, tokens, namespace)
        for name, tables in self.tables.items():
            grows = self.lengths[name] % self.size and len(tokens) > len(tables[0]) * self.size
            if self.names[name] == namespace and [table[:-1] for table in tables] == found and grows:
                return tables
        return found

HoldsWhatItFoundBeforeItRefuses (BLOCKS-04, BLOCKS-02): A refused request keeps its references to the cached prefix.
    PlainBlockManager.admit:
        length = good(self, request, tokens, namespace, num_tokens)
        if length is None:
            for page in filter(None, self.lookup(tokens, namespace)[0]):
                self.hold(page)
        return length

KeepsOnePageBack (BLOCKS-04): The last page is never handed out.
    PlainBlockManager.admit = good(self, request, tokens, namespace, num_tokens) if len(self.free) > 1 else None

ForgetsAtTheEnd (BLOCKS-05): The pages of a request that ends are not found again.
    PlainBlockManager.give_back
        - self.free.append(page)
        + self.free.append(page)
        + self.uncache(page)

ReturnsThePagesInTheOrderOfTheirNumbers (BLOCKS-06): Slots come sorted, not in the order of positions.
    PlainBlockManager.tables_of = [sorted(slots, reverse=True) for slots in good(self, request)]

ForgetsTheSampledToken (BLOCKS-06): A page is missing where a token is the first of a new one.
    PlainBlockManager.grow:
        if num_tokens == 1 and self.lengths.get(request, 1) % self.size == 0 and self.size > 1:
            return True
        return good(self, request, tokens, num_tokens)

ForgetsAPageThatIsSeen (BLOCKS-03): A window of layers gives back the page in which it begins.
    PlainBlockManager.first_seen:
        first = good(self, length, window)
        return first + 1 if window and (first + 1) * self.size < length else first

OneKeyForAllGroups (BLOCKS-01, BLOCKS-03, BLOCKS-08): A page of one group of layers is found for another one.
    PlainBlockManager.key = 0, namespace, tuple(tokens[:end])

CachesDrafts (BLOCKS-01, BLOCKS-03, BLOCKS-08): A page that drafts have filled is found by the next request.
    PlainBlockManager.extend
        - for number, page in enumerate(pages[: length // self.size], 1):
        + for number, page in enumerate(pages[: self.config.pages_to(group, length)], 1):

ForgetsTheDrafts (BLOCKS-06): A step has no slots for drafts where they begin a page.
    PlainBlockManager.lacks = good(self, request, tables, length - self.lookahead)

HandsOutWhatAWindowGaveBack (BLOCKS-02): A page that a window gave back stays in the table of its request.
    PlainBlockManager.forget
        - pages[number] = GONE
        + pass

MovesBackAPage (BLOCKS-01): A match gives the pages of a window one place too early.
    PlainBlockManager.lookup:
        found = good(self, tokens, namespace)
        return [pages[1:] + pages[:1] if pages[:1] == [GONE] else pages for pages in found]

TellsOfNoEviction (BLOCKS-08): A cached page that is handed out leaves the cache without an event.
    PlainBlockManager.uncache = self.keys.pop(page, None)

TellsOfEqualPagesOnce (BLOCKS-08): Of equal pages only the first one enters the cache by an event, and each leaves it by one.
    PlainBlockManager.cache:
        known = self.key(group, tokens, namespace, end) in self.keys.values()
        good(self, page, group, tokens, namespace, end)
        if known:
            self.told.pop()

NamesThePageAlone (BLOCKS-08): The event of a page names its own tokens, whatever stands before them.
    PlainBlockManager.cache:
        good(self, page, group, tokens, namespace, end)
        event = self.told[-1]
        self.told[-1] = event._replace(names=[(group, namespace, tuple(event.tokens))])

TellsOfAPageBehindTheWrongOne (BLOCKS-08): The event of a page names the text two pages before it.
    PlainBlockManager.cache
        - start = end - self.size if
        + start = max(end - 2 * self.size, 0) if
        - tokens[start:end]
        + tokens[end - self.size : end]

GoesOnFromAnOlderState (BLOCKS-01, BLOCKS-06): A match is as long as attention has pages, with the last state that was kept before.
    PlainBlockManager.lookup:
        if self.windows != (0, STATE):
            return good(self, tokens, namespace)
        self.windows = (0,)
        (pages,) = good(self, tokens, namespace)
        self.windows = (0, STATE)
        where = {key: page for page, key in self.keys.items()}
        states = [where.get(self.key(1, tokens, namespace, end * self.size), GONE) for end in range(1, len(pages) + 1)]
        kept = [page for page in states if page != GONE]
        return [pages, [GONE] * (len(pages) - 1) + kept[-1:]] if kept else [[], []]

KeepsTheStateOfAPageThatWasPassed (BLOCKS-01, BLOCKS-06, BLOCKS-08): A state is found at the end of the page before its own.
    PlainBlockManager.cache = good(self, page, group, tokens, namespace, max(end - self.size * (self.windows[group] == STATE), self.size))

CachesAStateWithinAPage (BLOCKS-01, BLOCKS-03, BLOCKS-08): A state is found at the end of its page while the text still fills it.
    PlainBlockManager.extend
        - for number, page in enumerate(pages[: length // self.size], 1):
        + for number, page in enumerate(pages[: (length + (self.size - 1) * (self.windows[group] == STATE)) // self.size], 1):

WritesTheStateThatItFound (BLOCKS-01, BLOCKS-03, BLOCKS-08): A request that starts from a cached state updates it in place.
    PlainBlockManager.extend:
        good(self, request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request]):
            last = (length - 1) // self.size
            before = [number for number, page in enumerate(pages[:last]) if page != GONE]
            if window == STATE and before:
                self.give_back(pages[last])
                self.keys.pop(pages[last], None)
                pages[last] = pages[before[-1]]

SharesAStateThatIsWritten (BLOCKS-03, BLOCKS-01): A request takes the state of one that runs with the same text, not a copy of it.
    PlainBlockManager.extend:
        good(self, request, tokens, length)
        for name, tables in self.tables.items():
            for window, mine, theirs in zip(self.windows, self.tables[request], tables):
                is_equal = self.names[name] == self.names[request] and self.lengths[name] == length and name != request
                last = (length - 1) // self.size
                if window == STATE and is_equal and length % self.size and mine[last] not in theirs:
                    self.give_back(mine[last])
                    mine[last] = theirs[last]
                    self.hold(mine[last])

GivesBackTheStateThatItReads (BLOCKS-06, BLOCKS-03): The page of the state from which a step goes on is free before the step ends.
    PlainBlockManager.extend:
        good(self, request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request]):
            for number in range((length - 1) // self.size) if window == STATE else ():
                self.give_back(pages[number])
                pages[number] = GONE

LosesTheStateBefore (BLOCKS-02): A state that no later step reads leaves the table, and its page is not free.
    PlainBlockManager.forget:
        for window, pages in zip(self.windows, self.tables[request]):
            if window == STATE:
                pages[: self.first_seen(self.lengths[request], window)] = [GONE] * self.first_seen(self.lengths[request], window)
        good(self, request)

OwnsTheNullPage (BLOCKS-02, BLOCKS-06): The places of states that were passed over have the slots of the null page.
    PlainBlockManager.tables_of
        - if page != GONE else -1
        + if page != GONE or STATE in self.windows else -1

GivesDraftsNoStates (BLOCKS-06): The states after drafts have no pages.
    PlainBlockManager.extend:
        good(self, request, tokens, length)
        for window, pages in zip(self.windows, self.tables[request]):
            while window == STATE and len(pages) > -(-length // self.size):
                self.give_back(pages.pop())

AdmitsANameTwice (BLOCKS-07): A second request of a name takes the first one's place.
    PlainBlockManager.admit
        - raise ValueError(f"{request} is there already")
        + self.release(request)
"""

MUTANTS = defects("block-manager", PlainBlockManager, [PlainBlockManager], MANAGER)
__getattr__ = lookup(MUTANTS)
