"""The words that dialogues are made of."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, _, right in (pair.partition("/") for pair in text.split()))


ADJECTIVES = _words(
    """copper silver golden wooden iron glass paper leather plastic marble velvet woollen bronze stone rusty shiny
    old new tall short round square heavy light broken clean dusty empty narrow wide striped spotted ancient modern
    tiny large quiet noisy wet dry warm cold northern southern eastern western left right upper lower secret hidden
    famous spare"""
)
NOUNS = _words(
    """door gate box safe locker cabinet drawer chest vault cupboard garage shed cellar suitcase bag lamp clock mirror
    chair table bench sofa carpet curtain pillow blanket basket bottle cup plate bowl kettle teapot knife spoon fork
    hammer ladder bucket broom rope candle lantern umbrella scarf coat hat glove boot ring necklace watch camera radio
    piano guitar violin drum flute book notebook map letter stamp picture statue vase bicycle scooter wagon boat kite
    ball doll puzzle telescope"""
)
NAMES = _words(
    """Anna Ben Clara David Emma Felix Grace Henry Irene Jack Kate Leo Maria Nora Oscar Paul Quinn Rosa Sam Tina
    Ursula Victor Wendy Yara Adam Bella Carlos Diana Erik Fiona George Hannah Ivan Julia Karl Laura Martin Nina Olga
    Peter Ruth Simon Thomas Vera Walter Zoe Alice Bruno Cora Daniel Elena Frank Greta Hugo Ida Jonas Kira Lena Max
    Nadia Otto Petra Rita Stefan Tom Uma Viola Will Amy Boris"""
)
COLOURS = _words(
    """red blue green yellow orange purple pink brown black white grey turquoise violet beige crimson navy olive
    maroon"""
)
ROOMS = _words(
    """kitchen attic bedroom bathroom hallway library office basement garden workshop pantry balcony study nursery
    laundry greenhouse stable tower"""
)
CITIES = _words(
    """Paris Rome Oslo London Berlin Madrid Vienna Lisbon Dublin Athens Prague Warsaw Helsinki Tokyo Cairo Lima Delhi
    Boston Geneva Milan Hamburg Seville Bergen Lyon"""
)
FRUITS = _words(
    """apple banana cherry grape lemon mango melon peach pear plum fig kiwi lime papaya apricot raspberry"""
)
ANIMALS = _words(
    """dog cat horse cow sheep goat pig duck goose hen fox wolf bear lion tiger zebra mouse rabbit owl eagle frog
    snake whale shark"""
)
JOBS = _words(
    """baker teacher doctor nurse farmer pilot sailor painter singer writer lawyer judge cook gardener carpenter
    plumber tailor barber engineer dentist"""
)
THINGS = _words(
    """poem song story recipe novel report speech joke letter essay film game program website budget plan diet
    contract riddle summary"""
)
TOPICS = _words(
    """football weather politics history physics chemistry music cooking travel gardening economics philosophy
    computers medicine astronomy art religion fashion films robots taxes volcanoes dinosaurs elections holidays chess
    photography biology rockets insurance"""
)
OPPOSITES = _pairs(
    """hot/cold big/small tall/short fast/slow light/dark wet/dry old/young up/down left/right open/closed
    happy/sad hard/soft loud/quiet rich/poor early/late full/empty clean/dirty strong/weak near/far high/low
    day/night black/white first/last always/never true/false good/bad inside/outside thick/thin wide/narrow
    sweet/sour smooth/rough"""
)
CAPITALS = _pairs(
    """France/Paris Italy/Rome Norway/Oslo England/London Germany/Berlin Spain/Madrid Austria/Vienna
    Portugal/Lisbon Ireland/Dublin Greece/Athens Poland/Warsaw Finland/Helsinki Japan/Tokyo Egypt/Cairo Peru/Lima
    India/Delhi"""
)
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
NUMBERS = _words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty"""
)
PEOPLE = ("a man", "a woman", "the neighbour", "my uncle", "an old friend", "the teacher", "a stranger", "the driver")
VERBS = ("walked", "looked", "waited", "talked", "smiled", "slept", "sat down", "stood", "laughed", "worked")
PLACES = (
    "in the park", "by the river", "near the station", "at the market", "behind the church", "under the bridge",
    "on the hill", "in the village", "at the corner", "along the road", "in front of the school", "by the lake",
)  # fmt: skip
TIMES = (
    "in the morning", "at noon", "in the evening", "at night", "before dinner", "after the rain", "all day long",
    "for an hour", "last week", "that winter", "once again", "every summer",
)  # fmt: skip
SENTENCES = (
    "The rain had stopped, and the street was quiet.", "Nobody knew how long it would take.",
    "It was a long day for everyone.", "The bread was still warm.", "There was nothing more to say.",
    "The wind blew the leaves across the square.", "We had to wait for the next bus.",
    "Most people had already gone home.", "The meeting was moved to another week.",
    "She opened the window to let in some air.", "He could not remember where he had put it.",
    "The children played until it was dark.", "All of this happened a long time ago.",
    "The news came as a surprise.", "It was warmer than in the year before.", "They talked about the weather.",
)  # fmt: skip
SYLLABLES = _words(
    """ba be bo da de di do fa fe ga go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa se so
    ta te ti to va ve vi vo wa we za ze zo"""
)
