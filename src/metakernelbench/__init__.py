"""MetaKernelBench: does what one attempt at a GPU kernel learned help a fresh attempt in another kernel DSL?

Folders follow the work, in this order: `problems` and `dsls` pose, `grading` and `judging` grade, `attempts`,
`experiments` and `store` run, `analysis` and `report` read, `cli` is the command line over all of them. Imports point
from the end of that list towards its beginning, never the other way (`tests/test_layers.py` holds us to it).
"""

__version__ = "0.1.0"
