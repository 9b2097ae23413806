"""Text and tokens: a checkpoint's tokenizer and its chat template."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.contract.text import ChatEnd, context_of
from ...core.errors import ConfigError, InvalidRequest, shown
from ...core.parsing import MAX_INTEGER, read_json_object
from ...observe.distribution.install_hint import install_command
from ...observe.input_files import read_text

if TYPE_CHECKING:
    import tokenizers

    from .chat_template import ChatTemplate, Message

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHRINKS = 4
"""How many times shorter a text may get before it is cut into tokens: composed characters take a third of the bytes."""
LEAST_ALIKE = 0.25
"""A draft drafts for a target of another tokenizer if both spell at least this share of its tokens alike."""
_WORD_START = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def utf8_problem(text: str) -> str:
    """Return what is wrong with a text that has half of a surrogate pair in it, as arguments that are not UTF-8 have;
    "" if nothing is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"is not UTF-8 (at character {error.start + 1})"
    return ""


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The ids that decoding leaves out: all but those `with_text`. A model may have more ids than its tokenizer."""

    with_text: frozenset[int]

    def __contains__(self, token: object) -> bool:
        return token not in self.with_text


class Tokenizer:
    """The tokenizer of a model directory. It satisfies `core.contract.text.TextDecoder`.

    Reads `tokenizer.json`; `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and `config.json`
    where they are.
    `eos_ids`: the tokens that end a text, ascending. `bos_id`: the first token of a text, or None. `vocab_size`: ids
    below it exist. `most_bytes_per_token`: of a text, without runs of white space that a tokenizer may drop.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.source = source
        self.grammars: dict[int, Any] = {}  # `grammar.Grammars` by vocabulary, made when asked for, which takes a while
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._template_text = chat_template
        self._template: ChatTemplate | None = None
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = vocabulary.get(self._special_tokens.get("bos_token", ""))
        own_eos = vocabulary.get(self._special_tokens.get("eos_token", ""))
        self.eos_ids = tuple(sorted({*eos_ids, *([] if own_eos is None else [own_eos])}))
        # Decoders with byte fallback look at a whole run of such tokens before they know its characters.
        self.byte_ids: Mapping[int, int] = {
            number: int(token[1:-1], 16) for token, number in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
        }
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(number for number, token in added.items() if token.special)
        self.special_ids: Container[int] = _LeftOut(frozenset(vocabulary.values()) - special)
        is_byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self._bytes_of_letter = _letters_of_bytes() if is_byte_level else {}
        self.most_bytes_per_token: int = _SHRINKS * max((len(token.encode()) for token in vocabulary), default=1)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Return the tokenizer in `directory`. ConfigError with the file and its problem."""
        try:
            import tokenizers
        except ImportError:
            raise ConfigError.of(str(directory), "", f"needs tokenizers: {install_command('gpu')}") from None

        folder = Path(directory)
        file = folder / "tokenizer.json"
        if not file.is_file():
            what = "is missing; expected the tokenizer of a Hugging Face checkpoint"
            raise ConfigError.of(str(file), "", what if folder.is_dir() else "is missing: no such directory")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for everything
            raise ConfigError.of(str(file), "", f"is no tokenizer: {error}") from error
        settings = _read_if_there(folder / "tokenizer_config.json")
        generation = _read_if_there(folder / "generation_config.json")
        eos = _token_ids(generation, "eos_token_id", folder / "generation_config.json")
        special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(settings.get(name)))}
        if not eos and "eos_token" not in special:
            eos = _token_ids(_read_if_there(folder / "config.json"), "eos_token_id", folder / "config.json")
        return cls(
            tokenizer,
            str(folder),
            special_tokens=special,
            chat_template=_template_text(folder, settings),
            eos_ids=eos,
        )

    def to_json(self) -> str:
        """Return the tokenizer as `tokenizer.json` has it."""
        return self._tokenizer.to_str()

    def difference(self, other: Tokenizer) -> str:
        """Return the first token id that stands for two tokens here and in `other`, in words; "" if there is none.
        Ids that only one of them has are no difference."""
        mine, theirs = (
            {number: token for token, number in x.get_vocab().items()} for x in (self._tokenizer, other._tokenizer)
        )
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                return f"token {number} is {mine[number]!r} in {self.source}, {theirs[number]!r} in {other.source}"
        return ""

    def spellings(self) -> dict[bytes, int]:
        """Return the lowest token of each spelling, as bytes."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        found: dict[bytes, int] = {}
        for text, number in sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if number in self.byte_ids:
                spelling = bytes([self.byte_ids[number]])
            elif text not in added and self._bytes_of_letter and all(x in self._bytes_of_letter for x in text):
                spelling = bytes(self._bytes_of_letter[letter] for letter in text)
            else:
                spelling = (text if text in added else text.replace(_WORD_START, " ")).encode()
            found.setdefault(spelling, number)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return the tokens int64 [n] of `text`; with the ones that begin a text, unless they are written in it (a
        rendered chat).

        Raises InvalidRequest for a text that is not UTF-8.
        """
        if not_utf8 := utf8_problem(text):
            raise InvalidRequest(not_utf8)
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens int [n], special tokens left out."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        if token in self.byte_ids:
            return bytes([self.byte_ids[token]])
        text = self._tokenizer.id_to_token(token) or ""
        if self._bytes_of_letter and all(letter in self._bytes_of_letter for letter in text):
            return bytes(self._bytes_of_letter[letter] for letter in text)
        return self.text_of(token).encode()

    def text_of(self, token: int) -> str:
        """Return the text of a token inside a text: decoders may strip a space from the first one of all."""
        before = self._before
        return self.decode(np.array([*before, token]))[len(self.decode(np.array(before, dtype=np.int64))) :]

    @cached_property
    def _before(self) -> list[int]:
        """Tokens that a text may begin with."""
        return context_of(self, self.encode("a", add_special_tokens=False))

    def render_chat(self, messages: Sequence[Message], end: ChatEnd = "answer", tools: Sequence[Message] = ()) -> str:
        """Return the text of a conversation, and of tools, by the model's own template, up to this end.
        InvalidRequest if there is none or it refuses."""
        if self._template_text is None:
            raise InvalidRequest(f"{self.source} has no chat template: give a prompt instead of messages")
        if self._template is None:
            from .chat_template import ChatTemplate

            self._template = ChatTemplate(self._template_text, self._special_tokens, self.source)
        text = self._template.render(messages, add_generation_prompt=end == "answer", tools=tools)
        return text if end != "continue" else up_to_last(text, str(messages[-1].get("content") or ""))

    def encode_chat(
        self, messages: Sequence[Message], end: ChatEnd = "answer", tools: Sequence[Message] = ()
    ) -> np.ndarray:
        """Return the tokens int64 [n] of a conversation, with tools, up to this end."""
        return self.encode(self.render_chat(messages, end, tools), add_special_tokens=False)


def up_to_last(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message's content. Templates may strip its white space.
    Raises InvalidRequest for a template that changes the content."""
    at = text.rfind(content.strip()) if content.strip() else -1
    if at < 0:
        raise InvalidRequest(
            "the chat template does not write the last message as it is, so that it cannot be continued"
        )
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else content.strip())]


@dataclass(frozen=True, slots=True)
class SpelledAlike:
    """The tokens of a draft with another tokenizer than its target's.

    read_as: the draft's token for each of the target's, int64 [V]: the one that is spelled alike, else the longest one
        that the target's token ends with, else 0
    own_ids, target_ids: the tokens that both spell alike, which alone may be drafted, int64 [n]
    """

    read_as: np.ndarray
    own_ids: np.ndarray
    target_ids: np.ndarray
    difference: str


def spelled_alike(model: Path, draft: Path, model_vocab: int, draft_vocab: int) -> SpelledAlike | None:
    """Compare the tokenizers of a target and a draft by their spellings. None if equal ids are equal tokens: sizes of
    vocabularies may then differ by padding, or by tokens that were added to one of them.

    Raises ConfigError where fewer than `LEAST_ALIKE` of the draft's tokens are spelled alike, and for vocabularies of
    two sizes whose tokenizers cannot be compared.
    """
    sizes = f"the vocabularies must match: the target has {model_vocab} tokens, the draft {draft_vocab}"
    try:
        target, own = Tokenizer.load(model), Tokenizer.load(draft)
    except ConfigError as error:
        if model_vocab == draft_vocab:
            return None
        message = f"{sizes}, and their tokenizers cannot be compared: {error}"
        raise ConfigError.of(str(draft), "vocab_size", message) from error
    difference = target.difference(own)
    if not difference:
        return None
    theirs, mine = target.spellings(), own.spellings()
    both = sorted(
        (number, theirs[spelling])
        for spelling, number in mine.items()
        if spelling in theirs and number < draft_vocab and theirs[spelling] < model_vocab
    )
    if len(both) < LEAST_ALIKE * len(mine):
        message = f"{len(both)} of the draft's {len(mine)} tokens are spelled as tokens of the target"
        raise ConfigError.of(str(draft), "vocab_size", f"{sizes}; {message}, expected {LEAST_ALIKE:.0%}; {difference}")
    read_as = np.zeros(model_vocab, np.int64)
    for spelling, number in theirs.items():
        ends = (mine[end] for at in range(len(spelling)) if (end := spelling[at:]) in mine)
        if number < model_vocab:
            read_as[number] = next((token for token in ends if token < draft_vocab), 0)
    own_ids, target_ids = np.array(both, np.int64).reshape(-1, 2).T
    return SpelledAlike(read_as, own_ids, target_ids, difference)


def _letters_of_bytes() -> dict[str, int]:
    """Return the letter → byte table of byte-level vocabularies: printable characters of Latin-1 stand for themselves,
    and the characters from U+0100 on for the other bytes, in their order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# -- files of a checkpoint --------------------------------------------------------------------------------------------


def _read_if_there(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or an empty one if there is no such file. Raises ConfigError."""
    if not file.exists():
        return {}
    return read_json_object(str(file), read_text, of_checkpoint=True)


def _token_text(value: Any) -> str | None:
    """Return a special token as `tokenizer_config.json` writes it: its text, or an object with the text as content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _token_ids(settings: Mapping[str, Any], key: str, file: Path) -> list[int]:
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_INTEGER:
            raise ConfigError.of(str(file), key, f"is {shown(value)}; expected a token id or a list of them")
    return ids


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: its own file, or a text in the settings, or the one called "default" of several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
