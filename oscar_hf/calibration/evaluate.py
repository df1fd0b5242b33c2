"""Quality of an artifact on a model: KL divergence from the exact cache, next-token agreement, perplexity.

One forward pass computes exactly what decoding token by token through an OscarCache would: query i sees key j as the model
made it when j < sink or i - j < recent, else as packing and unpacking leaves it. Errors compound through the layers as they
do in decoding.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..artifact.artifact import Artifact
from ..attention.kv_handle import OscarKV
from ..attention.views import DenseView
from ..errors import ArtifactError, UnsupportedModelError
from ..kernels.append import append_rows
from ..kernels.dequantize import dequantize_rows
from ..quantization.block_centers import open_blocks
from ..quantization.kv_side import Side, SideFormat
from ..storage import prompt_statistics
from ..storage.prompt_statistics import PromptStatistics
from ..transformers_compat import model_config as compat
from ..transformers_compat.versions import CACHE_ARGUMENT, logit_scaling, without_head

_QUERY_BLOCK = 256
_LOGIT_ELEMENTS = 1 << 25


@dataclass
class Quality:
    """What `evaluate` found: means over the judged positions, against the model with an exact cache.

    Attributes:
        kl (`float`): KL divergence of the next-token distributions from the exact ones, in nats.
        agreement (`float`): Share of positions at which the likeliest next token is the same.
        perplexity (`float`): Perplexity of the text with what is packed.
        reference_perplexity (`float`): Perplexity of the text with the exact cache, in the model's dtype.
        bits (`float`): Bits per packed element, scales and minima included.
        positions (`int`): Positions judged.
        kl_by_sequence (`list[float]`): The mean divergence of each sequence.
        kl_by_position (`dict[str, float]`): The mean divergence at positions "first-last", in steps of half octaves.

    Example:

    ```python
    from oscar_hf import evaluate

    quality = evaluate(model, artifact, sequences)
    print(f"{quality.kl:.4f} nats, {quality.agreement:.0%} equal tokens at {quality.bits:.2f} bits")
    ```
    """

    kl: float
    agreement: float
    perplexity: float
    reference_perplexity: float
    bits: float
    positions: int
    kl_by_sequence: list[float]
    kl_by_position: dict[str, float]

    def as_dict(self) -> dict:
        """Plain dict for JSON."""
        return asdict(self)


class _StreamingView(DenseView):
    """What the handles of a StreamingLayer refer to; see kv_handle.OscarKV. Unpadded prompts of one call only."""

    def see_queries(self, query):
        self.layer.see_queries(query)

    def attend(self, query, mask, is_causal, scale, repeat):
        self.layer.used = True
        return streaming_attention(self.layer, query, self.keys, self.values, scale)

    def _unsupported(self, *args):
        raise UnsupportedModelError("evaluation needs a model with attn_implementation='sdpa'")

    scores = weighted_sum = dense = _unsupported


class StreamingLayer(DynamicLayer):
    """One layer of the evaluation: its artifact's quantizer between update and attention. side: "kv", "k" or "v".

    prompt: the first tokens, from which constants are made that the artifact leaves to the cache.
    """

    def __init__(self, artifact: Artifact, config, layer_idx: int, side: str, prompt: int):
        super().__init__()
        self.artifact, self.config, self.layer_idx, self.side = artifact, config, layer_idx, side
        self.prompt, self.used, self.statistics = prompt, False, None

    def update(self, key_states, value_states, *args, **kwargs):
        constants = self.artifact.constants_for(self.layer_idx, key_states, value_states)
        self.constants = constants.for_rule(self.config.key_rule)
        if prompt_statistics.is_needed(self.config, constants):
            self.statistics = PromptStatistics(self.config, constants, key_states.shape[1])
        view = _StreamingView(self, key_states, value_states)
        return OscarKV(view, "k", key_states.shape), OscarKV(view, "v", value_states.shape)

    def _format(self, kind: str) -> SideFormat:
        constants = self.constants
        return self.config.side_format(*(("key", constants.key_dim) if kind == "k" else ("value", constants.value_dim)))

    @property
    def bits(self) -> float:
        """Bits per history element, scale and min included, keys and values together."""
        forms = [self._format(kind) for kind in "kv"]
        return sum(form.bits * form.dim for form in forms) / sum(form.dim for form in forms)

    def see_queries(self, query: Tensor) -> None:
        """Learn from the queries of the prompt."""
        if self.statistics is not None:
            self.statistics.see(query[:, :, : self.prompt], 0, [])

    def round_trip(self, x: Tensor, kind: str) -> Tensor:
        """Keys ("k") or values ("v") [B, H, T, D] after packing and unpacking; those of the sink stay as they are."""
        sink, form = self.config.sink_tokens, self._format(kind)
        packed = x[:, :, sink:]
        tokens = packed.shape[2]
        if kind not in self.side or not tokens:
            return x
        if kind == "k" and self.statistics is not None:
            self.constants = self.statistics.constants(x[:, :, sink : max(self.prompt, sink + 1)], [])
        rows = form.new_rows(*x.shape[:2], x.device, tokens)
        side = Side(form, rows, **self.constants.of_side("key" if kind == "k" else "value", form))
        open_blocks(rows, 0, tokens, packed)
        append_rows(side, 0, packed)
        return torch.cat([x[:, :, :sink], dequantize_rows(side, 0, tokens, x.dtype)], 2)


def streaming_attention(layer: StreamingLayer, query: Tensor, keys: Tensor, values: Tensor, scale) -> Tensor:
    """Causal attention [B, Hq, T, D] in which query i sees key j exact if j < sink or i - j < recent, else quantized."""
    sink, recent = layer.config.sink_tokens, layer.config.recent_tokens
    packed_keys, packed_values = layer.round_trip(keys, "k"), layer.round_trip(values, "v")
    heads, total = keys.shape[1:3]
    grouped = query.unflatten(1, (heads, -1))
    group = grouped.shape[2]
    positions = torch.arange(total, device=query.device)
    outputs = []
    for begin in range(0, total, _QUERY_BLOCK):
        end = min(total, begin + _QUERY_BLOCK)
        own = positions[begin:end, None]
        # Columns: exact sink | packed history of the oldest to the newest query | exact recent of the same.
        first = min(sink, end)
        middle = max(first, end - recent)
        near = max(first, begin - recent + 1)
        columns = [slice(0, first), slice(first, middle), slice(near, end)]
        masks = [
            positions[None, columns[0]] <= own,
            own - positions[None, columns[1]] >= recent,
            (positions[None, columns[2]] <= own) & (own - positions[None, columns[2]] < recent),
        ]
        block_keys = torch.cat([keys[:, :, columns[0]], packed_keys[:, :, columns[1]], keys[:, :, columns[2]]], 2)
        block_values = torch.cat(
            [values[:, :, columns[0]], packed_values[:, :, columns[1]], values[:, :, columns[2]]], 2
        )
        block_query = grouped[:, :, :, begin:end].flatten(2, 3)
        mask = torch.cat(masks, 1).repeat(group, 1)
        output = F.scaled_dot_product_attention(block_query, block_keys, block_values, attn_mask=mask, scale=scale)
        outputs.append(output.unflatten(2, (group, end - begin)))
    return torch.cat(outputs, 3).flatten(1, 2)


def _hidden_states(model, ids: Tensor, cache: Cache) -> Tensor:
    body = without_head(model)
    return body(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state[0]


def _log_probabilities(model, hidden: Tensor) -> Tensor:
    factor, softcap = logit_scaling(compat.text_config(model.config))
    logits = factor * model.get_output_embeddings()(hidden).float()
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.log_softmax(-1)


def evaluate(
    model: PreTrainedModel,
    artifact: Artifact,
    sequences: list[Tensor],
    first_position: int | None = None,
    side: str = "kv",
    progress: Callable[[], object] = lambda: None,
    *,
    sink_tokens: int | None = None,
    recent_tokens: int | None = None,
    group_size: int | None = None,
    key_scale: str | None = None,
    value_scale: str | None = None,
    key_symmetric: bool | None = None,
    value_symmetric: bool | None = None,
    key_center: str | None = None,
    key_block: int | None = None,
) -> Quality:
    """Measure what packing with an artifact costs a model on a text, as decoding token by token would.

    The model is compared with itself and an exact cache, in its own dtype. The keyword arguments from `sink_tokens` on
    change how rows are stored; None leaves what the artifact says.

    Args:
        model (`PreTrainedModel`): The artifact's model, under sdpa attention.
        artifact (`Artifact`): What is judged.
        sequences (`list[Tensor]`): Token ids [1, T] of text that was not used to calibrate.
        first_position (`int`, *optional*): First position that is judged, up to T - 2. Defaults to T / 2.
        side (`str`, defaults to `"kv"`): What is packed: `"kv"`, or `"k"` or `"v"` for keys or values alone.
        progress (`Callable`, *optional*): Called after each sequence.
        sink_tokens (`int`, *optional*): First tokens that stay exact.
        recent_tokens (`int`, *optional*): Last tokens that stay exact.
        group_size (`int`, *optional*): Channels per scale.
        key_scale (`str`, *optional*): How the scales of keys are chosen, see `ScaleRule`.
        value_scale (`str`, *optional*): How those of values are chosen.
        key_symmetric (`bool`, *optional*): Store a scale of keys but no minimum.
        value_symmetric (`bool`, *optional*): The same of values.
        key_center (`str`, *optional*): What is taken off keys, `"block"`, `"mean"` or `"none"`.
        key_block (`int`, *optional*): Tokens of a block of `key_center="block"`.

    Returns:
        `Quality`: Divergence, agreement, perplexities and bits.

    Raises:
        `ArtifactError`: If an argument is not allowed or the artifact does not fit the model.
        `UnsupportedModelError`: If a layer does not attend through the cache.

    Example:

    ```python
    from oscar_hf import Artifact, evaluate

    ids = tokenizer(open("book.txt").read(), return_tensors="pt")["input_ids"]
    quality = evaluate(model, Artifact.load("my-artifact"), [ids[:, :4096]])
    print(quality.kl, quality.agreement)
    ```
    """
    storage = dict(
        sink_tokens=sink_tokens, recent_tokens=recent_tokens, group_size=group_size, key_scale=key_scale,
        value_scale=value_scale, key_symmetric=key_symmetric, value_symmetric=value_symmetric,
        key_center=key_center, key_block=key_block,
    )  # fmt: skip
    given = {name: value for name, value in storage.items() if value is not None}
    return Evaluation(model, sequences, first_position).judge(artifact, side, progress, **given)


class Evaluation:
    """A model and a text by which artifacts are judged, see `evaluate`: what the exact cache gives is computed once for all."""

    def __init__(self, model: PreTrainedModel, sequences: list[Tensor], first_position: int | None = None):
        self.model, self.sequences, self.first_position = model, sequences, first_position
        self.decoder = compat.text_config(model.config)
        self._exact: dict[int, Tensor] = {}

    @torch.no_grad()
    def judge(
        self, artifact: Artifact, side: str = "kv", progress: Callable[[], object] = lambda: None, **storage
    ) -> Quality:
        """Quality of an artifact, its storage fields replaced by `storage`."""
        config = artifact.config.override(**storage)
        if side not in ("kv", "k", "v"):
            raise ArtifactError(f"side: got {side!r}, allowed are kv, k, v")
        found, by_sequence, bits = [], [], []
        for index, ids in enumerate(self.sequences):
            ids = ids.to(self.model.device)
            begin = self._begin(ids.shape[1])
            exact = self._exact_states(index, ids)[begin:-1]
            # What is judged comes after the prompt; nothing is packed before the windows are full.
            prompt = max(begin, config.sink_tokens + config.recent_tokens)
            packed, bits = self._packed_states(ids, artifact, config, side, prompt)
            own = self._compare(exact, packed[begin:-1], ids[0, begin + 1 :])
            by_sequence.append(float(own[0].mean()))
            found.append(torch.cat([own, torch.arange(begin, ids.shape[1] - 1, dtype=torch.float64)[None]]))
            progress()
        divergence, agreement, loss, exact_loss, position = torch.cat(found, 1)
        return Quality(
            kl=float(divergence.mean()),
            agreement=float(agreement.mean()),
            perplexity=float(loss.mean().exp()),
            reference_perplexity=float(exact_loss.mean().exp()),
            bits=sum(bits) / len(bits),
            positions=len(position),
            kl_by_sequence=by_sequence,
            kl_by_position=_by_position(divergence, position.long()),
        )

    def _begin(self, total: int) -> int:
        begin = total // 2 if self.first_position is None else self.first_position
        if not 0 <= begin < total - 1:
            raise ArtifactError(
                f"first_position: got {begin}, allowed are 0 .. {total - 2} for sequences of {total} tokens"
            )
        return begin

    def _exact_states(self, index: int, ids: Tensor) -> Tensor:
        if index not in self._exact:
            self._exact[index] = _hidden_states(self.model, ids, Cache(layers=compat.native_layers(self.decoder)))
        return self._exact[index]

    def _packed_states(self, ids, artifact, config, side, prompt) -> tuple[Tensor, list[float]]:
        """Last hidden states with what is packed, and the bits of each layer."""
        layers = compat.native_layers(self.decoder)
        ours = [i for i, layer in enumerate(layers) if compat.is_plain_attention(layer)]
        for index in ours:
            layers[index] = StreamingLayer(artifact, config, index, side, prompt)
        states = _hidden_states(self.model, ids, Cache(layers=layers))
        unseen = [index for index in ours if not layers[index].used]
        if unseen:
            raise UnsupportedModelError(
                f"layers {unseen} did not attend through the cache: load the model with sdpa attention"
            )
        return states, [layers[index].bits for index in ours]

    def _compare(self, exact: Tensor, packed: Tensor, target: Tensor) -> Tensor:
        """Divergence, agreement and the two losses at each position, float64 [4, positions] on the CPU."""
        parts, chunk = [], max(16, _LOGIT_ELEMENTS // self.decoder.vocab_size)
        for a in range(0, len(target), chunk):
            expected = _log_probabilities(self.model, exact[a : a + chunk])
            got = _log_probabilities(self.model, packed[a : a + chunk])
            token = target[a : a + chunk, None]
            parts.append(torch.stack([
                (expected.exp() * (expected - got)).sum(-1).double(),
                (expected.argmax(-1) == got.argmax(-1)).double(),
                -got.gather(1, token)[:, 0].double(),
                -expected.gather(1, token)[:, 0].double(),
            ]).cpu())  # fmt: skip
        return torch.cat(parts, 1)


def _by_position(divergence: Tensor, position: Tensor) -> dict[str, float]:
    """Mean divergence between edges at 2^n and 1.5 * 2^n."""
    edges = sorted({0, *(1 << n for n in range(8, 32)), *(3 << n for n in range(8, 30))})
    found = {}
    for first, end in zip(edges, edges[1:]):
        within = (position >= first) & (position < end)
        if within.any():
            found[f"{first}-{end - 1}"] = float(divergence[within].mean())
    return found
