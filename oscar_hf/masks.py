"""Every question that is asked of an attention mask, and the one memory of its answers.

Masks are those of scaled_dot_product_attention: [B|1, H|1, M|1, T] for M queries and T slots, bool (True = attend) or
additive (0 = attend, about the dtype's minimum = hidden). "Leading" slots are those before a row's first visible one: left
padding.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


def hidden_below(dtype: torch.dtype) -> float:
    """An additive mask hides a slot if its value is at most this: transformers fills in the dtype's minimum, others -inf."""
    return torch.finfo(dtype).min / 2


def visible(mask: Tensor) -> Tensor:
    """Which slots a mask lets queries see, bool of the same shape."""
    return mask if mask.dtype == torch.bool else mask > hidden_below(mask.dtype)


def first_visible(mask: Tensor) -> Tensor:
    """First slot of each row that some head and query sees, int64 [B|1]; the number of slots where there is none."""
    seen = visible(mask).flatten(1, 2).any(1)
    return torch.where(seen.any(-1), seen.int().argmax(-1), seen.shape[-1])


def first_visible_of_weights(weights: Tensor) -> Tensor:
    """`first_visible` guessed from softmax weights [B, H, M, T] of eager attention, whose mask nobody shows to a cache.

    Eager attention hides a padding query's whole row with one large negative number, so that its softmax is uniform, also over
    later slots, which no causal row of a real token can be. Knows only the slots of the call's own queries (the last M); slots
    before them count as visible if the first query is real.
    """
    new, total = weights.shape[2:]
    uniform = (weights == weights[..., :1]).all(-1).all(1)
    # The last query has no later slot, so its row may be uniform by right: it is padding only if all before it are.
    leading = uniform.int().cumprod(-1).sum(-1)
    if new > 1:
        leading = torch.where(uniform[:, :-1].all(-1), leading, leading.clamp(max=new - 1))
    return torch.where(leading > 0, total - new + leading, 0 if total == new else total - new)


def shows_any_before(mask: Tensor, starts: Tensor) -> bool:
    """Whether some query sees a slot before its row's start. starts: int [B]. Waits for the device."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    before = slots < starts.to(mask.device)[:, None]
    return bool((visible(mask).flatten(1, 2).any(1) & before).any())


def sees_own(mask: Tensor, new_tokens: int, total: int) -> bool:
    """Whether some query sees its own slot, the last of `total` slots being the queries'. Waits for the device."""
    if mask.dim() != 4 or mask.shape[2] != new_tokens or mask.shape[3] < total:
        return True
    own = mask[..., total - new_tokens : total]
    return bool(visible(own).diagonal(dim1=-2, dim2=-1).any())


def leading_hidden(mask: Tensor, new_tokens: int, total: int) -> list[int] | None:
    """How many leading slots each row of a mask over `total` slots hides, if that and what follows a token are all that it
    hides; None for any other mask. The last `new_tokens` slots are the queries' own. Waits for the device."""
    if mask.shape[1] != 1 or mask.shape[2] != new_tokens or mask.shape[3] < total:
        return None
    mask = mask[:, 0, :, :total]
    seen = visible(mask)
    # A finite bias is neither hidden nor plain.
    biased = torch.zeros((), dtype=torch.bool, device=mask.device) if mask is seen else (seen & (mask != 0)).any()
    first = seen.any(1).int().argmax(-1)
    past = total - new_tokens
    # No query sees a slot before `first` or after its own; if they see as many as that leaves, they see all of them.
    expected = new_tokens * (past - first) + new_tokens * (new_tokens + 1) // 2
    wrong = biased | seen[..., past:].triu(1).any() | (first > past).any() | (seen.sum((1, 2)) != expected).any()
    *first, wrong = torch.cat([first, wrong[None].long()]).tolist()
    return None if wrong else first


def is_causal(mask: Tensor, new_tokens: int) -> bool:
    """Whether no query sees a slot after its own, the last `new_tokens` slots being the queries' own. Waits for the device."""
    if mask.shape[2] != new_tokens:
        return False
    return not bool(visible(mask[..., -new_tokens:]).triu(1).any())


class _Known:
    """A mask, how often it had been written to, and what has been asked of it."""

    def __init__(self, mask: Tensor, version: int | None):
        self.mask, self.version, self.answers = mask, version, {}


class MaskMemory:
    """What has been asked of the masks of the forward that is running: the layers of a cache share it, so each question is
    answered once for all of them.

    A mask that has been written to since (a preallocated buffer) is read anew, and everything is forgotten when the next forward
    begins or the last layer has asked; so nothing outlives a forward, in a captured graph neither.
    """

    def __init__(self):
        self.first_layer: int | None = None
        self.last_layer: int | None = None
        self._latest = -1
        self._known: list[_Known] = []

    def __getstate__(self):
        # Answers belong to a moment: copies and pickles begin without any.
        return {"first_layer": self.first_layer, "last_layer": self.last_layer, "_latest": self._latest}

    def serve(self, layer: int) -> None:
        """Say that a layer will ask, in their order."""
        self.first_layer, self.last_layer = layer if self.first_layer is None else self.first_layer, layer

    def __setstate__(self, state):
        self.__dict__.update(state, _known=[])

    def enter(self, layer: int) -> None:
        """Say that a layer begins its part of a forward; one that is not after the latest begins another forward."""
        if layer <= self._latest:
            self._known = []
        self._latest = layer

    def ask(self, layer: int, mask: Tensor, question: Hashable, answer: Callable[[], Any]) -> Any:
        """What `answer` says of a mask, from memory if a layer has asked the same `question` in this forward."""
        # Inference tensors do not count what is written to them, and tracing knows no versions: within a forward a mask stays
        # as it is.
        untold = torch.compiler.is_compiling() or mask.is_inference()
        version = None if untold else mask._version
        known = None
        for one in self._known:
            if one.mask is mask and one.version == version:
                known = one
        if known is None:
            known = _Known(mask, version)
            self._known = [one for one in self._known if one.mask is not mask] + [known]
        if question not in known.answers:
            known.answers[question] = answer()
        if layer == self.last_layer:
            self._known = []
        return known.answers[question]
