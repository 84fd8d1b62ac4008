"""Reads the user's tables: comma-separated values, whose first line names the columns."""

import csv
import io
from collections.abc import Sequence

from cope_jax.corpora.corpus_files import read_prose
from cope_jax.errors import ConfigError


def read(
    path: str, required: Sequence[str], optional: Sequence[str] = ()
) -> list[tuple[str, dict[str, str]]]:
    """Reads columns of a UTF-8 `.csv` or `.csv.gz` file. Quoted values may have commas.

    Returns:
      For each row, its place for messages, and its values by column, without the spaces around
      them.

    Raises:
      ConfigError: the file is missing or no such table, a column is missing, or a required value is
        empty.
    """
    text = read_prose(path)
    # A value may be as long as the file.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows, line = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    try:
        names = [name.strip() for name in next(rows, [])]
        if any(names.count(name) != 1 for name in required):
            given = "it is empty: write a header"
            if any(names):
                given = f"it has {', '.join(names)}: rename the columns"
            raise ConfigError(
                f"{path}, line 1 must name the columns {' and '.join(required)} once each, but {given}"
            )
        table = []
        for values in rows:
            where, line = f"{path}, line {line + 1}", rows.line_num
            if not any(values):
                continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{where} has {len(values)} values for {len(names)} columns: quote texts with commas"
                )
            row = {name: value.strip() for name, value in zip(names, values, strict=True)}
            if empty := [name for name in required if not row[name]]:
                raise ConfigError(f"{where} has an empty {empty[0]}: fill it in, or remove the row")
            wanted = {name: row[name] for name in (*required, *optional) if name in row}
            table.append((where, wanted))
    except csv.Error as error:
        raise ConfigError(
            f"{path}, line {rows.line_num} is no row of a CSV file ({error}): repair it"
        ) from error
    if not table:
        raise ConfigError(f"{path} has a header but no row: add rows")
    return table
