"""A table as one test: every row is tried, and one message names all rows that fail."""

import functools
import inspect
import reprlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_row(names: str, table: Iterable[Any], ids: Callable | Iterable[str] | None = None) -> Callable:
    """Decorates a test as `pytest.mark.parametrize` does, and makes one case of it.

    Each row has a `tmp_path` and a `monkeypatch` of its own, and finds nothing printed or logged; every other fixture is shared by
    the rows. A row does not skip: `pytest.skip` skips the table.

    Args:
        names: of the arguments that a row gives, with commas between them.
        ids: what to call each row, or a function that names one value; by default its values.
    """
    columns = [name.strip() for name in names.split(",")]
    table = [tuple(row) if len(columns) > 1 else (row,) for row in table]
    if callable(ids):
        ids = ["-".join(map(str, map(ids, row))) for row in table]
    ids = [reprlib.repr(row) for row in table] if ids is None else list(ids)
    assert table, "a table without rows shows nothing"

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in columns]

        @functools.wraps(test)
        def all_rows(**given) -> None:
            failures = []
            for number, (name, row) in enumerate(zip(ids, table, strict=True)):
                with pytest.MonkeyPatch.context() as monkeypatch:
                    try:
                        test(**_fresh(given, number, monkeypatch), **dict(zip(columns, row, strict=True)))
                    except (Exception, pytest.fail.Exception) as error:
                        lines = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
                        failures.append(f"row {number}, {name}:\n{''.join(lines)}")
                        # The time of the whole table is over, and nothing would end another row.
                        if "pytest-timeout" in str(error):
                            break
            if failures:
                pytest.fail(f"{len(failures)} of {len(table)} rows:\n" + "\n".join(failures), pytrace=False)

        all_rows.__signature__ = signature.replace(parameters=fixtures)
        return all_rows

    return decorate


def _fresh(given: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the fixtures of one row."""
    own = dict(given)
    if "monkeypatch" in own:
        own["monkeypatch"] = monkeypatch
    if "tmp_path" in own:
        own["tmp_path"] = given["tmp_path"] / f"row{number}"
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    if "caplog" in own:
        own["caplog"].clear()
    return own
