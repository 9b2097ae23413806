"""`kv_transfer_params`: a router lets this server compute a prompt for another one, or decode a prompt of another one.

```
router ── max_tokens 1, do_remote_decode ──► server A     the answer names A's blocks
router ── the same request, do_remote_prefill and A's blocks ──► server B     waits for the KV, then decodes
```
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Request

from ..answers.frontend import Frontend
from ..answers.reply import Reply
from ..base.errors import ApiError
from .schema import KvTransferParams, Sampled

NAME = "kv_transfer_params"


class KvTransfers:
    """Reads the parameter for the body of `frontend`, and writes it into answers."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._page_size = frontend.body.engines[0].config.page_size
        self._engine_id = secrets.token_hex(8)

    def comes(self, asked: Sampled, prompts: Sequence[np.ndarray], max_tokens: int) -> bool:
        """Return whether the KV of a request comes from another server. Raises ApiError if it cannot."""
        params = _params_of(asked)
        if params is None or not params.do_remote_prefill:
            return False
        if params.num_blocks is None:
            self._frontend.tell_once(f"note: {NAME} without remote_block_ids: such prompts are computed here")
            return False
        if len(prompts) * asked.num_outputs > 1:
            raise ApiError(400, "brings the KV of one output; give one prompt and n 1", param=NAME)
        if max_tokens < 2:
            raise ApiError(
                400, "must be 2 or more where the KV is sent: the first token comes with it", param="max_tokens"
            )
        sent, needed = params.num_blocks * self._page_size, len(prompts[0])
        if sent < needed:
            message = (
                f"{params.num_blocks} remote_block_ids of {self._page_size} tokens are less than the prompt's {needed}"
            )
            raise ApiError(400, f"{message}; both servers need the same page size", param=NAME)
        return True

    def sent(self, request: Request, asked: Sampled, reply: Reply) -> Mapping[str, Any]:
        """Return what an answer says of the KV of its prompt, which another server is to get."""
        params = _params_of(asked)
        if params is None or not params.do_remote_decode:
            return {}
        host, port = request.scope.get("server") or (None, None)
        parameters = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(-(-reply.num_prompt_tokens // self._page_size))),
            "remote_engine_id": self._engine_id,
            "remote_request_id": reply.id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": getattr(self._frontend.body, "tensor_parallel", 1),
        }
        return {NAME: parameters}


def _params_of(asked: Sampled) -> KvTransferParams | None:
    params: KvTransferParams | None = getattr(asked, NAME, None)
    return params
