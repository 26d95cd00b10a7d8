"""Reads a dataset's examples from a JSONL, CSV, TSV or parquet file, or the Hugging Face hub."""

import csv
import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError, UsageFileError

Example = Mapping[str, Any]
# A field in braces; the empty braces of \boxed{} do not match.
_FIELD_NAME = re.compile(r"\{([A-Za-z_][\w.]*)\}")

READABLE_SUFFIXES = ".parquet, .csv, .tsv or .jsonl"


def read_examples(path: str, fields: set[str] | None, optional: Collection[str] = ()) -> Iterator[tuple[str, Example]]:
    """Yields (location, example) for every example of a file.

    A .csv or .tsv file has names in its first line, and its values are strings. Any other file
    except .parquet is JSONL, one object per line.

    Args:
        fields: fields to read from a .parquet file; None: all.
        optional: fields to read from a .parquet file if they exist.

    Raises:
        UsageFileError: the file is missing.
        UsageError: the file or a line cannot be read.
    """
    if not Path(path).is_file():
        raise UsageFileError(f"path={path!r}: {_missing_file_message(path)}")
    if (suffix := Path(path).suffix.lower()) == ".parquet":
        yield from _parquet_examples(path, fields, optional)
        return
    if suffix in (".gz", ".zip", ".zst"):
        raise UsageError(f"path={path!r}: a compressed file. Fix: decompress it")
    csv.field_size_limit(2**31 - 1)  # a value may be longer than the default of 128 KiB
    # "utf-8-sig" drops the byte order mark of Excel. The csv module needs newline="" for quotes.
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            if suffix in (".csv", ".tsv"):
                reader = csv.DictReader(file, strict=True, delimiter="\t" if suffix == ".tsv" else ",")
                # Spreadsheets also write empty columns, with empty names.
                _require_unique([name for name in reader.fieldnames or () if name], f"{path}: ")
                for number, row in enumerate(reader, start=1):
                    # DictReader puts surplus values under None, and None where one is missing.
                    if None in row or None in row.values():
                        raise UsageError(
                            f"{path}, row {number}: not as many values as names in the first line. Fix: quote values that hold "
                            "commas"
                        )
                    yield f"{path}, row {number}", row
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse_example(f"{path}:{number}", line)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"path={path!r}: not UTF-8 text ({error.reason}). Fix: save it as UTF-8 with the ending {READABLE_SUFFIXES}"
            ) from error
        except csv.Error as error:
            raise UsageError(
                f"path={path!r}: not CSV ({error}). Fix: separate values with commas, and quote strings"
            ) from error


def _require_unique(names: list[str], where: str = "") -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}duplicate field {twice[0]!r}. Fix: rename or remove one")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Without this check, Python silently keeps the last of two equal names.
    if len(example := dict(pairs)) < len(pairs):
        _require_unique([name for name, _ in pairs])
    return example


_JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique_fields)


def _missing_file_message(path: str) -> str:
    if Path(path).is_dir():
        return "a directory. Fix: name a file in it"
    if "://" in path:
        return "not a local file. Fix: download it first"
    if "$" in path:
        return "file not found. Fix: write an environment variable as ${oc.env:NAME}"
    text = f"file not found in {Path.cwd()}"
    return f"{text}. Fix: for a dataset of the hub, set hub: {path}" if re.fullmatch(r"[\w.-]+/[\w-]+", path) else text


def _parse_example(where: str, line: str) -> Example:
    try:
        example = _JSON_DECODER.decode(line)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    # A number of thousands of digits raises a plain ValueError, many brackets a RecursionError.
    except (ValueError, RecursionError) as error:
        cause = getattr(error, "msg", error)
        raise UsageError(
            f"{where}: not JSON ({cause}). Fix: write one object per line, or name a file with the ending {READABLE_SUFFIXES}"
        ) from error
    if not isinstance(example, dict):
        raise UsageError(f"{where}: a {type(example).__name__}, not an object. Fix: write one object per line")
    return example


def _columns(names: list[str], fields: set[str] | None, optional: Collection[str]) -> list[str] | None:
    """Returns the columns to read; None (all) if a field is missing, for the list in the error."""
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
        raise UsageError(f"path={path!r}: not a readable parquet file ({cause}). Fix: write it again") from error


def hub_examples(
    hub: str, config: str | None, split: str, fields: set[str] | None, optional: Collection[str] = ()
) -> Iterator[tuple[str, Example]]:
    """Yields (location, example) for every example of a dataset of the hub.

    Args:
        fields: fields to read; None: all.
        optional: fields to read if they exist.

    Raises:
        UsageError: the hub cannot be reached, or the dataset, config or split is unknown.
    """
    # Imported late, because the import takes seconds and a grading process does not need it.
    from datasets import load_dataset

    what = f"hub={hub!r}" + (f", config={config!r}" if config else "") + f", split={split!r}"
    try:
        examples: Any = load_dataset(hub, config, split=split)
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = "download it on a machine with network access, and set path: to a JSONL or parquet file"
        raise UsageError(f"{what} cannot be loaded ({cause}). Fix: check the name, or {fix}") from error
    if (columns := _columns(examples.column_names, fields, optional)) is not None:
        examples = examples.select_columns(columns)
    for number, example in enumerate(examples):
        yield f"{hub} {split}, example {number}", example


def field_names(template: str) -> list[str]:
    """Returns the fields of a template: the names in {braces}, else the template itself."""
    return _FIELD_NAME.findall(template) if "{" in template else [template]


def fill_template(template: str, example: Example, where: str, key: str = "") -> Any:
    """Returns the value of a field, or a filled template.

    Args:
        template: a field ("answer", "reward_model.ground_truth"), or "{Body} {Question}".
        where: location of the example, for messages.
        key: config key that names the field, for messages.

    Raises:
        UsageError: a field is missing, or a template has no field: its text never changes.
    """
    if "{" not in template:
        return field_value(template, example, where, key)
    if not field_names(template):
        raise UsageError(
            f"{template!r:.60}: a template without a field. Fix: write names in braces, without spaces: {{question}}"
        )
    return _FIELD_NAME.sub(lambda name: str(field_value(name[1], example, where)), template)


def field_value(field: str, example: Example, where: str, key: str = "") -> Any:
    """Returns the value of a field; "a.b.0" names a nested field.

    Raises:
        UsageError: the field is missing. The message lists all fields, and `key` as the key to
            change.
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
            # With cutoff 0, the result holds all names, most similar first.
            near = difflib.get_close_matches(field, example, n=len(example), cutoff=0.0)
            fix = f". Fix: set {key}=NAME in the task" if key else ""
            raise UsageError(f"{where}: missing field {field!r}; fields: {', '.join(near)}{fix}")
    return value
