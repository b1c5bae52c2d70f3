"""Facts, and questions about them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from models.tiny.data import words
from models.tiny.data.reserved import is_reserved


@dataclass(frozen=True)
class Kind:
    """One kind of fact. Its texts have fields: a (adjective), n (noun), p (person), c (city) and v (the value)."""

    key: str
    """The fields that name the subject of the fact."""

    value: str
    statement: str
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]
    """Questions after one of the same kind that name the whole subject."""

    elliptic: str = ""
    """A question that takes its noun from the question before."""


OF_THING = ("And the {a} {n}?", "What about the {a} {n}?", "And for the {a} {n}?")
OF_PERSON = ("And {p}?", "What about {p}?", "And what about {p}?")

KINDS = (
    Kind(
        "an", "code", "The code for the {a} {n} is {v}.",
        ("What is the code for the {a} {n}?", "Tell me the code for the {a} {n}.", "Which code opens the {a} {n}?",
         "What's the code of the {a} {n}?", "Please give me the code for the {a} {n}.",
         "I need the code for the {a} {n}."),
        OF_THING, "And the {a} one?",
    ),
    Kind(
        "an", "pseudo", "The password for the {a} {n} is {v}.",
        ("What is the password for the {a} {n}?", "Tell me the password for the {a} {n}.",
         "Which password does the {a} {n} have?"),
        OF_THING, "And the {a} one?",
    ),
    Kind(
        "an", "room", "You will find the {a} {n} in the {v}.",
        ("Where is the {a} {n}?", "Where can I find the {a} {n}?", "In which room is the {a} {n}?",
         "Where did I put the {a} {n}?"),
        OF_THING, "And the {a} one?",
    ),
    Kind(
        "an", "name", "The owner of the {a} {n} is {v}.",
        ("Who owns the {a} {n}?", "Whose is the {a} {n}?", "Who does the {a} {n} belong to?"),
        OF_THING, "And the {a} one?",
    ),
    Kind(
        "an", "price", "The price of the {a} {n} is {v} coins.",
        ("How much does the {a} {n} cost?", "What does the {a} {n} cost?", "What is the price of the {a} {n}?"),
        OF_THING, "And the {a} one?",
    ),
    Kind(
        "pn", "colour", "The colour of {p}'s {n} is {v}.",
        ("What is the colour of {p}'s {n}?", "What colour is {p}'s {n}?", "What color is {p}'s {n}?",
         "Which colour does {p}'s {n} have?"),
        ("And {p}'s {n}?", "What about {p}'s {n}?"), "And {p}'s?",
    ),
    Kind(
        "p", "city", "The home of {p} is in {v}.",
        ("Where does {p} live?", "In which city does {p} live?", "What city does {p} live in?"), OF_PERSON,
    ),
    Kind(
        "p", "job", "The job of {p} is {v}.",
        ("What does {p} do?", "What is {p}'s job?", "What does {p} work as?"), OF_PERSON,
    ),
    Kind(
        "p", "fruit", "The favourite fruit of {p} is {v}.",
        ("What is {p}'s favourite fruit?", "Which fruit does {p} like best?", "What fruit does {p} like?"), OF_PERSON,
    ),
    Kind(
        "p", "phone", "The phone number of {p} is {v}.",
        ("What is the phone number of {p}?", "What is {p}'s phone number?", "How can I call {p}?"), OF_PERSON,
    ),
    Kind(
        "c", "time", "The train to {c} leaves at {v}.",
        ("When does the train to {c} leave?", "At what time does the train to {c} leave?", "When is the train to {c}?"),
        ("And to {c}?", "And the train to {c}?", "What about {c}?"),
    ),
)  # fmt: skip

OPENINGS = ("Please note: ", "By the way: ", "Remember this: ", "Also: ", "Note: ", "One more thing: ")


@dataclass(frozen=True)
class Fact:
    """A fact about a subject."""

    kind: Kind
    fields: tuple[tuple[str, str], ...]

    @property
    def statement(self) -> str:
        """The sentence that states the fact, which is also the answer to a question about it."""
        return self.fill(self.kind.statement)

    def fill(self, text: str) -> str:
        """Fills the fields of `text` with this fact's words."""
        return text.format(**dict(self.fields))


def pseudo_word(rng: Random, syllables: int) -> str:
    """An invented word."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(syllables)) + rng.choice(("", "", "n", "r", "l", "x"))


def value(rng: Random, sort: str) -> str:
    """A random value of a kind of fact."""
    digits = {"code": 4, "phone": 6}
    if sort in digits:
        return "".join(rng.choices("0123456789", k=digits[sort]))
    if sort == "price":
        return str(rng.randrange(2, 1000))
    if sort == "time":
        return f"{rng.randrange(24)}:{rng.randrange(60):02}"
    if sort == "pseudo":
        return pseudo_word(rng, rng.choice((2, 3)))
    lists = {
        "room": words.ROOMS, "name": words.NAMES, "colour": words.COLOURS, "city": words.CITIES, "job": words.JOBS,
        "fruit": words.FRUITS,
    }  # fmt: skip
    return rng.choice(lists[sort])


def facts(rng: Random, count: int, with_reserved: bool = False) -> list[Fact]:
    """At most `count` facts about different subjects. Facts reserved for evaluation come only `with_reserved`."""
    kinds = rng.sample(KINDS, rng.choice((1, 2, 3, 5, len(KINDS))))
    nouns = rng.sample(words.NOUNS, min(len(words.NOUNS), rng.choice((1, 2, 5, len(words.NOUNS)))))
    strange = rng.random() < 0.15
    found: dict[tuple[str, ...], Fact] = {}
    for _ in range(4 * count):
        if len(found) == count:
            break
        kind = rng.choice(kinds)
        made = {
            "a": rng.choice(words.ADJECTIVES),
            "n": rng.choice(nouns),
            "p": rng.choice(words.NAMES),
            "c": rng.choice(words.CITIES),
        }
        if strange and rng.random() < 0.5:
            made |= {"a": pseudo_word(rng, 2), "p": pseudo_word(rng, 2).title(), "c": pseudo_word(rng, 2).title()}
        fields = tuple((name, made[name]) for name in kind.key)
        fact = Fact(kind, (*fields, ("v", value(rng, kind.value))))
        if with_reserved or not is_reserved(fact.statement):
            found[(kind.statement, *(word for _, word in fields))] = fact
    return list(found.values())


def questions(rng: Random, known: list[Fact]) -> Iterator[tuple[str, Fact]]:
    """Endless questions about the `known` facts, each with the fact that answers it. Some depend on the one before."""
    last: Fact | None = None
    while True:
        same_kind = [fact for fact in known if last and fact.kind is last.kind and fact != last]
        if same_kind and rng.random() < 0.5:
            assert last is not None
            same_noun = [fact for fact in same_kind if dict(fact.fields).get("n") == dict(last.fields).get("n")]
            if last.kind.elliptic and same_noun and rng.random() < 0.6:
                last = rng.choice(same_noun)
                yield last.fill(last.kind.elliptic), last
            else:
                last = rng.choice(same_kind)
                yield last.fill(rng.choice(last.kind.follow_ups)), last
        else:
            last = rng.choice(known)
            yield last.fill(rng.choice(last.kind.questions)), last


def stated(rng: Random, fact: Fact) -> str:
    """The fact's statement, sometimes with an opening."""
    return rng.choice(OPENINGS) + fact.statement if rng.random() < 0.2 else fact.statement


def filler(rng: Random) -> str:
    """A sentence without a fact."""
    sort = rng.random()
    if sort < 0.25:
        return rng.choice(words.SENTENCES)
    if sort < 0.5:
        return (
            f"{rng.choice(words.NAMES)} {rng.choice(words.VERBS)} {rng.choice(words.PLACES)} {rng.choice(words.TIMES)}."
        )
    if sort < 0.7:
        who = rng.choice(words.PEOPLE)
        return f"{rng.choice(words.TIMES).capitalize()}, {who} {rng.choice(words.VERBS)} {rng.choice(words.PLACES)}."
    if sort < 0.85:
        return (
            f"There was a {rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)} {rng.choice(words.PLACES)}, "
            f"next to the {rng.choice((*words.ANIMALS, *words.FRUITS))}."
        )
    return (
        f"{rng.choice(words.NAMES)} and {rng.choice(words.NAMES)} talked about {rng.choice(words.TOPICS)} "
        f"{rng.choice(words.TIMES)}."
    )
