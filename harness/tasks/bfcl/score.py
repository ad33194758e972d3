"""`ondevice eval --task bfcl`: a model's function calls, judged by the leaderboard's own checker.

Each question of the data is continued greedily by one line, which is read as calls. Calls of the
categories with right answers are judged by the checker; where no call is wanted, an answer without
a call is right, and where any is, one with a call, as on the leaderboard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.tasks.bfcl import package
from harness.tasks.bfcl.calls import read
from harness.tasks.bfcl.package import LIVE, NON_LIVE, REFUSALS, RELEVANCE, Question
from harness.tasks.bfcl.prompt import ENDING
from harness.tasks.bfcl.rows import read_rows
from runtime.core.errors import DataError, UsageError
from runtime.core.files import write_atomic
from runtime.core.units import format_bytes

if TYPE_CHECKING:
    from runtime.bundle.manifest import Manifest
    from runtime.config.evaluate import EvalConfig
    from runtime.data.prompts import Prompt
    from runtime.data.text_encoder import TextEncoder
    from runtime.methods.adapters import Adapters
    from runtime.run.generate import Generator

RIGHT, WRONG, MALFORMED, UNJUDGED = "right", "wrong", "malformed", "unjudged"


@dataclass(frozen=True)
class Verdict:
    """A model's answer to a question, and its verdict: RIGHT, WRONG, MALFORMED or UNJUDGED.

    MALFORMED answers are no calls, and UNJUDGED ones made the checker itself fail. Both count as
    wrong, but for a malformed answer where no call is wanted. `why` names the fault.
    """

    id: str
    category: str
    answer: str
    verdict: str
    why: str = ""
    cut: bool = False


def judge(question: Question, answer: str) -> tuple[str, str]:
    """The verdict of an answer, and why."""
    try:
        calls = read(answer)
    except ValueError as problem:
        known = RIGHT if question.category in REFUSALS else MALFORMED
        return known, str(problem)
    if question.category in REFUSALS:
        return (WRONG, "no call is wanted") if calls else (RIGHT, "")
    if question.category in RELEVANCE:
        return (RIGHT, "") if calls else (WRONG, "a call is wanted")
    try:
        errors = package.check(question, calls)
    except Exception as problem:  # it takes calls of odd types, on which its code may fail
        return UNJUDGED, f"the checker failed: {problem!r}"
    return (WRONG, "; ".join(errors)) if errors else (RIGHT, "")


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts and accuracy by category, and of `live` and `non_live` as the leaderboard joins them.

    Live categories are weighted by their questions, non-live ones equally.
    """
    categories: dict[str, dict[str, Any]] = {}
    for name in package.CATEGORIES:
        of_category = [verdict for verdict in verdicts if verdict.category == name]
        if of_category:
            categories[name] = _counts(of_category)
    live = [verdict for verdict in verdicts if verdict.category in LIVE]
    non_live = [counts["accuracy"] for name, counts in categories.items() if name in NON_LIVE]
    return {
        **_counts(verdicts),
        "live": _counts(live) if live else None,
        "non_live": {"accuracy": sum(non_live) / len(non_live)} if non_live else None,
        "categories": categories,
    }


def _counts(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    kinds = [verdict.verdict for verdict in verdicts]
    return {
        "questions": len(kinds),
        "right": kinds.count(RIGHT),
        "accuracy": kinds.count(RIGHT) / len(kinds),
        "malformed": kinds.count(MALFORMED),
        "unjudged": kinds.count(UNJUDGED),
        "cut": sum(verdict.cut for verdict in verdicts),
    }


def run(
    config: EvalConfig, progress: Callable[[int, int], None], note: Callable[[str], None]
) -> dict[str, Any]:
    """Ask every question of the data and judge the answers; `config.answers` keeps them.

    Raises:
        BudgetError: the budget is too small, or was passed.
        DataError: the package is missing, the data holds no questions of it, or one is too long.
        UsageError: there is no folder for the answers.
    """
    from runtime.data.source import split_file
    from runtime.data.text_encoder import load_encoder
    from runtime.machine.footprint import Meter
    from runtime.run.budget import check_budget
    from runtime.run.generate import Generator, planned
    from runtime.run.session import open_checked

    file = split_file(config.data, "valid")
    if file is None:
        raise DataError(f"{config.data} has no valid file with questions")
    answers = None if config.answers is None else answers_file(Path(config.answers), file)
    asked = _asked(file, config.eval_rows)
    package.load()  # before the plan, which counts all that the process has loaded
    with Meter(budget_bytes=config.budget_bytes) as meter:
        bundle = open_checked(config.bundle, config.device, note)
        encoder = load_encoder(bundle.path)
        prompts = [_prompt(encoder, question, text) for question, text in asked]
        context = _context(config, bundle.manifest, asked, prompts)
        generator = Generator(bundle, encoder, context, config.budget_bytes)
        adapter = None if config.adapter is None else Path(config.adapter)
        adapters, plan = planned(generator, adapter, note)
        start, verdicts = time.perf_counter(), []
        for (question, _), prompt in zip(asked, prompts, strict=True):
            verdicts.append(_answered(generator, adapters, question, prompt, config.max_tokens))
            progress(len(verdicts), len(asked))
            check_budget(meter, plan, f"answering ended at question {len(verdicts)}")
        seconds = time.perf_counter() - start
    if answers is not None:
        lines = (json.dumps(asdict(verdict), ensure_ascii=False) + "\n" for verdict in verdicts)
        write_atomic(answers, "".join(lines).encode())
    return {
        "task": config.task,
        "bfcl_eval": package.version(),
        **summarize(verdicts),
        "max_tokens": config.max_tokens,
        "seconds": seconds,
        "budget_bytes": config.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "peak_footprint_bytes": meter.peak_bytes,
    }


def answers_file(answers: Path, questions: Path) -> Path:
    """The file for answers, which must not be a folder, nor the file of the questions.

    Raises:
        UsageError: it is, or its folder is not there.
    """
    if not answers.parent.is_dir():
        raise UsageError(f"--answers {answers}: there is no folder {answers.parent}; make it first")
    if answers.is_dir():
        raise UsageError(f"--answers {answers} is a folder; give a file, such as answers.jsonl")
    if answers.exists() and answers.samefile(questions):
        raise UsageError(f"--answers {answers} is the file of the questions; give another file")
    return answers


def _asked(file: Path, most: int) -> list[tuple[Question, str]]:
    """The first `most` questions of a file (0: all), with their prompts."""
    rows = read_rows(file)
    rows = rows[:most] if most else rows
    known: dict[str, Question] = {}
    for category in package.CATEGORIES:
        if any(row.id.startswith(f"{category}_") for row in rows):
            known |= {question.name: question for question in package.questions(category)}
    unknown = [row.id for row in rows if row.id not in known]
    if unknown:
        raise DataError(
            f"{file}: {len(unknown)} of {len(rows)} questions, such as {unknown[0]!r:.80}, are not "
            f"in bfcl-eval {package.version()}; supported categories are "
            f"{', '.join(package.CATEGORIES)}"
        )
    return [(known[row.id], row.prompt) for row in rows]


def _prompt(encoder: TextEncoder, question: Question, text: str) -> Prompt:
    from runtime.data.prompts import text_prompt

    return replace(text_prompt(encoder, text), ending=ENDING)


def _context(
    config: EvalConfig,
    manifest: Manifest,
    asked: Sequence[tuple[Question, str]],
    prompts: Sequence[Prompt],
) -> int:
    """The tokens of a prompt and its answer together, for which memory is planned.

    Raises:
        DataError: a prompt leaves no room for an answer, or has tokens that the model does not
            embed.
    """
    from runtime.run.generate import longest_sequence

    sizes = [len(prompt.tokens) for prompt in prompts]
    most = longest_sequence(manifest) or max(sizes) + config.max_tokens
    context = config.max_seq_length or min(most, max(sizes) + config.max_tokens)
    for (question, _), prompt in zip(asked, prompts, strict=True):
        if len(prompt.tokens) >= context:
            raise DataError(
                f"the prompt of {question.name} has {len(prompt.tokens)} tokens, and prompt and "
                f"answer may have {context} together; leave it out by prepare --max-seq-length, "
                "or ask with a longer --max-seq-length"
            )
        if max(prompt.tokens) >= manifest.vocab_size:
            raise DataError(
                f"the prompt of {question.name} has token {max(prompt.tokens)}, which the model "
                "does not embed: the bundle's tokenizer is another model's"
            )
    return context


def _answered(
    generator: Generator[TextEncoder],
    adapters: Adapters,
    question: Question,
    prompt: Prompt,
    max_tokens: int,
) -> Verdict:
    """The verdict of the model's line after a prompt."""
    from runtime.run.generate import Answer

    told = Answer(len(prompt.tokens))
    text = "".join(generator.pieces(prompt, adapters, max_tokens, answer=told))
    verdict, why = judge(question, text)
    return Verdict(question.name, question.category, text, verdict, why, told.stopped != "end")


def describe(report: dict[str, Any]) -> str:
    """The report as text: a line for each category, and the leaderboard's live score."""
    lines = [f"{'category':<24}{'right':>12}{'':>10}{'malformed':>12}{'cut':>6}"]
    rows = dict(report["categories"])
    if report["live"] is not None:
        rows["live, all"] = report["live"]
    for name, counts in rows.items():
        of = f"{counts['right']} of {counts['questions']}"
        lines.append(
            f"{name:<24}{of:>12}{counts['accuracy']:>10.2%}{counts['malformed']:>12}{counts['cut']:>6}"
        )
    if report["unjudged"]:
        lines.append(f"the checker failed on {report['unjudged']} answers, which count as wrong")
    lines.append(
        f"greedy, at most {report['max_tokens']} tokens, {report['seconds']:.0f} s; judged by "
        f"bfcl-eval {report['bfcl_eval']}"
    )
    lines.append(
        f"peak footprint {format_bytes(report['peak_footprint_bytes'])}, budget "
        f"{format_bytes(report['budget_bytes'])}"
    )
    return "\n".join(lines)
