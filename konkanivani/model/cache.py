"""Key-value cache of the decoder, so that no token is computed twice.

B batch, K hypotheses of an utterance, H heads, E head width, S encoder frames, U capacity in tokens.
"""

from dataclasses import dataclass

import torch

# Initial capacity in tokens; doubled whenever it is used up.
FIRST_ROOM = 32

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class DecoderCache:
    """Keys and values of B utterances with K hypotheses each, all of the same `length` in tokens.

    Keys and values of encoded frames are stored once per utterance and shared by its hypotheses. The decoder
    creates and updates it; it is not part of any module's state.
    """

    self_kv: list[torch.Tensor]  # per block: keys and values (2, B, K, H, U, E)
    cross_kv: list[KeysAndValues]  # per block: (B, H, S, E) each
    encoded_mask: torch.Tensor | None  # (B, 1, 1, S), True where a frame is valid
    tables: tuple[torch.Tensor, ...] = ()  # position tables of U positions, such as cosines and sines
    length: int = 0

    @property
    def room(self) -> int:
        """Capacity in tokens."""
        return self.self_kv[0].shape[4]

    def grow(self) -> None:
        """Double the capacity if there is none left for another token."""
        if self.length >= self.room:
            self.self_kv = [torch.cat([kept, torch.empty_like(kept)], dim=4) for kept in self.self_kv]

    def reorder(self, sources: torch.Tensor) -> None:
        """Replace hypothesis k of each utterance by its former hypothesis sources[k]; sources (B, K)."""
        beam = sources.shape[1]
        moved = (sources != torch.arange(beam, device=sources.device)).nonzero(as_tuple=True)
        if len(moved[0]) == 0:
            return
        utterances, places = moved
        for kept in self.self_kv:
            # Copy only the filled part, and only of hypotheses that move.
            filled = kept[:, :, :, :, : self.length]
            filled[:, utterances, places] = filled[:, utterances, sources[moved]]

    def select(self, utterances: torch.Tensor) -> None:
        """Keep only the utterances with these indices (B',)."""
        self.self_kv = [kept.index_select(1, utterances) for kept in self.self_kv]
        self.cross_kv = [
            (keys.index_select(0, utterances), values.index_select(0, utterances)) for keys, values in self.cross_kv
        ]
        if self.encoded_mask is not None:
            self.encoded_mask = self.encoded_mask.index_select(0, utterances)
