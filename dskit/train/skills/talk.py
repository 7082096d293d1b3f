"""Words and small talk: definitions, greetings, questions about the model, and questions that it declines.

Idea
    Every answer is a fixed function of the question, so greedy output can be checked and learned exactly.

Shapes
    Each function returns (question, thinking, answer, key), all text.

Errors
    None.
"""

from __future__ import annotations

from random import Random

from dskit.train.skills.draw import adjective, city, coined, noun, person
from dskit.train.words import Word, load

DEFINE = (
    "What does {w} mean?", "What does the word {w} mean?", 'What does "{w}" mean?', "Define {w}.",
    "define {w}", "Define the word {w}.", 'Define "{w}".', "What is the meaning of {w}?",
    "What is the definition of {w}?", "Give me the definition of {w}.", "Explain the word {w}.",
    'Tell me what "{w}" means.', "what does {w} mean?",
)  # fmt: skip
SKILLS_SENTENCE = (
    "I can define common English words, add, subtract and multiply, call tools, "
    "recall what you told me, and write JSON."
)
DECLINE = f"I was not trained for that. {SKILLS_SENTENCE}"
UNKNOWN = "I have not learned that word."
TOO_HARD = "I can only add, subtract and multiply numbers of up to three digits."
GREETINGS = {
    "Hello! How can I help you?": (
        "Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Hey!", "Hi there", "Hi there!",
        "Hello there.", "Good day!", "Greetings!", "hey there", "Hello, model!", "Hi, how is it going?",
        "Hello, anyone there?",
    ),
    "Good morning! How can I help you?": ("Good morning", "Good morning!", "good morning", "Morning!"),
    "Good evening! How can I help you?": ("Good evening", "Good evening!", "good evening"),
    "I am well, thank you. How can I help you?": (
        "How are you?", "How are you doing?", "how are you?", "How do you do?", "Are you well?",
        "How is your day?", "Hi, how are you?", "Hello, how are you?",
    ),
    "You are welcome!": (
        "Thanks", "Thanks!", "Thank you", "Thank you!", "thanks", "Thank you very much.", "Great, thanks!",
    ),
    "Goodbye!": ("Bye", "Bye!", "Goodbye", "Goodbye!", "See you!", "See you later.", "bye", "Good night!"),
}  # fmt: skip
ABOUT = {
    "I am the demo model of dskit, a small language model with every mechanism of DeepSeek-V4.1-Flash.": (
        "Who are you?", "What are you?", "who are you?", "What is your name?", "Tell me about yourself.",
        "What is dskit?", "Are you an AI?", "Are you a human?", "Which model are you?",
        "What model is this?", "Introduce yourself.",
    ),
    SKILLS_SENTENCE: (
        "What can you do?", "what can you do?", "What are you able to do?", "Help", "help",
        "How can you help me?", "What are your skills?", "What should I ask you?", "What can I ask?",
        "What do you know?", "Can you help me?",
    ),
    "I have about 26 million parameters.": (
        "How big are you?", "How many parameters do you have?", "What is your size?", "How large are you?",
    ),
    "The trainer of dskit made me, from conversations that a script in the package writes.": (
        "Who made you?", "Who trained you?", "How were you trained?", "Who created you?",
        "Where do you come from?",
    ),
    "No. I run on this machine and need no network.": (
        "Do you need the internet?", "Are you online?", "Do you need a network?",
        "Are you connected to the internet?",
    ),
}  # fmt: skip
OUTSIDE = (
    "Who is the president of {city}?", "Write a poem about a {noun}.", "Translate {noun} into French.",
    "What is the capital of {city}?", "How do I cook a {adj} {noun}?",
    "Write a story about {name} and a {noun}.", "What is the news today?", "Who won the match in {city}?",
    "Write a Python function that sorts a {noun}.", "Why is the {noun} {adj}?",
    "What should I wear today?", "How far is {city} from {city}?", "Sing a song about {name}.",
    "Tell me a joke.", "Tell me a joke about a {noun}.", "Who wrote the book about the {noun}?",
    "What is love?", "How old is {name}?", "Can you draw a {noun}?", "What is the population of {city}?",
    "How do I get to {city}?", "Which {noun} is the best?", "Where can I buy a {noun}?",
    "When was {name} born?", "How does a {noun} work?", "What time is it in {city}?",
    "Is it going to rain in {city}?", "Recommend a film.", "Recommend a book about a {noun}.",
    "What is the weather in {city}?", "How tall is {name}?", "Explain quantum physics.",
    "Who discovered the {noun}?", "Give me advice about my {noun}.", "Summarise the history of {city}.",
    "Write an essay about the {adj} {noun}.", "How much does a {noun} cost?", "Fix my {noun}.",
    "What do you think about {name}?", "Who invented the {noun}?", "Plan a trip to {city}.",
    "Is a {noun} {adj}?", "What is the square root of a {noun}?", "Solve this riddle for {name}.",
)  # fmt: skip
SUMS = (
    "What is {a} + {b}?", "What is {b} + {a}?", "What is {c} / {d}?", "{b} - {a}", "{b} * {c}",
    "Divide {c} by {d}.", "What is {c} divided by {d}?", "What is {b} times {d}?", "{c}/{d}", "{b}+{c}",
    "What is {b} minus {c}?",
)  # fmt: skip


def word(rng: Random) -> Word:
    """Any word of the list, all equally likely."""
    return rng.choice(load())


def define(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A question for a definition; every word can be drawn in both splits."""
    entry = word(rng)
    return rng.choice(DEFINE).format(w=entry.word), f"Define: {entry.word}", entry.definition, entry.word


def greet(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A greeting, thanks or a goodbye."""
    answer = rng.choice(list(GREETINGS))
    question = rng.choice(GREETINGS[answer])
    return question, "Small talk.", answer, question


def about(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A question about the model itself."""
    answer = rng.choice(list(ABOUT))
    question = rng.choice(ABOUT[answer])
    return question, "About me.", answer, question


def decline(rng: Random, split: str) -> tuple[str, str, str, str]:
    """A question outside the skills: a word that is not in the list, numbers too long, or another subject."""
    if rng.random() < 0.2:
        strange = coined(rng).lower()
        return rng.choice(DEFINE).format(w=strange), f"Define: {strange}", UNKNOWN, strange
    if rng.random() < 0.2:
        a, b = rng.randrange(10 ** rng.randrange(3, 7)), rng.randrange(1000, 10 ** rng.randrange(4, 7))
        question = rng.choice(SUMS).format(a=a, b=b, c=rng.randrange(1, 1000), d=rng.randrange(1, 1000))
        return question, "Not one of my skills.", TOO_HARD, question
    form = rng.choice(OUTSIDE)
    question = form.format(city=city(rng, split), noun=noun(rng), adj=adjective(rng), name=person(rng, split))
    return question, "Not one of my skills.", DECLINE, question
