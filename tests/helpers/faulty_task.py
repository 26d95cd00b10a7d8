"""A task whose grader hangs when a test asks for it. Tests copy this file beside `letters.py`, into a folder where runs start."""

import os
import time

from letters import Letters


class Hanging(Letters):
    """As long as there is a file `hang_7`, the next text of problem 7 holds its grader, and the file is called `hung_7`."""

    def grade(self, problem, text):
        try:
            os.rename(f"hang_{problem.answer}", f"hung_{problem.answer}")
            time.sleep(3600.0)
        except FileNotFoundError:
            pass  # nobody asked for it, or another text of the problem came first
        return super().grade(problem, text)
