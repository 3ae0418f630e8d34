"""Long axes in chunks: what is done for each position alone need not be there for all positions at once.

An utterance of up to CHUNK_FRAMES encoder frames is run in one piece, as fast as it goes. Beyond that, subsampling,
the heads and CTC take it chunk by chunk, each recomputed in the backward pass, so that no more than one chunk's inner
tensors exist at a time (Chen et al., 2016). The choice depends on shapes alone, so it is the same on every machine.
"""

CHUNK_FRAMES = 1500  # encoder frames, or tokens: a minute of speech
SMALL_CHUNK_FRAMES = 100  # four seconds: where memory has run out
