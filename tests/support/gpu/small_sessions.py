"""Options and requests of sessions over the small checkpoints of the fixture `models`."""

from foredraft.gpu.session.prompts import RequestDefaults, make_requests, read_prompts
from foredraft.gpu.session.session import SessionOptions
from foredraft.gpu.session.text import Tokenizer


def options_for(models, draft=None, **options) -> SessionOptions:
    return SessionOptions(models["target"], models[draft] if draft else None, **{"dtype": "float64", **options})


LINES = [
    '{"prompt": "def add(a, b):", "max_tokens": 40}',
    '{"messages": [{"role": "user", "content": "Hi"}], "id": "chat", "logprobs": true, "max_tokens": 9}',
    '{"prompt": "for i in", "temperature": 0.9, "seed": 5, "max_tokens": 20}',
    '{"tokens": [5, 6, 7], "max_tokens": 1}',
]


def requests_of(models, lines=LINES):
    return make_requests(read_prompts(lines, "f"), Tokenizer.load(models["target"]), RequestDefaults(), "f")
