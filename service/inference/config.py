"""Settings of policies, devices and models."""

import os
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from service.setting_types import Common, Counts, Group, Names, Private, Seconds, Sources, conflict


class PolicySettings(Group):
    """Policies."""

    device: Common[str | None] = Field(
        default=None, description="Device of policies: cpu, gpu, cuda:1, tpu:0; default: JAX's choice"
    )
    dtype: Common[Literal["float32", "bfloat16"] | None] = Field(
        default=None,
        description="Precision of policies; default: bfloat16 for smolvla, pi0 and pi05 on accelerators, else float32",
    )
    compile_cache: Common[Private[str | None]] = Field(
        default=None,
        description="Folder of compiled programs, or off; default: robojax/xla in the user's cache",
    )
    policy_cache: Private[str | None] = Field(
        default=None, description="Folder of policies from the Hub; default: huggingface_hub's cache"
    )
    policy_roots: Common[Private[Names]] = Field(
        default=(),
        description="Folders from which policies may be loaded. Without policy_roots and policy_owners, a server "
        "that listens on this machine only and requires no key allows every folder, others none.",
    )
    policy_owners: Common[Names] = Field(
        default=(), description="Hub users and organisations whose policies may be loaded; default: as policy_roots"
    )
    policy_bytes: int = Field(
        default=20 << 30, ge=1 << 20, description="Largest size of a policy's files in bytes, checked before a download"
    )
    load_memory: int = Field(
        default=1 << 30,
        ge=1 << 27,
        description="Memory of the process that checks a policy's files before the server loads them, in bytes",
    )
    load_timeout: Seconds = Field(
        default=600.0,
        description="Time limit for building a policy, and for compiling it, in seconds; a slower policy is refused",
    )
    stuck_after: Seconds = Field(default=5.0, description="Seconds after which a running inference is given up")
    trusted_bundles: Names = Field(
        default=(),
        description="Digests, as robojax export prints them, of exported policies whose executables may run; others "
        "are compiled",
    )
    engine_batch_sizes: Counts = Field(
        default=(1, 2, 4, 8, 16),
        description="Numbers of robots whose inferences may run as one batch, or 1 for no batches; sizes above 1 "
        "are compiled while no robot runs",
    )
    devices: Common[Names] = Field(
        default=(),
        description="Devices that run policies in parallel: all, numbers as 0,1, or names as cuda:0,cuda:1; "
        "default: the setting device. A device that is named twice runs two batches at a time.",
    )
    placement: Literal["replicate", "shard"] = Field(
        default="replicate",
        description="Use of several devices: replicate (a copy of the policy on each; the copies share the robots) "
        "or shard (spread over all, for a policy that is too large for one, or over cuda:0+cuda:1)",
    )
    engine_load: FiniteFloat = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Largest measured share of a device's time for sessions; a session that needs more is refused, "
        "or slowed down if it has degrade",
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
        description="Diffusers model to load, as name=path or name=repo@revision, for POST /models/{name}/forward",
        json_schema_extra={"flag": "--model", "metavar": "NAME=PATH"},
    )
    max_forward_bytes: int = Field(
        default=64 << 20, ge=1024, le=1 << 30, description="Largest inputs of a model, and largest outputs, in bytes"
    )
    max_forward_memory: int = Field(
        default=4 << 30,
        ge=1 << 20,
        description="Largest estimated memory of one forward pass without the weights, in bytes",
    )
    max_forwards: int = Field(
        default=4, ge=1, le=64, description="Forward passes that may be requested at a time; one runs, the others wait"
    )


def set_cache_folders(policies: PolicySettings) -> None:
    """Set the variables by which JAX and the Hub's library find their caches, here and in child processes."""
    if policies.compile_cache is not None:
        os.environ["ROBOJAX_COMPILE_CACHE"] = policies.compile_cache
    if policies.policy_cache is not None:
        os.environ["HF_HUB_CACHE"] = policies.policy_cache
    if policies.trusted_bundles:
        os.environ["ROBOJAX_TRUSTED_BUNDLES"] = ",".join(policies.trusted_bundles)
