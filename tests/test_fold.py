"""Folding the value rotation into v_proj and o_proj: same logits, exact undo, refusals before anything is touched."""

import dataclasses

import pytest
import torch
from helpers import random_orthogonal
from tiny_models import prompt, tiny_model
from torch import nn

from oscar_hf import Artifact, OscarCache, OscarConfig, UnsupportedModelError
from oscar_hf.artifact.layer_constants import LayerConstants
from oscar_hf.artifact.recipes import PUBLISHED_STORAGE
from oscar_hf.calibration.fold_values import fold_value_rotation

WINDOWS = dict(sink_tokens=4, recent_tokens=8)


def artifact_for(model, per_head, dim):
    # With error feedback a code that rounding tips takes others of its row along.
    config = OscarConfig.from_recipe("paper", per_head=per_head, **PUBLISHED_STORAGE)
    layers = {}
    for index in range(model.config.num_hidden_layers):
        shape = (2,) if per_head else ()
        key = random_orthogonal(*shape, dim, dim, seed=index).float()
        value = random_orthogonal(*shape, dim, dim, seed=100 + index).float()
        layers[index] = LayerConstants(key, key.mT.contiguous(), value, value.mT.contiguous())
    return Artifact(config, layers)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family, fields", [("llama", dict(attention_bias=True)), ("qwen3", {})])
def test_folding_changes_nothing_but_rounding(family, fields, per_head):
    model = tiny_model(family, **fields)
    artifact = artifact_for(model, per_head, model.config.head_dim)
    ids, _ = prompt(2, 80)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def logits(used):
        cache = OscarCache(model.config, artifact=used, **WINDOWS)
        with torch.no_grad():
            model(input_ids=ids[:, :60], past_key_values=cache)
            return model(input_ids=ids[:, 60:], past_key_values=cache).logits, cache

    plain, cache = logits(artifact)
    with fold_value_rotation(model, artifact) as folded:
        got, folded_cache = logits(folded.artifact)
        assert folded_cache.layers[0].config.value_transform == "identity"
        torch.testing.assert_close(got, plain, atol=2e-3, rtol=2e-3)
        codes = [c.layers[0].store.values.rows.read(0, 40)[0] for c in (cache, folded_cache)]
        # Rounding of the folded weights may tip a near-tie, no more.
        assert (codes[0] != codes[1]).double().mean() < 0.01
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_refusals_come_before_any_change():
    model = tiny_model("llama")
    artifact = artifact_for(model, False, 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    class Quantized(nn.Linear):
        pass

    last = model.model.layers[-1].self_attn
    plain = last.v_proj
    last.v_proj = Quantized(64, 32, bias=False)
    last.v_proj.weight = plain.weight
    with pytest.raises(UnsupportedModelError, match="v_proj is a Quantized"):
        fold_value_rotation(model, artifact)
    last.v_proj = plain
    last.v_norm = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="norm stands between"):
        fold_value_rotation(model, artifact)
    del last.v_norm
    shared, last.o_proj = last.o_proj, model.model.layers[0].self_attn.o_proj
    with pytest.raises(UnsupportedModelError, match="share a projection"):
        fold_value_rotation(model, artifact)
    last.o_proj = shared
    with pytest.raises(UnsupportedModelError, match="no v_proj of its own"):
        phi = tiny_model("phi3")
        fold_value_rotation(phi, artifact_for(phi, False, 96))
    with pytest.raises(UnsupportedModelError, match="gate"):
        hybrid = tiny_model("qwen3_next")
        whole = artifact_for(hybrid, False, 32)
        fold_value_rotation(hybrid, Artifact(whole.config, {3: whole.layers[3]}))
    with pytest.raises(UnsupportedModelError, match="no value rotations"):
        fold_value_rotation(model, Artifact.data_free())
    with pytest.raises(UnsupportedModelError, match="do not fit heads of dim 24"):
        narrow = {
            i: dataclasses.replace(c, value_transform=torch.eye(24), value_inverse=torch.eye(24))
            for i, c in artifact.layers.items()
        }
        fold_value_rotation(model, Artifact(artifact.config, narrow))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
