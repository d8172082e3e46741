"""The library's module of a `config.json` on tensors without memory, and the model it shows.

Only classes that the installed library has are built: no code comes with a configuration, and
nothing is downloaded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from triptych.capture.model import model_of
from triptych.capture.record import record
from triptych.errors import ModelError
from triptych.model.model import Model

NAME = "triptych-capture"


def capture(config: Mapping[str, Any], name: str) -> Model:
    """The model of a configuration, read off one forward pass of its module.

    Raises ModelError with the reason if the library does not know the family or refuses the
    configuration, or if the module does something that no operator here stands for.
    """
    settings = copy.deepcopy(dict(config))  # the library writes into nested tables
    family = str(settings.pop("model_type", None))
    for key in ("dtype", "torch_dtype", "auto_map", "quantization_config"):
        settings.pop(key, None)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _module(family, settings)
            path, layers = _layers(model)
            trace = record(model, layers, path, _install)
    except ModelError:
        raise
    except Exception as error:  # whatever the library's own code raises
        first = str(error).strip().partition("\n")[0]
        raise ModelError(f"transformers {transformers.__version__} says {first!r}") from error
    finally:
        logging.disable(before)
    return model_of(trace, config, name)


def _module(family: str, settings: dict[str, Any]) -> nn.Module:
    if family not in transformers.CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__} does not know it either")
    config = transformers.AutoConfig.for_model(family, **settings)
    _install(_unused)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation=NAME,
        experts_implementation="batched_mm",
        trust_remote_code=False,
    )
    return model.train()


def _install(attend: Callable[..., Any]) -> None:
    transformers.AttentionInterface.register(NAME, attend)


def _unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("modules are called by a recorder")


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules with most parameters that is in no other list."""
    found = [
        (path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    outer = [(p, m) for p, m in found if not any(p.startswith(f"{o}.") for o, _ in found)]
    if not outer:
        raise ModelError("it has no list of layers")
    return max(outer, key=lambda pair: sum(w.numel() for w in pair[1].parameters()))
