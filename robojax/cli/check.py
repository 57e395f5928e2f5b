"""Command `check`: inspects a policy or model and measures its speed, without a robot."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from robojax.cli.app import DTYPE_HELP, LEROBOT_HELP, RENAME_HELP, Code, fail, print_facts, print_table, read_rename
from robojax.cli.gates import Gates, measure_gates, show_gates

if TYPE_CHECKING:
    import numpy as np

    from jaxmodels import LoadedModel, Policy, Requirements
    from jaxmodels.types import StageTime
    from service.inference.loaded_policy import Policy as ServedPolicy


SMALL_DTYPES = ("int8", "fp8", "int8-weights")
Fit = Literal["fits", "fits, thinking less often", "does not fit"]


@dataclass(frozen=True)
class Speed:
    """Seconds of one inference or forward pass, numpy to numpy, after warm-up.

    Attributes:
        compile: seconds of compilation.
        stages: median seconds by stage.
        runs: number of measurements.
    """

    compile: float
    p50: float
    p99: float
    stages: Mapping[str, float]
    runs: int


@dataclass(frozen=True)
class CheckVerdict:
    """Whether a policy is fast enough for ``rate`` actions per second.

    Attributes:
        budget: seconds between the observations that the policy was trained for.
        covered: seconds that one chunk covers.
    """

    rate: float
    fit: Fit
    budget: float
    covered: float


def make_observation(requirements: "Requirements", seed: int = 0) -> "dict[str, np.ndarray]":
    """Make an observation that the policy accepts: noise in the images, zeros elsewhere; batch of 1."""
    import numpy as np

    from service.inference.loaded_policy import task_input

    random, steps = np.random.default_rng(seed), requirements.observation_steps
    leading = (1,) if steps == 1 else (1, steps)
    observation: dict[str, np.ndarray] = {
        f"observation.images.{camera}": random.integers(0, 256, (*leading, height, width, 3), np.uint8)
        for camera, (height, width) in requirements.cameras.items()
    }
    if requirements.state is not None:
        observation["observation.state"] = np.zeros((*leading, requirements.state), np.float32)
    if requirements.environment_state is not None:
        observation["observation.environment_state"] = np.zeros((*leading, requirements.environment_state), np.float32)
    return observation | (task_input("go") if requirements.language else {})


def measure_policy(
    policy: "ServedPolicy",
    runs: int,
    *,
    seconds: float = 10.0,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Compile a policy for its own sizes, warm up, then time at most ``runs`` inferences or ``seconds``."""
    observation = make_observation(policy.requirements)
    act = partial(policy.act, observation)
    return _measure_speed(policy, partial(policy.compile, 1), act, runs, seconds=seconds, warm_up=warm_up, clock=clock)


def measure_model(model: "LoadedModel", runs: int) -> Speed:
    """Compile a model for one example of its own size, then time at most ``runs`` passes or 10 s."""
    inputs = model.example()
    return _measure_speed(model, partial(model.compile, inputs), partial(model.forward, inputs), runs, warm_up=1)


def _measure_speed(
    model: "ServedPolicy | LoadedModel",
    compile: Callable[[], object],
    call: Callable[[], object],
    runs: int,
    *,
    seconds: float = 10.0,
    warm_up: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    import numpy as np

    started = clock()
    compile()
    compiled = clock() - started
    for _ in range(warm_up):
        call()
    samples: list[float] = []
    stages: dict[str, list[float]] = {}
    end = clock() + seconds
    while len(samples) < runs and (clock() < end or len(samples) < 5):
        started = clock()
        call()
        samples.append(clock() - started)
        for stage, spent in model.timings.items():
            stages.setdefault(stage, []).append(spent)
    p50, p99 = np.percentile(samples, (50, 99))
    medians = {stage: float(np.median(spent)) for stage, spent in stages.items()}
    return Speed(compiled, float(p50), float(p99), medians, len(samples))


def assess_speed(requirements: "Requirements", speed: Speed, rate: float) -> CheckVerdict:
    """Return whether a policy of this speed keeps up with ``rate`` actions per second.

    A chunk must last until the next chunk arrives, whose frame is one inference old when its own inference starts. So
    a chunk must cover two inferences and a tick for each. Within the budget, the policy also observes at its own rate.
    """
    steps = 1 if requirements.temporal_ensemble_coeff is not None else requirements.action_steps
    budget, covered = steps / rate, requirements.chunk / rate
    fit: Fit
    if 2 * speed.p99 + 2 / rate > covered and requirements.chunk > 1:
        fit = "does not fit"
    elif speed.p99 > budget:
        fit = "does not fit" if requirements.chunk == 1 else "fits, thinking less often"
    else:
        fit = "fits"
    return CheckVerdict(rate, fit, budget, covered)


def check(
    policy: Annotated[str, typer.Argument(help="Policy folder, or Hub repo id (owner/name)")],
    rate: Annotated[
        float | None, typer.Option(min=0.1, max=1000, help="Rate to keep, in Hz; default: the policy's own, else 20")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Subfolder of a diffusers pipeline, e.g. transformer")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Transformer in a diffusers UNet, e.g. mid_block.attentions.0")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, gpu, cuda:1, tpu:0; default: JAX's choice")] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    limits: Annotated[
        str | None, typer.Option(help="TOML or URDF file with limits of motion; default: the settings' file")
    ] = None,
    observations: Annotated[
        Path | None, typer.Option(help="Recording or dataset for the gates of int8 and fp8; default: seeded values")
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes of the simulated arm for the gates of int8 and fp8")
    ] = 40,
    action_error_percent: Annotated[
        float, typer.Option(min=0, max=100, help="Largest error of actions of int8 and fp8, in % of a joint's range")
    ] = 0.5,
    runs: Annotated[int, typer.Option(min=5, max=100_000, help="Number of inferences to time")] = 100,
    rename: Annotated[list[str] | None, typer.Option(help=RENAME_HELP)] = None,
    lerobot_version: Annotated[Literal["0.4", "0.6"] | None, typer.Option(help=LEROBOT_HELP)] = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Print the least time of each part on GPUs and TPUs instead")
    ] = False,
    batch: Annotated[str | None, typer.Option(help="Batch sizes of --roofline, e.g. 1,4,16; default: 1")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show what a policy needs, its speed on this machine, and whether it keeps a rate.

    Also shows models of diffusers (Transformer2DModel, DiT, PixArt): type, inputs, speed.

    With --dtype int8, fp8 or int8-weights, also shows whether the policy passes the gates of quantized policies. With
    --roofline, shows the least time on GPUs and TPUs instead, and the measured time if this is such a device.

    Exit code 1 if a policy is too slow or fails a gate, 3 if it cannot be loaded.
    """
    from rich.console import Console

    import jaxmodels
    from jaxmodels.errors import ConfigError, HubError, JaxModelsError

    def show_stage(stage: str) -> None:
        status.update(f"{stage} {policy} ...")

    batches = _read_batches(batch, is_used=roofline)
    is_small = dtype in SMALL_DTYPES
    if roofline and dtype not in (None, "float32", "bfloat16"):
        why = "it has a column for 8 bits, and reads no gate"
        fail(Code.USAGE, f"--roofline takes no --dtype {dtype}", why, "leave --dtype out, or give float32 or bfloat16")
    options: dict[str, Any] = {"dtype": None if is_small else dtype, "device": device, "on_progress": show_stage}
    gates: Gates | None = None
    try:
        with Console(stderr=True, highlight=False).status("importing JAX ...") as status:
            if _is_model(policy, revision, subfolder, prefix):
                options["dtype"] = dtype  # Models are not quantized, which their error says.
                if roofline:
                    status.stop()
                    fail(Code.USAGE, f"--roofline cannot describe {policy!r}", "it is a model", "give a policy")
                model = jaxmodels.load_model(policy, revision, subfolder=subfolder, prefix=prefix, **options)
                status.update("compiling and timing ...")
                speed = measure_model(model, runs)
                status.stop()
                _show_model(model, speed, as_json)
                return
            names = read_rename(rename)
            loaded = jaxmodels.load_policy(policy, revision, rename=names, lerobot=lerobot_version, **options)
            reference = loaded
            if is_small:
                loaded = jaxmodels.Policy(loaded.checkpoint, dtype=dtype, device=device)
            status.update("compiling and timing ...")
            if roofline:
                found = compare_roofline(loaded, batches, runs, dtype)
                status.stop()
                typer.echo(json.dumps(found, indent=2)) if as_json else _show_roofline(found)
                return
            speed = measure_policy(loaded, runs)
            status.update("compiling and timing its parts ...")
            parts = loaded.profile_stages(min(runs, 10))
            if is_small:
                status.update("comparing actions and success ...")
                gates = measure_gates(loaded, reference, observations, episodes, action_error_percent / 100)
    except JaxModelsError as error:
        then = "docs/policies/checkpoints.md describes the folder of a policy"
        if isinstance(error, HubError):
            then = "give a folder of LeRobot (config.json, model.safetensors) or of diffusers, or a repo id owner/name"
        elif rename and isinstance(error, ConfigError):
            then = f"robojax check {policy}, without --rename, shows the names of its cameras"
        fail(Code.POLICY, f"policy {policy!r} cannot be used", str(error), then)
    requirements = loaded.requirements
    motion = _limits(requirements, limits)
    verdict = assess_speed(requirements, speed, rate or requirements.rate or 20.0)
    if as_json:
        of_gates = {} if gates is None else {"gates": gates.as_json()}
        typer.echo(json.dumps(_facts(loaded, speed, verdict, parts) | of_gates | motion, indent=2))
    else:
        _show(loaded, speed, verdict, parts)
        _show_limits(motion["limits"], motion["unmatched"])
        if gates is not None:
            show_gates(gates)
    if verdict.fit == "does not fit" or (gates is not None and not gates.passed):
        raise typer.Exit(Code.CHECK)


def _read_batches(text: str | None, *, is_used: bool) -> list[int]:
    sizes = (text or "1").split(",")
    if text is not None and not (is_used and all(size.strip().isdecimal() for size in sizes)):
        why = "wanted integers" if is_used else "only --roofline reads it"
        fail(Code.USAGE, f"--batch is {text!r}", why, "give e.g. --roofline --batch 1,4,16")
    return [int(size) for size in sizes]


def compare_roofline(policy: "Policy", batches: Sequence[int], runs: int, dtype: str | None = None) -> dict[str, Any]:
    """Return the least milliseconds on accelerators, and the measured ones (median of `runs`) on a listed accelerator.

    Args:
        dtype: see `Policy.count_work`.
    """
    import numpy as np

    from jaxmodels import ACCELERATORS

    here = next((each for each in ACCELERATORS if policy.device_kind in each.kinds), None)
    found: dict[str, Any] = {"device": policy.device, "kind": policy.device_kind, "batches": []}
    for batch in batches:
        work = policy.count_work(batch, dtype)
        facts: dict[str, Any] = {**asdict(work), "least": {}, "measured": None}
        for each in ACCELERATORS:
            parts = {part.name: part.bound(each, work.dtype) for part in work.parts}
            facts["least"][each.name] = {
                "parts_ms": {name: seconds * 1e3 for name, (seconds, _) in parts.items()},
                "limits": {name: limit for name, (_, limit) in parts.items()},
                "chunk_ms": work.bound(each) * 1e3,
                "chunk_in_8_bits_ms": work.bound_in_8_bits(each) * 1e3,
                "fits": work.memory < each.memory,
            }
        if here is not None:
            policy.compile(batch)
            chunk = float(np.median([policy.profile(batch) for _ in range(runs)])) * 1e3
            measured = {part.name: part.seconds * part.count * 1e3 for part in policy.profile_stages(10, batch)}
            facts["measured"] = {"accelerator": here.name, "parts_ms": measured, "chunk_ms": chunk}
            facts["measured"]["ratio"] = chunk / facts["least"][here.name]["chunk_ms"]
        found["batches"].append(facts)
    return found


def _show_roofline(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for batch in found["batches"]:
        size, parts, measured = batch["batch"], batch["parts"], batch["measured"]
        console.print(f"\nbatch {size} in {batch['dtype']}, about {batch['memory'] / 1e9:.2f} GB; least milliseconds:")
        columns = ("", *(part["name"] for part in parts), "chunk", "in 8 bits", "chunks/s", "fits")
        rows = []
        for title, key, unit in (("TFLOP", "operations", 1e12), ("GB read", "traffic", 1e9)):
            numbers = [part[key] / unit for part in parts]
            rows.append((title, *(f"{number:.3g}" for number in (*numbers, sum(numbers))), "", "", ""))
        for name, least in batch["least"].items():
            floors = [f"{ms:.3g} {least['limits'][part]}" for part, ms in least["parts_ms"].items()]
            wholes = f"{least['chunk_ms']:.3g}", f"{least['chunk_in_8_bits_ms']:.3g}"
            rows.append((name, *floors, *wholes, f"{1e3 * size / least['chunk_ms']:.0f}", ["no", "yes"][least["fits"]]))
            if measured is not None and measured["accelerator"] == name:
                times = [
                    f"{ms:.3g}, {ms / least['parts_ms'][part]:.1f} times" for part, ms in measured["parts_ms"].items()
                ]
                whole = f"{measured['chunk_ms']:.3g}, {measured['ratio']:.1f} times"
                rows.append(("measured", *times, whole, "", f"{1e3 * size / measured['chunk_ms']:.0f}", ""))
        print_table(columns, rows, numbers=columns[1:-1])
    if not all(batch["measured"] for batch in found["batches"]):
        console.print(f"\nnot measured: no peaks are listed for {found['device']} ({found['kind']})")


def _limits(requirements: "Requirements", file: str | None) -> dict[str, Any]:
    """Return the limits of a session with the present settings, and joints of the limits file that it lacks."""
    from robojax.cli.serve import settings_or_end
    from service.control.joints import create_joint_table
    from service.control.limits import create_motion_limits, read_limits
    from service.errors import ServiceError

    settings = settings_or_end({"limits": file})
    read = None if settings.safety.limits is None else read_limits(settings.safety.limits)
    try:
        table = create_joint_table(
            requirements.action,
            checkpoint=requirements.joint_names,
            ranges=settings.control.joint_ranges,
            is_positional=True,  # Limits can be shown without names.
        )
        limits = create_motion_limits(table, settings.safety, file=read, action_range=requirements.action_range)
        return {"limits": limits.as_json(), "unmatched": list(limits.unmatched)}
    except ServiceError as error:
        then = "docs/robots/safety.md describes the sources of limits"
        fail(Code.USAGE, "the limits do not fit this policy", str(error), then)


def _show_limits(limits: dict[str, dict[str, object]], unmatched: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    console = Console(highlight=False)
    console.print("\nlimits of a session with these settings; step per tick, the others per second (-: none):")
    rows = []
    for name, limit in limits.items():
        *values, origin = limit.values()
        texts = ("-" if value is None else f"{value:g}" for value in values)
        rows.append((name, *texts, Text("unknown", "bold yellow") if origin == "none" else str(origin)))
    numbers = ("low", "high", "step", "velocity", "acceleration", "jerk")
    print_table(("joint", *numbers, "from"), rows, numbers=numbers)
    if unmatched:
        named = escape(", ".join(unmatched))
        console.print(f"[bold yellow]not used[/]: the limits file names {named}, which this policy does not have")


def _describe_speed(speed: Speed, what: str) -> dict[str, Any]:
    return {
        what: {"p50": speed.p50 * 1e3, "p99": speed.p99 * 1e3, "runs": speed.runs},
        "stages_ms": {stage: seconds * 1e3 for stage, seconds in speed.stages.items()},
        "compile_s": speed.compile,
    }


def _facts(policy: "Policy", speed: Speed, verdict: CheckVerdict, parts: Sequence["StageTime"]) -> dict[str, Any]:
    needs, counts = policy.needs, policy.count_parameters()
    parameters = sum(counts.values())
    return {
        "requirements": asdict(policy.requirements),
        "device": policy.device,
        **_describe_speed(speed, "inference_ms"),
        "rate": verdict.rate,
        "budget_ms": verdict.budget * 1e3,
        "chunk_ms": verdict.covered * 1e3,
        "verdict": verdict.fit,
        "parameters": parameters,
        "parameters_by_part": counts,
        "weights_bytes": {"float32": 4 * parameters, "bfloat16": 2 * parameters},
        "dtype": policy.dtype,
        "prefix_tokens": policy.prefix_tokens or None,
        "parts_ms": [{"part": part.name, "ms": part.seconds * 1e3, "times": part.count} for part in parts],
        "lerobot_version": policy.lerobot,
        "memory_bytes": {"load": needs.host, "run": needs.device},
    }


def _show(policy: "Policy", speed: Speed, verdict: CheckVerdict, parts: Sequence["StageTime"]) -> None:
    from rich.console import Console

    requirements = policy.requirements
    cameras = ", ".join(f"{name} {h}x{w}" for name, (h, w) in requirements.cameras.items()) or "none"
    names = requirements.joint_names
    ensemble = requirements.temporal_ensemble_coeff
    needs, counts = policy.needs, policy.count_parameters()
    parameters = sum(counts.values())
    by_part = ": " + ", ".join(f"{part} {count:,}" for part, count in counts.items()) if len(counts) > 1 else ""
    times = [f"{part.name} {part.seconds * 1e3:.2f} ms" + f" x {part.count}" * (part.count > 1) for part in parts]
    rows = {
        "type": requirements.policy_type,
        "LeRobot": None
        if policy.lerobot is None
        else f'format of version {policy.lerobot}; --lerobot-version or "lerobot" in robojax.json choose 0.4 or 0.6',
        "cameras": f"{cameras} (height x width; other sizes are resized)",
        "state": "none" if requirements.state is None else f"{requirements.state} joints",
        "environment": None if requirements.environment_state is None else f"{requirements.environment_state} values",
        "instruction": "required: the policy reads language" if requirements.language else None,
        "action": f"{requirements.action} joints",
        "joints": ", ".join(names)
        if names
        else f"not named by the checkpoint: a session needs joint_names ({requirements.action} names in the order of "
        'its actions), robojax robot needs --policy.joint_names; or write "joint_names" into robojax.json',
        "chunk": f"{requirements.chunk} actions, {requirements.action_steps} of them between observations"
        + (f", ensembled over time ({ensemble:g})" if ensemble is not None else ""),
        "trained for": "no rate given" if requirements.rate is None else f"{requirements.rate:g} Hz",
        "device": policy.device,
        "inference": _format_speed(speed),
        "compile": f"{speed.compile:.2f} s",
        "parts": f"{', '.join(times)} (each compiled separately)" if len(parts) > 1 else None,
        "prefix": f"{policy.prefix_tokens} tokens, computed once per chunk" if policy.prefix_tokens else None,
        "parameters": f"{parameters:,}{by_part}",
        "weights": f"{4e-6 * parameters:,.1f} MB in float32, {2e-6 * parameters:,.1f} MB in bfloat16; "
        f"here {policy.dtype}",
        "memory": f"about {needs.host / 1e6:,.0f} MB to load, {needs.device / 1e6:,.0f} MB to run",
    }
    print_facts((name, value) for name, value in rows.items() if value is not None)
    colour = {"fits": "green", "does not fit": "red"}.get(verdict.fit, "yellow")
    Console(highlight=False).print(
        f"[bold {colour}]{verdict.fit}[/bold {colour}] at {verdict.rate:g} Hz: "
        f"p99 {speed.p99 * 1e3:.1f} ms; {verdict.budget * 1e3:.1f} ms between observations, "
        f"a chunk lasts {verdict.covered * 1e3:.1f} ms"
    )


def _is_model(path: str, revision: str | None, subfolder: str | None, prefix: str | None) -> bool:
    """Whether this is a diffusers model; unclear folders count as policies, whose errors are more helpful.

    Raises:
        HubError: a repo cannot be fetched.
    """
    import jaxmodels
    from jaxmodels.errors import CheckpointError

    try:
        return prefix is not None or jaxmodels.is_model(path, revision, subfolder)
    except CheckpointError:
        return False


def _show_model(model: "LoadedModel", speed: Speed, as_json: bool) -> None:
    facts = model.description
    if as_json:
        timed_with = {name: list(array.shape) for name, array in model.example().items()}
        typer.echo(json.dumps({**facts, **_describe_speed(speed, "forward_ms"), "timed_with": timed_with}, indent=2))
        return
    config = facts["config"]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    rows = [
        ("type", f"{facts['class']} with {facts['kind']} input"),
        ("size", f"{config['num_layers']} layers, {width} wide, {config['num_attention_heads']} heads"),
        ("parameters", f"{facts['parameters'] / 1e6:.2f} M, {facts['bytes'] / 1e6:.1f} MB in {facts['dtype']}"),
    ]
    for entry in facts["inputs"]:
        need = "" if entry["required"] else "; optional"
        rows.append(("input", f"{entry['name']} {_shape(entry)} {entry['dtype']}: {entry['note']}{need}"))
    rows += [("output", f"{entry['name']} {_shape(entry)} {entry['dtype']}") for entry in facts["outputs"]]
    timed = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in model.example().items())
    rows += [
        ("device", facts["device"]),
        ("timed with", timed),
        ("forward", _format_speed(speed)),
        ("compile", f"{speed.compile:.2f} s"),
    ]
    print_facts(rows)


def _format_speed(speed: Speed) -> str:
    stages = ", ".join(f"{stage} {seconds * 1e3:.2f}" for stage, seconds in speed.stages.items())
    return f"p50 {speed.p50 * 1e3:.2f} ms, p99 {speed.p99 * 1e3:.2f} ms ({speed.runs} runs; {stages})"


def _shape(entry: dict[str, Any]) -> str:
    return f"({', '.join(map(str, entry['shape']))})"
