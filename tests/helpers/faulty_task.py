"""A task whose grader hangs when a test asks for it. Tests copy this file next to `letters.py`, into a folder where runs start."""

import os
import time

from letters import Letters


class Hanging(Letters):
    """If a file `hang_7` exists, the next text of problem 7 hangs its grader, and the file is renamed to `hung_7`."""

    def grade(self, problem, text):
        try:
            os.rename(f"hang_{problem.answer}", f"hung_{problem.answer}")
            time.sleep(3600.0)
        except FileNotFoundError:
            pass  # not requested, or another text of the problem came first
        return super().grade(problem, text)
