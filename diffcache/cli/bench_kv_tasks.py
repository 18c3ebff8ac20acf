"""Retrieval tasks for a language model's cache: a long text is read, and asked about afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from itertools import pairwise
from pathlib import Path

NAMES = """
Paris Rome Oslo Cairo Lima Tokyo Delhi Quito Dublin Vienna Prague Athens Madrid Lisbon Warsaw
Berlin Havana Boston Denver Dallas Austin Seattle Chicago Toronto Sydney Perth Nairobi Lagos Accra
Tunis Beirut Riga Helsinki Zurich Geneva Milan Naples Turin Seoul
"""
CITIES = tuple(NAMES.split())
DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked after the context, and the continuation that counts as right.

    Attributes:
        text: ends where the answer begins.
        answer: continues `text` to the letter.
    """

    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A context and the questions on it, asked one after the other in one conversation."""

    task: str
    context: str
    questions: tuple[Question, ...]


Count = Callable[[str], int]
Task = Callable[[random.Random, int, Count], Sample]


def needle(dice: random.Random, tokens: int, count: Count) -> Sample:
    """One record in a long text."""
    return _asked("needle", dice, tokens, count, records=1)


def multi_key(dice: random.Random, tokens: int, count: Count) -> Sample:
    """Four records of one form; one of them is asked for."""
    return _asked("multi-key", dice, tokens, count, records=4)


def k_hop(dice: random.Random, tokens: int, count: Count) -> Sample:
    """Three records, each naming the next; the links are asked for one after the other."""
    cities, number = dice.sample(CITIES, 3), _number(dice)
    links = [(f"The twin city of {a} is", f" {b}") for a, b in pairwise(cities)]
    links.append((f"The magic number for {cities[-1]} is", f" {number}"))
    facts = [f"{head}{tail}." for head, tail in links]
    dice.shuffle(facts)
    return Sample(
        task="k-hop",
        context=_hidden(dice, facts, tokens, count),
        questions=tuple(Question(text=f"\n{head}", answer=tail) for head, tail in links),
    )


def extract_all(dice: random.Random, tokens: int, count: Count) -> Sample:
    """Four records, to be listed in the order in which they stood."""
    facts = _facts(dice, 4)
    listed = "".join(f"\n{city}: {number}" for city, number in facts)
    _, _, answer = listed.partition(":")
    return Sample(
        task="extract-all",
        context=_hidden(dice, [_sentence(*fact) for fact in facts], tokens, count),
        questions=(
            Question(text=f"\nAll magic numbers, in order:\n{facts[0][0]}:", answer=answer),
        ),
    )


def multi_turn(dice: random.Random, tokens: int, count: Count) -> Sample:
    """Four records, asked for in turn; each question and answer stays in the conversation."""
    facts = _facts(dice, 4)
    return Sample(
        task="multi-turn",
        context=_hidden(dice, [_sentence(*fact) for fact in facts], tokens, count),
        questions=tuple(_question(*fact) for fact in dice.sample(facts, len(facts))),
    )


TASKS: dict[str, Task] = {
    "needle": needle,
    "multi-key": multi_key,
    "k-hop": k_hop,
    "extract-all": extract_all,
    "multi-turn": multi_turn,
}


def samples(
    task: str, number: int, *, tokens: int, count: Count, seed: int = 0
) -> tuple[Sample, ...]:
    """Samples of one task; the same seed gives the same ones.

    Args:
        tokens: length of the context, at most; records replace text and are never cut off.
        count: tokens of a text, by the model's own tokenizer.

    Raises:
        ValueError: an unknown task, or a context too short for its records.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are: {', '.join(TASKS)}")
    return tuple(
        TASKS[task](random.Random(f"{task} {seed} {index}"), tokens, count)
        for index in range(number)
    )


def haystack() -> list[str]:
    """Sentences of this package's own licence, which stands beside every installation."""
    text = " ".join(_licence().read_text(encoding="utf-8").split())
    return [sentence.strip() + "." for sentence in text.split(". ") if len(sentence) > 20]


def _licence() -> Path:
    checkout = Path(__file__).parents[2] / "LICENSE"
    if checkout.is_file():
        return checkout
    try:
        found = [Path(str(f.locate())) for f in files("diffcache") or [] if f.name == "LICENSE"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ValueError("diffcache's LICENSE is missing: install the package again")
    return found[0]


def _asked(task: str, dice: random.Random, tokens: int, count: Count, records: int) -> Sample:
    facts = _facts(dice, records)
    return Sample(
        task=task,
        context=_hidden(dice, [_sentence(*fact) for fact in facts], tokens, count),
        questions=(_question(*dice.choice(facts)),),
    )


def _facts(dice: random.Random, number: int) -> list[tuple[str, str]]:
    return [(city, _number(dice)) for city in dice.sample(CITIES, number)]


def _number(dice: random.Random) -> str:
    return str(dice.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def _sentence(city: str, number: str) -> str:
    return f"The magic number for {city} is {number}."


def _question(city: str, number: str) -> Question:
    return Question(text=f"\nThe magic number for {city} is", answer=f" {number}")


def _hidden(dice: random.Random, facts: Sequence[str], tokens: int, count: Count) -> str:
    """The facts in order, at random places between the sentences of a text of that length."""
    room = tokens - sum(count(f" {fact}") for fact in facts)
    if room < 0:
        raise ValueError(f"tokens must be more than the records alone take, got {tokens}")
    sentences = haystack()
    lengths = [count(f" {sentence}") for sentence in sentences]
    index, chosen = dice.randrange(len(sentences)), []
    while room >= min(lengths):  # one that is too long for the rest is left out
        if lengths[index] <= room:
            chosen.append(sentences[index])
            room -= lengths[index]
        index = (index + 1) % len(sentences)
    places = sorted((dice.randrange(len(chosen) + 1) for _ in facts), reverse=True)
    for place, fact in zip(places, reversed(facts), strict=True):
        chosen.insert(place, fact)
    return " ".join(chosen)
