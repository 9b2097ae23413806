"""Writes the metrics of a server as Prometheus reads them, under the names of one of the `STYLES`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ...core.errors import ConfigError, nearest
from ...core.scheduler.config import EngineRole
from ..base.port import RemoteEngine
from .counts import Histogram, ServerMetrics, merged
from .series import STYLES, TOKENS, Series

Labels = Mapping[str, str]
OPENMETRICS = "application/openmetrics-text"
ENGINE_TYPES = {EngineRole.BOTH: "unified", EngineRole.PREFILL: "prefill", EngineRole.DECODE: "decode"}


class Exposition(Collector):
    """Writes `metrics` in a style: foredraft, vllm or sglang. `now_ns` is the time of the body.
    Raises ConfigError for another style."""

    def __init__(
        self,
        metrics: ServerMetrics,
        model: str,
        style: str = "foredraft",
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if style not in STYLES:
            message = f"{style!r} is none of {', '.join(STYLES)}{nearest(style, tuple(STYLES))}"
            raise ConfigError.of("<arguments>", "metrics_as", message)
        self._metrics = metrics
        self._model = model
        self._style = style
        self._now_ns = now_ns
        self._numbers: Sequence[int] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def __call__(self, accept: str = "", engines: Sequence[int] | None = None) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its media type, OpenMetrics if a client accepts it. `engines`: numbers of
        those whose series are wanted; all by default."""
        self._numbers = range(len(self._metrics.engines)) if engines is None else engines
        media_type = choose_encoder(accept)[1].partition("; escaping=")[0]
        encode = openmetrics.generate_latest if media_type.startswith(OPENMETRICS) else generate_latest
        # All names here are legal in every version of the formats. The client's other schemes of escaping turn the
        # colons of samples in OpenMetrics into underscores, but not those of their TYPE lines.
        return encode(self._registry, escaping=openmetrics.ALLOWUTF8), media_type

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics, now_ns = self._metrics, self._now_ns()
        values = {number: metrics.values(number, now_ns) for number in self._numbers}
        for prefix, series in STYLES[self._style]:
            name = f"{prefix}:{series.name}"
            if series.kind == "histogram":
                family: Metric = self._histograms(name, series)
            else:
                kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
                family = kind(name, series.text)
                for labels, value in self._samples(series, values):
                    family.add_sample(name + ("_total" if kind is CounterMetricFamily else ""), dict(labels), value)
            if family.samples:
                yield family

    def _samples(self, series: Series, values: Mapping[int, dict[str, float]]) -> Iterator[tuple[Labels, float]]:
        metrics, key = self._metrics, series.key
        if key == "cache_config":
            for number in values:
                yield self._cache_config(number), 1.0
        elif key == "worker":
            for engine in metrics.engines:
                if isinstance(engine, RemoteEngine):
                    yield {"model_name": self._model, "worker": engine.name}, float(not engine.loss)
        elif key == "adapters":
            if metrics.adapters:
                running, waiting = map(",".join, metrics.adapters_in_use())
                named = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
                yield {"max_lora": str(len(metrics.adapters)), **named}, time.time()
        elif key == "rejected":
            yield {"model_name": self._model, "reason": "max_num_queued_reqs"}, metrics.num_queue_full
        elif key in (of_server := metrics.server_values()):
            yield {"model_name": self._model}, of_server[key]
        elif series.per_engine:
            for number, found in values.items():
                own = self._labels(number)
                if series.label:
                    for label, value in metrics.labelled(number, key).items():
                        yield {**own, series.label: label}, value
                elif key in found:
                    yield own, found[key]
        else:
            yield from self._sums(series, values)

    def _sums(self, series: Series, values: Mapping[int, dict[str, float]]) -> Iterator[tuple[Labels, float]]:
        """Yield the samples of a counter over all engines of a type."""
        sums: Counter[tuple[str, str]] = Counter()
        for number, found in values.items():
            of_labels = self._metrics.labelled(number, series.key) if series.label else {"": found.get(series.key, 0)}
            for label, value in of_labels.items():
                sums[self._type(number), label] += value  # type: ignore[assignment]  # counts are whole numbers
        for (kind, label), value in sums.items():
            own = {"model_name": self._model, "engine_type": kind}
            yield {**own, series.label: label} if series.label else own, value

    def _histograms(self, name: str, series: Series) -> Metric:
        family = HistogramMetricFamily(name, series.text)
        if series.key == "delay":
            self._add(family, {"model_name": self._model}, self._metrics.delay, series)
            return family
        groups: dict[tuple[tuple[str, str], ...], list[Histogram]] = {}
        for number in self._numbers:
            own = self._labels(number) if series.per_engine else self._server_labels(number)
            for (key, label), histogram in tuple(self._metrics.counts[number].histograms.items()):
                if key == series.key:
                    labels = {**own, series.label: label} if series.label else own
                    groups.setdefault(tuple(labels.items()), []).append(histogram)
        for labels_of, histograms in groups.items():
            self._add(family, dict(labels_of), merged(histograms), series)
        return family

    def _add(self, family: Metric, labels: Labels, histogram: Histogram, series: Series) -> None:
        edges = series.buckets
        if edges is TOKENS:
            longest = min(engine.config.context_len for engine in self._metrics.engines)
            edges = tuple(edge for edge in edges if edge <= longest)
        counts = histogram.at_most(edges)
        for edge, number in zip([*map(str, map(float, edges)), "+Inf"], counts, strict=True):
            family.add_sample(f"{family.name}_bucket", {**labels, "le": edge}, number)
        family.add_sample(f"{family.name}_count", dict(labels), counts[-1])
        family.add_sample(f"{family.name}_sum", dict(labels), histogram.total)

    def _type(self, number: int) -> str:
        return ENGINE_TYPES[self._metrics.engines[number].config.role]

    def _server_labels(self, number: int) -> dict[str, str]:
        return {"model_name": self._model, "engine_type": self._type(number)}

    def _labels(self, number: int) -> dict[str, str]:
        if self._style != "sglang":
            return {"model_name": self._model, "engine": str(number)}
        ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        several = {"dp_rank": str(number)} if len(self._metrics.engines) > 1 else {}
        return self._server_labels(number) | ranks | several

    def _cache_config(self, number: int) -> dict[str, str]:
        config = self._metrics.engines[number].config
        known = {
            "block_size": config.page_size,
            "num_gpu_blocks": config.num_pages,
            "enable_prefix_caching": config.prefix_cache,
            "kv_cache_size_tokens": config.page_size * config.num_pages,
        }
        return {"engine": str(number), **{name: str(value) for name, value in known.items()}}
