"""`foredraft generate`: decode text from a checkpoint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..logs import DEFAULT_FORMAT, LogFormat, LogLevel, start_logging
from ..options import output_option, refuse_without_effect
from ..terminal import EXIT_BROKEN_PIPE, discard_output
from .options import (
    Disaggregate,
    GenerationConfig,
    Quiet,
    problems_name_options,
    prompt_option,
    sampling_option,
    session_values,
    with_session_options,
)

if TYPE_CHECKING:
    from ...core.contract.request import Grammar, Request
    from ...gpu.disaggregation.session import DisaggregatedSession
    from ...gpu.session.plan import SessionOptions, SessionPlan
    from ...gpu.session.prompts import PromptEntry, RequestDefaults
    from ...gpu.session.session import DecodeSession
    from ...gpu.session.text import Tokenizer
    from .record import GenerationRecord


class SessionMaker:
    """Plans and opens a session. Checks `disaggregate`, the option's text, before anything is read."""

    def __init__(self, options: SessionOptions, disaggregate: str | None) -> None:
        self._options = options
        self._topology = None
        self._faults = {}
        if disaggregate is not None:
            from ...gpu.disaggregation.topology import WorkerCounts
            from ...gpu.parallel.link import plans_from_environment

            self._topology = WorkerCounts.parse(disaggregate)
            self._devices = self._topology.devices(options.device, options.tensor_parallel)
            self._faults = plans_from_environment()

    def plan(self, longest_request: int) -> SessionPlan:
        if self._topology is None:
            from ...gpu.session.plan import plan_session

            return plan_session(self._options, longest_request)
        from ...gpu.disaggregation.session import plan_disaggregated

        return plan_disaggregated(self._options, self._topology, longest_request)

    @contextmanager
    def open(
        self, plan: SessionPlan, tokenizer: Tokenizer, record: GenerationRecord
    ) -> Iterator[DecodeSession | DisaggregatedSession]:
        """Open a session, and close it with its processes at the end."""
        if self._topology is None:
            from ...gpu.session.session import DecodeSession

            with closing(
                DecodeSession.open(
                    self._options, plan=plan, tokenizer=tokenizer, make_sinks=lambda made: record.make_sinks(made, plan)
                )
            ) as session:
                yield session
            return
        from ...gpu.disaggregation.session import DisaggregatedSession
        from ...gpu.disaggregation.workers import Workers
        from .record import run_facts

        places = self._topology.workers()
        logs = record.worker_logs([place.name for place in places])
        with (
            Workers(places, self._devices) as workers,
            DisaggregatedSession.open(
                plan, workers, tokenizer=tokenizer, faults=self._faults, logs=logs, run=run_facts(plan)
            ) as session,
        ):
            yield session


EXIT_FAILED = 1
STDIN = "-"

# fmt: off
PromptText = Annotated[str | None, prompt_option("--prompt",
    "One prompt; the command streams its output. Default: read standard input.", "TEXT")]
PromptFile = Annotated[Path | None, prompt_option("--prompts",
    'JSONL, each line {"prompt"|"messages"|"tokens": …, "id", "max_tokens", …}; - is standard input.', "FILE")]
Chat = Annotated[bool, prompt_option("--chat/--no-chat",
    "Put a text prompt into the model's chat template, as a user message.")]
MaxTokens = Annotated[int | None, sampling_option("--max-tokens", "Most tokens of an output. Default: 256.")]
Temperature = Annotated[float | None, sampling_option("--temperature",
    "Sampling temperature; 0 decodes greedily. Default: 0.")]
TopP = Annotated[float | None, sampling_option("--top-p",
    "Sample from the most likely tokens whose probabilities add up to this. Default: 1.")]
MinP = Annotated[float | None, sampling_option("--min-p",
    "Exclude tokens that are less likely than this share of the most likely token. Default: 0.")]
PresencePenalty = Annotated[float, sampling_option("--presence-penalty",
    "Subtract this from the logit of each token in the output so far.")]
FrequencyPenalty = Annotated[float, sampling_option("--frequency-penalty",
    "Subtract this from a token's logit for each time that the output has the token.")]
RepetitionPenalty = Annotated[float | None, sampling_option("--repetition-penalty",
    "Make tokens of prompt and output less likely by this factor; 1 changes nothing. Default: 1.")]
JsonSchema = Annotated[Path | None, sampling_option("--json-schema",
    "Allow only output that is JSON by this schema.", "FILE")]
LarkGrammar = Annotated[Path | None, sampling_option("--grammar",
    "Allow only output of this grammar, in Lark's notation.", "FILE")]
TopK = Annotated[int | None, sampling_option("--top-k",
    "Sample from this number of most likely tokens; 0 means all tokens. Default: 0.")]
Seed = Annotated[int, sampling_option("--seed", "Seed of every random draw; equal seeds give equal outputs.")]
Stop = Annotated[list[str] | None, sampling_option("--stop",
    "Text that ends an output; the output does not include it; repeatable.", "TEXT")]
IgnoreEos = Annotated[bool, sampling_option("--ignore-eos",
    "Continue after the end-of-text token, up to --max-tokens.")]
Logprobs = Annotated[bool, output_option("--logprobs",
    "Print the log-probability of each token; the output is then JSON.")]
AsJson = Annotated[bool, output_option("--json",
    "Print a JSON document per prompt, each in a line, as with --prompts; `foredraft simulate --schema generate` has its schema.")]
Stats = Annotated[bool, output_option("--stats",
    "Print accept length, tokens/s and the time of each phase to standard error.")]
Out = Annotated[Path | None, output_option("--out",
    "Write events.jsonl, outputs.jsonl and summary.json to this directory.", "DIR")]
# fmt: on


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of the command that are not options of the session."""

    prompt: str | None
    prompts: Path | None
    chat: bool
    as_json: bool
    stats: bool
    out: Path | None
    quiet: bool
    disaggregate: str | None = None
    grammar: Path | None = None

    @property
    def source(self) -> str:
        """The source of the prompts, as messages name it."""
        if self.prompt is not None:
            return "--prompt"
        return str(self.prompts) if self.prompts not in (None, Path(STDIN)) else "<standard input>"


@problems_name_options
@with_session_options()
def generate(
    session: Mapping[str, Any],
    prompt: PromptText = None, prompts: PromptFile = None, chat: Chat = False, max_tokens: MaxTokens = None,
    temperature: Temperature = None, top_p: TopP = None, top_k: TopK = None, min_p: MinP = None, seed: Seed = 0,
    stop: Stop = None, generation_config: GenerationConfig = "auto",
    presence_penalty: PresencePenalty = 0.0, frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = None, json_schema: JsonSchema = None, grammar: LarkGrammar = None,
    ignore_eos: IgnoreEos = False, logprobs: Logprobs = False, as_json: AsJson = False, stats: Stats = False,
    out: Out = None, disaggregate: Disaggregate = None, quiet: Quiet = False,
    log_level: LogLevel = None, log_format: LogFormat = DEFAULT_FORMAT,
) -> None:  # fmt: skip
    """Decode text from a checkpoint, speculatively.

    Without a draft, the command takes drafts from earlier text on a CPU (NGRAM);
    --algorithm NONE decodes plainly. Greedy output is the same with every draft,
    up to ties in floating point. The command streams the text of a single prompt.
    With --prompts it prints a line of JSON for each line of the file, in the same
    order.

        foredraft generate --model models/target --prompt "def fib(n):" --stats
        foredraft generate --model models/target --draft models/eagle3 --topk 4 \\
            --prompt "def fib(n):" --stats
        foredraft generate --model models/chat --chat --prompt "Why sing?"
        foredraft generate --model models/target --algorithm NGRAM --steps 7 \\
            --prompts prompts.jsonl --out runs/ngram > outputs.jsonl
        foredraft audit --replay runs/ngram
        foredraft generate --model models/target --draft models/eagle3 \\
            --disaggregate prefill=1,decode=1 --prompts prompts.jsonl
        foredraft generate --model models/chat --chat --prompt "A user as JSON." \\
            --json-schema user.schema.json

    Ctrl-C ends all requests with the tokens that they have; the exit code is 130.
    On bad input the command prints one message before it reads any weight, and
    exits with code 2.
    """
    from ...gpu.session.plan import SessionOptions, with_look_up
    from ...gpu.session.prompts import RequestDefaults, defaults_note, file_defaults

    start_logging(log_level, log_format)
    options = SessionOptions(**session_values(session), seed=seed)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    sampling["repetition_penalty"] = repetition_penalty
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    given |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    given |= {"stop": tuple(stop or ()), "logprobs": logprobs, "ignore_eos": ignore_eos}
    own = RequestDefaults(**given, grammar=_grammar(json_schema, grammar))
    of_file = {n: v for n, v in file_defaults(options.model, generation_config).items() if n not in given}
    if note := defaults_note(options.model, of_file, asdict(own)):
        print(f"foredraft: note: {note}", file=sys.stderr)
    as_json = as_json or logprobs or prompts is not None
    code = _run(
        with_look_up(options),
        own,
        of_file,
        _Asked(prompt, prompts, chat, as_json, stats, out, quiet, disaggregate, json_schema or grammar),
    )
    if code:
        raise typer.Exit(code)


def _grammar(json_schema: Path | None, grammar: Path | None) -> Grammar | None:
    """Return the grammar in a file, None without one. Raises ConfigError."""
    from ...core.contract.request import Grammar
    from ...core.errors import ConfigError
    from ...observe.input_files import read_text

    if json_schema is not None and grammar is not None:
        raise ConfigError.of("<arguments>", "--json-schema", "contradicts --grammar: give one of them")
    if json_schema is not None:
        return Grammar("json_schema", read_text(json_schema))
    return None if grammar is None else Grammar("lark", read_text(grammar))


def _run(options: SessionOptions, own: RequestDefaults, of_file: Mapping[str, Any], asked: _Asked) -> int:
    """Check all input, load the weights, decode; return the exit code. `own`: what the options ask for; `of_file`: the
    values of a file for what they leave open."""
    from ...gpu.models.config import ModelConfig
    from ...gpu.session.plan import refuse_without_effect as refuse_options_without_effect
    from ...gpu.session.session import check_lengths, check_vocabulary
    from ...gpu.session.text import Tokenizer
    from .display import Display, stats_text
    from .record import GenerationRecord

    maker = SessionMaker(options, asked.disaggregate)
    tokenizer = Tokenizer.load(options.model)
    requests, places = _requests(tokenizer, own, of_file, asked, ModelConfig.from_directory(options.model).vocab_size)
    plan = maker.plan(max(request.prompt.length + request.max_tokens for request in requests))
    refuse_options_without_effect(plan.options, plan.algorithm, plan.device)
    for notice in plan.notices:
        print(f"foredraft: note: {notice}", file=sys.stderr)
    check_vocabulary(tokenizer, plan)
    check_lengths(requests, plan, asked.source, places)
    display = Display([request.request_id for request in requests], as_json=asked.as_json, quiet=asked.quiet)
    if asked.disaggregate is not None and not asked.quiet and sys.stderr.isatty():
        print(f"starting {asked.disaggregate} …", file=sys.stderr)
    with GenerationRecord(asked.out) as record, maker.open(plan, tokenizer, record) as session:
        with _broken_pipe_ends_quietly(), _asked_to_stop() as received:
            with closing(session.stream(requests, lambda: bool(received))) as deltas:
                for delta in deltas:
                    display.add(delta)
            display.close()
        session.close(complete=not received)
        record.finish(display.outputs, session.stats(), session.plan, complete=not received)
    failed = [output for output in display.outputs if output.finish in ("error", "refused")]
    for output in failed:
        print(f"foredraft: request {output.request_id!r} {output.finish}: {output.message}", file=sys.stderr)
    for output in display.outputs:
        if output.finish == "length" and output.message and not asked.quiet:
            print(f"foredraft: note: request {output.request_id!r} ends early: {output.message}", file=sys.stderr)
    if asked.stats:
        print(stats_text(session.stats(), session.plan), file=sys.stderr)
    if received:
        print("foredraft: interrupted; the outputs end early", file=sys.stderr)
        return 128 + received[0]
    return EXIT_FAILED if failed else 0


def _requests(
    tokenizer: Tokenizer, own: RequestDefaults, of_file: Mapping[str, Any], asked: _Asked, vocab_size: int
) -> tuple[tuple[Request, ...], dict[str, str]]:
    """Return the requests, and the line of the file that each comes from."""
    from ...core.errors import ConfigError, Problem
    from ...gpu.session.grammar import check_grammar
    from ...gpu.session.prompts import PromptEntry, make_requests, read_prompt_file, read_prompts

    defaults, problems = replace(own, **of_file), own.problems()
    if asked.prompt is not None and asked.prompts is not None:
        problems.append(Problem("--prompts", "contradicts --prompt: give one of them"))
    if asked.prompt is None and asked.prompts is None and sys.stdin.isatty():
        problems.append(Problem("--prompt", "is missing; give it, or --prompts FILE, or pipe a text into the command"))
    if problems:
        raise ConfigError("<arguments>", problems)
    if asked.prompts is None:
        text = asked.prompt if asked.prompt is not None else _standard_input()
        entries: tuple[PromptEntry, ...] = (PromptEntry("1", "", prompt=text),)
    elif asked.prompts == Path(STDIN):
        entries = read_prompts(_standard_input().split("\n"), asked.source)
    else:
        entries = read_prompt_file(asked.prompts)
    if defaults.grammar is not None:
        check_grammar(defaults.grammar, tokenizer, vocab_size, str(asked.grammar))
    requests = make_requests(entries, tokenizer, defaults, asked.source, chat=asked.chat, vocab_size=vocab_size)
    all_greedy = all(request.sampling.is_greedy for request in requests)
    greedy = "every request is greedy; give --temperature"
    refuse_without_effect(
        ("--top-p", own.top_p != 1.0 and all_greedy, greedy),
        ("--top-k", own.top_k != 0 and all_greedy, greedy),
        ("--min-p", own.min_p != 0 and all_greedy, greedy),
        *_overridden(entries, own),
        ("--chat", asked.chat and all(entry.prompt is None for entry in entries), "no prompt of the file is a text"),
    )
    return requests, {entry.id: entry.place for entry in entries}


def _overridden(entries: Sequence[PromptEntry], defaults: RequestDefaults) -> Iterator[tuple[str, bool, str]]:
    """Yield a rule for each option that every line of the prompts has a value of its own for."""
    from ...gpu.session.prompts import SAMPLING

    for name in ("max_tokens", *SAMPLING, "stop"):
        usual = type(defaults).__dataclass_fields__[name].default
        overridden = all(name in (entry.settings or ()) for entry in entries)
        option = f"--{name.replace('_', '-')}"
        yield option, getattr(defaults, name) != usual and overridden, f"every prompt has a {name} of its own"


def _standard_input() -> str:
    from ...core.errors import ConfigError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError.of("<standard input>", "", f"is not UTF-8: {error}") from None


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM, so that steps in flight are committed; let the second interrupt.
    Yields the signals received."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _broken_pipe_ends_quietly() -> Iterator[None]:
    """Exit without a message when the reader of the output stops reading, as `head` does."""
    try:
        yield
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
