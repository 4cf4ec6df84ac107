"""What each iteration of a run took: as data, as a line on the terminal, in files."""

from teraio.watching.csv_file import CsvWriter, read_csv
from teraio.watching.history import History
from teraio.watching.live import LiveLine
from teraio.watching.stats import IterationStats, Stats
from teraio.watching.tensorboard import TensorBoardWriter

__all__ = ["CsvWriter", "History", "IterationStats", "LiveLine", "Stats", "TensorBoardWriter", "read_csv"]
