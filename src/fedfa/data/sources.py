"""What users bring: arrays, tables, files, folders, torch and Hugging Face data sets, read into arrays."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedfa.data.formats.arrays import read_npz
from fedfa.data.formats.pictures import read_class_folders
from fedfa.data.formats.untrusted_files import reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array, to_numpy
from fedfa.data.samples import Columns
from fedfa.error_messages import nearest
from fedfa.errors import DataError, describe

INPUTS = Array | dict[str, Array] | tuple[Array, ...]
LABELS = ("label", "labels", "target", "class", "y")
"""Names under which labels are found by themselves."""
READ_TWICE = 8
"""Samples of a ``Dataset`` that are read twice, to find random transforms."""


@dataclass
class Source:
    """Samples as they were read: labels may be numbers or names, owners and domains any hashable values."""

    inputs: INPUTS
    labels: Array
    names: tuple[str, ...] | None = None
    """Names of the classes, where the labels are numbers and the source names them."""
    clients: Array | None = None
    domains: Array | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Parts:
    """What one source holds."""

    train: Source
    test: Source | None = None
    validation: Source | None = None


def read(source: Any, columns: Columns) -> Parts:
    """Read whatever a user gives.

    Raises:
        DataError: It cannot be read, or does not fit together.
    """
    if isinstance(source, str | PathLike):
        return _from_path(Path(source).expanduser(), columns)
    if isinstance(source, Mapping):  # a Hugging Face DatasetDict, too
        return _from_mapping(source, columns)
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return Parts(_from_hub(source, columns))
    if hasattr(source, "columns") and hasattr(source, "iloc"):
        frame = {str(name): source[name].to_numpy() for name in source.columns}
        return Parts(from_table(frame, columns, "the DataFrame"))
    if isinstance(source, tuple | list) and len(source) == 2:
        _refuse_columns(columns, "a pair of arrays")
        return Parts(_checked(Source(_as_arrays(source[0]), _array(source[1], "labels")), ""))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return Parts(_from_torch(source, columns))
    raise DataError(
        f"cannot make a data set of {type(source).__name__}: give a path, (inputs, labels), a DataFrame, or a torch or "
        "Hugging Face data set"
    )


def _from_path(path: Path, columns: Columns) -> Parts:
    if path.is_dir():
        _refuse_columns(columns, "a folder of class folders")
        return Parts(*(None if raw is None else Source(*raw) for raw in read_class_folders(path)))  # type: ignore[arg-type]  # the first is not None
    if path.suffix == ".npz":
        _refuse_columns(columns, "an .npz file")
        return _from_npz(path)
    if path.suffix in (".csv", ".parquet"):
        return Parts(from_table(read_table(path), columns, str(path)))
    raise DataError(f"{path}: give an .npz file or a folder of class folders, or a table as .csv or .parquet")


def _from_mapping(source: Mapping[Any, Any], columns: Columns) -> Parts:
    unknown = [str(key) for key in source if key not in ("train", "test", "validation", "val")]
    if "train" not in source or unknown:
        found = ", ".join(map(str, source)) or "nothing"
        raise DataError(f"a dictionary of data sets has 'train' and, optionally, 'test' and 'validation'; not {found}")
    made = {name: read(part, columns).train for name, part in source.items()}
    return Parts(made["train"], made.get("test"), made.get("validation", made.get("val")))


def _from_npz(path: Path) -> Parts:
    """Arrays ``x, y`` or ``x_train, y_train, x_test, y_test``; optionally ``clients*``, ``domains*``, ``classes``."""
    loaded = read_npz(path)
    parts = ("_train", "_test") if "x_train" in loaded else ("",)
    missing = [f"{letter}{part}" for part in parts for letter in "xy" if f"{letter}{part}" not in loaded]
    if missing:
        raise DataError(
            f"{path}: lacks the array {', '.join(missing)}; give x and y, or x_train, y_train, x_test and y_test"
        )
    names = tuple(str(name) for name in loaded["classes"]) if "classes" in loaded else None
    made = []
    for part in parts:
        owners = loaded.get(f"clients{part}", loaded.get(f"writers{part}"))
        one = Source(loaded[f"x{part}"], loaded[f"y{part}"], names, owners, loaded.get(f"domains{part}"))
        made.append(_checked(one, f"{path}, x{part}: "))
    return Parts(*made)


def read_table(path: Path) -> dict[str, Array]:
    """The columns of a ``.csv`` or ``.parquet`` file."""
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path}: give a .csv or .parquet file")
    return _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)


def _read_csv(path: Path) -> dict[str, Array]:
    with reading(path), path.open(newline="", encoding="utf-8-sig") as file:
        try:
            header, *rows = list(csv.reader(file))
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path}: no table with a line of column names ({error})") from None
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{path}, line {number}: {len(row)} values, but there are {len(header)} columns")
    if len(set(header)) != len(header):
        raise DataError(f"{path}: two columns have one name; its first line names the columns")
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    return {name: _parsed(list(values)) for name, values in zip(header, columns, strict=True)}


def _parsed(cells: list[str]) -> Array:
    """Whole numbers, numbers (an empty cell is NaN), or text."""
    try:
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(cell or "nan") for cell in cells])
    except ValueError:
        return np.array(cells, dtype=object)


def _read_parquet(path: Path) -> dict[str, Array]:
    parquet = import_optional("pyarrow.parquet", f"reading {path.name}", "tables")
    with reading(path):
        try:
            table = parquet.read_table(path)
        except FileNotFoundError:
            raise
        except Exception as error:  # pyarrow has many kinds of errors for damaged files
            raise DataError(f"{path}: damaged or not a Parquet file ({error})") from error
        return {name: table.column(name).to_numpy() for name in table.column_names}


def from_table(table: Mapping[str, Any], columns: Columns, where: str) -> Source:
    """Samples of a table: its columns by name.

    Columns of numbers become one ``float32`` array ``[N, columns]``. A single column of arrays (pictures, tokens) is
    the input itself; several columns of which one holds arrays become a dictionary.
    """
    label = _label_column(table, columns, where)
    for name in columns.given().values():
        for one in [name] if isinstance(name, str) else name:
            if one not in table:
                raise DataError(f"{where} has no column {one!r}{nearest(one, table)}; it has {', '.join(table)}")
    others = [name for name in table if name not in (label, columns.clients, columns.domains)]
    chosen = list(others if columns.inputs is None else columns.inputs)
    if label in chosen:
        raise DataError(f"{where}: the column {label!r} is the label, so it cannot be an input")
    if not chosen:
        raise DataError(f"{where} has no columns besides {label!r}; inputs are the other columns")
    arrays = {name: _input_column(table[name], name, where) for name in chosen}
    inputs: INPUTS
    if all(values.ndim == 1 for values in arrays.values()):
        inputs = np.stack([values.astype(np.float64) for values in arrays.values()], axis=1)
    else:
        inputs = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    return _checked(
        Source(
            inputs,
            _array(table[label], f"{where}, column {label!r}"),
            clients=None if columns.clients is None else objects(table[columns.clients]),
            domains=None if columns.domains is None else objects(table[columns.domains]),
        ),
        f"{where}: ",
    )


def _label_column(table: Mapping[str, Any], columns: Columns, where: str) -> str:
    if columns.label is not None:
        return columns.label
    found = [name for name in LABELS if name in table]
    if len(found) == 1:
        return found[0]
    which = f"several columns may hold the labels ({', '.join(found)})" if found else "no column is named label"
    raise DataError(
        f"{where}: {which}; name it with label=… in Python or data.label on the command line; the columns are "
        f"{', '.join(map(str, table))}"
    )


def _input_column(values: Any, name: str, where: str) -> Array:
    array = _array(values, f"{where}, column {name!r}")
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{where}: the column {name!r} holds {_kind(array)}, not numbers; encode it as numbers, or name the input "
            "columns without it (inputs=[…] in Python, data.inputs on the command line)"
        )
    return array


def _from_hub(source: Any, columns: Columns) -> Source:
    """A Hugging Face data set."""
    where, features = "the Hugging Face data set", source.features
    names = list(source.column_names)
    if len(source) == 0:
        raise DataError(f"{where} is empty")
    labels = [name for name in names if type(features[name]).__name__ == "ClassLabel"]
    if columns.label is None and len(labels) == 1:
        columns = replace(columns, label=labels[0])
    wanted = {columns.label, columns.clients, columns.domains, *(columns.inputs or names)}
    table = {name: list(source[name]) if name in wanted else None for name in names}
    made = from_table(table, columns, where)
    label = features[_label_column(table, columns, where)]
    return replace(made, names=tuple(map(str, label.names))) if type(label).__name__ == "ClassLabel" else made


def _from_torch(source: Any, columns: Columns) -> Source:
    items = [_item(source, position) for position in range(_length(source))]
    if not items:
        raise DataError("the torch Dataset is empty")
    _refuse_random_items(source, items)
    names = getattr(source, "classes", None)
    if isinstance(items[0], Mapping):
        keys = {tuple(item) if isinstance(item, Mapping) else () for item in items}
        if len(keys) > 1:
            raise DataError("the items of the torch Dataset have different keys")
        table = {str(key): [item[key] for item in items] for key in items[0]}
        made = from_table(table, columns, "the torch Dataset")
    else:
        _refuse_columns(columns, "a torch Dataset of pairs; they are for items that are dictionaries")
        for position, item in enumerate(items):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise DataError(
                    f"sample {position} of the torch Dataset is {type(item).__name__}; expected (input, label), or a "
                    "dictionary with a label"
                )
        made = Source(_stack_inputs([item[0] for item in items]), _array([item[1] for item in items], "labels"))
    if names is not None and made.labels.dtype.kind in "iu":
        try:
            made = replace(made, names=tuple(map(str, names)))
        except TypeError:
            raise DataError(f"the torch Dataset's `classes` is {names!r}; expected the names of the classes") from None
    return _checked(made, "")


def _length(source: Any) -> int:
    try:
        return len(source)
    except Exception as error:  # the user's own code
        raise DataError(f"the torch Dataset has no length: {describe(error)}") from error


def _item(source: Any, position: int) -> Any:
    try:
        return source[position]
    except Exception as error:  # the user's own code
        raise DataError(f"sample {position} of the Dataset cannot be read: {describe(error)}") from error


def _refuse_random_items(source: Any, items: Sequence[Any]) -> None:
    """A random transform would be drawn once and stay as it is in all epochs, and it would change test samples."""
    step = max(1, len(items) // READ_TWICE)
    for position in range(0, len(items), step):
        if not _same(items[position], _item(source, position)):
            raise DataError(
                f"sample {position} of the torch Dataset differs when it is read twice: it has a random transform, "
                "which would be drawn once and for all. Leave it out, and use data.augment or "
                "federation.augmented(…), which draws anew for every batch"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(key in other and _same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    first, second = np.asarray(to_numpy(one)), np.asarray(to_numpy(other))
    return bool(first.shape == second.shape and first.tobytes() == second.tobytes()) or first.dtype == object


def _stack_inputs(inputs: Sequence[Any]) -> INPUTS:
    first = inputs[0]
    if isinstance(first, Mapping):
        if any(not isinstance(one, Mapping) or one.keys() != first.keys() for one in inputs):
            raise DataError("the inputs are dictionaries with different keys")
        return {str(key): _array([one[key] for one in inputs], f"input {key!r}") for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(one, tuple) or len(one) != len(first) for one in inputs):
            raise DataError("the inputs are tuples of different lengths")
        return tuple(_array(list(each), f"input {place}") for place, each in enumerate(zip(*inputs, strict=True)))
    return _array(inputs, "inputs")


def _as_arrays(inputs: Any) -> INPUTS:
    if isinstance(inputs, Mapping):
        return {str(name): _array(values, f"input {name!r}") for name, values in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_array(values, f"input {place}") for place, values in enumerate(inputs))
    if hasattr(inputs, "iloc"):
        return to_numpy(inputs.to_numpy())
    return _array(inputs, "inputs")


def _array(values: Any, what: str) -> Array:
    """An array of numbers or of names; lists of arrays and pictures are stacked."""
    if hasattr(values, "iloc") and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        if isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype == object):
            values = list(values)
            if all(isinstance(value, str) for value in values):
                return np.array(values, dtype=str) if values else np.zeros(0)
            if any(_is_missing(value) for value in values):
                place = next(place for place, value in enumerate(values) if _is_missing(value))
                raise DataError(f"{what}: the value of sample {place} is missing; fill it or leave the sample out")
            values = [to_numpy(value) for value in values]
            shapes = {value.shape for value in values}
            if len(shapes) > 1:
                some = " and ".join(str(list(shape)) for shape in sorted(shapes, key=str)[:2])
                raise DataError(f"{what} have different shapes, e.g. {some}; give them one size (pad or crop)")
            types = {value.dtype for value in values}
            if len(types) > 1 and any(kind.kind not in "fiub" for kind in types):
                raise DataError(f"{what} are of different types: {', '.join(sorted(map(str, types)))}")
            return np.stack(values) if values else np.zeros(0)
        return to_numpy(values)
    except DataError:
        raise
    except Exception as error:  # NumPy and torch raise many kinds of errors for what they cannot convert
        raise DataError(f"{what} cannot be read as an array: {type(error).__name__}: {error}") from None


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def objects(values: Any) -> Array:
    """Any hashable values, one per sample, as an array of integers or of objects."""
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    listed = to_numpy(values).tolist() if hasattr(values, "dtype") and getattr(values, "ndim", 1) == 1 else values
    if not isinstance(listed, Iterable) or isinstance(listed, str | Mapping):
        raise DataError(f"clients, domains and writers are one value per sample, not {type(values).__name__}")
    listed = list(listed)
    array = np.empty(len(listed), dtype=object)
    for place, value in enumerate(listed):
        array[place] = value
    if listed and all(isinstance(value, int) and not isinstance(value, bool) for value in listed):
        return array.astype(np.int64)
    return array


def _refuse_columns(columns: Columns, source: str) -> None:
    if given := columns.given():
        name, value = next(iter(given.items()))
        raise DataError(f"{name} = {value!r} names a column, but the source is {source}")


def _checked(source: Source, where: str) -> Source:
    """Refuse arrays of different lengths."""
    inputs = source.inputs
    if source.labels.ndim == 0:
        raise DataError(f"{where}labels must be one number or name per sample, not a single value")
    if isinstance(inputs, np.ndarray):
        inputs = (inputs,)
    for one in inputs.values() if isinstance(inputs, dict) else inputs:
        if one.ndim == 0:
            raise DataError(f"{where}inputs must be an array with one entry per sample, not a single value")
        for name, values in (("labels", source.labels), ("clients", source.clients), ("domains", source.domains)):
            if values is not None and values.ndim and len(values) != len(one):
                raise DataError(f"{where}there are {len(one):,} inputs, but {len(values):,} {name}")
    return source


def _kind(array: Array) -> str:
    return {"U": "text", "O": "text or mixed values", "M": "dates", "m": "durations", "c": "complex numbers"}.get(
        array.dtype.kind, str(array.dtype)
    )
