"""What a model keeps on its device: only while a call uses it, if asked for; and what each phase takes."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.training.memory.device_memory import DeviceMemory, real_peak
    from workers.training.memory.host_copies import HostCopies
    from workers.training.memory.phase_memory import PhaseMemory
    from workers.training.memory.residence import Residence

__all__ = ["DeviceMemory", "HostCopies", "PhaseMemory", "Residence", "real_peak"]

__getattr__ = lazy_names(__name__, __file__)
