"""The same operations on DynamicCache, transformers' QuantizedCache and OscarCache: which are right, wrong, or refused?

    pip install optimum-quanto hqq termcolor        # optional rivals; a column says if one is not there (fp8: transformers 5.24)
    python examples/compare_caches.py               # a Markdown table, a minute or two on a CPU

A cache is judged by its own semantics: what is deterministic (gathers, copies, reset, beams, drafts) must give the logits of a
cache of the same kind that was fed the plain way. Where a lossy cache may store the same tokens in another way (deep crops,
padding) the KL divergence from the exact result must be at most three times that of the same kind fed the plain way. The
model is tiny and random, all caches have their default windows, and the rivals get 4 bits where OscarCache has 2.
"""

import argparse
import copy
import sys
import warnings

import torch
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    QuantizedCache,
)
from transformers import logging as transformers_logging

from oscar_hf import OscarCache
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

PROMPT, STEPS = 450, 20
COMMON = dict(
    vocab_size=128, hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=4096,
)  # fmt: skip
KINDS = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "QuantizedCache quanto": lambda config: QuantizedCache("quanto", config),
    "QuantizedCache hqq": lambda config: QuantizedCache("hqq", config, axis_key=1, axis_value=1),
    "QuantizedCache fp8": lambda config: QuantizedCache("fp8", config),  # from transformers 5.24 on
    "OscarCache": lambda config: OscarCache(config, recipe="hadamard"),
    "OscarCache static": lambda config: OscarCache(config, recipe="hadamard", max_cache_len=1024),
}


class WrongResult(Exception):
    """A cache took an operation and gave a result that its own semantics do not allow."""


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # The default 0.02 makes attention nearly uniform, which would hide wrong keys.
                parameter.normal_(0, 0.3 if "embed" in name else 1.0 / parameter.shape[-1] ** 0.5)
    return model


def ids_of(batch, length, seed):
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def kl(expected, got):
    p, q = expected.log_softmax(-1), got.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def must_equal(got, expected, what="logits"):
    """Deterministic operations: the same up to the order of float32 sums."""
    if got.shape != expected.shape:
        raise WrongResult(f"{what} of shape {list(got.shape)}, not {list(expected.shape)}")
    if not torch.allclose(got, expected, atol=2e-3, rtol=1e-3):
        distance = (
            f"KL {kl(expected, got):.2g}" if got.is_floating_point() else f"{(got != expected).sum()} tokens differ"
        )
        raise WrongResult(f"other {what}: {distance}")


def must_be_as_good(got, plain, exact):
    """Lossy storage of the same tokens: at most three times as far from the exact result."""
    error, allowed = kl(exact, got), 3 * kl(exact, plain) + 1e-3
    if not error <= allowed:
        raise WrongResult(f"KL {error:.2g} from the exact result, at most {allowed:.2g} expected")


class NotOffered(Exception):
    """A cache does not claim to do this."""


class Bench:
    """One kind of cache on one model."""

    def __init__(self, kind, model):
        self.kind, self.model = kind, model

    def make(self):
        return KINDS[self.kind](self.model.config)

    def exact(self):
        return DynamicCache(config=self.model.config)

    def feed(self, cache, ids, mask=None):
        positions = {} if mask is None else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        return self.model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **positions).logits

    def prepared(self, batch=1, steps=STEPS, seed=0, make=None):
        """A cache after a prompt and some single tokens, and all ids."""
        ids, cache = ids_of(batch, PROMPT + steps, seed), (make or self.make)()
        self.feed(cache, ids[:, :PROMPT])
        for at in range(PROMPT, PROMPT + steps):
            self.feed(cache, ids[:, at : at + 1])
        return cache, ids

    def probe(self, cache, batch=1):
        """Logits of a few more tokens, which show what the cache holds."""
        return torch.cat([self.feed(cache, ids_of(batch, 1, 100 + i)) for i in range(6)], 1)

    def generate(self, cache, ids, **options):
        options = {"max_new_tokens": 24, "do_sample": False, CACHE_ARGUMENT: cache, **options}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def length(bench, cache, expected):
    if int(cache.get_seq_length()) != expected:
        raise WrongResult(f"get_seq_length() says {int(cache.get_seq_length())} of {expected} tokens")


def crop_recent(bench):
    cache, _ = bench.prepared()
    cache.crop(-5)
    length(bench, cache, PROMPT + STEPS - 5)
    plain, _ = bench.prepared(steps=STEPS - 5)
    exact, _ = bench.prepared(steps=STEPS - 5, make=bench.exact)
    # Not equal: five tokens more than of `plain` may be packed.
    must_be_as_good(bench.probe(cache), bench.probe(plain), bench.probe(exact))


def crop_deep(bench):
    cache, ids = bench.prepared()
    cache.crop(-350)
    keep = PROMPT + STEPS - 350
    length(bench, cache, keep)
    exact = bench.exact()
    bench.feed(exact, ids[:, :keep])
    # A fresh cache of so few tokens may hold them all exactly: what a packed token costs shows at the full length.
    full, exact_full = (bench.probe(bench.prepared(make=make)[0]) for make in (bench.make, bench.exact))
    limit = 3 * kl(exact_full, full) + 1e-3
    if not (error := kl(bench.probe(exact), bench.probe(cache))) <= limit:
        raise WrongResult(f"KL {error:.2g} from the exact result, at most {limit:.2g} expected")


def crop_then_append(bench):
    cache, ids = bench.prepared()
    cache.crop(-350)
    more = ids_of(1, 600, 7)
    exact = bench.exact()
    bench.feed(exact, ids[:, : PROMPT + STEPS - 350])
    plain = bench.make()
    bench.feed(plain, ids[:, : PROMPT + STEPS - 350])
    for each in (cache, plain, exact):
        bench.feed(each, more)
    must_be_as_good(bench.probe(cache), bench.probe(plain), bench.probe(exact))


def crop_everything(bench):
    cache, _ = bench.prepared()
    cache.crop(-PROMPT - STEPS)
    length(bench, cache, 0)
    ids, fresh = ids_of(1, PROMPT, 3), bench.make()
    must_equal(bench.feed(cache, ids)[:, -1], bench.feed(fresh, ids)[:, -1])
    must_equal(bench.probe(cache), bench.probe(fresh))


def gather(operation, rows):
    def check(bench):
        cache, _ = bench.prepared(batch=3)
        kept, _ = bench.prepared(batch=3)
        operation(cache)
        tokens = ids_of(3, 1, 5)
        must_equal(bench.feed(cache, tokens[rows]), bench.feed(kept, tokens)[rows])

    return check


def reset_and_reuse(bench):
    cache, _ = bench.prepared()
    cache.reset()
    length(bench, cache, 0)
    ids, fresh = ids_of(1, PROMPT, 3), bench.make()
    must_equal(bench.feed(cache, ids)[:, -1], bench.feed(fresh, ids)[:, -1])
    must_equal(bench.probe(cache), bench.probe(fresh))


def deep_copy(bench):
    cache, _ = bench.prepared()
    twin = copy.deepcopy(cache)
    first = bench.probe(cache)
    length(bench, twin, PROMPT + STEPS)
    must_equal(bench.probe(twin), first)


def beams(bench):
    """The score that beam search reports for its best text is the score of that text, fed without beams."""
    ids = ids_of(1, PROMPT, 0)
    output = bench.generate(
        bench.make(), ids, num_beams=4, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    text, cache = output.sequences[:, PROMPT:], bench.make()
    logits = [bench.feed(cache, ids)[:, -1]]
    logits += [bench.feed(cache, text[:, at : at + 1])[:, -1] for at in range(text.shape[1] - 1)]
    score = torch.stack(logits, 1).log_softmax(-1).gather(-1, text[..., None]).sum()
    if abs(score - output.sequences_scores[0]) > 0.02:
        raise WrongResult(f"the best beam scores {output.sequences_scores[0]:.2f}, its text alone {score:.2f}")


def assisted(bench):
    """Drafts of another model leave the greedy text as it is without drafts."""
    draft = random_model(LlamaConfig(**COMMON, num_hidden_layers=1))
    ids = ids_of(1, PROMPT, 0)
    must_equal(bench.generate(bench.make(), ids, assistant_model=draft), bench.generate(bench.make(), ids), "text")


def several_turns(bench):
    cache, ids, plain = bench.make(), ids_of(1, PROMPT, 0), bench.make()
    for turn in range(3):
        ids = bench.generate(cache, torch.cat([ids, ids_of(1, 40, turn)], 1), max_new_tokens=8)
    exact = bench.exact()
    for each in (plain, exact):
        bench.feed(each, ids[:, :-1])
    must_be_as_good(bench.probe(cache), bench.probe(plain), bench.probe(exact))


def left_padding(bench):
    """A padded row is as good as the same row alone."""
    ids, pad = ids_of(2, PROMPT, 0), 70
    mask = torch.ones_like(ids)
    mask[1, :pad], ids[1, :pad] = 0, 0

    def fed(cache, ids, mask):
        logits = [bench.feed(cache, ids, mask)[:, -1:]]
        for step in range(STEPS):
            mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
            logits.append(bench.feed(cache, ids_of(1, 1, step).expand(len(mask), 1), mask))
        return torch.cat(logits, 1)

    got = fed(bench.make(), ids, mask)[1:]
    alone = [fed(cache, ids[1:, pad:], mask[1:, pad:]) for cache in (bench.make(), bench.exact())]
    must_be_as_good(got, *alone)


def hybrid_bench(bench):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**COMMON, num_hidden_layers=3, sliding_window=64, layer_types=layers)
    return Bench(bench.kind, random_model(config))


def hybrid(bench):
    """A model of sliding and full layers: an ordinary loss, far below that of a context of other tokens."""
    bench = hybrid_bench(bench)
    got, exact = (bench.probe(bench.prepared(make=make)[0]) for make in (bench.make, bench.exact))
    other = bench.probe(bench.prepared(seed=9, make=bench.exact)[0])
    if kl(exact, got) > 0.1 * kl(exact, other):
        raise WrongResult(f"KL {kl(exact, got):.2g} from the exact result, other tokens give {kl(exact, other):.2g}")


def compiled(bench):
    """generate() compiles the decode step, once, and gives the text of the uncompiled cache."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    options = CompileConfig(backend=count, mode=None, fullgraph=False)
    options._compile_all_devices = True
    cache, ids = bench.make(), ids_of(1, PROMPT, 0)
    if not cache.is_compileable:
        raise NotOffered("not compileable")
    text = bench.generate(cache, ids, compile_config=options, disable_compile=False)
    must_equal(text, bench.generate(bench.make(), ids, disable_compile=True), "text")
    if len(graphs) != 1:
        raise WrongResult(f"{len(graphs)} graphs")


OPERATIONS = {
    "crop 5 recent tokens": crop_recent,
    "crop 350 of 470 tokens": crop_deep,
    "crop 350, append 600": crop_then_append,
    "crop everything, reuse": crop_everything,
    "reorder_cache": gather(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "batch_select_indices": gather(lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "batch_repeat_interleave": gather(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reset, reuse": reset_and_reuse,
    "deepcopy, go on with both": deep_copy,
    "beams = no beams": beams,
    "assisted = greedy": assisted,
    "several turns": several_turns,
    "left padding": left_padding,
    "hybrid model": hybrid,
    "hybrid: reset, reuse": lambda bench: reset_and_reuse(hybrid_bench(bench)),
    "hybrid: batch_select_indices": lambda bench: OPERATIONS["batch_select_indices"](hybrid_bench(bench)),
    "compiled decode step": compiled,
}


@torch.no_grad()
def result(kind, operation, model) -> str:
    """One cell of the table."""
    try:
        OPERATIONS[operation](Bench(kind, model))
        return "right"
    except NotOffered as error:
        return f"not offered: {error}"
    except WrongResult as error:
        return f"**wrong**: {error}"
    except ImportError as error:
        return f"not installed ({str(error).split('.')[0][:60]})"
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        return f"raises {type(error).__name__}: {reason[:70]}"


def main() -> int:
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    model = random_model(LlamaConfig(**COMMON, num_hidden_layers=2))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    wanted = parser.parse_args().kinds or list(KINDS)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        parser.error(f"unknown caches {', '.join(unknown)}: use {', '.join(KINDS)}")
    print(f"| operation | {' | '.join(wanted)} |\n|{' --- |' * (len(wanted) + 1)}")
    for operation in OPERATIONS:
        cells = [result(kind, operation, model).replace("|", "/") for kind in wanted]
        print(f"| {operation} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
