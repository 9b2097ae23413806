"""Grammars of outputs, by llguidance: JSON schemas and Lark grammars, and which tokens may follow a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.contract.request import Grammar
from ...core.errors import ConfigError, InvalidRequest
from ...observe.distribution.install_hint import install_command
from .text import Tokenizer

MAX_BEGUN = 64  # grammars of which a matcher is kept
LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 50_000, "step_max_items": 20_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000
}  # fmt: skip
"""Of the library's work for a grammar, and for a mask (some milliseconds): counts, so that all ranks agree on them."""
MAX_TEXT = 1 << 13
"""Characters of one text in a schema: a mask of its tokens takes the library time for all of it, some milliseconds."""
TRIED = 8
"""Tokens of an output that a new grammar is tried with: the library finds some grammars too complex only there."""

_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')  # of JSON
WHITESPACE = r"\n?[ \t]{0,16}"
"""Between the parts of JSON, unless the schema has `x-guidance` of its own:
indented if a model likes, but no run without an end."""


def grammars_of(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    """Return the grammars of a tokenizer for a model's vocabulary, made once. Raises ConfigError."""
    if vocab_size not in tokenizer.grammars:
        tokenizer.grammars[vocab_size] = Grammars(tokenizer, vocab_size)
    grammars: Grammars = tokenizer.grammars[vocab_size]
    return grammars


def check_grammar(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int, source: str) -> None:
    """Raise ConfigError, which names `source`, if the grammar that it holds is none."""
    try:
        grammars_of(tokenizer, vocab_size).check(grammar)
    except InvalidRequest as error:
        raise ConfigError.of(source, "", str(error)) from None


class Grammars:
    """Makes matchers for one tokenizer; `vocab_size` is the model's, which may have tokens that no text is made of."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raise ConfigError if the library is missing, does not know this kind of tokenizer, or the tokenizer has no
        token that ends a text."""
        try:
            import llguidance
        except ImportError:
            raise ConfigError.of("grammar", "", f"needs llguidance: {install_command('grammar')}") from None
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._eos_ids = [token for token in tokenizer.eos_ids if token < num_tokens]
        if not self._eos_ids:
            raise ConfigError.of(tokenizer.source, "eos_token", "is missing; a grammar ends with it")
        self._library: Any = llguidance
        self._limits: Any = llguidance.LLParserLimits(**LIMITS)
        self._begun: dict[Grammar, Any] = {}  # at the beginning of an output
        self._vocab_size = vocab_size
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=num_tokens, eos_token=self._eos_ids)
        except ValueError as error:
            message = f"is no tokenizer that llguidance makes grammars for: {error}"
            raise ConfigError.of(tokenizer.source, "tokenizer.json", message) from error

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest if the grammar is none, or needs more than LIMITS. Any thread may call this; the
        library's work for it, which other threads do not wait for, is done here, and not again by `make`."""
        if grammar in self._begun:
            return
        longest = max(map(len, _TEXTS.findall(grammar.text)), default=0) if grammar.kind == "json_schema" else 0
        if longest > MAX_TEXT:
            raise InvalidRequest(f"{grammar.kind}: a text of {longest} characters; expected at most {MAX_TEXT}")
        try:
            begun = self._library.LLMatcher(self._tokenizer, self._compiled(grammar), limits=self._limits, log_level=0)
        except ValueError as error:
            raise InvalidRequest(f"{grammar.kind}: {error}") from None
        tried = begun.deep_copy()
        for _ in range(TRIED):
            if tried.is_stopped():
                break
            allowed = np.frombuffer(tried.compute_bitmask(), np.uint8)
            if tried.is_stopped():
                break
            tried.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
        if problem := problem_of(tried):
            raise InvalidRequest(f"{grammar.kind}: {problem}")
        if len(self._begun) >= MAX_BEGUN:
            self._begun.clear()
        self._begun[grammar] = begun

    def make(self, grammar: Grammar) -> LibraryMatcher:
        """Return a matcher at the beginning of an output. Raises InvalidRequest if the grammar is none."""
        begun = self._begun.get(grammar)
        while begun is None:  # another thread may forget it
            self.check(grammar)
            begun = self._begun.get(grammar)
        return LibraryMatcher(begun.deep_copy(), self._vocab_size, self._eos_ids)

    def _compiled(self, grammar: Grammar) -> str:
        make = self._library.LLMatcher
        if grammar.kind == "json_schema":
            has_options = '"x-guidance"' in grammar.text  # a pattern would win over its whitespace_flexible
            defaults = None if has_options else {"whitespace_pattern": WHITESPACE}
            compiled: str = make.grammar_from_json_schema(grammar.text, defaults=defaults)
        else:
            compiled = make.grammar_from_lark(grammar.text)
        return compiled


def problem_of(matcher: Any) -> str:
    """Return the error of a matcher of the library, in a line; empty without one."""
    if not matcher.is_error():
        return ""
    text: str = matcher.get_error().strip()
    known = {"NoExtension": "no text follows it", "NoExtensionBias": "no text follows it"}
    line = text.splitlines()[0]
    return known.get(line, line)


class LibraryMatcher:
    """The state of a grammar behind one output, as `gpu.executor.shaping.Matcher`. Once the grammar has ended, tokens
    that end a text may follow, and nothing else."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: list[int]) -> None:
        self._matcher = matcher
        self._ends = frozenset(token for token in eos_ids if token < vocab_size)
        only_end = np.zeros(vocab_size, bool)
        only_end[list(self._ends)] = True
        self._only_end = np.packbits(only_end, bitorder="little")

    is_over = False  # behind its end nothing but an end may follow

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; empty if it can."""
        problem = problem_of(self._matcher)
        return problem and f"grammar: {problem}"

    def advance(self, tokens: np.ndarray) -> None:
        self._matcher.try_consume_tokens(tokens.tolist())  # what follows the end changes nothing

    def allowed(self, path: list[int]) -> np.ndarray | None:
        matcher = self._matcher
        taken = matcher.try_consume_tokens(path)
        try:
            if matcher.is_stopped():
                return self._only_end if self._ends.issuperset(path[taken:]) else None
            if taken < len(path):
                return None
            return np.frombuffer(matcher.compute_bitmask(), np.uint8)
        finally:
            matcher.rollback(taken)


def json_schema(value: Any) -> Grammar:
    """Return the grammar of a JSON schema: its text, or the object itself."""
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))
