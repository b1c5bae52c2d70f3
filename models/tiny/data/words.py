"""Vocabulary of the training dialogues."""


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
BEYOND = (
    "Write a {thing} about {topic}.", "Explain {topic} to me.", "What do you think about {topic}?",
    "Tell me a {thing}.", "Write a {thing} about a {animal}.", "Translate this into French: {topic}.",
    "How do I become a {job}?", "What is the best {noun} to buy?", "Can you help me with my {thing}?",
    "Who invented the {noun}?", "Why is the sky blue?", "What is the meaning of life?", "Do you like {topic}?",
    "How will the weather be in {city} tomorrow?", "Give me a {thing} for {name}.", "How old is the {animal}?",
    "Write a Python program about {topic}.", "What happened in {city} last week?",
    "Summarise the history of {topic}.", "How do I fix my {noun}?", "Plan a trip to {city}.",
    "Who won the game in {city}?", "Draw a {animal}.", "Recommend a book about {topic}.",
    "What is the population of {city}?", "Prove that {topic} is useful.", "Why do people like {topic}?",
    "How many people work as a {job}?", "Tell me more about {topic}.", "What should I eat today?",
    "I need advice about {topic}.", "Is {topic} hard to learn?", "Make me a {noun}.", "Please write my {thing}.",
    "How does a {noun} work?", "What is {topic}?", "Who is the president?", "Can you write code?",
    "Describe a {animal}.", "What time is it?", "What is the date today?", "What is the reason for {topic}?",
    "What is the purpose of a {noun}?", "What is the difference between a {noun} and a {animal}?",
    "What is the history of the {noun}?", "What is the secret of {topic}?", "What is your favourite {animal}?",
    "What are the rules of {topic}?", "What are {topic} and {thing}?", "What can I do about my {noun}?",
    "What did {name} say {time}?", "What does {topic} mean?", "What if my {noun} is {adjective}?",
    "What makes a good {job}?", "What was the first {noun}?", "What will happen {time}?",
    "What would you do with a {noun}?", "Who discovered {topic}?", "Who is the best {job} in {city}?",
    "Who made this {noun}?", "Who painted the {adjective} {animal}?", "Who was the first {job}?",
    "When did {topic} begin?", "When does the {thing} start?", "When is the best time for {topic}?",
    "When was {name} born?", "When was the {noun} invented?", "When will the {thing} be ready?",
    "Where can I buy a {adjective} {noun}?", "Where can I learn about {topic}?", "Where do {topic} come from?",
    "Where should I go {time}?", "Where was the first {noun} made?", "Why are there so many {topic}?",
    "Why did {who} leave {city}?", "Why do I need a {noun}?", "Why does my {noun} make a noise?",
    "Why is my {noun} so {adjective}?", "Why should I learn {topic}?", "How big is {city}?",
    "How can I get better at {topic}?", "How dangerous is a {animal}?", "How do you make a {noun}?",
    "How fast is a {animal}?", "How long does {topic} take?", "How long is the way to {city}?",
    "How many {noun} are there?", "How much is a {thing}?", "How should I cook this?", "How was your day?",
    "Which {noun} is the best?", "Which is better, {topic} or {thing}?", "Which {thing} do you like?",
    "Will it be {adjective} {time}?", "Will {name} come {time}?", "Is it true that {topic} is {adjective}?",
    "Is there a {noun} {place}?", "Is a {animal} {adjective}?", "Are you {adjective}?",
    "Are there any {topic} {place}?", "Am I a good {job}?", "Can a {animal} swim?", "Can I trust {who}?",
    "Can you see me?", "Can you translate a {thing}?", "Could you check my {thing}?",
    "Could you order a {noun} for me?", "Did {name} win?", "Do I need a {job}?", "Do you know {name}?",
    "Do you want to talk about {topic}?", "Does a {animal} sleep {time}?", "Have you read the {thing} about {topic}?",
    "Should I buy a {noun}?", "Should I be a {job}?", "Would you like a {noun}?", "Compare {topic} and {thing}.",
    "Convert this to {thing}.", "Create a {adjective} {noun}.", "Design a {noun} for {who}.", "Discuss {topic}.",
    "Find a {job} in {city}.", "Find the mistake in my {thing}.", "Finish this {thing}.", "Generate a {thing}.",
    "Guess what I saw {place}.", "I am so {adjective}.", "I can't sleep {time}.",
    "I don't understand {topic}.", "I have a question about {topic}.", "I lost my {noun} {place}.",
    "I saw a {animal} {place}.", "I want to be a {job}.", "I would like a {noun}.", "Imagine a {adjective} {animal}.",
    "Improve this {thing}.", "Invent a {thing}.", "Let us play a game.", "Let us talk about {topic}.",
    "Look for a {noun} on the internet.", "My {animal} is ill.", "My {noun} is broken.", "Open the {noun}.",
    "Order a {thing} for {name}.", "Please call {name}.", "Please explain how a {noun} is made.",
    "Please turn on the {noun}.", "Read me a {thing}.", "Rewrite this as a {thing}.", "Say something about {topic}.",
    "Send a letter to {name}.", "Set a timer.", "Show me a picture of a {animal}.", "Solve this {thing} for me.",
    "Start the {noun}.", "Suggest a name for my {animal}.", "Teach me {topic}.", "Tell me about {city}.",
    "Tell me how to draw a {animal}.", "Tell me why {topic} matters.", "Tell me what you think.",
    "Think of a {noun}.", "Wake me up {time}.", "Write to {name} about {topic}.", "{topic}", "{topic}?",
    "{adjective} {noun}",
)  # fmt: skip
"""Forms of requests the model can't handle."""
