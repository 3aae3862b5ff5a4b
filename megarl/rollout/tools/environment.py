"""The environment ``tools``: the policy calls tools until it responds without a call; rewards then score that
last response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvConfig
from megarl.rollout.environment import EnvironmentReturn, StopReason, Turn
from megarl.rollout.message_env import LOST, MessageEnv, MessageEnvironment, Step
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.tools.tool import Tool, Toolbox, tools_of

if TYPE_CHECKING:
    from megarl.data.messages import ChatMessage


class ToolEnv(MessageEnv):
    """A conversation that continues as long as the policy calls tools.

    Args:
        section: configuration section of the environment.
        tools: tools that the policy may call.
    """

    def __init__(self, section: EnvConfig, tools: Sequence[Tool]) -> None:
        super().__init__(section)
        self.tools = [tool.schema for tool in tools]
        self._toolbox, self._calls = Toolbox(tools), 0

    def step(self, message: ChatMessage) -> Step:
        """Run the tool calls of a response. A response without calls ends the conversation."""
        calls = message.get("tool_calls") or ()
        if not calls:
            return Step(done=True)
        most = self.section["max_tool_calls"]
        if most is not None and self._calls + len(calls) > most:
            return Step(done=True, reason=StopReason.TOOLS)
        self._calls += len(calls)
        counts: Counter[str] = Counter({"tool_calls": len(calls)})
        answers: list[ChatMessage] = []
        for call in calls:
            name = call["function"]["name"]
            text, kind = self._answer(name, call["function"]["arguments"])
            answers.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": text})
            if kind is not None:
                counts[kind] += 1
                if self.section["on_bad_call" if kind == "bad_tool_calls" else "on_tool_error"] == "end":
                    return Step(done=True, reason=StopReason.ERROR, metrics=counts)
        return Step(answers, metrics=counts)

    def _answer(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """Run one tool call. Return the text for the policy, and the metric that counts the failure (None on
        success)."""
        fault = self._toolbox.fault_of(name, arguments)
        if fault is not None:
            return f"Error: {fault}", "bad_tool_calls"
        try:
            return self._toolbox.call(name, arguments), None
        # The service is at fault, not the call: let the caller leave the conversation out of training.
        except LOST:
            raise
        except Exception as error:
            return f"Error: {error}", "tool_errors"

    def close(self) -> None:
        """Close the tools that this conversation has used."""
        self._toolbox.close()


class ToolEnvironment(MessageEnvironment):
    """The environment ``tools``: tool conversations whose last response is scored by the section's rewards.

    Args:
        section: configuration section of the environment.
        key: dotted key of the section, for error messages.

    Raises:
        ConfigError: a tool or a reward cannot be built.
    """

    def __init__(self, section: EnvConfig, key: str) -> None:
        tools = tools_of(section, key)
        self._single = SingleTurn(section)
        super().__init__(
            lambda inner: ToolEnv(inner, tools), section, self._judged, self._single.fault_of_reference
        )
        self.tools = [tool.schema for tool in tools]

    @property
    def final_answer(self) -> Any:
        """Function that extracts the final answer from a response, see ``SingleTurn.final_answer``."""
        return self._single.final_answer

    def judges_groups(self, step_rows: int) -> None:
        """Set the number of responses per step, see ``SingleTurn.judges_groups``."""
        self._single.judges_groups(step_rows)

    def close(self) -> None:
        """Stop the worker processes of the rewards."""
        self._single.close()

    def _judged(self, turn: Turn) -> EnvironmentReturn:
        return self._single.step(turn)
