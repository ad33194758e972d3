"""Four small data sets, of which each person who fine-tunes at home has one, and what is held out.

`support` answers questions of customers, asked in other words than those of training; `sentiment`
classifies short sentences of SST-2; `style` says a fact in another tone; `calls` writes function
calls for unseen phrasings. Rows are drawn from a seed, and no held-out prompt is trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

from harness.tasks import calls, sst2
from harness.tasks.examples import Example, write_jsonl

Sets = tuple[list[Example], list[Example]]  # rows to train on, and held-out ones

# two names of a topic that are trained, one that is held out, and the answer
TOPICS = """
the opening hours | when you are open | the hours of the shop > We open from 9 to 18 on weekdays.
sending a parcel back | a return | returning a parcel > Returns are free for 30 days.
the price of shipping | what delivery costs | the cost of delivery > Shipping costs 4 euros.
the time of delivery | how long shipping takes | how fast you deliver > It takes two days.
a lost password | a password that I forgot | resetting my password > Reset it under Login.
changing my address | my new address | a different address > Change it under Account.
a broken item | damaged goods | damage to my item > Send a photo and we replace it.
paying by card | credit cards | payment with a card > We take all cards.
an invoice | a bill for my order | the bill > Your invoice is in your mail.
cancelling an order | stopping my order | calling off my order > Cancel it within one hour.
a gift card | vouchers | a gift voucher > Gift cards are valid for three years.
the warranty | your guarantee | the guarantee on goods > The warranty lasts two years.
a job with you | working for you | open jobs > Send us your letter by mail.
the phone number | calling you | reaching you by phone > Call us on any weekday.
a discount for students | lower prices for students | student prices > Students get a tenth off.
deleting my account | closing my account | removing my account > Write to our privacy desk.
where my parcel is | tracking my parcel | following my parcel > Track it under Orders.
shipping abroad | sending to other countries | delivery abroad > We ship to all of Europe.
"""
ASKED = ("I have a question about {}.", "Tell me about {}.", "Hello, it is about {}.", "And {}?")
ASKED_OTHERWISE = ("Can you help me with {}?", "Please explain {}.")

THINGS = ("ferry", "bread", "museum", "parcel", "choir", "train", "doctor", "market", "painter")
EVENTS = ("comes", "is late", "is free", "is ready", "starts early", "needs help")
DAYS = ("today", "on Monday", "on Friday", "at noon", "this week", "tonight")


def support(seed: int) -> Sets:
    """144 questions with 18 answers, and 36 questions in other words."""
    train, valid = [], []
    for line in TOPICS.strip().splitlines():
        names, answer = line.split(" > ")
        *known, unseen = names.split(" | ")
        train += [_asked(form, name, answer) for form, name in product(ASKED, known)]
        valid += [_asked(form, unseen, answer) for form in ASKED_OTHERWISE]
    return train, valid


def _asked(form: str, topic: str, answer: str) -> Example:
    return Example(f"Customer: {form.format(topic)}\nShop:", f" {answer}")


def style(seed: int) -> Sets:
    """Facts, and how a pirate says them: 32 to train on and 24 others."""
    facts = list(product(THINGS, EVENTS, DAYS))
    random.Random(seed).shuffle(facts)
    rows = [
        Example(
            f"Plain: The {thing} {event} {day}.\nPirate:",
            f" Ahoy! {day[0].upper()}{day[1:]} the {thing} {event}, me hearties!",
        )
        for thing, event, day in facts
    ]
    return rows[:32], rows[32:56]


def function_calls(seed: int) -> Sets:
    """32 requests with their calls, and 24 in other phrasings."""
    return calls.generate(seed, 32, "train"), calls.generate(seed + 1, 24, "test")


def sentiment(folder: Path, seed: int) -> Sets:
    """32 sentences of at most 12 words of SST-2 in `folder`, and 40 of its other file."""
    train, valid = (
        {
            sentence: label
            for sentence, label in sst2.read_tsv(folder / name).items()
            if len(sentence.split()) <= 12
        }
        for name in ("train.tsv", "dev.tsv")
    )
    others = {sentence: label for sentence, label in train.items() if sentence not in valid}
    return sst2.draw(others, 32, seed), sst2.draw(valid, 40, seed)


def write_sets(out: Path, sst2_folder: Path, seed: int = 0) -> dict[str, Path]:
    """Write train.jsonl and valid.jsonl of each set below `out`; returns their folders."""
    makers: dict[str, Callable[[], Sets]] = {
        "support": lambda: support(seed),
        "style": lambda: style(seed),
        "calls": lambda: function_calls(seed),
        "sentiment": lambda: sentiment(sst2_folder, seed),
    }
    folders = {}
    for name, make in makers.items():
        folders[name] = out / name
        folders[name].mkdir(parents=True, exist_ok=True)
        for split, rows in zip(("train", "valid"), make(), strict=True):
            write_jsonl(folders[name] / f"{split}.jsonl", rows)
    return folders
