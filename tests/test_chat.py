"""`python -m dllm_jax.chat`: turns, commands, what no longer fits, Ctrl-C, a terminal."""

import io
import os
import re
import sys

import jax
import pytest
from terminal import Terminal

import dllm_jax
from dllm_jax import chat
from dllm_jax.conversation import Conversation

FIRST = "Tom has 8 apples. He buys 5 more. How many apples does Tom have now?"
SECOND = "Ana has 9 pens. She finds 4. How many pens does Ana have now?"


@pytest.fixture(scope="module")
def model():
    return dllm_jax.load("demo")


@pytest.fixture
def talk(model, monkeypatch, capsys):
    """Runs a session on lines of a pipe: (exit code, stdout, stderr)."""

    class Pipe(io.TextIOWrapper):
        def isatty(self):
            return False

    def run(lines, *argv):
        raw = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
        monkeypatch.setattr(sys, "stdin", Pipe(io.BytesIO(raw)))
        monkeypatch.setattr(chat, "load_models", lambda *args: (model, None))
        code = chat.main(["--compile-cache", "none", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    jax.config.update("jax_compilation_cache_dir", None)


def answer(model, *messages, **settings):
    """What the model says at the end of a conversation."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    ids = model.tokenizer.encode_chat(turns)
    return dllm_jax.generate(model, ids, **settings)[0].text


def test_a_turn_sees_those_before_it(talk, model):
    code, out, err = talk([FIRST, "", SECOND], "--max-new-tokens", "64")
    first = answer(model, FIRST, max_new_tokens=64)
    second = answer(model, FIRST, first, SECOND, max_new_tokens=64)
    assert code == 0
    assert out == f"{first}\n{second}\n"
    assert len(re.findall(r"tokens? in \d+ forwards", err)) == 2


def test_reset_forgets_and_quit_ends(talk, model):
    code, out, err = talk([FIRST, "/reset", SECOND, "/quit", FIRST])
    assert code == 0
    assert out == f"{answer(model, FIRST)}\n{answer(model, SECOND)}\n"
    assert "forgotten" in err


def test_help_and_a_text_that_begins_with_a_slash(talk):
    code, out, err = talk(["/help", "//a"], "--max-new-tokens", "8")
    assert (code, out.count("\n")) == (0, 1)
    for command in ("/reset", "/help", "/quit"):
        assert command in err


def test_a_system_prompt_comes_first_and_stays(talk, model):
    ids = model.tokenizer.encode_chat(
        [{"role": "system", "content": "5 pens."}, {"role": "user", "content": FIRST}]
    )
    expected = dllm_jax.generate(model, ids)[0].text
    code, out, _ = talk([FIRST, "/reset", FIRST], "--system", "5 pens.")
    assert (code, out) == (0, f"{expected}\n{expected}\n")


def test_old_turns_are_dropped_and_it_says_so(talk, model):
    """200 of 256 positions are for the answer: two turns never fit."""
    code, out, err = talk([FIRST, SECOND], "--max-new-tokens", "200")
    assert code == 0
    alone = answer(model, SECOND, max_new_tokens=200)
    assert out.splitlines()[1] == alone
    assert "1 old turn was dropped" in err


@pytest.mark.parametrize(
    ("lines", "argv", "words"),
    [
        (["/forget"], [], ["/forget", "/reset"]),
        (["word " * 300], [], ["tokens", "room for 128"]),
        ([], ["--max-new-tokens", "256"], ["max_new_tokens=256", "256 positions"]),
        ([], ["--system", "word " * 300], ["system=", "128"]),
        ([], ["--threshold", "nan"], ["threshold=nan"]),
        ([], ["--distributed"], ["--distributed does not apply"]),
        ([], ["--model", "nowhere"], ["model='nowhere'"]),
        ([], ["--draft-model", "demo"], ["draft_model"]),
        (b"abc\n\xe9t\xe9\n", ["--max-new-tokens", "8"], ["byte 0 of line 2"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(talk, lines, argv, words):
    code, _, err = talk(lines, *argv)
    last = err.splitlines()[-1]
    assert code == 2
    assert last.startswith("chat: ")
    for word in words:
        assert word in last


def test_a_model_without_a_chat_template(talk, model, monkeypatch):
    monkeypatch.setattr(type(model.tokenizer), "has_chat_template", False)
    code, _, err = talk([FIRST])
    assert code == 2
    assert "has no chat template" in err.splitlines()[-1]


def test_a_template_that_refuses_is_a_mistake(model, monkeypatch):
    template = "{{ raise_exception('no system prompts') }}"
    monkeypatch.setattr(model.tokenizer._hf, "chat_template", template)
    with pytest.raises(ValueError, match="does not take this conversation: no system"):
        Conversation(model.tokenizer, 100, "be brief")


@pytest.mark.parametrize("pieces", [1, 0])
def test_ctrl_c_ends_the_answer_and_keeps_the_session(talk, model, monkeypatch, pieces):
    """What was said stays in the conversation; the terminal gets its line end."""
    whole, calls = chat.stream_plan, []

    def interrupted(*args):
        calls.append(args[2])
        for count, piece in enumerate(whole(*args)):
            if len(calls) == 1 and count == pieces:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(chat, "stream_plan", interrupted)
    code, out, err = talk([FIRST, SECOND])
    assert code == 0
    assert "interrupted" in err
    said = out.split("\n")[0]
    assert answer(model, FIRST).startswith(said)
    assert bool(said) == bool(pieces)
    turns = [FIRST, said, SECOND] if pieces else [SECOND]
    assert out.split("\n")[1] == answer(model, *turns)


def test_ctrl_c_right_after_an_answer_keeps_the_session(talk, model, monkeypatch):
    whole, calls = chat._summary, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(chat, "_summary", interrupted)
    code, out, _ = talk([FIRST, SECOND])
    assert code == 0 and len(calls) == 2
    said = answer(model, FIRST)
    assert out.split("\n")[:2] == [said, answer(model, FIRST, said, SECOND)]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals")
def test_a_terminal_is_left_as_it_was():
    """Typing, Ctrl-C at the prompt and in an answer, and Ctrl-D."""
    argv = ("dllm_jax.chat", "--decoder", "ar", "--compile-cache", "none")
    with Terminal(*argv) as terminal:
        # A prompt is shown when its line can be typed; before, the terminal is another.
        terminal.wait_for(r"/help lists")
        terminal.wait_for(r"> ")
        terminal.ctrl_c_until(r"Ctrl-D ends the session")
        terminal.wait_for(r"> ")
        terminal.type(FIRST + "\r")
        terminal.wait_for(r"Buying")
        terminal.ctrl_c()
        terminal.wait_for(r"interrupted|tokens in")  # it may have been quicker
        terminal.wait_for(r"> ")
        terminal.type("/reset\r")
        terminal.wait_for(r"is forgotten")
        terminal.wait_for(r"> ")
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
        assert terminal.is_clean
