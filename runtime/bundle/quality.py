"""What quantization has cost a model, as its bundle records it, and in a sentence."""

from __future__ import annotations

from runtime.arrays.stored import Record

HURT_NATS = 0.25
"""KL divergence per token from which the base counts as hurt: 4 bits rounded to the nearest are 0.3
to 0.6 from a model of 100 to 300 million parameters, calibrated ones 0.1 to 0.2."""


class Quality(Record, frozen=True):
    """How far a bundle's next-token predictions are from those of its checkpoint.

    divergence: the mean KL(checkpoint || bundle) of the distributions. source_loss, loss: the mean
    cross-entropies of checkpoint and bundle. All three are in nats per token, over `tokens` tokens
    in `rows` rows of `text`.
    """

    divergence: float
    source_loss: float
    loss: float
    tokens: int
    rows: int
    text: str

    @property
    def is_hurt(self) -> bool:
        """Whether quantization has changed the model so much that training should start better."""
        return self.divergence >= HURT_NATS

    def describe(self) -> str:
        """One sentence for people."""
        return (
            f"loss {self.loss:.3f}, the checkpoint's {self.source_loss:.3f}; KL divergence from it "
            f"{self.divergence:.3f} nats per token, on {self.tokens} tokens of {self.text}"
        )

    def warning(self) -> str:
        """What to do about a hurt base; empty if it is not hurt."""
        if not self.is_hurt:
            return ""
        lost = self.loss - self.source_loss
        loss = f", and its loss is {lost:.2f} nats higher" if lost > 0 else ""
        return (
            f"quantization has hurt this base: its predictions are {self.divergence:.2f} nats per "
            f"token (KL divergence) from the checkpoint's{loss}; export it again with --calibrate "
            "DATA, such as your training file, or with --bits 8"
        )
