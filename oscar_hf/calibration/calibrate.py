"""Offline calibration: run a model over text, turn its attention statistics into an Artifact."""

import dataclasses
import datetime
import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..artifact.artifact import Artifact
from ..artifact.config import MIN_CALIBRATION_TOKENS, OscarConfig
from ..artifact.layer_constants import LayerConstants
from ..defaults import CALIBRATION_TOKENS, LONGEST_CONTEXT
from ..errors import ArtifactError
from ..quantization.rotation import balanced_transform, hadamard, spectral_rotation
from ..transformers_compat import model_config as compat
from . import held_out
from .moments import LayerMoments, gather, spread_positions
from .text import default_text, token_sequences


def layer_constants(moments: LayerMoments, config: OscarConfig) -> LayerConstants:
    """Transforms, mean and metric of a layer from its moments, as the parts of the config say."""

    def pool(per_head: Tensor) -> Tensor:
        return per_head.cpu() if config.per_head else per_head.cpu().mean(0)

    late_queries = pool(moments.late_query_covariance)
    if config.key_transform == "balanced":
        # The second moment of what is left of keys once their center is off is what sets the step.
        spread = moments.key_covariance if config.center_block else moments.mean_centered_covariance
        if config.key_center == "none":
            spread = spread + moments.key_mean[:, :, None] * moments.key_mean[:, None, :]
        key, key_inverse = balanced_transform(pool(spread), late_queries)
    else:
        key = _orthogonal(config.key_transform, pool(moments.query_covariance), moments.key_dim)
        key_inverse = key.mT
    value_covariance = None
    if config.value_transform == "oscar":
        value_covariance = pool(moments.value_covariance(config.value_target))
    value = _orthogonal(config.value_transform, value_covariance, moments.value_dim)
    metric = None
    if config.key_rule.needs_metric and config.key_transform == "balanced":
        metric = key_inverse @ late_queries @ key_inverse.mT
        # Only ratios of errors matter: a unit mean diagonal keeps float32 far from its limits.
        metric = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-300)
        metric = (metric + metric.mT) / 2
    mean = moments.key_mean.cpu() if config.key_center == "mean" else None
    return LayerConstants(
        **{
            name: None if tensor is None else tensor.float().contiguous()
            for name, tensor in dict(
                key_transform=key,
                key_inverse=key_inverse,
                value_transform=value,
                value_inverse=value.mT,
                key_mean=mean,
                key_metric=metric,
            ).items()
        }
    )


def _orthogonal(kind: str, covariance: Tensor | None, dim: int) -> Tensor:
    if kind == "oscar":
        return spectral_rotation(covariance)
    return hadamard(dim) if kind == "hadamard" else torch.eye(dim, dtype=torch.float64)


def artifact_from_moments(model, moments: dict[int, LayerMoments], config: OscarConfig) -> Artifact:
    """Artifact of a model from gathered moments; geometry fields are filled in from what was seen."""
    decoder = compat.text_config(model.config)
    types = compat.layer_types(decoder)
    count = len(types)

    def per_layer(name):
        values = [getattr(moments[i], name) if i in moments else 0 for i in range(count)]
        known = {getattr(m, name) for m in moments.values()}
        return known.pop() if len(known) == 1 else values

    # A local folder is named by its last part: the rest of a path says nothing to others.
    name = getattr(model.config, "name_or_path", None) or ""
    fields = dict(
        base_model=config.base_model or (Path(name).name if Path(name).is_dir() else name) or None,
        base_model_revision=getattr(model.config, "_commit_hash", None),
        model_type=decoder.model_type,
        num_hidden_layers=count,
        layer_types=types,
        num_key_value_heads=per_layer("kv_heads"),
        head_dim=per_layer("key_dim"),
        value_head_dim=per_layer("value_dim"),
        cache_fields=compat.cache_fields(decoder),
    )
    config = dataclasses.replace(config, **fields)
    return Artifact(config, {i: layer_constants(m, config) for i, m in moments.items()}, source="calibration")


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | None = None,
    *,
    recipe: str = "balanced",
    tokens: int = CALIBRATION_TOKENS,
    context: int | None = None,
    seed: int = 0,
    text_source: str | None = None,
    progress: bool = True,
    judge: bool = True,
    key_transform: str | None = None,
    value_transform: str | None = None,
    per_head: bool | None = None,
    value_target: str | None = None,
    key_center: str | None = None,
    key_block: int | None = None,
    key_scale: str | None = None,
    value_scale: str | None = None,
    key_symmetric: bool | None = None,
    value_symmetric: bool | None = None,
    sink_tokens: int | None = None,
    recent_tokens: int | None = None,
    group_size: int | None = None,
    base_model: str | None = None,
) -> Artifact:
    """Calibrate an artifact for a causal language model: run it over text, and make transforms from its attention.

    The model runs where it is, on CPU or GPU. Statistics are float64 and bounded by one layer of one sequence, so memory
    is that of a forward pass. The keyword arguments from `key_transform` on replace parts of the recipe; None leaves
    what the recipe says. See `OscarConfig` for what they mean.

    Args:
        model (`PreTrainedModel`): A model loaded by transformers, under sdpa or eager attention.
        tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.
        text (`str`, *optional*): Text like that of the use to come. Defaults to the text inside the package.
        recipe (`str`, defaults to `"balanced"`): `"balanced"` or `"paper"`; others need no artifact.
        tokens (`int`, defaults to 32768): How much of the text, at least 2048 tokens.
        context (`int`, *optional*): Tokens per sequence. Defaults to as many as the model, the text and the memory allow,
            at most 32768. Shorter sequences begin at positions spread over as many, where the model's rotary embeddings
            allow it: constants hold for the positions that they were made from.
        seed (`int`, defaults to 0): Shifts the sequences within the text.
        text_source (`str`, *optional*): What the artifact says its text was.
        progress (`bool`, defaults to `True`): Show a progress bar.
        judge (`bool`, defaults to `True`): Keep the end of a text of some length out, compare the artifact there with recipes
            that need none, write what was found into it, and warn if it is no better.
        key_transform (`str`, *optional*): `"oscar"`, `"balanced"`, `"hadamard"` or `"identity"`.
        value_transform (`str`, *optional*): `"oscar"`, `"hadamard"` or `"identity"`.
        per_head (`bool`, *optional*): One transform per KV head in place of one per layer.
        value_target (`str`, *optional*): What values are weighted by, `"score"` or `"attention"`.
        key_center (`str`, *optional*): What is taken off keys, `"block"`, `"mean"` or `"none"`.
        key_block (`int`, *optional*): Tokens of a block of `key_center="block"`.
        key_scale (`str`, *optional*): How the scales of keys are chosen, see `ScaleRule`.
        value_scale (`str`, *optional*): How those of values are chosen.
        key_symmetric (`bool`, *optional*): Store a scale of keys but no minimum.
        value_symmetric (`bool`, *optional*): The same of values.
        sink_tokens (`int`, *optional*): First tokens that stay exact; they are left out of the statistics, too.
        recent_tokens (`int`, *optional*): Last tokens that stay exact.
        group_size (`int`, *optional*): Channels per scale. Defaults to the head dim, halved until it is at most 128.
        base_model (`str`, *optional*): Name to record. Defaults to the model's Hub id or the name of its folder.

    Returns:
        `Artifact`: Checked and in memory; write it with `Artifact.save`.

    Raises:
        `ArtifactError`: If an argument is not allowed or the text is too short.
        `UnsupportedModelError`: If the model has no full attention, hides its queries, or caches something else than
            keys and values.

    Example:

    ```python
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from oscar_hf import calibrate

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    calibrate(model, tokenizer, tokens=4096).save("my-artifact")
    ```
    """
    parts = dict(
        key_transform=key_transform, value_transform=value_transform, per_head=per_head, value_target=value_target,
        key_center=key_center, key_block=key_block, key_scale=key_scale, value_scale=value_scale, key_symmetric=key_symmetric,
        value_symmetric=value_symmetric, sink_tokens=sink_tokens, recent_tokens=recent_tokens, group_size=group_size,
        base_model=base_model,
    )  # fmt: skip
    config = OscarConfig.from_recipe(recipe, **{name: part for name, part in parts.items() if part is not None})
    if not config.needs_calibration:
        raise ArtifactError(
            f"recipe: {recipe!r} as given needs no artifact, so there is nothing to calibrate: use "
            f"OscarCache(model.config, recipe={recipe!r}), or calibrate 'balanced' or 'paper'"
        )
    may_shorten = context is None
    if may_shorten:
        context = compat.longest_context(model.config, LONGEST_CONTEXT)
    # Statistics of what gets packed come from tokens after the sink.
    if context < 2 * config.sink_tokens + 1:
        raise ArtifactError(
            f"context: got {context}, allowed is more than {2 * config.sink_tokens} tokens (twice the sink)"
        )
    if text is None:
        text, text_source = default_text()
    text, rest = held_out.split(text) if judge else (text, "")
    moments, sequences, positions = _gather_what_fits(
        model,
        config,
        context,
        lambda length: token_sequences(tokenizer, text, tokens, length, seed),
        may_shorten,
        progress,
    )
    artifact = artifact_from_moments(model, moments, config).with_provenance(
        {
            "text": text_source or "given text",
            "tokens": sum(sequence.shape[1] for sequence in sequences),
            "context": sequences[0].shape[1],
            "positions": max(first + ids.shape[1] for first, ids in zip(positions, sequences)),
            "seed": seed,
            "date": datetime.date.today().isoformat(),
            "versions": _versions(),
        }
    )
    artifact.validate()
    return held_out.judge(model, tokenizer, artifact, rest)


def _gather_what_fits(
    model: PreTrainedModel,
    config: OscarConfig,
    context: int,
    sequences_of: Callable[[int], list[Tensor]],
    may_shorten: bool,
    progress: bool,
) -> tuple[dict[int, LayerMoments], list[Tensor], list[int]]:
    """Moments of a model, the sequences that they are from, and the positions that those began at. Sequences are of `context`
    tokens, or if allowed of a half, a quarter, ... where those do not fit the memory."""
    reach = compat.longest_context(model.config, LONGEST_CONTEXT)
    scored = config.value_transform == "oscar" and config.value_target == "score"
    while True:
        sequences = sequences_of(context)
        positions = spread_positions(model, sequences, reach)
        try:
            with tqdm(total=len(sequences) * (1 + scored), desc="calibrating", unit="seq", disable=not progress) as bar:
                moments = gather(
                    model, sequences, config.sink_tokens, scored, lambda: bar.update(1), config.center_block, positions
                )
            return moments, sequences, positions
        except (torch.OutOfMemoryError, MemoryError):
            longest = sequences[0].shape[1]
            if not may_shorten or longest < 2 * MIN_CALIBRATION_TOKENS:
                raise
        # Outside of the handler, whose traceback would keep the tensors of the failed attempt alive.
        context = longest // 2
        warnings.warn(
            f"oscar_hf: sequences of {longest} tokens do not fit the memory, calibrating on {context}", stacklevel=3
        )


def _versions() -> dict[str, str]:
    """Versions of what made an artifact."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "oscar-hf": __version__,
    }
