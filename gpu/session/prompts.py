"""Prompts as JSONL: one object per line, with the settings of the request beside its prompt.

    {"prompt": "def fib(n):", "max_tokens": 64}
    {"messages": [{"role": "user", "content": "Hello"}], "id": "greeting", "temperature": 0.7, "seed": 3, "stop":
    ["\\n\\n"]} {"tokens": [1, 15043], "logprobs": true}

A key that is left out has the value of `RequestDefaults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...core.contract.request import GRAMMAR_KINDS, Grammar, Request, SamplingParams, biases
from ...core.errors import ConfigError, InvalidRequest, Problem, nearest
from ...core.parsing import ParseError, parse_json, read_json_object, refuse_repeated_keys
from ...core.prompt import MAX_TOKEN_ID, Prompt
from ...observe.input_files import read_lines, read_text
from .grammar import grammars_of, json_schema
from .text import Tokenizer, utf8_problem

CONTENTS = ("prompt", "messages", "tokens")
SAMPLING = tuple(item.name for item in fields(SamplingParams) if item.name != "grammar")
KEYS = (*CONTENTS, "id", "max_tokens", "min_tokens", *SAMPLING, "stop", "logprobs", "priority", *GRAMMAR_KINDS)
MAX_LINE_CHARACTERS = 1 << 26
MAX_PROMPTS = 1 << 20
MAX_SEED = 2**63 - 1
AUTO, NONE = "auto", "none"
GENERATION_CONFIG = "generation_config.json"
_FILE_KEYS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_KEY_OF = {name: key for key, name in _FILE_KEYS.items()}


@dataclass(frozen=True, slots=True)
class RequestDefaults(SamplingParams):
    """What a request asks for where its line does not say. `seed` 0: the request's id keys its draws."""

    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Accept any values: `problems` names all that are wrong."""

    def problems(self) -> list[Problem]:
        """Return the problems of the values, by their names."""
        values: dict[str, Any] = {"stop": list(self.stop)} if self.stop else {}
        for name in ("max_tokens", "min_tokens", *SAMPLING):
            values[name] = getattr(self, name)
        values["logit_bias"] = {str(token): bias for token, bias in dict(self.logit_bias).items()}
        return [Problem(key, message) for key, message in _setting_problems(values)]


def file_defaults(directory: str | Path, generation_config: str = AUTO) -> dict[str, Any]:
    """Return the sampling parameters of a checkpoint's `generation_config.json`, by their names in `RequestDefaults`;
    empty where it has none, or if `generation_config` is NONE. Raises ConfigError.

    `do_sample` false is temperature 0; true is temperature 1, where the file says no other.
    """
    if generation_config not in (AUTO, NONE):
        message = f"{generation_config!r} is none of {AUTO}, {NONE}{nearest(generation_config, (AUTO, NONE))}"
        raise ConfigError.of("<arguments>", "generation_config", message)
    file = Path(directory) / GENERATION_CONFIG
    if generation_config == NONE or not file.exists():
        return {}
    data = read_json_object(str(file), read_text)
    found = {name: data[key] for key, name in _FILE_KEYS.items() if data.get(key) is not None}
    if (samples := data.get("do_sample")) is False:
        found["temperature"] = 0.0
    elif samples is True:
        found.setdefault("temperature", 1.0)
    for name, value in found.items():
        if name in _WHOLE and isinstance(value, float) and value.is_integer():
            found[name] = int(value)
    if found.get("top_k") == -1:  # as vLLM writes 0
        found["top_k"] = 0
    if problems := _setting_problems(found):
        raise ConfigError(str(file), [Problem(_KEY_OF.get(name, name), message) for name, message in problems])
    return found


def defaults_note(directory: str | Path, defaults: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return the sentence for the user about the parameters of a file that are not the `usual` ones; "" without any."""
    shown = ", ".join(f"{name} {value}" for name, value in defaults.items() if value != usual.get(name))
    file = Path(directory) / GENERATION_CONFIG
    return shown and f"defaults of {file}: {shown} (--generation-config none leaves them out)"


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """One prompt: exactly one of `prompt`, `messages` and `tokens` is not None.
    `settings` are the other keys that were given."""

    id: str
    place: str  # "line 3"
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: tuple[int, ...] | None = None
    settings: Mapping[str, Any] | None = None


def read_prompts(lines: Iterable[str], source: str) -> tuple[PromptEntry, ...]:
    """Return the prompts in `lines` of `source`; empty lines are left out, an entry without an id has its line's
    number.

    Raises ConfigError with every problem and its line.
    """
    entries: list[PromptEntry] = []
    problems: list[Problem] = []
    first_line: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        place = f"line {number}"
        text = line.removeprefix("\ufeff") if number == 1 else line
        if not text.strip():
            continue
        if len(entries) >= MAX_PROMPTS:
            problems.append(Problem(place, f"more than {MAX_PROMPTS} prompts; expected fewer in one file"))
            break
        try:
            entry = _entry(_parse(text), place, str(number))
        except _LineProblems as wrong:
            problems += [Problem(place, message) for message in wrong.messages]
            continue
        if entry.id in first_line:
            problems.append(Problem(place, f"id {entry.id!r} is that of {first_line[entry.id]}; expected each id once"))
        first_line.setdefault(entry.id, place)
        entries.append(entry)
    if not entries and not problems:
        problems.append(Problem("", "has no prompt; expected one JSON object per line"))
    if problems:
        raise ConfigError(source, problems)
    return tuple(entries)


def read_prompt_file(path: str | Path) -> tuple[PromptEntry, ...]:
    """Return the prompts of a JSONL file. Raises ConfigError as `read_prompts` does, and for a file
    that cannot be read."""
    return read_prompts(read_lines(path), str(path))


def make_requests(
    entries: Iterable[PromptEntry],
    tokenizer: Tokenizer,
    defaults: RequestDefaults,
    source: str,
    *,
    chat: bool = False,
    vocab_size: int | None = None,
) -> tuple[Request, ...]:
    """Return the requests of `entries`, tokenized. `chat`: a text prompt is the message of a user, put into the chat
    template. `vocab_size` is the model's, which grammars need; default: the tokenizer's.

    Raises ConfigError with every problem and its line: no chat template, a prompt without tokens, tokens beyond the
    vocabulary.
    """
    requests: list[Request] = []
    problems: list[Problem] = []
    for entry in entries:
        try:
            requests.append(_request(entry, tokenizer, defaults, chat, vocab_size))
        except InvalidRequest as error:
            problems.append(Problem(entry.place, str(error)))
    if problems:
        raise ConfigError(source, problems)
    return tuple(requests)


def _grammar(settings: Mapping[str, Any], defaults: RequestDefaults) -> Grammar | None:
    """Return the grammar of a line, else the usual one. Raises InvalidRequest for two."""
    given = [kind for kind in GRAMMAR_KINDS if kind in settings]
    if len(given) > 1:
        raise InvalidRequest(f"has {' and '.join(given)}; expected one of them")
    if not given:
        return defaults.grammar
    value = settings[given[0]]
    return json_schema(value) if given[0] == "json_schema" else Grammar(given[0], value)


def _request(
    entry: PromptEntry, tokenizer: Tokenizer, defaults: RequestDefaults, chat: bool, vocab_size: int | None
) -> Request:
    def setting(name: str) -> Any:
        return (entry.settings or {}).get(name, getattr(defaults, name))

    grammar = _grammar(entry.settings or {}, defaults)
    if grammar is not None:
        if defaults.ignore_eos:
            raise InvalidRequest(f"{grammar.kind} contradicts --ignore-eos: the grammar says where the text ends")
        grammars_of(tokenizer, tokenizer.vocab_size if vocab_size is None else vocab_size).check(grammar)
    if entry.tokens is not None:
        tokens = np.array(entry.tokens, dtype=np.int64)
        if len(tokens) and tokens.max() >= tokenizer.vocab_size:
            raise InvalidRequest(f"token {tokens.max()} is not in the vocabulary of {tokenizer.vocab_size} tokens")
    elif entry.messages is not None:
        tokens = tokenizer.encode_chat(entry.messages)
    elif chat:
        tokens = tokenizer.encode_chat([{"role": "user", "content": entry.prompt}])
    else:
        assert entry.prompt is not None, "an entry has one of the three"
        tokens = tokenizer.encode(entry.prompt)
    sampling = {name: setting(name) for name in SAMPLING}
    if isinstance(sampling["logit_bias"], Mapping):
        sampling["logit_bias"] = biases(sampling["logit_bias"])
    beyond = [token for token, _ in sampling["logit_bias"] if token >= tokenizer.vocab_size]
    if beyond:
        raise InvalidRequest(f"logit_bias: token {beyond[0]} is not in the vocabulary of {tokenizer.vocab_size} tokens")
    return Request(
        entry.id,
        Prompt.of_tokens(tokens),
        setting("max_tokens"),
        priority=(entry.settings or {}).get("priority", 0),
        sampling=SamplingParams(**sampling, grammar=grammar),
        stop_tokens=() if defaults.ignore_eos else tokenizer.eos_ids,
        stop_strings=tuple(setting("stop")),
        outputs=("logprobs",) if setting("logprobs") else (),
        min_tokens=setting("min_tokens"),
    )


# -- one line ---------------------------------------------------------------------------------------------------------


class _LineProblems(Exception):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(messages)
        self.messages = messages


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_LINE_CHARACTERS:
        raise _LineProblems([f"longer than {MAX_LINE_CHARACTERS} characters"])
    try:
        value = parse_json(text, refuse_repeated_keys)
    except ParseError as error:
        raise _LineProblems([f"is not JSON: {error}"]) from None
    if not isinstance(value, dict):
        raise _LineProblems([f"is {_kind(value)}; expected an object with one of {', '.join(CONTENTS)}"])
    return value


def _entry(value: dict[str, Any], place: str, default_id: str) -> PromptEntry:
    messages = [f"unknown key {key!r}{nearest(key, KEYS)}" for key in value if key not in KEYS]
    given = [key for key in CONTENTS if key in value]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        messages.append(f"has {found}; expected exactly one of {', '.join(CONTENTS)}")
    for key in given:
        wrong = _CHECKS[key](value[key])
        if wrong:
            messages.append(f"{key} is {wrong}")
    settings = {key: value[key] for key in KEYS if key in value and key not in (*CONTENTS, "id")}
    messages += [f"{key} {message}" for key, message in _setting_problems(settings)]
    identity = value.get("id", default_id)
    if not isinstance(identity, str) or not identity:
        messages.append(f"id is {_kind(identity)}; expected a text that is not empty")
    if messages:
        raise _LineProblems(messages)
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    turns = value.get("messages")
    tokens = value.get("tokens")
    return PromptEntry(
        identity,
        place,
        value.get("prompt"),
        None if turns is None else tuple(turns),
        None if tokens is None else tuple(tokens),
        settings,
    )


def _text_problem(value: Any) -> str:
    if not isinstance(value, str):
        return f"{_kind(value)}; expected a text"
    return ""


def _messages_problem(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return f"{_kind(value)}; expected a list of messages, not empty"
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"a list whose message {number} has no role and content; expected both"
    return ""


def _tokens_problem(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return f"{_kind(value)}; expected a list of token ids, not empty"
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            return f"a list with {token!r} in it; expected token ids"
    return ""


_CHECKS = {"prompt": _text_problem, "messages": _messages_problem, "tokens": _tokens_problem}
_WHOLE = {  # setting -> least and greatest whole number
    "max_tokens": (1, MAX_TOKEN_ID),
    "min_tokens": (0, MAX_TOKEN_ID),
    "top_k": (0, MAX_TOKEN_ID),
    "seed": (0, MAX_SEED),
    "priority": (-(2**31), 2**31 - 1),
}


_REALS = {  # setting -> what it must be, and in words
    "temperature": (lambda value: 0 <= value < float("inf"), "a number, 0 or more (0 is greedy)"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
    "presence_penalty": (lambda value: abs(value) < float("inf"), "a number (0 is off)"),
    "frequency_penalty": (lambda value: abs(value) < float("inf"), "a number (0 is off)"),
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "a number above 0 (1 is off)"),
}


def _setting_problems(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, what is wrong) of everything that is not a prompt."""
    problems = []
    for key, value in settings.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _WHOLE:
            low, high = _WHOLE[key]
            if not number or isinstance(value, float) or not low <= value <= high:
                problems.append((key, f"is {_shown(value)}; expected a whole number, {low} or more"))
        elif key in _REALS and not (number and _REALS[key][0](value)):
            problems.append((key, f"is {_shown(value)}; expected {_REALS[key][1]}"))
        elif key == "logit_bias" and (wrong := _bias_problem(value)):
            problems.append((key, wrong))
        elif key == "json_schema" and not isinstance(value, dict | str):
            problems.append((key, f"is {_kind(value)}; expected a schema: an object, or its text"))
        elif key == "lark" and (wrong := _text_problem(value)):
            problems.append((key, f"is {wrong}"))
        elif key == "logprobs" and not isinstance(value, bool):
            problems.append((key, f"is {_shown(value)}; expected true or false"))
        elif key == "stop":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or any(not isinstance(t, str) or not t for t in texts):
                problems.append((key, f"is {_shown(value)}; expected a text, or a list of texts, none empty"))
            else:
                problems += [(key, wrong) for wrong in map(utf8_problem, texts) if wrong]
    return problems


def _bias_problem(value: Any) -> str:
    if not isinstance(value, dict):
        return f"is {_kind(value)}; expected an object of token ids and numbers"
    for token, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isdecimal() and int(token) <= MAX_TOKEN_ID and number and abs(bias) < float("inf")):
            return f"has {_shown(bias)} for {token!r}; expected a number for a token id"
    return ""


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    empty = "an empty list" if value == [] else "an empty text" if value == "" else ""
    return empty or names.get(type(value), "null")


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, int | float | str) else _kind(value)
