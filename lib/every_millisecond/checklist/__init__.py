"""What to do with your own model on this machine, in the order of what it should gain: `llm-latency diagnose`."""

from every_millisecond.checklist.advice import ITEMS, MEASURED, NOT_HERE, PREDICTED, Advice, Item
from every_millisecond.checklist.diagnosis import Diagnosis, Stage, diagnose

__all__ = ["ITEMS", "MEASURED", "NOT_HERE", "PREDICTED", "Advice", "Diagnosis", "Item", "Stage", "diagnose"]
