"""Offline documentation of a DSL, made from its installed packages: Markdown that an agent can read and search.

`build.py` is the way in. A process of its own imports the packages and looks at what a user of them would find
(`inspecting.py`); where a module cannot be imported its source is read instead (`parsing.py`); `rendering.py` turns
both into pages.
"""
