"""Private names of `nn.Module.compile`.

`torch.compiler.set_stance("force_eager")` does the same for all threads of the process, so that other threads would
train without compiled code.
"""

from typing import Any

from torch import nn

from maxmoe._torch.this_thread import OfThisThread

# Whether this thread calls modules without the code that their method `compile` has compiled.
runs_uncompiled: OfThisThread[bool] = OfThisThread("choice to run uncompiled")


def call_uncompiled(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Call a module without compiled code of its method `compile` and of `compile` of its `Checkpointed` parts."""
    with runs_uncompiled.set(True):
        # A class with a `__call__` of its own reads `runs_uncompiled` in it.
        call = call_with_hooks if type(module).__call__ is nn.Module.__call__ else type(module).__call__
        return call(module, *arguments, **options)


def call_with_hooks(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Call a module and its hooks. `nn.Module.__call__` calls compiled code instead if there is some."""
    return module._call_impl(*arguments, **options)  # type: ignore[no-untyped-call]
