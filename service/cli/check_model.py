"""``robojax check`` of a diffusers folder: what it is, which inputs it takes, how fast it is."""

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from jaxmodels import LoadedModel
    from service.measurement import Speed


def is_model(path: str, revision: str | None, subfolder: str | None, prefix: str | None) -> bool:
    """Whether this is a model of diffusers; what cannot be told is taken for a policy, whose errors say more.

    Raises:
        HubError: a repo cannot be fetched.
    """
    import jaxmodels
    from jaxmodels.errors import CheckpointError

    try:
        return prefix is not None or jaxmodels.is_model(path, revision, subfolder)
    except CheckpointError:
        return False


def check_model(
    path: str,
    revision: str | None,
    dtype: str | None,
    device: str | None,
    subfolder: str | None,
    prefix: str | None,
    runs: int,
    as_json: bool,
    status: "Status",
) -> None:
    """Load it, time it, print it.

    Raises:
        JaxModelsError: it cannot be loaded.
    """
    import jaxmodels
    from service.measurement import measure_model

    def tell(stage: str) -> None:
        status.update(f"{stage} {path} ...")

    model = jaxmodels.load_model(path, revision, dtype, device, subfolder=subfolder, prefix=prefix, on_progress=tell)
    status.update("compiling and timing ...")
    speed = measure_model(model, runs=runs)
    status.stop()
    if as_json:
        typer.echo(json.dumps(_facts(model, speed), indent=2))
    else:
        _show(model, speed)


def _facts(model: "LoadedModel", speed: "Speed") -> dict[str, Any]:
    return {
        **model.description,
        "forward_ms": {"p50": speed.p50 * 1e3, "p99": speed.p99 * 1e3, "runs": speed.runs},
        "stages_ms": {stage: seconds * 1e3 for stage, seconds in speed.stages.items()},
        "compile_s": speed.compile,
        "timed_with": {name: list(array.shape) for name, array in model.example().items()},
    }


def _show(model: "LoadedModel", speed: "Speed") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    facts = model.description
    stages = ", ".join(f"{stage} {seconds * 1e3:.2f}" for stage, seconds in speed.stages.items())
    config = facts["config"]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    rows = [
        ("type", f"{facts['class']} with {facts['kind']} input"),
        ("size", f"{config['num_layers']} layers, {width} wide, {config['num_attention_heads']} heads"),
        ("parameters", f"{facts['parameters'] / 1e6:.2f} M, {facts['bytes'] / 1e6:.1f} MB in {facts['dtype']}"),
    ]
    for entry in facts["inputs"]:
        need = "" if entry["required"] else "; may be left out"
        rows.append(("input", f"{entry['name']} {_shape(entry)} {entry['dtype']}: {entry['note']}{need}"))
    rows += [("output", f"{entry['name']} {_shape(entry)} {entry['dtype']}") for entry in facts["outputs"]]
    timed = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in model.example().items())
    rows += [
        ("device", facts["device"]),
        ("timed with", timed),
        ("forward", f"p50 {speed.p50 * 1e3:.2f} ms, p99 {speed.p99 * 1e3:.2f} ms ({speed.runs} runs; {stages})"),
        ("compile", f"{speed.compile:.2f} s"),
    ]
    table = Table(show_header=False, show_edge=False, pad_edge=False)
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    Console(highlight=False).print(table)


def _shape(entry: dict[str, Any]) -> str:
    return f"({', '.join(map(str, entry['shape']))})"
