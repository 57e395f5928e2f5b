"""Figures for Prometheus: requests are counted as they come, sessions are read when somebody asks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.served_model import ServedModel
from service.sessions import Session
from service.stage import Stage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STAGES = [stage for stage in Stage if stage is not Stage.DELETED]

# Metric name -> (key in a session's stats, help). Counters of one session; they end with it.
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "ticks": ("ticks", "Ticks of the control loop"),
    "missed_ticks": ("missed_ticks", "Ticks that came so late that they were left out"),
    "commands_sent": ("commands_sent", "Joint commands put on the wire"),
    "commands_refused": ("commands_refused", "Joint commands the link did not take"),
    "joints_received": ("joints_received", "Joint updates received"),
    "chunks": ("chunks", "Action chunks the policy gave"),
    "chunks_rejected": ("chunks_rejected", "Action chunks that were not finite or of the wrong shape"),
    "late_actions_dropped": ("late_actions_dropped", "Actions dropped because they were late"),
    "starvations": ("starvations", "Times the action queue ran dry"),
    "inferences": ("inference_count", "Inferences"),
    "errors": ("errors", "Failed inferences and rejected chunks"),
}
# The same, counted by a label: metric name -> (key, label, help).
_LABELLED: Mapping[str, tuple[str, str, str]] = {
    "frames_received": ("images_received", "camera", "Frames received"),
    "holds": ("holds", "reason", "Times the robot was held"),
    "inputs_dropped": ("inputs_dropped", "reason", "Frames and joint values that were not usable"),
}
_MODEL_COUNTERS: Sequence[tuple[str, str, Callable[[ServedModel], float]]] = (
    ("forwards", "Forward passes", lambda served: served.forwards),
    ("errors", "Requests for a forward pass that were refused or failed", lambda served: served.errors),
    ("compiles", "Shapes compiled since the start", lambda served: served.compiles),
    ("compile_seconds", "Time spent compiling since the start", lambda served: served.compile_seconds),
    ("forward_seconds", "Time spent computing", lambda served: served.stages["compute"].total),
)


class Metrics:
    """The registry of one app."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], models: Callable[[], Sequence[ServedModel]]):
        self._registry = CollectorRegistry()
        self._registry.register(_Sessions(sessions))
        self._registry.register(_Models(models))
        labels = ("method", "route", "status")
        self._requests = Counter("robojax_requests", "HTTP requests answered", labels, registry=self._registry)
        self._seconds = Histogram(
            "robojax_request_seconds", "Time to answer an HTTP request", ("method", "route"), registry=self._registry
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Sessions(Collector):
    def __init__(self, sessions: Callable[[], Sequence[Session]]):
        self._sessions = sessions

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead: the registry would otherwise collect at once, before there is a server."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All sessions as they are now."""
        sessions = self._sessions()
        statuses = [(session.id, session.status()) for session in sessions]
        stages = GaugeMetricFamily("robojax_sessions", "Sessions by stage", labels=["stage"])
        for stage in _STAGES:
            stages.add_metric([str(stage)], sum(session.stage is stage for session in sessions))
        yield stages
        stats = {name: status.stats for name, status in statuses}
        for metric, (key, text) in _COUNTERS.items():
            family = CounterMetricFamily(f"robojax_{metric}", text, labels=["session"])
            for name, found in stats.items():
                if key in found:
                    family.add_metric([name], _number(found[key]))
            yield family
        for metric, (key, label, text) in _LABELLED.items():
            family = CounterMetricFamily(f"robojax_{metric}", text, labels=["session", label])
            for name, found in stats.items():
                for value, count in _mapping(found.get(key)).items():
                    family.add_metric([name, value], _number(count))
            yield family
        yield _quantiles(
            "robojax_tick_lateness_seconds",
            "How late ticks came, of the newest ones",
            ((name, "tick", _mapping(found.get("tick_lateness_ms"))) for name, found in stats.items()),
        )
        yield _quantiles(
            "robojax_inference_seconds",
            "Time of an inference by stage, of the newest ones",
            (
                (name, stage, _mapping(figures))
                for name, status in statuses
                for stage, figures in _mapping((status.inference_stats or {}).get("stages_ms")).items()
            ),
        )


class _Models(Collector):
    def __init__(self, models: Callable[[], Sequence[ServedModel]]):
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead, as with sessions."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All models as they are now."""
        models = self._models()
        yield GaugeMetricFamily("robojax_models", "Models loaded", value=len(models))
        for metric, text, value in _MODEL_COUNTERS:
            family = CounterMetricFamily(f"robojax_model_{metric}", text, labels=["model"])
            for served in models:
                family.add_metric([served.name], value(served))
            yield family


def _quantiles(name: str, text: str, rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["session", "stage", "quantile"])
    for session, stage, figures in rows:
        for percent, milliseconds in figures.items():
            if milliseconds is not None:
                quantile = f"{float(percent.removeprefix('p')) / 100:g}"
                family.add_metric([session, stage, quantile], _number(milliseconds) / 1e3)
    return family


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _number(found: object) -> float:
    return float(found) if isinstance(found, int | float) else float("nan")
