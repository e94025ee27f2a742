"""Where the agent works: a Harbor environment made with bubblewrap, and one without isolation for prepared turns.

daemon.py     runs inside: starts commands, feeds and reads them, is the sandbox's PID 1
channel.py    the host's end of the daemon's socket
limits.py     processor and memory limits, as strong as the host allows
runtime.py    the Python and the packages that are visible inside
command.py    the bubblewrap command line
local.py      what both environments share: files in and out, commands, the start and the end
bubblewrap.py, host.py    the two environments
"""
