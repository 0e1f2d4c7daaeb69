"""Named sets of options, such as the values of a method's paper."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from foveakv.errors import MethodError


class Presets:
    """Mixin of methods with presets: `SnapKV.preset("paper", budget=0.2)`, and `preset=paper` on the command line."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Options by the name of the preset."""

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """Return a method with the options of a preset, overridden by `options`.

        Raises:
            MethodError: there is no such preset.
        """
        return cls(**{**cls.preset_options(name), **options})

    @classmethod
    def preset_options(cls, name: str) -> dict[str, Any]:
        """Return the options of a preset.

        Raises:
            MethodError: there is no such preset.
        """
        if name not in cls.presets:
            raise MethodError(f"{cls.__name__} has no preset {name!r}; choose one of {', '.join(cls.presets)}")
        return cls.presets[name]
