"""The command of a run, from the command of a sweep: W&B's macros, expanded as its agent does.

macro                                  stands for
${args_no_hyphens}                     key=value for each parameter, as the recipes take them
${args}, ${args_no_boolean_flags}      --key=value; of true and false alone --key, or nothing
${args_no_equals}                      --key value, as two words
${args_json}, ${args_json_file}        all parameters as JSON, or the path of a file with it
${args_append_hydra}, ${args_override_hydra}   +key=value, ++key=value
${env}, ${interpreter}, ${program}     /usr/bin/env, python, and `program` of the file
${envvar:NAME}                         a variable of the environment, also inside a word; without one its name
"""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from torchtune_ext.run.errors import nearest

DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")  # the command of a file that names none
_ENVVAR = re.compile(r"\$\{envvar\:([A-Z0-9_]*)\}")
_MACRO = re.compile(r"\$\{(.*)\}")


def expanded(command: Sequence[Any], values: dict[str, Any], program: str, json_file: str) -> list[str]:
    """Returns the words of the command for one run.

    Args:
        command: of the sweep's file.
        values: of the parameters, nested ones as one mapping (`space.nested`).
        json_file: path of the file that has them as JSON; the caller writes it where the command names it.

    Raises:
        ValueError: there is no such macro.
    """
    flags = {name: f"{name}={value}" for name, value in values.items()}
    macros = {
        "args": [f"--{flag}" for flag in flags.values()],
        "args_no_hyphens": list(flags.values()),
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_boolean_flags": [
            f"--{name if values[name] is True else flag}" for name, flag in flags.items() if values[name] is not False
        ],
        "args_json": [json.dumps(values)],
        "args_json_file": [json_file],
        "args_append_hydra": [f"+{flag}" for flag in flags.values()],
        "args_override_hydra": [f"++{flag}" for flag in flags.values()],
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [program],
    }
    words = []
    for chunk in command:
        word = _ENVVAR.sub(lambda found: os.environ.get(found[1], found[1]), str(chunk))
        macro = _MACRO.fullmatch(word)
        if macro is None:
            words.append(word)
        elif macro[1] in macros:
            words += macros[macro[1]]
        else:
            near = nearest(macro[1], macros)
            hint = f"did you mean ${{{near}}}?" if near else f"there are {', '.join(f'${{{name}}}' for name in macros)}"
            raise ValueError(f"command: {word} is no macro of W&B; {hint}")
    return words
