"""Folders of diffusers' split classes and older folders give the numbers of diffusers.

tests/unit/jaxmodels/test_checkpoints_unet.py compares the other folders that both packages write.
"""

import json

import numpy as np
import pytest

from jaxmodels.transformer2d import Transformer2DModel
from tests.parity.transformer2d.conftest import inputs_for, live_tolerance, small, to_torch
from tests.testing.peers import skip_reason

torch = pytest.importorskip("torch", reason=skip_reason("torch"))

pytestmark = pytest.mark.needs_peers
TOLERANCE = live_tolerance()  # Largest absolute difference on outputs of order 1.


@pytest.mark.parametrize("name", ["zero", "single"])
def test_folders_of_the_split_classes_are_read(name: str, theirs_of, tmp_path) -> None:
    theirs_of({"in_channels": 32})  # Skips the test without diffusers.
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

    config = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 3, "out_channels": 5}
    config |= {"norm_type": f"ada_norm_{name}", "num_embeds_ada_norm": 9, "sample_size": 128, "patch_size": 16}
    torch.manual_seed(0)
    if name == "zero":
        model = DiTTransformer2DModel(**config).eval()
    else:
        config |= {"cross_attention_dim": 24, "caption_channels": 18}
        model = PixArtTransformer2DModel(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((2, 3, 128, 128)).astype(np.float32)
    inputs = inputs_for(config | {"use_additional_conditions": name == "single"}, hidden_states=images)
    with torch.no_grad():
        wanted = model(**to_torch(inputs), return_dict=False)[0].numpy()
    ours = Transformer2DModel.from_pretrained(tmp_path)
    assert np.abs(np.asarray(ours(**inputs).sample) - wanted).max() <= TOLERANCE * max(1.0, np.abs(wanted).max() / 5)


def test_file_without_norm_type_is_read_as_ada_norm(pair_of) -> None:
    config = small("discrete", cross_attention_dim=20, num_embeds_ada_norm=9)
    pair = pair_of(config)
    path = pair.folder / "config.json"
    values = json.loads(path.read_text())
    for key in ("norm_type", "norm_eps", "out_channels", "use_linear_projection", "attention_type", "caption_channels"):
        del values[key]
    path.write_text(json.dumps(values | {"_name_or_path": "elsewhere", "no_such_argument": 3}))
    assert pair.error(**inputs_for(config)) <= TOLERANCE
