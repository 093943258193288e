"""Hooks and wrapped calls of torch itself, put on by `install` and taken off without a trace.

Modules and optimizers are seen through torch's global hooks. The calls that have none are wrapped where they live:
methods on their class, so that it does not matter when a script imported the class, functions in their modules. Nothing
is ever put on a user's object.

Compiled code is left alone: under a trace the hooks are constants that do nothing, so no graph breaks and no number
changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import lr_scheduler
from torch.optim import optimizer as optim_optimizer

from gradaudit.capture.auditor import Auditor

Undo = Callable[[], object]

UNSEEN_FILE = "<gradaudit, importlib._bootstrap>"


def install(auditor: Auditor) -> Undo:
    """Put every hook and wrapper on; the returned function takes them off again, latest first."""
    undos: list[Undo] = []
    try:
        _hook_modules(auditor, undos)
        _hook_optimizers(auditor, undos)
        _wrap_scalers(auditor, undos)
        _wrap_backward(auditor, undos)
        _wrap_clipping(auditor, undos)
        _wrap_other_calls(auditor, undos)
        _wrap_autocast(auditor, undos)
    except BaseException:
        _run_backwards(undos)
        raise
    return functools.partial(_run_backwards, undos)


def _run_backwards(undos: list[Undo]) -> None:
    while undos:
        undos.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any], undos: list[Undo]) -> None:
    """Replace an attribute that `owner` itself defines, keeping its docs and signature."""
    original = vars(owner)[name]
    wrapper = functools.wraps(original)(_unseen(make(original)))
    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner).get(name) is wrapper:  # somebody may have wrapped the wrapper: leave theirs
            setattr(owner, name, original)

    undos.append(undo)


def _unseen(function: Any) -> Any:
    """The function, passed over when `warnings` looks for the line that called: a warning still points at the user's.

    It passes over the import system's own frames, which it tells by their file name.
    """
    function.__code__ = function.__code__.replace(co_filename=UNSEEN_FILE)
    return function


def _hook_modules(auditor: Auditor, undos: list[Undo]) -> None:
    passes_start, passes_end = auditor.forward.passes_start, auditor.forward.passes_end

    def before(module: torch.nn.Module, args: Any) -> None:
        # the first question is a constant while compiling, so that the others are not asked there
        if not torch.compiler.is_compiling() and not passes_start() and not _in_a_transform():
            auditor.on_forward_start(module, args)

    def after(module: torch.nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        # a forward that raised is reported without its keywords, whatever was asked for
        if not torch.compiler.is_compiling() and not passes_end() and not _in_a_transform():
            auditor.on_forward_end(module, (args, *kwargs_and_output[:-1]), kwargs_and_output[-1])

    handles = [
        nn_module.register_module_forward_pre_hook(before),
        nn_module.register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    ours = [handle.id for handle in handles]
    undos += [handle.remove for handle in handles]
    # torch leaves this entry behind, and from then on takes itself for hooked
    undos.append(lambda: nn_module._global_forward_hooks_with_kwargs.pop(ours[1], None))

    # a compiled module warns of global hooks, which it calls twice; gradaudit counts on nothing there
    def any_others(original: Any) -> Any:
        def call() -> bool:
            return any(key not in ours for hooks in _hook_tables() for key in hooks)

        return call

    _replace(nn_module, "_has_any_global_hook", any_others, undos)


def _hook_tables() -> tuple[Mapping[int, Any], ...]:
    return (
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_forward_hooks_always_called,
        nn_module._global_forward_hooks_with_kwargs,
        nn_module._global_backward_pre_hooks,
        nn_module._global_backward_hooks,
    )


def _in_a_transform() -> bool:
    """Whether modules are being compiled, traced or differentiated by torch.func: their tensors hold no values yet, or
    several at once, and must not escape."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _hook_optimizers(auditor: Auditor, undos: list[Undo]) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        given = [arg for arg in (*args, kwargs.get("closure")) if arg is not optimizer]  # torch passes self too
        has_closure = any(callable(arg) for arg in given)
        auditor.on_optimizer_start(optimizer, has_closure=has_closure)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        auditor.on_optimizer_end(optimizer)

    undos.append(optim_optimizer.register_optimizer_step_pre_hook(before).remove)
    undos.append(optim_optimizer.register_optimizer_step_post_hook(after).remove)


def _wrap_scalers(auditor: Auditor, undos: list[Undo]) -> None:
    base: Any = torch.amp.grad_scaler.GradScaler
    observers = _scaler_observers(auditor)
    depth = {"now": 0}  # an overriding method calls the one it overrides: only the outer call counts

    def outermost(original: Any, observe: Callable[..., Any]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if depth["now"]:
                return original(self, *args, **kwargs)
            depth["now"] += 1
            try:
                return observe(original, self, *args, **kwargs)
            finally:
                depth["now"] -= 1

        return call

    def wrap(cls: type) -> None:
        for name, observe in observers.items():
            if name in vars(cls):
                _replace(cls, name, functools.partial(outermost, observe=observe), undos)

    def wrap_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        wrap(cls)

    for cls in (base, *_subclasses(base)):
        wrap(cls)
    # FSDP's scaler is imported when it is first needed; another recording may be waiting behind this one
    outer = vars(base).get("__init_subclass__")
    base.__init_subclass__ = classmethod(wrap_subclass)
    undos.append(functools.partial(_restore_subclassing, base, outer))


def _restore_subclassing(base: Any, outer: Any) -> None:
    if outer is None:
        del base.__init_subclass__
    else:
        base.__init_subclass__ = outer


def _scaler_observers(auditor: Auditor) -> dict[str, Callable[..., Any]]:
    """By GradScaler method, what to do around it."""

    def scale(original: Any, self: Any, outputs: Any) -> Any:
        auditor.introduce(None, None, self)  # before the first scale() makes a fresh scaler look used
        scaled = original(self, outputs)
        auditor.on_scale(self, outputs, scaled)
        return scaled

    def unscale_(original: Any, self: Any, optimizer: Any) -> Any:
        with _Logged(auditor, auditor.on_unscale(self, optimizer)):
            return original(self, optimizer)

    def step(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with _Logged(auditor, auditor.on_scaler_step_start(self, optimizer)):
            try:
                result = original(self, optimizer, *args, **kwargs)
            except BaseException:
                auditor.on_scaler_step_end(self, optimizer, raised=True)
                raise
            auditor.on_scaler_step_end(self, optimizer, raised=False)
            return result

    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Logged(auditor, auditor.on_update(self, *args, **kwargs)):
            return original(self, *args, **kwargs)

    def load_state_dict(original: Any, self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        auditor.calls.on_load_state(self)
        return result

    def get_scale(original: Any, self: Any) -> Any:
        auditor.calls.on_get_scale(self)
        return original(self)

    def state_dict(original: Any, self: Any) -> Any:
        return original(self)  # asks for the scale: its doing, not the user's

    def __init__(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.apply_defaults()
        auditor.calls.on_scaler_made(self, requested=bool(given.arguments.get("enabled", True)))

    methods = (scale, unscale_, step, update, load_state_dict, get_scale, state_dict, __init__)
    return {observe.__name__: _unseen(observe) for observe in methods}


class _Logged:
    """Around a call of a scaler's: hands over the row of its event when it returns or raises."""

    __slots__ = ("_auditor", "_row")

    def __init__(self, auditor: Auditor, row: Any) -> None:
        self._auditor = auditor
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._auditor.calls.on_scaler_end(self._row, error)


def _subclasses(cls: Any) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [found for child in children for found in (child, *_subclasses(child))]


def _wrap_backward(auditor: Auditor, undos: list[Undo]) -> None:
    # Tensor.backward and both kinds of checkpointing go through this name
    def make(original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            started = auditor.on_backward_start(tensors)
            try:
                result = original(tensors, *args, **kwargs)
            except BaseException as error:
                auditor.on_backward_end(started, error)
                raise
            auditor.on_backward_end(started, None)
            return result

        return backward

    def make_grad(original: Any) -> Any:
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if _in_a_transform():
                return original(outputs, *args, **kwargs)
            create_graph = args[3] if len(args) > 3 else kwargs.get("create_graph", False)
            row = auditor.calls.on_grad_start(outputs, create_graph=bool(create_graph))
            try:
                results = original(outputs, *args, **kwargs)
            except BaseException as error:
                auditor.calls.on_grad_end(row, None, error)
                raise
            auditor.calls.on_grad_end(row, results, None)
            return results

        return grad

    _replace(torch.autograd, "backward", make, undos)
    _replace(torch.autograd, "grad", make_grad, undos)


def _wrap_clipping(auditor: Auditor, undos: list[Undo]) -> None:
    nested = {"depth": 0}  # some call others

    def clip(original: Any, *, name: str, limit_names: tuple[str, ...]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if nested["depth"]:
                return original(*args, **kwargs)
            args, kwargs, parameters = _listed(args, kwargs)
            limit = args[1] if len(args) > 1 else next((kwargs[n] for n in limit_names if n in kwargs), None)
            has_norm = name == "clip_grads_with_norm_"
            norm = (args[2] if len(args) > 2 else kwargs.get("total_norm")) if has_norm else None
            started = auditor.calls.on_clip_start(name, parameters, limit, norm)
            nested["depth"] += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                auditor.calls.on_clip_end(started, None, error)
                raise
            finally:
                nested["depth"] -= 1
            auditor.calls.on_clip_end(started, result, None)
            return result

        return call

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        make = functools.partial(clip, name=name, limit_names=("max_norm", "clip_value"))
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            if name in vars(owner):
                _replace(owner, name, make, undos)


def _listed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments with their parameters as a list where they could be gone through only once, and the parameters."""
    parameters = args[0] if args else kwargs.get("parameters")
    if not isinstance(parameters, Iterator):
        return args, kwargs, parameters
    listed = list(parameters)
    given = listed or (param for param in listed)  # torch warns of an empty generator, not of an empty list
    if args:
        return (given, *args[1:]), kwargs, listed
    return args, {**kwargs, "parameters": given}, listed


def _wrap_other_calls(auditor: Auditor, undos: list[Undo]) -> None:
    def zero_grad(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            auditor.on_zero_grad(self)
            return original(self, *args, **kwargs)

        return call

    def made(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            auditor.calls.on_optimizer_made(self)

        return call

    _replace(torch.optim.Optimizer, "zero_grad", zero_grad, undos)
    _replace(torch.optim.Optimizer, "__init__", made, undos)

    nested = {"depth": 0}  # schedulers made of schedulers step those

    def scheduler_step(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # constructors call it too, their own and that of a scheduler around them
            is_set_up = ("_last_lr" in vars(self) or "best" in vars(self)) and not getattr(self, "_is_initial", False)
            if is_set_up and not nested["depth"]:
                auditor.calls.on_optimizer_call("lr_scheduler.step", getattr(self, "optimizer", None))
            nested["depth"] += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                nested["depth"] -= 1

        return call

    schedulers = [cls for cls in vars(lr_scheduler).values() if inspect.isclass(cls) and "step" in vars(cls)]
    for cls in dict.fromkeys(schedulers):
        if issubclass(cls, lr_scheduler.LRScheduler):
            _replace(cls, "step", scheduler_step, undos)


def _wrap_autocast(auditor: Auditor, undos: list[Undo]) -> None:
    def made(original: Any) -> Any:
        def call(
            self: Any, device_type: Any, dtype: Any = None, enabled: Any = True, *args: Any, **kwargs: Any
        ) -> None:
            original(self, device_type, dtype, enabled, *args, **kwargs)
            if enabled and not self._enabled:
                auditor.calls.on_autocast_refused(self.device, str(self.fast_dtype).removeprefix("torch."))

        return call

    def enter(original: Any) -> Any:
        def call(self: Any) -> Any:
            auditor.on_autocast(self.device, str(self.fast_dtype).removeprefix("torch."), bool(self._enabled))
            return original(self)

        return call

    def leave(original: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            auditor.on_autocast_exit()
            return original(self, *args)

        return call

    _replace(torch.amp.autocast_mode.autocast, "__init__", made, undos)
    _replace(torch.amp.autocast_mode.autocast, "__enter__", enter, undos)
    _replace(torch.amp.autocast_mode.autocast, "__exit__", leave, undos)
