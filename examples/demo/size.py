"""Dimensions of the demo's model."""

from __future__ import annotations

from dataclasses import dataclass

# ASCII. Source code is little else; see `examples.demo.text`.
VOCABULARY = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTSize:
    """Dimensions of a `CharacterGPT`.

    Args:
        context: Characters the model sees at once.
        width: Size of the representation of a character.
        heads: Attention heads; they divide ``width``.
        layers: Transformer blocks.
    """

    context: int
    width: int
    heads: int
    layers: int

    def __post_init__(self) -> None:
        if self.width % self.heads != 0:
            raise ValueError(f"heads must divide width: {self.width} is not a multiple of {self.heads}.")


# 4.8 million parameters, 19 MB of gradients: on one core, a step of eight windows takes a few tenths of a
# second, and a link of some hundred Mbit/s needs as long for the gradients.
SMALL = GPTSize(context=128, width=256, heads=8, layers=6)
# To try the demo itself.
TINY = GPTSize(context=32, width=32, heads=2, layers=2)
