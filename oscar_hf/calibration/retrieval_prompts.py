"""What a retrieval prompt is made of: token ids of a tokenizer, facts hidden in sentences, and lists of words.

Imports nothing heavy, as `retrieval_tasks`.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OscarError

# Words to be found in a list, how often others occur, and how many times as often those to be found do.
COMMON_WORDS, RARITY, CONTRAST = 10, 3, 10
# Most of a context that facts or common words may take.
_MOST = 0.75


@dataclass(frozen=True)
class Question:
    """What is asked of a context: token ids that follow it, and what the answer has to hold.

    Attributes:
        ids (`tuple[int, ...]`): The question, the end of the turn, and the beginning of the answer.
        expected (`tuple[str, ...]`): Strings that a right answer holds, all of them.
        depths (`tuple[float, ...]`): Where in the context each of them stands, from 0 to 1; empty where there is no one place.
    """

    ids: tuple[int, ...]
    expected: tuple[str, ...]
    depths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Context:
    """Token ids up to the question, and the questions about them."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]


class Prompts:
    """Token ids of texts, questions and answers for one tokenizer, in its chat template if it has one.

    Args:
        tokenizer: The model's tokenizer.
        text (`str`): What needles are hidden in, and where words of lists are from. Repeated where a context is longer.

    Example:

    ```python
    prompts = Prompts(tokenizer, text)
    ids = prompts.opening("Read this.") + prompts.sentence("It rained.") + prompts.question("Did it rain?", "It")
    ```
    """

    def __init__(self, tokenizer, text: str):
        self.tokenizer = tokenizer
        self.sentences = _sentences(text)
        self.vocabulary = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
        self._ids: dict[str, list[int]] = {}
        self.before, self.after = _frame(tokenizer)
        # SentencePiece puts a space before what it is given, others do not.
        self.space = "" if self.encode("a") * 2 == self.encode("a a") else " "

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens of the tokenizer's own."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def sentence(self, text: str) -> list[int]:
        """Token ids of a sentence that follows another; remembered."""
        if text not in self._ids:
            self._ids[text] = self.encode(self.space + text)
        return self._ids[text]

    def tokens_of_text(self, most: int) -> int:
        """Tokens of the text, counted up to `most`."""
        total = 0
        for sentence in self.sentences:
            total += len(self.sentence(sentence))
            if total >= most:
                break
        return total

    def opening(self, intro: str) -> list[int]:
        """Token ids before the long part of a context."""
        bos = self.tokenizer.bos_token_id
        ids = self.encode(self.before + intro)
        if bos is not None and ids[:1] != [bos] and self.tokenizer("a")["input_ids"][:1] == [bos]:
            ids = [bos] + ids
        return ids

    def question(self, text: str, answer: str) -> list[int]:
        """Token ids of a question and of the words that its answer begins with."""
        return self.encode(f"\n\n{text}{self.after}{answer}")

    def even(self, words: Sequence[str], least: int) -> list[str]:
        """Those words that have as many tokens as most, so that questions with them are equally long; all if they are too few."""
        sizes = {word: len(self.encode(" " + word)) for word in words}
        ((size, found),) = Counter(sizes.values()).most_common(1)
        return [word for word in words if sizes[word] == size] if found >= least else list(words)


def _frame(tokenizer) -> tuple[str, str]:
    """What comes before a context, and what between a question and its answer."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "\nAnswer: "
    slot = "@@CONTEXT AND QUESTION@@"
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": slot}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    before, _, after = turn.partition(slot)
    return before, after


def _sentences(text: str, most: int = 40) -> list[str]:
    """Sentences of a text in one line each, those of more than `most` words in pieces."""
    pieces = []
    for sentence in re.split(r"(?<=[.!?;])\s+", " ".join(text.split())):
        words = sentence.split(" ")
        pieces += [" ".join(words[i : i + most]) for i in range(0, len(words), most)]
    pieces = [piece for piece in pieces if piece]
    if not pieces:
        raise OscarError("the text to hide something in is empty: give more text (--text)")
    return pieces


@dataclass
class Asked:
    """A question before it is tokenized: (question, beginning of the answer), expected strings, and the facts that hold them."""

    words: tuple[str, str]
    expected: tuple[str, ...]
    facts: tuple[tuple[int, int], ...] = ()


@dataclass
class Haystack:
    """Facts to be hidden in sentences; those of one group stay in their order. place: which context it is, of how many."""

    intro: str
    groups: list[list[str]]
    asked: list[Asked]
    dice: random.Random
    place: tuple[int, int]

    def assemble(self, prompts: Prompts, tokens: int, what: str) -> tuple[list[int], dict[tuple[int, int], float]]:
        """Token ids, exactly `tokens` of them, and the depth of each fact."""
        opening = prompts.opening(self.intro)
        facts = {(g, i): prompts.sentence(fact) for g, group in enumerate(self.groups) for i, fact in enumerate(group)}
        taken = sum(map(len, facts.values()))
        room = tokens - len(opening) - taken
        if taken > _MOST * (tokens - len(opening)):
            raise OscarError(f"{what} has no room for {len(facts)} facts: take a greater length or fewer questions")
        hay, filled = [], 0
        at = self.dice.randrange(len(prompts.sentences))
        while filled < room:
            hay.append(prompts.sentence(prompts.sentences[(at + len(hay)) % len(prompts.sentences)]))
            filled += len(hay[-1])
        # A fact comes before the sentence that its depth falls into. The last sentence is cut where the context is full.
        places = sorted(self._places().items(), key=lambda place: -place[1])
        ids, depths, passed = opening, {}, 0
        for sentence in hay:
            passed += len(sentence)
            while places and places[-1][1] * room < passed:
                fact, _ = places.pop()
                depths[fact] = len(ids) / tokens
                ids.extend(facts[fact])
            ids.extend(sentence)
        return ids[:tokens], depths

    def _places(self) -> dict[tuple[int, int], float]:
        """Depths in [0, 1) of all facts, spread evenly over the contexts of a task as well as over each."""
        index, count = self.place
        total = sum(map(len, self.groups))
        slots = [(i + (index + self.dice.random()) / count) / total for i in range(total)]
        self.dice.shuffle(slots)
        places, taken = {}, 0
        for g, group in enumerate(self.groups):
            own = sorted(slots[taken : taken + len(group)])
            places |= {(g, i): depth for i, depth in enumerate(own)}
            taken += len(group)
        return places


@dataclass
class WordList:
    """A numbered list in which some words are common."""

    intro: str
    common: list[str]
    others: list[str]
    asked: list[Asked]
    dice: random.Random

    def assemble(self, prompts: Prompts, tokens: int, what: str) -> tuple[list[int], dict]:
        """Token ids, exactly `tokens` of them; no depths, for the common words are everywhere."""
        opening = prompts.opening(self.intro)
        room = tokens - len(opening)
        count = room // 4
        # How many words fit depends on the words; what is still missing then is filled up with rare ones.
        while count >= 4 * COMMON_WORDS:
            ids = self._listed(prompts, self._words(count))
            if len(ids) <= room:
                missing = [self.others[i % len(self.others)] for i in range(room - len(ids))]
                return opening + (ids + self._listed(prompts, missing, count))[:room], {}
            count = min(count - 1, count * room // len(ids))
        raise OscarError(f"{what} has no room for a list of words: take a greater length")

    def _words(self, count: int) -> list[str]:
        """That many words, shuffled."""
        rarity = RARITY if count >= 400 else 1
        often = min(rarity * CONTRAST, int(_MOST * count / COMMON_WORDS))
        left = count - often * COMMON_WORDS
        different = min(len(self.others), -(-left // rarity))
        if often * different < 2 * left:
            raise OscarError(
                f"the text has too few different words for a list of {count} words: give more text (--text)"
            )
        words = self.common * often + [self.others[i % different] for i in range(left)]
        self.dice.shuffle(words)
        return words

    def _listed(self, prompts: Prompts, words: list[str], first: int = 0) -> list[int]:
        """Token ids of the items first + 1, first + 2, ... of the list."""
        if not words:
            return []
        items = [f"{prompts.space}{first + i + 1}. {word}" for i, word in enumerate(words)]
        pieces = prompts.tokenizer(items, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for piece in pieces for token in piece]
