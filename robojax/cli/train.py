"""Command `train`: trains a policy and shows its progress."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from robojax.cli.app import Code, fail
from robojax.cli.train_flags import (
    FLAGS,
    POLICY_PREFIX,
    InvalidFlags,
    ParsedFlags,
    check_fields,
    policy_values,
    read_flags,
)

if TYPE_CHECKING:
    from jaxmodels.data import Dataset
    from jaxmodels.training import Start, TrainingConfig, TrainingProgress

HELP = """Usage: robojax train --policy.type=act --dataset.root=DIR --output_dir=DIR [--name=value ...]

Train a policy on demonstrations (LeRobotDataset), with the flags of lerobot-train. The same flags and --resume=true
continue a killed run, with the same resulting weights. The folder of the run gets policy/ in LeRobot's layout,
checkpoints/, metrics.jsonl and loss.png.
"""
INTERRUPTED = 130  # exit code of shells for a program that Ctrl-C ended

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    "train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def train(context: typer.Context) -> None:
    """Train a policy on a LeRobotDataset, with the flags of lerobot-train."""
    if not context.args or {"--help", "-h"} & set(context.args):
        typer.echo(_help(context.args))
        raise typer.Exit(0 if context.args else Code.USAGE)
    try:
        flags = read_flags(context.args)
        _check_fields(flags)
        _check(flags.values)
    except InvalidFlags as error:
        fail(Code.USAGE, "flags that cannot be read", str(error), "see robojax train --help")

    from jaxmodels.errors import JaxModelsError

    output = Path(flags.values.get("output_dir") or _default_output(flags.values))
    try:
        _run(flags, output)
    except InvalidFlags as error:
        fail(Code.USAGE, "flags that cannot be read", str(error), "see robojax train --help --policy.type=<type>")
    except JaxModelsError as error:
        fail(Code.POLICY, "not trained", str(error), "correct this, and run the same command again")
    except KeyboardInterrupt:
        typer.echo(
            f"\nstopped; the same flags with --output_dir={output} --resume=true continue from the last checkpoint"
        )
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        then = f"free disk space or fix permissions; then the same flags with --output_dir={output} --resume=true"
        fail(Code.CHECK, "training stopped", str(error), then)


def _run(flags: ParsedFlags, output: Path) -> None:
    from jaxmodels import training
    from jaxmodels.data import open_dataset

    values = flags.values
    processes = [values.get(f"distributed.{name}") for name in ("coordinator_address", "num_processes", "process_id")]
    if values.get("distributed.auto") or any(value is not None for value in processes):
        training.join(*processes)
    with ProgressDisplay(is_enabled=not values.get("distributed.process_id")) as display:
        dataset = open_dataset(
            values.get("dataset.root") or values["dataset.repo_id"],
            revision=values.get("dataset.revision"),
            episodes=values.get("dataset.episodes"),
            on_progress=display.downloading,
        )
        start = _start(flags, dataset, display.downloading)
        config = _config(values, start)
        display.begin(dataset, start, config)
        folder = training.train(
            dataset,
            start,
            config,
            output,
            resume=values.get("resume", False),
            device=values.get("policy.device"),
            on_progress=display.step,
            on_decoding=display.decoding,
        )
        display.end(folder, output)


def _check_fields(flags: ParsedFlags) -> None:
    """Check the names of policy flags before anything is fetched, because a missing flag may be misspelt."""
    if not flags.policy:
        return
    from jaxmodels.training import policy_fields, trained_types

    # The type of an existing policy is known only after it was loaded, so flags of all types are allowed.
    kind = flags.values.get("policy.type")
    known = [kind] if kind in trained_types() else trained_types()
    fields = [name for type_name in known for name in policy_fields(type_name)]
    check_fields(flags.policy, fields, kind if kind in known else None)


def _check(values: Mapping[str, Any]) -> None:
    wrong = []
    if ("policy.type" in values) == ("policy.path" in values):
        wrong.append("wanted either --policy.type (a new policy) or --policy.path (an existing policy)")
    if (kind := values.get("policy.type")) is not None:
        from jaxmodels.training import trained_types

        types = trained_types()
        if kind not in types:
            wrong.append(f"--policy.type is {kind!r}; wanted {', '.join(types[:-1])} or {types[-1]}")
    if not {"dataset.root", "dataset.repo_id"} & set(values):
        wrong.append("wanted --dataset.root (a folder) or --dataset.repo_id (of the Hub)")
    root = values.get("dataset.root")
    if root is not None and not Path(root).is_dir():
        wrong.append(f"--dataset.root is {root!r}; there is no such folder")
    if "policy.path" in values:
        wrong += [
            f"--{name} is only for a new policy" for name in ("preset", "image_size", "text_encoder") if name in values
        ]
    if "mesh" in values and "fsdp" in values:
        wrong.append("--mesh and --fsdp exclude each other")
    if values.get("resume") and "output_dir" not in values:
        wrong.append("--resume needs --output_dir, the folder of the run")
    if wrong:
        raise InvalidFlags("\n".join(wrong))


def _start(flags: ParsedFlags, dataset: "Dataset", on_progress: Any) -> "Start":
    from jaxmodels.training import new_policy, policy_fields, trained_policy

    values, device = flags.values, flags.values.get("policy.device")
    # LeRobot does not know the names gpu and tpu.
    defaults = {"device": device} if device is not None and device.split(":")[0] in ("cpu", "cuda") else {}
    if "policy.path" in values:
        path, revision = values["policy.path"], values.get("policy.revision")
        start = trained_policy(path, revision=revision, on_progress=on_progress)
        kind = start.policy.type
        fields = policy_values(flags.policy, policy_fields(kind), kind) | defaults
        return start.with_values(fields) if fields else start
    kind = values["policy.type"]
    return new_policy(
        dataset,
        kind,
        preset=values.get("preset"),
        image_size=values.get("image_size"),
        text_encoder=values.get("text_encoder"),
        values=policy_values(flags.policy, policy_fields(kind), kind) | defaults,
        on_progress=on_progress,
    )


def _config(values: Mapping[str, Any], start: "Start") -> "TrainingConfig":
    from jaxmodels.training import (
        ImageTransforms,
        OptimizerConfig,
        SchedulerConfig,
        TrainingConfig,
        optimizer_preset,
        parse_transforms,
        scheduler_preset,
    )

    is_preset = values.get("use_policy_training_preset", True)
    optimizer = optimizer_preset(start.policy) if is_preset else OptimizerConfig()
    scheduler = scheduler_preset(start.policy) if is_preset else SchedulerConfig()
    pictures = _part(values, "dataset.image_transforms.")
    if "tfs" in pictures:
        pictures["tfs"] = parse_transforms(pictures["tfs"])
    mesh = {"data": 1, "fsdp": None} if values.get("fsdp") else values.get("mesh", {})
    known = TrainingConfig.__dataclass_fields__
    plain = {name: value for name, value in values.items() if name in known and name not in ("fsdp", "mesh")}
    if "dataset.use_imagenet_stats" in values:
        plain["use_imagenet_stats"] = values["dataset.use_imagenet_stats"]
    return TrainingConfig(
        **plain,
        **mesh,
        optimizer=replace(optimizer, **_part(values, "optimizer.")),
        scheduler=replace(scheduler, **_part(values, "scheduler.")),
        image_transforms=ImageTransforms(**pictures),
    )


def _part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _default_output(values: Mapping[str, Any]) -> Path:
    name = values.get("job_name") or values.get("policy.type") or "policy"
    return Path("outputs/train") / f"{datetime.now():%Y-%m-%d/%H-%M-%S}_{name}"


def _help(arguments: list[str]) -> str:
    """Return the help of all flags, and of a policy's fields if its type is among the arguments."""
    lines, group = [HELP], ""
    width = max(len(name) for name in FLAGS) + 4
    for flag in FLAGS.values():
        if flag.group != group:
            lines.append(f"\n{flag.group}:" if group else f"{flag.group}:")
            group = flag.group
        lines.append(f"  {'--' + flag.name:<{width}} {flag.help}")
    kind = next((word.partition("=")[2] for word in arguments if word.startswith("--policy.type=")), None)
    from jaxmodels.training import trained_types

    lines.append(f"\nPolicy types: {', '.join(trained_types())}")
    if kind is None:
        lines.append("\nEvery field of a policy's config is a flag --policy.<field>=<value>. To list the fields:")
        lines.append("  robojax train --help --policy.type=act")
        return "\n".join(lines)
    from jaxmodels.errors import ConfigError
    from jaxmodels.training import policy_fields

    try:
        fields = policy_fields(kind)
    except ConfigError as error:
        fail(Code.USAGE, "no such policy", str(error), "see robojax train --help")
    lines.append(f"\nFields of {kind}:")
    return "\n".join([*lines, *(f"  --{POLICY_PREFIX}{name:<{width - 9}} {words}" for name, words in fields.items())])


COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
BETWEEN_LINES = 10.0  # seconds between log lines of decoding and downloading


class ProgressDisplay:
    """Display of a training's progress: a bar on a terminal, lines in a log.

    Args:
        is_enabled: whether this is the first of several processes, which shows the progress.
    """

    def __init__(self, *, is_enabled: bool):
        self._console = Console(quiet=not is_enabled, highlight=False)
        self._stack = ExitStack()
        self._bar = Progress(*COLUMNS, TimeElapsedColumn(), console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def downloading(self, stage: str) -> None:
        """Show the progress of a download."""
        total = getattr(stage, "total", 0)
        if total:
            self._advance(f"{stage}", getattr(stage, "done", 0), total)

    def decoding(self, done: int, total: int) -> None:
        self._advance("decoding", done, total)

    def begin(self, dataset: "Dataset", start: "Start", config: "TrainingConfig") -> None:
        """Print policy, dataset and steps of the training."""
        frames = int(dataset.lengths.sum())
        self._console.print(
            f"{start.policy.type} on {dataset.folder.name}: {len(dataset.lengths)} episodes, {frames} frames at "
            f"{dataset.fps:g} Hz; {config.steps} steps of {config.batch_size}, "
            f"{config.steps * config.batch_size / frames:.1f} times through",
            soft_wrap=True,
        )

    def step(self, step: "TrainingProgress") -> None:
        line = (
            f"loss {step.loss:.4f}  rate {step.learning_rate:.2g}  {step.samples_per_second:.0f} samples/s  "
            f"waited for data {step.waited:.0%}  {_span(step.left)} left"
        )
        if self._console.is_terminal:
            self._advance("training", step.step, step.steps, line)
        else:
            self._console.print(f"step {step.step}/{step.steps}  {line}", soft_wrap=True)

    def end(self, folder: Path, output: Path) -> None:
        self._stack.close()
        self._console.print(
            f"policy: {folder}\nloss curve: {output / 'loss.png'}\nlook at it: robojax check {folder}", soft_wrap=True
        )

    def _advance(self, name: str, done: int, total: int, text: str = "") -> None:
        if not self._console.is_terminal:
            now = time.monotonic()
            if now - self._printed_at.setdefault(name, now) >= BETWEEN_LINES:
                self._printed_at[name] = now
                self._console.print(f"{name} {done}/{total} ({done / total:.0%})", soft_wrap=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, text="")
        self._bar.update(self._tasks[name], completed=done, total=total, text=text)


def _span(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
