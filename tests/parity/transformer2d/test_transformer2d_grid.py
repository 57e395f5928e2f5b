"""Live parity with diffusers over each input kind, norm, activation, attention and mask, in pairs.

Two choices that may interact meet in at least one cell. ROBOJAX_EVERY_CELL=1 runs the whole product
instead, for hours.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.parity.transformer2d.conftest import inputs_for, live_tolerance, small

TOLERANCE = live_tolerance()  # Largest absolute difference on outputs of order 1.
INNER = 24
CROSS = 20  # Not inner_dim, so that keys of a wrong width fail.

# Name -> config fields, and the width of encoder_hidden_states, if present.
ATTENTIONS: Mapping[str, tuple[dict[str, Any], int | None]] = {
    "self": ({}, None),
    "self_despite_encoder": ({}, CROSS),
    "cross": ({"cross_attention_dim": CROSS}, CROSS),
    "cross_without_encoder": ({"cross_attention_dim": INNER}, None),
    "only_cross": ({"cross_attention_dim": CROSS, "only_cross_attention": True}, CROSS),
    "only_cross_of_inner_width": ({"only_cross_attention": True}, INNER),
    "double_self": ({"double_self_attention": True, "cross_attention_dim": CROSS}, None),
    "double_self_with_encoder": ({"double_self_attention": True}, INNER),
    "gated": ({"cross_attention_dim": CROSS, "attention_type": "gated"}, CROSS),
}
SHARED: Mapping[str, tuple[Any, ...]] = {
    "attention": tuple(ATTENTIONS),
    "activation_fn": ("geglu", "swiglu", "gelu", "gelu-approximate", "geglu-approximate", "linear-silu"),
    "masks": ("none", "attention", "encoder", "both"),
    "attention_bias": (False, True),
    "norm_elementwise_affine": (True, False),
}
NORMS = ("layer_norm", "ada_norm", "ada_norm_zero", "ada_norm_single")
AXES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "continuous": {"norm_type": NORMS, "use_linear_projection": (False, True), **SHARED},
    "discrete": {"norm_type": NORMS, **SHARED},
    "patches": {
        "norm_type": ("ada_norm_zero", "ada_norm_single"),
        "conditions": (False, True),
        "captions": (False, True),
        **SHARED,
    },
}
# Pairs that act on different parts of a block. Attentions and masks are paired only for continuous input, because the
# other kinds have the same blocks.
APART: Mapping[str, tuple[set[str], ...]] = {
    "continuous": ({"attention", "activation_fn"}, {"masks", "activation_fn"}),
    "discrete": (
        {"attention", "activation_fn"},
        {"attention", "masks"},
        {"attention", "norm_type"},
        {"masks", "activation_fn"},
    ),
    "patches": ({"attention", "activation_fn"}, {"masks", "activation_fn"}, {"masks", "attention"}),
}


def is_accepted(cell: Mapping[str, Any]) -> bool:
    """Return whether the choices fit together; diffusers ignores or fails on the other combinations."""
    encoder = ATTENTIONS[cell["attention"]][1]
    looks_at_encoder = encoder is not None and cell["attention"] != "self_despite_encoder"
    if cell.get("captions") and not looks_at_encoder:
        return False
    return not (cell.get("conditions") and cell["norm_type"] != "ada_norm_single")


def pairs(kind: str, cell: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    every = itertools.combinations(sorted(cell.items(), key=lambda item: item[0]), 2)
    return {(one, other) for one, other in every if {one[0], other[0]} not in APART[kind]}


def every_cell(kind: str) -> list[dict[str, Any]]:
    axes = AXES[kind]
    cells = (dict(zip(axes, choices, strict=True)) for choices in itertools.product(*axes.values()))
    return [cell for cell in cells if is_accepted(cell)]


def cells_of(kind: str) -> Iterator[dict[str, Any]]:
    """Yield cells that cover each pair of compatible choices, selected greedily and deterministically."""
    every = every_cell(kind)
    if os.environ.get("ROBOJAX_EVERY_CELL"):
        yield from every
        return
    # A sample of a few hundred cells covers each pair many times; the last test here verifies it.
    chosen = np.random.default_rng(0).permutation(len(every))[:400]
    candidates = [(every[i], pairs(kind, every[i])) for i in chosen]
    missing = set().union(*(met for _, met in candidates))
    while missing:
        best, met = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        missing -= met
        yield best


def label(cell: Mapping[str, Any]) -> str:
    return "-".join(name if value is True else str(value) for name, value in cell.items() if value is not False)


CELLS = [(kind, cell) for kind in AXES for cell in cells_of(kind)]


@pytest.mark.parametrize(("kind", "cell"), CELLS, ids=[f"{kind}-{label(cell)}" for kind, cell in CELLS])
def test_cell_of_the_grid_gives_the_numbers_of_diffusers(kind, cell, pair_of) -> None:
    fields, encoder = ATTENTIONS[cell["attention"]]
    config = small(kind, **fields)
    config |= {
        name: value for name, value in cell.items() if name not in ("attention", "masks", "conditions", "captions")
    }
    if config["norm_type"] in ("ada_norm", "ada_norm_zero"):
        config["num_embeds_ada_norm"] = 9
    rng = np.random.default_rng(5)
    inputs: dict[str, Any] = {}
    if cell.get("conditions"):
        config["use_additional_conditions"] = True
    if cell.get("captions"):
        config["caption_channels"] = 18
        config["cross_attention_dim"] = config.get("cross_attention_dim") and INNER
        encoder = 18
    inputs["encoder_hidden_states"] = encoder and rng.standard_normal((2, 7, encoder)).astype(np.float32)
    if cell["attention"] == "gated":
        width = config["cross_attention_dim"]
        inputs["cross_attention_kwargs"] = {"gligen": {"objs": rng.standard_normal((2, 3, width)).astype(np.float32)}}
    inputs = inputs_for(config, **inputs)
    tokens = {"continuous": 15, "discrete": 13, "patches": 16 if config["norm_type"] == "ada_norm_zero" else 15}[kind]
    is_across = "only_cross" in cell["attention"]
    looks_across = encoder is not None and cell["attention"] != "self_despite_encoder"
    if cell["masks"] in ("attention", "both"):
        inputs["attention_mask"] = mask(rng, 7 if is_across else tokens)
    if cell["masks"] in ("encoder", "both"):
        inputs["encoder_attention_mask"] = mask(rng, 7 if looks_across else tokens)
    assert pair_of(config).error(**inputs) <= TOLERANCE


def mask(rng: np.random.Generator, keys: int) -> np.ndarray:
    keep = rng.random((2, keys)) < 0.7
    keep[:, 0] = True
    return keep


def test_all_interacting_choices_are_paired() -> None:
    for kind in AXES:
        met = set().union(*(pairs(kind, cell) for other, cell in CELLS if other == kind))
        assert met == set().union(*(pairs(kind, cell) for cell in every_cell(kind)))
