from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    torch: str
    compiler: str
    eigen: str
    openmp: int
    isa: str
    supported_isas: list[str]

def build_info() -> BuildInfo: ...
def force_aten(enabled: bool) -> None: ...
def aten_forced() -> bool: ...
