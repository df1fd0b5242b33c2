"""What a model still finds in a long context with packed keys and values, beside the exact cache: the tasks of `retrieval_tasks`.

A context is read once with each cache, as a shared prompt is, and its questions are answered from copies of that cache, greedily.
Statistics that a cache learns from its prompt are then those of the context without a question.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..artifact.artifact import Artifact
from ..cache.native_layers import select_rows
from ..cache.oscar_cache import OscarCache
from ..errors import OscarError
from ..transformers_compat import model_config as compat
from ..transformers_compat.versions import CACHE_ARGUMENT, without_head
from .retrieval_prompts import Context, Prompts, Question
from .retrieval_tasks import TASKS, make_contexts
from .text import DEFAULT_TEXTS

EXACT = "exact"
# Steps between two looks at what was generated: each waits for the device.
_STEPS_AHEAD = 4
_DEPTHS = 5


@dataclass
class Sample:
    """One question and what each cache made of it.

    Attributes:
        task (`str`): A name of `TASKS`.
        length (`int`): Tokens of the prompt and the longest answer.
        context (`int`): Which of the contexts of that task and length.
        expected (`tuple[str, ...]`): Strings that a right answer holds.
        depths (`tuple[float, ...]`): Where in the context each of them stands, 0 to 1; empty where there is no one place.
        answers (`dict[str, str]`): What was generated, by name of the cache.
    """

    task: str
    length: int
    context: int
    expected: tuple[str, ...]
    depths: tuple[float, ...]
    answers: dict[str, str]

    def found(self, cache: str) -> list[bool]:
        """Which of the expected strings an answer holds."""
        return [is_found(one, self.answers[cache]) for one in self.expected]

    def score(self, cache: str) -> float:
        """Share of the expected strings that an answer holds."""
        return sum(self.found(cache)) / len(self.expected)


def is_found(expected: str, answer: str) -> bool:
    """Whether an answer holds a string, whatever the case."""
    return expected.lower() in answer.lower()


def default_haystack() -> tuple[str, str]:
    """The prose inside the package, and what it is."""
    prose = resources.files("oscar_hf") / "data" / DEFAULT_TEXTS[0]
    return prose.read_text(encoding="utf-8"), "the prose of oscar_hf (Austen, Emma, opening)"


@torch.no_grad()
def retrieve(
    model: PreTrainedModel,
    tokenizer,
    artifacts: dict[str, Artifact],
    text: str,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (4096,),
    samples: int = 50,
    questions: int = 4,
    batch: int = 1,
    seed: int = 0,
    progress: Callable[[list[Sample]], object] = lambda samples: None,
) -> list[Sample]:
    """Ask a model for what is hidden in long contexts, with the exact cache and with an OscarCache of each artifact.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer: Its tokenizer; its chat template is used if it has one.
        artifacts (`dict[str, Artifact]`): What is compared with the exact cache, by a name for it.
        text (`str`): What needles are hidden in, repeated where a context is longer.
        tasks (`Sequence[str]`, *optional*): Names of `TASKS`; all by default.
        lengths (`Sequence[int]`, *optional*): Tokens of a prompt with its longest answer.
        samples (`int`, defaults to 50): Questions of each task and length, rounded up to whole contexts.
        questions (`int`, defaults to 4): Questions about one context. With 1 the tasks are RULER's.
        batch (`int`, defaults to 1):
            Contexts read at a time. Faster, but recipes that learn from the prompt then learn from all of these together.
        seed (`int`, defaults to 0): Another seed, other prompts.
        progress (`Callable`, *optional*): Called with the samples of each batch when it is answered.

    Returns:
        `list[Sample]`: Each question with the answers of all caches, the exact one under the name `"exact"`.

    Raises:
        `OscarError`: For an unknown task, a length that the model does not take or that has no room for the task, and where the
            memory does not suffice.

    Example:

    ```python
    from oscar_hf import Artifact, retrieve

    samples = retrieve(model, tokenizer, {"default": Artifact.data_free()}, text, ["multikey"], [4096], samples=8)
    for name in ("exact", "default"):
        print(name, sum(sample.score(name) for sample in samples) / len(samples))
    ```
    """
    if EXACT in artifacts:
        raise OscarError(f"an artifact cannot go by the name {EXACT!r}, which is that of the exact cache")
    prompts = Prompts(tokenizer, text)
    check_lengths(model, lengths)
    makers = {EXACT: lambda: Cache(layers=compat.native_layers(compat.text_config(model.config)))}
    makers |= {name: _maker(model, artifact) for name, artifact in artifacts.items()}
    stops = _stop_tokens(model, tokenizer)
    found = []
    for length, task, first, contexts in _batches(prompts, tasks, lengths, samples, questions, batch, seed):
        asked = [(row, question) for row, context in enumerate(contexts) for question in context.questions]
        own = [Sample(task, length, first + row, q.expected, q.depths, {}) for row, q in asked]
        for name, make in makers.items():
            try:
                answers = _answers(model, tokenizer, make(), contexts, asked, TASKS[task].new_tokens, stops)
            except torch.OutOfMemoryError as error:
                raise OscarError(
                    f"out of memory with {len(asked)} questions about {len(contexts)} contexts of {length} tokens: take a smaller "
                    "--batch or fewer --questions"
                ) from error
            for sample, answer in zip(own, answers):
                sample.answers[name] = answer
        found += own
        progress(own)
    return found


def mean_score(samples: list[Sample], cache: str) -> float:
    """Percent of the expected strings that a cache's answers hold, each sample of equal weight."""
    return 100 * (sum(sample.score(cache) for sample in samples) / len(samples))


def _maker(model: PreTrainedModel, artifact: Artifact) -> Callable[[], Cache]:
    return lambda: OscarCache(model.config, artifact=artifact)


def contexts_of(samples: int, questions: int) -> int:
    """Contexts of a task and length that give that many samples."""
    return -(-samples // questions)


def check_lengths(model: PreTrainedModel, lengths: Sequence[int]) -> None:
    """Raise OscarError for lengths that the model does not take."""
    most = compat.longest_context(model.config, max(lengths))
    if most < max(lengths):
        raise OscarError(
            f"this model takes at most {most} tokens (max_position_embeddings), got a length of {max(lengths)}"
        )


def _batches(prompts, tasks, lengths, samples, questions, batch, seed) -> Iterator[tuple[str, int, int, list[Context]]]:
    """(length, task, index of the first context, contexts): what is read at a time."""
    count = contexts_of(samples, questions)
    for length in lengths:
        for task in tasks:
            contexts = make_contexts(prompts, task, length, count, questions, seed)
            for first in range(0, count, batch):
                yield length, task, first, contexts[first : first + batch]


def _stop_tokens(model: PreTrainedModel, tokenizer) -> set[int]:
    """Tokens that end an answer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


def _answers(
    model: PreTrainedModel,
    tokenizer,
    cache: Cache,
    contexts: list[Context],
    asked: list[tuple[int, Question]],
    new_tokens: int,
    stops: set[int],
) -> list[str]:
    """The answer to each question. asked: (row of its context, question)."""
    _read(model, cache, torch.tensor([context.ids for context in contexts], device=model.device))
    answers = [""] * len(asked)
    groups: dict[int, list[int]] = {}
    for index, (_, question) in enumerate(asked):
        groups.setdefault(len(question.ids), []).append(index)
    while groups:
        # Questions of one length are answered together, the last ones from the cache itself.
        _, group = groups.popitem()
        own = copy.deepcopy(cache) if groups else cache
        rows = torch.tensor([asked[i][0] for i in group], device=model.device)
        _select(own, rows)
        questions = [asked[i][1] for i in group]
        for i, answer in zip(group, _generate(model, tokenizer, own, questions, new_tokens, stops)):
            answers[i] = answer
    return answers


def _select(cache: Cache, rows: Tensor) -> None:
    """Keep these rows of the batch, some of them several times."""
    if isinstance(cache, OscarCache):
        cache.batch_select_indices(rows)
    else:
        for layer in cache.layers:
            select_rows(layer, rows)


def _read(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Last hidden states [B, D] of tokens [B, T]."""
    body = without_head(model)
    return body(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}).last_hidden_state[:, -1]


def _generate(
    model: PreTrainedModel, tokenizer, cache: Cache, questions: list[Question], most: int, stops: set[int]
) -> list[str]:
    """Greedy answers, each up to its end or until it holds all that is expected: more words would not change its score."""
    head = model.get_output_embeddings()
    ids = torch.tensor([question.ids for question in questions], device=model.device)
    steps: list[Tensor] = []
    answers = [""] * len(questions)
    for step in range(1, most + 1):
        # What a model does to its logits after the head leaves the largest the largest.
        ids = head(_read(model, cache, ids)).argmax(-1, keepdim=True)
        steps.append(ids)
        if step % _STEPS_AHEAD and step < most:
            continue
        rows = [_until(row, stops) for row in torch.cat(steps, 1).tolist()]
        answers = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        if all(
            len(row) < step or all(is_found(one, answer) for one in question.expected)
            for row, answer, question in zip(rows, answers, questions)
        ):
            break
    return answers


def _until(row: list[int], stops: set[int]) -> list[int]:
    """The tokens before the first that ends an answer."""
    for index, token in enumerate(row):
        if token in stops:
            return row[:index]
    return row


# ------------------------------------------------------------------------------------------------------ scores
@dataclass
class Score:
    """Scores of one task and length, or the mean of the tasks of a length, in percent.

    Attributes:
        task (`str`): A name of `TASKS`, or `"mean"`.
        length (`int`): Tokens of the prompts.
        cache (`str`): Name of the cache that is compared with the exact one.
        contexts (`int`): Contexts.
        samples (`int`): Questions.
        exact (`float`): Share of the expected strings that was found with the exact cache.
        packed (`float`): The same with the other one.
        difference (`float`): `packed - exact`.
        low, high (`float`): 95% interval of the difference, see `paired_interval`.
    """

    task: str
    length: int
    cache: str
    contexts: int
    samples: int
    exact: float
    packed: float
    difference: float
    low: float
    high: float

    def as_dict(self) -> dict:
        """Plain dict for JSON."""
        return asdict(self)


def scores(samples: list[Sample]) -> list[Score]:
    """Scores by length, cache and task, and their mean where a length has several tasks."""
    found = []
    caches = [name for name in samples[0].answers if name != EXACT]
    for length in dict.fromkeys(sample.length for sample in samples):
        for cache in caches:
            rows, spreads = [], []
            for task in dict.fromkeys(sample.task for sample in samples if sample.length == length):
                own = [sample for sample in samples if (sample.length, sample.task) == (length, task)]
                center, spread = paired_interval(
                    [one.score(cache) - one.score(EXACT) for one in own], [one.context for one in own]
                )
                exact, packed = mean_score(own, EXACT), mean_score(own, cache)
                contexts = len({one.context for one in own})
                rows.append(_score(task, length, cache, contexts, len(own), exact, packed, center, spread))
                spreads.append((center, spread))
            found += rows
            if len(rows) > 1:
                exact, packed, center = (
                    sum(values) / len(rows)
                    for values in ([r.exact for r in rows], [r.packed for r in rows], [c for c, _ in spreads])
                )
                spread = sum(spread**2 for _, spread in spreads) ** 0.5 / len(rows)
                total = [sum(counts) for counts in zip(*((row.contexts, row.samples) for row in rows))]
                found.append(_score("mean", length, cache, *total, exact, packed, center, spread))
    return found


def _score(task, length, cache, contexts, samples, exact, packed, center, spread) -> Score:
    low, high = (max(-100.0, min(100.0, 100 * (center + sign * spread))) for sign in (-1, 1))
    return Score(task, length, cache, contexts, samples, exact, packed, packed - exact, low, high)


def paired_interval(differences: list[float], contexts: list[int]) -> tuple[float, float]:
    """Center and half width of a 95% interval of the mean of paired differences, each in [-1, 1].

    Agresti and Min's (Statistics in Medicine 24, 2005): two samples are added, half a gain and half a loss among them, so that the
    interval has a width where nothing differed. Questions about one context are no independent samples: where means of contexts
    spread more than the questions tell, that spread counts.

    Args:
        differences (`list[float]`): Score of each sample less its exact score.
        contexts (`list[int]`): Which context each is about.
    """
    count = len(differences)
    center = sum(differences) / (count + 2)
    variance = (sum(d * d for d in differences) + 1) / (count + 2) - center**2
    error = variance / (count + 2)
    groups: dict[int, float] = {}
    mean = sum(differences) / count
    for difference, context in zip(differences, contexts):
        groups[context] = groups.get(context, 0.0) + difference - mean
    if len(groups) > 1:
        between = sum(total**2 for total in groups.values()) / count**2 * len(groups) / (len(groups) - 1)
        error = max(error, between)
    return center, 1.96 * error**0.5


def by_depth(samples: list[Sample]) -> list[dict]:
    """Share of the needles found, in percent, by length and by fifth of the context that they stand in, for each cache."""
    rows = []
    for length in dict.fromkeys(sample.length for sample in samples):
        found: dict[int, list[dict[str, bool]]] = {}
        for sample in samples:
            if sample.length == length and sample.depths:
                answers = {name: sample.found(name) for name in sample.answers}
                for i, depth in enumerate(sample.depths):
                    fifth = min(_DEPTHS - 1, int(depth * _DEPTHS))
                    found.setdefault(fifth, []).append({name: hits[i] for name, hits in answers.items()})
        for fifth, needles in sorted(found.items()):
            row = {"length": length, "depth": f"{100 * fifth // _DEPTHS}-{100 * (fifth + 1) // _DEPTHS}%"}
            row["needles"] = len(needles)
            rows.append(row | {name: 100 * sum(n[name] for n in needles) / len(needles) for name in needles[0]})
    return rows
