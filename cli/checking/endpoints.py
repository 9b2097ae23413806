"""`foredraft check server`: does an endpoint with speculative decoding give the greedy text of one without?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import Decorator, only_with, print_document, with_options
from ..progress import LINE_EVERY_S, StatusLine

if TYPE_CHECKING:
    from ...serve.lossless.difference import AnswerDifference
    from ...serve.lossless.trial import LosslessTrial, PromptDifference

EXIT_ERROR_FOUND = 1
MAX_LISTED = 5
MAX_SHOWN = 48  # characters of a text

SERVER = "server"
asking_option = only_with(SERVER)
MARGIN = (
    "Two log-probabilities at most this far apart are a tie; bfloat16 logits between 16 and 32 have steps of 0.125."
)
PROMPTS = 'One prompt per line, or .jsonl with {"prompt": TEXT}. Default: a built-in set.'
# fmt: off
Against = Annotated[str | None, asking_option("--against",
    "Endpoint of the same model without speculation. Default: the endpoint itself, asked one prompt at a time.", "URL")]
Model = Annotated[str | None, asking_option("--model",
    "Model to ask for. Default: the first model that the endpoint lists.")]
Prompts = Annotated[Path | None, asking_option("--prompts", PROMPTS, "FILE")]
MaxTokens = Annotated[int, asking_option("--max-tokens", "Most tokens of an answer.", min=1)]
Repeat = Annotated[int, asking_option("--repeat", "Number of answers to each prompt.", min=1, max=1000)]
TieMargin = Annotated[float, asking_option("--tie-margin", MARGIN, min=0)]
Concurrency = Annotated[int, asking_option("--concurrency", "Most requests at once to each endpoint.", min=1, max=256)]
TimeoutS = Annotated[float, asking_option("--timeout-s", "Seconds to wait for the next part of an answer.", min=0.1)]
ApiKey = Annotated[str | None, asking_option("--api-key",
    "Key to send to the endpoints. The variable is safer: other users can see a command line.",
    "KEY", envvar="FOREDRAFT_API_KEY")]
Quiet = Annotated[bool, asking_option("--quiet -q", "Print no progress on standard error.")]
# fmt: on


def _asking_options(
    *,
    against: Against = None,
    model: Model = None,
    prompts: Prompts = None,
    max_tokens: MaxTokens = 64,
    repeat: Repeat = 1,
    tie_margin: TieMargin = 0.25,
    concurrency: Concurrency = 4,
    timeout_s: TimeoutS = 120.0,
    api_key: ApiKey = None,
    quiet: Quiet = False,
) -> None:
    """Declare the options."""


with_asking_options: Decorator = with_options("asking", _asking_options)


def check_endpoint(
    url: str | None, as_json: bool, *, against: str | None, model: str | None, prompts: Path | None, max_tokens: int, repeat: int,
    tie_margin: float, concurrency: int, timeout_s: float, api_key: str | None, quiet: bool,
) -> None:  # fmt: skip
    """Compare the greedy texts of the endpoint at `url` with those of `against`, or with its own; print the result.

    Raises typer.Exit if an error was found, ConfigError without an address, and ForedraftError if a prompt has no
    answer.
    """
    import asyncio
    from dataclasses import asdict

    from ...core.errors import ConfigError, ForedraftError
    from ...serve.lossless.endpoint import Endpoint, make_client
    from ...serve.lossless.prompts import BUILT_IN, read_prompts
    from ...serve.lossless.trial import LosslessTrial

    if url is None:
        message = "is missing: the address of the endpoint, as in foredraft check server URL --against URL"
        raise ConfigError.of("<arguments>", "URL", message)
    urls = [url] if against is None else [against, url]
    texts = BUILT_IN if prompts is None else read_prompts(prompts)
    line = StatusLine(quiet, redraw_every_s=0.1, line_every_s=LINE_EVERY_S)

    def progress(text: str) -> None:
        if line.due_s() is not None:
            line.show(text)

    async def run() -> LosslessTrial:
        async with make_client(api_key, timeout_s) as client:
            ends = [Endpoint(one, client, model, bool(api_key), one is urls[-1], concurrency) for one in urls]
            trial = LosslessTrial(ends[0], ends[-1], texts, max_tokens, repeat, tie_margin, progress)
            await trial.run()
        return trial

    try:
        trial = asyncio.run(run())
    finally:
        line.clear()
    if as_json:
        from ..documents.checking import LosslessDocument

        settings = {"prompts": len(texts), "max_tokens": max_tokens, "repeat": repeat, "tie_margin": tie_margin}
        endpoints = {name: one.to_json() for name, one in trial.endpoints.items()}
        print_document(LosslessDocument(not trial.outcome.count("error"), endpoints, settings, asdict(trial.outcome)))
    else:
        typer.echo("\n".join(_report(trial)))
    if trial.outcome.count("error"):
        raise typer.Exit(EXIT_ERROR_FOUND)
    if failures := trial.outcome.failures:
        message = (
            f"{count_of(len(failures), 'request')} without an answer, whose prompts were not compared: {failures[0]}"
        )
        raise ForedraftError(message)


def _report(trial: LosslessTrial) -> list[str]:
    outcome, is_pair, lines = trial.outcome, len(trial.endpoints) == 2, []
    for name, endpoint in trial.endpoints.items():
        without = "" if endpoint.offers_logprobs else " (no log-probabilities: only text is compared)"
        lines.append(f"{name:<12} {endpoint.url}  {endpoint.model}{without}")
    against = "" if is_pair else ", asked together, against those asked alone"
    lines.append(f"{count_of(outcome.num_compared, 'answer')} of up to {count_of(trial.max_tokens, 'token')}{against}")
    rows = {"same": "the same text", "tie": f"both tokens within {trial.tie_margin:g}: float noise decides"}
    rows |= {"noise": "the plain endpoint gives both texts itself"} if is_pair else {}
    rows |= {"error": "apart by more, or by an unknown margin"}
    counts = {name: outcome.count(name) for name in rows} | {"same": outcome.num_same}
    lines += [f"  {name:<6}{counts[name]:>6,}  {text}" for name, text in rows.items()]
    if outcome.num_tokens:
        lines.append(f"log-probabilities of the same tokens differ by at most {outcome.greatest_shift:.3g}")
    if outcome.num_unlikely:
        what = "were not the most likely ones of their own endpoint: it applies penalties, or accepts wrong tokens"
        lines.append(f"{outcome.num_unlikely:,} of {outcome.num_tokens:,} tokens {what}")
    sides = ("plain", "speculative") if is_pair else ("alone", "together")
    for verdict in rows:
        of_kind = [finding for finding in outcome.findings if finding.verdict == verdict]
        lines += [line for finding in of_kind[:MAX_LISTED] for line in _finding_lines(finding, sides)]
        if len(of_kind) > MAX_LISTED:
            lines.append(f"… and {len(of_kind) - MAX_LISTED} more of this kind")
    if (smallest := outcome.smallest) is not None:
        where = _place(smallest.difference, sides)
        lines.append(
            f"smallest prompt, found with {count_of(smallest.num_requests, 'request')}: {smallest.prompt!r}; {where}"
        )
        lines += [f"  {one.curl(smallest.prompt, smallest.max_tokens)}" for one in trial.endpoints.values()]
    words = ("Lossless", "Not lossless") if is_pair else ("The same as itself", "Differs from itself")
    apart = outcome.count("tie") + outcome.count("noise")
    return [*lines, words[bool(outcome.count("error"))] + (f" (ties and noise: {apart})." if apart else ".")]


def _finding_lines(finding: PromptDifference, sides: tuple[str, str]) -> list[str]:
    where = _place(finding.difference, sides)
    lines = [f"{finding.verdict}, prompt {finding.number + 1} {_short(finding.prompt)}: {where}"]
    if finding.verdict != "tie":
        begin = max(finding.difference.num_shared_characters - MAX_SHOWN // 2, 0)
        texts = zip(sides, (finding.plain.text, finding.speculative.text), strict=True)
        lines += [f"  {side:<12} {_short(text[begin:])}" for side, text in texts]
    if finding.alone is not None:
        given = " and ".join(finding.plain_gives_other)
        plain = f"gives the other text when asked {given}" if given else "never gives the other text"
        lines.append(f"  asked again alone, the texts differ in {finding.alone} of 2 tries; the plain endpoint {plain}")
    return lines


def _place(difference: AnswerDifference, sides: tuple[str, str]) -> str:
    tokens = ["the end" if one is None else repr(one) for one in (difference.plain, difference.speculative)]
    margins = [f"{one} ({side})" for one, side in zip(difference.margins, sides, strict=True) if one is not None]
    why = "cut off by a length" if difference.ends_early else f"apart by {', '.join(margins) or 'an unknown margin'}"
    return f"{difference.unit} {difference.position + 1} is {tokens[0]} / {tokens[1]}, {why}"


def _short(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…")
