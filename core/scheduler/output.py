"""Keeps the output of requests: their tokens, and the per-token outputs that they asked for.

    tokens[row]   [0, prompt_len) prompt · [prompt_len, kv_len] output; tokens[row, kv_len] is the last one, without KV

If the executor has no tokens (simulated acceptance), only counts are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..algorithm.arrival import Arrival
from ..contract.request import Request
from ..contract.step import DecodeResult, PrefillResult
from ..contract.text import StreamDecoder, TextDecoder, context_of
from .config import EngineConfig, EngineSizes
from .life import RequestRecord, RequestState
from .rounds import CountedRounds

RecordIn = Callable[[int], RequestRecord]
"""The request in a row."""

_AFTER_PREFILL = (RequestState.DECODE, RequestState.LEAVING, RequestState.TRANSFERRING)


class OutputLog:
    """Tokens by request-table row, int32 [rows, row width + 1].

    The operating system commits memory only where it is written.
    """

    def __init__(
        self, config: EngineConfig, sizes: EngineSizes, kv_len: np.ndarray, text_decoder: TextDecoder | None
    ) -> None:
        """Take `kv_len` int64 [rows]: the committed lengths, which `DecodeRounds` keeps."""
        self.tracks_tokens: bool = config.track_tokens
        self._kv_len = kv_len
        self._decoder = text_decoder
        shape = (config.num_rows + 1, sizes.row_width + 1) if config.track_tokens else (0, 0)
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._flat = self._tokens.reshape(-1)

    def refusal(self, request: Request) -> str:
        """Return the reason why a request cannot get the output that it asks for; an empty text if it can."""
        if request.stop_strings and (self._decoder is None or not self.tracks_tokens):
            return "stop strings need a tokenizer, this engine has none"
        return ""

    def open(self, record: RequestRecord) -> None:
        """Begin the row of a request that has entered with its context."""
        if not self.tracks_tokens:
            return
        if record.context is None:
            record.context = record.request.context()
        assert record.context is not None, "an executor with tokens needs prompts with tokens"
        assert len(record.context) == record.prefill_len + record.has_first_token, "the context is the prefill"
        self._tokens[record.row, : len(record.context)] = record.context

    def first_token(self, record: RequestRecord, result: PrefillResult, i: int) -> bool:
        """Keep the token that ends the prefill. Returns whether it completes a stop string."""
        if not self.tracks_tokens or record.has_first_token:
            return False
        assert result.tokens is not None, "the executor has tokens"
        self._tokens[record.row, record.prefill_len] = result.tokens[i]
        for name in record.request.outputs:
            assert result.outputs is not None, f"the executor has no outputs, asked for {name!r}"
            record.outputs.setdefault(name, []).append(result.outputs[name][i])
        if not record.request.stop_strings:
            return False
        run = self._tokens[record.row, record.prefill_len : record.prefill_len + 1]
        return self._stop_string_in(record, record.prefill_len, run) >= 0

    def arrive(self, record: RequestRecord, arrival: Arrival) -> None:
        """Keep the first token that another worker sampled for a request."""
        if not self.tracks_tokens:
            return
        if arrival.first_token is not None:
            self._tokens[record.row, record.prefill_len] = arrival.first_token
        for name in record.request.outputs:
            record.outputs[name] = [arrival.outputs[name]] if name in arrival.outputs else []

    def stop_string_cuts(
        self, rows: np.ndarray, counted: CountedRounds, decode: DecodeResult, record_in: RecordIn
    ) -> dict[int, int]:
        """Find stop strings in the tokens of a single round.

        Returns, by column, the tokens up to the end of the first one.
        """
        assert decode.tokens is not None, "`refusal` lets stop strings in only with tokens"
        cuts = {}
        for i in _columns(counted):
            record, kv_before = record_in(int(rows[i])), int(counted.kv_before[i])
            if record.request.stop_strings:
                run = decode.tokens[0, i, : counted.kept[0, i]]
                found = self._stop_string_in(record, kv_before + 1, run)
                if found >= 0:
                    cuts[i] = found + 1
        return cuts

    def _stop_string_in(self, record: RequestRecord, begin: int, run: np.ndarray) -> int:
        """Return the index in `run`, the tokens of a row from `begin` on, of the token that completes the first stop
        string in the text of the output, −1 if none does."""
        text = self._text_before(record, begin)
        for i in range(len(run)):
            text.push(run[i : i + 1])
            if text.has_stop:
                return i
        return -1

    def _text_before(self, record: RequestRecord, begin: int) -> StreamDecoder:
        """Return the decoder of a request's output, which has read the tokens of its row before `begin`."""
        text, request = record.text, record.request
        if text is None:
            assert self._decoder is not None, "`refusal` lets stop strings in only with a decoder"
            context = context_of(self._decoder, self._tokens[record.row, : record.prompt_len])
            text = record.text = StreamDecoder(self._decoder, request.stop_strings, context, request.min_tokens)
        text.push(self._tokens[record.row, record.prompt_len + text.num_tokens : begin])
        return text

    def log(self, rows: np.ndarray, counted: CountedRounds, decode: DecodeResult, record_in: RecordIn) -> None:
        """Keep the tokens that the rounds delivered, in one vectorised write."""
        kept = counted.kept
        if self.tracks_tokens:
            assert decode.tokens is not None, "the executor has tokens"
            start = rows * np.int64(self._tokens.shape[1]) + counted.kv_before + 1
            start = start[None, :] if decode.rounds == 1 else start + np.cumsum(kept, axis=0) - kept
            depth = np.arange(decode.tokens.shape[2])
            delivered = depth < kept[:, :, None]  # without rows that have left
            cells = start[:, :, None] + depth
            self._flat[cells[delivered]] = decode.tokens[delivered]
        if decode.outputs is None:
            return
        for i in _columns(counted):
            record = record_in(int(rows[i]))
            for name in record.request.outputs:
                output = record.outputs.setdefault(name, [])
                for number, outputs in enumerate(decode.outputs):
                    output.extend(outputs[name][i, : kept[number, i]])

    def num_delivered(self, record: RequestRecord) -> int:
        """Count the output tokens so far, over all admissions of the request."""
        if _is_prefilled(record):
            return int(self._kv_len[record.row]) - record.prompt_len + 1
        return record.emitted_before + record.has_first_token

    def delivered(self, record: RequestRecord) -> tuple[int, np.ndarray | None]:
        """Return the number of output tokens, and the tokens int64 themselves where they are known."""
        count = self.num_delivered(record)
        if not self.tracks_tokens:
            return count, None
        source = self._tokens[record.row] if record.row else record.context
        if source is None:
            source = record.request.context()
        assert source is not None, "an executor with tokens needs prompts with tokens"
        return count, source[record.prompt_len : record.prompt_len + count].astype(np.int64)

    def context_of(self, record: RequestRecord) -> np.ndarray | None:
        """Return the tokens int64 of a request with a row, prompt and output; None if they are not known.

        Without an executor's tokens the output is that of `Prompt.continued`.
        """
        length = record.prompt_len + self.num_delivered(record)
        if not self.tracks_tokens:
            return None if record.context is None else record.request.continued(length)
        return self._tokens[record.row, :length].astype(np.int64)

    def close(self, record: RequestRecord) -> None:
        """Store the context with which a request would enter again in its record, before it leaves its row."""
        if not _is_prefilled(record):
            return  # its context has not changed since it entered
        record.context = self.context_of(record)
        record.emitted_before, record.has_first_token = self.num_delivered(record), False


def _is_prefilled(record: RequestRecord) -> bool:
    return record.state in _AFTER_PREFILL and record.has_whole_prompt


def _columns(counted: CountedRounds) -> list[int]:
    """Return the columns of a batch to which at least one round has delivered tokens."""
    return np.flatnonzero(counted.present.before).tolist()
