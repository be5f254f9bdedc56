"""Private names of `nn.Module.compile`, see `maxmoe/_torch.py`.

`torch.compiler.set_stance("force_eager")` does the same for all threads of the process, so that other threads would
train without compiled code.
"""

from typing import Any

from torch import nn

from maxmoe.this_thread import OfThisThread

# Whether this thread calls modules without the code that their method `compile` has compiled.
runs_uncompiled: OfThisThread[bool] = OfThisThread()


def call_uncompiled(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Call a module and its hooks, without the code that its method `compile` has compiled."""
    return module._call_impl(*arguments, **options)  # type: ignore[no-untyped-call]
