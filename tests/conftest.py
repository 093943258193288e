"""Every test leaves torch as it found it.

torch is looked at only where a test has imported it: most tests never do, and starting it takes seconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORDER = "gradaudit-recorder"

SCALER_METHODS = ("__init__", "scale", "unscale_", "step", "update", "load_state_dict")

CAPTURE = str(Path("gradaudit") / "capture")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the expected outputs anew; read the diff.")


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """After each test no hook, wrapper or thread of gradaudit's is left."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None:
        eval_frame.cached_backends.clear()  # what other tests compiled is no concern of this one
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        left = [repr(value) for value in hooks_and_functions(torch) if is_ours(value)]
        assert left == [], "left in torch"
        module = torch.nn.modules.module
        flags = {*module._global_forward_hooks_with_kwargs, *module._global_forward_hooks_always_called}
        assert flags <= set(module._global_forward_hooks), "flags of hooks that are gone"
    threads = [thread.name for thread in threading.enumerate()]
    assert RECORDER not in threads


@pytest.fixture
def untraced() -> Iterator[None]:
    """Coverage follows every line as debuggers do, and where somebody does, gradaudit looks for no line."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def is_ours(value: Any) -> bool:
    """Whether a function was defined in gradaudit.capture, whatever name it carries."""
    function = getattr(value, "__func__", value)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return CAPTURE in file or file.startswith("<gradaudit")  # wrappers are passed over by warnings


def hooks_and_functions(torch: ModuleType) -> list[Any]:
    """What gradaudit hooks into or replaces while it records."""
    from torch.nn.modules import module
    from torch.optim import lr_scheduler, optimizer

    scaler = torch.amp.grad_scaler.GradScaler
    found: list[Any] = [torch.autograd.backward, torch.optim.Optimizer.zero_grad, module._has_any_global_hook]
    for hooks in (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
        module._global_module_registration_hooks,
        module._global_parameter_registration_hooks,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ):
        found += hooks.values()
    found += [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_]
    found += [torch.nn.utils.clip_grad.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_]
    found += [cls.__dict__["step"] for cls in vars(lr_scheduler).values() if "step" in getattr(cls, "__dict__", {})]
    for cls in (scaler, *scaler.__subclasses__()):
        found += [cls.__dict__.get(name) for name in SCALER_METHODS]
        found.append(cls.__dict__.get("__init_subclass__"))
    found += [getattr(torch.amp.autocast_mode.autocast, name) for name in ("__init__", "__enter__", "__exit__")]
    return found
