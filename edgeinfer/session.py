"""A chat: the messages so far, in the model's own template, and the part of them that the KV cache already holds."""

from __future__ import annotations

import reprlib
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import ContextLengthError
from edgeinfer.planning import is_count
from edgeinfer.reply import Cached, Reply
from edgeinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from edgeinfer.formats.chat import ChatTemplate
    from edgeinfer.model import Model


class Session:
    """Made by Model.session(). One reply at a time; several sessions of a model may run in several threads.

    Attributes: messages (list of {"role", "content"}), system, context.
    """

    def __init__(self, model: Model, template: ChatTemplate, context: int | None, system: str | None) -> None:
        if context is not None and not is_count(context, model.context):
            raise ValueError(f"a context of {context} tokens; the model was loaded with one of {model.context}")
        if not (system is None or isinstance(system, str)):
            raise ValueError(f"system is {reprlib.repr(system)}; expected a text or None")
        self._model, self._template = model, template
        self.context = context or model.context
        self.system = system
        self._cached: Cached | None = Cached(model.cache.open(), [])
        self._busy = threading.Lock()
        self._reply: weakref.ref[Reply] | None = None
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def send(self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = (), **sampling: Any) -> Reply:
        """A Reply to the message, generated as it is iterated; then both are part of the conversation.

        So they are when the reply is cancelled; after an error, or when reset() or `messages` were used meanwhile, the
        conversation is not touched. sampling: fields of SamplingParams. Raises ContextLengthError when it does not fit,
        TemplateError when the template refuses it, RuntimeError while another reply runs; it is unchanged then.
        """
        if not isinstance(text, str):
            raise ValueError(f"a message is {reprlib.repr(text)}; expected a text")
        if self._cached is None:
            raise ValueError("the session is closed")
        messages = [*self.messages, {"role": "user", "content": text}]
        before = self.messages
        ids = self._template.encode(messages)
        if len(ids) >= self.context:
            raise ContextLengthError(len(ids), self.context)
        params = SamplingParams(**sampling)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another reply of this session is still running; finish or cancel it first")

        def finished(reply: Reply) -> None:
            if reply.started and reply.finish_reason != "error" and self.messages is before:
                self.messages = [*messages, {"role": "assistant", "content": reply.text}]
            self._busy.release()

        try:
            reply = Reply(self._model, ids, self._cached, max_tokens, stop, params, finished, self.context)
            self._reply = weakref.ref(reply)
            return reply
        except BaseException:
            self._busy.release()
            raise

    def render(self, text: str) -> str:
        """What sending this message would show the model, as text."""
        return self._template.render([*self.messages, {"role": "user", "content": text}])

    def reset(self) -> None:
        """Begin anew, with the same system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def close(self) -> None:
        """Cancel the reply that runs, and give the session's pages back. Closing the model does so too."""
        cached, self._cached = self._cached, None
        if cached is None:
            return
        if reply := self._reply and self._reply():
            reply.cancel()
        with self._busy:
            self._model.cache.close(cached.sequence)

    def __del__(self) -> None:
        """A forgotten session gives its pages back too. Nobody runs its reply any more: that would hold the session."""
        cached, self._cached = getattr(self, "_cached", None), None
        if cached is not None:
            self._model.cache.close(cached.sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
