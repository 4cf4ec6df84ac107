"""What this machine has for training with teraio, and what it lacks: tried and measured, not guessed."""

from teraio.doctor.examination import Examination, Finding, Verdict, examine
from teraio.doctor.measured_machine import measured_machine
