"""Manifests of KServe as plain ones: what its controllers add to the containers stands in them then.

LLMInferenceService   `vllm serve` of spec.model, with spec.parallelism and the arguments of VLLM_ADDITIONAL_ARGS; a
                      second container where there is spec.prefill
InferenceService      the container of the ServingRuntime that it names, else `vllm serve`, with its own arguments
                      behind, and its storageUri as the model
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OF_HUGGINGFACE = {
    "model_id": "model",
    "model-id": "model",
    "model_name": "served-model-name",
    "model-name": "served-model-name",
}
_NOT_OF_VLLM = ("backend", "task", "model_dir", "model-dir", "http_port", "enable_docs_url")
_SIZES = {"tensor": "--tensor-parallel-size", "data": "--data-parallel-size", "pipeline": "--pipeline-parallel-size"}
MOUNTED = "/mnt/models"  # where KServe puts the weights


def without_kserve(documents: Sequence[Any]) -> list[Any]:
    """Return the documents with plain containers in the place of KServe's."""
    runtimes = {
        str(_at(one, "metadata").get("name")): one for one in documents if _kind(one).endswith("ServingRuntime")
    }
    used = {str(_model(one).get("runtime")) for one in documents if _kind(one) == "InferenceService"}
    found: list[Any] = []
    for one in documents:
        if _kind(one) == "LLMInferenceService":
            found += _llm_services(one)
        elif _kind(one) == "InferenceService" and "modelFormat" in _model(one):
            found.append(_inference_service(one, runtimes.get(str(_model(one).get("runtime")))))
        elif not (_kind(one).endswith("ServingRuntime") and str(_at(one, "metadata").get("name")) in used):
            found.append(one)
    return found


def _kind(document: Any) -> str:
    return str(document.get("kind")) if isinstance(document, dict) else ""


def _at(table: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _model(document: Any) -> dict[str, Any]:
    return _at(document, "spec", "predictor", "model")


def _of_uri(uri: Any) -> str | None:
    """Return the name of a model on Hugging Face; None for a place elsewhere, which has no name that is known."""
    found = re.fullmatch(r"hf://([^:]+)(:.*)?", uri) if isinstance(uri, str) else None
    return None if found is None else found[1].rstrip("/")


def _llm_services(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    spec = _at(document, "spec")
    model = _of_uri(_at(spec, "model").get("uri")) or _at(spec, "model").get("name")
    prefill = _at(spec, "prefill")
    for role, part in (("decode" if prefill else "", spec), *([("prefill", prefill)] if prefill else [])):
        template = _at(part, "template")
        containers = [one for one in template.get("containers", ()) if isinstance(one, dict)]
        container: dict[str, Any] = dict(next((one for one in containers if one.get("name") in ("main", "vllm")), {}))
        sizes = _at(part, "parallelism") or _at(spec, "parallelism")
        words = [
            word
            for key, name in _SIZES.items()
            if sizes.get(key) not in (None, "1")
            for word in (name, str(sizes[key]))
        ]
        words += ["--enable-expert-parallel"] if sizes.get("expert") == "true" else []
        given = [
            one
            for one in container.get("env", ())
            if isinstance(one, dict) and one.get("name") == "VLLM_ADDITIONAL_ARGS"
        ]
        more = shlex.split(str(given[0].get("value", ""))) if given else []
        if "command" not in container:
            words = [*([model] if isinstance(model, str) else []), *words, *_list(container.get("args")), *more]
            container |= {"command": ["vllm", "serve"], "args": words}
        replicas = part.get("replicas", _at(part, "scaling").get("minReplicas"))
        yield {
            "kind": "Deployment",
            "metadata": {"name": role},
            "spec": {
                **({"replicas": replicas} if isinstance(replicas, str) else {}),
                "containers": [{"name": "main", **container}],
            },
        }


def _inference_service(document: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
    given = _model(document)
    model = _of_uri(given.get("storageUri"))
    own = _list(given.get("args"))
    container: dict[str, Any] = {key: given[key] for key in ("image", "command", "env") if key in given}
    if runtime is not None:
        containers = _at(runtime, "spec").get("containers")
        container = {**(containers[0] if isinstance(containers, list) and containers else {}), **container}
    words = [word for word in _list(container.get("args")) if not word.startswith("--served-model-name={{")]
    if "command" not in container and "image" not in container:
        container["command"], own = ["vllm", "serve"], _of_vllm(own)
    words = [word.replace(MOUNTED, model) if model is not None else word for word in [*words, *own]]
    if model is not None and not any(re.match(r"--model(=|$)", word) for word in words):
        words = ["--model", model, *words]
    elif model is None:
        words = [word for word in words if not word.startswith("--model=" + MOUNTED)]
    predictor = _at(document, "spec", "predictor")
    kept = {key: value for key, value in predictor.items() if key != "model"}
    return {**document, "spec": {**kept, "containers": [{"name": "main", **container, "args": words}]}}


def _of_vllm(words: Sequence[str]) -> list[str]:
    """Return the arguments of KServe's server for Hugging Face as vLLM has them; its own ones are left out."""
    found, skips = [], False
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in _NOT_OF_VLLM:
            skips = not equals
        elif word.startswith("--"):
            skips = False
            found.append(f"--{_OF_HUGGINGFACE.get(name, name)}{equals}{value}")
        elif not skips:
            found.append(word)
    return found


def _list(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []
