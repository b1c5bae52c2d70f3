"""Simple requests and their answers, by kind."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from models.tiny.data import words
from models.tiny.data.arithmetic import difference, total
from models.tiny.data.recall import filler, pseudo_word

ABOUT = (
    "I am the tiny demo model of CPD. I can recall what you tell me, and do simple things such as spelling, "
    "counting, sorting and small sums."
)
SERVED = (
    "CPD serves me. A router sends each request to a worker, and a long prompt may be prefilled on another one. "
    "The response header x-cpd-route says which way this one took."
)
UNABLE = "I am only a tiny demo model, so I can't help with that. I can recall, spell, count, sort and do small sums."

Exchange = tuple[str, str]
"""A request and its answer."""

Fields = dict[str, object]


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    Attributes:
        make: Makes a random one.
        is_open: There are enough different ones to keep a tenth for evaluation.
        share: Frequency in training, relative to the others.
        late: Factor of the frequency towards the end of training.
    """

    name: str
    make: Callable[[Random], Exchange]
    is_open: bool = True
    share: float = 1.0
    late: float = 1.0


def _from(draw: Callable[[Random], Fields], answer: str, *forms: str) -> Callable[[Random], Exchange]:
    """Makes exchanges of one of several forms. `draw` draws the fields of the form and of the answer."""

    def make(rng: Random) -> Exchange:
        fields = draw(rng)
        return rng.choice(forms).format(**fields), answer.format(**fields)

    return make


def _nothing(rng: Random) -> Fields:
    return {}


def _any_word(rng: Random) -> str:
    lists = (words.NOUNS, words.FRUITS, words.ANIMALS, words.COLOURS, words.ADJECTIVES, words.JOBS, words.ROOMS)
    return rng.choice(rng.choice(lists))


def _greet(rng: Random) -> Exchange:
    greeting = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there", "Hello there", "Good day"))
    name = rng.choice(words.NAMES)
    sort = rng.random()
    if sort < 0.3:
        return f"{greeting}, I am {name}{rng.choice('.!')}", f"Hello {name}! How can I help you?"
    ending = rng.choice(("", "!", ".", "! How are you?", ", how are you?"))
    return greeting + ending, "Hello! How can I help you?"


def _spelled(rng: Random, word: str) -> Fields:
    """A word as the request names it, and its spelling, from which answers about its letters follow."""
    named = f'"{word}"' if rng.random() < 0.3 else word
    return {"w": named, "spelled": f"You spell {named} {' '.join(word)}.", "first": word[0], "last": word[-1]}


def _items(rng: Random) -> Fields:
    """A list of three to five different words of one sort."""
    lists = (words.FRUITS, words.ANIMALS, words.COLOURS, words.NAMES)
    items = rng.sample(rng.choice(lists), rng.choice((3, 3, 4, 5)))
    return {
        "l": ", ".join(items),
        "reversed": ", ".join(reversed(items)),
        "sorted": ", ".join(sorted(items)),
        "first": items[0],
        "last": items[-1],
        "count": words.NUMBERS[len(items)],
    }


def _numbers(rng: Random) -> Fields:
    numbers = rng.sample(range(100), rng.choice((3, 3, 4, 5)))
    return {"l": ", ".join(map(str, numbers)), "sorted": ", ".join(map(str, sorted(numbers)))}


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3)))


def _sum(rng: Random) -> Fields:
    a, b = _number(rng), _number(rng)
    return {"a": a, "b": b, "answer": total(a, b)}


def _difference(rng: Random) -> Fields:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    return {"a": a, "b": b, "answer": difference(a, b)}


def _count(rng: Random) -> Fields:
    last = rng.randrange(2, 31)
    return {"n": last, "answer": ", ".join(map(str, range(1, last + 1)))}


def _count_down(rng: Random) -> Fields:
    first = rng.randrange(2, 21)
    return {"n": first, "answer": ", ".join(map(str, range(first, 0, -1)))}


def _after_number(rng: Random) -> Fields:
    number = rng.randrange(100)
    return {"n": number, "next": number + 1}


def _number_word(rng: Random) -> Fields:
    number = rng.randrange(21)
    return {"n": number, "word": words.NUMBERS[number], "capitalised": words.NUMBERS[number].capitalize()}


def _two_numbers(rng: Random) -> Fields:
    a, b = rng.sample(range(100), 2)
    return {"a": a, "b": b, "larger": max(a, b), "smaller": min(a, b)}


def _opposite(rng: Random) -> Fields:
    word, other = rng.choice(words.OPPOSITES)
    if rng.random() < 0.5 and word != "short":
        word, other = other, word
    if word == "short":
        other = "tall"
    if word == "light":
        other = "dark"
    return {"w": word, "other": other}


def _following(names: tuple[str, ...]) -> Callable[[Random], Fields]:
    """Draws one of the names and the one after it."""

    def draw(rng: Random) -> Fields:
        at = rng.randrange(len(names))
        return {"x": names[at], "next": names[(at + 1) % len(names)]}

    return draw


def _what_sort(rng: Random) -> Fields:
    sorts = {"fruit": words.FRUITS[:-2], "animal": words.ANIMALS, "colour": words.COLOURS[:6], "city": words.CITIES}
    sort = rng.choice(list(sorts))
    word = rng.choice(sorts[sort])
    if word == "orange":
        word = "red"
    article = "an" if sort == "animal" else "a"
    return {"w": word, "capitalised": f"{word[0].upper()}{word[1:]}", "sort": f"{article} {sort}"}


def _cannot(rng: Random) -> Exchange:
    topic, thing, job = rng.choice(words.TOPICS), rng.choice(words.THINGS), rng.choice(words.JOBS)
    noun, animal, adjective = rng.choice(words.NOUNS), rng.choice(words.ANIMALS), rng.choice(words.ADJECTIVES)
    if rng.random() < 0.4:  # unknown words
        topic, thing, job, noun, animal, adjective = (pseudo_word(rng, rng.choice((1, 2, 3))) for _ in range(6))
    fields = {
        "topic": topic, "thing": thing, "job": job, "noun": noun, "animal": animal, "adjective": adjective,
        "name": rng.choice(words.NAMES), "city": rng.choice(words.CITIES), "who": rng.choice(words.PEOPLE),
        "place": rng.choice(words.PLACES), "time": rng.choice(words.TIMES),
    }  # fmt: skip
    return rng.choice(words.BEYOND).format(**fields), UNABLE


KINDS = (
    Kind("greet", _greet, False, 1.5),
    Kind("thank", _from(
        _nothing, "You are welcome!",
        "Thank you!", "Thanks.", "Thanks a lot!", "Thank you very much.", "Great, thanks!", "Thanks!", "Thank you.",
    ), False, 0.4),
    Kind("leave", _from(
        _nothing, "Goodbye!",
        "Goodbye!", "Bye.", "Bye!", "See you later.", "Good night.", "Bye bye!",
    ), False, 0.4),
    Kind("identity", _from(
        _nothing, ABOUT,
        "Who are you?", "What are you?", "What is your name?", "What can you do?", "Tell me about yourself.",
        "Are you a human?", "Which model are you?", "What model is this?", "Introduce yourself.",
        "Who am I talking to?", "What's your name?", "Help", "Help me.", "Are you ChatGPT?",
    ), False, 0.8),
    Kind("served", _from(
        _nothing, SERVED,
        "How are you being served?", "How are you served?", "Who serves you?", "What is CPD?", "Where do you run?",
        "What are you running on?", "How do you work?", "What serves you?", "Which server is this?",
        "What is your route?",
    ), False, 0.8),
    Kind("spell", _from(
        lambda rng: _spelled(rng, _any_word(rng) if rng.random() < 0.7 else pseudo_word(rng, 2)), "{spelled}",
        "Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "Can you spell the word {w}?",
        "Please spell {w}.",
    ), share=7, late=1.6),
    Kind("first letter", _from(
        lambda rng: _spelled(rng, _any_word(rng)), "{spelled} The first letter is {first}.",
        "What is the first letter of {w}?", "Which letter does {w} start with?",
        "What letter does the word {w} begin with?",
    ), share=2.5, late=0.8),
    Kind("last letter", _from(
        lambda rng: _spelled(rng, _any_word(rng)), "{spelled} The last letter is {last}.",
        "What is the last letter of {w}?", "Which letter does {w} end with?", "What letter does the word {w} end with?",
    ), share=2.5, late=0.8),
    Kind("reverse", _from(
        _items, "{reversed}",
        "Reverse this list: {l}.", "Reverse the list {l}.", "Say these in reverse order: {l}.",
        "Put this list backwards: {l}",
    ), share=3, late=1.2),
    Kind("sort words", _from(
        _items, "{sorted}",
        "Sort this list: {l}.", "Sort these words: {l}.", "Put these in alphabetical order: {l}.",
        "Sort alphabetically: {l}",
    ), share=15, late=1.2),
    Kind("sort numbers", _from(
        _numbers, "{sorted}",
        "Sort these numbers: {l}.", "Sort this list: {l}.", "Put these numbers in order: {l}.",
    ), share=12, late=1.5),
    Kind("first item", _from(
        _items, "The first item is {first}.",
        "What is the first item of this list: {l}?", "Which comes first in this list: {l}?",
    ), share=0.7),
    Kind("last item", _from(
        _items, "The last item is {last}.",
        "What is the last item of this list: {l}?", "Which comes last in this list: {l}?",
    ), share=0.5),
    Kind("how many", _from(
        _items, "There are {count}.",
        "How many items are in this list: {l}?", "How many words are these: {l}?",
    ), share=0.7),
    Kind("add", _from(
        _sum, "{answer}",
        "What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "{a} + {b}",
        "{a} + {b} = ?", "Calculate {a} + {b}.",
    ), share=5.5, late=1.8),
    Kind("subtract", _from(
        _difference, "{answer}",
        "What is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?",
        "Calculate {a} - {b}.",
    ), share=7, late=3),
    Kind("count", _from(
        _count, "{answer}",
        "Count to {n}.", "Count from 1 to {n}.", "Please count to {n}.", "Can you count to {n}?",
    ), False, 2.5),
    Kind("count down", _from(
        _count_down, "{answer}",
        "Count down from {n}.", "Count backwards from {n}.", "Count down from {n} to 1.",
    ), False, 0.7),
    Kind("number after", _from(
        _after_number, "After {n} comes {next}.", "What number comes after {n}?", "Which number comes after {n}?",
    ), False),
    Kind("in words", _from(
        _number_word, "{capitalised}.",
        "Write {n} in words.", "Write the number {n} as a word.", "How do you write {n} in words?",
    ), False, 0.7),
    Kind("in digits", _from(_number_word, "{n}", "Write {word} in digits.", "Write {word} as a number."), False, 0.7),
    Kind("larger", _from(
        _two_numbers, "{larger} is larger.",
        "Which is larger, {a} or {b}?", "Which number is larger: {a} or {b}?", "What is larger, {a} or {b}?",
    ), share=4, late=2),
    Kind("smaller", _from(
        _two_numbers, "{smaller} is smaller.",
        "Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?",
    ), share=3, late=2),
    Kind("repeat", _from(
        lambda rng: {"s": filler(rng)}, "{s}",
        "Repeat this sentence: {s}", "Repeat after me: {s}", "Say this: {s}", "Please repeat: {s}", 'Repeat "{s}"',
        "Write this sentence once more: {s}",
    ), share=2.5, late=1.3),
    Kind("opposite", _from(
        _opposite, "The opposite of {w} is {other}.",
        "What is the opposite of {w}?", "Name the opposite of {w}.", "Tell me the opposite of {w}.",
        "Which word is the opposite of {w}?",
    ), False, 1.5),
    Kind("capital", _from(
        lambda rng: dict(zip(("c", "city"), rng.choice(words.CAPITALS), strict=True)), "The capital of {c} is {city}.",
        "What is the capital of {c}?", "Name the capital of {c}.", "Which city is the capital of {c}?",
    ), False),
    Kind("day after", _from(
        _following(words.WEEKDAYS), "After {x} comes {next}.",
        "What day comes after {x}?", "Which day comes after {x}?", "What is the day after {x}?",
    ), False, 0.5),
    Kind("month after", _from(
        _following(words.MONTHS), "After {x} comes {next}.",
        "What month comes after {x}?", "Which month comes after {x}?", "What is the month after {x}?",
    ), False, 0.5),
    Kind("days", _from(
        _nothing, ", ".join(words.WEEKDAYS),
        "Name the days of the week.", "List the days of the week.", "What are the days of the week?",
    ), False, 0.2),
    Kind("months", _from(
        _nothing, ", ".join(words.MONTHS),
        "Name the months of the year.", "List the months.", "What are the months of the year?",
    ), False, 0.2),
    Kind("what sort", _from(
        _what_sort, "{capitalised} is {sort}.",
        "Is {w} a fruit, an animal, a colour or a city?", "What is {w}: a fruit, an animal, a colour or a city?",
    ), False, 3),
    Kind("something else", _cannot, share=6, late=0.6),
)  # fmt: skip
