"""Layers of vision-language models: grouped attention, rotary positions, norms, padded images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmodels.layers.feed_forward import GatedFeedForward
from jaxmodels.layers.grouped_attention import (
    attend_grouped,
    compute_rotation,
    count_positions,
    mask_after_prefix,
    mask_blocks,
    pad_keys,
    pad_mask,
    rotate,
)
from jaxmodels.layers.images import resize_with_padding
from jaxmodels.layers.norm import AdaptiveRMSNorm, RMSNorm
from jaxmodels.vlm.siglip import VisionSizes, VisionTower, assign_positions

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def test_grouped_attention_equals_attention_of_each_head() -> None:
    query, key, value = normal(2, 5, 6, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    mask = RANDOM.random((2, 5, 7)) < 0.6
    mask[:, 3] = False
    found = attend_grouped(jnp.asarray(query), jnp.stack((key, value)), jnp.asarray(mask))
    for head in range(6):
        scores = np.einsum("bnk,bmk->bnm", query[:, :, head], key[:, :, head // 3]) / np.sqrt(8)
        powers = np.where(mask, np.exp(scores), 0)
        powers[:, 3] = 1
        expected = powers / powers.sum(-1, keepdims=True) @ value[:, :, head // 3]
        np.testing.assert_allclose(found[:, :, head], expected, atol=1e-5)


@pytest.mark.parametrize(("dtype", "keys"), [(jnp.bfloat16, 61), (jnp.float32, 7)])
def test_zero_padding_of_half_precision_keys_has_no_effect(dtype, keys: int) -> None:
    query, key, value = (jnp.asarray(normal(2, *shape, 8), dtype) for shape in ((5, 6), (7, 2), (7, 2)))
    is_valid = jnp.asarray(RANDOM.random((2, 7)) < 0.8).at[:, 0].set(True)
    cache = jnp.stack((key, value))
    padded = pad_keys(cache, behind=3)
    assert padded.shape[2] == keys
    found = attend_grouped(query, padded, pad_mask(is_valid, padded)[:, None])
    np.testing.assert_array_equal(found, attend_grouped(query, cache, is_valid[:, None]))


def test_rotary_scores_depend_only_on_the_distance_of_positions() -> None:
    x, y = jnp.asarray(normal(1, 4, 2, 8)), jnp.asarray(normal(1, 4, 2, 8))

    def scores(shift: int) -> np.ndarray:
        at = compute_rotation(jnp.arange(4)[None] + shift, 8)
        return np.einsum("bnhk,bmhk->bhnm", rotate(x, at), rotate(y, at))

    np.testing.assert_allclose(scores(0), scores(17), atol=1e-4)
    assert np.abs(scores(0) - np.einsum("bnhk,bmhk->bhnm", x, y)).max() > 0.1
    np.testing.assert_array_equal(rotate(x, compute_rotation(jnp.zeros((1, 4), jnp.int32), 8)), x)


def test_masks_follow_from_valid_tokens_and_block_starts() -> None:
    is_valid = jnp.asarray([[True, False, True, True]])
    starts = np.array([False, False, False, True])
    assert count_positions(is_valid).tolist() == [[0, 0, 1, 2]]
    assert count_positions(~is_valid).tolist() == [[-1, 0, 0, 0]]
    wanted = [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert mask_blocks(is_valid, starts)[0].astype(int).tolist() == wanted
    assert mask_after_prefix(is_valid, starts[:2]).astype(int).tolist() == [[[1, 0, 1, 1, 1, 1]]]
    causal = mask_after_prefix(is_valid, np.array([True, True]))
    assert causal[0].astype(int).tolist() == [[1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1]]


def test_root_mean_square_norms_are_plain_shifted_by_one_or_modulated() -> None:
    x = normal(2, 3, 8)
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    plain, gemma = RMSNorm(8, epsilon=1e-6), RMSNorm(8, epsilon=1e-6, offset=1.0)
    np.testing.assert_allclose(plain(jnp.asarray(x)), unit, atol=1e-6)
    np.testing.assert_allclose(gemma(jnp.asarray(x)), unit, atol=1e-6)
    gemma.scale[...] = jnp.full(8, 0.5)
    np.testing.assert_allclose(gemma(jnp.asarray(x)), 1.5 * unit, atol=1e-6)
    adaptive = AdaptiveRMSNorm(8, 4, epsilon=1e-6, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(adaptive(jnp.asarray(x), adaptive.modulate(jnp.ones((2, 1, 4)))), unit, atol=1e-6)
    bias = np.concatenate([np.full(8, part, np.float32) for part in (2, 3, 5)])
    assert adaptive.dense.bias is not None
    adaptive.dense.bias[...] = jnp.asarray(bias)  # Scale, shift and gate.
    modulation = adaptive.modulate(jnp.ones((2, 1, 4)))
    np.testing.assert_allclose(adaptive(jnp.asarray(x), modulation), 3 * unit + 3, atol=1e-5)
    assert np.all(np.asarray(modulation.gate) == 5)


def test_gated_feed_forward_multiplies_by_the_activated_gate() -> None:
    layer, x = GatedFeedForward(4, 6, jax.nn.silu, rngs=nnx.Rngs(0)), normal(2, 3, 4)
    gate, up, down = (np.asarray(part.weight[...]).T for part in (layer.gate, layer.up, layer.down))
    expected = (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("frame", "size", "inside"),
    [((4, 6), (8, 8), (5, 8)), ((9, 4), (8, 8), (8, 3)), ((6, 4), (6, 4), (6, 4)), ((4, 4), (8, 11), (8, 8))],
)
def test_image_keeps_its_aspect_ratio_and_place(frame, size, inside) -> None:
    images = normal(2, *frame, 3) + 10
    corner = np.asarray(resize_with_padding(jnp.asarray(images), size, place="bottom right", value=-1.0))
    middle = np.asarray(resize_with_padding(jnp.asarray(images), size, place="center", value=-1.0))
    top, left = size[0] - inside[0], size[1] - inside[1]
    assert corner.shape == middle.shape == (2, *size, 3)
    np.testing.assert_array_equal((corner[..., 0] == -1).sum((1, 2)), size[0] * size[1] - inside[0] * inside[1])
    assert np.all(corner[:, top:, left:] > 0)
    np.testing.assert_array_equal(np.roll(corner, (-(top - top // 2), -(left - left // 2)), (1, 2)), middle)
    # A grown image keeps its own pixels at its corners.
    if inside[0] > frame[0] and inside[1] > frame[1]:
        np.testing.assert_allclose(corner[:, -1, -1], images[:, -1, -1], rtol=1e-6)


def test_patches_of_a_smaller_image_are_spread_over_all_positions() -> None:
    assert assign_positions(2, 4, 4).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    sizes = VisionSizes(width=8, hidden=16, layers=1, heads=2, image_size=16, patch_size=4)
    tower = VisionTower(sizes, rngs=nnx.Rngs(0))
    assert tower(jnp.zeros((2, 10, 16, 3))).shape == (2, 2 * 4, 8)
