"""Imported once by the process that lives are forked from (tests/faults/lives.py): all that training imports."""

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer
import torch
import torch.utils.tensorboard.summary

import konkanivani.recipe.train

torch.set_num_threads(1)  # a thread pool does not survive a fork

__all__ = ["konkanivani", "tensorboard", "torch"]
