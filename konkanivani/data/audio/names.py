"""The endings by which files of sound are told from others, those that libsndfile knows and those that need FFmpeg."""

from pathlib import PurePath

import soundfile

# Names that libsndfile's formats go by beside their own.
OTHER_NAMES = (".aif", ".aifc", ".oga", ".opus", ".snd", ".sph")
RAW_NAMES = (".raw", ".txt", ".mat", ".mat4", ".mat5")  # no header, or mostly something else
USUAL_NAMES = (".wav", ".flac", ".mp3", ".ogg")  # looked for first
# What phones, messengers, recorders and cameras write.
MEDIA_SUFFIXES = (
    *(".m4a", ".aac", ".mp4", ".m4b", ".m4p", ".m4r", ".m4v", ".mov", ".qt", ".3gp", ".3gpp", ".3g2", ".webm", ".weba"),
    *(".mkv", ".mka", ".ogv", ".ogx", ".spx", ".amr", ".awb", ".wma", ".wmv", ".asf", ".avi", ".divx", ".flv", ".f4v"),
    *(".f4a", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".vob", ".mp1", ".mp2", ".mpa", ".ac3", ".eac3", ".ec3", ".dts"),
    *(".mlp", ".thd", ".ape", ".wv", ".tta", ".tak", ".mpc", ".alac", ".shn", ".ra", ".rm", ".rmvb", ".gsm", ".dss"),
    *(".qcp", ".dsf", ".dff", ".oma", ".aa", ".aax", ".loas", ".latm", ".mxf"),
)
_KNOWN = tuple(f".{name.lower()}" for name in soundfile.available_formats())
# The better known first: where a recording lies there in several kinds, that is the one to take.
_ORDERED = dict.fromkeys((*USUAL_NAMES, *OTHER_NAMES, *_KNOWN, *MEDIA_SUFFIXES))
AUDIO_SUFFIXES = tuple(suffix for suffix in _ORDERED if suffix not in RAW_NAMES)


def audio_rank(path: PurePath) -> int:
    """How well known the path's ending is, 0 the best; the last where it is no sound's."""
    suffix = path.suffix.lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)
