"""A conversation as token ids: turns, a system prompt, and what no longer fits."""

from dllm_jax.tokenizer import Tokenizer


class Conversation:
    """Turns of a user and a model, laid out by the model's chat template."""

    def __init__(self, tokenizer: Tokenizer, room: int, system: str | None = None):
        """Begins a conversation.

        Args:
          tokenizer: of a model with a chat template.
          room: most tokens of a prompt.
          system: what the model is told before everything else; it is never dropped.

        Raises:
          ValueError: if the template takes no system prompt, or it leaves no room.
        """
        self._tokenizer, self._room = tokenizer, room
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[str, str]] = []
        self._asked: str | None = None
        self.asked = 0  # questions so far, since the last reset
        if system is not None and len(self._encode([], "")) > room:
            raise ValueError(
                f"system={system!r} is too long: {room} tokens are left for the prompt."
            )

    @property
    def turns(self) -> list[tuple[str, str]]:
        """What the user and the model said, oldest first."""
        return list(self._turns)

    def ask(self, text: str) -> tuple[list[int], int]:
        """The prompt for an answer to `text`, and how many turns were dropped for it.

        Where the whole conversation does not fit, the oldest turns go.

        Raises:
          ValueError: if `text` alone does not fit; nothing is changed then.
        """
        for dropped in range(len(self._turns) + 1):
            ids = self._encode(self._turns[dropped:], text)
            if len(ids) <= self._room:
                self._turns, self._asked = self._turns[dropped:], text
                self.asked += 1
                return ids, dropped
        raise ValueError(
            f"that makes a prompt of {len(ids)} tokens; there is room for {self._room} "
            "(the model's positions less max_new_tokens)."
        )

    def answered(self, text: str) -> None:
        """Remembers the answer to what was asked last."""
        assert self._asked is not None, "nothing was asked"
        self._turns.append((self._asked, text))
        self._asked = None

    def reset(self) -> None:
        """Forgets all turns."""
        self._turns, self._asked, self.asked = [], None, 0

    def _encode(self, turns: list[tuple[str, str]], text: str) -> list[int]:
        messages = list(self._system)
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
        return self._tokenizer.encode_chat(messages)
