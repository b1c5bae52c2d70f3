"""From the request of another API for chats to a chat of OpenAI's, and its errors back to the names of that API.

A dialect is a folder with a request (`request.py`), what becomes of it (`to_chat.py`), and the form of its responses
(`format.py`). Everything between is the chat's own: nothing is served, parsed or constrained in a second way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router.api.schemas import ChatRequest
from router.errors import ApiError


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat.

    Attributes:
        chat: The chat.
        names: The client's names of the chat's fields that have other ones, for errors.
    """

    chat: ChatRequest
    names: Mapping[str, str]


class Messages:
    """Collects the messages of a chat, and the client's names of them.

    Attributes:
        messages: The messages, in OpenAI's form.
        names: The client's names, by those of the chat.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}

    def add(self, path: str, role: str, content: Any) -> None:
        """Adds a message.

        Args:
            path: The client's name of it.
        """
        self._add(path, {"role": role, "content": content})

    def add_result(self, path: str, call_id: str, id_name: str, content: Any) -> None:
        """Adds the result of a tool call.

        Args:
            id_name: The client's name of the field with the call's id.
        """
        self.names[f"messages[{len(self.messages)}].tool_call_id"] = f"{path}.{id_name}"
        self._add(path, {"role": "tool", "tool_call_id": call_id, "content": content})

    def add_reasoning(self, path: str, text: str) -> None:
        """Adds reasoning to the assistant's message, if it has no answer yet, else to a new one."""
        if not text:
            return
        message = self._turn(path, before=("content", "tool_calls"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_answer(self, path: str, content: Any) -> None:
        """Adds the answer to the assistant's message, if it has none yet, else to a new one."""
        self._turn(path, before=("content", "tool_calls"))["content"] = content

    def add_call(self, path: str, call_id: str, name: str, arguments: str, arguments_name: str) -> None:
        """Adds a call to the assistant's message.

        Args:
            arguments_name: The client's name of the field with the arguments.
        """
        calls = self._turn(path, before=()).setdefault("tool_calls", [])
        chat_path = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {chat_path: path, f"{chat_path}.function.arguments": f"{path}.{arguments_name}"}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _turn(self, path: str, before: tuple[str, ...]) -> dict[str, Any]:
        """Returns the assistant's message at the end, if it has none of the fields that come later; else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in before):
            last = {"role": "assistant"}
            self._add(path, last)
        return last

    def _add(self, path: str, message: dict[str, Any]) -> None:
        self.names[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)


def chat_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Returns the content of a message with these texts: several are parts of their own."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Returns a tool of a chat."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Gives the fields in errors the client's names.

    Args:
        names: The client's names of the chat's fields, and of what is inside of them, if that has no name of its own.
    """
    try:
        yield
    except ApiError as error:
        raise error.about(_client_name(error.param, names)) from None


def _client_name(param: str | None, names: Mapping[str, str]) -> str | None:
    if param is None:
        return None
    end = len(param)
    while end > 0:
        if (name := names.get(param[:end])) is not None:
            return name + param[end:]
        end = max(param.rfind(".", 0, end), param.rfind("[", 0, end))
    return param
