"""Settings of the network that recipes share. Loads no torch."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from samebits.config.schema import Settings
from samebits.recipes.listing import nearest_fix

TIMM = "timm/NAME: a network of timm, whose feature maps are merged at 1/4 of the image"


class NetworkConfig(Settings):
    """A network by name, with frozen parts."""

    #: Names of the recipe's own networks, and prefixes of those of libraries.
    KNOWN: ClassVar[tuple[str, ...]] = ()
    LIBRARIES: ClassVar[tuple[str, ...]] = ("timm/",)

    name: str
    freeze: Literal["backbone"] | tuple[str, ...] = Field(
        default=(),
        description="Parameters that are not trained: backbone (all but the head), or patterns: [conv1, layer1.*].",
    )

    @property
    def is_timm(self) -> bool:
        """Whether the network is one of timm."""
        return self.name.startswith("timm/")

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name in cls.KNOWN or name.startswith(cls.LIBRARIES):
            return name
        fix = nearest_fix(name, cls.KNOWN, f"Use model.name={cls.KNOWN[0]}.", "Use model.name={}.")
        raise ValueError(f"must be one of the names below; fix: {fix}")

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "backbone":
            return (value,)
        return tuple(value) if isinstance(value, list) else value
