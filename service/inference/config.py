"""Settings of policies, devices and models."""

import os
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from service.setting_types import Common, Counts, Group, Names, Private, Seconds, Sources, conflict


class PolicySettings(Group):
    """Policies."""

    device: Common[str | None] = Field(
        default=None, description="Where policies run: cpu, gpu, cuda:1, tpu:0; default: JAX's choice."
    )
    dtype: Common[Literal["float32", "bfloat16"] | None] = Field(
        default=None,
        description="Precision; default: bfloat16 for smolvla, pi0 and pi05 on an accelerator, else float32.",
    )
    compile_cache: Common[Private[str | None]] = Field(
        default=None,
        description="Folder that keeps compiled programs, or off; default: robojax/xla in the user's cache.",
    )
    policy_cache: Private[str | None] = Field(
        default=None, description="Folder that keeps policies from the Hub; default: huggingface_hub's own."
    )
    policy_roots: Common[Private[Names]] = Field(
        default=(),
        description="Folders that policies may be in. Without them, and without policy_owners, every folder may be "
        "used when the server listens on this machine only and wants no key, else none.",
    )
    policy_owners: Common[Names] = Field(
        default=(), description="Users and organisations of the Hub whose policies may be used; as policy_roots."
    )
    policy_bytes: int = Field(
        default=20 << 30, ge=1 << 20, description="Bytes that the files of a policy may have; asked before a download."
    )
    load_memory: int = Field(
        default=1 << 30,
        ge=1 << 27,
        description="Bytes of memory for the process that reads a policy's files before this one does.",
    )
    load_timeout: Seconds = Field(
        default=600.0,
        description="Seconds that an engine may take to build a policy, and to compile it; a slower policy is refused.",
    )
    stuck_after: Seconds = Field(default=5.0, description="Seconds after which a running inference is given up.")
    engine_batch_sizes: Counts = Field(
        default=(1, 2, 4, 8, 16),
        description="How many robots' inferences may run as one, by the sizes that are compiled; larger ones than 1 "
        "are compiled while no robot runs. 1 for one at a time.",
    )
    devices: Common[Names] = Field(
        default=(),
        description="Devices that policies run on side by side: all, numbers as 0,1, or names as cuda:0,cuda:1. A "
        "device that is named twice runs two batches at a time. Default: the setting device.",
    )
    placement: Literal["replicate", "shard"] = Field(
        default="replicate",
        description="How a policy uses several devices: replicate, a copy on each, which share the robots; or shard, "
        "spread over all of them, if it is too large for one. cuda:0+cuda:1 among devices is one such place, too.",
    )
    engine_load: FiniteFloat = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the time that a device may compute for sessions, by measurement. A session that needs "
        "more is refused, or slowed down if it has degrade.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.placement == "shard" and not self.devices:
            raise conflict({"placement": self.placement}, "devices too, as --devices all", "shard without devices")
        return self


class ModelSettings(Group):
    """Models."""

    models: Common[Private[Sources]] = Field(
        default={},
        description="A diffusers model to load: name=path, or name=repo@revision; POST /models/{name}/forward runs it.",
        json_schema_extra={"flag": "--model", "metavar": "NAME=PATH"},
    )
    max_forward_bytes: int = Field(
        default=64 << 20, ge=1024, le=1 << 30, description="Bytes of the arrays sent to a model, and of its answer."
    )
    max_forward_memory: int = Field(
        default=4 << 30,
        ge=1 << 20,
        description="Estimated bytes that one forward pass may need, without the weights.",
    )
    max_forwards: int = Field(
        default=4, ge=1, le=64, description="Forward passes asked for at a time; one runs, the others wait."
    )


def set_cache_folders(policies: PolicySettings) -> None:
    """Set the variables by which JAX and the Hub's library find their caches, here and in child processes."""
    if policies.compile_cache is not None:
        os.environ["ROBOJAX_COMPILE_CACHE"] = policies.compile_cache
    if policies.policy_cache is not None:
        os.environ["HF_HUB_CACHE"] = policies.policy_cache
