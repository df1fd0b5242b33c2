"""The end of a calibration: is the artifact better than none, on text that it was not made from?"""

import warnings

from torch import Tensor
from transformers import PreTrainedModel

from ..artifact.artifact import Artifact
from ..errors import UnsupportedModelError
from .evaluate import Evaluation
from .text import token_sequences

# Characters at the end of a text that are not calibrated on, and the least that a text must have for that to pay.
_CHARACTERS, _LEAST_TEXT = 16_000, 64_000
_LONGEST = 4096
# Recipes that an artifact must beat: they need none.
RIVALS = ("default", "hadamard")


def split(text: str) -> tuple[str, str]:
    """A text without its end, and that end; of a short text all and nothing."""
    if len(text) < _LEAST_TEXT:
        return text, ""
    return text[:-_CHARACTERS], text[-_CHARACTERS:]


def judge(model: PreTrainedModel, tokenizer, artifact: Artifact, text: str) -> Artifact:
    """The artifact with what was found written into it, as `calibration["held_out"]`: KL from the exact cache of the artifact and
    of the recipes that need none. Warns where it is not better than those."""
    if not text:
        return artifact
    config = artifact.config
    sequences: list[Tensor] = token_sequences(tokenizer, text, _LONGEST, _LONGEST, seed=0, minimum=1)
    if sequences[0].shape[1] < 2 * (config.sink_tokens + config.recent_tokens):
        return artifact
    evaluation = Evaluation(model, sequences[:1])
    try:
        found = _compare(evaluation, artifact, sequences[0].shape[1])
    except UnsupportedModelError as error:
        warnings.warn(
            f"oscar_hf: the artifact was made, but not compared with recipes that need none: {error}", stacklevel=3
        )
        return artifact
    best = min(RIVALS, key=lambda recipe: found[f"kl_{recipe}"])
    if found["kl"] >= found[f"kl_{best}"]:
        warnings.warn(
            f"oscar_hf: on held-out text this artifact is no better (KL {found['kl']:.4f}) than recipe {best!r}, which needs none "
            f"(KL {found[f'kl_{best}']:.4f}): use that recipe, or calibrate on more text or text like yours",
            stacklevel=3,
        )
    return artifact.with_provenance({"held_out": found})


def _compare(evaluation: Evaluation, artifact: Artifact, tokens: int) -> dict[str, float]:
    """KL of the artifact and of its rivals, with the same windows."""
    config = artifact.config
    windows = dict(sink_tokens=config.sink_tokens, recent_tokens=config.recent_tokens, group_size=config.group_size)
    windows = {name: value for name, value in windows.items() if value is not None}
    found = {"tokens": tokens, "kl": round(evaluation.judge(artifact).kl, 5)}
    for recipe in RIVALS:
        found[f"kl_{recipe}"] = round(evaluation.judge(Artifact.data_free(recipe), **windows).kl, 5)
    return found
