"""A seeded generator of arithmetic word problems with worked solutions.

In the manner of GSM8K: a short story, two to four steps, and `#### answer` at the end.
"""

import dataclasses
import random
import zlib
from collections.abc import Iterator

NAMES = {
    "Tom": "He",
    "Ana": "She",
    "Ben": "He",
    "Eva": "She",
    "Max": "He",
    "Mia": "She",
    "Leo": "He",
    "Zoe": "She",
    "Sam": "He",
    "Ida": "She",
}
ITEMS = (
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "pens",
    "shells",
    "stamps",
    "stones",
    "toys",
)
_TEST_SHARE = 16  # one problem in so many belongs to the test split


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, its worked solution ending in `#### answer`, and the answer."""

    question: str
    solution: str
    answer: int

    @property
    def is_test(self) -> bool:
        """Whether the problem belongs to the test split, which training never sees."""
        return zlib.crc32(self.question.encode()) % _TEST_SHARE == 0


def _collection(rng: random.Random) -> tuple[list[str], list[str], int]:
    """A collection that grows and shrinks."""
    name, other = rng.sample(sorted(NAMES), 2)
    item, pronoun = rng.choice(ITEMS), NAMES[name]
    count = rng.randint(3, 20)
    story, steps = [f"{name} has {count} {item}."], []
    for _ in range(rng.randint(2, 4)):
        kinds = ["buy"] * 2 + ["find"]
        kinds += ["give", "lose"] * (count > 4) + ["double"] * (count < 25)
        kind = rng.choice(kinds)
        if kind in ("give", "lose"):
            change = -rng.randint(2, min(count - 1, 12))
        elif kind == "double":
            change = count
        else:
            change = rng.randint(2, min(12, 99 - count))
        size = abs(change)
        sentence, label = {
            "buy": (f"{pronoun} buys {size} more.", "Buying"),
            "find": (f"{pronoun} finds {size}.", "Finding"),
            "give": (f"{pronoun} gives {size} to {other}.", "Giving"),
            "lose": (f"{pronoun} loses {size}.", "Losing"),
            "double": ("Then the number doubles.", "Doubling"),
        }[kind]
        total = count + change
        sign = "-" if change < 0 else "+"
        story.append(sentence)
        steps.append(f"{label}: {count}{sign}{size}={total}.")
        count = total
        if count > 79:
            break
    story.append(f"How many {item} does {name} have now?")
    return story, steps, count


def _shopping(rng: random.Random) -> tuple[list[str], list[str], int]:
    """Money spent on several things at a price each."""
    name, item = rng.choice(sorted(NAMES)), rng.choice(ITEMS)
    pronoun = NAMES[name]
    number, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = number * price
    money = cost + rng.randint(1, min(18, 99 - cost))
    left = money - cost
    story = [
        f"{name} has {money} dollars.",
        f"{pronoun} buys {number} {item} for {price} dollars each.",
    ]
    steps = [f"Cost: {number}*{price}={cost}.", f"Left: {money}-{cost}={left}."]
    if rng.random() < 0.5:
        gift = rng.randint(2, 12)
        story.append(f"Then {pronoun.lower()} gets {gift} dollars.")
        steps.append(f"Getting: {left}+{gift}={left + gift}.")
        left += gift
    story.append(f"How many dollars does {name} have now?")
    return story, steps, left


def _comparison(rng: random.Random) -> tuple[list[str], list[str], int]:
    """Two people, one described by the other, and their sum."""
    name, other = rng.sample(sorted(NAMES), 2)
    item, count = rng.choice(ITEMS), rng.randint(4, 20)
    kind = rng.choice(("more", "fewer", "twice"))
    if kind == "twice":
        total = 2 * count
        relation, step = f"twice as many {item} as", f"2*{count}={total}"
    else:
        gap = rng.randint(2, min(count - 1, 9))
        total = count + gap if kind == "more" else count - gap
        sign = "+" if kind == "more" else "-"
        relation, step = f"{gap} {kind} {item} than", f"{count}{sign}{gap}={total}"
    story = [f"{name} has {count} {item}.", f"{other} has {relation} {name}."]
    steps = [f"{other}: {step}.", f"Together: {count}+{total}={count + total}."]
    answer = count + total
    if rng.random() < 0.4 and answer > 6:
        gone = rng.randint(2, min(answer - 1, 12))
        story.append(f"They sell {gone}.")
        steps.append(f"Selling: {answer}-{gone}={answer - gone}.")
        answer -= gone
    story.append(f"How many {item} do they have together?")
    return story, steps, answer


def _work(rng: random.Random) -> tuple[list[str], list[str], int]:
    """So many a day for some days, on top of a stock."""
    name, item = rng.choice(sorted(NAMES)), rng.choice(ITEMS)
    pronoun = NAMES[name]
    daily, days, stock = rng.randint(2, 9), rng.randint(2, 7), rng.randint(2, 12)
    made = daily * days
    total = made + stock
    story = [
        f"{name} makes {daily} {item} a day for {days} days.",
        f"{pronoun} had {stock} before.",
    ]
    steps = [f"Making: {daily}*{days}={made}.", f"With before: {stock}+{made}={total}."]
    if rng.random() < 0.6:
        sold = rng.randint(2, min(12, total - 1))
        story.append(f"{pronoun} sells {sold}.")
        steps.append(f"Selling: {total}-{sold}={total - sold}.")
        total -= sold
    story.append(f"How many {item} does {name} have now?")
    return story, steps, total


_TEMPLATES = (_collection, _collection, _shopping, _comparison, _work)


def generate_problems(split: str, seed: int) -> Iterator[Problem]:
    """An endless stream of problems.

    Args:
      split: "train" or "test"; a question belongs to exactly one of them.
      seed: equal seeds give equal streams.

    Raises:
      ValueError: for another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"{split=} must be 'train' or 'test'.")
    rng = random.Random(f"{split}-{seed}")
    while True:
        story, steps, answer = rng.choice(_TEMPLATES)(rng)
        solution = " ".join([*steps, f"#### {answer}"])
        problem = Problem(" ".join(story), solution, answer)
        if problem.is_test == (split == "test"):
            yield problem


def parse_answer(text: str) -> int | None:
    """The number behind the last `####`, or None where there is none."""
    tail = text.rpartition("####")[2].split()
    return int(tail[0]) if "####" in text and tail and tail[0].isdigit() else None
