"""The tasks of the KV bench: records that can be found, places that vary, lengths that are kept."""

from __future__ import annotations

import pytest

from diffcache.cli.bench_kv_tasks import TASKS, haystack, samples


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_stands_in_the_context_once(task):
    for sample in samples(task, 20, tokens=600, count=words):
        for question in sample.questions:
            for number in question.answer.split()[: 1 if task != "extract-all" else None]:
                name = number.rstrip(":")
                assert sample.context.count(name) >= 1
                if name.isdigit():
                    assert sample.context.count(f"is {name}.") == 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [60, 600, 4000])
def test_the_context_fills_its_length_and_no_more(task, tokens):
    shortest = min(words(sentence) for sentence in haystack())
    for sample in samples(task, 5, tokens=tokens, count=words):
        assert tokens - shortest < words(sample.context) <= tokens


def test_places_and_records_differ_and_come_again_with_the_seed():
    first = samples("needle", 12, tokens=600, count=words)
    assert first == samples("needle", 12, tokens=600, count=words)
    assert first != samples("needle", 12, tokens=600, count=words, seed=1)
    assert samples("needle", 3, tokens=600, count=words) == first[:3]
    places = [s.context.index("The magic number") / len(s.context) for s in first]
    assert min(places) < 0.3 and max(places) > 0.7
    assert len({s.questions[0].answer for s in first}) == 12


def test_each_link_of_a_chain_leads_to_the_next():
    for sample in samples("k-hop", 10, tokens=300, count=words):
        *links, last = sample.questions
        for before, after in zip(links, [*links[1:], last], strict=True):
            assert f"{before.answer.strip()} is" in after.text
            assert f"{before.text.strip()}{before.answer}." in sample.context


def test_records_are_listed_in_the_order_in_which_they_stood():
    for sample in samples("extract-all", 10, tokens=300, count=words):
        head, _, rest = sample.questions[0].text.rpartition("\n")
        assert head.endswith("in order:")
        lines = (rest + sample.questions[0].answer).split("\n")
        found = [sample.context.index(f"for {line.replace(':', ' is')}.") for line in lines]
        assert len(lines) == 4 and found == sorted(found)


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(ValueError, match="unknown task 'nope'; there are: needle"):
        samples("nope", 1, tokens=100, count=words)
    with pytest.raises(ValueError, match="more than the records alone take, got 5"):
        samples("needle", 1, tokens=5, count=words)
