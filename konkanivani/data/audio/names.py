"""File name suffixes of audio: the formats that libsndfile reads and those that need FFmpeg."""

from pathlib import PurePath

import soundfile

# Other common suffixes of libsndfile's formats.
OTHER_NAMES = (".aif", ".aifc", ".oga", ".opus", ".snd", ".sph")
RAW_NAMES = (".raw", ".txt", ".mat", ".mat4", ".mat5")  # no header, or usually not audio
USUAL_NAMES = (".wav", ".flac", ".mp3", ".ogg")  # preferred, see _ORDERED
# Written by phones, messengers, recorders and cameras; decoded by FFmpeg.
MEDIA_SUFFIXES = (
    *(".m4a", ".aac", ".mp4", ".m4b", ".m4p", ".m4r", ".m4v", ".mov", ".qt", ".3gp", ".3gpp", ".3g2", ".webm", ".weba"),
    *(".mkv", ".mka", ".ogv", ".ogx", ".spx", ".amr", ".awb", ".wma", ".wmv", ".asf", ".avi", ".divx", ".flv", ".f4v"),
    *(".f4a", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".vob", ".mp1", ".mp2", ".mpa", ".ac3", ".eac3", ".ec3", ".dts"),
    *(".mlp", ".thd", ".ape", ".wv", ".tta", ".tak", ".mpc", ".alac", ".shn", ".ra", ".rm", ".rmvb", ".gsm", ".dss"),
    *(".qcp", ".dsf", ".dff", ".oma", ".aa", ".aax", ".loas", ".latm", ".mxf"),
)
_KNOWN = tuple(f".{name.lower()}" for name in soundfile.available_formats())
# Common formats first: if a folder has a recording in several formats, the first of them is used.
_ORDERED = dict.fromkeys((*USUAL_NAMES, *OTHER_NAMES, *_KNOWN, *MEDIA_SUFFIXES))
AUDIO_SUFFIXES = tuple(suffix for suffix in _ORDERED if suffix not in RAW_NAMES)


def audio_rank(path: PurePath) -> int:
    """Return the index of the path's suffix in `AUDIO_SUFFIXES` (0: most common), or its length if it is not audio."""
    suffix = path.suffix.lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)
