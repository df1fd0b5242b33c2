"""Offline calibration: run a model over text, turn its attention statistics into an Artifact."""

import dataclasses
import datetime
import platform
import warnings
from importlib import metadata, resources
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..artifact.artifact import Artifact
from ..artifact.config import MIN_CALIBRATION_TOKENS, OscarConfig
from ..artifact.layer_constants import LayerConstants
from ..errors import ArtifactError
from ..quantization.rotation import balanced_transform, hadamard, spectral_rotation
from ..transformers_compat import model_config as compat
from .moments import LayerMoments, gather

DEFAULT_TOKENS = 32768
# Keys drift with the position (RoPE's slow channels), so constants hold for the positions that they were made from.
LONGEST_CONTEXT = 32768
DEFAULT_TEXTS = ("calibration_prose.txt", "calibration_code.txt")


def default_text() -> tuple[str, str]:
    """The calibration text inside the package and its description; see oscar_hf/data/README.md for where it is from."""
    folder = resources.files("oscar_hf") / "data"
    parts = [(folder / name).read_text(encoding="utf-8") for name in DEFAULT_TEXTS if (folder / name).is_file()]
    return "\n\n".join(parts), "default text of oscar_hf (Austen, Emma, opening; Python source)"


def read_texts(files: list[str]) -> tuple[str, str]:
    """Text of several UTF-8 files, and their names as a description."""
    parts = []
    for name in files:
        try:
            parts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"cannot read the text file {name!r} ({error}): give UTF-8 text files") from None
    return "\n\n".join(parts), ", ".join(Path(name).name for name in files)


def token_sequences(
    tokenizer, text: str, tokens: int, context: int, seed: int, minimum: int = MIN_CALIBRATION_TOKENS
) -> list[Tensor]:
    """About `tokens` tokens of a text as sequences [1, context], spread over it and shifted by the seed.

    What is left of `tokens` is a shorter sequence at the end, if it is at least an eighth of `context`. Each begins with the
    tokenizer's BOS token if it uses one. Raises ArtifactError if they are fewer than `minimum`.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] != [bos]:
        bos = None
    if not context >= 1:
        raise ArtifactError(f"context: got {context}, allowed is at least 1 token")
    if min(tokens, len(ids)) < minimum:
        raise ArtifactError(
            f"at least {minimum} tokens are needed: asked for {tokens}, the text has {len(ids)}; "
            "give more text (--text) or more --tokens"
        )
    tokens = min(tokens, len(ids))
    context = min(context, tokens)
    lengths = [context] * (tokens // context)
    if tokens % context >= context / 8:
        lengths.append(tokens % context)
    # What the text has more than is asked for lies between the sequences.
    gap = (len(ids) - sum(lengths)) // len(lengths)
    begin = int(torch.randint(0, gap + 1, (1,), generator=torch.Generator().manual_seed(seed)))
    sequences = []
    for length in lengths:
        piece = ids[begin : begin + length]
        sequences.append(torch.tensor([[bos] + piece[:-1] if bos is not None else piece]))
        begin += length + gap
    return sequences


def layer_constants(moments: LayerMoments, config: OscarConfig) -> LayerConstants:
    """Transforms, mean and metric of a layer from its moments, as the parts of the config say."""

    def pool(per_head: Tensor) -> Tensor:
        return per_head.cpu() if config.per_head else per_head.cpu().mean(0)

    late_queries = pool(moments.late_query_covariance)
    if config.key_transform == "balanced":
        # An uncentred second moment is what sets the step when keys are not centred.
        spread = moments.key_covariance
        if not config.center_keys:
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
    if config.key_rule.weighted:
        metric = key_inverse @ late_queries @ key_inverse.mT
        # Only ratios of errors matter: a unit mean diagonal keeps float32 far from its limits.
        metric = metric / metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-300)
        metric = (metric + metric.mT) / 2
    mean = moments.key_mean.cpu() if config.center_keys else None
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
    model,
    tokenizer,
    text: str | None = None,
    *,
    recipe: str = "default",
    tokens: int = DEFAULT_TOKENS,
    context: int | None = None,
    seed: int = 0,
    text_source: str | None = None,
    progress: bool = True,
    **overrides,
) -> Artifact:
    """Calibrate an artifact for a causal language model of transformers.

    text None takes the text inside the package. tokens, context: how much of it and in what lengths; context None takes
    sequences as long as the model, the text and the memory allow, up to 32,768 tokens, for constants hold for the positions
    that they were made from. overrides: any field of OscarConfig, for example per_head=False or value_target="attention".
    The model runs where it is; statistics are float64 and bounded by one layer of one sequence. Save the result with
    `Artifact.save`.
    Raises ArtifactError, UnsupportedModelError.
    """
    config = OscarConfig.from_recipe(recipe, **overrides)
    fixed, context = context, compat.longest_context(model.config, LONGEST_CONTEXT) if context is None else context
    # Statistics of what gets packed come from tokens after the sink.
    if context < 2 * config.sink_tokens + 1:
        raise ArtifactError(
            f"context: got {context}, allowed is more than {2 * config.sink_tokens} tokens (twice the sink)"
        )
    if text is None:
        text, text_source = default_text()
    scored = config.value_transform == "oscar" and config.value_target == "score"
    while True:
        sequences = token_sequences(tokenizer, text, tokens, context, seed)
        try:
            with tqdm(total=len(sequences) * (1 + scored), desc="calibrating", unit="seq", disable=not progress) as bar:
                moments = gather(model, sequences, config.sink_tokens, scored, lambda: bar.update(1))
            break
        except (torch.OutOfMemoryError, MemoryError):
            longest = sequences[0].shape[1]
            if fixed is not None or longest < 2 * MIN_CALIBRATION_TOKENS:
                raise
        # Outside of the handler, whose traceback would keep the tensors of the failed attempt alive.
        context = longest // 2
        warnings.warn(
            f"oscar_hf: sequences of {longest} tokens do not fit the memory, calibrating on {context}", stacklevel=2
        )
    artifact = artifact_from_moments(model, moments, config)
    artifact.config.calibration.update(
        text=text_source or "given text",
        tokens=sum(s.shape[1] for s in sequences),
        context=sequences[0].shape[1],
        seed=seed,
        date=datetime.date.today().isoformat(),
        versions=_versions(),
    )
    artifact.validate()
    return artifact


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "oscar-hf"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
