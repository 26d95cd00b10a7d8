"""Finds the program in a model's answer."""

import re

from torchtune_ext.tasks.answers import spoken

C_NAMES = ("", "c", "c99", "c11", "c17", "cpp", "c++")  # what stands behind the fence of a C program
# Nothing is given back once it is taken (`*+`): a long line would be tried in all ways to divide it.
_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^`\s]*+)(?:\s[^`]*+)?")


def extract(text: str) -> str | None:
    """Returns the C source in an answer: the content of its last closed block that is fenced as C, or as nothing.

    What a model thinks aloud is no part of its answer. A fence with a language always begins a block, so
    a block that was never closed (the model changed its mind) swallows nothing.

    Returns:
        The lines between the fences, or None if there is no such block, or none that says anything.
    """
    found, fence, language, lines = None, "", "", []
    for line in (line.removesuffix("\r") for line in spoken(text).split("\n")):
        match = _FENCE.fullmatch(line)
        if match is None:
            lines.append(line)
        elif not fence or match[2]:
            fence, language, lines = match[1], match[2].lower(), []
        elif match[1].startswith(fence):
            if language in C_NAMES and any(each.strip() for each in lines):
                found = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return found
