"""Tokens of instructions, and their encodings for a policy."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmodels.errors import ConfigError
from jaxmodels.text import TextConfig, TextEncoder, tokenizer

SMALL = TextConfig(length=24, width=16, n_layers=2, n_heads=2, hidden=32)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"kind": "bert"}, "kind is 'bert'; known: small, clip"),
        ({"width": 10, "n_heads": 4}, "width 10 is not a multiple of n_heads 4"),
        ({"length": True, "hidden": 0}, "length is True.*hidden is 0"),
        ({"vocabulary": 1000}, "small reads bytes, wanted 257"),
        ({"words": 3}, "unknown fields words"),
        ("clip", "wanted an object"),
    ],
)
def test_invalid_config_is_refused(values: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TextConfig.from_json(values)


def test_case_space_and_ligatures_do_not_change_tokens() -> None:
    ids, mask = tokenizer(SMALL)(["  Pick it UP ", "pick it up", "ﬁne", "fine"])
    assert ids.dtype == np.int32
    assert ids.shape == mask.shape == (4, 24)
    np.testing.assert_array_equal(ids[0], ids[1])
    np.testing.assert_array_equal(ids[2], ids[3])
    assert mask.sum(axis=1).tolist() == [11, 11, 5, 5]
    assert ids[0, :5].tolist() == [256, *b"pick"]


def test_encoding_does_not_depend_on_padding() -> None:
    encode = jax.jit(lambda *texts: TextEncoder(SMALL, rngs=nnx.Rngs(0))(*texts))
    ids, mask = tokenizer(SMALL)(["lift", "lift the red cube"])
    filled = np.where(mask, ids, 7)
    first = np.asarray(encode(ids, mask))
    other = np.asarray(encode(filled, mask))
    np.testing.assert_allclose(first[mask], other[mask], atol=1e-6)
    assert np.isfinite(first).all()
    assert np.abs(first[0, 0] - first[1, 0]).max() > 1e-4, "the first token must depend on later tokens"
