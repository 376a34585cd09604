"""From token events to text that is safe to send.

Token ids become bytes by table, bytes become characters as soon as they are whole, and characters are held back
only while they may be the beginning of a stop string. All of it costs the same for each token, however long the
text is and however many stop strings there are.

Rules, also of what the public API shows:
- Of all stop strings the one that is complete first ends the choice; of several that are complete at the same
  character, the longest. So the outcome does not depend on where tokens begin and end.
- Text is held back only as far as it is the beginning of a stop string, never more than len(longest stop) - 1
  characters, and given back when the choice ends for another reason.
- A stop string that is complete before min_tokens tokens were made does not count. The prompt is never searched.
- The token that completes a stop string is the last one that is reported, so usage counts the tokens really made.
- With finish_reason "stop" from the engine, the last token is the stop token (end of sequence or one of
  stop_token_ids); its text is never part of the text, whatever skip_special_tokens says.
- The text continues the prompt: its first space stays, and prompt + text is the text of all ids together.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import OutputDelta, SamplingParams, TextLogprob, TokenEvent, TokenLogprob
from engine.errors import RequestError
from engine.token_bytes import ByteStream
from engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one sequence, token by token; pieces and flush() joined are the text of all ids.

    A piece never ends inside a character. Bytes that are not UTF-8 become U+FFFD, one for each maximal bad run as
    in Unicode's recommended practice, and the text after them is whole.
    """

    __slots__ = ("_stream", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        """
        Args:
            prompt_ids: what the text continues. A character that they begin is completed by the first pieces.
        """
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stream = ByteStream(tokenizer.token_bytes, tokenizer.skipped(skip_special_tokens))
        index = 0
        while index < len(prompt_ids) and self._stream.at_start:
            self.push(prompt_ids[index])
            index += 1
        # Only an unfinished character at the very end matters: at most 3 bytes.
        tail: list[bytes] = []
        while index < len(prompt_ids) and sum(map(len, tail)) < 3:
            tail.append(self._stream.next(prompt_ids[-1 - len(tail)]))
            index += 1
        self._utf8.decode(b"".join(reversed(tail)))

    def push(self, token_id: int) -> str:
        """The characters that token_id makes complete; "" inside a character and for skipped or unknown ids."""
        return self.push_bytes(token_id)[0]

    def push_bytes(self, token_id: int) -> tuple[str, bytes]:
        """The piece of push and the bytes that token_id adds, which may be part of a character."""
        data = self._stream.next(token_id)
        return self._utf8.decode(data), data

    def flush(self) -> str:
        """U+FFFD if the text ends inside a character, else ""."""
        return self._utf8.decode(b"", final=True)


def prompt_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text of each token of a prompt, special tokens included; joined they are tokenizer.decode(token_ids)."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


class StopTable:
    """The automaton that finds stop strings (Aho and Corasick, 1975). It never changes, so choices share one.

    A state is the longest end of the text that begins a stop string; its depth is the number of characters that
    must be held back. A character costs one step on average.
    """

    __slots__ = ("_depth", "_fail", "_found", "_next")

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Args:
            stops: non-empty strings.
        """
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]  # longest stop that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            if self._found[state] is None:
                self._found[state] = self._found[fail]
            for character, following in self._next[state].items():
                self._fail[following] = self.step(fail, character)
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def found(self, state: int) -> str | None:
        """The longest stop string that is complete in this state."""
        return self._found[state]

    def depth(self, state: int) -> int:
        """How many characters at the end of the text begin a stop string."""
        return self._depth[state]


class StopMatcher:
    """Finds stop strings in one text that comes in pieces."""

    def __init__(self, table: StopTable, include_stop: bool = False) -> None:
        """
        Args:
            table: of the stop strings.
            include_stop: leave the stop string that was found at the end of the text.
        """
        self.matched: str | None = None
        self._table = table
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Takes the next characters and gives those that can be sent.

        Sets matched when a stop string is complete; the rest of the piece is dropped then.

        Args:
            may_stop: False ignores stop strings that are complete within this piece.
        """
        for index, character in enumerate(piece):
            self._state = self._table.step(self._state, character)
            found = self._table.found(self._state)
            if found is not None and may_stop:
                self.matched = found
                text = self._held + piece[: index + 1]
                self._held = ""
                return text if self._include_stop else text[: len(text) - len(found)]
        text = self._held + piece
        sent = len(text) - self._table.depth(self._state)
        self._held = text[sent:]
        return text[:sent]

    def flush(self) -> str:
        """The text still held back; the choice has ended for another reason."""
        text, self._held, self._state = self._held, "", 0
        return text


@dataclass(slots=True)
class _Piece:
    """What one token adds to the text, before any of it is held back or cut off."""

    text: str = ""
    bytes: bytes = b""


class TextStream:
    """Turns the token events of one choice into text deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
        prompt_ids: Sequence[int] = (),
        stops: StopTable | None = None,
    ) -> None:
        """
        Args:
            tokenizer: None for a model without one; text is None then.
            prompt_ids: the prompt, for the spacing at the start of the text and for prompt_logprobs.
            stops: the table of sampling.stop, if other choices share it.

        Raises:
            RequestError: stop strings without a tokenizer.
        """
        if tokenizer is None and sampling.stop:
            raise RequestError("stop needs text, but this model has no tokenizer; use stop_token_ids", "stop")
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._prompt_ids = prompt_ids
        self._num_tokens = 0
        table = StopTable(sampling.stop) if stops is None else stops
        self._matcher = StopMatcher(table, sampling.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens, prompt_ids)

    @property
    def finished(self) -> bool:
        """True after a stop string: the engine must be told to abort the choice, and later events are ignored."""
        return self._matcher.matched is not None

    def push(self, event: TokenEvent) -> OutputDelta:
        """The delta of one event; an empty one if a stop string has ended the choice before."""
        if self.finished:
            return OutputDelta(event.index, None if self._tokenizer is None else "")
        sent: list[str] = []
        pieces: list[_Piece] = []
        for number, token_id in enumerate(event.token_ids, start=1):
            is_stop_token = event.finish_reason == "stop" and number == len(event.token_ids)
            self._num_tokens += 1
            pieces.append(_Piece() if is_stop_token else self._push_token(token_id, sent))
            if self.finished:
                break
        if event.finish_reason is not None and not self.finished:
            self._give_back(pieces, sent)
        return OutputDelta(
            index=event.index,
            text=None if self._tokenizer is None else "".join(sent),
            token_ids=event.token_ids[: len(pieces)],
            logprobs=self._text_logprobs(event.logprobs, pieces),
            finish_reason="stop" if self.finished else event.finish_reason,
            stop_reason=self._matcher.matched if self.finished else event.stop_reason,
            num_cached_tokens=event.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(event.prompt_logprobs),
        )

    def _push_token(self, token_id: int, sent: list[str]) -> _Piece:
        if self._detokenizer is None:
            return _Piece()
        piece = _Piece(*self._detokenizer.push_bytes(token_id))
        sent.append(self._matcher.push(piece.text, self._num_tokens >= self._min_tokens))
        return piece

    def _give_back(self, pieces: list[_Piece], sent: list[str]) -> None:
        """Ends the text; half a character at its end belongs to the last token of the event, if there is one."""
        if self._detokenizer is None:
            return
        tail = self._detokenizer.flush()
        if pieces:
            pieces[-1].text += tail
        sent.append(self._matcher.push(tail, self._num_tokens >= self._min_tokens))
        sent.append(self._matcher.flush())

    def _text_logprobs(
        self, entries: Sequence[TokenLogprob] | None, pieces: Sequence[_Piece]
    ) -> tuple[TextLogprob, ...] | None:
        if entries is None:
            return None
        return tuple(self._with_text(entry, piece) for entry, piece in zip(entries, pieces, strict=False))

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob | None] | None) -> tuple[TextLogprob | None, ...] | None:
        """Pieces of the prompt show its special tokens, as they are part of what the client sent."""
        if entries is None:
            return None
        if self._tokenizer is None:
            pieces = [_Piece() for _ in entries]
        else:
            table = self._tokenizer.token_bytes
            texts = prompt_pieces(self._tokenizer, self._prompt_ids)
            pieces = [_Piece(text, table[token_id]) for text, token_id in zip(texts, self._prompt_ids, strict=True)]
        paired = zip(entries, pieces, strict=True)
        return tuple(None if entry is None else self._with_text(entry, piece) for entry, piece in paired)

    def _with_text(self, entry: TokenLogprob, piece: _Piece) -> TextLogprob:
        top = tuple(self._alternative(token_id, logprob) for token_id, logprob in entry.top)
        return TextLogprob(piece.text, entry.token_id, entry.logprob, piece.bytes, top)

    def _alternative(self, token_id: int, logprob: float) -> TextLogprob:
        if self._tokenizer is None:
            return TextLogprob("", token_id, logprob, b"")
        data = self._tokenizer.token_bytes[token_id]
        return TextLogprob(lone_token_text(data), token_id, logprob, data)


def lone_token_text(data: bytes) -> str:
    """How a token is shown that stands alone: its text, or its bytes as in "bytes:\\xf0\\x9f" if they are no text.

    So two tokens that are different parts of characters stay different as keys of a dictionary.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
