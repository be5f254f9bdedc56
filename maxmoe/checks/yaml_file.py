"""YAML files that users write."""

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


def load_yaml(path: Path, convert: Callable[[Any], T]) -> T:
    """Return what a function makes of the contents of a file.

    Every error message begins with the path, and with the number of the line if PyYAML gives it.
    """
    try:
        return convert(yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader))
    except OSError:
        raise
    except yaml.MarkedYAMLError as error:
        where, problem = f":{error.problem_mark.line + 1}", f"not YAML: {error.problem}"
    except Exception as error:  # PyYAML raises errors of many types for values that do not fit their tags
        where, problem = "", str(error)
    raise ValueError(f"{path}{where}: {next(iter(problem.splitlines()), '')[:300]}")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, except that a repeated key is an error; PyYAML would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                problem = f"the key {reprlib.repr(key)} is written twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return mapping
