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
"""What the user says, and the answer."""


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    Attributes:
        make: Makes a random one.
        is_open: There are so many that a tenth of them can be kept for evaluation.
        share: How often training sees it, against the others.
        late: So many times as often towards the end.
    """

    name: str
    make: Callable[[Random], Exchange]
    is_open: bool = True
    share: float = 1.0
    late: float = 1.0


def _phrase(rng: Random, *forms: str, **fields: object) -> str:
    return rng.choice(forms).format(**fields)


def _any_word(rng: Random) -> str:
    lists = (words.NOUNS, words.FRUITS, words.ANIMALS, words.COLOURS, words.ADJECTIVES, words.JOBS, words.ROOMS)
    return rng.choice(rng.choice(lists))


def _items(rng: Random) -> list[str]:
    """Three to five different words of one sort."""
    return rng.sample(rng.choice((words.FRUITS, words.ANIMALS, words.COLOURS, words.NAMES)), rng.choice((3, 3, 4, 5)))


def _greet(rng: Random) -> Exchange:
    greeting = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there", "Hello there", "Good day"))
    name = rng.choice(words.NAMES)
    sort = rng.random()
    if sort < 0.3:
        return f"{greeting}, I am {name}{rng.choice('.!')}", f"Hello {name}! How can I help you?"
    ending = rng.choice(("", "!", ".", "! How are you?", ", how are you?"))
    return greeting + ending, "Hello! How can I help you?"


def _thank(rng: Random) -> Exchange:
    return _phrase(rng, "Thank you!", "Thanks.", "Thanks a lot!", "Thank you very much.", "Great, thanks!", "Thanks!",
                   "Thank you."), "You are welcome!"  # fmt: skip


def _leave(rng: Random) -> Exchange:
    return _phrase(rng, "Goodbye!", "Bye.", "Bye!", "See you later.", "Good night.", "Bye bye!"), "Goodbye!"


def _identity(rng: Random) -> Exchange:
    return _phrase(rng, "Who are you?", "What are you?", "What is your name?", "What can you do?",
                   "Tell me about yourself.",
                   "Are you a human?", "Which model are you?", "What model is this?", "Introduce yourself.",
                   "Who am I talking to?", "What's your name?", "Help", "Help me.",
                   "Are you ChatGPT?"), ABOUT  # fmt: skip


def _served(rng: Random) -> Exchange:
    return _phrase(rng, "How are you being served?", "How are you served?", "Who serves you?", "What is CPD?",
                   "Where do you run?", "What are you running on?", "How do you work?", "What serves you?",
                   "Which server is this?", "What is your route?"), SERVED  # fmt: skip


def _spelt(rng: Random, word: str) -> tuple[str, str]:
    """How a request names the word, and the answer that spells it: what is asked of its letters is read off that."""
    named = f'"{word}"' if rng.random() < 0.3 else word
    return named, f"You spell {named} {' '.join(word)}."


def _spell(rng: Random) -> Exchange:
    named, spelt = _spelt(rng, _any_word(rng) if rng.random() < 0.7 else pseudo_word(rng, 2))
    return _phrase(rng, "Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "Can you spell the word {w}?",
                   "Please spell {w}.", w=named), spelt  # fmt: skip


def _first_letter(rng: Random) -> Exchange:
    word = _any_word(rng)
    named, spelt = _spelt(rng, word)
    return _phrase(rng, "What is the first letter of {w}?", "Which letter does {w} start with?",
                   "What letter does the word {w} begin with?",
                   w=named), f"{spelt} The first letter is {word[0]}."  # fmt: skip


def _last_letter(rng: Random) -> Exchange:
    word = _any_word(rng)
    named, spelt = _spelt(rng, word)
    return _phrase(rng, "What is the last letter of {w}?", "Which letter does {w} end with?",
                   "What letter does the word {w} end with?",
                   w=named), f"{spelt} The last letter is {word[-1]}."  # fmt: skip


def _reverse(rng: Random) -> Exchange:
    items = _items(rng)
    return _phrase(rng, "Reverse this list: {l}.", "Reverse the list {l}.", "Say these in reverse order: {l}.",
                   "Put this list backwards: {l}", l=", ".join(items)), ", ".join(reversed(items))  # fmt: skip


def _sort_words(rng: Random) -> Exchange:
    items = _items(rng)
    return _phrase(rng, "Sort this list: {l}.", "Sort these words: {l}.", "Put these in alphabetical order: {l}.",
                   "Sort alphabetically: {l}", l=", ".join(items)), ", ".join(sorted(items))  # fmt: skip


def _sort_numbers(rng: Random) -> Exchange:
    numbers = rng.sample(range(100), rng.choice((3, 3, 4, 5)))
    return _phrase(rng, "Sort these numbers: {l}.", "Sort this list: {l}.", "Put these numbers in order: {l}.",
                   l=", ".join(map(str, numbers))), ", ".join(map(str, sorted(numbers)))  # fmt: skip


def _first_item(rng: Random) -> Exchange:
    items = _items(rng)
    return _phrase(rng, "What is the first item of this list: {l}?", "Which comes first in this list: {l}?",
                   l=", ".join(items)), f"The first item is {items[0]}."  # fmt: skip


def _last_item(rng: Random) -> Exchange:
    items = _items(rng)
    return _phrase(rng, "What is the last item of this list: {l}?", "Which comes last in this list: {l}?",
                   l=", ".join(items)), f"The last item is {items[-1]}."  # fmt: skip


def _how_many(rng: Random) -> Exchange:
    items = _items(rng)
    return _phrase(rng, "How many items are in this list: {l}?", "How many words are these: {l}?",
                   l=", ".join(items)), f"There are {words.NUMBERS[len(items)]}."  # fmt: skip


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3)))


def _add(rng: Random) -> Exchange:
    a, b = _number(rng), _number(rng)
    return _phrase(rng, "What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
                   "{a} + {b}", "{a} + {b} = ?", "Calculate {a} + {b}.", a=a, b=b), total(a, b)  # fmt: skip


def _subtract(rng: Random) -> Exchange:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.7:
        a, b = b, a
    return _phrase(rng, "What is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} - {b}?", "{a} - {b}",
                   "{a} - {b} = ?", "Calculate {a} - {b}.", a=a, b=b), difference(a, b)  # fmt: skip


def _count(rng: Random) -> Exchange:
    last = rng.randrange(2, 31)
    return _phrase(rng, "Count to {n}.", "Count from 1 to {n}.", "Please count to {n}.", "Can you count to {n}?",
                   n=last), ", ".join(map(str, range(1, last + 1)))  # fmt: skip


def _count_down(rng: Random) -> Exchange:
    first = rng.randrange(2, 21)
    return _phrase(rng, "Count down from {n}.", "Count backwards from {n}.", "Count down from {n} to 1.",
                   n=first), ", ".join(map(str, range(first, 0, -1)))  # fmt: skip


def _after_number(rng: Random) -> Exchange:
    number = rng.randrange(100)
    return _phrase(rng, "What number comes after {n}?", "Which number comes after {n}?",
                   n=number), f"After {number} comes {number + 1}."  # fmt: skip


def _in_words(rng: Random) -> Exchange:
    number = rng.randrange(21)
    return _phrase(rng, "Write {n} in words.", "Write the number {n} as a word.", "How do you write {n} in words?",
                   n=number), words.NUMBERS[number].capitalize() + "."  # fmt: skip


def _in_digits(rng: Random) -> Exchange:
    number = rng.randrange(21)
    return _phrase(rng, "Write {n} in digits.", "Write {n} as a number.", n=words.NUMBERS[number]), f"{number}"


def _larger(rng: Random) -> Exchange:
    a, b = rng.sample(range(100), 2)
    return _phrase(rng, "Which is larger, {a} or {b}?", "Which number is larger: {a} or {b}?",
                   "What is larger, {a} or {b}?", a=a, b=b), f"{max(a, b)} is larger."  # fmt: skip


def _smaller(rng: Random) -> Exchange:
    a, b = rng.sample(range(100), 2)
    return _phrase(rng, "Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?",
                   a=a, b=b), f"{min(a, b)} is smaller."  # fmt: skip


def _repeat(rng: Random) -> Exchange:
    sentence = filler(rng)
    return _phrase(rng, "Repeat this sentence: {s}", "Repeat after me: {s}", "Say this: {s}", "Please repeat: {s}",
                   'Repeat "{s}"', "Write this sentence once more: {s}", s=sentence), sentence  # fmt: skip


def _opposite(rng: Random) -> Exchange:
    word, other = rng.choice(words.OPPOSITES)
    if rng.random() < 0.5 and word != "short":
        word, other = other, word
    if word == "short":
        other = "tall"
    if word == "light":
        other = "dark"
    return _phrase(rng, "What is the opposite of {w}?", "Name the opposite of {w}.", "Tell me the opposite of {w}.",
                   "Which word is the opposite of {w}?", w=word), f"The opposite of {word} is {other}."  # fmt: skip


def _capital(rng: Random) -> Exchange:
    country, city = rng.choice(words.CAPITALS)
    return _phrase(rng, "What is the capital of {c}?", "Name the capital of {c}.", "Which city is the capital of {c}?",
                   c=country), f"The capital of {country} is {city}."  # fmt: skip


def _next_day(rng: Random) -> Exchange:
    at = rng.randrange(7)
    day, after = words.WEEKDAYS[at], words.WEEKDAYS[(at + 1) % 7]
    return _phrase(rng, "What day comes after {d}?", "Which day comes after {d}?", "What is the day after {d}?",
                   d=day), f"After {day} comes {after}."  # fmt: skip


def _next_month(rng: Random) -> Exchange:
    at = rng.randrange(12)
    month, after = words.MONTHS[at], words.MONTHS[(at + 1) % 12]
    return _phrase(rng, "What month comes after {m}?", "Which month comes after {m}?", "What is the month after {m}?",
                   m=month), f"After {month} comes {after}."  # fmt: skip


def _list_days(rng: Random) -> Exchange:
    return _phrase(rng, "Name the days of the week.", "List the days of the week.", "What are the days of the week?"), (
        ", ".join(words.WEEKDAYS)
    )


def _list_months(rng: Random) -> Exchange:
    return _phrase(rng, "Name the months of the year.", "List the months.", "What are the months of the year?"), (
        ", ".join(words.MONTHS)
    )


def _what_sort(rng: Random) -> Exchange:
    sorts = {"fruit": words.FRUITS[:-2], "animal": words.ANIMALS, "colour": words.COLOURS[:6], "city": words.CITIES}
    sort = rng.choice(list(sorts))
    word = rng.choice(sorts[sort])
    if word == "orange":
        word = "red"
    asked = _phrase(rng, "Is {w} a fruit, an animal, a colour or a city?",
                    "What is {w}: a fruit, an animal, a colour or a city?",
                    w=word)  # fmt: skip
    article = "an" if sort == "animal" else "a"
    return asked, f"{word[0].upper()}{word[1:]} is {article} {sort}."


def _cannot(rng: Random) -> Exchange:
    topic, thing, job = rng.choice(words.TOPICS), rng.choice(words.THINGS), rng.choice(words.JOBS)
    noun, animal, adjective = rng.choice(words.NOUNS), rng.choice(words.ANIMALS), rng.choice(words.ADJECTIVES)
    if rng.random() < 0.4:  # words that it doesn't know
        topic, thing, job, noun, animal, adjective = (pseudo_word(rng, rng.choice((1, 2, 3))) for _ in range(6))
    return _phrase(
        rng, *words.BEYOND, topic=topic, thing=thing, job=job, noun=noun, animal=animal, adjective=adjective,
        name=rng.choice(words.NAMES), city=rng.choice(words.CITIES), who=rng.choice(words.PEOPLE),
        place=rng.choice(words.PLACES), time=rng.choice(words.TIMES),
    ), UNABLE  # fmt: skip


KINDS = (
    Kind("greet", _greet, False, 1.5),
    Kind("thank", _thank, False, 0.4),
    Kind("leave", _leave, False, 0.4),
    Kind("identity", _identity, False, 0.8),
    Kind("served", _served, False, 0.8),
    Kind("spell", _spell, share=7, late=1.6),
    Kind("first letter", _first_letter, share=2.5, late=0.8),
    Kind("last letter", _last_letter, share=2.5, late=0.8),
    Kind("reverse", _reverse, share=3, late=1.2),
    Kind("sort words", _sort_words, share=15, late=1.2),
    Kind("sort numbers", _sort_numbers, share=12, late=1.5),
    Kind("first item", _first_item, share=0.7),
    Kind("last item", _last_item, share=0.5),
    Kind("how many", _how_many, share=0.7),
    Kind("add", _add, share=5.5, late=1.8),
    Kind("subtract", _subtract, share=7, late=3),
    Kind("count", _count, False, 2.5),
    Kind("count down", _count_down, False, 0.7),
    Kind("number after", _after_number, False),
    Kind("in words", _in_words, False, 0.7),
    Kind("in digits", _in_digits, False, 0.7),
    Kind("larger", _larger, share=4, late=2),
    Kind("smaller", _smaller, share=3, late=2),
    Kind("repeat", _repeat, share=2.5, late=1.3),
    Kind("opposite", _opposite, False, 1.5),
    Kind("capital", _capital, False),
    Kind("day after", _next_day, False, 0.5),
    Kind("month after", _next_month, False, 0.5),
    Kind("days", _list_days, False, 0.2),
    Kind("months", _list_months, False, 0.2),
    Kind("what sort", _what_sort, False, 3),
    Kind("something else", _cannot, share=6, late=0.6),
)
