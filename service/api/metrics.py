"""Prometheus metrics of requests, sessions, models, devices and the event loop."""

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.control.robot_io import RobotIO
from service.engines.model_server import ModelServer, ServedModel
from service.loop_watchdog import LoopWatchdog
from service.sessions.store import AnySession, Sessions
from service.stage import Stage
from service.stats import BOUNDS, Recent

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
# Counters with a label: metric name -> (key in a session's stats, label, help).
_LABELLED: Mapping[str, tuple[str, str, str]] = {
    "frames_received": ("images_received", "camera", "Frames received"),
    "holds": ("holds", "reason", "Times the robot was held"),
    "inputs_dropped": ("inputs_dropped", "reason", "Frames and joint values that were not usable"),
}
_ATTEMPTS = 5
_SESSION = re.compile(rb'[{,]session="([^"]*)"')
_PREPARING = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MODEL_COUNTERS: Sequence[tuple[str, str, Callable[[ServedModel], float]]] = (
    ("forwards", "Forward passes", lambda served: served.forwards),
    ("errors", "Requests for a forward pass that were refused or failed", lambda served: served.errors),
    ("compiles", "Shapes compiled since the start", lambda served: served.compiles),
    ("compile_seconds", "Time spent compiling since the start", lambda served: served.compile_seconds),
    ("forward_seconds", "Time spent computing", lambda served: served.stages["compute"].total),
)


class Metrics(Collector):
    """Registry of the metrics of one app, which collects the present values for each request.

    Attributes:
        sessions, models: what is measured; None before the server starts.
    """

    def __init__(self, watchdog: LoopWatchdog | None = None):
        self.sessions: Sessions | None = None
        self.models: ModelServer | None = None
        self._registry = CollectorRegistry()
        self._thread = ThreadPoolExecutor(1, "figures")
        self._is_free = asyncio.Semaphore(1)
        self._next: asyncio.Task[bytes] | None = None
        self._watchdog = watchdog
        self._registry.register(self)
        labels = ("method", "route", "status")
        self._requests = Counter("robojax_requests", "HTTP requests answered", labels, registry=self._registry)
        self._seconds = Histogram(
            "robojax_request_seconds", "Time to answer an HTTP request", ("method", "route"), registry=self._registry
        )
        self._preparing = Histogram(
            "robojax_prepare_seconds",
            "Time to make a policy and its rooms ready, by step",
            ("step",),
            buckets=_PREPARING,
            registry=self._registry,
        )

    def collect(self) -> Iterable[Metric]:
        """Collect the present values."""
        yield from _collect_sessions([] if self.sessions is None else self.sessions.list())
        yield from _collect_models([] if self.models is None else self.models.list())
        yield from _collect_devices({} if self.sessions is None else self.sessions.engine.get_stats())
        if self._watchdog is not None:
            yield from _collect_stalls(self._watchdog)

    def count_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def record_preparation(self, steps: Mapping[str, float]) -> None:
        """Record the steps of a session's preparation, in seconds."""
        for step, seconds in steps.items():
            self._preparing.labels(step.replace(" ", "_")).observe(seconds)

    async def text(self, own: Collection[str] | None = None) -> bytes:
        """Return metrics in Prometheus's text format, of the ``own`` sessions or all (None).

        One thread builds the text for at most half of the time, and concurrent callers share its result.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._generate_blocking(), name="figures")
        text = await asyncio.shield(self._next)
        if own is None:
            return text
        names = {name.encode() for name in own}
        return await asyncio.get_running_loop().run_in_executor(self._thread, _filter_sessions, text, names)

    async def _generate_blocking(self) -> bytes:
        await self._is_free.acquire()
        self._next = None  # later callers need newer figures than these
        loop, began = asyncio.get_running_loop(), time.monotonic()
        try:
            return await loop.run_in_executor(self._thread, self._generated)
        finally:
            loop.call_later(time.monotonic() - began, self._is_free.release)

    def _generated(self) -> bytes:
        for _ in range(_ATTEMPTS):
            # A session that is added or removed at the same time raises RuntimeError.
            with suppress(RuntimeError):
                return generate_latest(self._registry)
        return generate_latest(self._registry)


def _filter_sessions(text: bytes, own: Collection[bytes]) -> bytes:
    found = ((line, _SESSION.search(line)) for line in text.splitlines(keepends=True))
    return b"".join(line for line, session in found if session is None or session[1] in own)


def _collect_sessions(sessions: Sequence[AnySession]) -> Iterable[Metric]:
    statuses = [(session.id, session.status()) for session in sessions]
    stages = GaugeMetricFamily("robojax_sessions", "Sessions by stage", labels=["stage"])
    for stage in _STAGES:
        stages.add_metric([str(stage)], sum(session.stage is stage for session in sessions))
    yield stages
    protocols = GaugeMetricFamily(
        "robojax_session_protocol", "1 for the protocol of the session's robot", labels=["session", "protocol"]
    )
    for session in sessions:
        if session.protocol is not None:
            protocols.add_metric([session.id, session.protocol], 1)
    yield protocols
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
    yield _histogram(
        "robojax_tick_lateness_seconds",
        "How late ticks came",
        ("session",),
        (((session.id,), session.robot_io.controller.lateness) for session in sessions if session.robot_io),
    )
    yield _histogram(
        "robojax_stage_seconds",
        "Time from a picture to its plan, by stage: age of the picture at the request, waiting for the device, "
        "transfer to it, computing, transfer back, the whole inference, the whole inference for the control loop",
        ("session", "stage"),
        (
            ((session.id, stage), figures)
            for session in sessions
            if session.robot_io
            for stage, figures in _stages(session.robot_io).items()
        ),
    )


def _stages(robot_io: RobotIO) -> Mapping[str, Recent]:
    inference = {stage: figures for stage, figures in robot_io.runner.seconds.items() if stage != "total"}
    whole = {"inference": robot_io.runner.seconds["total"], "answer": robot_io.controller.latency}
    return {"frame_age": robot_io.runner.frame_age, **inference, **whole}


def _collect_models(models: Sequence[ServedModel]) -> Iterable[Metric]:
    yield GaugeMetricFamily("robojax_models", "Models loaded", value=len(models))
    for metric, text, value in _MODEL_COUNTERS:
        family = CounterMetricFamily(f"robojax_model_{metric}", text, labels=["model"])
        for served in models:
            family.add_metric([served.name], value(served))
        yield family


def _collect_devices(facts: Mapping[str, Any]) -> Iterable[Metric]:
    labels = ["device", "lane"]
    load = GaugeMetricFamily("robojax_device_load", "Share of the newest seconds in use", labels=labels)
    waiting = GaugeMetricFamily("robojax_device_waiting", "Inferences that wait", labels=labels)
    failed = GaugeMetricFamily("robojax_device_failed", "Whether it is not used any more", labels=labels)
    batches = CounterMetricFamily("robojax_batches", "Batches by padded size", labels=[*labels, "size"])
    for lane, figures in enumerate(facts.get("devices", ())):
        values = [figures["device"] or "", str(lane)]
        load.add_metric(values, figures["load"])
        waiting.add_metric(values, figures["waiting"])
        failed.add_metric(values, float(figures["failed"] is not None))
        for size, count in figures["batches"].items():
            batches.add_metric([*values, size], count)
    yield from (load, waiting, failed, batches)
    yield GaugeMetricFamily(
        "robojax_promised_load", "Devices' time promised to sessions", value=facts.get("promised_load", 0)
    )


def _collect_stalls(watchdog: LoopWatchdog) -> Iterable[Metric]:
    blocked, paused = watchdog.blocked, watchdog.paused
    for name, text, value in (
        ("loop_blocked", "Times that the event loop was blocked for 250 ms or longer", blocked.count),
        ("loop_blocked_seconds", "Time that the event loop was blocked so", blocked.seconds),
        ("process_paused", "Times that the whole process stood still for so long", paused.count),
        ("process_paused_seconds", "Time that the whole process stood still so", paused.seconds),
    ):
        yield CounterMetricFamily(f"robojax_{name}", text, value=value)


def _histogram(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Recent]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, figures in rows:
        counts = accumulate(figures.histogram)
        buckets = [(bound, count) for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True)]
        family.add_metric(list(values), buckets, figures.total)
    return family


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _number(found: object) -> float:
    return float(found) if isinstance(found, int | float) else float("nan")
