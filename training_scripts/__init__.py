"""Package entry for `python3 -m training_scripts.transcribe`: makes the scripts' own folder importable."""

import os
import sys

# A script run by its path has this folder first on sys.path; with -m Python puts the working directory there, and
# `import bootstrap` fails.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
