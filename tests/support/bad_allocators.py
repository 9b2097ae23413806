"""Allocators of other people, good and bad, as they would write them: no import of anything of ours."""

import os
import threading

import numpy as np


class ListAllocator:
    """Twenty lines, and right: ids from 0, page size 1."""

    capabilities = ("misuse",)

    def __init__(self, config):
        self.num_pages = config.num_pages
        self.pages = list(range(config.num_pages))
        self.held = set()

    def alloc(self, n):
        if n < 0 or n > len(self.pages):
            return None
        taken, self.pages = self.pages[:n], self.pages[n:]
        self.held.update(taken)
        return taken

    def free(self, slots):
        slots = list(dict.fromkeys(slots))
        if not self.held.issuperset(slots):
            raise ValueError(f"{slots} are not all held")
        self.held.difference_update(slots)
        self.pages += slots

    def can_allocate(self, n):
        return 0 <= n <= len(self.pages)

    def num_free(self):
        return len(self.pages)


class NegativeSlice(ListAllocator):
    """`pages[:n]` with n = -1 is all but one."""

    def alloc(self, n):
        if n > len(self.pages):
            return None
        taken, self.pages = self.pages[:n], self.pages[n:]
        self.held.update(taken)
        return taken

    def can_allocate(self, n):
        return n <= len(self.pages)


class Raises(ListAllocator):
    def free(self, slots):
        for slot in slots:
            self.held.remove(slot)
        self.pages += slots


class Hangs(ListAllocator):
    def free(self, slots):
        while len(slots) > 2:
            pass
        super().free(slots)


class SwallowsEverything(ListAllocator):
    """Hangs, and catches every exception while it does."""

    def free(self, slots):
        while len(slots) > 2:
            try:
                sum(range(1000))
            except Exception:
                continue
        super().free(slots)


class AnswersWithText(ListAllocator):
    def alloc(self, n):
        taken = super().alloc(n)
        return "2" if taken == [2] else taken


class AnswersWithFloats(ListAllocator):
    def alloc(self, n):
        taken = super().alloc(n)
        return [float(page) for page in taken] if taken else taken


class AnswersWithColumns(ListAllocator):
    """A matrix instead of a row."""

    def alloc(self, n):
        taken = super().alloc(n)
        return [[page] for page in taken] if taken else taken


class AnswersWithManyTruths(ListAllocator):
    def can_allocate(self, n):
        return np.arange(self.num_pages) < n if self.num_pages > 1 else super().can_allocate(n)


class CountsInTruth(ListAllocator):
    def num_free(self):
        return True if len(self.pages) == 1 else len(self.pages)


class Unfinished(ListAllocator):
    def free_pages(self):
        raise NotImplementedError


class CannotBeMade(ListAllocator):
    def __init__(self, config):
        raise TypeError("no such thing")


class OneAtATime(ListAllocator):
    """A lie about its capabilities: it says that it shares, and a second holder is forgotten."""

    def share(self, slots):
        pass

    def references(self, page):
        return int(page in self.held)


class Exact(ListAllocator):
    """Refuses the whole pool: an off-by-one that only a full pool shows."""

    def alloc(self, n):
        return None if n == self.num_pages > 1 else super().alloc(n)

    def can_allocate(self, n):
        return super().can_allocate(n) and not n == self.num_pages > 1


def make(config):
    return ListAllocator(config)


def make_bad(config):
    return NegativeSlice(config)


KEPT = []


class LeavesFilesOpen(ListAllocator):
    def __init__(self, config):
        super().__init__(config)
        KEPT.append(os.open(os.devnull, os.O_RDONLY))


class LeavesThreads(ListAllocator):
    """Each has a thread that waits for work, and nothing ends it."""

    def __init__(self, config):
        super().__init__(config)
        threading.Thread(target=threading.Event().wait).start()


class KeepsMemory(ListAllocator):
    def alloc(self, n):
        KEPT.append(bytearray(100_000))
        return super().alloc(n)


class WritesToTheOutput(ListAllocator):
    """Writes as a library in C does."""

    def alloc(self, n):
        os.write(1, b"x" * 5_000)
        return super().alloc(n)


class Forks(ListAllocator):
    forked = False

    def alloc(self, n):
        if not Forks.forked:
            Forks.forked = True
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70
        return super().alloc(n)
