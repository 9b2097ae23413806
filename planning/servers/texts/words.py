"""The text of a launch command as a shell reads it: statements, variables, and the files that the text writes itself.

Line continuations, quotes, comments and redirections mean what they mean in a shell. Nothing is run: a variable has a
value only if the text assigns one.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ....core.errors import ConfigError

MAX_COMMAND = 100_000  # characters
MAX_NESTING = 3  # of `sh -c` in `sh -c`
_JSON = r"""(?<![^\s=])\{\s*"(?:[^{}']|\{(?:[^{}']|\{[^{}']*\})*\})*\}"""
"""A JSON object without quotes around it. No shell leaves one whole, so a text that has one has lost the quotes."""
_PIECE = re.compile(
    _JSON + r"""| '[^']*' | "(?:\\.|[^"\\])*" | \\\r?\n | \\. | (?<![^\s;&|])\#[^\n]* | \r?\n""",
    re.VERBOSE | re.DOTALL,
)
_SEPARATOR = re.compile(r"[;&|]+")
_REDIRECTION = re.compile(r"[0-9]*[<>]{1,3}(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"""<<(?!<)-?[ \t]*(?P<quote>['"]?)(?P<end>[A-Za-z_]\w*)(?P=quote)""")
_WRITTEN_TO = re.compile(r"""(?:>{1,2}|\btee)[ \t]*(?P<quote>["']?)(?P<path>[^\s"'|&;<>]+)(?P=quote)""")
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::?[-=](?P<default>[^}]*))?\}|\((?P<of_manifest>\w+)\))")
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<adds>\+?)=\((?P<first>.*)", re.DOTALL)
_WHOLE_ARRAY = re.compile(r"\$\{(?P<name>\w+)\[@\]\}")
_PLACEHOLDER = re.compile(r"<[^<>\s]+>|\.\.\.|…")
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_SHELLS = ("bash", "sh", "zsh", "dash")


@dataclass
class Script:
    """What a text says.

    Attributes:
        statements: The words of each statement.
        written: The texts of the files that here-documents write, by path.
        variables: The value of each variable that is assigned; None if it is assigned several values.
        arrays: The words of each array, likewise.
        used: The variables that `expand` has replaced.
        replicas: How many servers a manifest starts with it, as it is written; None if it does not say.
        role: The pool of these servers, "prefill" or "decode", by the names around the container.
    """

    statements: list[list[str]] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)
    arrays: dict[str, list[str] | None] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    replicas: str | None = None
    role: str | None = None

    def expand(self, words: Iterable[str]) -> list[str]:
        """Return words with the values of variables. A word that is a variable alone may become several arguments."""
        expanded: list[str] = []
        for word in words:
            text = self.value_of(word)
            alone = text != word and _VARIABLE.fullmatch(word) is not None and text.lstrip().startswith("-")
            expanded += shlex.split(text) if alone else [text]
        return expanded

    def value_of(self, word: str) -> str:
        """Return a text with the values of the variables in it that have one."""

        def value(found: re.Match[str]) -> str:
            name = found["plain"] or found["name"] or found["of_manifest"]
            known = self.variables.get(name, found["default"])
            if known is None or "$" in known or "`" in known:
                return found[0]
            self.used[name] = known
            return known

        return _VARIABLE.sub(value, word)

    def assign(self, name: str, value: str) -> None:
        """Note the value of a variable, which is unknown if another value was noted before."""
        value = self.value_of(value)
        self.variables[name] = value if self.variables.get(name, value) == value else None


def read_script(text: str, source: str, variables: Mapping[str, str | None] | None = None, depth: int = 0) -> Script:
    """Return the statements of a text. Raises ConfigError for quotes that are not closed, and a text that is too
    long."""
    if len(text) > MAX_COMMAND:
        raise ConfigError.of(source, "", f"has more than {MAX_COMMAND:,} characters; expected a launch command")
    script = Script(variables=dict(variables or {}))
    text, documents = _without_documents(text)
    lexer = shlex.shlex(_PIECE.sub(_plain, text), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError.of(source, "", f"cannot be read as a command: {error}") from None
    words = _without_arrays(script, words)
    for is_separator, group in itertools.groupby(words, lambda word: _SEPARATOR.fullmatch(word) is not None):
        if not is_separator:
            add_statement(script, list(group), source, depth)
    for opening, body, is_literal in documents:
        path = _WRITTEN_TO.search(opening)
        if path is not None:
            script.written[script.value_of(path["path"])] = body if is_literal else script.value_of(body)
    return script


def _without_documents(text: str) -> tuple[str, list[tuple[str, str, bool]]]:
    """Return a text without its here-documents, and of each the line that opens it, its text, and whether variables in
    it stand for themselves."""
    kept: list[str] = []
    documents: list[tuple[str, str, bool]] = []
    lines = iter(text.split("\n"))
    for line in lines:
        found = None if line.lstrip().startswith("#") else _HERE_DOCUMENT.search(line)
        if found is None:
            kept.append(line)
            continue
        line = line[: found.start()] + line[found.end() :]
        body: list[str] = []
        for one in lines:
            if one.strip() == found["end"]:
                break
            body.append(one)
        documents.append((line, "\n".join(body), bool(found["quote"])))
        kept.append(line)
    return "\n".join(kept), documents


def _without_arrays(script: Script, words: list[str]) -> list[str]:
    """Return words without the arrays that they assign, with the words of an array where it is used whole."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        found, used = _ARRAY.fullmatch(word), _WHOLE_ARRAY.fullmatch(word)
        if found is not None:
            members = _members(itertools.chain([found["first"]], rest))
            is_new = not found["adds"] and found["name"] not in script.arrays
            script.arrays[found["name"]] = _without_arrays(script, members) if is_new else None
        elif used is not None and (known := script.arrays.get(used["name"])) is not None:
            kept += known
        else:
            kept.append(word)
    return kept


def _members(words: Iterator[str]) -> list[str]:
    """Take the words of an array up to its closing parenthesis; the ends of lines between them do not count."""
    members: list[str] = []
    for word in words:
        if word.endswith(")") and not word.endswith("$)"):
            members += [word[:-1]] if word != ")" else []
            break
        members.append(word)
    return [word for word in members if word and _SEPARATOR.fullmatch(word) is None]


def is_unknown(word: str) -> bool:
    """Return whether a word has a variable without a value, or is a placeholder such as <model> or "..."."""
    return "$" in word or "`" in word or _PLACEHOLDER.fullmatch(word) is not None


def _plain(found: re.Match[str]) -> str:
    """Return a piece of a text without comments and continued lines, with `;` at the ends of others, and with quotes
    around JSON that stands without."""
    piece = found[0]
    if piece[0] == "#":
        return ""
    if piece[0] == "{":
        return f"'{piece}'"
    if piece[0] == '"':
        return re.sub(r"\\\r?\n", "", piece)
    if piece.endswith("\n") and piece[0] in "\\\r\n":
        return " " if piece[0] == "\\" else " ; "
    return piece


def add_statement(script: Script, words: list[str], source: str, depth: int = 0) -> None:
    """Add a statement, or note what it assigns. The text behind `sh -c` is read as statements of its own."""
    words = _without_redirections(words)
    assignments = words[1:] if words[:1] in (["export"], ["readonly"], ["local"], ["declare"]) else words
    found = [ASSIGNMENT.fullmatch(word) for word in assignments]
    if words and all(found):
        for one in found:
            assert one is not None
            script.assign(one["name"], one["value"])
        return
    place = next((place for place in range(1, len(words) - 1) if _runs_text(words, place)), None)
    if place is None or depth >= MAX_NESTING:
        script.statements += [words] if words else []
        return
    text = next((word for word in words[place + 1 :] if word != "--"), "")
    nested = read_script(text, source, script.variables, depth + 1)
    script.variables, script.written = nested.variables, script.written | nested.written
    script.statements += [[*words[: place + 1], *statement] for statement in nested.statements]


def _runs_text(words: list[str], place: int) -> bool:
    before = [word.rpartition("/")[2] for word in words[max(0, place - 2) : place]]
    return re.fullmatch(r"-[a-z]*c", words[place]) is not None and any(shell in before for shell in _SHELLS)


def _without_redirections(words: list[str]) -> list[str]:
    """Return words without redirections and their files; a placeholder such as <model> is none."""
    kept: list[str] = []
    skips = False
    for word in words:
        found = None if _PLACEHOLDER.fullmatch(word) else _REDIRECTION.fullmatch(word)
        if skips or found is not None:
            skips = found is not None and not found[1]
            continue
        kept.append(word)
    return kept
