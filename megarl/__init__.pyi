# Types of what megarl/__init__.py imports when it is asked for.
from megarl.library.calls import convert as convert
from megarl.library.calls import evaluate as eval
from megarl.library.calls import train as train
from megarl.library.run import Run as Run

__all__ = ["Run", "convert", "eval", "train"]
__version__: str
