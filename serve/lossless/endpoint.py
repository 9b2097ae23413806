"""One OpenAI-compatible endpoint as a client sees it: greedy completions with their log-probabilities."""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.errors import ForedraftError, shown
from ...core.parsing import ParseError, parse_json

if TYPE_CHECKING:
    import httpx

NUM_LOGPROBS = 5
"""The number of most likely tokens to request at each position: the maximum of OpenAI's interface."""
MAX_ANSWER_BYTES = 64 << 20
LEAST_LOGPROB = -9999.0
"""What vLLM writes for minus infinity."""
MAX_TRIES = 3
FIRST_WAIT_S = 0.5
"""Before a second try; doubled before each further one."""
BUSY = {429, 502, 503}
"""Statuses after which a request is sent again."""


class EndpointError(ForedraftError):
    """An endpoint did not answer a request, or its answer is no completion.
    `status`: of HTTP; `may_pass`: another try may help."""

    def __init__(self, message: str, status: int | None = None, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.status: int | None = status
        self.may_pass: bool = may_pass


def make_client(api_key: str | None, timeout_s: float) -> httpx.AsyncClient:
    """Return a client of both endpoints. Raises ForedraftError for a key that cannot be sent."""
    import httpx

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ForedraftError("--api-key: has characters that a header cannot contain; expected printable ASCII")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=httpx.Limits(max_connections=None))


@dataclass(frozen=True, slots=True)
class Completion:
    """A greedy answer. `tokens` are its tokens' texts, () if the endpoint offers no log-probabilities; `rows[i]` has
    the log-probabilities (natural) of the candidates for token i by their texts, the token itself among them."""

    text: str
    finish: str | None
    tokens: tuple[str, ...] = ()
    rows: tuple[dict[str, float], ...] = ()


@dataclass(eq=False)
class Endpoint:
    """Asks one server. `url` is its address with or without `/v1`; `concurrency` bounds the requests at once.

    `asks_without`: ask for each text without log-probabilities, too, and use that text if the two differ. A server may
    not speculate in requests with log-probabilities (vLLM before 0.14: its issue 34497). `offers_logprobs` is known
    after `open`, and so is `model`, by default the first one that the server lists.
    """

    url: str
    client: httpx.AsyncClient
    model: str | None = None
    has_key: bool = False
    asks_without: bool = False
    concurrency: int = 4
    offers_logprobs: bool = True
    num_requests: int = 0
    _slots: asyncio.Semaphore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")) or not base.partition("://")[2]:
            raise ForedraftError(f"{self.url!r} is not an address; expected http://HOST:PORT, with or without /v1")
        self.url = base
        self._slots = asyncio.Semaphore(self.concurrency)

    async def open(self) -> None:
        """Find the model's name, and whether log-probabilities come with a completion. Raises EndpointError."""
        if self.model is None:
            listed = await self._send("GET", "/v1/models")
            try:
                self.model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EndpointError(f"{self.url}/v1/models lists no model; give its name with --model") from None
        try:
            self.offers_logprobs = bool((await self.complete("One two three", 2)).tokens)
        except EndpointError as error:
            if error.status not in (400, 422, 501):
                raise
            self.offers_logprobs = False  # refused, as by servers that cannot have them together with speculation
            await self.complete("One two three", 2)

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "model": self.model, "logprobs": self.offers_logprobs, "requests": self.num_requests}

    async def complete(self, prompt: str, max_tokens: int) -> Completion:
        """Return the greedy completion of a prompt. Raises EndpointError."""
        answers = [
            _read_completion(
                await self._send("POST", "/v1/completions", self._body(prompt, max_tokens, logprobs)), self.url
            )
            for logprobs in ([True, False] if self.offers_logprobs and self.asks_without else [self.offers_logprobs])
        ]
        return answers[0] if answers[0].text == answers[-1].text else answers[-1]

    def curl(self, prompt: str, max_tokens: int) -> str:
        """Return the command that asks the same; a key is named by its variable."""
        key = ' -H "Authorization: Bearer $FOREDRAFT_API_KEY"' if self.has_key else ""
        body = self._body(prompt, max_tokens, self.offers_logprobs and not self.asks_without)
        text = shlex.quote(json.dumps(body, ensure_ascii=False))
        return f"curl {shlex.quote(f'{self.url}/v1/completions')}{key} -H 'Content-Type: application/json' -d {text}"

    def _body(self, prompt: str, max_tokens: int, logprobs: bool) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return body | ({"logprobs": NUM_LOGPROBS} if logprobs else {})

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer; ask again while the server is busy or cannot be reached."""
        async with self._slots:
            for attempt in range(MAX_TRIES - 1):
                try:
                    return await self._exchange(method, f"{self.url}{path}", body)
                except EndpointError as error:
                    if not error.may_pass:
                        raise
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
            return await self._exchange(method, f"{self.url}{path}", body)

    async def _exchange(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        import httpx

        self.num_requests += 1
        content = bytearray()
        try:
            async with self.client.stream(method, url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise EndpointError(f"{url}: the answer has more than {MAX_ANSWER_BYTES:,} bytes")
        except httpx.TimeoutException:
            raise EndpointError(f"{url} does not answer within the limit (--timeout-s)") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(f"{url} cannot be reached: {error or type(error).__name__}", may_pass=True) from None
        text, status = content.decode("utf-8", "replace"), response.status_code
        if status != 200:
            raise EndpointError(f"{url} answered {status}: {_error_message(text)}", status, may_pass=status in BUSY)
        try:
            return parse_json(text, with_infinity=True)
        except ParseError as error:
            raise EndpointError(f"{url}: the answer is not JSON: {error}") from None


def _error_message(text: str) -> str:
    """Return the message of an error in OpenAI's form, or else the beginning of the server's answer."""
    try:
        value = parse_json(text)
        found = value.get("error", value)
        return str(found["message"] if isinstance(found, dict) else found)
    except (ParseError, KeyError, AttributeError):
        return shown(text)


def _read_completion(value: Any, source: str) -> Completion:
    """Read `logprobs` as OpenAI's completions have them (lists side by side), or as its chats do, which
    llama.cpp uses for both."""
    try:
        choice = value["choices"][0]
        text, finish, logprobs = choice["text"], choice.get("finish_reason"), choice.get("logprobs") or {}
        if not isinstance(text, str):
            raise TypeError("text")
        if entries := logprobs.get("content"):
            tokens = [entry["token"] for entry in entries]
            values = [entry["logprob"] for entry in entries]
            tops = [[(top["token"], top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in entries]
        else:
            tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
            tops = [list((top or {}).items()) for top in logprobs.get("top_logprobs") or [{}] * len(tokens)]
        rows = []
        for *own, top in zip(tokens, values, tops, strict=True):
            # Listed with the likeliest first. Of tokens with one text it counts, but for the token itself.
            row = {str(name): min(max(float(value), LEAST_LOGPROB), 0.0) for name, value in [*reversed(top), own]}
            rows.append(row)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EndpointError(f"{source}: the answer is not a completion of OpenAI's interface: {shown(value)}") from None
    return Completion(text, finish, tuple(map(str, tokens)), tuple(rows))
