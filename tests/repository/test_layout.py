"""The shape of the code base: one name per operator in every layer, imports that go one way."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from maxmoe import ops
from repository import tests_of

ROOT = Path(__file__).parents[2]
# The functions of maxmoe.ops that call operators.
OPERATORS = sorted(name for name in ops.__all__ if name.islower() and hasattr(torch.ops.maxmoe, name))
CPP_FILES = sorted(path for pattern in ("*.h", "*.cpp", "*.cu") for path in (ROOT / "cpp").rglob(pattern))

# Names of torch that PyTorch does not document for C++ extensions.
PRIVATE_NAMES_OF_TORCH = (
    *("at::cpu::", "at::detail::", "at::functorch::", "at::native::", "at::autocast::", "at::impl::"),
    *("c10::impl::", "AutoFwGradMode", "DispatchKeySet", "autocast_dispatch_keyset", "functorchTLSAccessor"),
    *("graph_task", "key_set()", "profiledCPUMemoryReporter", "_dispatch.h>", "_assert_async"),
    *("_fw_grad", "_fw_primal", "_grouped_mm", "_make_dual", "_softmax_backward_data", "_unpack_dual"),
)

# The order of imports, as CONTRIBUTING.md shows it: a line imports from itself and the lines above it.
ORDER = (ROOT / "CONTRIBUTING.md").read_text().partition("Imports go one way")[2].partition("Words:")[0]
LEVELS = [re.findall("`(.*?)`", line) for line in ORDER.splitlines() if line.startswith("1. ")]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def source_of(operator: str) -> str:
    """The file that registers an operator: of its name, or in a folder of its name."""
    name = f"cpp/ops/{operator}.cpp"
    return name if (ROOT / name).exists() else f"cpp/ops/{operator}/{operator}.cpp"


# Operators that are a case of another one, and have no kernel of their own.
KERNELS = {"ragged_unsort": "ragged_gather_reduce"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_has_one_name_in_every_layer(operator: str) -> None:
    kernel = KERNELS.get(operator, operator)
    files = (
        source_of(operator),
        f"cpp/tests/test_{kernel}.cpp",
        f"tests/ops/test_{getattr(ops, operator).__module__.rpartition('.')[2]}.py",
    )
    missing = [file for file in files if not (ROOT / file).exists()]
    assert not missing, f"the operator {operator} lacks {missing}"
    (header,) = (ROOT / "cpp/kernels").rglob(f"{kernel}.h")
    assert header.with_name(f"{kernel}.simd.cpp").exists()
    assert re.search(rf"torch\.ops\.maxmoe\.{operator}(\.default)?\(", inspect.getsource(getattr(ops, operator)))
    assert f"MAXMOE_KERNEL({kernel}," in header.read_text()
    assert re.search(rf'"{operator}\(', (ROOT / source_of(operator)).read_text()), "its schema is elsewhere"


def test_every_test_lies_in_a_folder() -> None:
    assert not [*(ROOT / "tests").glob("test_*.py")]


def test_every_source_has_tests_where_a_newcomer_looks() -> None:
    assert [*tests_of.complaints()] == []


def test_public_names_of_packages_are_no_modules() -> None:
    """A module with the name of a function would replace it in the package when it is imported later."""
    for path in (ROOT / "maxmoe").glob("*/__init__.py"):
        package = importlib.import_module(f"maxmoe.{path.parent.name}")
        modules = [name for name in getattr(package, "__all__", ()) if isinstance(getattr(package, name), ModuleType)]
        assert not modules, f"{package.__name__} exports the modules {modules}"


# Operators without a function of their name, and the modules that call them.
CALLED_BY = {
    "dequantize": ("_C.dequantize", "maxmoe/quantization/stack.py"),
    "routed_experts": ("_C.RoutedExperts", "maxmoe/nn/routed_experts.py"),
    "router_entropy": ("_C.router_entropy", "maxmoe/nn/losses.py"),
}


def test_no_operator_is_hidden_from_python() -> None:
    sources = [path for path in (ROOT / "cpp/ops").rglob("*.cpp") if "TORCH_LIBRARY_FRAGMENT" in path.read_text()]
    operators = {path.stem for path in sources}
    assert operators - set(OPERATORS) == set(CALLED_BY)
    for called, module in CALLED_BY.values():
        assert called in (ROOT / module).read_text()


# Parts of tile_gemm that are compiled separately, and the test that compares their products.
TESTED_BY = {
    **dict.fromkeys(("row_major", "transposed"), "tile_gemm"),
    **dict.fromkeys(("quantized", "vnni", "float_product"), "quantized_gemm"),
    **dict.fromkeys(("pack_quantized", "micro_kernel_quantized"), "quantized_gemm"),
    **dict.fromkeys(("amx_product", "emulated_tiles"), "amx"),
    "decode_rows": "dequantize",
}


def stems(pattern: str) -> set[str]:
    """The names of files in cpp/, without their ends and prefixes."""
    return {re.sub("^(test|benchmark)_", "", path.name.split(".")[0]) for path in (ROOT / "cpp").glob(pattern)}


def test_every_kernel_has_a_test_and_a_benchmark() -> None:
    files = stems("kernels/**/*.cpp")
    assert files >= set(TESTED_BY)
    assert {TESTED_BY.get(file, file) for file in files} <= stems("tests/test_*.cpp")
    headers = (ROOT / "cpp/kernels").rglob("*.h")
    kernels = {path.stem for path in headers if re.search(r"^MAXMOE_KERNEL\(", path.read_text(), re.MULTILINE)}
    assert kernels == stems("benchmarks/benchmark_*.cpp")
    in_cuda = stems("cuda/*.cu") - {"library"}  # the table of the others
    assert in_cuda and stems("cuda/tests/test_*.cpp") == in_cuda | {"emulator", "candidates"}


def room(module: str) -> str:
    """The name of a module in the order: the longest one that it begins with."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    found = next((name for name in names if any(name in rooms for rooms in LEVELS)), None)
    assert found, f"{module} has no place in the order of CONTRIBUTING.md"
    return found


def level(name: str) -> int:
    return next(index for index, rooms in enumerate(LEVELS) if name in rooms)


def imported_modules(path: Path) -> Iterator[str]:
    """The modules of maxmoe that a file imports, or imports names from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports in full"
            is_root = node.module == "maxmoe"
            names = [f"maxmoe.{alias.name}" for alias in node.names] if is_root else [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.startswith("maxmoe."))


@pytest.fixture(scope="module")
def imports_of_rooms() -> list[tuple[Path, str, str]]:
    """Each import in the package, except in `maxmoe` itself and in `python -m maxmoe`, which import everything."""
    found = []
    for path in sorted((ROOT / "maxmoe").rglob("*.py")):
        if path.parent.name != "maxmoe" or path.stem not in ("__init__", "__main__"):
            own = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found += [(path, own, room(imported)) for imported in imported_modules(path)]
    return found


def test_imports_go_one_way(imports_of_rooms: list[tuple[Path, str, str]]) -> None:
    wrong = [
        f"{relative(path)} must not import maxmoe.{imported}"
        for path, own, imported in imports_of_rooms
        if level(imported) > level(own)
    ]
    assert not wrong


def test_no_two_rooms_import_each_other(imports_of_rooms: list[tuple[Path, str, str]]) -> None:
    """Packages in one line of the order do not import each other either."""
    imports = {(own, imported) for _, own, imported in imports_of_rooms}
    assert not {(one, other) for one, other in imports if one < other and (other, one) in imports}


def test_the_order_of_imports_names_what_is_there() -> None:
    names = [name for rooms in LEVELS for name in rooms]
    modules = [ROOT / "maxmoe" / name.replace(".", "/") for name in names]
    assert [path for path in modules if not any(path.with_suffix(end).exists() for end in ("", ".py", ".pyi"))] == []
    assert len(names) == len(set(names))


def test_the_reference_rests_on_nothing() -> None:
    reference = (ROOT / "maxmoe/reference").rglob("*.py")
    imported = {module.split(".")[1] for path in reference for module in imported_modules(path)}
    assert imported <= {"config", "checks", "reference"}


def including(paths: Iterable[Path], headers: str) -> list[str]:
    """The C++ files that include a header that the pattern matches."""
    return [relative(path) for path in paths if re.search(f'#include [<"]{headers}', path.read_text())]


def test_kernels_know_nothing_of_torch() -> None:
    folders = (ROOT / "cpp/kernels", ROOT / "cpp/cuda")
    kernels = [path for path in CPP_FILES if any(path.is_relative_to(folder) for folder in folders)]
    assert len(kernels) > 50 and not including(kernels, "(torch|ATen|c10|ops)/")


def test_names_say_what_is_compiled_per_instruction_set() -> None:
    """cpp/cmake/kernels.cmake compiles *.simd.cpp once for each, and *.amx.cpp for AMX and its emulation."""
    for path in CPP_FILES:
        opens = re.search(r"^namespace maxmoe::MAXMOE_ISA_NAMESPACE", path.read_text(), re.MULTILINE) is not None
        is_named = ".simd." in path.name or ".amx." in path.name
        assert opens == is_named, f"{relative(path)}: .simd and .amx are for files that open MAXMOE_ISA_NAMESPACE"
        if path.name != "target.simd.h" and opens:
            assert not re.search(r"(def|defined\(|defined) *MAXMOE_", path.read_text()), f"{relative(path)}: use #if"
    # A format of quantized weights is in one file: what operators read, and its decoders, which kernels alone compile.
    formats = ROOT / "cpp/kernels/quantized/formats"
    others = [path for path in CPP_FILES if not re.search("[.](simd|amx)[.]", path.name) and path.parent != formats]
    assert not including(others, r'[^">]*[.](simd|amx)[.]h')


def test_private_names_of_torch_are_in_one_file() -> None:
    """A new version of torch may remove any of them: cpp/ops/torch_internals.h names their purposes."""
    found = {
        relative(path): names
        for path in CPP_FILES
        if path.stem != "torch_internals"
        and (names := [name for name in PRIVATE_NAMES_OF_TORCH if name in path.read_text()])
    }
    assert not found, "call cpp/ops/torch_internals.h instead"


def test_no_torch_extension_header() -> None:
    """The header quadruples the time to compile a file."""
    assert not including(CPP_FILES, r"torch/(extension|torch)\.h>")
