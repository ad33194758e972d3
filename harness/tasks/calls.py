"""The demo's task: a sentence that is said to a phone becomes a function call, as JSON.

Every value of a call is in its sentence, letter for letter, so each sentence has one right answer:
times are HH:MM on a 24-hour clock, numbers are digits, names and notes are copied. Train and test
sentences use disjoint phrasings (valid uses those of train) and draw values independently from the
same pools, so that the test measures the task and not a list of sentences. Examples are drawn from
a seed.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runtime.core.files import write_atomic


@dataclass(frozen=True)
class Example:
    """A prompt, and the completion that must follow (with its leading space)."""

    prompt: str
    completion: str


def write_jsonl(file: Path, examples: Sequence[Example]) -> Path:
    """Write examples as `{"prompt", "completion"}` lines, atomically; returns `file`."""
    write_atomic(file, "".join(f"{json.dumps(asdict(example))}\n" for example in examples).encode())
    return file


SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Action:
    """A call's name, its arguments in order (each with the slot it draws from), its phrasings."""

    name: str
    arguments: dict[str, str]
    train: tuple[str, ...] = ()
    test: tuple[str, ...] = ()


SLOTS: dict[str, tuple[str, ...]] = {
    "name": (
        *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas"),
        *("Klara", "Liam", "Maria", "Noah", "Olivia", "Paul", "Rosa", "Sam", "Tina", "Victor"),
    ),
    "label": (
        *("gym", "work", "school", "medicine", "yoga", "the bus", "breakfast", "the airport"),
        *("swimming", "church", "the market", "running"),
    ),
    "message": (
        *("I am running late", "dinner is ready", "see you tomorrow", "I got home safely"),
        *("the meeting is over", "please bring some bread", "happy birthday", "I miss you"),
        *("the train is delayed", "call me later", "the keys are inside", "we won the game"),
    ),
    "note": (
        *("buy milk and eggs", "water the plants", "pay the electric bill", "fix the bike"),
        *("return the library books", "the door code is 4821", "book a dentist", "feed the cat"),
        *("order new shoes", "print the tickets", "clean the garage", "renew the passport"),
    ),
    "event": (
        *("lunch", "dentist", "team meeting", "piano lesson", "football practice", "job interview"),
        *("haircut", "book club", "doctor visit", "movie night", "parent meeting", "chess club"),
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "music": (
        *("jazz", "rock", "classical", "hip hop", "reggae", "country", "blues", "techno"),
        *("Mozart", "Adele", "Queen", "Coldplay", "Bach", "Shakira"),
    ),
    "place": (
        *("the airport", "the train station", "the library", "the hospital", "the city hall"),
        *("the beach", "the pharmacy", "the post office", "the museum", "the stadium", "the zoo"),
    ),
    "city": (
        *("Paris", "Berlin", "Madrid", "Rome", "Tokyo", "London", "Oslo", "Vienna", "Lisbon"),
        *("Chicago", "Boston", "Sydney", "Cairo", "Toronto", "Dublin", "Prague"),
    ),
    "device": ("wifi", "bluetooth", "flashlight", "hotspot"),
    "state": ("on", "off"),
    "time": tuple(f"{hour:02}:{minute:02}" for hour in range(24) for minute in range(0, 60, 5)),
    "minutes": tuple(str(minutes) for minutes in range(2, 60)),
    "percent": tuple(str(percent) for percent in range(5, 100, 5)),
}
_NUMBERS = {"minutes", "percent"}  # slots whose values are numbers in the call

# each action: its name, its arguments and the slots they draw from, then phrasings to fill
_TABLE = """
set_alarm time=time label=label
  train: Set an alarm for {time} for {label} | Wake me up at {time} for {label}
  train: I need an alarm at {time} for {label} | Put an alarm at {time} for {label}, please
  train: Can you set my alarm to {time} for {label}? | Alarm at {time} for {label}
  train: For {label}, wake me up at {time} | Alarm for {label}: {time}
  train: I have to be up at {time} for {label} | Ring at {time}, it is for {label}
  train: An alarm for {label}, {time} please | For {label} I need to get up at {time}
  test: Please set an alarm at {time} for {label} | Could you wake me at {time} for {label}?
  test: Make an alarm for {label} at {time}
send_message to=name text=message
  train: Send a message to {name} saying {message} | Text {name} that {message}
  train: Tell {name} that {message} | Message {name}: {message} | Write to {name} that {message}
  train: Can you text {name} saying {message}?
  train: Send this to {name}: {message} | I want to tell {name} that {message}
  train: Message to {name}: {message} | Inform {name} that {message}
  train: {message}, send that to {name} | Drop {name} a line saying {message}
  test: Send {name} a message that {message} | Please text {name}: {message}
  test: Let {name} know that {message}
start_timer minutes=minutes
  train: Start a timer for {minutes} minutes | Set a {minutes} minute timer
  train: Count down {minutes} minutes | I need a timer of {minutes} minutes
  train: Timer for {minutes} minutes, please | Can you start a {minutes} minute timer?
  train: {minutes} minutes on the timer, please | Timer: {minutes} minutes
  train: Tell me when {minutes} minutes are over | Set the timer to {minutes} minutes
  train: A timer of {minutes} minutes, please | I want a timer that takes {minutes} minutes
  test: Please set a timer for {minutes} minutes | Give me a {minutes} minute timer
  test: Run a timer for {minutes} minutes
set_brightness percent=percent
  train: Set the brightness to {percent} percent
  train: Change the screen brightness to {percent} percent
  train: Make the screen {percent} percent bright | Brightness at {percent} percent, please
  train: I want the brightness at {percent} percent
  train: Can you put the screen at {percent} percent brightness?
  train: Screen brightness: {percent} percent | Dim the screen to {percent} percent
  train: {percent} percent brightness, please | Could you set the brightness to {percent} percent?
  train: Let the screen have a brightness of {percent} percent
  train: I need {percent} percent brightness on the screen
  test: Please turn the brightness to {percent} percent
  test: Adjust the screen brightness to {percent} percent
  test: Put the brightness at {percent} percent
set_volume percent=percent
  train: Set the volume to {percent} percent | Change the sound volume to {percent} percent
  train: Make the sound {percent} percent loud | Volume at {percent} percent, please
  train: I want the volume at {percent} percent
  train: Can you put the sound at {percent} percent volume?
  train: Sound volume: {percent} percent | Turn the sound to {percent} percent
  train: {percent} percent volume, please | Could you set the volume to {percent} percent?
  train: Let the sound have a volume of {percent} percent
  train: I need {percent} percent volume for the sound
  test: Please turn the volume to {percent} percent
  test: Adjust the sound volume to {percent} percent | Put the volume at {percent} percent
switch device=device state=state
  train: Turn {state} the {device} | Switch the {device} {state}
  train: Please turn the {device} {state} | I want the {device} {state}
  train: {device} {state}, please | Can you switch {state} the {device}?
  train: Let the {device} be {state} | Set the {device} to {state}
  train: {device}: {state} | I need the {device} {state}
  train: Would you switch the {device} {state}? | The {device} should be {state}
  test: Could you turn the {device} {state}? | Switch {state} my {device}
  test: Put the {device} {state}
play_music query=music
  train: Play some {music} | I want to listen to {music} | Put on {music} music
  train: Can you play {music}? | Start playing {music} | Some {music} music, please
  train: Music: {music} | Let me hear {music} | I am in the mood for {music}
  train: Could you put on {music}? | Find some {music} to play | It is time for {music}
  test: Please play {music} for me | I would like to hear some {music} | Play {music} music now
create_event title=event day=day time=time
  train: Add {event} to my calendar on {day} at {time} | Schedule {event} for {day} at {time}
  train: Create an event {event} on {day} at {time}
  train: Put {event} in the calendar for {day} at {time}
  train: Book {event} on {day} at {time}, please | Can you plan {event} on {day} at {time}?
  train: On {day} at {time} I have {event}, put it in my calendar
  train: New event on {day}, {time}: {event} | My calendar needs {event} at {time} on {day}
  train: At {time} on {day} there is {event}, add it to my calendar
  train: {event} is on {day} at {time}, note it in my calendar
  train: Put this into the calendar on {day} at {time}: {event}
  test: Please schedule {event} on {day} at {time} | Add an event on {day} at {time}: {event}
  test: Calendar: {event} on {day} at {time}
navigate destination=place
  train: Navigate to {place} | Take me to {place} | How do I get to {place}?
  train: Show me the way to {place} | Give me directions to {place} | I want to drive to {place}
  train: Route to {place} | Which way is {place}? | Guide me to {place}
  train: Drive me to {place}, please | Find the way to {place} | I have to get to {place}
  test: Please navigate me to {place} | What is the way to {place}?
  test: Directions to {place}, please
call_contact name=name
  train: Call {name} | Phone {name}, please | I want to call {name} | Can you ring {name}?
  train: Give {name} a call | Make a call to {name}
  train: Dial {name} | Get {name} on the phone | Ring {name}, please
  train: I need to talk to {name} on the phone | Call up {name} | Connect me with {name}
  test: Please call {name} now | Could you phone {name}? | Start a call with {name}
take_note text=note
  train: Take a note: {note} | Write down: {note} | Note that I should remember: {note}
  train: Make a note saying {note} | Save a note: {note} | Can you note down: {note}?
  train: Jot down: {note} | Into my notes: {note} | A note for later: {note}
  train: Remember this: {note} | Keep in mind: {note} | Put this into my notes: {note}
  test: Please take a note saying {note} | New note: {note} | Add a note: {note}
get_weather city=city day=day
  train: What is the weather in {city} on {day}? | Show the weather for {city} on {day}
  train: Will it rain in {city} on {day}? | Weather in {city} on {day}, please
  train: How warm is it in {city} on {day}? | Tell me the forecast for {city} on {day}
  train: On {day}, what is the weather in {city}? | Weather for {day} in {city}
  train: Is it sunny in {city} on {day}? | Do I need an umbrella in {city} on {day}?
  train: Tell me the weather on {day} in {city} | {city} on {day}: what is the weather like?
  test: How is the weather in {city} on {day}? | What will the weather be on {day} in {city}?
  test: Give me the forecast for {city} on {day}
"""


def _read_table(table: str) -> tuple[Action, ...]:
    actions: list[Action] = []
    for line in table.strip().splitlines():
        head, _, rest = line.strip().partition(" ")
        phrasings = tuple(rest.split(" | "))
        if head == "train:":
            actions[-1] = replace(actions[-1], train=actions[-1].train + phrasings)
        elif head == "test:":
            actions[-1] = replace(actions[-1], test=actions[-1].test + phrasings)
        else:
            actions.append(Action(head, dict(pair.split("=") for pair in rest.split())))
    return tuple(actions)


ACTIONS = _read_table(_TABLE)


def generate(seed: int, count: int, split: str) -> list[Example]:
    """`count` examples of a split; example i depends on (seed, split, i) alone.

    Each group of `len(ACTIONS)` examples has every action once, in random order. Raises
    ValueError for a split that is not one of SPLITS.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    examples = []
    for i in range(count):
        turn, place = divmod(i, len(ACTIONS))
        actions = _keyed(seed, split, "turn", turn).sample(ACTIONS, len(ACTIONS))
        examples.append(_example(actions[place], split, _keyed(seed, split, "example", i)))
    return examples


def _keyed(*key: str | int) -> random.Random:
    return random.Random("/".join(map(str, key)))  # text is hashed: the same on every machine


def _example(action: Action, split: str, draw: random.Random) -> Example:
    phrasing = draw.choice(action.test if split == "test" else action.train)
    slots = {slot: draw.choice(SLOTS[slot]) for slot in slots_of(phrasing)}
    sentence = phrasing.format(**slots)
    arguments = {
        argument: int(slots[slot]) if slot in _NUMBERS else slots[slot]
        for argument, slot in action.arguments.items()
    }
    call = json.dumps({"name": action.name, "arguments": arguments}, separators=(",", ":"))
    return Example(f"User: {sentence[0].upper()}{sentence[1:]}\nCall:", f" {call}")


def slots_of(phrasing: str) -> list[str]:
    """The names of the slots in a phrasing, in order."""
    return [name for _, name, _, _ in string.Formatter().parse(phrasing) if name is not None]
