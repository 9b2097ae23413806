"""The reference executor: real tokens from a hash language model, over a KV pool whose cells know who wrote them."""

from .executor import ReferenceExecutor
from .language_model import HashDraft, HashLanguageModel, expected_outputs, plain_greedy

__all__ = ["HashDraft", "HashLanguageModel", "ReferenceExecutor", "expected_outputs", "plain_greedy"]
