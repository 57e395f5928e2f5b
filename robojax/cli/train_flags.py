"""Table of the training flags, and their strict parser, which reports all errors and suggests names."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

POLICY_PREFIX = "policy."


@dataclass(frozen=True)
class Flag:
    """Declaration of one flag; ``group`` is its heading in the help, ``kind`` a key of `KINDS`."""

    name: str
    group: str
    kind: str
    help: str


# Heading to its flags: name, kind, help.
GROUPS = {
    "Policy": (
        ("policy.type", "str", "Type of a new policy for the dataset; see below"),
        ("policy.path", "str", "Policy to continue with, instead of --policy.type: folder or Hub repo"),
        ("policy.revision", "str", "Branch, tag or commit of that repo"),
        ("policy.device", "str", "Device: cpu, gpu, cuda, tpu, or one of several as cuda:1; default: JAX's choice"),
        ("preset", "str", "Size of a new policy: small, for a CPU that trains it in minutes"),
        ("text_encoder", "str", "CLIP model whose frozen text tower reads instructions: folder or Hub repo"),
        ("image_size", "size", "Size of the policy's pictures in pixels, e.g. 96 or 96x128; default: the dataset's"),
    ),
    "Data": (
        ("dataset.repo_id", "str", "Dataset of the Hub (owner/name), or a name for --dataset.root"),
        ("dataset.root", "str", "Folder of a LeRobotDataset, v3.0 or v2.1"),
        ("dataset.revision", "str", "Branch, tag or commit of the repo"),
        ("dataset.episodes", "episodes", "Selected episodes, e.g. [0,1,5] or 0-49; default: all"),
        ("dataset.use_imagenet_stats", "bool", "Normalise cameras by ImageNet's colours, as LeRobot; default: true"),
        ("dataset.image_transforms.enable", "bool", "Change pictures at random; default: false"),
        ("dataset.image_transforms.max_num_transforms", "int", "Number of changes of each picture; default: 3"),
        ("dataset.image_transforms.tfs", "json", "Possible changes, in LeRobot's JSON; default: LeRobot's six"),
        ("dataset.image_transforms.noise", "float", "Noise on each pixel, as a share of the full range; default: 0"),
        ("state_noise", "float", "Noise on the normalised state; default: 0"),
    ),
    "Training": (
        ("steps", "int", "Number of updates of the parameters; default: 100000"),
        ("batch_size", "int", "Examples of an update, over all devices together; default: 8"),
        ("seed", "int", "Seed of initial weights, order and noise; default: 1000"),
        ("dtype", "str", "Precision of computations: float32 or bfloat16 (parameters stay float32); default: float32"),
        ("gradient_accumulation_steps", "int", "Parts into which a batch is split, to save memory; default: 1"),
        ("ema_decay", "float", "Decay of a moving average of the parameters, e.g. 0.999; default: 0, no average"),
        ("use_policy_training_preset", "bool", "Use optimizer and scheduler of the policy's config; default: true"),
        ("optimizer.type", "str", "Optimizer: adamw or adam"),
        ("optimizer.lr", "float", "Learning rate"),
        ("optimizer.lr_backbone", "float", "Learning rate of vision backbones"),
        ("optimizer.weight_decay", "float", "Weight decay"),
        ("optimizer.betas", "betas", "Betas of Adam, e.g. 0.9,0.999"),
        ("optimizer.eps", "float", "Epsilon of Adam"),
        ("optimizer.grad_clip_norm", "float", "Largest norm of a gradient; 0 does not clip"),
        ("optimizer.decayed", "str", "Decayed parameters: all, as in LeRobot, or matrices"),
        ("scheduler.type", "str", "Scheduler: constant, diffuser or cosine_decay_with_warmup"),
        ("scheduler.name", "str", "Schedule of type diffuser: cosine, linear, constant, constant_with_warmup"),
        ("scheduler.num_warmup_steps", "int", "Number of steps in which the learning rate rises"),
        ("scheduler.num_decay_steps", "int", "Number of steps of cosine_decay_with_warmup"),
        ("scheduler.peak_lr", "float", "Largest rate of cosine_decay_with_warmup"),
        ("scheduler.decay_lr", "float", "Final rate of cosine_decay_with_warmup"),
    ),
    "Output": (
        ("output_dir", "str", "Folder of the run; default: outputs/train/<date>/<time>_<type>"),
        ("resume", "bool", "Continue the run in --output_dir; default: false"),
        ("job_name", "str", "Name of the run's folder; default: the policy type"),
        ("log_freq", "int", "Number of steps between lines of metrics; default: 200"),
        ("save_freq", "int", "Number of steps between checkpoints; default: 20000"),
        ("keep_checkpoints", "int", "Number of newest checkpoints to keep; default: 3"),
        ("tensorboard", "bool", "Write TensorBoard's events, too (extra `training`); default: false"),
        ("num_workers", "int", "Number of threads that read and decode; default: 4"),
    ),
    "Devices": (
        ("mesh", "mesh", "Devices for the batch and for the parameters, e.g. data:2,fsdp:4; default: data:<all>"),
        ("fsdp", "bool", "Spread parameters over all devices (--mesh=data:1,fsdp:<all>); default: false"),
        ("distributed.coordinator_address", "str", "Address of the first process, as host:port"),
        ("distributed.num_processes", "int", "Number of processes"),
        ("distributed.process_id", "int", "Number of this process, from 0"),
        ("distributed.auto", "bool", "Let JAX detect the cluster (Slurm, Kubernetes, TPU pods); default: false"),
    ),
}
FLAGS = {name: Flag(name, group, kind, text) for group, rows in GROUPS.items() for name, kind, text in rows}

# Unsupported flags of LeRobot, by name or prefix, and what to do instead.
ELSEWHERE = {
    "config_path": "give --output_dir and --resume=true",
    "wandb.": "Weights & Biases is not used; --tensorboard=true writes what TensorBoard reads",
    "env.": "nothing is evaluated while training; `robojax eval` does that",
    "eval.": "nothing is evaluated while training; `robojax eval` does that",
    "eval_freq": "nothing is evaluated while training; `robojax eval` does that",
    "peft.": "adapters are not trained here; all parameters are",
    "rename_map": "the policy is made for the dataset's names; `robojax serve` can rename",
    "tolerance_s": "frames are found by their number",
    "save_checkpoint": "checkpoints are always written; see --save_freq and --keep_checkpoints",
    "dataset.video_backend": "videos are read by PyAV",
    "dataset.streaming": "files are fetched before they are read",
    "use_rabc": "examples are not weighted",
}


ON, OFF = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
NOTHING = ("null", "none", "")


class InvalidFlags(Exception):
    """Invalid flags; the text lists all errors."""


@dataclass(frozen=True)
class ParsedFlags:
    """Parsed values of a command line.

    Attributes:
        values: name to parsed value, for flags in the table.
        policy: field of the policy's config to its text, which is parsed when the policy's type is known.
    """

    values: Mapping[str, Any]
    policy: Mapping[str, str]


def read_flags(arguments: Sequence[str]) -> ParsedFlags:
    """Parse ``--name=value`` and ``--name value``; boolean flags may stand alone.

    Raises:
        InvalidFlags: a flag is unknown, has an invalid value, or is given twice.
    """
    values: dict[str, Any] = {}
    policy: dict[str, str] = {}
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            wrong.append(f"{word!r} is not a flag; wanted --name=value")
            continue
        name, equals, text = word[2:].partition("=")
        flag = FLAGS.get(name)
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if name in values or name.removeprefix(POLICY_PREFIX) in policy:
            wrong.append(f"--{name} is given twice")
        elif flag is None and name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = text if equals else "true"
        elif flag is None:
            # A name that ends with a dot is a prefix.
            known = next((it for it in ELSEWHERE if name == it or (it.endswith(".") and name.startswith(it))), None)
            advice = f" is not known{suggest_names(name, FLAGS)}" if known is None else f": {ELSEWHERE[known]}"
            wrong.append(f"--{name}{advice}")
        else:
            try:
                values[name] = _read(flag, text if equals else None)
            except ValueError as error:
                wrong.append(f"--{name} is {text!r}; wanted {error}")
    if wrong:
        raise InvalidFlags("\n".join(wrong))
    return ParsedFlags(values, policy)


def check_fields(texts: Mapping[str, str], fields: Iterable[str], type_name: str | None) -> None:
    """Refuse ``--policy.*`` flags that are neither fields of the policy nor in the table.

    Args:
        texts: the attribute ``policy`` of `ParsedFlags`.
        fields: fields of the policy's type, or of all possible types.
        type_name: the policy's type; None if it is not known yet.

    Raises:
        InvalidFlags: there are such flags; the text suggests similar names.
    """
    flags = (name.removeprefix(POLICY_PREFIX) for name in FLAGS if name.startswith(POLICY_PREFIX))
    _refuse_unknown(texts, dict.fromkeys((*flags, *fields)), type_name)


def policy_values(texts: Mapping[str, str], kinds: Mapping[str, str], type_name: str) -> dict[str, Any]:
    """Return the values of ``--policy.*`` flags as in ``config.json``.

    Args:
        texts: the attribute ``policy`` of `ParsedFlags`.
        kinds: fields of the policy's type, and their types in words.

    Raises:
        InvalidFlags: the policy's type lacks a field.
    """
    _refuse_unknown(texts, kinds, type_name)
    return {name: _json(text, kinds[name]) for name, text in texts.items()}


def suggest_names(name: str, known: Mapping[str, Any], prefix: str = "") -> str:
    """Return a hint with the known names that are most similar."""
    # Users often give only the last part of a name, as --lr for --optimizer.lr.
    close = get_close_matches(name, known, 2, 0.7) or [flag for flag in known if flag.split(".")[-1] == name][:2]
    close = close or get_close_matches(name, known, 2, 0.5)
    return f"; did you mean {' or '.join(f'--{prefix}{flag}' for flag in close)}?" if close else "; see --help"


def _refuse_unknown(names: Iterable[str], known: Mapping[str, Any], type_name: str | None) -> None:
    where = f" of {type_name}" if type_name else ""
    unknown = [
        f"--{POLICY_PREFIX}{name} is not known{where}{suggest_names(name, known, POLICY_PREFIX)}"
        for name in names
        if name not in known
    ]
    if unknown:
        raise InvalidFlags("\n".join(unknown))


def _read(flag: Flag, text: str | None) -> Any:
    """Parse the value of a flag; only a boolean flag may have no text; raise ``ValueError`` with what is accepted."""
    parse, accepted = KINDS[flag.kind]
    if text is None and flag.kind != "bool":
        raise ValueError(accepted)
    try:
        return parse("true" if text is None else text)
    except ValueError:
        raise ValueError(accepted) from None


def _boolean(text: str) -> bool:
    if text.lower() not in (*ON, *OFF):
        raise ValueError
    return text.lower() in ON


def _json(text: str, kind: str) -> Any:
    """Parse the value of a config's field; the text itself if the field is a text."""
    lower = text.lower()
    if lower in NOTHING:
        return None
    if lower in ("true", "false") and "str" not in kind:
        return lower == "true"
    if "str" in kind:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _episodes(text: str) -> list[int]:
    """Parse ``[0, 1, 5]`` or ``0,1,5``, and ranges as ``0-9``."""
    numbers: list[int] = []
    for part in filter(None, text.strip("[]()").replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if dash and int(last) < int(first):
            raise ValueError
        numbers += range(int(first), int(last) + 1) if dash else [int(first)]
    return numbers


def _size(text: str) -> tuple[int, int]:
    """Parse ``96``, or height and width as ``96x128``."""
    height, by, width = text.lower().partition("x")
    size = (int(height), int(width if by else height))
    if min(size) < 1:
        raise ValueError
    return size


def _mesh(text: str) -> dict[str, int]:
    """Parse ``data:2,fsdp:4``."""
    mesh = {name.strip(): int(count) for name, _, count in (part.partition(":") for part in text.split(","))}
    if set(mesh) - {"data", "fsdp"}:
        raise ValueError
    return mesh


def _betas(text: str) -> tuple[float, float]:
    first, second = map(float, text.strip("[]()").split(","))
    return first, second


# Kind of a flag to the parser of its text, and what it accepts.
KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "a text"),
    "bool": (_boolean, "true or false"),
    "json": (json.loads, "JSON"),
    "episodes": (_episodes, "numbers of episodes, e.g. [0,1,5] or 0-49"),
    "size": (_size, "pixels, e.g. 96, or 96x128 (height x width)"),
    "mesh": (_mesh, "numbers of devices, e.g. data:2,fsdp:4"),
    "betas": (_betas, "two numbers, e.g. 0.9,0.999"),
}
