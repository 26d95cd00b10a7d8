"""Reads the examples of a data set from a file (JSONL, CSV or parquet) or from the Hugging Face hub."""

import csv
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError, UsageFileError

Example = Mapping[str, Any]
_FIELD_NAME = re.compile(r"\{([A-Za-z_][\w.]*)\}")  # a field in braces; the empty braces of \boxed{} do not match

READABLE_SUFFIXES = ".parquet, .csv, .tsv or .jsonl"


def read_examples(path: str, fields: set[str] | None, optional: Collection[str] = ()) -> Iterator[tuple[str, Example]]:
    """Yields the place and the content of every example of a file.

    Of a .parquet file, only `fields` are read (None: all), and `optional` fields if there are any. A .csv or .tsv file
    has names in its first line, and its values are texts. Any other file is JSONL, one object a line. Raises
    ValueError if the file or a line cannot be read.
    """
    if not Path(path).is_file():
        raise UsageFileError(f"path={path!r}: {_missing_file_message(path)}")
    if (suffix := Path(path).suffix.lower()) == ".parquet":
        yield from _parquet_examples(path, fields, optional)
        return
    if suffix in (".gz", ".zip", ".zst"):
        raise UsageError(f"path={path!r}: a compressed file; unpack it")
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the 128 KiB of the default
    # "utf-8-sig" drops the mark that Excel puts at the start of a file. The csv module needs newline="" to find line
    # ends within quotes.
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            if suffix in (".csv", ".tsv"):
                reader = csv.DictReader(file, strict=True, delimiter="\t" if suffix == ".tsv" else ",")
                # Spreadsheets write empty columns, whose names are empty, too.
                _require_unique([name for name in reader.fieldnames or () if name], f"{path}: ")
                for number, row in enumerate(reader, start=1):
                    # DictReader puts surplus values under the key None, and None where a value is missing.
                    if None in row or None in row.values():
                        raise UsageError(
                            f"{path}, row {number}: not as many values as names in the first line; quote texts that hold commas"
                        )
                    yield f"{path}, row {number}", row
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse_example(f"{path}:{number}", line)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"path={path!r}: not text in UTF-8 ({error.reason}); save it as UTF-8 with the ending {READABLE_SUFFIXES}"
            ) from error
        except csv.Error as error:
            raise UsageError(
                f"path={path!r}: no CSV ({error}); write commas between values, and quote texts"
            ) from error


def _require_unique(names: list[str], where: str = "") -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}the field {twice[0]!r} is there twice; rename or remove one")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of two equal names.
    if len(example := dict(pairs)) < len(pairs):
        _require_unique([name for name, _ in pairs])
    return example


_JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique_fields)


def _missing_file_message(path: str) -> str:
    if Path(path).is_dir():
        return "a folder; name a file in it"
    if "://" in path:
        return "no file; download it first"
    if "$" in path:
        return "no such file; a variable of the environment is written ${oc.env:NAME}"
    text = f"no such file, seen from {Path.cwd()}"
    return f"{text}; a data set of the hub is named by hub: {path}" if re.fullmatch(r"[\w.-]+/[\w-]+", path) else text


def _parse_example(where: str, line: str) -> Example:
    try:
        example = _JSON_DECODER.decode(line)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    # A number of thousands of digits is a plain ValueError, and thousands of open brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        cause = getattr(error, "msg", error)
        raise UsageError(
            f"{where}: no JSON ({cause}); write one object a line, or name a file with the ending {READABLE_SUFFIXES}"
        ) from error
    if not isinstance(example, dict):
        raise UsageError(f"{where}: a {type(example).__name__}, not an object; write one object a line")
    return example


def _columns(names: list[str], fields: set[str] | None, optional: Collection[str]) -> list[str] | None:
    """Returns the columns to read. If a field is missing, it is None: all, so that the error can list them."""
    if fields is None or not fields <= set(names):
        return None
    return [name for name in names if name in {*fields, *optional}]


def _parquet_examples(path: str, fields: set[str] | None, optional: Collection[str]) -> Iterator[tuple[str, Example]]:
    # Imported late, because a grading process does not need it.
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        _require_unique(file.schema_arrow.names, f"{path}: ")
        columns = _columns(file.schema_arrow.names, fields, optional)
        examples = (example for batch in file.iter_batches(columns=columns) for example in batch.to_pylist())
        for number, example in enumerate(examples, start=1):
            yield f"{path}, example {number}", example
    except (ArrowException, OSError) as error:
        cause = str(error).split("\n")[0]
        raise UsageError(f"path={path!r}: not a readable parquet file ({cause}); write it again") from error


def hub_examples(
    hub: str, config: str | None, split: str, fields: set[str] | None, optional: Collection[str] = ()
) -> Iterator[tuple[str, Example]]:
    """Yields the place and the content of every example of a data set of the hub.

    Only `fields` are read (None: all), and `optional` fields if there are any. Raises ValueError if the hub cannot be
    reached, or has no such data set, config or split.
    """
    # Imported late, because it takes seconds and a grading process does not need it.
    from datasets import load_dataset

    what = f"hub={hub!r}" + (f", config={config!r}" if config else "") + f", split={split!r}"
    try:
        examples: Any = load_dataset(hub, config, split=split)
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = "download it where there is a network, and name a JSONL or parquet file with path:"
        raise UsageError(f"{what} cannot be loaded ({cause}). Check the name; or {fix}") from error
    if (columns := _columns(examples.column_names, fields, optional)) is not None:
        examples = examples.select_columns(columns)
    for number, example in enumerate(examples):
        yield f"{hub} {split}, example {number}", example


def field_names(template: str) -> list[str]:
    """Returns the fields that a template uses: all names in {braces}, or without braces the template itself."""
    return _FIELD_NAME.findall(template) if "{" in template else [template]


def fill_template(template: str, example: Example, where: str, key: str = "") -> Any:
    """Returns the value of a field ("answer", "reward_model.ground_truth") or a filled template ("{Body} {Question}").

    Raises what `value_of` raises, and ValueError if a template names no field: it would be the same for all examples.
    """
    if "{" not in template:
        return field_value(template, example, where, key)
    if not field_names(template):
        raise UsageError(
            f"{template!r:.60} names no field; write names in braces, without spaces in them: {{question}}"
        )
    return _FIELD_NAME.sub(lambda name: str(field_value(name[1], example, where)), template)


def field_value(field: str, example: Example, where: str, key: str = "") -> Any:
    """Returns the value of a field; "a.b.0" names a nested one.

    Raises ValueError if there is none, whose message lists all fields, and `knob` as the setting to change.
    """
    # The name of a column may itself contain dots.
    if field in example:
        return example[field]
    value: Any = example
    for part in field.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            # With cutoff 0 this sorts all names.
            near = difflib.get_close_matches(field, example, n=len(example), cutoff=0.0)
            fix = f"; say which of them it is: {key}=NAME" if key else ""
            raise UsageError(f"{where}: no field {field!r}; there are: {', '.join(near)}{fix}")
    return value
