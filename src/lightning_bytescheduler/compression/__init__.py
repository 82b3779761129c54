"""What travels instead of fp32, and how it is read again: compressors and wire formats.

Pure: no Lightning, no process groups. Parts are flat tensors, on any device.
"""

from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.compression.feedback import ErrorFeedback, NesterovMomentum
from lightning_bytescheduler.compression.registry import COMPRESSORS, make_compressor
from lightning_bytescheduler.compression.wire_format import WireFormat

__all__ = ["COMPRESSORS", "Compressor", "ErrorFeedback", "NesterovMomentum", "WireFormat", "make_compressor"]
