"""Answers before a launch: does this training fit, how fast is it, what holds it up, what would change that. Needs no torch."""

from teraio.advice.advice import Advice, Answer, Fit, advise
from teraio.advice.what_if import Case

__all__ = [
    "Advice",
    "Answer",
    "Case",
    "Fit",
    "advise",
]
