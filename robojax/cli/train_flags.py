"""Table of the training flags, and their strict parser, which reports all errors and suggests names."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

POLICY_PREFIX = "policy."
EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "json": "JSON",
    "episodes": "numbers of episodes, e.g. [0,1,5] or 0-49",
    "size": "pixels, e.g. 96, or 96x128 (height x width)",
    "mesh": "how many devices, e.g. data:2,fsdp:4",
    "betas": "two numbers, e.g. 0.9,0.999",
}


@dataclass(frozen=True)
class Flag:
    """Declaration of one flag.

    Attributes:
        group: its heading in the help.
        kind: one of `EXPECTED`.
    """

    name: str
    group: str
    kind: str
    help: str


# Heading to its flags: name, kind, help.
GROUPS = {
    "What is trained": (
        ("policy.type", "str", "act, diffusion2d or tokens2d; a new policy, made for the dataset"),
        ("policy.path", "str", "folder or Hub repo of a policy to go on with, instead of --policy.type"),
        ("policy.revision", "str", "branch, tag or commit of that repo"),
        ("policy.device", "str", "cpu, gpu, cuda, tpu, or one of them as cuda:1 [JAX's first choice]"),
        ("preset", "str", "small: what a CPU trains in minutes"),
        ("text_encoder", "str", "folder or Hub repo of a CLIP whose text tower reads instructions, as it is"),
        ("image_size", "size", "what the policy looks at, e.g. 96 or 96x128 [as the dataset's pictures]"),
    ),
    "From what": (
        ("dataset.repo_id", "str", "dataset of the Hub (owner/name), or a name for that of --dataset.root"),
        ("dataset.root", "str", "folder of a LeRobotDataset, v3.0 or v2.1"),
        ("dataset.revision", "str", "branch, tag or commit of the repo"),
        ("dataset.episodes", "episodes", "some of its episodes, e.g. [0,1,5] or 0-49 [all]"),
        ("dataset.use_imagenet_stats", "bool", "normalise cameras by ImageNet's colours, as LeRobot [true]"),
        ("dataset.image_transforms.enable", "bool", "change pictures at random [false]"),
        ("dataset.image_transforms.max_num_transforms", "int", "changes of each picture [3]"),
        ("dataset.image_transforms.tfs", "json", "which changes, as LeRobot writes them [its six]"),
        ("dataset.image_transforms.noise", "float", "noise on each pixel, a share of the full range [0]"),
        ("state_noise", "float", "noise on the normalised state [0]"),
    ),
    "How": (
        ("steps", "int", "updates of the parameters [100000]"),
        ("batch_size", "int", "examples of an update, over all devices together [8]"),
        ("seed", "int", "of first weights, order and noise [1000]"),
        ("dtype", "str", "float32, or bfloat16: computing, parameters stay float32 [float32]"),
        ("gradient_accumulation_steps", "int", "parts in which a batch is computed, for less memory [1]"),
        ("ema_decay", "float", "the policy becomes a moving average of the parameters, e.g. 0.999 [0: it does not]"),
        ("use_policy_training_preset", "bool", "optimizer and scheduler as the policy's config asks [true]"),
        ("optimizer.type", "str", "adamw or adam"),
        ("optimizer.lr", "float", "learning rate"),
        ("optimizer.lr_backbone", "float", "that of vision backbones"),
        ("optimizer.weight_decay", "float", "weight decay"),
        ("optimizer.betas", "betas", "Adam's"),
        ("optimizer.eps", "float", "Adam's"),
        ("optimizer.grad_clip_norm", "float", "largest norm of a gradient; 0 does not clip"),
        ("optimizer.decayed", "str", "what decays: all, as in LeRobot, or matrices"),
        ("scheduler.type", "str", "constant, diffuser or cosine_decay_with_warmup"),
        ("scheduler.name", "str", "of a diffuser: cosine, linear, constant, constant_with_warmup"),
        ("scheduler.num_warmup_steps", "int", "steps in which the rate rises"),
        ("scheduler.num_decay_steps", "int", "of cosine_decay_with_warmup"),
        ("scheduler.peak_lr", "float", "of cosine_decay_with_warmup"),
        ("scheduler.decay_lr", "float", "of cosine_decay_with_warmup"),
    ),
    "Where to, and what is told": (
        ("output_dir", "str", "folder of the run [outputs/train/<date>/<time>_<type>]"),
        ("resume", "bool", "go on with the run in --output_dir [false]"),
        ("job_name", "str", "instead of the type in the folder's name"),
        ("log_freq", "int", "steps between two lines of metrics [200]"),
        ("save_freq", "int", "steps between two checkpoints [20000]"),
        ("keep_checkpoints", "int", "how many of the newest stay [3]"),
        ("tensorboard", "bool", "write TensorBoard's events, too (extra `training`) [false]"),
        ("num_workers", "int", "threads that read and decode [4]"),
    ),
    "On which devices": (
        ("mesh", "mesh", "devices for the batch and for the parameters, e.g. data:2,fsdp:4 [data: all]"),
        ("fsdp", "bool", "spread parameters over all devices (--mesh=data:1,fsdp:<all>) [false]"),
        ("distributed.coordinator_address", "str", "host:port of the first process"),
        ("distributed.num_processes", "int", "how many there are"),
        ("distributed.process_id", "int", "which one this is, from 0"),
        ("distributed.auto", "bool", "let JAX ask the cluster (Slurm, Kubernetes, TPU pods) instead [false]"),
    ),
}
FLAGS = {name: Flag(name, group, kind, text) for group, rows in GROUPS.items() for name, kind, text in rows}

# LeRobot's flags that mean nothing here, by name or by how their name begins: what to do instead.
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
    """Flags that cannot be read; the text lists all errors."""


@dataclass(frozen=True)
class ParsedFlags:
    """Parsed values of a command line.

    Attributes:
        values: flag name to value, of flags of the table.
        policy: field of the policy's config to its text, which nobody can read who does not know the policy's type.
    """

    values: Mapping[str, Any]
    policy: Mapping[str, str]


def read_flags(arguments: Sequence[str]) -> ParsedFlags:
    """Parse ``--name=value`` and ``--name value``; boolean flags may stand alone.

    Raises:
        InvalidFlags: unknown names, values of another kind, or a flag given twice.
    """
    values: dict[str, Any] = {}
    policy: dict[str, str] = {}
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            wrong.append(f"{word!r} is no flag; wanted --name=value")
            continue
        name, equals, text = word[2:].partition("=")
        flag = FLAGS.get(name)
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        if name in values or name.removeprefix(POLICY_PREFIX) in policy:
            wrong.append(f"--{name} is there twice")
        elif flag is None and name.startswith(POLICY_PREFIX):
            policy[name.removeprefix(POLICY_PREFIX)] = text if equals else "true"
        elif flag is None:
            # A name in the table that ends with a dot stands for all flags that begin so.
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
        texts: of `ParsedFlags`.
        fields: of the policy's type, or of every type that it may be of.
        type_name: None when that is not known yet.

    Raises:
        InvalidFlags: such flags, and the nearest of both kinds.
    """
    flags = (name.removeprefix(POLICY_PREFIX) for name in FLAGS if name.startswith(POLICY_PREFIX))
    _refuse_unknown(texts, dict.fromkeys((*flags, *fields)), type_name)


def policy_values(texts: Mapping[str, str], kinds: Mapping[str, str], type_name: str) -> dict[str, Any]:
    """Values of ``--policy.*`` flags as ``config.json`` would have them.

    Args:
        texts: of `ParsedFlags`.
        kinds: the fields there are, and their types in words.

    Raises:
        InvalidFlags: fields that this type does not have.
    """
    _refuse_unknown(texts, kinds, type_name)
    return {name: _json(text, kinds[name]) for name, text in texts.items()}


def suggest_names(name: str, known: Mapping[str, Any], prefix: str = "") -> str:
    """ "Did you mean" text with the closest known names."""
    # The last part is what is remembered: --lr is --optimizer.lr.
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
    """Value of a flag; only a boolean flag may stand without a text."""
    try:
        if flag.kind == "bool":
            return _boolean("true" if text is None else text.lower())
        if text is not None:
            return _READERS[flag.kind](text)
    except ValueError:
        pass
    raise ValueError(EXPECTED[flag.kind])


def _boolean(text: str) -> bool:
    if text not in (*ON, *OFF):
        raise ValueError
    return text in ON


def _json(text: str, kind: str) -> Any:
    """A value of a config's field; a text is taken as it is where the field is one."""
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


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.strip("[]()").split(",")]


def _episodes(text: str) -> list[int]:
    """``[0, 1, 5]`` or ``0,1,5``, and ranges as ``0-9``."""
    numbers: list[int] = []
    for part in filter(None, text.strip("[]()").replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if dash and int(last) < int(first):
            raise ValueError
        numbers += range(int(first), int(last) + 1) if dash else [int(first)]
    return numbers


def _size(text: str) -> tuple[int, int]:
    """``96`` or ``height x width`` as ``96x128``."""
    height, by, width = text.lower().partition("x")
    size = (int(height), int(width if by else height))
    if min(size) < 1:
        raise ValueError
    return size


def _mesh(text: str) -> dict[str, int]:
    """``data:2,fsdp:4``."""
    mesh = {name.strip(): int(count) for name, _, count in (part.partition(":") for part in text.split(","))}
    if set(mesh) - {"data", "fsdp"}:
        raise ValueError
    return mesh


def _betas(text: str) -> tuple[float, float]:
    first, second = _numbers(text)
    return first, second


_READERS: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "json": json.loads,
    "episodes": _episodes,
    "size": _size,
    "mesh": _mesh,
    "betas": _betas,
}
