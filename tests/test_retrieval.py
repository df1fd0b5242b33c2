"""Retrieval tasks: prompts that are what they claim, scores by hand, answers equal to generate()'s, the command line."""

import copy
import functools
import json
import re
import types

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast

from oscar_hf import Artifact, OscarCache, OscarError
from oscar_hf.calibration import retrieval
from oscar_hf.calibration.retrieval import EXACT, Sample, by_depth, paired_interval, retrieve, scores
from oscar_hf.calibration.retrieval_prompts import Prompts
from oscar_hf.calibration.retrieval_tasks import CHAIN, MULTIPLE, TASKS, make_contexts
from oscar_hf.cli.main import main
from oscar_hf.cli.retrieval import ALL

LENGTH, VOCABULARY = 1600, 640
NEEDLES = ("single", "multikey", "multivalue", "multiquery")
CHAT = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@functools.cache
def haystack():
    return retrieval.default_haystack()[0]


@functools.cache
def inner_tokenizer():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([haystack()], trainer)
    return inner.to_str()


def tokenizer(template=CHAT):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(inner_tokenizer()), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


@functools.cache
def prompts(template=CHAT):
    return Prompts(tokenizer(template), haystack())


@functools.cache
def contexts(task, count=2, questions=2, seed=0, length=LENGTH):
    return make_contexts(prompts(), task, length, count, questions, seed)


def decoded(ids):
    return tokenizer().decode(ids, clean_up_tokenization_spaces=False)


def model(**fields):
    return tiny_model("llama", vocab_size=VOCABULARY, num_hidden_layers=2, eos_token_id=2, **fields)


# ------------------------------------------------------------------------------------------------------ prompts
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_length_and_follow_from_the_seed(task):
    made = contexts(task)
    assert len(made) == 2 and {len(context.questions) for context in made} == {1 if task == "words" else 2}
    longest = max(len(question.ids) for context in made for question in context.questions)
    assert {len(context.ids) + longest + TASKS[task].new_tokens for context in made} == {LENGTH}
    assert made == make_contexts(prompts(), task, LENGTH, 2, 2) and made[0].ids != made[1].ids
    assert made != contexts(task, seed=1)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_for_stands_in_the_context_and_not_in_the_question(task):
    for context in contexts(task):
        long = decoded(context.ids)
        for question in context.questions:
            asked = decoded(question.ids)
            for expected in question.expected:
                assert expected in long and expected not in asked
            assert len(set(question.expected)) == len(question.expected)


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_stand_at_their_depth(task):
    for context in contexts(task):
        for question in context.questions:
            assert len(question.depths) == len(question.expected) == (1 if task in NEEDLES[:2] else MULTIPLE)
            for expected, depth in zip(question.expected, question.depths):
                begin = int(depth * len(context.ids) + 0.5)
                needle = decoded(context.ids[begin : begin + 60])
                assert needle.startswith((" The ", " One of ")) and f" is {expected}." in needle
                assert decoded(context.ids[:begin]).count(expected) == 0


def test_needles_are_distractors_of_one_another_as_their_task_says():
    texts = {task: decoded(contexts(task, count=1)[0].ids) for task in NEEDLES}
    needles = {
        task: re.findall(r"(?:The|the) (\w+) numbers? of the (\w+ \w+) is (\d{7})\.", texts[task]) for task in NEEDLES
    }
    kinds = {task: {kind for kind, _, _ in found} for task, found in needles.items()}
    names = {task: {name for _, name, _ in found} for task, found in needles.items()}
    assert [len(needles[task]) for task in NEEDLES] == [2, MULTIPLE, 2 * MULTIPLE, 2 * MULTIPLE]
    assert [len(kinds[task]) for task in NEEDLES] == [2, 1, 1, 1]
    assert [len(names[task]) for task in NEEDLES] == [2, MULTIPLE, 2, 2 * MULTIPLE]


def test_needles_are_spread_over_contexts_as_well():
    depths = [context.questions[0].depths[0] for context in contexts("single", count=5, questions=1, length=8000)]
    assert [int(5 * depth) for depth in depths] == [0, 1, 2, 3, 4]


def test_variables_hold_what_is_asked_for():
    (context,) = contexts("variables", count=1)
    held, found = {}, {}
    _, _, text = decoded(context.ids).partition("Here is the text.")
    for name, source in re.findall(r"Let ([A-Z]{5}) = (\w+)\.", text):
        held[name] = held.get(source, source)
        found.setdefault(held[name], []).append(name)
    assert len(found) == 2 and all(re.fullmatch(r"\d{5}", number) for number in found)
    for question in context.questions:
        (number,) = {number for number in found if number in decoded(question.ids)}
        assert tuple(found[number]) == question.expected and len(question.expected) == CHAIN


@pytest.mark.parametrize("length", [LENGTH, 8000])
def test_common_words_are_common(length):
    (context,) = contexts("words", count=1, length=length)
    _, _, listed = decoded(context.ids).partition("Here is the list.")
    words = re.findall(r"\d+\. ([a-z]+)(?= )", listed)
    counts = {word: words.count(word) for word in set(words)}
    common = context.questions[0].expected
    least = min(counts[word] for word in common)
    assert least >= 2 * max(count for word, count in counts.items() if word not in common)
    assert length == LENGTH or least >= 29
    assert not [word for word in counts if word not in common and any(one in word for one in common)]


def test_the_chat_template_frames_context_and_question():
    context = contexts("multikey")[0]
    assert decoded(context.ids).startswith("[user] Somewhere in the text")
    question = context.questions[0]
    assert re.fullmatch(r"\n\nWhat is .*\? \[end\]\[assistant\] The .* is", decoded(question.ids))
    plain = make_contexts(prompts(None), "multikey", LENGTH, 1)[0]
    assert decoded(plain.ids).startswith("Somewhere") and "?\nAnswer: The" in decoded(plain.questions[0].ids)


def test_a_bos_token_comes_first_where_the_tokenizer_adds_one():
    class WithBos:
        bos_token_id, chat_template = 1, None

        def __call__(self, text, add_special_tokens=True, **_):
            ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    opening = Prompts(WithBos(), haystack()).opening("Read.")
    assert opening == [1, *prompts(None).opening("Read.")]


def test_a_short_text_is_repeated():
    sentence = "It rained all day."
    short = Prompts(tokenizer(), sentence)
    context = make_contexts(short, "single", 600, 1)[0]
    assert decoded(context.ids).count(sentence) > 10 and short.tokens_of_text(600) < 20


@pytest.mark.parametrize(
    "text, task, length, questions, message",
    [
        (None, "singel", LENGTH, 1, "unknown task 'singel': there are single, multikey"),
        (None, "multivalue", 400, 4, "a prompt of 400 tokens for the task 'multivalue' has no room for 16 facts"),
        (None, "words", 300, 1, "no room for a list of words"),
        (None, "single", 32000, 25, "at most 24 questions"),
        ("It rained.", "words", LENGTH, 1, "only 1 different words"),
        (" \n ", "single", LENGTH, 1, "text to hide something in is empty"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(text, task, length, questions, message):
    with pytest.raises(OscarError, match=re.escape(message)):
        made = prompts() if text is None else Prompts(tokenizer(), text)
        make_contexts(made, task, length, 1, questions)


# ------------------------------------------------------------------------------------------------------ scores
def sample(task, context, expected, exact, packed, depths=(), length=4096):
    return Sample(task, length, context, expected, depths, {EXACT: exact, "ours": packed})


def test_a_score_is_the_share_of_expected_strings_in_an_answer():
    one = sample("words", 0, ("Alpha", "beta"), "ALPHA, gamma", "betamax alphabet")
    assert one.found(EXACT) == [True, False] and one.score(EXACT) == 0.5 and one.score("ours") == 1


def test_scores_by_task_and_length():
    samples = [
        sample("single", 0, ("1",), "1", "1"),
        sample("single", 1, ("2",), "2", "3"),
        sample("words", 0, ("a", "b"), "a", "a b"),
        sample("single", 0, ("1",), "1", "1", length=8192),
    ]
    single, words, mean, longer = scores(samples)
    assert (single.exact, single.packed, single.difference) == (100, 50, -50)
    assert (single.task, single.cache, single.contexts, single.samples) == ("single", "ours", 2, 2)
    assert (words.exact, words.packed, words.difference) == (50, 100, 50)
    assert (mean.task, mean.exact, mean.packed, mean.contexts, mean.samples) == ("mean", 75, 75, 3, 3)
    assert longer.length == 8192 and longer.task == "single", "one task has no mean"
    for row in (single, words, mean, longer):
        assert -100 <= row.low <= row.difference <= row.high <= 100


def test_the_interval_of_binary_pairs_is_agresti_and_mins():
    """Counts b and c of 40 pairs that changed: centered at (c - b) / (n + 2), each count with half a pair more."""
    b, c, n = 5, 2, 40
    differences = [-1.0] * b + [1.0] * c + [0.0] * (n - b - c)
    center, spread = paired_interval(differences, list(range(n)))
    assert center == (c - b) / (n + 2)
    variance = (b + c + 1) - (c - b) ** 2 / (n + 2)
    # The spread of the contexts, each of one question, is the plain one: of this example smaller.
    assert spread == pytest.approx(1.96 * variance**0.5 / (n + 2))
    assert paired_interval([0.0] * 50, list(range(50)))[1] == pytest.approx(1.96 / 52, rel=1e-9)


def test_contexts_that_differ_as_a_whole_widen_the_interval():
    differences = [-1.0] * 10 + [0.0] * 40
    apart = paired_interval(differences, list(range(50)))[1]
    together = paired_interval(differences, [i // 10 for i in range(50)])[1]
    assert together > 1.5 * apart


def test_needles_by_depth():
    samples = [
        sample("multivalue", 0, ("1", "2"), "1 2", "1", (0.1, 1.0)),
        sample("single", 0, ("3",), "3", "3", (0.19,)),
        sample("words", 0, ("a",), "a", "a"),
    ]
    assert by_depth(samples) == [
        {"length": 4096, "depth": "0-20%", "needles": 2, EXACT: 100, "ours": 100},
        {"length": 4096, "depth": "80-100%", "needles": 1, EXACT: 100, "ours": 0},
    ]


# ------------------------------------------------------------------------------------------------------ answers
def generated(made, cache, context, question, most):
    """What generate() adds to a context that is in the cache, and a question."""
    with torch.no_grad():
        made(torch.tensor([context.ids]), past_key_values=cache)
        ids = torch.tensor([context.ids + question.ids])
        out = made.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=most, do_sample=False
        )
    return tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_answers_are_those_of_generate(batch):
    """Whatever is batched, copied and selected: each answer is what generate() gives for that context and question alone."""
    made, recipe = (
        model(),
        Artifact.data_free("hadamard", sink_tokens=4, recent_tokens=16, key_scale="percentile(0.96)"),
    )
    found = retrieve(
        made, tokenizer(), {"ours": recipe}, haystack(), ["single"], [700], samples=4, questions=2, batch=batch
    )
    assert [one.context for one in found] == [0, 0, 1, 1]
    asked = [(context, question) for context in contexts("single", length=700) for question in context.questions]
    answers = set()
    for one, (context, question) in zip(found, asked, strict=True):
        assert one.expected == question.expected and one.depths == question.depths
        exact = generated(made, DynamicCache(config=made.config), context, question, TASKS["single"].new_tokens)
        packed = generated(
            made, OscarCache(made.config, artifact=recipe), context, question, TASKS["single"].new_tokens
        )
        assert one.answers == {EXACT: exact, "ours": packed}
        answers |= {exact, packed}
    assert len(answers) > 4, "packing changes answers of this model, and so do questions"


def test_questions_of_different_lengths_are_answered_from_copies(monkeypatch):
    """Without names of equal length the questions fall into groups; nothing else changes."""
    made, text = model(), haystack()
    monkeypatch.setattr(Prompts, "even", lambda self, words, least: list(words))
    copies = []
    monkeypatch.setattr(
        retrieval, "copy", types.SimpleNamespace(deepcopy=lambda c: copies.append(c) or copy.deepcopy(c))
    )
    found = retrieve(made, tokenizer(), {}, text, ["multikey"], [700], samples=4, questions=4)
    (context,) = make_contexts(prompts(), "multikey", 700, 1, 4)
    assert len(copies) == len({len(question.ids) for question in context.questions}) - 1 > 0
    for one, question in zip(found, context.questions, strict=True):
        assert one.answers[EXACT] == generated(made, DynamicCache(config=made.config), context, question, 48)


class Scripted(torch.nn.Module):
    """A model that says given tokens, one after another, and counts its steps."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.steps = torch.tensor(rows), 0
        self.base_model = self

    def forward(self, input_ids, **_):
        self.steps += 1
        hidden = torch.nn.functional.one_hot(self.rows[:, self.steps - 1], VOCABULARY).float()
        return types.SimpleNamespace(last_hidden_state=hidden[:, None])

    def get_output_embeddings(self):
        return torch.nn.Identity()

    device = torch.device("cpu")


def test_answers_end_where_more_words_would_not_change_the_score():
    def ids(text):
        return tokenizer()(text, add_special_tokens=False)["input_ids"]

    right, over = ids(" 1 2 3 4 5 6 7 8 9 9 9 9 9 9 9 9 9 9"), ids(" 8")
    ended = over + [2] + ids(" 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7")
    size = min(len(right), len(ended))
    made = Scripted([right[:size], ended[:size]])
    asked = [types.SimpleNamespace(ids=(5,), expected=(expected,)) for expected in ("1 2", "nothing")]
    answers = retrieval._generate(made, tokenizer(), None, asked, size, {2})
    assert made.steps < size and made.steps % retrieval._STEPS_AHEAD == 0
    assert answers[0].startswith(" 1 2") and answers[1] == " 8"
    made = Scripted([right[:size], ended[:size]])
    asked[0].expected = ("not said",)
    assert retrieval._generate(made, tokenizer(), None, asked, size, {2})[1] == " 8" and made.steps == size


def test_a_length_that_the_model_does_not_take_is_refused():
    made = model(max_position_embeddings=1024)
    with pytest.raises(OscarError, match=r"takes at most 1024 tokens .* got a length of 2000"):
        retrieve(made, tokenizer(), {}, haystack(), ["single"], [700, 2000])
    with pytest.raises(OscarError, match="'exact'"):
        retrieve(made, tokenizer(), {EXACT: Artifact.data_free()}, haystack(), ["single"], [700])


def test_too_little_memory_is_one_sentence(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")

    monkeypatch.setattr(retrieval, "_read", full)
    with pytest.raises(
        OscarError, match="out of memory with 4 questions about 2 contexts of 700 tokens: take a smaller --batch"
    ):
        retrieve(model(), tokenizer(), {}, haystack(), ["single"], [700], samples=4, questions=2, batch=2)


# ------------------------------------------------------------------------------------------------------ command line
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model(max_position_embeddings=1024).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_command_line(folder, tmp_path, capsys):
    report = tmp_path / "retrieval.json"
    common = ["eval", str(folder), "--device", "cpu", "--samples", "2", "--questions", "2"]
    arguments = ["--tasks", "single,words", "--lengths", "800", "1000", "--recipe", "hadamard", "--json", str(report)]
    assert main([*common, *arguments]) == 0
    out, told = capsys.readouterr()
    assert "single, 800 tokens, 1 contexts: exact " in told
    assert "| task | tokens | cache | contexts | samples | float32 | packed | difference | 95% interval |" in out
    assert "| single | 800 | recipe hadamard | 1 | 2 |" in out and "| mean | 1000 |" in out
    assert "| needles at depth | tokens | needles | float32 | recipe hadamard |" in out and "Austen" in out
    result = json.loads(report.read_text())
    assert [(row["task"], row["length"]) for row in result["scores"]] == [
        (task, length) for length in (800, 1000) for task in ("single", "words", "mean")
    ]
    assert len(result["samples"]) == 2 * 3 and set(result["samples"][0]["answers"]) == {EXACT, "recipe hadamard"}

    # Without lengths those that the model takes, without recipe the default one; a short text is said to be repeated.
    text = tmp_path / "short.txt"
    text.write_text("It rained all day. Nobody came.", encoding="utf-8")
    assert main([*common, "--tasks", "multikey", "--text", str(text)]) == 0
    out = capsys.readouterr().out
    assert (
        "| multikey | 1024 | recipe default | 1 | 2 |" in out and "short.txt, which has" in out and "repeat it" in out
    )


def test_all_tasks_have_two_names():
    from oscar_hf.cli.main import _parser

    for name in ALL:
        assert _parser().parse_args(["eval", "m", "--tasks", name]).tasks == [[name]]


def test_wrong_arguments(folder, capsys):
    for arguments in (["--tasks", "singel"], ["--tasks", "ruler", "--lengths", "4k"], ["--recipe", "balanced"]):
        with pytest.raises(SystemExit):
            main(["eval", str(folder), *arguments])
    assert "unknown task 'singel': there are retrieval, ruler, single" in capsys.readouterr().err
    assert main(["eval", str(folder)]) == 2
    assert "eval needs --text FILE" in capsys.readouterr().err
    assert main(["eval", str(folder), "--device", "cpu", "--tasks", "single", "--lengths", "800,2048"]) == 2
    assert "takes at most 1024 tokens" in capsys.readouterr().err


def test_recipes_are_compared_by_divergence_too(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(haystack()[:20_000], encoding="utf-8")
    common = ["eval", str(folder), "--device", "cpu", "--text", str(text), "--context", "512", "--sequences", "1"]
    assert main([*common, "--recipe", "default", "hadamard"]) == 0
    out = capsys.readouterr().out
    assert "recipe default" in out and "recipe hadamard" in out
