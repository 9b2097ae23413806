"""What caches and block managers say of their pages, and the account that follows from it alone, as a router keeps
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple


class CacheEvent(NamedTuple):
    """Pages of one text that entered the cache, one behind the other, or pages that left it.

    `names`: one for each page. A prefix cache has one page of a text; its name is the page's first slot. A block
    manager may have several; their names stand for the group, the namespace and the text up to the page's end. So equal
    pages have equal names, and each of them enters and leaves by itself. Of a group with states one page enters, if
    any: that of the state after the last of the tokens; its parent may be a page of another group.
    """

    is_stored: bool
    names: Sequence[Hashable]
    group: int = 0
    parent: Hashable | None = None  # the name of the page before them; None: they begin the text
    tokens: Sequence[Hashable] = ()  # of the pages that entered; pairs of tokens where these are the keys
    namespace: str = ""  # of a text that they begin


class CacheAccount:
    """What is cached according to the events.

    `begin(namespace)` and `extend(text, tokens)` make the value that stands for a text. `texts`: that of each name;
    where names stand for texts, also those of pages that have left. `copies`: how many pages hold a text, by the group
    and the text.
    """

    def __init__(
        self,
        page_size: int,
        begin: Callable[[str], Any],
        extend: Callable[[Any, Sequence[Any]], Any],
        states: Sequence[int] = (),  # groups with states
        num_groups: int = 1,
        names_are_pages: bool = False,
    ) -> None:
        self.texts: dict[Hashable, Any] = {}
        self.copies: Counter[tuple[int, Any]] = Counter()
        self._page_size, self._states, self._num_groups = page_size, states, num_groups
        self._begin, self._extend, self._names_are_pages = begin, extend, names_are_pages

    def take(self, event: CacheEvent) -> str:
        """Book an event. Returns why it is wrong, or ""."""
        group, names, tokens = event.group, list(event.names), tuple(event.tokens)
        if not 0 <= group < self._num_groups:
            return f"there is no group {group}"
        if not event.is_stored:
            return next((wrong for name in names if (wrong := self._remove(group, name))), "")
        size, has_states = self._page_size, group in self._states
        if len(tokens) % size or (len(names) > 1 if has_states else len(tokens) != len(names) * size):
            return f"{len(names)} pages with {len(tokens)} tokens entered the cache"
        text = self._begin(event.namespace)
        if event.parent is not None and names:
            if event.parent not in self.texts:
                return f"pages entered the cache behind {event.parent}, which is none"
            text = self.texts[event.parent]
        size = len(tokens) if has_states else size
        for number, name in enumerate(names):
            text = self._extend(text, tokens[number * size : (number + 1) * size])
            if self._names_are_pages and name in self.texts:
                return f"the page {name} entered the cache, in which it was"
            if (known := self.texts.setdefault(name, text)) != text:
                return f"the name {name} stands for {known}, then for {text}"
            self.copies[group, text] += 1
        return ""

    def _remove(self, group: int, name: Hashable) -> str:
        if name not in self.texts or not self.copies[cell := (group, self.texts[name])]:
            return f"the page {name} left the cache, in which it was not"
        self.copies[cell] -= 1
        if self._names_are_pages:
            del self.texts[name]
        return ""
