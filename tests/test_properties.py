"""Random sequences of every operation, on a growing and a static cache at once, against a twin that keeps every token.

OSCAR_HF_EXAMPLES=2000 runs more of them than CI does. All numbers that are quantized lie on a grid on which the transforms
are exact in float32, so that codes must be equal bit for bit however the tokens arrived.
"""

import copy
import os
import pickle
import tempfile

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config
from twin import Twin, coarse

from oscar_hf import Artifact, CacheStateError, OscarCache, OscarConfig
from oscar_hf.artifact.layer_constants import LayerConstants
from oscar_hf.kernels import decode_step
from oscar_hf.kernels.decode import MAX_NEW_TOKENS
from oscar_hf.quantization.block_centers import open_blocks
from oscar_hf.quantization.rotation import hadamard
from oscar_hf.storage import layer_store
from oscar_hf.storage.waiting_prompt import DRAFT_MARGIN

EXAMPLES = int(os.environ.get("OSCAR_HF_EXAMPLES", "200"))
MAX_CACHE_LEN = 150
LOOKS = st.sampled_from(["none", "sdpa", "sdpa", "eager", "dense"])

GEOMETRIES = st.fixed_dictionaries(
    {
        "sink": st.sampled_from([4, 4, 4, 0, 1]),
        "recent": st.sampled_from([5, 6, 7, 8, 8, 33, 64]),
        "key_dim": st.sampled_from([16, 64]),
        "value_dim": st.sampled_from([16, 64]),
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 2),
        "group": st.integers(1, 2),
        "group_size": st.sampled_from([None, 8]),
        "symmetric": st.tuples(st.booleans(), st.booleans()),
        "key_center": st.sampled_from(["block", "block", "mean", "none"]),
        "key_block": st.sampled_from([None, 32, 64]),
        "key_scale": st.sampled_from(["percentile(0.96)", "feedback", "search", "weighted_search"]),
        "value_scale": st.sampled_from(["percentile(0.92)", "unbiased", "search"]),
        "calibrated": st.booleans(),
        "bfloat16": st.sampled_from([False, False, False, True]),
        "seed": st.integers(0, 99),
    }
)
# How the rows of the next new sequence are padded, and how the caches get to know it.
PADDING = st.tuples(
    st.sampled_from(["none", "none", "mask", "stated"]), st.lists(st.integers(0, 12), min_size=3, max_size=3)
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 40), LOOKS, PADDING),
        st.tuples(st.just("update"), st.integers(1, 40), LOOKS, PADDING),
        st.tuples(st.just("steps"), st.integers(1, 20), LOOKS, PADDING),
        st.tuples(st.just("crop"), st.integers(0, 12)),
        st.tuples(st.just("crop"), st.integers(0, 200)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 5), min_size=6, max_size=6)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans()),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("reset"), st.integers(1, 3)),
        st.tuples(st.just("copy"), st.sampled_from(["deepcopy", "pickle", "saved"]), st.booleans()),
        st.tuples(st.just("other"), st.integers(0, 3)),
        st.tuples(st.just("move"), st.booleans()),
        st.tuples(st.just("overflow"), st.integers(1, 40)),
        st.tuples(st.just("iterate")),
    ),
    min_size=1,
    max_size=24,
)  # fmt: skip


def exact_artifact(key_dim, value_dim, heads, seed):
    """Per-head orthogonal transforms, key means and metrics with which every product of grid numbers is exact in float32. As there
    is a metric, nothing is learned."""
    generator = torch.Generator().manual_seed(seed)

    def transform(dim):
        signs = torch.randint(0, 2, (heads, dim, 1), generator=generator) * 2.0 - 1
        order = torch.stack([torch.randperm(dim, generator=generator) for _ in range(heads)])
        return (signs * hadamard(dim).float()).gather(1, order[..., None].expand(-1, -1, dim)).contiguous()

    key, value = transform(key_dim), transform(value_dim)
    mean = torch.randint(-8, 9, (heads, key_dim), generator=generator) / 4
    config = OscarConfig.from_recipe(
        "paper", per_head=True, num_hidden_layers=1, layer_types=["full_attention"],
        num_key_value_heads=heads, head_dim=key_dim, value_head_dim=value_dim,
    )  # fmt: skip
    metric = torch.eye(key_dim).repeat(heads, 1, 1)
    return Artifact(config, {0: LayerConstants(key, key.mT, value, value.mT, mean, metric)})


def open_coarse_blocks(rows, start, stop, *arguments):
    """`open_blocks` whose centers lie on the grid of the rows."""
    open_blocks(rows, start, stop, *arguments)
    if block := rows.center_block:
        opened = rows.centers[:, :, -(-start // block) : -(-stop // block)]
        opened.copy_(coarse(opened))


@pytest.fixture(autouse=True, scope="module")
def coarse_centers():
    with pytest.MonkeyPatch.context() as patch:
        for module in (layer_store, decode_step):
            patch.setattr(module, "open_blocks", open_coarse_blocks)
        yield


class Run:
    """A growing cache, a static one and their twin, and what an operation does to the three."""

    def __init__(
        self, sink, recent, key_dim, value_dim, batch, heads, group, group_size, symmetric, key_center, key_block, key_scale,
        value_scale, calibrated, bfloat16, seed,
    ):  # fmt: skip
        free = Artifact.data_free("hadamard")
        self.artifact = exact_artifact(key_dim, value_dim, heads, seed) if calibrated else free
        if not calibrated:
            # There is no mean, and a metric would be learned, by a growing cache and a static one at different moments.
            key_center = "none" if key_center == "mean" else key_center
            key_scale = key_scale if key_scale in ("percentile(0.96)", "search") else "search"
        key_block = None if key_block == 64 and recent < 64 else key_block
        config = tiny_config("llama", num_hidden_layers=1, num_key_value_heads=heads, head_dim=key_dim)
        options = dict(
            artifact=self.artifact, sink_tokens=sink, recent_tokens=recent, group_size=group_size,
            key_symmetric=symmetric[0] or key_scale == "feedback", key_center=key_center, key_block=key_block,
            key_scale=key_scale, value_symmetric=symmetric[1] or value_scale == "unbiased", value_scale=value_scale,
        )  # fmt: skip
        self.caches = [OscarCache(config, **options), OscarCache(config, max_cache_len=MAX_CACHE_LEN, **options)]
        self.group, self.shape = group, (heads, key_dim, value_dim)
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.tolerance = 0.05 if bfloat16 else 2e-4
        self.constants = self.artifact.constants(0, torch.device("cpu"), key_dim, value_dim)
        self.twin = self.new_twin(batch)
        self.generator, self.others, self.mode = torch.Generator().manual_seed(seed), [], "none"
        self.check()

    def new_twin(self, batch):
        return Twin(self.caches[0].oscar_config, self.constants, batch, *self.shape)

    def random(self, *shape):
        return (torch.randint(-64, 65, shape, generator=self.generator) / 16).to(self.dtype)

    # ------------------------------------------------------------------------------------------------ operations
    def update(self, count, look, padding):
        twin = self.twin
        if twin.total + count > MAX_CACHE_LEN:
            return
        if twin.total == 0:
            self.begin(*padding)
        heads, key_dim, value_dim = self.shape
        keys, values = self.random(twin.batch, heads, count, key_dim), self.random(twin.batch, heads, count, value_dim)
        query = self.random(twin.batch, heads * self.group, count, key_dim) / 8
        widths = [cache.get_mask_sizes(count, 0)[0] for cache in self.caches]
        handles = [cache.update(keys, values, 0) for cache in self.caches]
        twin.update(keys, values)
        # While a row is still all padding every call shows its mask, as a model would.
        undecided = self.mode == "mask" and not twin.starts_known
        if undecided and look in ("none", "dense"):
            look = "sdpa"
        if look == "eager" and twin.total == 1:
            # One slot gives eager weights of 1 whatever the mask: nothing can be learned from them.
            look = "sdpa"
        if look in ("sdpa", "eager"):
            # The call itself reads its own tokens as they came in, also while its mask is being learned.
            expected, real = self.expected(query)
            for handle, width in zip(handles, widths):
                got = self.attend(look, query, handle, width)
                assert got.dtype == self.dtype and torch.isfinite(got[real[:, None].expand(got.shape[:3])]).all()
                self.close(got.double(), expected, real[:, None, :, None])
                del handle
            if self.mode == "mask":
                twin.learn(self.pads)
            elif not twin.starts_known and twin.waiting:
                twin.learn([0] * twin.batch)
        if look == "dense":
            for (key, value), kind in zip(zip(*handles), "kv"):
                for handle in (key, value):
                    dense = handle.source.dense(kind)[:, :, : twin.total]
                    self.close(dense.double(), twin.dense(kind), twin.real()[:, None, :, None])

    def begin(self, mode, pads):
        """A new sequence: its padding, stated or to be seen in the masks of its first calls."""
        twin, self.mode = self.twin, mode
        self.pads = [0] * twin.batch if mode == "none" else (pads * 2)[: twin.batch]
        if mode == "stated":
            for cache in self.caches:
                cache.set_padding(torch.arange(13) >= torch.tensor(self.pads)[:, None])
            twin.starts, twin.starts_known = list(self.pads), True

    def expected(self, query):
        """The twin's attention while the true padding is hidden, whether it has been learned or not."""
        twin = self.twin.copy()
        if self.mode == "mask" and not twin.starts_known:
            twin.starts = [min(pad, twin.total) for pad in self.pads]
        return twin.attend(query, query.shape[3] ** -0.5)

    def attend(self, look, query, handles, width):
        twin, count = self.twin, query.shape[2]
        padded = self.mode != "none" and any(self.pads)
        slots = torch.arange(width)
        starts = self.pads if self.mode == "mask" and not twin.starts_known else twin.starts
        mask = slots >= torch.tensor(starts)[:, None, None, None]
        mask = mask & (slots <= torch.arange(twin.total - count, twin.total)[:, None])
        if look == "sdpa":
            plain = not padded and (count == 1 or twin.total == count)
            if plain and (self.mode == "none") and (count == 1 or self.twin.waiting):
                return F.scaled_dot_product_attention(query, *handles, is_causal=count > 1, enable_gqa=self.group > 1)
            return F.scaled_dot_product_attention(query, *handles, attn_mask=mask, enable_gqa=self.group > 1)
        bias = torch.zeros(mask.shape, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        keys, values = (handle.repeat_interleave(self.group, dim=1) if self.group > 1 else handle for handle in handles)
        weights = torch.matmul(query, keys.transpose(2, 3)) * query.shape[3] ** -0.5 + bias
        return torch.matmul(weights.float().softmax(-1).to(self.dtype), values)

    def steps(self, count, look, padding):
        for _ in range(count):
            self.update(1, look, padding)

    def crop(self, count):
        for cache in self.caches:
            cache.crop(-count)
        self.twin.crop(count)
        if count and self.twin.total:
            # A row that lost all but padding begins with whatever comes next.
            self.pads = [min(pad, self.twin.total) for pad in self.pads]

    def reorder(self, index):
        index = [i % self.twin.batch for i in index[: self.twin.batch]]
        self.gather(index, lambda cache: cache.reorder_cache(torch.tensor(index)))

    def select(self, index, as_mask):
        index = [i % self.twin.batch for i in index]
        if as_mask:
            mask = torch.tensor([row in index for row in range(self.twin.batch)])
            return self.gather(sorted(set(index)), lambda cache: cache.batch_select_indices(mask))
        self.gather(index, lambda cache: cache.batch_select_indices(torch.tensor(index)))

    def repeat(self, times):
        if self.twin.batch * times <= 4:
            index = [row for row in range(self.twin.batch) for _ in range(times)]
            self.gather(index, lambda cache: cache.batch_repeat_interleave(times))

    def gather(self, index, operation):
        if not self.twin.total:
            # Nothing is held: a gather of nothing must do no harm.
            index = list(range(self.twin.batch))
            operation = lambda cache: cache.reorder_cache(torch.tensor(index))
        for cache in self.caches:
            operation(cache)
        self.twin.select(index)
        if self.twin.total:
            self.pads = [self.pads[i] for i in index]

    def reset(self, batch):
        for cache in self.caches:
            cache.reset()
        # An empty cache may be used again for a batch of another size.
        self.twin = self.new_twin(batch)

    def copy(self, how, go_on_with_copy):
        if how == "saved" and not self.twin.total:
            return
        if how == "saved":
            copies = self.saved_and_loaded()
            self.twin.commit()
        else:
            duplicate = copy.deepcopy if how == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
            # Copying changes nothing in its source: what waits goes on waiting in both.
            copies = [duplicate(cache) for cache in self.caches]
        for cache, other in zip(self.caches, copies):
            if how == "deepcopy" and cache.is_initialized:
                assert other.layers[0].constants is cache.layers[0].constants
        aside = (copies, self.twin.copy(), self.mode, getattr(self, "pads", None))
        if go_on_with_copy:
            now = (self.caches, self.twin, self.mode, getattr(self, "pads", None))
            self.caches, self.twin, self.mode, self.pads = aside
            aside = now
        self.others = [*self.others, aside][-3:]

    def saved_and_loaded(self):
        """The folder of each cache, loaded as the other kind."""
        copies = []
        with tempfile.TemporaryDirectory() as folder:
            for cache, length in zip(reversed(self.caches), (None, MAX_CACHE_LEN)):
                cache.save_pretrained(folder, include_artifact=False)
                copies.append(OscarCache.load(folder, artifact=self.artifact, max_cache_len=length))
        return copies

    def other(self, which):
        if self.others:
            now = (self.caches, self.twin, self.mode, getattr(self, "pads", None))
            which %= len(self.others)
            self.caches, self.twin, self.mode, self.pads = self.others[which]
            self.others[which] = now

    def move(self, back):
        for cache in self.caches:
            cache.layers[0].offload()
            if back:
                cache.layers[0].prefetch()
        self.twin.commit()

    def overflow(self, beyond):
        """More than a static cache has room for is refused, and changes nothing."""
        if self.twin.total:
            count = MAX_CACHE_LEN - self.twin.total + beyond
            heads, key_dim, value_dim = self.shape
            shape = (self.twin.batch, heads, count)
            with pytest.raises(CacheStateError, match="max_cache_len"):
                self.caches[1].update(self.random(*shape, key_dim), self.random(*shape, value_dim), 0)

    def iterate(self):
        for cache in self.caches:
            ((keys, values, sliding),) = list(cache)
            assert sliding is None
            if self.twin.total:
                twin = self.twin_of(cache.layers[0])
                for kind, dense in (("k", keys), ("v", values)):
                    self.close(dense.double(), twin.dense(kind), twin.real()[:, None, :, None])
            else:
                assert keys is None or keys.shape[2] == 0

    # ------------------------------------------------------------------------------------------------ checks
    def close(self, got, expected, where):
        assert got.shape == expected.shape
        difference = torch.where(where, (got - expected).abs(), 0)
        assert difference.max() <= self.tolerance, difference.max()

    def twin_of(self, layer):
        """The twin with its waiting tokens packed if the layer's are."""
        twin = self.twin.copy()
        if layer.store.waiting is None:
            twin.commit()
        return twin

    def check(self):
        twin = self.twin
        for cache in self.caches:
            layer, is_static = cache.layers[0], cache is self.caches[1]
            assert layer.store.held == twin.total
            assert cache.get_max_length() == layer.get_max_length() == (MAX_CACHE_LEN if is_static else -1)
            assert getattr(cache, "is_croppable", True) and layer.is_croppable and cache.is_compileable == is_static
            assert cache.is_initialized == layer.is_initialized
            assert not twin.total or layer.is_initialized
            placed = self.twin_of(layer)
            assert (layer.store.tokens, layer.store.history) == (placed.placed, placed.history)
            if twin.total:
                self.check_storage(layer, placed)
            if is_static and layer.store.waiting is not None:
                # Asking for sizes would place what waits.
                continue
            assert int(cache.get_seq_length()) == int(layer.get_seq_length()) == twin.total
            # Few tokens are a step of a static cache unless padding is still unknown.
            takes_steps = is_static and twin.total and layer.store.padding.will_settle
            for count in (1, MAX_NEW_TOKENS, MAX_NEW_TOKENS + 1, 40):
                full = takes_steps and count <= MAX_NEW_TOKENS
                assert layer.get_mask_sizes(count) == (MAX_CACHE_LEN if full else twin.total + count, 0)
            assert not twin.total or cache.batch_size == layer.batch_size == twin.batch

    def check_storage(self, layer, twin):
        sink = layer.store.sink
        starts = layer.store.padding.rows or [0] * twin.batch
        assert starts == twin.starts
        # Sink, history and recent make up the whole, and the exact part is bounded.
        recent = layer.store.tokens - min(sink, layer.store.tokens) - layer.store.history
        assert 0 <= recent <= layer.config.recent_tokens - 1 + DRAFT_MARGIN
        assert (
            layer.store.keys.sink.shape[2] + layer.store.keys.ring.shape[2]
            == sink + layer.config.recent_tokens - 1 + DRAFT_MARGIN
        )
        assert layer.store.keys.rows.capacity >= layer.store.history
        for kind, rows in (("k", layer.store.keys.rows), ("v", layer.store.values.rows)):
            if twin.history:
                for got, expected in zip(rows.read(0, layer.store.history), twin.stored(kind)):
                    assert (got is None and expected is None) or torch.equal(got, expected)
                centers = rows.in_use(layer.store.history).get("centers") if kind == "k" else None
                assert (centers is None) == (kind == "v" or not twin.centers)
                assert centers is None or torch.equal(centers.double(), torch.stack(twin.centers, 2))
            dense, expected = layer.store.dense(kind).double(), twin.dense(kind)
            self.close(dense, expected, twin.real()[:, None, :, None])
            exact = (twin.real() & ~twin.packed())[:, None, :, None]
            assert torch.equal(dense * exact, expected * exact)


@torch.no_grad()
def compare(geometry, operations):
    """Do the operations to both caches and the twin, and compare after each."""
    run = Run(**geometry)
    for name, *arguments in operations:
        getattr(run, name)(*arguments)
        run.check()
    # Copies that were set aside are what they were.
    for index in range(len(run.others)):
        run.other(index)
        run.check()


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    # All but `explain`, which runs a failing sequence hundreds of times more.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)  # fmt: skip
@given(GEOMETRIES, OPERATIONS)
def test_any_sequence_of_operations_equals_the_twin(geometry, operations):
    compare(geometry, operations)
