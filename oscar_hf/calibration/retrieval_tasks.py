"""The retrieval tasks: prompts that hide something in a long context and ask for it, in the manner of RULER (arXiv 2404.06654).

Tasks and their sizes are RULER's; texts, words and sentences are this package's own, so scores are not those of published tables.
One context may be asked several questions: it is read once, and each question brings what it needs into the context, such as
another needle. With one question per context the tasks are as in RULER. Imports nothing heavy: the command line reads `TASKS`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import OscarError
from .retrieval_prompts import COMMON_WORDS, Asked, Context, Haystack, Prompts, Question, WordList

# Keys, values or queries of a needle task, and variables of a chain.
MULTIPLE, CHAIN = 4, 5

_KINDS = (
    "badge", "locker", "ticket", "account", "passport", "invoice", "permit", "contract", "parcel", "license",
    "safe", "room", "meter", "table", "engine", "policy", "ledger", "gate", "cabin", "voucher", "crate",
    "depot", "patent", "studio",
)  # fmt: skip
_ADJECTIVES = (
    "amber", "silver", "crimson", "golden", "quiet", "distant", "frozen", "gentle", "hollow", "ivory", "lonely",
    "marble", "narrow", "orange", "purple", "rusty", "scarlet", "velvet", "wooden", "yellow", "broken",
    "copper", "dusty", "eager",
)  # fmt: skip
_NOUNS = (
    "lantern", "harbor", "falcon", "meadow", "compass", "bridge", "tower", "garden", "island", "mirror",
    "ladder", "basket", "anchor", "canyon", "castle", "cottage", "dragon", "engine", "forest", "glacier",
    "hammer", "jacket", "kettle", "magnet", "orchard", "pencil", "rocket", "saddle", "temple", "tunnel",
    "violin", "wagon",
)  # fmt: skip

_NEEDLE_INTRO = (
    "Somewhere in the text below a few numbers are told that have nothing to do with it. Keep them in mind: after the text "
    "you will be asked for some of them.\n\n"
)
_CHAIN_INTRO = (
    "Assignments of variables are scattered over the text below. A variable is given a number, or the value of another "
    "variable. Keep track of them: after the text you will be asked which variables hold a number.\n\n"
    "A short example. Let QZKWX = 20417. The rain had stopped. Let MVBTR = QZKWX. Which variables hold the number 20417? "
    "There are 2 of them. The variables that hold 20417 are QZKWX, MVBTR.\n\nHere is the text.\n\n"
)
_LIST_INTRO = (
    "Below is a numbered list of words. Some of them occur far more often than the others. Keep in mind which: after the list "
    "you will be asked for them.\n\n"
    "A short example. 1. kiwi 2. yak 3. lemur 4. kiwi 5. lemur 6. okapi 7. lemur 8. kiwi. What are the 2 most common words of the "
    "list? The 2 most common words of the list are: kiwi, lemur.\n\nHere is the list.\n\n"
)


@dataclass(frozen=True)
class Task:
    """A kind of question: what it is about, the most tokens of an answer, and what makes it."""

    about: str
    new_tokens: int
    draw: Callable[["_Dice"], Haystack | WordList] = field(repr=False)


@dataclass
class _Dice:
    """What a task is drawn with. place: which context it is, of how many."""

    prompts: Prompts
    random: random.Random
    questions: int
    place: tuple[int, int]

    def names(self, count: int) -> list[str]:
        """Different names, of equally many tokens as far as there are."""
        first, second = (self.prompts.even(words, 8) for words in (_ADJECTIVES, _NOUNS))
        if count > len(first) * len(second):
            raise OscarError(
                f"{self.questions} questions about a context need {count} names, there are too few: ask fewer"
            )
        return self.random.sample([f"{a} {b}" for a in first for b in second], count)

    def kinds(self, count: int) -> list[str]:
        """Different kinds of numbers."""
        if count > len(_KINDS):
            raise OscarError(f"at most {len(_KINDS)} questions can be asked of a context, got {count}")
        return self.random.sample(self.prompts.even(_KINDS, count), count)

    def numbers(self, count: int, digits: int) -> list[str]:
        """Different numbers."""
        drawn = self.random.sample(range(10 ** (digits - 1), 10**digits), 4 * count + 32)
        return self.prompts.even([str(number) for number in drawn], count)[:count]


def _needle(kind: str, name: str, value: str) -> str:
    return f"The {kind} number of the {name} is {value}."


def _ask(kind: str, name: str) -> tuple[str, str]:
    return (
        f"What is the {kind} number of the {name} that the text tells?",
        f"The {kind} number of the {name} is",
    )


def _single(dice: _Dice) -> Haystack:
    """One needle of its kind for each question."""
    found = list(zip(dice.kinds(dice.questions), dice.names(dice.questions), dice.numbers(dice.questions, 7)))
    asked = [Asked(_ask(kind, name), (value,), ((i, 0),)) for i, (kind, name, value) in enumerate(found)]
    return Haystack(_NEEDLE_INTRO, [[_needle(*one)] for one in found], asked, dice.random, dice.place)


def _multikey(dice: _Dice) -> Haystack:
    """Needles of one kind with different keys; each question asks for one of them."""
    (kind,), count = dice.kinds(1), max(MULTIPLE, dice.questions)
    found = list(zip(dice.names(count), dice.numbers(count, 7)))
    asked = [Asked(_ask(kind, name), (value,), ((i, 0),)) for i, (name, value) in enumerate(found)]
    return Haystack(
        _NEEDLE_INTRO, [[_needle(kind, *one)] for one in found], asked[: dice.questions], dice.random, dice.place
    )


def _multivalue(dice: _Dice) -> Haystack:
    """A key with several values for each question."""
    (kind,), names = dice.kinds(1), dice.names(dice.questions)
    values = dice.numbers(MULTIPLE * dice.questions, 7)
    groups, asked = [], []
    for g, name in enumerate(names):
        own = tuple(values[MULTIPLE * g : MULTIPLE * (g + 1)])
        groups.append([f"One of the {kind} numbers of the {name} is {value}." for value in own])
        words = (
            f"What are all the {MULTIPLE} {kind} numbers of the {name} that the text tells?",
            f"The {MULTIPLE} {kind} numbers of the {name} are",
        )
        asked.append(Asked(words, own, tuple((g, i) for i in range(MULTIPLE))))
    return Haystack(_NEEDLE_INTRO, groups, asked, dice.random, dice.place)


def _multiquery(dice: _Dice) -> Haystack:
    """Needles of one kind with different keys; each question asks for several of them."""
    (kind,), count = dice.kinds(1), MULTIPLE * dice.questions
    found = list(zip(dice.names(count), dice.numbers(count, 7)))
    asked = []
    for first in range(0, count, MULTIPLE):
        own = range(first, first + MULTIPLE)
        listed = ", ".join(f"the {found[i][0]}" for i in own)
        words = (
            f"What are the {kind} numbers of these {MULTIPLE}, in this order: {listed}?",
            f"The {kind} numbers of {listed} are, in this order:",
        )
        asked.append(Asked(words, tuple(found[i][1] for i in own), tuple((i, 0) for i in own)))
    return Haystack(_NEEDLE_INTRO, [[_needle(kind, *one)] for one in found], asked, dice.random, dice.place)


def _variables(dice: _Dice) -> Haystack:
    """A chain of assignments for each question."""
    letters, names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", set()
    while len(names) < CHAIN * dice.questions:
        names.add("".join(dice.random.sample(letters, 5)))
    names, values = sorted(names), dice.numbers(dice.questions, 5)
    dice.random.shuffle(names)
    groups, asked = [], []
    for g, value in enumerate(values):
        own = names[CHAIN * g : CHAIN * (g + 1)]
        groups.append([f"Let {name} = {source}." for name, source in zip(own, [value, *own])])
        words = (
            f"Which variables hold the number {value}? There are {CHAIN} of them.",
            f"The variables that hold {value} are",
        )
        asked.append(Asked(words, tuple(own)))
    return Haystack(_CHAIN_INTRO, groups, asked, dice.random, dice.place)


def _words(dice: _Dice) -> WordList:
    """The most common words of a list; one question, whatever is asked for."""
    words = dice.random.sample(dice.prompts.vocabulary, len(dice.prompts.vocabulary))
    common: list[str] = []
    for word in words:
        if len(common) < COMMON_WORDS and not any(word in other or other in word for other in common):
            common.append(word)
    # A word that holds a common one would count as that in an answer.
    others = [word for word in words if not any(one in word for one in common)]
    if len(common) < COMMON_WORDS or len(others) < 2 * COMMON_WORDS:
        raise OscarError(
            f"the text has only {len(words)} different words of 4 letters or more: give more text (--text)"
        )
    words = (
        f"What are the {COMMON_WORDS} most common words of the list?",
        f"The {COMMON_WORDS} most common words of the list are:",
    )
    return WordList(_LIST_INTRO, common, others, [Asked(words, tuple(common))], dice.random)


TASKS = {
    "single": Task("one needle of its kind", 48, _single),
    "multikey": Task("one of several needles of a kind", 48, _multikey),
    "multivalue": Task("all four values of a key", 96, _multivalue),
    "multiquery": Task("the values of four keys", 96, _multiquery),
    "variables": Task("all five variables of a chain of assignments", 64, _variables),
    "words": Task("the ten most common words of a list", 120, _words),
}


def make_contexts(
    prompts: Prompts, task: str, length: int, count: int, questions: int = 1, seed: int = 0
) -> list[Context]:
    """Contexts of one task, all of the same number of tokens.

    Args:
        prompts (`Prompts`): The tokenizer and the text.
        task (`str`): A name of `TASKS`.
        length (`int`): Tokens of a context, its longest question and the longest answer together.
        count (`int`): Contexts.
        questions (`int`, defaults to 1): Questions about each of them; of a list of words there is only one.
        seed (`int`, defaults to 0): Another seed, other prompts; the same seed, the same.

    Returns:
        `list[Context]`: `count` contexts.

    Raises:
        `OscarError`: For a task that there is not, and for a length that has no room for what is to be hidden.

    Example:

    ```python
    context = make_contexts(Prompts(tokenizer, text), "multikey", length=4096, count=1, questions=4)[0]
    print(tokenizer.decode(context.ids + context.questions[0].ids))
    ```
    """
    if task not in TASKS:
        raise OscarError(f"unknown task {task!r}: there are {', '.join(TASKS)}")
    drafts = []
    for index in range(count):
        dice = random.Random(f"{seed} {task} {length} {index}")
        drafts.append(TASKS[task].draw(_Dice(prompts, dice, questions, (index, count))))
    longest = max(len(prompts.question(*asked.words)) for draft in drafts for asked in draft.asked)
    tokens = length - longest - TASKS[task].new_tokens
    contexts = []
    for draft in drafts:
        ids, depths = draft.assemble(prompts, tokens, f"a prompt of {length} tokens for the task {task!r}")
        asked = [
            Question(tuple(prompts.question(*one.words)), one.expected, tuple(depths[fact] for fact in one.facts))
            for one in draft.asked
        ]
        contexts.append(Context(tuple(ids), tuple(asked)))
    return contexts
