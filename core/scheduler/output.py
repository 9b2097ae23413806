"""What requests have produced: their tokens, and the per-token outputs that they asked for.

    tokens[row]   [0, prompt_len) prompt · [prompt_len, kv_len] output; tokens[row, kv_len] is the last one, without KV

Where the executor has no tokens (simulated acceptance) only counts are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..algorithm.arrival import Arrival
from ..contract.request import TextDecoder, first_stop_string
from ..contract.step import DecodeResult, PrefillResult
from .config import EngineConfig, EngineSizes
from .life import RequestRecord, RequestState
from .rounds import SettledRounds


class OutputLog:
    """Tokens by request-table row, int32 [rows, row width + 1]; the memory is committed by the system where it is written."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes, text_decoder: TextDecoder | None) -> None:
        self.tracks_tokens = config.track_tokens
        self._decoder = text_decoder
        shape = (config.max_running + 1, sizes.row_width + 1) if config.track_tokens else (0, 0)
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._flat = self._tokens.reshape(-1)

    @property
    def decodes_text(self) -> bool:
        return self._decoder is not None and self.tracks_tokens

    def open(self, record: RequestRecord) -> None:
        """A request has entered: its row begins with its context."""
        if not self.tracks_tokens:
            return
        if record.context is None:
            record.context = record.request.prompt.materialize()
        assert record.context is not None, "an executor with tokens needs prompts with tokens"
        self._tokens[record.row, : len(record.context)] = record.context

    def first_token(self, record: RequestRecord, result: PrefillResult, i: int) -> bool:
        """Keep the token that ends the prefill; says whether it completes a stop string."""
        if not self.tracks_tokens:
            return False
        self._tokens[record.row, record.prefill_len] = result.tokens[i]
        for name in record.request.outputs:
            record.outputs.setdefault(name, []).append(result.outputs[name][i])
        if not record.request.stop_strings:
            return False
        run = self._tokens[record.row, record.prefill_len : record.prefill_len + 1]
        before = self._tokens[record.row, record.prompt_len : record.prefill_len]
        return first_stop_string(self._decoder, before, run, record.request.stop_strings) >= 0

    def arrive(self, record: RequestRecord, arrival: Arrival) -> None:
        """A request joins with the first token that another worker sampled for it."""
        if not self.tracks_tokens:
            return
        if arrival.first_token is not None:
            self._tokens[record.row, record.prefill_len] = arrival.first_token
        for name in record.request.outputs:
            record.outputs.setdefault(name, []).append(arrival.outputs[name])

    def stop_string_cut(
        self, record: RequestRecord, decode: DecodeResult, i: int, kept: int, kv_before: int
    ) -> int | None:
        """Tokens of row i's run up to the end of its first stop string, None if it has none. Rounds are single."""
        if not record.request.stop_strings:
            return None
        before = self._tokens[record.row, record.prompt_len : kv_before + 1]
        found = first_stop_string(self._decoder, before, decode.tokens[0, i, :kept], record.request.stop_strings)
        return None if found < 0 else found + 1

    def log(
        self,
        rows: np.ndarray,
        columns: np.ndarray,
        settled: SettledRounds,
        decode: DecodeResult,
        by_row: Mapping[int, RequestRecord],
    ) -> None:
        """Keep what the rounds delivered to the live `columns` of the batch; one vectorised write for all rounds."""
        kept = settled.kept
        if self.tracks_tokens:
            start = rows * np.int64(self._tokens.shape[1]) + settled.kv_before + 1
            start = start[None, :] if decode.rounds == 1 else start + np.cumsum(kept, axis=0) - kept
            depth = np.arange(decode.tokens.shape[2])
            delivered = depth < kept[:, :, None]  # nothing of rows that have left
            cells = start[:, :, None] + depth
            self._flat[cells[delivered]] = decode.tokens[delivered]
        if decode.outputs is None:
            return
        for i in columns.tolist():
            record = by_row[int(rows[i])]
            for name in record.request.outputs:
                output = record.outputs.setdefault(name, [])
                for number, outputs in enumerate(decode.outputs):
                    output.extend(outputs[name][i, : kept[number, i]])

    def num_delivered(self, record: RequestRecord, kv_len: np.ndarray) -> int:
        """Output tokens so far, over all admissions of the request."""
        if (
            record.state in (RequestState.DECODE, RequestState.TRANSFERRING)
            and record.prefill_committed == record.prefill_len
        ):
            return int(kv_len[record.row]) - record.prompt_len + 1
        return record.emitted_before

    def delivered(self, record: RequestRecord, kv_len: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Number of output tokens, and the tokens int64 themselves where they are known."""
        count = self.num_delivered(record, kv_len)
        if not self.tracks_tokens:
            return count, None
        source = record.context if not record.row else self._tokens[record.row]
        if source is None:
            return count, np.empty(0, dtype=np.int64)
        return count, source[record.prompt_len : record.prompt_len + count].astype(np.int64)

    def context_of(self, record: RequestRecord, kv_len: np.ndarray) -> np.ndarray | None:
        """The tokens of a request with a row, as far as they are known: prompt and, if tracked, output. int64."""
        if not self.tracks_tokens:
            return record.context
        length = record.prompt_len + self.num_delivered(record, kv_len)
        return self._tokens[record.row, :length].astype(np.int64)

    def close(self, record: RequestRecord, kv_len: np.ndarray) -> None:
        """A request leaves its row; the context with which it would enter again stays in its record."""
        emitted = self.num_delivered(record, kv_len)
        if self.tracks_tokens:
            record.context = self.context_of(record, kv_len)
        elif emitted > 0:
            record.context = None  # the output's tokens are unknown; the prompt's are made again when they are needed
        record.emitted_before = emitted
