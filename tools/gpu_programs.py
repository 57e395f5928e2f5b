"""Count kernels, command buffers and copies of weights of each policy on an H200, on a machine without a GPU.

    python -m tools.gpu_programs --policy pi05 --batch 1,4,16
    python -m tools.gpu_programs --policy pi05 --set-flags=--xla_gpu_enable_command_buffer=+WHILE

XLA compiles for a description of the card (`gpu_target.txtpb`). Policies have the sizes that people run, and no weight
is allocated. A program with a loop has a row for each region: counts are those of a single run of the loop's body, or
of a branch.

Columns: kernels; copies that are not kernels; command buffers (CUDA graphs), their nodes, and launches outside of them;
operations that depend on weights alone, so that loading could do them, and the MB they write; copies of weights (such
operations that write at least 1 MB); temporary memory in MB; seconds to compile.

Packages: jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version (both ``--no-deps``), nvidia-cuda-nvcc, nvidia-nvvm
and nvidia-nvjitlink. XLA tunes nothing without the card, so a real H200 may split products in other ways.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from tools.hlo_programs import Launches, WeightWork, count_launches, find_weight_work

# Bytes, bytes per second and GHz of the cards, by the vendor's data sheets.
CARDS = {
    "h100": {"name": "NVIDIA H100", "memory": 84_942_979_072, "bandwidth": 3_352_320_000_000, "clock": 1.98},
    "h200": {"name": "NVIDIA H200", "memory": 151_397_597_184, "bandwidth": 4_800_000_000_000, "clock": 1.98},
}
POLICIES = ("pi05", "pi0", "smolvla", "act", "diffusion")
PLUGIN = "jax-cuda13-plugin"
COPY = 1_000_000  # Bytes from which an operation on weights alone counts as a copy of weights.


@dataclass(frozen=True)
class PartCounts:
    """Counts of a compiled program: the preparation of frames, or a stage of a policy."""

    name: str
    regions: Mapping[str, Launches]
    weight_work: Sequence[WeightWork]
    temp_bytes: int
    compile_s: float

    def list_copies(self) -> list[WeightWork]:
        return [work for work in self.weight_work if work.written >= COPY]


def find_missing_package() -> str | None:
    """Return what to install to compile for a card that is not there; None if everything is there."""
    try:
        found, wanted = version(PLUGIN), version("jax")
    except PackageNotFoundError:
        return f"{PLUGIN} is not installed"
    return None if found == wanted else f"{PLUGIN} is {found}, and jax {wanted}; wanted the same version"


def prepare_environment(flags: Sequence[str]) -> None:
    """Set the variables that JAX reads when it is imported; `flags` are flags of XLA."""
    if "jax" in sys.modules:
        raise RuntimeError("jax is imported already; start the tool in its own process: python -m tools.gpu_programs")
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "ROBOJAX_COMPILE_CACHE": "off"}
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def describe_device(card: str) -> Any:
    """Return a JAX device that only compiles."""
    from jax.experimental import topologies

    text = Template(Path(__file__).with_name("gpu_target.txtpb").read_text()).substitute(CARDS[card])
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]


def build_checkpoint(policy: str, architecture: Mapping[str, Any]) -> Any:
    """Return a checkpoint of the sizes that people run; each weight is one number, repeated without memory."""
    from benchmarks import vla_gpu

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.float32), shape)

    with tempfile.TemporaryDirectory() as folder:
        case = vla_gpu.Case(policy)
        return vla_gpu.build_checkpoint(case, Path(folder), is_small=False, draw=draw, architecture=architecture)


def compile_parts(checkpoint: Any, batch: int, device: Any) -> list[PartCounts]:
    """Compile the programs of a policy for a batch of its own frames in bfloat16."""
    import jax
    import jax.numpy as jnp

    from jaxmodels import program
    from jaxmodels.devices import Placement
    from jaxmodels.observations import Reader
    from jaxmodels.policies import CONSTANTS, get_policy_type
    from jaxmodels.policies.lerobot_processors import get_relative_actions

    counted: list[PartCounts] = []

    class CountedPrograms(program.Programs):
        """Programs that are counted when they are compiled."""

        def _compile(self, parts: Sequence[program.Part]) -> list[jax.stages.Compiled]:
            compiled: list[jax.stages.Compiled] = []
            for part in parts:
                assert part.traced is not None, "only traced parts are compiled"
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    compiled.append(part.traced.lower().compile(compiler_options={"xla_dump_to": folder}))
                    seconds = time.perf_counter() - start
                    launches = count_launches(_read_thunks(Path(folder)))
                text, memory = compiled[-1].as_text(), compiled[-1].memory_analysis()
                assert text is not None, "XLA gives a program that it just compiled as text"
                assert memory is not None, "XLA counts the memory of a program that it just compiled"
                found = [] if part.stage is None else find_weight_work(text)  # The first program reads no weights.
                work = [_name_weights(each, [*self.weights]) for each in found]
                name = f"{part.name}{variant}"
                counted.append(PartCounts(name, launches, work, memory.temp_size_in_bytes, seconds))
            return compiled

    config, placement, dtype = checkpoint.config, Placement((device,)), jnp.bfloat16
    kind, plan = get_policy_type(config.type), config.architecture()
    prepare = partial(kind.prepare, config, platform=placement.platform)
    serving = jax.eval_shape(
        prepare, {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.weights.items()}
    )
    programs = CountedPrograms(
        stages=[replace(stage, run=partial(stage.run, plan)) for stage in kind.stages],
        weights={
            name: jax.ShapeDtypeStruct(shape.shape, np.float32 if name.startswith(CONSTANTS) else dtype)
            for name, shape in sorted(serving.items())
        },
        scales=program.build_scales(config, checkpoint.normalization),
        sizes=tuple([None] * len(config.frames) if config.resizes_frames else config.frames),
        dtype=dtype,
        placement=placement,
        fit=kind.fit and partial(kind.fit, plan),
        relative=get_relative_actions(checkpoint.normalization, config.action.shape[0]),
        joint_map=config.joint_map,
    )
    variants, variant = Reader(checkpoint).list_variants(batch, None, with_plan=True), ""
    for inputs in variants:  # Each compiles only what it does not share with those before.
        if inputs.language != variants[0].language and inputs.language is not None:
            variant = f" {inputs.language[0]}"
        if inputs.prefix is not None:
            variant += " plan"
        programs.get_program(inputs)
    return counted


def _read_thunks(folder: Path) -> str:
    """Return the thunk sequence of the one program that was compiled; XLA writes it after its passes, if any ran."""
    for name in ("*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt"):
        if files := sorted(folder.glob(name)):
            if len(files) > 1:
                raise RuntimeError(f"XLA wrote {len(files)} thunk sequences for one program: {files}")
            return files[0].read_text()
    raise RuntimeError(f"XLA wrote no thunk sequence; it wrote {sorted(path.name for path in folder.iterdir())}")


def _name_weights(work: WeightWork, names: Sequence[str]) -> WeightWork:
    """Replace positions in the flat weights (``arrays[3]``) by names."""
    found = [(weight, re.fullmatch(r"arrays\[(\d+)\]", weight)) for weight in work.weights]
    return replace(work, weights=tuple(names[int(at[1])] if at else weight for weight, at in found))


ROW = "{:10} {:>5} {:14} {:28} {:>7} {:>6} {:>7} {:>6} {:>7} {:>11} {:>7} {:>6} {:>7} {:>7}"
HEADINGS = ("policy", "batch", "part", "region", "kernels", "copies", "buffers", "nodes", "outside")
HEADINGS += ("weight only", "MB", "copies", "temp MB", "seconds")


def format_rows(policy: str, batch: int, part: PartCounts) -> Iterator[str]:
    """Format a row for each region of a part."""
    for region, found in part.regions.items():
        work = [each for each in part.weight_work if each.region == region]
        copies = sum(each.region == region for each in part.list_copies())
        counts = (found.kernels, found.copies, found.command_buffers, found.nodes, found.outside)
        written = f"{sum(each.written for each in work) / 1e6:.1f}"
        whole = ("", "") if region else (f"{part.temp_bytes / 1e6:.1f}", f"{part.compile_s:.1f}")
        yield ROW.format(policy, batch, part.name, region, *counts, len(work), written, copies, *whole)


def to_json(part: PartCounts) -> dict[str, Any]:
    """Return a part's figures, with all of its copies of weights."""
    regions = {
        region: asdict(found)
        | {
            "outside": found.outside,
            "weight_only": sum(work.region == region for work in part.weight_work),
            "weight_copies": sum(work.region == region for work in part.list_copies()),
        }
        for region, found in part.regions.items()
    }
    copies = [asdict(work) for work in part.list_copies()]
    return {
        "regions": regions,
        "weight_copies": copies,
        "temp_bytes": part.temp_bytes,
        "compile_s": round(part.compile_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one; may be given again")
    parser.add_argument("--batch", default="1", help="sizes of batches, e.g. 1,4,16")
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--architecture", type=json.loads, default={}, help="JSON: other sizes of pi0 and pi0.5")
    parser.add_argument("--set-flags", default="", help="flags of XLA, separated by spaces")
    parser.add_argument("--json", type=Path, help="file for all figures, with the names of copied weights")
    options = parser.parse_args()
    if missing := find_missing_package():
        parser.exit(2, f"{missing}; see the packages in the first lines of {__file__}\n")
    prepare_environment(options.set_flags.split())
    import jax

    device = describe_device(options.card)
    found: dict[str, Any] = {"card": options.card, "jax": version("jax"), "flags": options.set_flags, "policies": {}}
    failed = 0
    print(ROW.format(*HEADINGS))
    for policy in options.policy or POLICIES:
        checkpoint = build_checkpoint(policy, options.architecture)
        batches = found["policies"][policy] = {}
        for batch in map(int, options.batch.split(",")):
            parts = batches[str(batch)] = {}
            try:
                for part in compile_parts(checkpoint, batch, device):
                    print("\n".join(format_rows(policy, batch, part)), flush=True)
                    parts[part.name] = to_json(part)
            except jax.errors.JaxRuntimeError as error:
                # XLA refuses some small products that it would tune on a real card.
                failed += 1
                parts["error"] = str(error).splitlines()[0]
                print(f"{policy:10} {batch:>5} not compiled: {parts['error'][:300]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    parser.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
