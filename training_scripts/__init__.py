"""Lets `python3 -m training_scripts.transcribe` find what its scripts import from their own folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
