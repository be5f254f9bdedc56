from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    torch: str
    compiler: str
    eigen: str
    openmp: int
    isa: str
    supported_isas: list[str]
    cuda_kernels: str
    second_level_cache_bytes: int

def build_info() -> BuildInfo: ...
def force_path(name: str) -> str: ...
def empty_cache() -> None: ...
def memory_allocated() -> int: ...
def memory_reserved() -> int: ...
