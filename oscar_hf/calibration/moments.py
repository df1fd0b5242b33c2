"""Attention statistics of a model, gathered layer by layer while it runs over text.

The model is run with a cache whose `update` returns OscarKV handles, so queries are seen wherever the packed attention of
OscarCache would see them: no hooks, no patched attention. What is kept per layer are float64 moments, nothing of the text.
"""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..artifact.config import KEY_BLOCK
from ..attention.kv_handle import OscarKV
from ..attention.packed import exact_attention
from ..attention.views import DenseView
from ..errors import UnsupportedModelError
from ..transformers_compat import model_config as compat
from ..transformers_compat.versions import CACHE_ARGUMENT, without_head


class LayerMoments:
    """Float64 sums over tokens of one layer, per KV head; post-RoPE queries and keys, raw values.

    The g query heads that read a KV head count as one stack of T g rows. `sink_tokens` first tokens of each sequence are
    left out of the statistics of what gets packed (keys and their queries), not out of the paper's moments. center_block: tokens
    of a block of keys whose mean is taken off.
    """

    def __init__(self, sink_tokens: int, center_block: int = KEY_BLOCK):
        self.sink_tokens, self.center_block = sink_tokens, center_block or KEY_BLOCK
        self.key_dim = self.value_dim = self.kv_heads = None
        self.queries = self.tokens = self.late_queries = self.late_tokens = 0
        self.query_moment = self.late_query_moment = self.late_key_sum = self.late_key_moment = None
        self.block_key_moment = None
        self.output_moment = self.score_value_moment = self.score_sum = None

    def _start(self, keys: Tensor, values: Tensor) -> None:
        self.kv_heads, self.key_dim, self.value_dim = keys.shape[0], keys.shape[2], values.shape[2]

        def zeros(*shape):
            return torch.zeros(self.kv_heads, *shape, dtype=torch.float64, device=keys.device)

        key, value = (self.key_dim, self.key_dim), (self.value_dim, self.value_dim)
        self.query_moment, self.late_query_moment, self.late_key_moment = zeros(*key), zeros(*key), zeros(*key)
        self.block_key_moment = zeros(*key)
        self.late_key_sum, self.output_moment = zeros(self.key_dim), zeros(*value)
        self.score_value_moment, self.score_sum = zeros(*value), zeros()

    def add(self, queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor) -> None:
        """First pass, one sequence: queries [H, g, T, D], keys [H, T, D], values [H, T, Dv], outputs [H, g, T, Dv]."""
        if self.query_moment is None:
            self._start(keys, values)
        sink, group, tokens = self.sink_tokens, queries.shape[1], keys.shape[1]
        early, late = (_moment(part.flatten(1, 2)) for part in (queries[:, :, :sink], queries[:, :, sink:]))
        self.query_moment += early + late
        self.late_query_moment += late
        self.late_key_moment += _moment(keys[:, sink:])
        self.late_key_sum += keys[:, sink:].double().sum(1)
        for block in keys[:, sink:].split(64 * self.center_block, dim=1):
            self.block_key_moment += _moment(_block_centered(block, self.center_block))
        self.output_moment += _moment(outputs.flatten(1, 2))
        self.tokens += tokens
        self.queries += tokens * group
        self.late_tokens += max(0, tokens - sink)
        self.late_queries += max(0, tokens - sink) * group

    def add_scored_values(self, keys: Tensor, values: Tensor) -> None:
        """Second pass: values weighted by the mean squared score of their token, w_t = k_t M k_t^T."""
        keys = keys.double()
        weights = ((keys @ self.query_covariance) * keys).sum(-1).clamp(min=0)
        values = values.double()
        self.score_value_moment += (values * weights[..., None]).mT @ values
        self.score_sum += weights.sum(-1)

    @property
    def query_covariance(self) -> Tensor:
        """M_h = Q_h^T Q_h / (T g), uncentered, over all tokens: [H, D, D]."""
        return self.query_moment / self.queries

    @property
    def late_query_covariance(self) -> Tensor:
        """C_Q: the same over queries after the sink."""
        return self.late_query_moment / max(1, self.late_queries)

    @property
    def key_mean(self) -> Tensor:
        """mu: mean key after the sink, [H, D]."""
        return self.late_key_sum / max(1, self.late_tokens)

    @property
    def key_covariance(self) -> Tensor:
        """Mean outer product of keys less the mean of their block, after the sink, [H, D, D]."""
        return self.block_key_moment / max(1, self.late_tokens)

    @property
    def mean_centered_covariance(self) -> Tensor:
        """Covariance of the keys after the sink, [H, D, D]."""
        mean = self.key_mean
        return self.late_key_moment / max(1, self.late_tokens) - mean[:, :, None] * mean[:, None, :]

    def value_covariance(self, target: str) -> Tensor:
        """C_V per head: `score` sum_t w_t v_t^T v_t / sum_t w_t, or `attention` V^T S^T S V / T of the attention outputs."""
        if target == "attention":
            return self.output_moment / self.queries
        return self.score_value_moment / self.score_sum.clamp(min=1e-300)[:, None, None]


def _block_centered(keys: Tensor, block: int) -> Tensor:
    """Keys [H, T, D] less the mean of their block of neighbors, float64."""
    keys = keys.double()
    return torch.cat([part - part.mean(1, keepdim=True) for part in keys.split(block, dim=1)], 1)


def _moment(x: Tensor) -> Tensor:
    """Sum of outer products over rows, [H, T, D] -> [H, D, D] float64; in slices, for a float64 copy is large."""
    total = torch.zeros(x.shape[0], x.shape[2], x.shape[2], dtype=torch.float64, device=x.device)
    for piece in x.split(8192, dim=1):
        piece = piece.double()
        total += piece.mT @ piece
    return total


class _RecordingView(DenseView):
    """What the handles of a RecordingLayer refer to; see kv_handle.OscarKV."""

    eager_query = None

    def attend(self, query, mask, is_causal, scale, repeat):
        output = exact_attention(query, self.keys, self.values, mask, is_causal, scale, repeat)
        self.layer.record(query, self.keys, self.values, output)
        return output

    def scores(self, query):
        self.eager_query = query
        return query @ self._repeated(self.keys, query).transpose(2, 3)

    def weighted_sum(self, weights):
        output = weights @ self._repeated(self.values, weights)
        self.layer.record(self.eager_query, self.keys, self.values, output)
        return output

    def _repeated(self, x, like):
        return x.repeat_interleave(like.shape[1] // x.shape[1], 1)

    def dense(self, kind):
        return self.keys if kind == "k" else self.values


class RecordingLayer(DynamicLayer):
    """Keeps nothing; hands what attention sees of one sequence to its LayerMoments."""

    def __init__(self, moments: LayerMoments, second_pass: bool):
        super().__init__()
        self.moments, self.second_pass, self.seen = moments, second_pass, 0

    def update(self, key_states, value_states, *args, **kwargs):
        view = _RecordingView(self, key_states, value_states)
        return OscarKV(view, "k", key_states.shape), OscarKV(view, "v", value_states.shape)

    def record(self, query, keys, values, output) -> None:
        """Add the sequences of a call to the moments."""
        self.seen += keys.shape[2]
        for row in range(keys.shape[0]):
            if self.second_pass:
                self.moments.add_scored_values(keys[row], values[row])
            else:
                heads = (keys.shape[1], -1)
                self.moments.add(
                    query[row].unflatten(0, heads), keys[row], values[row], output[row].unflatten(0, heads)
                )

    def get_seq_length(self):
        return 0


def spread_positions(model, sequences: list[Tensor], most: int) -> list[int]:
    """Where sequences may begin, so that together they reach over positions 0..most-1: rotary embeddings turn the slow pairs of
    channels of keys and queries on and on, and moments of the first positions alone know one part of the turn.

    0 for a model that is not the same at all positions, or where sequences are long enough.
    """
    room = [most - ids.shape[1] for ids in sequences]
    if not compat.is_relative(model.config) or len(sequences) < 2 or min(room) < 1:
        return [0] * len(sequences)
    return [index * least // (len(sequences) - 1) for index, least in enumerate(room)]


@torch.no_grad()
def gather(
    model,
    sequences: list[Tensor],
    sink_tokens: int,
    scored_values: bool,
    progress,
    center_block: int = KEY_BLOCK,
    positions: list[int] | None = None,
) -> dict[int, LayerMoments]:
    """Run the model over token sequences [1, T] and return the moments of every full-attention layer.

    scored_values: make the second pass that `value_target="score"` needs. progress: called once per sequence and pass. positions:
    of the first token of each sequence, see `spread_positions`; 0 by default.
    """
    config = compat.text_config(model.config)
    compat.refuse_latent_attention(config)
    moments = {
        i: LayerMoments(sink_tokens, center_block)
        for i, kind in enumerate(compat.layer_types(config))
        if kind == "full_attention"
    }
    if not moments:
        raise UnsupportedModelError(f"{config.model_type} has no full-attention layer: there is nothing to calibrate")
    for second_pass in (False, True) if scored_values else (False,):
        for ids, first in zip(sequences, positions or [0] * len(sequences)):
            where = {"position_ids": first + torch.arange(ids.shape[1], device=model.device)[None]} if first else {}
            layers = compat.native_layers(config)
            for index, layer_moments in moments.items():
                layers[index] = RecordingLayer(layer_moments, second_pass)
            without_head(model)(
                input_ids=ids.to(model.device), use_cache=True, **{CACHE_ARGUMENT: Cache(layers=layers)}, **where
            )
            # More than once where later layers attend to the same keys, too: their queries count like its own.
            unseen = [index for index in moments if layers[index].seen < ids.shape[1]]
            if unseen:
                raise UnsupportedModelError(
                    f"the attention code of {config.model_type} hides its queries from the cache in layers {unseen}: "
                    "load the model with attn_implementation='sdpa' or 'eager'"
                )
            progress()
    return moments
