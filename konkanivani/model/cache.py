"""What the decoder keeps between one token and the next, so that no token is computed twice.

B batch, K hypotheses an utterance, H heads, E head width, S encoder frames, U tokens that there is room for.
"""

from dataclasses import dataclass

import torch

# Room is made for so many tokens at first, and doubled whenever it is used up.
FIRST_ROOM = 32

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class DecoderCache:
    """Keys and values of B utterances with K hypotheses each, all of the same `length` in tokens.

    Those of the encoded frames stand once an utterance, however many hypotheses it has. Made by `Decoder.begin`,
    changed by `Decoder.step`, and part of no module: the model knows nothing of it.
    """

    self_kv: list[torch.Tensor]  # a block: keys and values (2, B, K, H, U, E)
    cross_kv: list[KeysAndValues]  # a block: (B, H, S, E)
    encoded_mask: torch.Tensor | None  # (B, 1, 1, S), True where a frame is valid
    tables: tuple[torch.Tensor, ...] = ()  # what the decoder tells the U positions by, such as cosines and sines
    length: int = 0

    @property
    def room(self) -> int:
        """Tokens that there is room for."""
        return self.self_kv[0].shape[4]

    def grow(self) -> None:
        """Room for one token more."""
        if self.length >= self.room:
            self.self_kv = [torch.cat([kept, torch.empty_like(kept)], dim=4) for kept in self.self_kv]

    def reorder(self, sources: torch.Tensor) -> None:
        """Hypothesis k of an utterance goes on from what was hypothesis sources[k] (B, K)."""
        beam = sources.shape[1]
        moved = (sources != torch.arange(beam, device=sources.device)).nonzero(as_tuple=True)
        if len(moved[0]) == 0:
            return
        utterances, places = moved
        for kept in self.self_kv:
            filled = kept[:, :, :, :, : self.length]
            filled[:, utterances, places] = filled[:, utterances, sources[moved]]

    def select(self, utterances: torch.Tensor) -> None:
        """Only these utterances (B',), by their places, go on."""
        self.self_kv = [kept.index_select(1, utterances) for kept in self.self_kv]
        self.cross_kv = [
            (keys.index_select(0, utterances), values.index_select(0, utterances)) for keys, values in self.cross_kv
        ]
        if self.encoded_mask is not None:
            self.encoded_mask = self.encoded_mask.index_select(0, utterances)
