"""Decoding from Python: a model, perhaps a draft, and prompts in; text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any, overload

from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError
from foredraft.gpu.session.hub import local_checkpoint
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.prompts import AUTO, PromptEntry, RequestDefaults, file_defaults, make_requests
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text_session import Output, SessionStats

ARGUMENTS = "<arguments>"


class Session:
    """A model, its draft, and the engine that serves prompts with them.

    Args:
        model: Directory of a Hugging Face checkpoint, or its name on the hub (`organisation/model`).
        draft: Directory or name of a draft model or head that was made for the model; None decodes plainly, or with
            NGRAM.
        generation_config: "auto": `generation_config.json` of the model gives the defaults of sampling parameters;
            "none": it does not.
        **options: The other fields of `SessionOptions`, for example `steps=5`, `topk=4`, `adaptive="default"`,
            `device="cuda"`.

    Raises:
        ForedraftError: A checkpoint cannot be used, options contradict each other, or memory does not suffice.

    Example::

        session = Session("models/target", draft="models/eagle3", steps=3)
        print(session.generate("def fib(n):", max_tokens=64).text)
        for piece in session.stream("class Cache:"):
            print(piece, end="", flush=True)
        print(session.stats().accept_length)
    """

    def __init__(
        self,
        model: str | PathLike[str],
        draft: str | PathLike[str] | None = None,
        *,
        generation_config: str = AUTO,
        **options: Any,
    ) -> None:
        draft = None if draft is None else local_checkpoint(draft, "draft")
        directory = local_checkpoint(model)
        self._defaults = file_defaults(directory, generation_config)
        self._session = DecodeSession.open(SessionOptions(model=directory, draft=draft, **options))
        self._num_prompts = 0

    @overload
    def generate(self, prompts: str, *, chat: bool = False, **sampling: Any) -> Output: ...
    @overload
    def generate(self, prompts: Sequence[str], *, chat: bool = False, **sampling: Any) -> list[Output]: ...
    def generate(self, prompts: str | Sequence[str], *, chat: bool = False, **sampling: Any) -> Output | list[Output]:
        """Decode one prompt, or several together, and return the output of each.

        Args:
            prompts: A text, or a sequence of texts.
            chat: Put each text into the model's chat template, as the message of a user.
            **sampling: Fields of `RequestDefaults`: `max_tokens` (256), `temperature` (0.0, greedy), `top_p`, `top_k`,
                `seed`, `stop`, `logprobs`, `ignore_eos`, `min_tokens`. What is left out has the value of the model's
                `generation_config.json`, if it has one.

        Raises:
            ConfigError: A value is out of range, or a prompt has no tokens.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        outputs = list(self._session.run(self._requests(texts, chat, sampling)).values())
        return outputs[0] if isinstance(prompts, str) else outputs

    def stream(self, prompt: str, *, chat: bool = False, **sampling: Any) -> Iterator[str]:
        """Decode one prompt and yield its text piece by piece; the arguments are those of `generate`."""
        for delta in self._session.stream(self._requests([prompt], chat, sampling)):
            if delta.text:
                yield delta.text

    def stats(self) -> SessionStats:
        """Return the numbers since the session was opened: tokens per second, accept length, time by phase."""
        return self._session.stats()

    def close(self) -> None:
        """Free the models, their KV and their graphs, at once; `with Session(…) as session:` does it at the end.
        `stats` stay."""
        self._session.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _requests(self, texts: Iterable[str], chat: bool, sampling: dict[str, Any]) -> tuple[Request, ...]:
        defaults = RequestDefaults(**{**self._defaults, **sampling})
        if problems := defaults.problems():
            raise ConfigError(ARGUMENTS, problems)
        entries = []
        for text in texts:
            self._num_prompts += 1
            entries.append(PromptEntry(str(self._num_prompts), f"prompt {self._num_prompts}", prompt=text))
        plan = self._session.plan
        assert plan is not None, "an opened session has its plan"
        vocab_size = plan.target.vocab_size
        return make_requests(entries, self._session.tokenizer, defaults, ARGUMENTS, chat=chat, vocab_size=vocab_size)
