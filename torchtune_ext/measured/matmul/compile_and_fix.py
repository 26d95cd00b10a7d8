"""Compile and fix: a multi-turn task in which the model repairs its program from error messages.

    user       Write a function in C ...
    assistant  ```c ... ```
    user       compile_error: program.c:4:27: error: expected ';' before '}' token ... Write the
    whole program again. assistant  ```c ... ```

Programs are checked as for `Matmul` (measured/check.py), in the process of the environment, and are
not timed. The reward of a correct program does not depend on the number of turns.
"""

from collections.abc import Mapping, Sequence

from torchtune_ext.measured.bench import CHECKERS
from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.matmul.prompts import messages, short_messages
from torchtune_ext.measured.matmul.task import ALL_STAGE, PROMPT_KINDS, make_kernels, problem_id
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.tasks.task import EnvironmentReply, Message, Problem, require_choice

MAX_FEEDBACK_CHARS = 600  # per turn; the first errors usually cause the others


class CompileAndFix:
    """Conversation task: write a correct program, and repair it from error messages.

    Args:
        kernels: kernel name -> size or sizes, as in `Matmul`.
        max_turns: maximum number of programs per episode.
        prompt: "long" describes the problem; "short" is for after the warm-up (programs.py).
        compiler: "gcc", "clang" or a path. None selects the first one on PATH.

    Raises:
        UsageError: an argument is invalid, or the compiler is not found.
    """

    def __init__(
        self,
        kernels: Mapping[str, int | Sequence[int]] | None = None,
        max_turns: int = 4,
        prompt: str = "long",
        compiler: str | None = None,
    ) -> None:
        require_choice("prompt", prompt, PROMPT_KINDS)
        self._kernels = {problem_id(each): each for each in make_kernels({"dgemm": 64} if kernels is None else kernels)}
        self.max_turns, self._prompt = max_turns, prompt
        self._compiler = Compiler.find(compiler)

    def __len__(self) -> int:
        return len(self._kernels)

    def __getitem__(self, index: int) -> Problem:
        name, kernel = list(self._kernels.items())[index]
        return Problem(name, (short_messages if self._prompt == "short" else messages)(kernel, ALL_STAGE), name)

    def environment(self, problem: Problem, seed: int) -> "CompileAndFixEnv":
        return CompileAndFixEnv(self._kernels[problem.answer], self._compiler)

    def solution(self, problem: Problem) -> list[Message]:
        """Returns an episode whose first program, the kernel's naive program, is correct."""
        return [{"role": "assistant", "content": f"```c\n{self._kernels[problem.answer].naive}```"}]


class CompileAndFixEnv:
    """The environment. The reward is 1 for a correct program, else 0."""

    def __init__(self, kernel: Kernel, compiler: Compiler) -> None:
        self._kernel, self._compiler = kernel, compiler

    def step(self, message: Message) -> EnvironmentReply:
        """Checks the program of a turn.

        Raises:
            SandboxError, OSError: the machine failed; the result of the program is unknown.
        """
        key = problem_id(self._kernel)
        try:
            if key not in CHECKERS:
                CHECKERS[key] = Checker(self._kernel, self._compiler)
            verdict = CHECKERS[key].check(message["content"])
        except (SandboxError, OSError):
            # The checker may be broken, so the next turn creates a new one.
            CHECKERS.drop(key)
            raise
        parts = {"accuracy": float(verdict.outcome == "ok"), "compiled": float(verdict.stage == "verify")}
        if verdict.outcome == "ok":
            return EnvironmentReply(reward=1.0, done=True, parts=parts)
        answer = f"{verdict.outcome}: {verdict.note[:MAX_FEEDBACK_CHARS].strip()}\n\nWrite the whole program again."
        return EnvironmentReply([{"role": "user", "content": answer}], parts=parts, note=verdict.note)
